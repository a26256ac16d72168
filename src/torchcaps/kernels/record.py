"""The records of passes, and the shapes of all tensors of the operators in `torchcaps.kernels.moments`."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.types import IntLikeType

from torchcaps.kernels import expect_one_device
from torchcaps.kernels.memory import Layout, contiguous, lanes_of, padded, samples_last_strides, vector_strides
from torchcaps.kernels.operator import PLAIN


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
    GPU. A transform has more than Q rows if the further rows hold the weights of logits; see
    `torchcaps.kernels.memory.packed`.
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
        transforms, _, parent_types, depth, columns = transform
        self.edges = edges = (edge_lists - sites - parent_sites - transforms - 3) // 5
        groups = (padded(batch, lanes if by_sample else 1), edges if types else sites, child_types)
        vectors = (batch, parent_sites, parent_types, rows, columns)
        self.sizes = (*pose[:3], parent_sites, parent_types, transforms, rows, inner, columns, edges, depth)
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
            "transform": contiguous(transforms, child_types, parent_types, depth, columns),
        }
        agreement, softmaxes = (scalar, *3 * (vector,)), (self.log_sums, self.coupling_grads)
        found, gradients = (vector, scalar, scalar, vector), (scalar, vector, vector, scalar)
        fields = *agreement, *softmaxes, *found, *gradients, contiguous(3)
        self.record = dict(zip(Record._fields, fields, strict=True))


_kept = lru_cache(maxsize=256)(Shapes)


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
