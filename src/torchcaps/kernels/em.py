"""EM routing as one operator that keeps no votes; `torchcaps.routing.em` is its specification."""

import torch
from torch import Tensor

from torchcaps.kernels import _cpu, arrays, expect_one_device, filled, once, padded, statistics_dtype


@torch.library.custom_op("torchcaps::em_routing", mutates_args=(), device_types="cpu")
def em_routing(
    pose: Tensor,
    activation: Tensor,
    transform: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    edges: Tensor,
    parent_sites: int,
    inverse_temperatures: list[float],
    variance_floor: float,
    mean_data: float,
    mixing: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, activation, and what the backward pass needs: every pass's fit, and the children's log-sums."""
    outputs = _empty(pose, activation, transform, beta_u, beta_a, edges, parent_sites, inverse_temperatures)
    inputs = (pose, activation, transform, beta_u, beta_a, edges, pose.new_tensor(inverse_temperatures))
    options = (variance_floor, mean_data, mixing, torch.get_num_threads())
    _cpu.em_forward(*arrays(*inputs), *options, *filled(*outputs))
    return outputs


@em_routing.register_kernel("cuda")
def _(*arguments):
    from torchcaps.kernels.gpu import em

    return em.forward(*arguments)


@em_routing.register_fake
def _empty(pose, activation, transform, beta_u, beta_a, edges, parent_sites, inverse_temperatures, *_):
    expect_one_device(pose, edges)
    batch, sites, types, rows, _ = pose.shape
    parent_types, columns, passes = transform.shape[2], transform.shape[4], len(inverse_temperatures)
    kept = parent_sites * padded(parent_types, pose) * (2 * rows * columns + 4) * passes
    dtype = statistics_dtype(pose.dtype)
    return (
        pose.new_empty(batch, parent_sites, parent_types, rows, columns),
        pose.new_empty(batch, parent_sites, parent_types),
        pose.new_empty(batch, kept, dtype=dtype),
        pose.new_empty(batch, passes - 1, 2, sites, types, dtype=dtype),
    )


@torch.library.custom_op("torchcaps::em_routing_backward", mutates_args=(), device_types="cpu")
def _backward(
    pose: Tensor,
    activation: Tensor,
    transform: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    edges: Tensor,
    kept: Tensor,
    log_sums: Tensor,
    mean_grad: Tensor,
    activation_grad: Tensor,
    inverse_temperatures: list[float],
    variance_floor: float,
    mean_data: float,
    mixing: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (pose, activation, transform, beta_u, beta_a, edges, pose.new_tensor(inverse_temperatures))
    gradients = tuple(torch.empty(x.shape, dtype=pose.dtype) for x in inputs[:5])
    rest = arrays(kept, log_sums, mean_grad, activation_grad)
    options = (variance_floor, mean_data, mixing, torch.get_num_threads())
    _cpu.em_backward(*arrays(*inputs), *options, *rest, *filled(*gradients))
    return gradients  # type: ignore[return-value]


@_backward.register_kernel("cuda")
def _(*arguments):
    from torchcaps.kernels.gpu import em

    return em.backward(*arguments)


@_backward.register_fake
def _(pose, activation, transform, beta_u, beta_a, *_):
    return tuple(x.new_empty(x.shape) for x in (pose, activation, transform, beta_u, beta_a))


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:6], *output[2:])
    ctx.options = inputs[7:]
    ctx.set_materialize_grads(False)  # else zeros as large as what the backward pass needs


def _differentiate(context, mean_grad, activation_grad, *_):
    kept = context.saved_tensors  # read once: torch.utils.checkpoint gives them no second time
    pose, _, transform, *_ = kept
    if mean_grad is None:
        mean_grad = activation_grad.new_zeros(*activation_grad.shape, pose.shape[3], transform.shape[4])
    if activation_grad is None:
        activation_grad = mean_grad.new_zeros(mean_grad.shape[:3])
    gradients = _backward(*kept, mean_grad, activation_grad, *context.options)
    return (*gradients, *[None] * 6)


em_routing.register_autograd(_differentiate, setup_context=_keep)
_backward.register_autograd(once)
