"""The inputs of the Triton kernels for a layer's votes: tensors, sizes, block sizes and launch grids."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.types import IntLikeType

from torchcaps.kernels.gaussian import half_precision
from torchcaps.kernels.memory import statistics_dtype
from torchcaps.kernels.moments import Record, shapes_of

TILE = 1024
"""Number of vote elements in a tile. Each of the 128 threads of a program keeps eight of these in registers."""
WARPS = 4
"""Number of warps of a program. A warp has 32 threads."""
MOST_TYPES = 16
"""Largest number of parent types in a tile. Samples fill the rest of the tile, and share the loaded transforms."""
PROGRAMS = 512
"""Number of programs that keeps the largest GPUs busy. If there are fewer, each program's work is split into groups."""
STEPS = 8
"""Smallest number of steps in a group. A step is one iteration of the loop of a program."""


class Layer(NamedTuple):
    """Tensors of a layer: the first argument of every kernel. `lists` has the values of ``RoutingMap.edge_lists``."""

    pose: Tensor
    activation: Tensor | None
    transform: Tensor
    lists: Tensor


def record_of(*entries: Tensor | None, dtype: torch.dtype) -> Record:
    """Create a `Record` for the kernels: contiguous tensors of one dtype, with None for empty tensors.

    `quadratic` becomes the factor of d² in the logits, and `variance_grad` includes the gradient through Σ log σ. The
    kernels do not need the variance itself: `variance` becomes Σ variance · variance_grad, ``[B, P, J]``.
    """
    record = Record(*(None if x is None or not x.numel() else x.to(dtype).contiguous() for x in entries))
    quadratic, variance, variance_grad = record.quadratic, record.variance, record.variance_grad
    if record.numbers is not None:
        floor, *gaussian = record.numbers
        if quadratic is not None:
            quadratic = torch.where(gaussian[1] == 0, quadratic, half_precision(quadratic, *gaussian))
        if record.log_volume_grad is not None:
            square = variance + floor
            square = square.masked_fill(square < torch.finfo(dtype).tiny, torch.inf)  # the gradient is 0 there
            added = record.log_volume_grad[..., None, None] / (2 * square)
            variance_grad = added if variance_grad is None else variance_grad + added
    variance = None if variance is None or variance_grad is None else (variance * variance_grad).sum(dim=(3, 4))
    return record._replace(quadratic=quadratic, variance=variance, variance_grad=variance_grad)


@dataclass(frozen=True)
class Shape:
    """Compile-time constants of a kernel: all sizes except the batch size, block sizes, and offsets of edge lists."""

    sites: int
    types: int
    rows: int
    inner: int
    parent_sites: int
    parent_types: int
    columns: int
    transforms: int
    edges: int
    types_compete: bool
    none_of_the_above: int
    block_samples: int
    block_types: int
    block_rows: int
    block_columns: int
    block_inner: int
    child_begin: int
    parent_begin: int
    parent_edge: int
    kernel_begin: int
    kernel_edge: int

    @property
    def numbers(self) -> int:
        """Number of elements of a vote."""
        return self.rows * self.columns

    @property
    def block_numbers(self) -> int:
        return self.block_rows * self.block_columns

    @property
    def type_blocks(self) -> int:
        return -(-self.parent_types // self.block_types)

    @property
    def softmaxes(self) -> int:
        """Number of softmaxes G per child type and sample: one per child site, or per edge if `types_compete`."""
        return self.edges if self.types_compete else self.sites


class Problem:
    """The inputs of one layer, which all kernels share, and the launch grid of each kind of kernel.

    Launch grids are one-dimensional: CUDA allows 2³¹ programs in the first dimension, but only 65,535 in the others.
    """

    def __init__(self, pose, activation, transform, lists, parent_sites: int, types: bool, none_of_the_above: bool):
        batch, sites, child_types, rows, inner = pose.shape
        transforms, _, parent_types, _, columns = transform.shape
        shapes = shapes_of(pose, transform, lists, parent_sites, types, by_sample=False)
        edges = shapes.edges
        block_types = min(MOST_TYPES, triton.next_power_of_2(parent_types))
        block_rows, block_columns = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
        room = max(1, TILE // (block_types * block_rows * block_columns))
        block_samples = min(room, triton.next_power_of_2(max(1, batch)))
        sizes = (sites, child_types, rows, inner, parent_sites, parent_types, columns, transforms, edges)
        blocks = (block_samples, block_types, block_rows, block_columns, triton.next_power_of_2(inner))
        begins = accumulate((3 * edges, sites + 1, parent_sites + 1, edges, transforms + 1))
        self.z = z = Shape(*sizes, types, int(none_of_the_above), *blocks, *begins)
        self.samples, self.padded_samples = batch, shapes.coupling_grads[0][0]
        self.dtype = statistics_dtype(pose.dtype)
        activation = None if activation is None else activation.contiguous()
        self.layer = Layer(pose.contiguous(), activation, transform.contiguous(), lists)
        self.sample_blocks = triton.cdiv(batch, block_samples)
        self.parent_programs = parent_sites * z.type_blocks * self.sample_blocks
        self.parent_groups = _groups(self.parent_programs, edges * child_types // parent_sites)
        self.transform_programs = transforms * child_types * z.type_blocks
        self.transform_groups = _groups(self.transform_programs, edges * self.sample_blocks // transforms)

    def empty(self, *shape: IntLikeType) -> Tensor:
        return self.layer.pose.new_empty(shape, dtype=self.dtype)

    def per_softmax(self, *sizes: int) -> Tensor:
        """Create a tensor ``[B′, …, G, C]``; see `Record`. The first B samples are uninitialised, the others are 0."""
        values = self.empty(self.padded_samples, *sizes, self.z.softmaxes, self.z.types)
        values[self.samples :] = 0
        return values

    def parent_sums(self, *sizes: int) -> Tensor:
        """Create an uninitialised tensor ``[groups, B, P, J, …]``."""
        return self.empty(self.parent_groups, self.samples, self.z.parent_sites, self.z.parent_types, *sizes)

    def per_child(self, kernel: Any, count: int, *arguments: Any) -> None:
        """Run a child-side kernel for `count` sites, softmaxes or edges."""
        self._launch(kernel, count * self.z.types * self.sample_blocks, *arguments)

    def per_parent(self, kernel: Any, *arguments: Any) -> None:
        self._launch(kernel, self.parent_programs * self.parent_groups, *arguments, self.parent_groups)

    def per_transform(self, kernel: Any, *arguments: Any) -> None:
        self._launch(kernel, self.transform_programs * self.transform_groups, *arguments, self.transform_groups)

    def _launch(self, kernel: Any, programs: int, *arguments: Any) -> None:
        if programs:
            kernel[(programs,)](self.layer, *arguments, self.samples, self.z, num_warps=WARPS)


def _groups(programs: int, steps: int) -> int:
    """Return the number of groups into which the steps of each program are split."""
    return max(1, min(PROGRAMS // max(1, programs), steps // STEPS))
