"""Definition of this library's PyTorch operators."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.checks import is_compiling

__all__ = ["PLAIN", "differentiate", "needs_the_dispatcher", "operator", "pose_of", "refuse_batched"]

_library = torch.library.Library("torchcaps", "DEF")

PLAIN = frozenset({Tensor, nn.Parameter})
_ORDINARY = PLAIN | {type(None), bool, int, float, list, tuple}


def needs_the_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Return whether a compiler, a mode, torch.func, a profiler or a Tensor subclass must intercept the call.

    This is also true for a device that is neither a CPU nor a CUDA GPU.
    """
    return (
        is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or not _ORDINARY.issuperset(map(type, arguments))
        or not all(_ORDINARY.issuperset(map(type, x)) for x in arguments if isinstance(x, list | tuple))
        or pose_of(arguments).device.type not in ("cpu", "cuda")
    )


def pose_of(arguments: tuple[Any, ...]) -> Tensor:
    """Return the pose, which is the first tensor among the arguments of an operator."""
    return arguments[0] if isinstance(arguments[0], Tensor) else arguments[1]


def _is_differentiated(arguments: tuple[Any, ...]) -> bool:
    """Return whether the output of a call needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    tensors = (x for argument in arguments for x in (argument if isinstance(argument, list | tuple) else (argument,)))
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def operator(like: Callable[..., Any], on_gpu: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that defines an operator from a CPU function. A function f defines ``torchcaps::f``.

    A call through PyTorch's dispatcher and `torch.library` takes longer than the kernels need for one image. If nothing
    needs the dispatcher and the output needs no gradient, the function for the device is called directly. The attribute
    ``direct`` of the operator is a function that never uses the dispatcher.

    Arguments:
        like: function for fake tensors. It takes the arguments of the operator and returns uninitialised outputs.
        on_gpu: implementation for CUDA. It has an argument ``direct``: whether the call is not from the dispatcher.
    """

    def define(on_cpu: Callable[..., Any]) -> Any:
        name = on_cpu.__name__
        _library.define(name + torch.library.infer_schema(on_cpu, mutates_args=()))
        _library.impl(name, on_cpu, "CPU")
        _library.impl(name, on_gpu, "CUDA")
        torch.library.register_fake(f"torchcaps::{name}", like, lib=_library)
        dispatched = getattr(torch.ops.torchcaps, name).default

        def direct(*arguments: Any) -> Any:
            return on_cpu(*arguments) if pose_of(arguments).is_cpu else on_gpu(*arguments, direct=True)

        @wraps(on_cpu)
        def call(*arguments: Any) -> Any:
            indirect = needs_the_dispatcher(arguments) or _is_differentiated(arguments)
            return (dispatched if indirect else direct)(*arguments)

        call.direct = direct  # type: ignore[attr-defined]
        return call

    return define


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
        refuse_batched(gradients)
        return backward(ctx, *gradients)

    torch.library.register_autograd(f"torchcaps::{name}", unbatched, setup_context=keep, lib=_library)


def refuse_batched(gradients: Sequence[Any]) -> None:
    """Check that no gradient is a batch of tensors in vmap or in ``torch.autograd.grad(is_grads_batched=True)``."""
    functorch = torch._C._functorch
    for x in gradients:
        if isinstance(x, Tensor) and (functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)):
            raise RuntimeError('fused routing does not support batched gradients: use backend="reference"')
