"""Definition of this library's PyTorch operators."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PLAIN", "differentiate", "operator"]

_library = torch.library.Library("torchcaps", "DEF")


PLAIN = (Tensor, nn.Parameter)


def _needs_the_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Return whether autograd, a compiler, a dispatch mode, a profiler or a Tensor subclass must intercept the call."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or any(isinstance(x, Tensor) and not (type(x) in PLAIN and x.is_cpu) for x in arguments)
    )


def operator(like: Callable[..., Any], on_gpu: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that defines an operator from a CPU function. A function f defines ``torchcaps::f``.

    Calling the operator has less overhead than calling a `torch.library.custom_op`, whose checks take longer than the
    kernels need for one image. If nothing needs PyTorch's dispatcher, the CPU function is called directly, which has
    even less overhead.

    Arguments:
        like: function for fake tensors. It takes the arguments of the operator and returns uninitialised outputs.
        on_gpu: implementation for CUDA.
    """

    def define(on_cpu: Callable[..., Any]) -> Any:
        name = on_cpu.__name__
        _library.define(name + torch.library.infer_schema(on_cpu, mutates_args=()))
        _library.impl(name, on_cpu, "CPU")
        _library.impl(name, on_gpu, "CUDA")
        torch.library.register_fake(f"torchcaps::{name}", like, lib=_library)
        dispatched = getattr(torch.ops.torchcaps, name).default

        @wraps(on_cpu)
        def call(*arguments: Any) -> Any:
            return (dispatched if _needs_the_dispatcher(arguments) else on_cpu)(*arguments)

        return call

    return define


def _is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is a batch of tensors in vmap or in ``torch.autograd.grad(is_grads_batched=True)``."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def differentiate(name: str, backward: Callable[..., Any], keep: Callable[..., Any] | None = None) -> None:
    """Register the gradient of an operator.

    Arguments:
        name: name of the operator, without the namespace.
        backward: function that takes the context and the gradients of the outputs, and returns the gradients of the
            inputs.
        keep: function that takes the context, the inputs and the output of the operator. It saves in the context what
            ``backward`` needs.
    """

    def unbatched(ctx: Any, *gradients: Any) -> Any:
        if any(isinstance(x, Tensor) and _is_batched(x) for x in gradients):
            raise RuntimeError('fused routing does not support batched gradients; use backend="reference"')
        return backward(ctx, *gradients)

    torch.library.register_autograd(f"torchcaps::{name}", unbatched, setup_context=keep, lib=_library)
