"""Terms of the log density of a Gaussian, computed by PyTorch operations. The C++ kernels compute them themselves."""

import torch
from torch import Tensor


def log_volume(variance: Tensor, floor: float) -> Tensor:
    """Return ``Σ log σ`` over the elements of a vote ``[B, P, J, R, N]``, with ``σ² = variance + floor``.

    σ² is at least the smallest normal number; below this number, it has the gradient 0.
    """
    return 0.5 * (variance + floor).clamp_min(torch.finfo(variance.dtype).tiny).log().sum(dim=(3, 4))


def half_precision(variance: Tensor, floor: float | Tensor, inverse_temperature: float | Tensor) -> Tensor:
    """Return ``inverse_temperature / 2σ²``, with ``σ² = variance + floor``.

    Numbers and tensors give the same bits, so that a backward pass computes the same logits as the forward pass.
    """
    return (variance + floor).reciprocal() * (0.5 * inverse_temperature)
