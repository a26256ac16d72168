"""The moments of a layer's votes as operators that keep no votes; `torchcaps.routing.votes` is their specification.

Three operators make a differentiable pass. `moments` is the pass. Its backward pass differentiates the couplings, and
hands on a *record*: all that the gradients of the children and transforms need of this pass. `open_votes` gives out the
tokens through which the records of all passes travel, as gradients, to one sweep over the votes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.kernels import _cpu, arrays, expect_one_device, filled, once, padded, statistics_dtype


class Record(NamedTuple):
    """What the sweep over the votes needs of a pass; what is None is 0, or was not computed.

    Arguments:
        constant, linear, quadratic, centre: of the agreement.
        log_sums: ``[padded B, 2, G, C]``, of each child's softmax the largest logit, and the logarithm of the sum of
            the exponentials of all logits minus it. None where the couplings are even.
        coupling_grads: γ, ``[padded B, G, C]``, Σ_j c_ij · gradient of c_ij. None where the couplings are constants.
        mean, variance, log_mass: what the pass found. log_mass is ∞ where all children are off.
        mass_grad, mean_grad, variance_grad: the gradients of what it found.
    """

    constant: Tensor | None = None
    linear: Tensor | None = None
    quadratic: Tensor | None = None
    centre: Tensor | None = None
    log_sums: Tensor | None = None
    coupling_grads: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    log_mass: Tensor | None = None
    mass_grad: Tensor | None = None
    mean_grad: Tensor | None = None
    variance_grad: Tensor | None = None


def groups_of(edge_lists: Tensor, pose: Tensor, transform: Tensor, parent_sites: int, types: bool) -> int:
    """G, the number of child sites, or of edges where the types at one site compete alone: a softmax for each."""
    if not types:
        return pose.shape[1]
    return (edge_lists.shape[0] - pose.shape[1] - parent_sites - transform.shape[0] - 3) // 5


@torch.library.custom_op("torchcaps::moments", mutates_args=(), device_types="cpu")
def moments(
    tokens: Sequence[Tensor],
    pose: Tensor,
    activation: Tensor | None,
    transform: Tensor,
    edge_lists: Tensor,
    parent_sites: int,
    constant: Tensor | None,
    linear: Tensor | None,
    quadratic: Tensor | None,
    centre: Tensor | None,
    even: bool,
    types: bool,
    none_of_the_above: bool,
    with_variance: bool,
    constant_couplings: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mass, mean and variance of every parent's votes; and log_mass and log_sums as in `Record`.

    The gradients of pose, activation and transform go through the tokens alone.
    """
    outputs = _like_moments(
        tokens, pose, activation, transform, edge_lists, parent_sites, *(constant, linear, quadratic, centre),
        *(even, types, none_of_the_above, with_variance, constant_couplings),
    )  # fmt: skip
    _cpu.moments(
        **arrays(
            pose=pose, activation=activation, transform=transform, edge_lists=edge_lists,
            constant=constant, linear=linear, quadratic=quadratic, centre=centre,
        ),
        **filled(**dict(zip(("mass", "mean", "variance", "log_mass", "log_sums"), outputs, strict=True))),
        even=even, types=types, none_of_the_above=none_of_the_above, threads=torch.get_num_threads(),
    )  # fmt: skip
    return outputs


@moments.register_kernel("cuda")
def _(tokens, *arguments):
    from torchcaps.kernels.gpu import moments

    return moments.forward(*arguments)


@moments.register_fake
def _like_moments(
    tokens, pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre,
    even, types, none_of_the_above, with_variance, constant_couplings,
):  # fmt: skip
    expect_one_device(pose, edge_lists)
    batch, child_types = pose.shape[0], pose.shape[2]
    parents = (batch, parent_sites, transform.shape[2])
    poses = (*parents, pose.shape[3], transform.shape[4])
    groups = groups_of(edge_lists, pose, transform, parent_sites, types)
    dtype = statistics_dtype(pose.dtype)
    return (
        pose.new_empty(parents, dtype=dtype),
        pose.new_empty(poses, dtype=dtype),
        pose.new_empty(poses if with_variance else (0,), dtype=dtype),
        pose.new_empty(parents, dtype=dtype),
        pose.new_empty((0,) if even else (padded(batch, pose), 2, groups, child_types), dtype=dtype),
    )


