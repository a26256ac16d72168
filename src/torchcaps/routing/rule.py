"""What every routing rule is: moments of votes, and plain PyTorch between two of them."""

from abc import abstractmethod
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, check_capsules
from torchcaps.kernels import Backend
from torchcaps.routing.agreement import Competition
from torchcaps.routing.votes import Votes
from torchcaps.routing_map import RoutingMap


class LayerShape(NamedTuple):
    """What a rule with parameters of its own has to know of its layer.

    Arguments:
        transforms: K.
        child_types: C.
        parent_types: J.
        child_pose_shape: (R, Q), coordinates included where the layer adds them.
        parent_pose_shape: (R, N).
    """

    transforms: int
    child_types: int
    parent_types: int
    child_pose_shape: tuple[int, int]
    parent_pose_shape: tuple[int, int]


class Rule(nn.Module):
    """A routing rule: how parents are fitted to the votes of their children. Subclass it and write `route`.

    A rule computes in the widest dtype of children and transform, and never in less than float32, whatever autocast
    says. One that is in ``torchcaps.ROUTINGS`` and has ``saved_options`` is saved with the weights of its network.

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
    """Whether a child's votes are weighted with its activation."""
    competition: Competition = "parents"
    """The parents that share a child: all that it reaches, or the types at one site alone."""
    backend: Backend = "auto"
    """Which kernels compute the votes; see `Votes`."""

    @property
    def passes(self) -> int:
        """How often `route` calls `Votes.moments`: ``self.iterations`` where there is one, else 1. See `Votes`."""
        return getattr(self, "iterations", 1)

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "Rule":
        """The rule for a layer that names it: a rule with parameters of its own takes their sizes from the layer."""
        return cls(**options)

    def prepare(self, pose: Tensor, transform: Tensor) -> tuple[Tensor, Tensor]:
        """What the votes are made of. A rule may add columns here, to carry numbers of its own in every vote."""
        return pose, transform

    @abstractmethod
    def route(self, votes: Votes) -> Capsules:
        """The parents: pose ``[B, P, J, R, N]`` and activation ``[B, P, J]``."""

    @overload
    def forward(
        self, children: Capsules, transform: Tensor, routing_map: RoutingMap, return_couplings: Literal[False] = False
    ) -> Capsules: ...
    @overload
    def forward(
        self, children: Capsules, transform: Tensor, routing_map: RoutingMap, return_couplings: Literal[True]
    ) -> tuple[Capsules, Tensor]: ...
    def forward(self, children: Any, transform: Any, routing_map: Any, return_couplings: bool = False) -> Any:
        """Route votes to parents.

        Arguments:
            children: pose ``[B, S, C, R, Q]`` and activation ``[B, S, C]``.
            transform: ``[K, C, J, Q, N]``.
            routing_map: which child site feeds which parent site.
            return_couplings: also return the couplings of the last pass, ``[B, J, E, C]``.

        Raises:
            ValueError: shapes disagree with the map.
        """
        check_capsules(children)
        dtype = torch.promote_types(torch.promote_types(children.pose.dtype, transform.dtype), torch.float32)
        activation = children.activation.to(dtype) if self.weighs_activations else None
        with torch.autocast(children.pose.device.type, enabled=False):
            pose, transform = self.prepare(children.pose.to(dtype), transform.to(dtype))
            votes = Votes(
                pose,
                activation,
                transform,
                routing_map,
                competition=self.competition,
                passes=self.passes,
                backend=self.backend,
            )
            parents = self.route(votes)
            return (parents, votes.last_couplings()) if return_couplings else parents
