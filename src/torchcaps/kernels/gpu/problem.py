"""A problem as the Triton kernels take it: sorted edges, sizes and grids."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from torchcaps.kernels import statistics_dtype

TILE = 1024
MOST_TYPES = 16
PROGRAMS = 512


class Lists(NamedTuple):
    """Edges sorted by one of their columns: where each value's begin, and the other two columns."""

    begin: Tensor
    first: Tensor
    second: Tensor


def lists(edges: Tensor, column: int, count: int) -> Lists:
    """Edges ``[E, 3]`` sorted by a column that counts up to `count`."""
    order = edges[:, column].argsort(stable=True)
    begin = torch.searchsorted(edges[order, column], torch.arange(count + 1, device=edges.device))
    first, second = (edges[order, other].int() for other in range(3) if other != column)
    return Lists(begin.int(), first, second)


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for: the sizes of a problem but the batch, and of the tile."""

    sites: int
    types: int
    parent_sites: int
    parent_types: int
    rows: int
    inner: int
    columns: int
    passes: int
    block_samples: int
    block_types: int
    block_rows: int
    block_columns: int
    block_inner: int

    @property
    def numbers(self) -> int:
        """Of a vote."""
        return self.rows * self.columns


def shape_of(pose: Tensor, transform: Tensor, parent_sites: int, passes: int) -> Shape:
    batch, sites, types, rows, inner = pose.shape
    parent_types, columns = transform.shape[2], transform.shape[4]
    block_types = min(MOST_TYPES, triton.next_power_of_2(parent_types))
    block_rows, block_columns = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
    block_samples = max(1, TILE // (block_types * block_rows * block_columns))
    block_samples = min(block_samples, triton.next_power_of_2(max(1, batch)))
    own = (sites, types, parent_sites, parent_types, rows, inner, columns, passes)
    return Shape(*own, block_samples, block_types, block_rows, block_columns, triton.next_power_of_2(inner))


class Problem:
    """A problem's edges and sizes in the form that the kernels take, and the grids that they are launched on."""

    def __init__(self, pose: Tensor, transform: Tensor, edges: Tensor, parent_sites: int, passes: int, leaky: bool):
        self.z = z = shape_of(pose, transform, parent_sites, passes)
        self.samples, self.kernels, self.edges = pose.shape[0], transform.shape[0], edges
        self.dtype = statistics_dtype(pose.dtype)
        self.by_child = lists(edges, 0, z.sites)
        self.by_parent = lists(edges, 1, z.parent_sites)
        reached = self.by_child.begin.diff() * z.parent_types + leaky
        self.log_even = -reached.clamp_min(1).to(self.dtype).log()
        self.sample_blocks = triton.cdiv(self.samples, z.block_samples)
        self.type_blocks = triton.cdiv(z.parent_types, z.block_types)
        self.parent_groups = self._groups(z.parent_sites * self.sample_blocks, len(edges) * z.types // z.parent_sites)
        self.transform_groups = self._groups(self.kernels * z.types, len(edges) * self.sample_blocks // self.kernels)

    @cached_property
    def by_kernel(self) -> Lists:
        """The backward pass alone asks for them."""
        return lists(self.edges, 2, self.kernels)

    def _groups(self, programs: int, steps: int) -> int:
        """Groups that the steps of each of some programs are cut into, so that there is work for a whole processor."""
        return max(1, min(PROGRAMS // max(1, programs * self.type_blocks), steps // 8))

    def empty(self, *shape: int) -> Tensor:
        return self.log_even.new_empty(shape)

    def records(self, size: int) -> Tensor:
        """Of every pass and parent."""
        return self.empty(self.samples, self.z.passes, self.z.parent_sites, self.z.parent_types, size)

    def group_sums(self, *size: int) -> Tensor:
        return self.empty(self.parent_groups, self.samples, self.z.parent_sites, self.z.parent_types, *size)

    def child_sums(self, *shape: int) -> Tensor:
        return self.empty(self.samples, *shape, self.z.sites, self.z.types)

    def per_child(self, kernel, *arguments) -> None:
        if self.samples:
            kernel[(self.z.sites * self.z.types, self.sample_blocks)](*arguments, self.samples, self.z)

    def per_parent(self, kernel, *arguments) -> None:
        if self.samples:
            grid = (self.z.parent_sites * self.type_blocks, self.sample_blocks, self.parent_groups)
            kernel[grid](*arguments, self.samples, self.parent_groups, self.z)

    def transforms_grad(self, kernel, *arguments) -> Tensor:
        """``[K, C, J, Q, N]``: the sum over all groups."""
        z, count = self.z, self.transform_groups
        grads = self.empty(count, self.kernels, z.types, z.parent_types, z.inner, z.columns)
        kernel[(self.kernels * z.types, self.type_blocks, count)](*arguments, grads, self.samples, count, z)
        return grads.sum(dim=0)
