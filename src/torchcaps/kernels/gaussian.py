"""The terms ``1 / 2σ²`` and ``Σ log σ`` of the log density of a Gaussian, computed by PyTorch operations.

The C++ kernels compute these terms together with the moments of the votes. Separate operations would take a tenth as
long as the moments.
"""

import torch
from torch import Tensor


def gaussian_terms(variance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return the half precision ``1 / 2σ²`` and the log volume ``Σ log σ``, with ``σ² = variance + floor``.

    Arguments:
        variance: ``[B, P, J, R, N]``.
        floor: constant added to all variances.
    """
    variance = variance + floor
    return 0.5 / variance, 0.5 * variance.log().sum(dim=(3, 4))


def gaussian_terms_backward(
    variance: Tensor,
    floor: float,
    variance_grad: Tensor | None,
    half_precision_grad: Tensor | None,
    log_volume_grad: Tensor | None,
) -> Tensor:
    """Return ``variance_grad + h (log_volume_grad - 2 h half_precision_grad)``, with ``h = 1 / 2σ²``."""
    half_precision = 0.5 / (variance + floor)
    grad = torch.zeros_like(variance) if variance_grad is None else variance_grad
    if half_precision_grad is not None:
        grad = grad - 2 * half_precision.square() * half_precision_grad
    if log_volume_grad is not None:
        grad = grad + half_precision * log_volume_grad[..., None, None]
    return grad.contiguous()
