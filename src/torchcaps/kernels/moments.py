"""Operators that compute the moments of a layer's votes without storing the votes.

`torchcaps.routing.votes` defines the moments. A *pass* computes the moments once; a routing rule runs one pass per
iteration. Four operators make passes differentiable:

- `open_votes` returns *tokens*: placeholder tensors through which gradients reach children and transforms.
- `moments` computes a pass. It takes the tokens of the pass as arguments.
- `moments_backward` computes the gradients of the couplings and of the agreement of a pass. The backward of `moments`
  calls it, and returns the *record* of the pass as the gradient of the tokens. A `Record` contains everything that is
  needed to compute the gradients of children and transforms.
- `votes_backward` is the backward of `open_votes`. It receives the records of all passes, and computes the gradients of
  children and transforms in one loop over the votes.

docs/gradients.md derives the formulas.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from torchcaps.kernels import cpu_kernel
from torchcaps.kernels.memory import Layout, addresses, statistics_dtype
from torchcaps.kernels.operator import operator, pose_of
from torchcaps.kernels.record import Shapes, children_grads, records_of, shapes_of


def on_gpu(name: str, *arguments: Any, direct: bool = False) -> Any:
    """Run an operator as Triton kernels, on the GPU that holds the pose. The first call imports Triton."""
    from torchcaps.kernels.gpu import moments as gpu

    with torch.cuda.device_of(pose_of(arguments)):
        return getattr(gpu, name)(*arguments, keep=direct)


def _call(
    function: str,
    shapes: Shapes,
    layer: Sequence[Tensor | None],
    edge_lists: Tensor,
    options: tuple[bool, bool, bool],
    records: Sequence[Sequence[Tensor | None]],
    outputs: Sequence[Tensor | None],
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> None:
    """Check the shapes of the tensors and run a CPU kernel. The last entries of layer and records may be left out.

    An output that is not needed is None or an empty tensor; the address of both is 0. ``numbers`` are those of
    `Record`. Only the forward kernels use this argument; the backward kernels read the numbers from the records.
    """
    dtype = cast(Tensor, layer[0]).dtype
    keep: list[Tensor] = []
    given = addresses(dtype, shapes.layer, layer, keep)
    parts = [address for record in records for address in addresses(dtype, shapes.record, record, keep)]
    lists = addresses(torch.int32, shapes.lists, (edge_lists,), keep)[0]
    to = [0 if output is None else output.data_ptr() for output in outputs]
    sizes = (*shapes.sizes, *options, torch.get_num_threads())
    cpu_kernel(function, dtype)(sizes, lists, given, parts, to, numbers)


def _outputs(pose: Tensor, layouts: Iterable[Layout | None]) -> Any:
    """Create uninitialised outputs of an operator. An output without a layout is an empty tensor."""
    dtype = statistics_dtype(pose.dtype)
    like = pose if pose.dtype == dtype else pose.new_empty(0, dtype=dtype)
    return tuple([like.new_empty(0) if layout is None else like.new_empty_strided(*layout) for layout in layouts])


def _moments_layouts(shapes: Shapes, uniform: bool, with_variance: bool, volume: bool) -> tuple[Layout | None, ...]:
    scalar, vector = shapes.scalar, shapes.vector
    log_sums, variance = None if uniform else shapes.log_sums, vector if with_variance else None
    return scalar, vector, variance, scalar, scalar, log_sums, scalar if volume else None


def _like_moments(
    tokens, pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, variance_floor,
    inverse_temperature, uniform, types, none_of_the_above, by_sample, with_variance, constant_couplings, floor,
):  # fmt: skip
    shapes = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample)
    return _outputs(pose, _moments_layouts(shapes, uniform, with_variance, floor is not None))


@operator(_like_moments, partial(on_gpu, "moments"))
def moments(
    tokens: Sequence[Tensor], pose: Tensor, activation: Tensor | None, transform: Tensor, edge_lists: Tensor,
    parent_sites: int, constant: Tensor | None, linear: Tensor | None, quadratic: Tensor | None, centre: Tensor | None,
    variance_floor: float, inverse_temperature: float, uniform: bool, types: bool, none_of_the_above: bool,
    by_sample: bool, with_variance: bool, constant_couplings: bool, floor: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute mass, mean and variance of the votes for each parent, and largest, log_mass and log_sums of the `Record`.

    If ``inverse_temperature`` is not 0, ``quadratic`` contains variances, and the factor of d² in the logits is
    inverse_temperature / 2 (quadratic + variance_floor). With a ``floor``, the last output is Σ log σ, with
    σ² = variance + floor. Gradients reach pose, activation and transform only through the tokens. ``uniform`` makes all
    couplings of a child equal, ``types`` limits the competition to the types at one parent site, ``none_of_the_above``
    adds a logit of 0 to each softmax, ``by_sample`` selects the memory layout, and ``constant_couplings`` stops
    gradients at the couplings.
    """
    shapes = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample)
    outputs = _outputs(pose, _moments_layouts(shapes, uniform, with_variance, floor is not None))
    children, agreement = (pose, activation, transform), (constant, linear, quadratic, centre)
    options, numbers = (types, none_of_the_above, by_sample), (floor or 0.0, variance_floor, inverse_temperature)
    _call("moments", shapes, children, edge_lists, options, [agreement], outputs, numbers)
    return outputs


