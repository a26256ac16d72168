"""Dynamic routing as one operator that keeps no votes; `torchcaps.routing.dynamic` is its specification."""

import torch
from torch import Tensor

from torchcaps.kernels import _cpu, arrays, expect_one_device, filled, once, padded, statistics_dtype


@torch.library.custom_op("torchcaps::dynamic_routing", mutates_args=(), device_types="cpu")
def dynamic_routing(
    pose: Tensor,
    transform: Tensor,
    edges: Tensor,
    parent_sites: int,
    iterations: int,
    cumulative: bool,
    squash_form: str,
    inner_squash_form: str,
    all_passes: bool,
    leaky: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parents' poses, and what the backward pass needs: the sums of every pass and the children's log-sums."""
    options = (iterations, cumulative, squash_form, inner_squash_form, all_passes, leaky)
    outputs = _empty(pose, transform, edges, parent_sites, iterations)
    _cpu.dynamic_forward(*arrays(pose, transform, edges), *options, torch.get_num_threads(), *filled(*outputs))
    return outputs


@dynamic_routing.register_kernel("cuda")
def _(*arguments):
    from torchcaps.kernels.gpu import dynamic

    return dynamic.forward(*arguments)


@dynamic_routing.register_fake
def _empty(pose, transform, edges, parent_sites, iterations, *_):
    expect_one_device(pose, edges)
    batch, sites, types, rows, _ = pose.shape
    parent_types, columns = transform.shape[2], transform.shape[4]
    kept = parent_sites * parent_types * padded(rows * columns, pose) * iterations
    dtype = statistics_dtype(pose.dtype)
    return (
        pose.new_empty(batch, parent_sites, parent_types, rows, columns),
        pose.new_empty(batch, kept, dtype=dtype),
        pose.new_empty(batch, iterations - 1, 2, sites, types, dtype=dtype),
    )


@torch.library.custom_op("torchcaps::dynamic_routing_backward", mutates_args=(), device_types="cpu")
def _backward(
    pose: Tensor,
    transform: Tensor,
    edges: Tensor,
    kept: Tensor,
    log_sums: Tensor,
    parents_grad: Tensor,
    iterations: int,
    cumulative: bool,
    squash_form: str,
    inner_squash_form: str,
    all_passes: bool,
    leaky: bool,
) -> tuple[Tensor, Tensor]:
    options = (iterations, cumulative, squash_form, inner_squash_form, all_passes, leaky, torch.get_num_threads())
    gradients = torch.empty(pose.shape, dtype=pose.dtype), torch.empty(transform.shape, dtype=pose.dtype)
    _cpu.dynamic_backward(
        *arrays(pose, transform, edges), *options, *arrays(kept, log_sums, parents_grad), *filled(*gradients)
    )
    return gradients


@_backward.register_kernel("cuda")
def _(*arguments):
    from torchcaps.kernels.gpu import dynamic

    return dynamic.backward(*arguments)


@_backward.register_fake
def _(pose, transform, *_):
    return pose.new_empty(pose.shape), transform.new_empty(transform.shape)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output[1:])
    ctx.options = inputs[4:]
    ctx.set_materialize_grads(False)  # else zeros as large as what the backward pass needs


def _differentiate(context, parents_grad, *_):
    gradients = _backward(*context.saved_tensors, parents_grad, *context.options)
    return (*gradients, *(None,) * 8)


dynamic_routing.register_autograd(_differentiate, setup_context=_keep)
_backward.register_autograd(once)
