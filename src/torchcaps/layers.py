"""Capsule layers made of a routing map, transforms and a routing rule."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.capsules import Capsules, check_capsules, check_sites, coordinate_addition, vector_side
from torchcaps.checks import check_number, check_shape, check_sizes, described, has_values, is_compiling
from torchcaps.constant import Constant
from torchcaps.routing import LayerShape, Routing, Rule, rule_for
from torchcaps.routing_map import RoutingMap

WithCouplings = tuple[Capsules, Tensor]


class TransformModule(nn.Module):
    """Base class of layers with transforms and a routing rule.

    ``model.to(memory_format=torch.channels_last)`` leaves the memory layout of the transforms unchanged. PyTorch cannot
    convert them: channels_last exists for four dimensions only, and transforms have five.
    """

    transform: Tensor
    routing: Rule
    _draw: Callable[[Tensor], object] | None = None

    def initialise(self, draw: Callable[[Tensor], object]) -> None:
        """Draw the transforms in place with ``draw``, now and in every later call of `reset_parameters`."""
        self._draw = draw
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial transforms. Like the layers of PyTorch, the method does not reset submodules.

        Raises:
            RuntimeError: the initial transforms were given as a tensor.
        """
        if self._draw is None:
            raise RuntimeError(
                f"{type(self).__name__} cannot draw new transforms, because its initial transforms were given as a "
                "tensor: call initialise with a function that draws them"
            )
        with torch.no_grad():
            self._draw(self.transform)

    @overload
    def forward(self, children: Capsules, return_couplings: Literal[False] = False, **options: Any) -> Capsules: ...
    @overload
    def forward(self, children: Capsules, return_couplings: Literal[True], **options: Any) -> WithCouplings: ...
    @overload
    def forward(self, children: Capsules, return_couplings: bool, **options: Any) -> Capsules | WithCouplings: ...
    def forward(self, children: Capsules, return_couplings: bool = False, **options: Any) -> Capsules | WithCouplings:
        """Compute the parents ``[B, P, J, R, N]`` and, with ``return_couplings``, the couplings ``[B, J, E, C]``.

        Couplings that need a gradient are computed from stored votes; to avoid this, call the layer again in
        ``torch.no_grad()``. The rule gets all other ``options``, such as ``parents`` of `AttentionRouting`.
        """
        return self.routing(*self._inputs(children), return_couplings=return_couplings, **options)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return ", ".join(f"{letter}={size}" for letter, size in zip("KCJQN", self.transform.shape, strict=False))

    def _inputs(self, children: Capsules) -> tuple[Capsules, Tensor, RoutingMap]:
        """Return the children, the transform and the routing map for the rule."""
        raise NotImplementedError

    def _apply(self, function: Callable[[Tensor], Tensor], *arguments: Any, **options: Any) -> "TransformModule":  # type: ignore[override]
        def keeping_order(tensor: Tensor) -> Tensor:
            try:
                return function(tensor)
            except RuntimeError as error:
                if tensor.ndim != 5 or "channels_last" not in str(error):
                    raise
                return function(tensor.flatten()).view(tensor.shape)

        return super()._apply(keeping_order, *arguments, **options)


