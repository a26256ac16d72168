"""Base class of routing rules. A rule calls `Votes.moments` in a loop, with plain PyTorch between the calls."""

import inspect
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.capsules import Capsules, check_capsules
from torchcaps.checks import check_activation, described
from torchcaps.errors import BadInput
from torchcaps.kernels import Backend
from torchcaps.kernels.memory import statistics_dtype
from torchcaps.routing.agreement import Competition
from torchcaps.routing.precision import in_dtype, without_autocast
from torchcaps.routing.votes import Votes
from torchcaps.routing_map import RoutingMap, check_children

OwnRule = TypeVar("OwnRule", bound="Rule")


class LayerShape(NamedTuple):
    """Sizes of a layer, from which a rule creates its parameters.

    Arguments:
        transforms: number of transforms (K).
        child_types: number of capsule types per child site (C).
        parent_types: number of capsule types per parent site (J).
        child_pose_shape: rows and columns (R, Q) of a child's pose. Q includes columns that `coordinate_addition`
            appends.
        parent_pose_shape: rows and columns (R, N) of a parent's pose.
    """

    transforms: int
    child_types: int
    parent_types: int
    child_pose_shape: tuple[int, int]
    parent_pose_shape: tuple[int, int]


class Rule(nn.Module):
    """Base class of routing rules, which compute parents from votes. A subclass implements `route`.

    The parents have the widest dtype of poses, transform and, if the rule uses them, activations. The rule computes at
    least in float32. Autocast does not change these dtypes, provided that ``backward`` is called outside the autocast
    context. A network can be saved if its rule is in ``torchcaps.ROUTINGS``.

    Example:
        >>> from torchcaps.routing.votes import Agreement
        >>> class SoftKMeans(Rule):
        ...     def route(self, votes: Votes) -> Capsules:
        ...         agreement = None
        ...         for _ in range(3):
        ...             found = votes.moments(agreement)
        ...             agreement = Agreement(quadratic=torch.ones_like(found.mean), centre=found.mean)
        ...         return Capsules(found.mean, torch.exp(-found.variance.sum(dim=(3, 4))))
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> SoftKMeans()(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    weighs_activations = True
    """Whether votes are weighted with the activation of the child."""
    competition: Competition = "parents"
    """Couplings are a softmax. ``parents``: over all parents of a child; ``types``: over the types at a parent site."""
    none_of_the_above = False
    """Whether every softmax includes an extra parent with logit 0, which takes a part of the couplings of a child."""
    activation_from_mass = False
    """Whether the activation of a parent depends only on its mass. `torchcaps.inspect` reads this attribute."""
    later_options: tuple[str, ...] = ()
    """Options that saved networks of earlier versions lack. They have their default values in these networks."""
    backend: Backend = "auto"
    """``fused`` (do not store votes), ``reference`` (store all votes), or ``auto``: fused if the kernels can run."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a subclass that defines ``forward(self, votes)`` instead of `route`."""
        super().__init_subclass__(**arguments)
        given = inspect.signature(cls.forward).parameters
        if "return_couplings" not in given and all(one.kind is not one.VAR_KEYWORD for one in given.values()):
            raise TypeError(f"the routing rule {cls.__name__} overrides forward: define route(self, votes) instead")

    @property
    def passes(self) -> int:
        """Number of calls of `Votes.moments` in `route`: ``self.iterations`` if it is defined, otherwise 1."""
        return passes_of(getattr(self, "iterations", 1))

    @property
    def saved_options(self) -> dict[str, Any]:
        """Constructor arguments, as `save_pretrained` saves them: by default, the attributes with the same names.

        Override this property if the rule does not store each argument as an attribute of the same name.

        Raises:
            BadInput: an argument is not stored in this way. Parameters, buffers and modules do not count.
        """
        without_arguments = type(self).__init__ is nn.Module.__init__
        names, stored = [] if without_arguments else [*inspect.signature(type(self)).parameters], vars(self)
        if missing := [name for name in names if name not in stored]:
            raise BadInput(
                f"the routing rule {type(self).__name__} does not store the argument {missing[0]!r} of its constructor "
                "as an attribute of the same name: store it or define saved_options"
            )
        return {name: stored[name] for name in names}

    @classmethod
    def for_layer(cls: type[OwnRule], layer: LayerShape, **options: Any) -> OwnRule:
        """Create the rule for a layer. A layer calls this method if its ``routing`` is a name or a `Routing`."""
        return cls(**options)

    def prepare(self, pose: Tensor, transform: Tensor, routing_map: RoutingMap) -> tuple[Tensor, Tensor]:
        """Change pose and transform before votes are computed, for example to add columns to every vote.

        A rule that overrides this method gets both in the dtype of the computation, at least float32.
        """
        return pose, transform

    def logit_weights(self) -> Float[Tensor, "K C J W"] | None:
        """Return learned weights with which logits depend on the poses of the children: `Votes` explains them.

        The result is ``[K, C, J, R·Q + 1]``, for K transforms, C child types, J parent types and children with poses of
        R×Q numbers, including columns that `prepare` adds; or None, the default, if only the agreement counts.
        """
        return None

    def contributions(
        self, votes: Float[Tensor, "J E C R N"], weights: Float[Tensor, "J E C"], columns: int
    ) -> Float[Tensor, "J E C R columns"]:
        """Return what each child adds to the pose of each parent, for `torchcaps.inspect`: weight · vote.

        A rule that appends columns to the votes, and uses them for the pose, overrides this method.

        Arguments:
            votes: the votes of one sample, along each edge of the map, with the columns that `prepare` adds.
            weights: activation · coupling, or only the coupling if the rule ignores activations.
            columns: number of columns of a parent's pose.
        """
        return weights[..., None, None] * votes[..., :columns]

    def route(self, votes: Votes) -> Capsules:
        """Compute the parents: pose ``[B, P, J, R, N]`` and activation ``[B, P, J]``."""
        raise NotImplementedError(f"{type(self).__name__} has no method route: define route(self, votes)")

    @overload
    def forward(
        self,
        children: Capsules,
        transform: Tensor,
        routing_map: RoutingMap,
        return_couplings: Literal[False] = False,
        **options: Any,
    ) -> Capsules: ...
    @overload
    def forward(
        self,
        children: Capsules,
        transform: Tensor,
        routing_map: RoutingMap,
        return_couplings: Literal[True],
        **options: Any,
    ) -> tuple[Capsules, Tensor]: ...
    @overload
    def forward(
        self, children: Capsules, transform: Tensor, routing_map: RoutingMap, return_couplings: bool, **options: Any
    ) -> Capsules | tuple[Capsules, Tensor]: ...
    def forward(
        self, children: Any, transform: Any, routing_map: Any, return_couplings: bool = False, **options: Any
    ) -> Any:
        """Compute the parents of a layer.

        Arguments:
            children: pose ``[B, S, C, R, Q]`` and activation ``[B, S, C]``; the page Concepts explains the dimension
                letters.
            transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
            routing_map: the graph that connects child sites with parent sites.
            return_couplings: also return the couplings of the last call of `Votes.moments`, ``[B, J, E, C]``.
            options: further arguments of `route`, if the rule has any, such as ``parents`` of `AttentionRouting`.

        Raises:
            ValueError: ``children`` or ``transform`` does not fit the map; the activation does not fit the pose, or a
                value of it is negative; or ``return_couplings`` is given, but the rule does not call `Votes.moments`.
                A rule that ignores activations, ``weighs_activations = False``, does not check them. Values are checked
                on CPUs only.
            TypeError: `route` does not return `Capsules` with a pose ``[B, P, J, R, N]`` and an activation
                ``[B, P, J]``.
        """
        check_capsules(children)
        check_children(children.pose, transform, routing_map)
        pose, activation = children
        dtype = torch.promote_types(pose.dtype, transform.dtype)
        if self.weighs_activations:
            check_activation(activation, pose)
            dtype = torch.promote_types(dtype, activation.dtype)
        with without_autocast(pose.device):
            if getattr(self.prepare, "__func__", None) is not Rule.prepare:
                computed = statistics_dtype(dtype)
                pose, transform = self.prepare(pose.to(computed), transform.to(computed), routing_map)
            votes = Votes(
                pose,
                activation if self.weighs_activations else None,
                transform,
                routing_map,
                competition=self.competition,
                none_of_the_above=self.none_of_the_above,
                passes=self.passes,
                backend=self.backend,
                logit_weights=self.logit_weights(),
            )
            parents = self.route(votes, **options)
            if not _are_capsules(parents):
                found = ", ".join(map(described, parents)) if isinstance(parents, tuple) else described(parents)
                raise TypeError(
                    f"{type(self).__name__}.route must return Capsules(pose, activation) with pose [B, P, J, R, N] and "
                    f"activation [B, P, J]; got {found}"
                )
            parents = capsules_in_dtype(parents, dtype)
            return (parents, votes.last_couplings()) if return_couplings else parents

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in stored_options(self).items())


