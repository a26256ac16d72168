"""Votes that are stored in memory: the reference implementation with which the fused kernels are compared."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from torchcaps.routing.agreement import Agreement, Competition, Means, Moments
from torchcaps.routing_map import RoutingMap


class WrittenVotes:
    """Materialised votes ``V = pose · transform`` along every edge of a map, ``[B, J, E, C, R, N]``.

    Unlike the fused kernels, this class supports ONNX export, every floating dtype and every kind of differentiation,
    such as second-order gradients and ``torch.func``. It needs several times as much memory as the votes alone.

    Arguments:
        pose: ``[B, S, C, R, Q]``, poses of the children.
        activation: ``[B, S, C]``, activations of the children; None for 1 everywhere.
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        routing_map: the graph that connects child sites with parent sites.
        competition: ``parents``: the couplings of a child are a softmax over all of its parents; ``types``: they are a
            softmax over the parent types at each parent site.
        none_of_the_above: include an extra parent with logit 0 in every softmax.
        logit_weights: ``[K, C, J, R·Q + 1]``; see `torchcaps.Votes`.

    Example:
        >>> pose, transform = torch.randn(2, 6, 4, 1, 8), torch.randn(6, 4, 10, 8, 16)
        >>> WrittenVotes(pose, None, transform, RoutingMap.dense(6), "parents", False).moments(Agreement()).mean.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    def __init__(
        self,
        pose: Float[Tensor, "B S C R Q"],
        activation: Float[Tensor, "B S C"] | None,
        transform: Float[Tensor, "K C J Q N"],
        routing_map: RoutingMap,
        competition: Competition,
        none_of_the_above: bool,
        logit_weights: Float[Tensor, "K C J W"] | None = None,
    ) -> None:
        self.routing_map = routing_map
        self.competition = competition
        self.none_of_the_above = none_of_the_above
        self._votes = routing_map.votes(pose, transform)
        self._activation = self._pose_logits = None
        child, _, kernel = routing_map.edges_on(pose.device).unbind(1)
        if activation is not None:
            self._activation = activation[:, child].unsqueeze(1)
        if logit_weights is not None:
            weights, poses = logit_weights.index_select(0, kernel), pose.flatten(3).index_select(1, child)
            self._pose_logits = torch.einsum("becq,ecjq->bjec", functional.pad(poses, (0, 1), value=1.0), weights)

    def moments(
        self, agreement: Agreement, *, variance: bool = True, constant_couplings: bool = False
    ) -> Moments | Means:
        """Compute mass, mean and variance of the votes per parent; see `torchcaps.Votes.moments`."""
        log_couplings, routing_map = self._log_couplings(agreement), self.routing_map
        if constant_couplings:
            log_couplings = log_couplings.detach()
        weights = log_couplings.exp()
        if self._activation is not None:
            weights = weights * self._activation
        mass = routing_map.sum_at_parents(weights.sum(dim=3))
        shares = self._shares(log_couplings)
        mean = routing_map.sum_at_parents(torch.einsum("bjec,bjecrn->bjern", shares, self._votes))
        means = Means(mass.transpose(1, 2), mean.transpose(1, 2))
        if not variance:
            return means
        squares = (self._votes - routing_map.at_edges(mean).unsqueeze(3)).square()
        second = routing_map.sum_at_parents(torch.einsum("bjec,bjecrn->bjern", shares, squares))
        return Moments(*means, second.transpose(1, 2))

    def couplings(self, agreement: Agreement) -> Float[Tensor, "B J E C"]:
        """Compute the couplings ``[B, J, E, C]``, in the order of the map's edges."""
        return self._log_couplings(agreement).exp()

    def _log_couplings(self, agreement: Agreement) -> Tensor:
        logits = self._logits(agreement)
        if self.competition == "types":
            rivals = functional.pad(logits, (0, 0, 0, 0, 0, 1)) if self.none_of_the_above else logits
            return rivals.log_softmax(dim=1)[:, : logits.shape[1]]
        return self.routing_map.log_couplings(logits, none_of_the_above=self.none_of_the_above)

    def _logits(self, agreement: Agreement) -> Tensor:
        offset = self._votes
        if agreement.centre is not None:
            offset = offset - self._at_edges(agreement.centre).unsqueeze(3)
        logits = self._votes.new_zeros(self._votes.shape[:4])
        if agreement.linear is not None:
            logits = logits + torch.einsum("bjecrn,bjern->bjec", offset, self._at_edges(agreement.linear))
        if agreement.quadratic is not None:
            logits = logits - torch.einsum("bjecrn,bjern->bjec", offset.square(), self._at_edges(agreement.quadratic))
        if agreement.constant is not None:
            logits = logits + self._at_edges(agreement.constant).unsqueeze(3)
        return logits if self._pose_logits is None else logits + self._pose_logits

    def _at_edges(self, values: Tensor) -> Tensor:
        return self.routing_map.at_edges(values.transpose(1, 2))

    def _shares(self, log_couplings: Tensor) -> Tensor:
        """Compute ``w_ij / Σ_i w_ij`` without underflow; 0 for a parent whose children all have activation 0."""
        routing_map, activation = self.routing_map, self._activation
        if activation is None:
            activation = log_couplings.new_ones(())
        tiny = torch.finfo(log_couplings.dtype).tiny
        on = activation >= tiny
        log_activation = torch.where(on, activation, 1).log()

        # In two steps, because the sum of both logarithms would round log_activation away if a coupling is tiny.
        relative = log_couplings - self._largest(log_couplings, on)
        relative = relative - self._largest(relative + log_activation, on)
        # A child with activation 0 has weight 0, but its activation has a gradient. The clamp bounds this gradient.
        weights = torch.where(on, relative + log_activation, relative.clamp_max(60)).exp()
        weights = weights * torch.where(on, 1, activation)
        total = routing_map.sum_at_parents(weights.sum(dim=3))
        some = total > tiny**0.5
        inverse = torch.where(some, 1 / torch.where(some, total, 1), 0)
        return weights * routing_map.at_edges(inverse).unsqueeze(3)

    def _largest(self, log_weights: Tensor, on: Tensor) -> Tensor:
        """Find the largest logarithm among the children of each parent that are ``on``, and return it at the edges."""
        largest = self.routing_map.largest_at_parents(log_weights.detach().masked_fill(~on, -torch.inf))
        return self.routing_map.at_edges(largest.nan_to_num(neginf=0.0)).unsqueeze(3)