class CapsuleLayer(TransformModule):
    """Capsule layer made of a routing map, transforms and a routing rule; base of `DenseCaps`, `ConvCaps`, `ClassCaps`.

    `torchcaps.capsules` explains the dimension letters.

    Arguments:
        routing_map: the graph that connects child sites with parent sites, with the index of a transform for each edge.
        transform: the initial transforms ``[K, C, J, Q, N]``. The layer trains a copy. An `nn.Parameter` is not copied,
            so several layers can share it; `save_pretrained` refuses such a network.
        routing: a rule module, a name in `ROUTINGS`, or a `Routing` (name and options).
        child_pose_shape: rows and columns (R, Q) of the poses that the rule receives; (1, Q) by default. Q includes
            columns that `coordinate_addition` appends in the forward pass; in ``transform``, Q does not include them.
        draw: function that draws the transforms in place, now and in `reset_parameters`; None to keep ``transform``.

    Raises:
        TypeError: ``routing_map`` is not a `RoutingMap`.
        ValueError: ``transform`` has another dtype or shape than documented; ``child_pose_shape`` is not two integers;
            or ``routing`` is unknown, or was created for a layer with other sizes.

    Example:
        >>> layer = CapsuleLayer(RoutingMap.dense(6), torch.randn(6, 4, 10, 8, 16), "dynamic")
        >>> layer(Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    def __init__(
        self,
        routing_map: RoutingMap,
        transform: Tensor,
        routing: Rule | Routing | str,
        child_pose_shape: tuple[int, int] | None = None,
        draw: Callable[[Tensor], object] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(routing_map, RoutingMap):
            raise TypeError(f"routing_map must be a RoutingMap; got {described(routing_map)}: use RoutingMap.dense")
        floats = isinstance(transform, Tensor) and transform.is_floating_point()
        if not floats or transform.ndim != 5 or len(transform) != routing_map.transforms:
            raise ValueError(
                "transform must be a floating-point tensor [K, C, J, Q, N], where K is the number of transforms of the "
                f"routing map, {routing_map.transforms}; got {described(transform)}"
            )
        self.routing_map = routing_map
        self.transform = transform if isinstance(transform, nn.Parameter) else nn.Parameter(transform.detach().clone())
        if draw is not None:
            self.initialise(draw)
        transforms, child_types, parent_types, columns, outer = transform.shape
        child_pose_shape = (1, columns) if child_pose_shape is None else child_pose_shape
        check_shape("child_pose_shape", child_pose_shape, "R, Q")
        poses = child_pose_shape, (child_pose_shape[0], outer)
        self.routing = rule_for(routing, LayerShape(transforms, child_types, parent_types, *poses))
        for constant in CapsuleLayer._constants(self):
            constant.on(transform.device)

    def _apply(self, *arguments: Any, **options: Any) -> "CapsuleLayer":
        """Move the layer and copy its constants to the new device, because compiled calls cannot cache copies."""
        super()._apply(*arguments, **options)
        for constant in self._constants():
            constant.on(self.transform.device)
        return self

    def _constants(self) -> list[Constant]:
        return [self.routing_map.constant, self.routing_map.edge_lists, self.routing_map.place_by_child]

    def _inputs(self, children: Capsules) -> tuple[Capsules, Tensor, RoutingMap]:
        return children, self.transform, self.routing_map


class DenseCaps(CapsuleLayer):
    """Fully connected capsule layer, such as DigitCaps: every pair of child and parent has its own transform.

    Sabour, Frosst & Hinton 2017, section 4. For J parents of pose size N and S·C children, the initial transforms are
    normally distributed with standard deviation 1.36 min(J, 10) / √(S·C·N), truncated at two standard deviations. With
    this formula, uniform couplings and at most ten parents, the initial length of the parents depends on neither the
    number of children nor the number of parents. For the paper's network on MNIST, the standard deviation is 0.1, as in
    the authors' code. A standard deviation of 0.1 for many children and few parents would saturate the squash. The
    factor min(J, 10) stops growing at ten parents: with a larger standard deviation, each child would soon choose a
    single parent, and most parents would stay at 0.

    Arguments:
        child_sites: number of child sites (S).
        child_types: number of capsule types per child site (C).
        child_pose_size: length of a child's pose (Q).
        parent_types: number of parents, usually one per class (J).
        parent_pose_size: length of a parent's pose (N).
        routing: a rule module, a name in `ROUTINGS`, or a `Routing` (name and options).

    Raises:
        ValueError: a size is below 1, or ``routing`` is not a known rule or does not fit the layer.

    Example:
        >>> from torchcaps import PrimaryCaps
        >>> children = PrimaryCaps(1, types=4, pose_size=8, kernel_size=9)(torch.randn(2, 1, 10, 10))
        >>> DenseCaps(4, 4, 8, parent_types=10, parent_pose_size=16)(children).activation.shape
        torch.Size([2, 1, 10])
    """

    def __init__(
        self,
        child_sites: int,
        child_types: int,
        child_pose_size: int,
        parent_types: int,
        parent_pose_size: int,
        routing: Rule | Routing | str = "dynamic",
    ) -> None:
        check_sizes(child_sites=child_sites, child_types=child_types, child_pose_size=child_pose_size)
        check_sizes(parent_types=parent_types, parent_pose_size=parent_pose_size)
        std = 1.36 * min(parent_types, 10) / (child_sites * child_types * parent_pose_size) ** 0.5
        draw = partial(truncated_normal_, std=std)
        transform = torch.empty(child_sites, child_types, parent_types, child_pose_size, parent_pose_size)
        super().__init__(RoutingMap.dense(child_sites), transform, routing, (1, child_pose_size), draw)


class ConvCaps(CapsuleLayer):
    """Convolutional capsule layer: each parent site is connected to a window of child sites.

    Hinton, Sabour & Frosst 2018, section 4. Each position in the window has its own transforms, which all parent sites
    share.

    Arguments:
        child_grid: (height, width) of the grid of child sites.
        child_types: number of capsule types per child site (C).
        parent_types: number of capsule types per parent site (J).
        kernel_size, stride: size and stride of the window, in child sites: an integer or (height, width).
        padding: width of the empty border around the grid, in child sites: an integer or (vertical, horizontal).
        pose_size: rows and columns of every pose: (4, 4) for 4×4 transforms, or (1, 16) for 16×16 transforms.
        initial_std: standard deviation of the normal distribution of the initial transforms, which is truncated at two
            standard deviations.
        around_identity: initialise transforms around the identity instead of zero. With transforms around zero, votes
            cancel out: poses shrink from layer to layer, and each routing iteration amplifies small changes of poses.
        routing: a rule module, a name in `ROUTINGS`, or a `Routing` (name and options).

    Raises:
        ValueError: a size is below 1, ``padding`` is not in [0, kernel_size), the window exceeds the padded grid,
            ``initial_std`` is negative or not finite, or ``routing`` is not a known rule or does not fit the layer.

    Example:
        >>> from torchcaps import PrimaryCaps
        >>> children = PrimaryCaps(1, 8, (4, 4), 5, squash_form="none", activation="sigmoid")(torch.randn(2, 1, 10, 9))
        >>> layer = ConvCaps((6, 5), 8, parent_types=16, kernel_size=3, stride=2)
        >>> layer.parent_grid, layer(children).pose.shape
        ((2, 2), torch.Size([2, 4, 16, 4, 4]))
    """

    def __init__(
        self,
        child_grid: tuple[int, int],
        child_types: int,
        parent_types: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        pose_size: Sequence[int] = (4, 4),
        initial_std: float = 0.1,
        around_identity: bool = True,
        routing: Rule | Routing | str = "em",
    ) -> None:
        check_sizes(child_types=child_types, parent_types=parent_types)
        check_shape("pose_size", pose_size, "rows, columns")
        size = pose_size[1]
        draw = partial(square_transforms_, std=initial_std, around_identity=around_identity)
        routing_map = RoutingMap.conv(child_grid, kernel_size, stride, padding)
        transform = torch.empty(routing_map.transforms, child_types, parent_types, size, size)
        super().__init__(routing_map, transform, routing, (pose_size[0], pose_size[1]), draw)

    @property
    def parent_grid(self) -> tuple[int, int]:
        """(height, width) of the grid of parent sites."""
        return self.routing_map.parent_grid


class ClassCaps(CapsuleLayer):
    """Class capsules: one parent per class. Children of the same type share transforms at all positions.

    Hinton, Sabour & Frosst 2018, section 4. Coordinate Addition adds the position of each child to its votes.

    Arguments:
        coordinates: ``[S, 2]``, vertical and horizontal position of the centre of each child's receptive field, for
            example in [0, 1].
        child_types: number of capsule types per child site (C).
        num_classes: number of classes (J).
        pose_size: rows and columns of every pose, for example (4, 4) or (1, 16).
        add_coordinates: add the coordinates to the votes. If False, the positions of the children have no effect.
        initial_std: standard deviation of the normal distribution of the initial transforms, which is truncated at two
            standard deviations.
        around_identity: initialise the transforms around the identity instead of zero.
        routing: a rule module, a name in `ROUTINGS`, or a `Routing` (name and options).

    Raises:
        ValueError: ``coordinates`` is not ``[S, 2]`` or is on the meta device, a size is below 1, ``initial_std`` is
            negative or not finite, ``routing`` is not a known rule or does not fit the layer, or coordinates are added
            to poses with one row whose number of columns is not a square (4, 9, …).

    Example:
        >>> children = Capsules(torch.randn(2, 9, 8, 4, 4), torch.rand(2, 9, 8))
        >>> ClassCaps(torch.rand(9, 2), child_types=8, num_classes=5)(children).activation.shape
        torch.Size([2, 1, 5])
    """

    def __init__(
        self,
        coordinates: Float[Tensor, "S 2"],
        child_types: int,
        num_classes: int,
        pose_size: Sequence[int] = (4, 4),
        add_coordinates: bool = True,
        initial_std: float = 0.1,
        around_identity: bool = True,
        routing: Rule | Routing | str = "em",
    ) -> None:
        is_meta = isinstance(coordinates, Tensor) and coordinates.is_meta
        if not isinstance(coordinates, Tensor) or coordinates.shape[1:] != (2,) or is_meta:
            cure = ' on the meta device, without values: create it with device="cpu"' if is_meta else ""
            raise ValueError(f"coordinates must be [S, 2], row and column per site; got {described(coordinates)}{cure}")
        check_sizes(child_types=child_types, num_classes=num_classes)
        check_shape("pose_size", pose_size, "rows, columns")
        size = pose_size[1]
        if add_coordinates and pose_size[0] == 1:
            vector_side(size)
        draw = partial(square_transforms_, std=initial_std, around_identity=around_identity)
        transform = torch.empty(1, child_types, num_classes, size, size)
        routing_map = RoutingMap.shared(len(coordinates))
        more = (1 if pose_size[0] > 1 else 2) if add_coordinates else 0
        super().__init__(routing_map, transform, routing, (pose_size[0], pose_size[1] + more), draw)
        self._coordinates = Constant(coordinates.clone())
        self._coordinates.on(self.transform.device)
        self.add_coordinates = add_coordinates

    def _constants(self) -> list[Constant]:
        return [*super()._constants(), self._coordinates]

    @property
    def coordinates(self) -> Float[Tensor, "S 2"]:
        """Coordinates ``[S, 2]`` on the layer's device."""
        return self._coordinates.on(self.transform.device)

    def _inputs(self, children: Capsules) -> tuple[Capsules, Tensor, RoutingMap]:
        check_capsules(children)
        pose: Tensor = children.pose
        transform: Tensor = self.transform
        self.routing_map.check(pose, transform)
        if self.add_coordinates:
            pose, transform = coordinate_addition(pose, transform, self.coordinates)
        return Capsules(pose, children.activation), transform, self.routing_map


