"""The routing map: a graph that connects child sites with parent sites, with a transform for each edge."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int32, Int64, Integer
from torch import Tensor

from torchcaps.checks import (
    INTEGERS,
    check_device,
    check_floating,
    check_padding,
    check_shape,
    check_sizes,
    described,
    has_values,
    is_compiling,
    pair,
)
from torchcaps.constant import Constant
from torchcaps.kernels import in_onnx_export


@dataclass(frozen=True, eq=False)
class RoutingMap:
    """Bipartite graph of child and parent sites (positions in two layers). Each edge has the index of a transform.

    Gritzman 2019 (arXiv 1907.00652) calls this graph a "spatial routing map". Dense, shared and convolutional capsule
    layers differ only in their map. An edge ``(s, p, k)`` means that every capsule at child site ``s`` votes for every
    parent type at parent site ``p`` with transform ``k``. The methods `dense`, `shared` and `conv` create the usual
    maps.

    Any graph is valid. Edges may be in any order, and several edges may connect the same two sites; with
    ``competition="types"``, each of them has its own softmax. A child without parents has no effect, except that EM
    routing counts it in mean_data. A parent without children has pose 0 before the LayerNorm or BatchNorm of the rule,
    if any.

    Arguments:
        edges: integers ``[E, 3]``, rows of (child site, parent site, transform); stored as int64.
        child_sites: number of child sites S, at least 1. Child sites in the edges are in [0, S).
        parent_sites: number of parent sites P, at least 1. Parent sites in the edges are in [0, P).
        transforms: number of transforms K, at least 1. Transform indices in the edges are in [0, K).
        parent_grid: (height, width) of the grid of parent sites, numbered row by row; height × width = P.

    Attributes:
        constant: holds the edges, and caches one copy of them per device.
        edge_lists: the edges sorted by child site, by parent site and by transform, for the fused kernels.
        place_by_child: for each edge, its position when the edges are sorted by child site.
        own_transforms: whether every transform is used by only one child site.
        most_edges: largest number of edges that start at one child site.

    Raises:
        ValueError: ``edges`` is not an integer tensor ``[E, 3]``, an edge contains a site or transform that does not
            exist, ``edges`` is on the meta device, a size is below 1, or ``parent_grid`` does not have P sites.

    Example:
        >>> RoutingMap.conv((3, 3), kernel_size=2).edges[:4].tolist()
        [[0, 0, 0], [1, 0, 1], [3, 0, 2], [4, 0, 3]]
    """

    edges: Integer[Tensor, "E 3"] = field(repr=False)
    child_sites: int
    parent_sites: int
    transforms: int
    parent_grid: tuple[int, int]
    constant: Constant = field(init=False, repr=False)
    edge_lists: Constant = field(init=False, repr=False)
    place_by_child: Constant = field(init=False, repr=False)
    own_transforms: bool = field(init=False, repr=False, default=False)
    most_edges: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        edges: Any = self.edges
        if not isinstance(edges, Tensor) or edges.dtype not in INTEGERS or edges.ndim != 2 or edges.shape[1] != 3:
            raise ValueError(
                "edges must be an integer tensor [E, 3] of (child site, parent site, transform); "
                f"got {described(edges)}"
            )
        edges = edges.to(torch.int64, copy=True)
        if has_values(edges):
            self._check_values(edges)
            if edges.is_inference():
                with torch.inference_mode(False):
                    edges = edges.clone()
            served = (edges[:, 2] * self.child_sites + edges[:, 0]).unique() // self.child_sites
            self._set(bool((served.diff() > 0).all()), int(edges[:, 0].bincount(minlength=1).max()))
        elif edges.is_meta and not is_compiling():
            raise ValueError('edges are on the meta device, without values: create them with device="cpu"')
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "constant", Constant(edges))
        if in_onnx_export():
            # Exported networks run the reference implementation, which does not use the lists. ONNX has no operators to
            # create them.
            return
        with torch.inference_mode(False) if has_values(edges) else nullcontext():
            order = edges[:, 0].argsort(stable=True)
            object.__setattr__(self, "edge_lists", Constant(self._sorted(edges[order])))
            object.__setattr__(self, "place_by_child", Constant(order.argsort()))

    def _check_values(self, edges: Tensor) -> None:
        check_sizes(child_sites=self.child_sites, parent_sites=self.parent_sites, transforms=self.transforms)
        check_shape("parent_grid", self.parent_grid, "height, width")
        if self.parent_grid[0] * self.parent_grid[1] != self.parent_sites:
            raise ValueError(
                f"parent_grid must be (height, width) with height × width = parent_sites = {self.parent_sites}; "
                f"got {self.parent_grid}"
            )
        if not len(edges):
            return
        smallest, largest = (bound.tolist() for bound in (edges.amin(dim=0), edges.amax(dim=0)))
        sizes = (self.child_sites, self.parent_sites, self.transforms)
        names = ("child sites", "parent sites", "transforms")
        for name, low, high, size in zip(names, smallest, largest, sizes, strict=True):
            if low < 0 or high >= size:
                raise ValueError(
                    f"edges contain {name} from {low} to {high}, but the map has {size}, numbered 0 to {size - 1}: "
                    + (
                        "correct the edges"
                        if low < 0
                        else f"correct the edges or set {name.replace(' ', '_')} to {high + 1}"
                    )
                )

    def _sorted(self, by_child: Tensor) -> Int32[Tensor, " lists"]:
        """Concatenate the lists that the fused kernels read.

        The lists come in this order:

        - the three columns of the edges, sorted by child site;
        - for each child site, the offset of its first edge in these columns;
        - for each parent site, the offset of its first edge in the next list;
        - the indices of the edges, sorted by parent site;
        - for each transform, the offset of its first edge in the next list;
        - the indices of the edges, sorted by transform.
        """
        lists = [*by_child.unbind(1), self._begins(by_child[:, 0], self.child_sites)]
        for column, count in ((1, self.parent_sites), (2, self.transforms)):
            order = by_child[:, column].argsort(stable=True)
            lists += [self._begins(by_child[order, column], count), order]
        return torch.cat(lists).int()

    @staticmethod
    def _begins(ascending: Tensor, count: int) -> Tensor:
        return torch.searchsorted(ascending.contiguous(), torch.arange(count + 1, device=ascending.device))

    def edges_on(self, device: torch.device | str) -> Int64[Tensor, "E 3"]:
        """Return the edges as a tensor on the given device. One copy per device is cached."""
        return self.constant.on(device)

    @classmethod
    def dense(cls, child_sites: int, device: torch.device | str | None = None) -> "RoutingMap":
        """Create a fully connected map: one parent site, and one transform per child site (K = S).

        Arguments:
            child_sites: number of child sites S.
            device: device of the edges; the CPU by default.
        """
        check_sizes(child_sites=child_sites)
        sites = torch.arange(child_sites, device=device or "cpu")
        edges = torch.stack([sites, 0 * sites, sites], dim=1)
        return cls(edges, child_sites, 1, child_sites, (1, 1))._set(own_transforms=True, most_edges=1)

    @classmethod
    def shared(cls, child_sites: int, device: torch.device | str | None = None) -> "RoutingMap":
        """Create a map with one parent site and one transform for all child sites (K = 1).

        The transform does not depend on the child site, so a trained transform also works with another number of child
        sites.

        Arguments:
            child_sites: number of child sites S.
            device: device of the edges; the CPU by default.
        """
        check_sizes(child_sites=child_sites)
        sites = torch.arange(child_sites, device=device or "cpu")
        edges = torch.stack([sites, 0 * sites, 0 * sites], dim=1)
        return cls(edges, child_sites, 1, 1, (1, 1))._set(own_transforms=child_sites == 1, most_edges=1)

    def _set(self, own_transforms: bool, most_edges: int) -> "RoutingMap":
        """Set the attributes ``own_transforms`` and ``most_edges`` of the map, and return the map."""
        object.__setattr__(self, "own_transforms", own_transforms)
        object.__setattr__(self, "most_edges", most_edges)
        return self

    @classmethod
    def conv(
        cls,
        child_grid: tuple[int, int],
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
    ) -> "RoutingMap":
        """Create a convolutional map: each parent site has edges from a window of child sites.

        Each position in the window has its own transform (K = kernel height × kernel width). Sites and positions are
        numbered row by row. Padding adds no edges: a window that extends beyond the child grid has fewer children.

        Arguments:
            child_grid: (height, width) of the grid of child sites; (1, length) for a series.
            kernel_size: height and width of the window, in child sites: one integer for both, or (height, width).
            stride: distance between neighbouring windows, in child sites: one integer, or (vertical, horizontal).
            padding: width of the empty border around the child grid, in child sites, in [0, kernel_size): one integer,
                or (vertical, horizontal).

        Raises:
            ValueError: a size is not an integer of at least 1 or two such integers, ``padding`` is not in
                [0, kernel_size), or the window exceeds the padded grid.

        Example:
            >>> RoutingMap.conv((1, 24), kernel_size=(1, 5)).parent_grid
            (1, 20)
        """
        check_shape("child_grid", child_grid, "height, width")
        kernel, step = pair("kernel_size", kernel_size), pair("stride", stride)
        border = pair("padding", padding, least=0)
        for size, most in zip(border, kernel, strict=True):
            check_padding(size, most - 1)
        axes = [*zip(child_grid, kernel, step, border, strict=True)]
        if any(count + 2 * outside < size for count, size, _, outside in axes):
            fits = child_grid[0] == 1 < kernel[0] and child_grid[1] + 2 * border[1] >= kernel[1]
            series = f"; for a series, use kernel_size=(1, {kernel[1]})" if fits else ""
            raise ValueError(
                f"kernel_size {kernel_size} is larger than the {child_grid[0]}×{child_grid[1]} child_grid with padding "
                f"{padding}: use a larger image, a smaller kernel or more padding{series}"
            )
        height, width = ((count + 2 * outside - size) // by + 1 for count, size, by, outside in axes)
        parent_row, parent_column, kernel_row, kernel_column = torch.meshgrid(
            *(torch.arange(n, device="cpu") for n in (height, width, *kernel)), indexing="ij"
        )
        row = parent_row * step[0] - border[0] + kernel_row
        column = parent_column * step[1] - border[1] + kernel_column
        inside = (row >= 0) & (row < child_grid[0]) & (column >= 0) & (column < child_grid[1])
        child, parent = row * child_grid[1] + column, parent_row * width + parent_column
        transform = kernel_row * kernel[1] + kernel_column
        edges = torch.stack([child[inside], parent[inside], transform[inside]], dim=1)
        return cls(edges, child_grid[0] * child_grid[1], height * width, kernel[0] * kernel[1], (height, width))

    def transposed(self, parent_grid: tuple[int, int] | None = None) -> "RoutingMap":
        """Create the map in the other direction: child and parent sites are swapped, as in a transposed convolution.

        Arguments:
            parent_grid: (height, width) of the new parent sites, which are the child sites of this map; None for
                (1, S).

        Raises:
            ValueError: ``parent_grid`` does not have S sites.

        Example:
            >>> RoutingMap.conv((8, 8), kernel_size=2, stride=2).transposed((8, 8)).parent_grid
            (8, 8)
        """
        grid = (1, self.child_sites) if parent_grid is None else parent_grid
        return RoutingMap(self.edges[:, [1, 0, 2]], self.parent_sites, self.child_sites, self.transforms, grid)

    def votes(
        self, pose: Float[Tensor, "B S C R Q"], transform: Float[Tensor, "K C J Q N"]
    ) -> Float[Tensor, "B J E C R N"]:
        """Compute and return all votes: ``V = pose · transform`` for every edge and parent type.

        The dimension of parent types comes before the dimension of edges, so the votes for one parent type are
        contiguous in memory.

        Arguments:
            pose: ``[B, S, C, R, Q]``, poses of the children.
            transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.

        Raises:
            ValueError: ``pose`` or ``transform`` does not fit the map; see `check`.
        """
        self.check(pose, transform)
        child, _, kernel = self.edges_on(pose.device).unbind(1)
        at_edges = pose.index_select(1, child)
        if self.transforms == 1:
            return torch.einsum("becrq,cjqn->bjecrn", at_edges, transform[0]).contiguous()
        return torch.einsum("becrq,ecjqn->bjecrn", at_edges, transform.index_select(0, kernel)).contiguous()

    def check(self, pose: Tensor, transform: Tensor) -> None:
        """Check that the shapes of pose ``[B, S, C, R, Q]`` and transform ``[K, C, J, Q, N]`` match the map.

        Raises:
            ValueError: the shapes do not match the map or each other; ``pose`` or ``transform`` is not a floating-point
                tensor; or the two tensors are on different devices.
        """
        if not isinstance(pose, Tensor):
            cure = ": pass children.pose" if hasattr(pose, "pose") else ""
            raise ValueError(f"pose must be a tensor [B, S, C, R, Q]; got {described(pose)}{cure}")
        if not isinstance(transform, Tensor):
            raise ValueError(f"transform must be a tensor [K, C, J, Q, N]; got {described(transform)}")
        poses, transforms = pose.shape, transform.shape
        if len(poses) != 5 or len(transforms) != 5:
            cure = ": use pose[..., None, :] for vector poses" if len(poses) == 4 else ""
            raise ValueError(
                f"pose must be [B, S, C, R, Q] and transform [K, C, J, Q, N]; got {list(poses)} and {list(transforms)}"
                + cure
            )
        for name, tensor, shape in (("pose", pose, poses), ("transform", transform, transforms)):
            check_floating(name, tensor)
            if 0 in shape[1:]:
                raise ValueError(f"every dimension of {name} after the first must be at least 1; got {list(shape)}")
        check_device("transform", transform, pose.device)
        _, sites, types, _, columns = poses
        if sites != self.child_sites:
            raise ValueError(
                f"pose has {sites} child sites (dimension 1), but the routing map has {self.child_sites}: "
                f"create the layer or the map for {sites} child sites"
            )
        if transforms[0] != self.transforms:
            raise ValueError(
                f"transform has size {transforms[0]} in dimension 0, but the routing map has {self.transforms} "
                f"transforms: create the transform or the map for the same number of transforms"
            )
        if types != transforms[1] or columns != transforms[3]:
            raise ValueError(
                "pose [B, S, C, R, Q] and transform [K, C, J, Q, N] must have the same C and Q; pose has "
                f"C={types}, Q={columns} and transform has C={transforms[1]}, Q={transforms[3]}: create the layer or "
                f"the transform for C={types}, Q={columns}"
            )

    def log_couplings(
        self, logits: Float[Tensor, "B J E C"], none_of_the_above: bool = False
    ) -> Float[Tensor, "B J E C"]:
        """Compute the log-softmax of each child's logits over all parent types at all parent sites of the child.

        Arguments:
            logits: ``[B, J, E, C]``, one logit per parent type, edge and child type.
            none_of_the_above: include an extra parent with logit 0 in each softmax, but not in the result (leaky
                routing).
        """
        largest = logits.detach().amax(dim=1)
        child, shape = None, (largest.shape[0], self.child_sites, largest.shape[2])
        if self.most_edges != 1:
            child = self.edges_on(logits.device)[:, 0].expand_as(largest.mT).mT
            largest = largest.new_full(shape, -torch.inf).scatter_reduce(1, child, largest, "amax").gather(1, child)
        largest = largest.clamp_min(0) if none_of_the_above else largest
        relative = logits - largest.unsqueeze(1)  # logits - (largest + log) would round the logarithm away
        total = relative.exp().sum(dim=1)
        if child is not None:
            total = total.new_zeros(shape).scatter_add(1, child, total).gather(1, child)
        return relative - (total + (-largest).exp() if none_of_the_above else total).log().unsqueeze(1)

    def sum_at_parents(self, values: Float[Tensor, "B J E *rest"]) -> Float[Tensor, "B J P *rest"]:
        """Sum values over the incoming edges of each parent site."""
        if self.parent_sites == 1:
            return values.sum(dim=2, keepdim=True)
        per_parent = values.new_zeros(*values.shape[:2], self.parent_sites, *values.shape[3:])
        return added_at(per_parent, 2, self.edges_on(values.device)[:, 1], values)

    def at_edges(self, values: Float[Tensor, "B J P *rest"]) -> Float[Tensor, "B J E *rest"]:
        """Copy the value of each parent site to its incoming edges."""
        if self.parent_sites == 1:
            return values.expand(*values.shape[:2], self.edges.shape[0], *values.shape[3:])
        return values.index_select(2, self.edges_on(values.device)[:, 1])

    def largest_at_parents(self, values: Float[Tensor, "B J E C"]) -> Float[Tensor, "B J P"]:
        """Compute the largest value among all children of each parent."""
        per_edge = values.amax(dim=3)
        per_parent = per_edge.new_full((*per_edge.shape[:2], self.parent_sites), -torch.inf)
        parent = self.edges_on(values.device)[:, 1]
        return per_parent.scatter_reduce(2, parent.expand_as(per_edge), per_edge, "amax")


def added_at(sums: Tensor, dim: int, index: Int64[Tensor, " E"], values: Tensor) -> Tensor:
    """Return ``sums.index_add(dim, index, values)``.

    In an export to ONNX, ``scatter_add`` is used instead: onnxruntime computes the operator for ``index_add``,
    ScatterND, in several threads, which overwrite each other's sums
    (https://github.com/microsoft/onnxruntime/issues/18048).
    """
    if not in_onnx_export():
        return sums.index_add(dim, index, values)
    shape = [1] * values.ndim
    shape[dim] = -1
    return sums.scatter_add(dim, index.view(shape).expand_as(values), values)


def check_children(pose: Tensor, transform: Tensor, routing_map: RoutingMap) -> None:
    """Check that pose and transform fit a routing map.

    Raises:
        ValueError: ``routing_map`` is not a `RoutingMap`, or ``pose`` or ``transform`` does not fit the map.
    """
    if not isinstance(routing_map, RoutingMap):
        raise ValueError(f"routing_map must be a RoutingMap, such as RoutingMap.dense(6); got {described(routing_map)}")
    routing_map.check(pose, transform)
