"""The votes of a layer as a routing rule sees them: summed at the parents under an agreement, never handed out."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.routing_map import RoutingMap

Competition = Literal["parents", "types"]


class Agreement(NamedTuple):
    """How well a vote fits each parent: the logit of a child's coupling to it, a quadratic function of the vote.

    ::

        logit = constant + Σ linear · d - Σ quadratic · d²        d = V - centre, sums over the numbers of a vote

    What is None is 0. An agreement of which all is None gives even couplings.

    Arguments:
        constant: ``[B, P, J]``.
        linear, quadratic, centre: ``[B, P, J, R, N]``.
    """

    constant: Float[Tensor, "B P J"] | None = None
    linear: Float[Tensor, "B P J R N"] | None = None
    quadratic: Float[Tensor, "B P J R N"] | None = None
    centre: Float[Tensor, "B P J R N"] | None = None


class Moments(NamedTuple):
    """What a parent learns of its votes, each weighted by coupling and activation of its child: ``w_ij = a_i c_ij``.

    Arguments:
        mass: Σ w, ``[B, P, J]``.
        mean: Σ w V / Σ w, ``[B, P, J, R, N]``; 0 where all children are off.
        variance: Σ w (V - mean)² / Σ w, of the same shape; None where it was not asked for.
    """

    mass: Float[Tensor, "B P J"]
    mean: Float[Tensor, "B P J R N"]
    variance: Float[Tensor, "B P J R N"] | None


class Votes:
    """The votes of children for parents along every edge of a map, ``V = pose · transform``.

    Arguments:
        children: pose ``[B, S, C, R, Q]`` and activation ``[B, S, C]``; an activation of None counts as 1 everywhere.
        transform: ``[K, C, J, Q, N]``.
        routing_map: which child site feeds which parent site.
        competition: the parents that share a child: ``parents``, all that it reaches, or ``types`` at one site alone.
        none_of_the_above: a further parent with logit 0 takes part in every softmax.

    Raises:
        ValueError: shapes disagree with the map.

    Example:
        >>> pose, transform = torch.randn(2, 6, 4, 1, 8), torch.randn(6, 4, 10, 8, 16)
        >>> votes = Votes(pose, torch.rand(2, 6, 4), transform, RoutingMap.dense(6))
        >>> even = votes.moments()
        >>> closer = votes.moments(Agreement(linear=even.mean))
        >>> closer.mean.shape, votes.couplings(Agreement(linear=even.mean)).shape
        (torch.Size([2, 1, 10, 1, 16]), torch.Size([2, 10, 6, 4]))
    """

    def __init__(
        self,
        pose: Float[Tensor, "B S C R Q"],
        activation: Float[Tensor, "B S C"] | None,
        transform: Float[Tensor, "K C J Q N"],
        routing_map: RoutingMap,
        competition: Competition = "parents",
        none_of_the_above: bool = False,
    ) -> None:
        self.routing_map = routing_map
        self.competition = competition
        self.none_of_the_above = none_of_the_above
        self._votes = routing_map.votes(pose, transform)
        self._last: Agreement | None = None
        self._activation = None
        if activation is not None:
            child = routing_map.edges_on(pose.device)[:, 0]
            self._activation = activation[:, child].unsqueeze(1)

    @property
    def parent_shape(self) -> tuple[int, int, int, int, int]:
        """(B, P, J, R, N) of the parents' poses."""
        batch, types, _, _, rows, columns = self._votes.shape
        return batch, self.routing_map.parent_sites, types, rows, columns

    @property
    def dtype(self) -> torch.dtype:
        """Of the votes, and of all that is computed from them."""
        return self._votes.dtype

    def detach(self) -> "Votes":
        """The same votes as constants to the gradient."""
        votes = object.__new__(Votes)
        votes.__dict__ = dict(self.__dict__)
        votes._votes = self._votes.detach()
        votes._activation = None if self._activation is None else self._activation.detach()
        return votes

    def moments(
        self, agreement: Agreement | None = None, *, variance: bool = True, constant_couplings: bool = False
    ) -> Moments:
        """Mass, mean and variance of every parent's votes.

        Arguments:
            agreement: None shares every child evenly.
            variance: compute it too; a pass without is cheaper.
            constant_couplings: no gradient goes through the couplings, and so none through the agreement.
        """
        self._last = agreement
        log_couplings, routing_map = self._log_couplings(agreement), self.routing_map
        if constant_couplings:
            log_couplings = log_couplings.detach()
        weights = log_couplings.exp()
        if self._activation is not None:
            weights = weights * self._activation
        mass = routing_map.sum_at_parents(weights.sum(dim=3))
        shares = self._shares(log_couplings)
        mean = routing_map.sum_at_parents(torch.einsum("bjec,bjecrn->bjern", shares, self._votes))
        second = None
        if variance:
            squares = (self._votes - routing_map.at_edges(mean).unsqueeze(3)).square()
            second = routing_map.sum_at_parents(torch.einsum("bjec,bjecrn->bjern", shares, squares)).transpose(1, 2)
        return Moments(mass.transpose(1, 2), mean.transpose(1, 2), second)

    def activation_sums(self) -> Float[Tensor, "B P"]:
        """Σ a_i over the children that reach each parent site: the largest mass that a parent there can have."""
        each = self._votes.new_ones(()) if self._activation is None else self._activation
        edges = each.expand(self._votes.shape[0], 1, *self._votes.shape[2:4])
        return self.routing_map.sum_at_parents(edges.sum(dim=3)).squeeze(1)

    def couplings(self, agreement: Agreement | None = None) -> Float[Tensor, "B J E C"]:
        """How every child divides itself among its parents, in the order of the map's edges."""
        return self._log_couplings(agreement).exp()

    def last_couplings(self) -> Float[Tensor, "B J E C"]:
        """The couplings behind the last `moments`."""
        return self.couplings(self._last)

    def _log_couplings(self, agreement: Agreement | None) -> Tensor:
        logits = self._logits(agreement or Agreement())
        if self.competition == "types":
            return logits.log_softmax(dim=1)
        return self.routing_map.log_couplings(logits, none_of_the_above=self.none_of_the_above)

    def _logits(self, agreement: Agreement) -> Tensor:
        def at_edges(values: Tensor) -> Tensor:
            return self.routing_map.at_edges(values.transpose(1, 2))

        offset = self._votes
        if agreement.centre is not None:
            offset = offset - at_edges(agreement.centre).unsqueeze(3)
        logits = self._votes.new_zeros(self._votes.shape[:4])
        if agreement.linear is not None:
            logits = logits + torch.einsum("bjecrn,bjern->bjec", offset, at_edges(agreement.linear))
        if agreement.quadratic is not None:
            logits = logits - torch.einsum("bjecrn,bjern->bjec", offset.square(), at_edges(agreement.quadratic))
        if agreement.constant is not None:
            logits = logits + at_edges(agreement.constant).unsqueeze(3)
        return logits

    def _shares(self, log_couplings: Tensor) -> Tensor:
        """``w_ij / Σ_i w_ij``, however small all the w_ij of a parent are; 0 where all its children are off."""
        routing_map, activation = self.routing_map, self._activation
        if activation is None:
            activation = log_couplings.new_ones(())
        tiny = torch.finfo(log_couplings.dtype).tiny
        on = activation >= tiny
        log_activation = torch.where(on, activation, 1).log()
        logs = (log_couplings + log_activation).detach().masked_fill(~on, -torch.inf)
        largest = routing_map.largest_at_parents(logs).nan_to_num(neginf=0.0)
        relative = log_couplings - routing_map.at_edges(largest).unsqueeze(3)
        # Of a child that is off, the gradient alone: as if it were on, but at most e^60.
        weights = torch.where(on, relative + log_activation, relative.clamp_max(60)).exp()
        weights = weights * torch.where(on, 1, activation)
        total = routing_map.sum_at_parents(weights.sum(dim=3))
        some = total > tiny**0.5
        inverse = torch.where(some, 1 / torch.where(some, total, 1), 0)
        return weights * routing_map.at_edges(inverse).unsqueeze(3)
