"""The terms ``1 / 2σ²`` and ``Σ log σ`` of the log density of a Gaussian, computed by PyTorch operations.

The C++ kernels compute these terms together with the moments of the votes. Separate operations would take a tenth as
long as the moments.
"""

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
    half_precision: Tensor, half_precision_grad: Tensor | None, log_volume_grad: Tensor | None
) -> Tensor:
    """Return the gradient of the variance, ``h (log_volume_grad - 2 h half_precision_grad)`` with ``h = 1 / 2σ²``."""
    grad = half_precision.new_zeros(())
    if half_precision_grad is not None:
        grad = -2 * half_precision * half_precision_grad
    if log_volume_grad is not None:
        grad = grad + log_volume_grad[..., None, None]
    return half_precision * grad
