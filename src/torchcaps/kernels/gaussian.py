"""The terms ``1 / 2σ²`` and ``Σ log σ`` of the log density of a Gaussian, computed by one kernel.

Separate PyTorch operations would slow routing down: they would take a tenth as long as a whole call of `Votes.moments`.
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps.kernels import cpu_kernel, once
from torchcaps.kernels.memory import addresses, empty, has_strides, scalar_strides, vector_strides
from torchcaps.kernels.operator import differentiate, operator


def written_out(variance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return ``1 / 2σ²`` and ``Σ log σ`` with ``σ² = variance + floor``, computed by separate PyTorch operations.

    Arguments:
        variance: ``[B, P, J, R, N]``.
        floor: constant added to all variances.
    """
    variance = variance + floor
    return 0.5 / variance, 0.5 * variance.log().sum(dim=(3, 4))


def _strides(variance: Tensor) -> tuple[Any, Any]:
    """Return the strides for a vector per parent and for a number per parent, in the layout of `variance`."""
    by_sample = has_strides(variance, vector_strides(variance.shape, True))
    return vector_strides(variance.shape, by_sample), scalar_strides(variance.shape, by_sample)


def _call(name: str, variance: Tensor, floor: float, grads: list[Any], outputs: tuple[Tensor, ...]) -> None:
    shape, vectors = variance.shape, outputs[0].stride()
    scalars = scalar_strides(shape, vectors[0] == 1)
    lanes, numbers = shape[0] if vectors[0] == 1 else shape[2], shape[3] * shape[4]
    sites = variance.numel() // max(1, lanes * numbers)
    keep, places = list[Tensor](), list[Any]([("variance", variance, shape, vectors)])
    if grads:
        places += [("half_precision_grad", grads[0], shape, vectors), ("log_volume_grad", grads[1], shape[:3], scalars)]
    given = addresses(variance.dtype, places, keep)
    sizes = sites, numbers, lanes, torch.get_num_threads()
    cpu_kernel(name, variance.dtype)(sizes, floor, given + [output.data_ptr() for output in outputs])


def _like_gaussian(variance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    if variance.device.type != "cpu":
        return torch.empty_like(variance), variance.new_empty(variance.shape[:3])
    vectors, scalars = _strides(variance)
    return empty(variance, variance.shape, vectors), empty(variance, variance.shape[:3], scalars)


@operator(_like_gaussian, written_out)
def gaussian(variance: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return ``1 / 2σ²`` and ``Σ log σ`` with ``σ² = variance + floor``, like `written_out`."""
    outputs = _like_gaussian(variance, floor)
    _call("gaussian", variance, floor, [], outputs)
    return outputs


def _like_gaussian_backward(
    variance: Tensor, floor: float, half_precision_grad: Tensor | None, log_volume_grad: Tensor | None
) -> Tensor:
    return _like_gaussian(variance, floor)[0]


def _on_gpu(
    variance: Tensor, floor: float, half_precision_grad: Tensor | None, log_volume_grad: Tensor | None
) -> Tensor:
    half_precision = 0.5 / (variance + floor)
    grad = torch.zeros_like(variance) if half_precision_grad is None else -2 * half_precision * half_precision_grad
    return half_precision * (grad if log_volume_grad is None else grad + log_volume_grad[..., None, None])


@operator(_like_gaussian_backward, _on_gpu)
def gaussian_backward(
    variance: Tensor, floor: float, half_precision_grad: Tensor | None, log_volume_grad: Tensor | None
) -> Tensor:
    """Return the gradient of `variance`, ``h (log_volume_grad - 2 h half_precision_grad)``.

    ``h = 1 / 2σ²`` is the half precision, with ``σ² = variance + floor``.
    """
    output = _like_gaussian(variance, floor)[0]
    _call("gaussian_backward", variance, floor, [half_precision_grad, log_volume_grad], (output,))
    return output


def _keep(ctx, inputs, output) -> None:
    variance, ctx.floor = inputs
    ctx.save_for_backward(variance)
    ctx.set_materialize_grads(False)


def _backward(ctx, half_precision_grad, log_volume_grad):
    (variance,) = ctx.saved_tensors
    if half_precision_grad is None and log_volume_grad is None:
        return None, None
    return gaussian_backward(variance, ctx.floor, half_precision_grad, log_volume_grad), None


differentiate("gaussian", _backward, _keep)
differentiate("gaussian_backward", once)