def _like_moments_backward(
    pose, activation, transform, edge_lists, parent_sites, record, types, none_of_the_above, by_sample, agreement_grads
):  # fmt: skip
    shapes = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample)
    of_agreement = zip(record[:4], (shapes.scalar, *3 * (shapes.vector,)), strict=True)
    layouts = (layout if agreement_grads and entry.numel() else None for entry, layout in of_agreement)
    return _outputs(pose, (shapes.coupling_grads, *layouts))


@operator(_like_moments_backward, partial(on_gpu, "moments_backward"))
def moments_backward(
    pose: Tensor, activation: Tensor | None, transform: Tensor, edge_lists: Tensor, parent_sites: int,
    record: Sequence[Tensor], types: bool, none_of_the_above: bool, by_sample: bool, agreement_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute coupling_grads (see `Record`), and the gradients of constant, linear, quadratic and centre.

    ``record`` contains the tensors of the `Record` of a pass, with an empty tensor for None and for coupling_grads. A
    gradient of the agreement is empty if the record has no such tensor or ``agreement_grads`` is False.
    """
    shapes = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample)
    children, options = (pose, activation, transform), (types, none_of_the_above, by_sample)
    outputs = _like_moments_backward(*children, edge_lists, parent_sites, record, *options, agreement_grads)
    if not outputs[0].numel():  # no edges
        for output in outputs:
            output.zero_()
        return outputs
    wanted = [output if output.numel() else None for output in outputs]
    _call("moments_backward", shapes, children, edge_lists, options, records_of(record), wanted)
    return outputs


def _like_votes_backward(
    pose, activation, transform, edge_lists, parent_sites, records, types, none_of_the_above, by_sample
):  # fmt: skip
    return children_grads(pose, activation, transform, samples_last=not pose.is_cpu)


@operator(_like_votes_backward, partial(on_gpu, "votes_backward"))
def votes_backward(
    pose: Tensor, activation: Tensor | None, transform: Tensor, edge_lists: Tensor, parent_sites: int,
    records: Sequence[Tensor], types: bool, none_of_the_above: bool, by_sample: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of pose, activation and transform from the records of all passes.

    If activation is None, its gradient is an empty tensor. ``records`` concatenates the tensors of all `Record`s, with
    an empty tensor for None.
    """
    shapes = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample)
    children, options = (pose, activation, transform), (types, none_of_the_above, by_sample)
    outputs = _like_votes_backward(*children, edge_lists, parent_sites, records, *options)
    reached = [record for record in records_of(records) if record.mean is not None]
    grads = (outputs[0], None if activation is None else outputs[1], outputs[2])
    _call("votes_backward", shapes, children, edge_lists, options, reached, grads)
    return outputs


def _like_couplings(
    pose, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, variance_floor,
    inverse_temperature, types, none_of_the_above, by_sample,
):  # fmt: skip
    shape = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample).couplings
    return pose.new_empty(shape, dtype=statistics_dtype(pose.dtype))


@operator(_like_couplings, partial(on_gpu, "couplings"))
def couplings(
    pose: Tensor, transform: Tensor, edge_lists: Tensor, parent_sites: int, constant: Tensor | None,
    linear: Tensor | None, quadratic: Tensor | None, centre: Tensor | None, variance_floor: float,
    inverse_temperature: float, types: bool, none_of_the_above: bool, by_sample: bool,
) -> Tensor:  # fmt: skip
    """Compute the couplings ``[B, J, E, C]``, with edges sorted by child site. The operator is not differentiable."""
    shapes = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample)
    agreement, options = (constant, linear, quadratic, centre), (types, none_of_the_above, by_sample)
    output = pose.new_empty(shapes.couplings, dtype=statistics_dtype(pose.dtype))
    numbers = 0.0, variance_floor, inverse_temperature
    _call("couplings", shapes, (pose, None, transform), edge_lists, options, [agreement], [output], numbers)
    return output


def _tokens(
    pose, activation, transform, edge_lists, parent_sites, passes, types, none_of_the_above, by_sample, direct=False
):  # fmt: skip
    shapes, dtype = shapes_of(pose, transform, edge_lists, parent_sites, types, by_sample), statistics_dtype(pose.dtype)
    zero = partial(torch.zeros, 1, dtype=dtype, device=pose.device)
    return [zero().expand(shape) for _ in range(passes) for shape, _ in shapes.record.values()]


@operator(_tokens, _tokens)
def open_votes(
    pose: Tensor, activation: Tensor | None, transform: Tensor, edge_lists: Tensor, parent_sites: int, passes: int,
    types: bool, none_of_the_above: bool, by_sample: bool,
) -> list[Tensor]:  # fmt: skip
    """Return a token for each pass and each field of `Record`. A token stores only one number."""
    return _tokens(pose, activation, transform, edge_lists, parent_sites, passes, types, none_of_the_above, by_sample)
