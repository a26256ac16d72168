"""The votes of a layer as a routing rule sees them: summed at the parents under an agreement, never handed out."""

from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import check_choice, described
from torchcaps.kernels import Backend, chosen_fused, obstacle
from torchcaps.kernels import moments as fused
from torchcaps.kernels.gaussian import gaussian, written_out
from torchcaps.kernels.memory import statistics_dtype
from torchcaps.routing.agreement import Agreement, Competition, Moments
from torchcaps.routing.written_votes import WrittenVotes
from torchcaps.routing_map import RoutingMap

__all__ = ["Agreement", "Competition", "Moments", "Votes"]


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``tensor.to(dtype)``, and quicker where there is nothing to do."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class Votes:
    """The votes of children for parents along every edge of a map, ``V = pose · transform``.

    Fused kernels compute a vote wherever it is needed and never store it. Where they cannot run, all votes are written
    to memory.

    Arguments:
        pose: ``[B, S, C, R, Q]``, of the children.
        activation: ``[B, S, C]``, of the children; None counts as 1 everywhere.
        transform: ``[K, C, J, Q, N]``.
        routing_map: which child site feeds which parent site.
        competition: the parents that share a child: ``parents``, all that it reaches, or ``types`` at one site alone.
        none_of_the_above: a further parent with logit 0 takes part in every softmax.
        passes: how often `moments` will be called. The gradients of these calls share one sweep over the votes; more
            calls are right too, only slower.
        backend: ``fused`` never writes a vote to memory and is not differentiated twice; ``reference`` writes all of
            them; ``auto`` is fused where it can be.

    Raises:
        ValueError: shapes disagree with the map, or the backend cannot.

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
        passes: int = 1,
        backend: Backend = "auto",
    ) -> None:
        check_choice("competition", competition, get_args(Competition))
        routing_map.check(pose, transform)
        dtype = torch.promote_types(pose.dtype, transform.dtype)
        if activation is not None:
            dtype = torch.promote_types(dtype, activation.dtype)
        self.routing_map = routing_map
        self._activation = None if activation is None else in_dtype(activation, dtype)
        self._pose, self._transform = in_dtype(pose, dtype), in_dtype(transform, dtype)
        self._competition: Competition = competition
        self._none_of_the_above = none_of_the_above
        self._passes = passes
        self.fused = chosen_fused(backend, obstacle(pose, transform, dtype))
        if self.fused:
            self._pose = self._pose.contiguous()
        self._edge_lists = routing_map.edge_lists.on(pose.device) if self.fused else None
        self._by_sample = fused.samples_in_lanes(
            self._pose, transform, routing_map.own_transforms, routing_map.most_edges
        )
        self._tokens: list[Tensor] = []
        self._written: WrittenVotes | None = None
        self._last: Agreement | None = None

    def gaussian(self, variance: Float[Tensor, "B P J R N"], floor: float) -> tuple[Tensor, Tensor]:
        """Of Gaussians with the variance σ² + floor, ``1 / 2σ²`` of every number and ``Σ log σ`` ``[B, P, J]``.

        Rules that fit Gaussians need both between two passes; here they take one step where the votes are fused.
        """
        return gaussian(variance, floor) if self.fused else written_out(variance, floor)

    @property
    def parent_shape(self) -> tuple[int, int, int, int, int]:
        """(B, P, J, R, N) of the parents' poses."""
        batch, _, _, rows, _ = self._pose.shape
        _, _, types, _, columns = self._transform.shape
        return batch, self.routing_map.parent_sites, types, rows, columns

    @property
    def dtype(self) -> torch.dtype:
        """Of the moments, and of agreements."""
        return statistics_dtype(self._pose.dtype) if self.fused else self._pose.dtype

    def detach(self) -> "Votes":
        """The same votes as constants to the gradient."""
        votes = object.__new__(Votes)
        votes.__dict__ = dict(self.__dict__)
        votes._pose, votes._transform = self._pose.detach(), self._transform.detach()
        votes._activation = None if self._activation is None else self._activation.detach()
        votes._tokens, votes._written = [], None
        return votes

    def moments(
        self, agreement: Agreement | None = None, *, variance: bool = True, constant_couplings: bool = False
    ) -> Moments:
        """Mass, mean and variance of every parent's votes.

        Arguments:
            agreement: None shares every child evenly.
            variance: compute it too; a pass without is cheaper.
            constant_couplings: no gradient goes through the couplings, and so none through the agreement.

        Raises:
            ValueError: a part of the agreement has another shape than the parents.
        """
        self._last = agreement
        parts = self._checked(agreement)
        if not self.fused:
            return self._written_out.moments(parts, variance=variance, constant_couplings=constant_couplings)
        if constant_couplings:
            parts = Agreement(*(None if part is None else part.detach() for part in parts))
        pose, activation, transform = self._pose, self._activation, self._transform
        if torch.is_grad_enabled():
            pose, transform = pose.detach(), transform.detach()
            activation = None if activation is None else activation.detach()
        mass, mean, second, *_ = fused.moments(
            self._next_tokens(),
            pose,
            activation,
            transform,
            self._edge_lists,
            self.routing_map.parent_sites,
            *parts,
            all(part is None for part in parts),
            *self._options,
            variance,
            constant_couplings,
        )
        return Moments(mass, mean, second if variance else None)

    def activation_sums(self) -> Float[Tensor, "B P"]:
        """Σ a_i over the children that reach each parent site: the largest mass that a parent there can have."""
        routing_map, dtype = self.routing_map, self.dtype
        child, parent, _ = routing_map.edges_on(self._pose.device).unbind(1)
        if self._activation is None:
            of_sites = self._pose.new_full(self._pose.shape[:2], self._pose.shape[2], dtype=dtype)
        else:
            of_sites = self._activation.to(dtype).sum(dim=2)
        return of_sites.new_zeros(of_sites.shape[0], routing_map.parent_sites).index_add(1, parent, of_sites[:, child])

    def couplings(self, agreement: Agreement | None = None) -> Float[Tensor, "B J E C"]:
        """How every child divides itself among its parents, in the order of the map's edges.

        Where a gradient is asked of them, all votes are written to memory.
        """
        parts = self._checked(agreement)
        given = (self._pose, self._transform, *parts)
        differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        if not self.fused or differentiated:
            return self._written_out.couplings(parts)
        sites = self.routing_map.parent_sites
        by_child = fused.couplings(self._pose, self._transform, self._edge_lists, sites, *parts, *self._options)
        return by_child.index_select(2, self.routing_map.place_by_child.on(self._pose.device))

    def last_couplings(self) -> Float[Tensor, "B J E C"]:
        """The couplings behind the last `moments`."""
        return self.couplings(self._last)

    @property
    def _options(self) -> tuple[bool, bool, bool]:
        """Whether types at one site compete alone; whether none of the above does too; what the lanes hold."""
        return self._competition == "types", self._none_of_the_above, self._by_sample

    @property
    def _written_out(self) -> WrittenVotes:
        if self._written is None:
            children = self._pose, self._activation, self._transform
            self._written = WrittenVotes(*children, self.routing_map, self._competition, self._none_of_the_above)
        return self._written

    def _checked(self, agreement: Agreement | None) -> Agreement:
        """The agreement in the dtype of the moments; all None without one."""
        if agreement is None:
            return Agreement()
        vectors, dtype = self.parent_shape, self.dtype
        for name, part in zip(Agreement._fields, agreement, strict=True):
            shape = vectors[:3] if name == "constant" else vectors
            if part is not None and part.shape != shape:
                raise ValueError(f"{name} of an agreement must be {list(shape)}, as the parents; got {described(part)}")
        return Agreement(*(None if part is None else in_dtype(part, dtype) for part in agreement))

    def _next_tokens(self) -> list[Tensor]:
        """Those of the next pass, where a gradient is asked of the children; see `torchcaps.kernels.moments`."""
        children = self._pose, self._activation, self._transform
        if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in children):
            return []
        if not self._tokens:
            sizes = self._edge_lists, self.routing_map.parent_sites, self._passes
            self._tokens = list(fused.open_votes(*children, *sizes, *self._options))
        entries = len(fused.Record._fields)
        tokens, self._tokens = self._tokens[:entries], self._tokens[entries:]
        return tokens
