"""How an operator of this library is defined."""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["differentiate", "operator"]

_library = torch.library.Library("torchcaps", "DEF")


def operator(like: Callable[..., Any], on_gpu: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Defines the operator ``torchcaps::NAME`` by the function of that name, which runs on the CPU.

    Lighter than `torch.library.custom_op`, whose checks take longer than the kernels do on one image.

    Arguments:
        like: gives empty outputs.
        on_gpu: the same on a GPU.
    """

    def define(on_cpu: Callable[..., Any]) -> Any:
        name = on_cpu.__name__
        _library.define(name + torch.library.infer_schema(on_cpu, mutates_args=()))
        _library.impl(name, on_cpu, "CPU")
        _library.impl(name, on_gpu, "CUDA")
        torch.library.register_fake(f"torchcaps::{name}", like, lib=_library)
        return getattr(torch.ops.torchcaps, name).default

    return define


def differentiate(name: str, backward: Callable[..., Any], keep: Callable[..., Any] | None = None) -> None:
    """Gives an operator its gradient; see `torch.library.register_autograd`."""
    torch.library.register_autograd(f"torchcaps::{name}", backward, setup_context=keep, lib=_library)
