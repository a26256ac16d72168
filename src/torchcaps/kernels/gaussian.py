"""Terms of the log density of a Gaussian, computed by PyTorch operations. The kernels compute them themselves."""

import torch
from torch import Tensor


def log_volume(variance: Tensor, floor: float) -> Tensor:
    """Return ``Σ log σ`` over the elements of a vote ``[B, P, J, R, N]``, with ``σ² = variance + floor``.

    σ² is at least the smallest normal number; below this number, it has the gradient 0.
    """
    return 0.5 * (variance + floor).clamp_min(torch.finfo(variance.dtype).tiny).log().sum(dim=(3, 4))


def half_precision(variance: Tensor, floor: float, inverse_temperature: float) -> Tensor:
    """Return ``inverse_temperature / 2σ²``, with ``σ² = variance + floor``."""
    return (variance + floor).reciprocal() * (0.5 * inverse_temperature)
