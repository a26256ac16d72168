"""The moments of a layer's votes as operators that keep no votes; `torchcaps.routing.votes` is their specification.

Three operators make a differentiable pass. `moments` is the pass. Its backward pass differentiates the couplings, and
hands on a *record*: all that the gradients of the children and transforms need of this pass. `open_votes` gives out the
tokens through which the records of all passes travel, as gradients, to one sweep over the votes. See docs/gradients.md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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


def groups_of(edge_lists: Tensor, pose: Tensor, transform: Tensor, parent_sites: Any, types: bool) -> Any:
    """G, the number of child sites, or of edges where the types at one site compete alone: a softmax for each."""
    if not types:
        return pose.shape[1]
    return (edge_lists.shape[0] - pose.shape[1] - parent_sites - transform.shape[0] - 3) // 5


_LAYER = "Tensor pose, Tensor? activation, Tensor transform, Tensor edge_lists, SymInt parent_sites"
_AGREEMENT = "Tensor? constant, Tensor? linear, Tensor? quadratic, Tensor? centre"
_FOUND = "Tensor log_sums, Tensor mean, Tensor? variance, Tensor log_mass"
_GRADIENTS = "Tensor? mass_grad, Tensor? mean_grad, Tensor? variance_grad"
_SOFTMAX = "bool types, bool none_of_the_above"


def _operator(arguments: str, outputs: str, on_gpu: str, not_on_cpu: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Makes an operator of the function that allocates its outputs, for C++ and Triton kernels to fill.

    Arguments:
        arguments: of the operator, with their types; the C++ kernels take them by these names.
        outputs: their names in the C++ kernels.
        on_gpu: the name of the Triton function, which takes all arguments but the tokens.
        not_on_cpu: arguments that the C++ kernels do not take.
    """
    kinds = {name: kind for kind, name in (argument.split() for argument in arguments.split(", "))}
    written = outputs.split(", ")
    schema = f"({arguments}) -> ({', '.join('Tensor' for _ in written)})"

    def define(allocate: Callable[..., Any]) -> Any:
        def on_cpu(*values: Any) -> Any:
            results = allocate(*values)
            fresh = results if isinstance(results, tuple) else (results,)
            given = {name: x for name, x in zip(kinds, values, strict=True) if name not in not_on_cpu}
            tensors = {name: given.pop(name) for name in [*given] if kinds[name] in ("Tensor", "Tensor?")}
            if "records" in given:
                given["records"] = [arrays(record=record)["record"] for record in given["records"]]
            into = filled(**dict(zip(written, fresh, strict=True)))
            getattr(_cpu, allocate.__name__)(**arrays(**tensors), **given, **into, threads=torch.get_num_threads())
            return results

        def on_cuda(*values: Any) -> Any:
            from torchcaps.kernels.gpu import moments

            return getattr(moments, on_gpu)(*values["tokens" in kinds :])

        name = f"torchcaps::{allocate.__name__}"
        operator = torch.library.custom_op(name, on_cpu, mutates_args=(), device_types="cpu", schema=schema)
        operator.register_kernel("cuda")(on_cuda)
        operator.register_fake(allocate)
        operator.__doc__ = allocate.__doc__
        return operator

    return define


def _shapes(pose, transform, edge_lists, parent_sites, types) -> tuple[tuple[Any, ...], ...]:
    """Of what is one number a parent, what is one vote a parent, log_sums, and coupling_grads."""
    expect_one_device(pose, edge_lists)
    batch, _, child_types, rows, _ = pose.shape
    parents, children = (batch, parent_sites, transform.shape[2]), padded(batch, pose)
    softmaxes = (groups_of(edge_lists, pose, transform, parent_sites, types), child_types)
    return parents, (*parents, rows, transform.shape[4]), (children, 2, *softmaxes), (children, *softmaxes)