@torch.library.custom_op("torchcaps::moments_backward", mutates_args=(), device_types="cpu")
def moments_backward(
    pose: Tensor,
    activation: Tensor | None,
    transform: Tensor,
    edge_lists: Tensor,
    parent_sites: int,
    constant: Tensor | None,
    linear: Tensor | None,
    quadratic: Tensor | None,
    centre: Tensor | None,
    log_sums: Tensor,
    mean: Tensor,
    variance: Tensor | None,
    log_mass: Tensor,
    mass_grad: Tensor | None,
    mean_grad: Tensor | None,
    variance_grad: Tensor | None,
    types: bool,
    none_of_the_above: bool,
    agreement_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """coupling_grads as in `Record`; and the gradients of constant, linear, quadratic and centre, each empty where it
    is None or where ``agreement_grads`` is False."""
    outputs = _like_moments_backward(
        pose, activation, transform, edge_lists, parent_sites, *(constant, linear, quadratic, centre),
        *(log_sums, mean, variance, log_mass, mass_grad, mean_grad, variance_grad),
        *(types, none_of_the_above, agreement_grads),
    )  # fmt: skip
    names = ("coupling_grads", "constant_grad", "linear_grad", "quadratic_grad", "centre_grad")
    _cpu.moments_backward(
        **arrays(
            pose=pose, activation=activation, transform=transform, edge_lists=edge_lists,
            constant=constant, linear=linear, quadratic=quadratic, centre=centre,
            log_sums=log_sums, mean=mean, variance=variance, log_mass=log_mass,
            mass_grad=mass_grad, mean_grad=mean_grad, variance_grad=variance_grad,
        ),
        **filled(**dict(zip(names, outputs, strict=True))),
        types=types, none_of_the_above=none_of_the_above, threads=torch.get_num_threads(),
    )  # fmt: skip
    return outputs


@moments_backward.register_kernel("cuda")
def _(*arguments):
    from torchcaps.kernels.gpu import moments

    return moments.backward(*arguments)


@moments_backward.register_fake
def _like_moments_backward(
    pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre,
    log_sums, mean, variance, log_mass, mass_grad, mean_grad, variance_grad, types, none_of_the_above, agreement_grads,
):  # fmt: skip
    batch, child_types = pose.shape[0], pose.shape[2]
    groups = groups_of(edge_lists, pose, transform, parent_sites, types)
    gradients = (
        log_mass.new_empty((0,) if part is None or not agreement_grads else part.shape)
        for part in (constant, linear, quadratic, centre)
    )
    return log_mass.new_empty(padded(batch, pose), groups, child_types), *gradients


@torch.library.custom_op("torchcaps::votes_backward", mutates_args=(), device_types="cpu")
def votes_backward(
    pose: Tensor,
    activation: Tensor | None,
    transform: Tensor,
    edge_lists: Tensor,
    parent_sites: int,
    records: Sequence[Tensor],
    types: bool,
    none_of_the_above: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of pose, activation (empty where it is None) and transform, from the records of all passes: what is
    None in a `Record` is an empty tensor here."""
    outputs = _like_votes_backward(
        pose, activation, transform, edge_lists, parent_sites, records, types, none_of_the_above
    )
    _cpu.votes_backward(
        **arrays(pose=pose, activation=activation, transform=transform, edge_lists=edge_lists),
        records=[arrays(record=record)["record"] for record in records],
        **filled(**dict(zip(("pose_grad", "activation_grad", "transform_grad"), outputs, strict=True))),
        parent_sites=parent_sites, types=types, none_of_the_above=none_of_the_above, threads=torch.get_num_threads(),
    )  # fmt: skip
    return outputs


@votes_backward.register_kernel("cuda")
def _(*arguments):
    from torchcaps.kernels.gpu import moments

    return moments.votes_backward(*arguments)


@votes_backward.register_fake
def _like_votes_backward(
    pose, activation, transform, edge_lists, parent_sites, records, types, none_of_the_above
):  # fmt: skip
    return (
        pose.new_empty(pose.shape),
        pose.new_empty((0,) if activation is None else activation.shape),
        transform.new_empty(transform.shape),
    )


@torch.library.custom_op("torchcaps::couplings", mutates_args=(), device_types="cpu")
def couplings(
    pose: Tensor,
    transform: Tensor,
    edge_lists: Tensor,
    parent_sites: int,
    constant: Tensor | None,
    linear: Tensor | None,
    quadratic: Tensor | None,
    centre: Tensor | None,
    types: bool,
    none_of_the_above: bool,
) -> Tensor:
    """``[B, J, E, C]``, edges in the order of the lists: sorted by child. Not differentiable."""
    output = _like_couplings(pose, transform, edge_lists, parent_sites, *(None,) * 4, types, none_of_the_above)
    _cpu.couplings(
        **arrays(
            pose=pose, transform=transform, edge_lists=edge_lists,
            constant=constant, linear=linear, quadratic=quadratic, centre=centre,
        ),
        **filled(couplings=output),
        parent_sites=parent_sites, types=types, none_of_the_above=none_of_the_above, threads=torch.get_num_threads(),
    )  # fmt: skip
    return output


@couplings.register_kernel("cuda")
def _(*arguments):
    from torchcaps.kernels.gpu import moments

    return moments.couplings(*arguments)


@couplings.register_fake
def _like_couplings(
    pose, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, types, none_of_the_above
):  # fmt: skip
    edges = groups_of(edge_lists, pose, transform, parent_sites, types=True)
    shape = (pose.shape[0], transform.shape[2], edges, pose.shape[2])
    return pose.new_empty(shape, dtype=statistics_dtype(pose.dtype))


@torch.library.custom_op("torchcaps::open_votes", mutates_args=())
def open_votes(
    pose: Tensor,
    activation: Tensor | None,
    transform: Tensor,
    edge_lists: Tensor,
    parent_sites: int,
    passes: int,
    types: bool,
    none_of_the_above: bool,
) -> list[Tensor]:
    """The tokens of some passes, as many a pass as a `Record` has entries. They hold no memory."""
    return _tokens(pose, activation, transform, edge_lists, parent_sites, passes, types, none_of_the_above)


@open_votes.register_fake
def _tokens(pose, activation, transform, edge_lists, parent_sites, passes, types, none_of_the_above):
    batch, child_types = pose.shape[0], pose.shape[2]
    scalars = (batch, parent_sites, transform.shape[2])
    vectors = (*scalars, pose.shape[3], transform.shape[4])
    children = (groups_of(edge_lists, pose, transform, parent_sites, types), child_types)
    shapes = Record(
        *(scalars, vectors, vectors, vectors, (padded(batch, pose), 2, *children), (padded(batch, pose), *children)),
        *(vectors, vectors, scalars, scalars, vectors, vectors),
    )
    dtype = statistics_dtype(pose.dtype)
    return [pose.new_zeros(1, dtype=dtype).expand(shape) for _ in range(passes) for shape in shapes]


def _keep_children(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4], *inputs[6:]
    ctx.set_materialize_grads(False)


def _sweep_over_votes(ctx, records):
    pose, activation, transform, edge_lists = ctx.saved_tensors
    parent_sites, *options = ctx.options
    if all(record is None for record in records):
        return (None,) * 8
    nothing = pose.new_empty(0)
    given = [nothing if record is None else record for record in records]
    pose_grad, activation_grad, transform_grad = votes_backward(
        pose, activation, transform, edge_lists, parent_sites, given, *options
    )
    return pose_grad, None if activation is None else activation_grad, transform_grad, *(None,) * 5


def _keep_pass(ctx, inputs, output) -> None:
    tokens, *tensors, even, types, none_of_the_above, with_variance, constant_couplings = inputs
    pose, activation, transform, edge_lists, parent_sites, *agreement = tensors
    _, *found = output
    ctx.save_for_backward(pose, activation, transform, edge_lists, *agreement, *found)
    ctx.tokens, ctx.parent_sites, ctx.with_variance = len(tokens), parent_sites, with_variance
    ctx.couplings = (not even, not even and not constant_couplings, types, none_of_the_above)
    ctx.set_materialize_grads(False)


def _differentiate_couplings(ctx, mass_grad, mean_grad, variance_grad, *_):
    *children, constant, linear, quadratic, centre, mean, variance, log_mass, log_sums = ctx.saved_tensors
    agreement = (constant, linear, quadratic, centre)
    routed, differentiated, *options = ctx.couplings
    wanted = ctx.needs_input_grad[6:10]
    variance = variance if ctx.with_variance and variance_grad is not None else None
    gradients = (mass_grad, mean_grad, variance_grad if ctx.with_variance else None)
    coupling_grads, agreement_grads = None, [None] * 4
    if differentiated:
        coupling_grads, *found = moments_backward(
            *children, ctx.parent_sites, *agreement, log_sums, mean, variance, log_mass, *gradients, *options,
            any(wanted),
        )  # fmt: skip
        agreement_grads = [grad if asked else None for grad, asked in zip(found, wanted, strict=True)]
    record = Record(
        *agreement, log_sums if routed else None, coupling_grads, mean, variance, log_mass, *gradients
    )
    return list(record) if ctx.tokens else [], *(None,) * 5, *agreement_grads, *(None,) * 5


open_votes.register_autograd(_sweep_over_votes, setup_context=_keep_children)
moments.register_autograd(_differentiate_couplings, setup_context=_keep_pass)
for operator in (moments_backward, votes_backward):
    operator.register_autograd(once)