def truncated_normal_(weights: Tensor, std: float, name: str = "initial_std") -> Tensor:
    """Draw weights in place from a normal distribution truncated at two standard deviations, and return the weights."""
    check_number(name, std, "[0, inf)")
    if std == 0:
        return nn.init.zeros_(weights)
    return nn.init.trunc_normal_(weights, std=std, a=-2 * std, b=2 * std)


def square_transforms_(transform: Float[Tensor, "K C J Q Q"], std: float, around_identity: bool) -> Tensor:
    """Draw square transforms in place from a truncated normal distribution around the identity or zero."""
    truncated_normal_(transform, std).diagonal(dim1=3, dim2=4).add_(float(around_identity))
    return transform


class SharedCaps(TransformModule):
    """Capsule layer whose children share one transform per parent type, so the number of children may vary.

    This is the "shared" capsule layer of Su 2018. It works on images of any size. The couplings have the shape
    ``[B, J, S·C, 1]``, because every child counts as a site with one type. Initial transforms are uniform in
    ±√(6 / (Q + J·N)). With hundreds of children and a rule that sums votes (dynamic, uniform, self-attention), draw
    smaller transforms: ``layer.initialise(lambda w: torch.nn.init.normal_(w, std=0.01))``.

    Arguments:
        child_pose_size: length of a child's pose (Q).
        parent_types: number of parents, usually one per class (J).
        parent_pose_size: length of a parent's pose (N).
        routing: a rule module, a name in `ROUTINGS`, or a `Routing` (name and options).

    Raises:
        ValueError: a size is below 1, or ``routing`` is not a known rule or does not fit the layer.

    Example:
        >>> from torchcaps import PrimaryCaps
        >>> layer = SharedCaps(8, parent_types=10, parent_pose_size=16)
        >>> layer(PrimaryCaps(1, types=4, pose_size=8, kernel_size=9)(torch.randn(2, 1, 10, 30))).activation.shape
        torch.Size([2, 1, 10])
    """

    def __init__(
        self,
        child_pose_size: int,
        parent_types: int,
        parent_pose_size: int,
        routing: Rule | Routing | str = "dynamic",
    ) -> None:
        super().__init__()
        check_sizes(child_pose_size=child_pose_size, parent_types=parent_types, parent_pose_size=parent_pose_size)
        self.transform = nn.Parameter(torch.empty(1, 1, parent_types, child_pose_size, parent_pose_size))
        bound = (6 / (child_pose_size + parent_types * parent_pose_size)) ** 0.5
        self.initialise(partial(nn.init.uniform_, a=-bound, b=bound))
        self.routing = rule_for(routing, LayerShape(1, 1, parent_types, (1, child_pose_size), (1, parent_pose_size)))
        self._map: RoutingMap | None = None

    def _map_of(self, sites: int, device: torch.device) -> RoutingMap:
        """Return a routing map with ``sites`` child sites. The previous map is reused if its size is the same."""
        if is_compiling():
            return RoutingMap.shared(sites, device)
        if self._map is not None and self._map.child_sites == sites:
            return self._map
        routing_map = RoutingMap.shared(sites)
        if has_values(routing_map.edges):
            self._map = routing_map
        return routing_map

    def _inputs(self, children: Capsules) -> tuple[Capsules, Tensor, RoutingMap]:
        check_sites(children)
        pose, activation = (part.flatten(1, 2).unsqueeze(2) for part in children)
        return Capsules(pose, activation), self.transform, self._map_of(pose.shape[1], pose.device)