@_operator(
    f"Tensor[] tokens, {_LAYER}, {_AGREEMENT}, bool even, {_SOFTMAX}, bool with_variance, bool constant_couplings",
    outputs="mass, mean, variance, log_mass, log_sums",
    on_gpu="forward",
    not_on_cpu=("tokens", "parent_sites", "with_variance", "constant_couplings"),
)
def moments(
    tokens, pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre,
    even, types, none_of_the_above, with_variance, constant_couplings,
):  # fmt: skip
    """Mass, mean and variance of every parent's votes; and log_mass and log_sums as in `Record`.

    The gradients of pose, activation and transform go through the tokens alone.
    """
    number, vote, log_sums, _ = _shapes(pose, transform, edge_lists, parent_sites, types)
    shapes = (number, vote, vote if with_variance else (0,), number, (0,) if even else log_sums)
    return tuple(pose.new_empty(shape, dtype=statistics_dtype(pose.dtype)) for shape in shapes)


@_operator(
    f"{_LAYER}, {_AGREEMENT}, {_FOUND}, {_GRADIENTS}, {_SOFTMAX}, bool agreement_grads",
    outputs="coupling_grads, constant_grad, linear_grad, quadratic_grad, centre_grad",
    on_gpu="backward",
    not_on_cpu=("parent_sites", "agreement_grads"),
)
def moments_backward(
    pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre,
    log_sums, mean, variance, log_mass, mass_grad, mean_grad, variance_grad, types, none_of_the_above, agreement_grads,
):  # fmt: skip
    """coupling_grads as in `Record`; and the gradients of constant, linear, quadratic and centre, each empty where it
    is None or where ``agreement_grads`` is False."""
    parts = [part if agreement_grads else None for part in (constant, linear, quadratic, centre)]
    *_, coupling_grads = _shapes(pose, transform, edge_lists, parent_sites, types)
    return tuple(log_mass.new_empty(x) for x in (coupling_grads, *((0,) if x is None else x.shape for x in parts)))


@_operator(
    f"{_LAYER}, Tensor[] records, {_SOFTMAX}",
    outputs="pose_grad, activation_grad, transform_grad",
    on_gpu="votes_backward",
)
def votes_backward(pose, activation, transform, edge_lists, parent_sites, records, types, none_of_the_above):
    """The gradients of pose, activation (empty where it is None) and transform, from the records of all passes: what is
    None in a `Record` is an empty tensor here."""
    shapes = pose.shape, (0,) if activation is None else activation.shape, transform.shape
    return tuple(pose.new_empty(shape) for shape in shapes)


@_operator(
    f"Tensor pose, Tensor transform, Tensor edge_lists, SymInt parent_sites, {_AGREEMENT}, {_SOFTMAX}",
    outputs="couplings",
    on_gpu="couplings",
)
def couplings(
    pose, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, types, none_of_the_above
):  # fmt: skip
    """``[B, J, E, C]``, edges in the order of the lists: sorted by child. Not differentiable."""
    *_, (_, edges, child_types) = _shapes(pose, transform, edge_lists, parent_sites, types=True)
    shape = (pose.shape[0], transform.shape[2], edges, child_types)
    return pose.new_empty(shape, dtype=statistics_dtype(pose.dtype))


def _tokens(pose, activation, transform, edge_lists, parent_sites, passes, types, none_of_the_above):
    """The tokens of some passes, as many a pass as a `Record` has entries. They hold no memory."""
    number, vote, log_sums, coupling_grads = _shapes(pose, transform, edge_lists, parent_sites, types)
    record = Record(number, vote, vote, vote, log_sums, coupling_grads, vote, vote, number, number, vote, vote)
    dtype = statistics_dtype(pose.dtype)
    return [pose.new_zeros(1, dtype=dtype).expand(shape) for _ in range(passes) for shape in record]


open_votes = torch.library.custom_op(
    "torchcaps::open_votes", _tokens, mutates_args=(), schema=f"({_LAYER}, SymInt passes, {_SOFTMAX}) -> Tensor[]"
)
open_votes.register_fake(_tokens)


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
    record = Record(*agreement, log_sums if routed else None, coupling_grads, mean, variance, log_mass, *gradients)
    return list(record) if ctx.tokens else [], *(None,) * 5, *agreement_grads, *(None,) * 5


open_votes.register_autograd(_sweep_over_votes, setup_context=_keep_children)
moments.register_autograd(_differentiate_couplings, setup_context=_keep_pass)
for operator in (moments_backward, votes_backward):
    operator.register_autograd(once)
