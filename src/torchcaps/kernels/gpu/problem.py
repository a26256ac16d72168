"""The inputs of the Triton kernels for a layer's votes: tensors, sizes, block sizes and launch grids."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.types import IntLikeType

from torchcaps.kernels import expect_one_device
from torchcaps.kernels.memory import (
    Layout,
    contiguous,
    has_strides,
    power_of_2,
    sample_stride,
    samples_last_strides,
    statistics_dtype,
)
from torchcaps.kernels.record import Record, Shapes

SAMPLES = 32
"""Number of samples in a tile: one for each thread of a warp."""
TYPES = (4, 2, 1)
"""Possible numbers of types in a tile: one for each warp of a program. So each thread has whole votes in registers."""
PROGRAMS = 1024
"""Number of programs that keeps the largest GPUs busy. If there are fewer, each program's edges are split into groups.

Programs for transforms are split into more groups, because they load all poses and parents again for each vote.
"""
MOST_REGISTERS, FEWER_REGISTERS, FEW_REGISTERS = 255, 168, 128
"""Limits of the registers of a thread. Without a limit, the compiler uses few registers, and loads start late.

With a lower limit, more warps run at the same time. The limit of each kernel was measured on an H200 with votes of 16
float32 numbers. For longer votes, the limit is `MOST_REGISTERS`.
"""
DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
VECTORS = ("linear", "quadratic", "centre", "mean", "variance", "mean_grad", "variance_grad")
SCALARS = ("constant", "largest", "log_mass", "mass_grad", "log_volume_grad")


class Layer(NamedTuple):
    """Tensors of a layer: the first argument of every kernel. `lists` has the values of ``RoutingMap.edge_lists``."""

    pose: Tensor
    activation: Tensor | None
    transform: Tensor
    lists: Tensor


@dataclass(frozen=True)
class Shape:
    """Compile-time constants of a kernel: all sizes except the batch size, block sizes, and offsets of edge lists.

    The *own* types of a program are child types if `of_children` is 1, and parent types if it is 0. `stride` is
    `sample_stride`. As a constant, it saves the kernels many integer operations; as a power of two, it leaves only few
    different kernels. A transform has `depth` rows; see `Shapes`. `dtype` is that of all sums.
    """

    sites: int
    types: int
    parent_sites: int
    parent_types: int
    transforms: int
    rows: int
    inner: int
    columns: int
    edges: int
    depth: int
    types_compete: bool
    none_of_the_above: int
    dtype: tl.dtype
    stride: int
    block_samples: int
    block_rows: int
    block_columns: int
    child_begin: int
    parent_begin: int
    parent_edge: int
    kernel_begin: int
    kernel_edge: int
    of_children: int

    @cached_property
    def own_types(self) -> int:
        return self.types if self.of_children else self.parent_types

    @cached_property
    def block_types(self) -> int:
        """The largest block whose missing types are at most an eighth of the types."""
        return next(block for block in TYPES if -self.own_types % block <= self.own_types / 8)

    @cached_property
    def lanes(self) -> int:
        return self.block_types * self.block_samples

    @cached_property
    def type_blocks(self) -> int:
        return -(-self.own_types // self.block_types)

    @cached_property
    def softmaxes(self) -> int:
        """Number of softmaxes G per child type and sample: one per child site, or per edge if `types_compete`."""
        return self.edges if self.types_compete else self.sites


class Plan:
    """Everything about a `Problem` that depends on the sizes and the dtype only.

    Attributes:
        children, parents: `Shape` for programs whose own types are child types, or parent types.
        scalar, vector: shapes and strides of tensors ``[B, P, J]`` and ``[B, P, J, R, N]`` with contiguous samples.
    """

    def __init__(
        self, pose: Any, transform: Any, edge_lists: int, parent_sites: int, types: bool, none_of_the_above: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        shapes = Shapes(pose, transform, edge_lists, parent_sites, types, by_sample=False, lanes=1)
        sizes: Any = shapes.sizes
        batch, sites, _, parent_sites, parent_types, transforms, rows, _, columns, edges, _ = sizes
        self.scalar, self.vector = shapes.scalar, shapes.vector
        begins = accumulate((3 * edges, sites + 1, parent_sites + 1, edges, transforms + 1))
        blocks = sample_stride(batch), SAMPLES, power_of_2(rows), power_of_2(columns)
        constants: Any = (*sizes[1:], types, int(none_of_the_above), DTYPES[dtype], *blocks, *begins)
        self.children = Shape(*constants, of_children=1)
        self.parents = replace(self.children, of_children=0)
        self.sample_blocks = -(-batch // SAMPLES)
        self.parent_programs = parent_sites * self.parents.type_blocks * self.sample_blocks
        self.parent_groups = _groups(self.parent_programs, edges // parent_sites)
        self.transform_programs = transforms * parent_types * self.children.type_blocks
        self.transform_groups = _groups(self.transform_programs // 4, edges // transforms)
        self.group_scalars = (self.parent_groups, parent_sites, parent_types, batch)
        self.group_vectors = (self.parent_groups, parent_sites, parent_types, rows, columns, blocks[0])


def _groups(programs: int, edges: int) -> int:
    """Return the number of groups into which the edges of each program are split."""
    return max(1, min(PROGRAMS // max(1, programs), edges))


_plan = lru_cache(maxsize=512)(Plan)


@lru_cache(maxsize=512)
def _strides(batch: int, others: tuple[int, ...]) -> tuple[IntLikeType, ...]:
    return samples_last_strides((batch, *others))


class Problem:
    """The inputs of one layer, which all kernels share, and the launch grid of each kind of kernel.

    Launch grids are one-dimensional: CUDA allows 2³¹ programs in the first dimension, but only 65,535 in the others.
    """

    def __init__(self, pose, activation, transform, lists, parent_sites: int, types: bool, none_of_the_above: bool):
        expect_one_device(pose, lists)
        self.samples, self.dtype = pose.shape[0], statistics_dtype(pose.dtype)
        sizes = pose.shape, transform.shape, lists.shape[0]
        self.plan = _plan(*sizes, parent_sites, types, none_of_the_above, self.dtype)
        stride = self.plan.children.stride
        activation = None if activation is None else self.ordered(activation, self.samples, activation.dtype)
        self.layer = Layer(
            self.ordered(pose, stride, pose.dtype), activation, transform.contiguous().resolve_neg(), lists
        )

    def ordered(self, tensor: Tensor, stride: int, dtype: Any) -> Tensor:
        """Convert a tensor to a dtype and to a memory order in which samples are contiguous, with room for `stride`."""
        strides = _strides(stride, tuple(tensor.shape[1:]))
        if tensor.dtype == dtype and has_strides(tensor, strides) and not tensor.is_neg():
            return tensor
        return tensor.new_empty_strided(tensor.shape, strides, dtype=dtype).copy_(tensor)

    def ordered_record(self, record: Record) -> Record:
        """Convert a record to one dtype and to the kernels' memory order."""
        found = {}
        for names, stride in ((VECTORS, self.plan.children.stride), (SCALARS, self.samples)):
            for name in names:
                if (tensor := getattr(record, name)) is not None:
                    found[name] = self.ordered(tensor, stride, self.dtype)
        return record._replace(**found)

    def empty(self, shape: Any) -> Tensor:
        return self.layer.pose.new_empty(shape, dtype=self.dtype)

    def strided(self, layout: Layout) -> Tensor:
        return self.layer.pose.new_empty_strided(*layout, dtype=self.dtype)

    def of_softmaxes(self, *sizes: int) -> Tensor:
        """Create an uninitialised tensor ``[B, …, G, C]``; see `Record`. The kernels use the order ``[…, G, C, B]``."""
        z = self.plan.children
        return self.strided(contiguous(self.samples, *sizes, z.softmaxes, z.types))

    def per_child(self, kernel: Any, count: int, *arguments: Any, registers: int = MOST_REGISTERS) -> None:
        """Run a child-side kernel for `count` sites, softmaxes or edges."""
        z = self.plan.children
        programs = count * z.type_blocks * self.plan.sample_blocks
        self._launch(kernel, z, programs, self.layer, *arguments, registers=registers)

    def per_parent(self, kernel: Any, *arguments: Any) -> None:
        """Run a parent-side kernel that combines the results for groups of children."""
        plan = self.plan
        self._launch(kernel, plan.parents, plan.parent_programs, *arguments, plan.parent_groups)

    def per_group(self, kernel: Any, *arguments: Any, registers: int = MOST_REGISTERS) -> None:
        """Run a parent-side kernel for each group of a parent's children."""
        plan = self.plan
        programs = plan.parent_programs * plan.parent_groups
        self._launch(kernel, plan.parents, programs, self.layer, *arguments, plan.parent_groups, registers=registers)

    def per_transform(self, kernel: Any, *arguments: Any) -> None:
        plan = self.plan
        programs = plan.transform_programs * plan.transform_groups
        self._launch(kernel, plan.children, programs, self.layer, *arguments, plan.transform_groups)

    def _launch(self, kernel: Any, z: Shape, programs: int, *arguments: Any, registers: int = MOST_REGISTERS) -> None:
        if z.block_rows * z.block_columns * self.dtype.itemsize > 64:
            registers = MOST_REGISTERS
        if programs:
            zero = 0  # see `offsets`
            kernel[(programs,)](*arguments, self.samples, zero, z, num_warps=z.block_types, maxnreg=registers)
