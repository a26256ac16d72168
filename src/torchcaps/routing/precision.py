"""The dtype of the computation, and autocast."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchcaps.checks import is_compiling


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that switches autocast off. The meta device has no autocast."""
    kind = device.type
    if is_compiling():  # PyTorch 2.11 cannot compile is_autocast_available
        # An exported graph must contain the context, because it may later run under autocast.
        return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
    needed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if needed else nullcontext()


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to a dtype, like ``tensor.to(dtype)`` but faster if the tensor already has the dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