def capsules_in_dtype(capsules: Capsules, dtype: torch.dtype) -> Capsules:
    """Convert poses and activations to a dtype."""
    return Capsules(in_dtype(capsules.pose, dtype), in_dtype(capsules.activation, dtype))


def stored_options(rule: Rule) -> dict[str, Any]:
    """Return the constructor arguments that a rule stores as attributes, also those of its base classes."""
    kinds = [kind for kind in type(rule).__mro__ if issubclass(kind, Rule)]
    names = dict.fromkeys(name for kind in kinds for name in inspect.signature(kind).parameters)
    return {name: vars(rule)[name] for name in names if name in vars(rule)}


def passes_of(iterations: Any) -> int:
    """Return the number of passes for a number of iterations: at least 1. The rule itself checks the iterations."""
    return max(1, int(iterations)) if isinstance(iterations, Integral) else 1


def _are_capsules(parents: Any) -> bool:
    """Return whether a rule has returned capsules with pose ``[B, P, J, R, N]`` and activation ``[B, P, J]``."""
    if not isinstance(parents, Capsules) or not all(isinstance(part, Tensor) for part in parents):
        return False
    return parents.pose.ndim == 5 and parents.activation.shape == parents.pose.shape[:3]


def check_transform(transform: Tensor, parameter: Tensor, name: str) -> None:
    """Check that a transform ``[K, C, J, Q, N]`` fits a parameter ``[K, C, J]`` of a rule.

    Raises:
        ValueError: K, C or J differ.
    """
    if transform.shape[:3] != parameter.shape:
        raise ValueError(
            f"transform must have [K, C, J] = {list(parameter.shape)}, the shape of the parameter {name} of this rule; "
            f"got {list(transform.shape[:3])}: create the rule with transforms={transform.shape[0]}, "
            f"child_types={transform.shape[1]}, parent_types={transform.shape[2]}"
        )
