"""Definition of this library's PyTorch operators."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PLAIN", "differentiate", "operator"]

_library = torch.library.Library("torchcaps", "DEF")
_eager: dict[str, type[torch.autograd.Function]] = {}

PLAIN = frozenset({Tensor, nn.Parameter})
_ORDINARY = PLAIN | {type(None), bool, int, float, list, tuple}


def _needs_the_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Return whether a compiler, a mode, torch.func, a profiler, a Tensor subclass or a GPU must intercept the call.

    The pose, which is the first tensor among the arguments, decides about the device.
    """
    kinds = {*map(type, arguments)}
    if list in kinds or tuple in kinds:
        kinds.update(kind for x in arguments if type(x) is list or type(x) is tuple for kind in map(type, x))
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
        or not _ORDINARY.issuperset(kinds)
        or not (arguments[0] if isinstance(arguments[0], Tensor) else arguments[1]).is_cpu
    )


def _is_differentiated(arguments: tuple[Any, ...]) -> bool:
    """Return whether the output of a call needs a gradient."""
    if not torch.is_grad_enabled():
        return False
    tensors = (x for argument in arguments for x in (argument if isinstance(argument, list | tuple) else (argument,)))
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def operator(like: Callable[..., Any], on_gpu: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that defines an operator from a CPU function. A function f defines ``torchcaps::f``.

    A call through PyTorch's dispatcher and `torch.library` takes longer than the kernels need for one image. If nothing
    needs the dispatcher, the CPU function is called directly, or inside a `torch.autograd.Function` if the output needs
    a gradient.

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
            if _needs_the_dispatcher(arguments):
                return dispatched(*arguments)
            if not _is_differentiated(arguments):
                return on_cpu(*arguments)
            if name not in _eager:
                return dispatched(*arguments)
            if isinstance(arguments[0], list | tuple):
                return _eager[name].apply(on_cpu, len(arguments[0]), *arguments[0], *arguments[1:])
            return _eager[name].apply(on_cpu, None, *arguments)

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
    if keep is not None:
        _eager[name] = _function(unbatched, keep)


def _function(backward: Callable[..., Any], keep: Callable[..., Any]) -> type[torch.autograd.Function]:
    """Return a `torch.autograd.Function` that takes the CPU function and the arguments of an operator.

    If the first argument of the operator is a list of tensors, the function takes its length and its tensors instead.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, on_cpu: Callable[..., Any], listed: int | None, *arguments: Any) -> Any:
            ctx.listed = listed
            if listed is not None:
                arguments = [*arguments[:listed]], *arguments[listed:]
            output = on_cpu(*arguments)
            keep(ctx, arguments, output)
            ctx.returns_list = isinstance(output, list)
            return tuple(output) if ctx.returns_list else output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            found = backward(ctx, gradients) if ctx.returns_list else backward(ctx, *gradients)
            return None, None, *(found if ctx.listed is None else (*found[0], *found[1:]))

    return Eager
