"""The inputs of the Triton kernels for a layer's votes: tensors, sizes, block sizes and launch grids."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from torch.types import IntLikeType

from torchcaps.kernels.memory import laid_out, samples_last_strides, statistics_dtype
from torchcaps.kernels.moments import Record, shapes_of

SAMPLES = 32
"""Number of samples in a tile: one for each thread of a warp."""
TYPES = 4
"""Largest number of types in a tile: one for each warp of a program. So each thread keeps whole votes in registers."""
PROGRAMS = 1024
"""Number of programs that keeps the largest GPUs busy. If there are fewer, each program's work is split into groups."""
STEPS = 8
"""Smallest number of steps in a group. A step is one iteration of the loop of a program."""


class Layer(NamedTuple):
    """Tensors of a layer: the first argument of every kernel. `lists` has the values of ``RoutingMap.edge_lists``."""

    pose: Tensor
    activation: Tensor | None
    transform: Tensor
    lists: Tensor


def samples_last(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Convert a tensor to a dtype and to the memory order in which the samples are contiguous; keep None."""
    if tensor is None:
        return None
    tensor = tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)
    return laid_out(tensor, samples_last_strides(tensor.shape))


def stride_of(batch: int) -> int:
    """Return the distance in memory between two numbers of a pose: the batch size, rounded up to a power of two.

    The distance is a constant in a kernel, which saves many integer operations. Rounding it keeps the number of
    different kernels small.
    """
    return max(SAMPLES, triton.next_power_of_2(batch))


def spread(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """Convert poses ``[B, …]`` to a dtype and to the memory order ``[…, stride_of(B)]``; keep None."""
    if tensor is None or (stride := stride_of(tensor.shape[0])) == tensor.shape[0]:
        return samples_last(tensor, dtype)
    strides = samples_last_strides((stride, *tensor.shape[1:]))
    return tensor.new_empty_strided(tensor.shape, strides, dtype=dtype or tensor.dtype).copy_(tensor)


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
    of_children: int
    stride: int
    own_types: int
    block_types: int
    block_samples: int
    block_rows: int
    block_columns: int
    child_begin: int
    parent_begin: int
    parent_edge: int
    kernel_begin: int
    kernel_edge: int

    @property
    def type_blocks(self) -> int:
        return -(-self.own_types // self.block_types)

    @property
    def softmaxes(self) -> int:
        """Number of softmaxes G per child type and sample: one per child site, or per edge if `types_compete`."""
        return self.edges if self.types_compete else self.sites


class Problem:
    """The inputs of one layer, which all kernels share, and the launch grid of each kind of kernel.

    Launch grids are one-dimensional: CUDA allows 2³¹ programs in the first dimension, but only 65,535 in the others.

    Attributes:
        children: `Shape` for programs whose own types are child types.
        parents: `Shape` for programs whose own types are parent types.
    """

    def __init__(self, pose, activation, transform, lists, parent_sites: int, types: bool, none_of_the_above: bool):
        batch, sites, child_types, rows, inner = pose.shape
        transforms, _, parent_types, _, columns = transform.shape
        edges = shapes_of(pose, transform, lists, parent_sites, types, by_sample=False).edges
        sizes = (sites, child_types, rows, inner, parent_sites, parent_types, columns, transforms, edges)
        begins = accumulate((3 * edges, sites + 1, parent_sites + 1, edges, transforms + 1))
        stride = stride_of(batch)
        rest = SAMPLES, triton.next_power_of_2(rows), triton.next_power_of_2(columns), *begins
        self.children, self.parents = (
            Shape(
                *sizes,
                types,
                int(none_of_the_above),
                of_children,
                stride,
                own,
                min(TYPES, triton.next_power_of_2(own)),
                *rest,
            )
            for of_children, own in ((1, child_types), (0, parent_types))
        )
        self.samples, self.dtype = batch, statistics_dtype(pose.dtype)
        self.layer = Layer(cast(Tensor, spread(pose)), samples_last(activation), transform.contiguous(), lists)
        self.sample_blocks = triton.cdiv(batch, SAMPLES)
        self.parent_programs = parent_sites * self.parents.type_blocks * self.sample_blocks
        self.parent_groups = _groups(self.parent_programs, edges * child_types // parent_sites)
        self.transform_programs = transforms * parent_types * self.children.type_blocks
        self.transform_groups = _groups(self.transform_programs, edges * self.sample_blocks // transforms)

    def record(self, *entries: Tensor | None) -> Record:
        """Create a `Record` for the kernels: tensors of one dtype in the kernels' memory order; None for empty ones."""
        record = Record(*(None if x is None or not x.numel() else x for x in entries))
        vectors = ("linear", "quadratic", "centre", "mean", "variance", "mean_grad", "variance_grad")
        scalars = ("constant", "largest", "log_mass", "mass_grad", "log_volume_grad")
        found = {name: spread(getattr(record, name), self.dtype) for name in vectors}
        found |= {name: samples_last(getattr(record, name), self.dtype) for name in scalars}
        return record._replace(**found)

    def empty(self, *shape: IntLikeType) -> Tensor:
        return self.layer.pose.new_empty(shape, dtype=self.dtype)

    def of_softmaxes(self, *sizes: int) -> Tensor:
        """Create an uninitialised tensor ``[B, …, G, C]``; see `Record`. The kernels use the order ``[…, G, C, B]``."""
        return self.empty(self.samples, *sizes, self.children.softmaxes, self.children.types)

    def scalars(self) -> Tensor:
        """Create an uninitialised tensor ``[B, P, J]``, in which samples are contiguous."""
        return self._of_parents()

    def vectors(self) -> Tensor:
        """Create an uninitialised tensor ``[B, P, J, R, N]``, in which samples are contiguous."""
        return self._of_parents(self.parents.rows, self.parents.columns)

    def group_scalars(self) -> Tensor:
        """Create an uninitialised tensor ``[groups, P, J, B]``."""
        return self.empty(self.parent_groups, self.parents.parent_sites, self.parents.parent_types, self.samples)

    def group_vectors(self, groups: int | None = None) -> Tensor:
        """Create an uninitialised tensor ``[groups, P, J, R, N, stride]``."""
        z, groups = self.parents, self.parent_groups if groups is None else groups
        return self.empty(groups, z.parent_sites, z.parent_types, z.rows, z.columns, z.stride)

    def _of_parents(self, *sizes: int) -> Tensor:
        shape = self.samples, self.parents.parent_sites, self.parents.parent_types, *sizes
        return self.layer.pose.new_empty_strided(shape, samples_last_strides(shape), dtype=self.dtype)

    def per_child(self, kernel: Any, count: int, *arguments: Any) -> None:
        """Run a child-side kernel for `count` sites, softmaxes or edges."""
        self._launch(kernel, self.children, count * self.children.type_blocks * self.sample_blocks, *arguments)

    def per_parent(self, kernel: Any, *arguments: Any) -> None:
        """Run a parent-side kernel that combines the results for groups of children."""
        self._launch(kernel, self.parents, self.parent_programs, *arguments, self.parent_groups, layer=False)

    def per_group(self, kernel: Any, *arguments: Any) -> None:
        """Run a parent-side kernel for each group of a parent's children."""
        programs = self.parent_programs * self.parent_groups
        self._launch(kernel, self.parents, programs, *arguments, self.parent_groups)

    def per_transform(self, kernel: Any, *arguments: Any) -> None:
        programs = self.transform_programs * self.transform_groups
        self._launch(kernel, self.children, programs, *arguments, self.transform_groups)

    def _launch(self, kernel: Any, z: Shape, programs: int, *arguments: Any, layer: bool = True) -> None:
        if programs:
            arguments = (self.layer, *arguments) if layer else arguments
            kernel[(programs,)](*arguments, self.samples, 1, z, num_warps=z.block_types)


def _groups(programs: int, steps: int) -> int:
    """Return the number of groups into which the steps of each program are split."""
    return max(1, min(PROGRAMS // max(1, programs), steps // STEPS))
