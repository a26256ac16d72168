"""What Gaussians make of their variances, in one step: operation by operation it takes as long as a tenth of a pass."""

import torch
from torch import Tensor

from torchcaps.kernels import addresses, cpu_kernel, once
from torchcaps.kernels.operator import differentiate, operator


def written_out(variance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """``1 / 2σ²`` and ``Σ log σ`` of ``[B, P, J, R, N]``, with ``σ² = variance + floor``."""
    variance = variance + floor
    return 0.5 / variance, 0.5 * variance.log().sum(dim=(3, 4))


def _like_gaussian(variance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(variance), variance.new_empty(variance.shape[:3])


@operator(_like_gaussian, written_out)
def gaussian(variance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """As `written_out`."""
    variance = variance.contiguous()
    half_precision, log_volume = outputs = _like_gaussian(variance, floor)
    shapes, keep = {"variance": (variance, variance.shape)}, list[Tensor]()
    pointers = [*addresses(variance.dtype, shapes, keep), half_precision.data_ptr(), log_volume.data_ptr()]
    sizes = log_volume.numel(), variance.shape[3:].numel()
    cpu_kernel("gaussian", variance.dtype)(*sizes, floor, torch.get_num_threads(), pointers)
    return outputs


def _like_gaussian_backward(half_precision: Tensor, half_precision_grad: Tensor, log_volume_grad: Tensor) -> Tensor:
    return torch.empty_like(half_precision)


def _on_gpu(half_precision: Tensor, half_precision_grad: Tensor, log_volume_grad: Tensor) -> Tensor:
    return half_precision * (log_volume_grad[..., None, None] - 2 * half_precision * half_precision_grad)


@operator(_like_gaussian_backward, _on_gpu)
def gaussian_backward(half_precision: Tensor, half_precision_grad: Tensor, log_volume_grad: Tensor) -> Tensor:
    """The gradient of the variance, ``half_precision (log_volume_grad - 2 half_precision half_precision_grad)``."""
    output, keep = torch.empty_like(half_precision), list[Tensor]()
    shape = half_precision.shape
    given = {
        "half_precision": (half_precision, shape),
        "half_precision_grad": (half_precision_grad, shape),
        "log_volume_grad": (log_volume_grad, shape[:3]),
    }
    pointers = [*addresses(half_precision.dtype, given, keep), output.data_ptr()]
    sizes = shape[:3].numel(), shape[3:].numel()
    cpu_kernel("gaussian_backward", half_precision.dtype)(*sizes, torch.get_num_threads(), pointers)
    return output


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[0])


def _backward(ctx, half_precision_grad, log_volume_grad):
    (half_precision,) = ctx.saved_tensors
    return gaussian_backward(half_precision, half_precision_grad, log_volume_grad), None


differentiate("gaussian", _backward, _keep)
differentiate("gaussian_backward", once)
