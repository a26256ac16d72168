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
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.types import IntLikeType

from torchcaps.kernels import cpu_kernel, expect_one_device
from torchcaps.kernels.memory import (
    Layout,
    addresses,
    contiguous,
    lanes_of,
    padded,
    samples_last_strides,
    statistics_dtype,
    vector_strides,
)
from torchcaps.kernels.operator import PLAIN, operator, pose_of


class Record(NamedTuple):
    """Tensors of a pass that the backward operators need. None means 0 or not computed, unless stated otherwise.

    G is the number of softmaxes per child type and sample; see `Shapes`. If the SIMD lanes hold samples, B′ is the
    batch size B, rounded up to a multiple of the lanes; otherwise B′ = B. `torchcaps.capsules` explains the other
    dimension letters. In GPU memory, log_sums and coupling_grads have the order ``[2, G, C, B]`` and ``[G, C, B]``.

    Arguments:
        constant, linear, quadratic, centre: tensors of the `Agreement` of the pass. If the inverse temperature in
            ``numbers`` is not 0, ``quadratic`` contains variances.
        log_sums: ``[B′, 2, G, C]``: the largest logit of each softmax, and ``log Σ exp(logit - largest)``. None if the
            couplings are uniform, that is, all couplings of a child are equal.
        coupling_grads: ``[B′, G, C]``: for each softmax, ``Σ coupling · weight_grad`` over its parents, with weight =
            activation · coupling. None if the couplings are treated as constants.
        mean: ``[B, P, J, R, N]``, means of the votes.
        largest, log_mass: ``[B, P, J]``: the logarithm of the mass is the sum of both. They are stored separately,
            because largest, the log coupling of the child with the largest weight or 0, may be so large that the sum
            would round log_mass away. If all children have activation 0, log_mass is ∞ instead of -∞, so that the
            exponential of ``log weight - largest - log_mass`` is 0.
        variance: variances of the votes, with the shape of mean. None if neither variance nor Σ log σ has a gradient.
        mass_grad, mean_grad, variance_grad, log_volume_grad: gradients of the outputs of the pass.
        numbers: ``[3]``: the floor of Σ log σ, and the floor and the inverse temperature of an agreement with
            variances, or 0 if the agreement has no variances. None if the agreement has no variances and Σ log σ has no
            gradient.
    """

    constant: Tensor | None = None
    linear: Tensor | None = None
    quadratic: Tensor | None = None
    centre: Tensor | None = None
    log_sums: Tensor | None = None
    coupling_grads: Tensor | None = None
    mean: Tensor | None = None
    largest: Tensor | None = None
    log_mass: Tensor | None = None
    variance: Tensor | None = None
    mass_grad: Tensor | None = None
    mean_grad: Tensor | None = None
    variance_grad: Tensor | None = None
    log_volume_grad: Tensor | None = None
    numbers: Tensor | None = None


def records_of(tensors: Sequence[Tensor]) -> list[Record]:
    """Split the tensors of several `Record`s, in which an empty tensor stands for None.

    Raises:
        ValueError: the number of tensors is not a multiple of the number of entries of a `Record`.
    """
    size = len(Record._fields)
    if len(tensors) % size:
        raise ValueError(f"the number of tensors in records must be a multiple of {size}; got {len(tensors)}")
    entries = [x if x.numel() else None for x in tensors]
    return [Record(*entries[first : first + size]) for first in range(0, len(entries), size)]


def shapes_of(
    pose: Tensor, transform: Tensor, edge_lists: Tensor, parent_sites: int, types: bool, by_sample: bool
) -> "Shapes":
    """Return the `Shapes` for these arguments, from a cache if no size is symbolic."""
    expect_one_device(pose, edge_lists)
    if pose.ndim != 5 or transform.ndim != 5:
        raise ValueError(
            "pose must have shape [B, S, C, R, Q] and transform [K, C, J, Q, N]; "
            f"got {list(pose.shape)} and {list(transform.shape)}"
        )
    plain = type(pose) in PLAIN and type(transform) in PLAIN
    make = _kept if plain else Shapes
    return make(pose.shape, transform.shape, edge_lists.shape[0], parent_sites, types, by_sample, lanes_of(pose))


class Shapes:
    """Shapes of all inputs and outputs of the operators, and strides of the tensors that are not contiguous.

    G is the number of softmaxes per child type and sample: one per child site, or one per edge if `types` is True, that
    is, if only the types at the same parent site compete. `lanes` is the number of SIMD lanes of the CPU, and 1 on a
    GPU.
    """

    def __init__(
        self,
        pose: torch.Size,
        transform: torch.Size,
        edge_lists: IntLikeType,
        parent_sites: IntLikeType,
        types: bool,
        by_sample: bool,
        lanes: int,
    ) -> None:
        batch, sites, child_types, rows, inner = pose
        transforms, _, parent_types, _, columns = transform
        self.edges = edges = (edge_lists - sites - parent_sites - transforms - 3) // 5
        groups = (padded(batch, lanes if by_sample else 1), edges if types else sites, child_types)
        vectors = (batch, parent_sites, parent_types, rows, columns)
        self.sizes = (*pose[:3], parent_sites, parent_types, transforms, rows, inner, columns, edges)
        self.couplings = (batch, parent_types, edges, child_types)
        scalar = contiguous(*vectors[:3]) if lanes > 1 else (vectors[:3], samples_last_strides(vectors[:3]))
        vector = vectors, vector_strides(vectors, by_sample or lanes == 1)
        self.scalar, self.vector = scalar, vector
        self.log_sums = contiguous(groups[0], 2, *groups[1:])
        self.coupling_grads = contiguous(*groups)
        self.lists = {"edge_lists": contiguous(sites + parent_sites + transforms + 3 + 5 * edges)}
        self.layer: dict[str, Layout] = {
            "pose": contiguous(*pose),
            "activation": contiguous(*pose[:3]),
            "transform": contiguous(transforms, child_types, parent_types, inner, columns),
        }
        agreement, softmaxes = (scalar, *3 * (vector,)), (self.log_sums, self.coupling_grads)
        found, gradients = (vector, scalar, scalar, vector), (scalar, vector, vector, scalar)
        fields = *agreement, *softmaxes, *found, *gradients, contiguous(3)
        self.record = dict(zip(Record._fields, fields, strict=True))


_kept = lru_cache(maxsize=256)(Shapes)


def on_gpu(name: str, *arguments: Any, direct: bool = False) -> Any:
    """Run an operator as Triton kernels, on the GPU that holds the pose. The first call imports Triton."""
    from torchcaps.kernels.gpu import moments as gpu

    with torch.cuda.device_of(pose_of(arguments)):
        return getattr(gpu, name)(*arguments, keep=direct)


def _call(
    function: str,
    shapes: "Shapes",
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


def _moments_layouts(shapes: "Shapes", uniform: bool, with_variance: bool, volume: bool) -> tuple[Layout | None, ...]:
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


def children_grads(
    pose: Tensor, activation: Tensor | None, transform: Tensor, samples_last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Create the outputs of `votes_backward`, uninitialised."""
    activation = pose.new_empty(0) if activation is None else activation
    of_pose, of_activation = (
        x.new_empty_strided(x.shape, samples_last_strides(x.shape)) if samples_last else x.new_empty(x.shape)
        for x in (pose, activation)
    )
    return of_pose, of_activation, transform.new_empty(transform.shape)


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
