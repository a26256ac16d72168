"""The votes of a layer. A routing rule reads only the moments of the votes for each parent, never single votes."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from numbers import Real
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import (
    check_activation,
    check_choice,
    check_device,
    check_floating,
    check_not_negative,
    check_sizes,
    described,
)
from torchcaps.kernels import Backend, chosen_fused, kernels_read, obstacle, warn_of_stored_votes
from torchcaps.kernels import autograd as fused
from torchcaps.kernels.gaussian import log_volume
from torchcaps.kernels.memory import for_kernels, packed, samples_in_lanes, statistics_dtype, unpacked
from torchcaps.kernels.operator import needs_the_dispatcher
from torchcaps.routing.agreement import (
    COMPETITIONS,
    Agreement,
    AnyAgreement,
    Competition,
    Gaussians,
    Means,
    Moments,
    Recomputed,
    check_logit_weights,
    check_variance,
    kernel_arguments,
    kernel_tensors,
    plain,
)
from torchcaps.routing.precision import in_dtype, without_autocast
from torchcaps.routing.written_votes import WrittenVotes
from torchcaps.routing_map import RoutingMap, added_at, check_children

__all__ = ["Agreement", "Competition", "Gaussians", "Means", "Moments", "Recomputed", "Votes"]


observers: list[Callable[["Votes", Agreement | None, Moments | Means], None]] = []
"""Functions that are called after every pass. `torchcaps.recording.recorded` adds one."""


class UnknownCouplings(ValueError):
    """The couplings of a rule are requested, but the rule has not called `Votes.moments`."""


class Votes:
    """Votes of children for parents along every edge of a routing map, ``V = pose · transform``.

    The fused kernels compute a vote each time it is needed, and do not store votes. If the kernels cannot run, PyTorch
    operations compute and store all votes. The page Concepts explains the dimension letters.

    Arguments:
        pose: ``[B, S, C, R, Q]``, poses of the children.
        activation: ``[B, S, C]``, activations of the children; None for 1 everywhere.
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        routing_map: the graph that connects child sites with parent sites.
        competition: ``parents``: the couplings of a child are a softmax over all of its parents; ``types``: they are a
            softmax over the parent types at each parent site.
        none_of_the_above: include an extra parent with logit 0 in every softmax.
        passes: number of calls of `moments` that the rule makes, at least 1. In the backward pass, one loop over the
            votes computes the gradients of pose, activation and transform for all of these calls. If the rule makes
            more calls, the gradients are still correct, but need more than one loop.
        backend: ``fused``: kernels that do not store votes and have no second-order gradients; ``reference``: PyTorch
            operations that store all votes; ``auto``: ``fused`` if the kernels can run, otherwise ``reference``.
        logit_weights: ``[K, C, J, R·Q + 1]``; None for 0. The numbers of a child's pose, row by row, times the first
            R·Q weights, plus the last weight: this sum is added to every logit, also without an `Agreement`. The
            weights are finite; only the last one can be -∞.

    Raises:
        ValueError: ``pose`` or ``transform`` does not fit ``routing_map``; ``activation`` does not fit ``pose``, or,
            on a CPU, a value of it is negative; ``logit_weights`` does not fit ``pose`` and ``transform``;
            ``competition`` or ``backend`` is unknown; ``passes`` is below 1; or the fused backend cannot run.

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
        logit_weights: Float[Tensor, "K C J W"] | None = None,
    ) -> None:
        check_choice("competition", competition, COMPETITIONS)
        check_sizes(passes=passes)
        check_children(pose, transform, routing_map)
        dtype = torch.promote_types(pose.dtype, transform.dtype)
        if activation is not None:
            check_activation(activation, pose)
            check_not_negative("activation", activation)
            dtype = torch.promote_types(dtype, activation.dtype)
        self.dtype = statistics_dtype(dtype)
        """Dtype of the moments and agreements."""
        if not kernels_read(dtype, pose.is_cpu):
            dtype = self.dtype
        reason = obstacle(pose, transform, dtype)
        self.fused = chosen_fused(backend, reason)
        if not self.fused:
            dtype = self.dtype
        self.routing_map = routing_map
        self.device = pose.device
        self._activation = None if activation is None else in_dtype(activation, dtype)
        self._pose, self._transform = in_dtype(pose, dtype), in_dtype(transform, dtype)
        self._competition: Competition = competition
        self._none_of_the_above = bool(none_of_the_above)
        self._passes = int(passes)
        batch, sites, child_types, rows, inner = pose.shape
        _, _, types, _, columns = transform.shape
        self.parent_shape = batch, routing_map.parent_sites, types, rows, columns
        """Shape (B, P, J, R, N) of the parents' mean votes, including columns that `Rule.prepare` adds."""
        self.child_shape = batch, sites, child_types, rows, inner
        """Shape (B, S, C, R, Q) of the children's poses, including columns that `Rule.prepare` adds."""
        if self.fused:  # the kernels would copy tensors with another memory order in every pass
            self._pose, self._transform = for_kernels(self._pose), self._transform.contiguous()
            self._activation = None if self._activation is None else for_kernels(self._activation)
        elif backend == "auto":
            warn_of_stored_votes(reason, batch * routing_map.edges.shape[0] * child_types * types * rows * columns)
        self._edge_lists = routing_map.edge_lists.on(pose.device) if self.fused else None
        self._by_sample = samples_in_lanes(self._pose, transform, routing_map.own_transforms, routing_map.most_edges)
        self._pose_logits = logit_weights is not None
        if logit_weights is not None:
            check_logit_weights(logit_weights, pose, transform)
            self._transform = packed(self._transform, in_dtype(logit_weights, dtype))
        self._tokens: list[list[Tensor]] = []  # of the passes to come
        self._direct = False  # whether these tokens are for calls without the dispatcher
        self._written: tuple[bool, WrittenVotes] | None = None
        self._last: list[tuple[AnyAgreement, bool]] = []  # see `last_couplings`; a list, because `detach` shares it

    def detach(self) -> "Votes":
        """Return these votes as constants: no gradient flows through them."""
        activation = None if self._activation is None else self._activation.detach()
        children = {"_pose": self._pose.detach(), "_activation": activation, "_transform": self._transform.detach()}
        return self._copy(**children, _written=None)

    def kept(self, copy: Callable[[Tensor], Tensor]) -> "Votes":
        """Return the same votes with a copy of the transform, so that later changes of the weights have no effect."""
        return self._copy(_transform=copy(self._transform))

    def _copy(self, **changed: Any) -> "Votes":
        votes = object.__new__(Votes)
        votes.__dict__ = {**self.__dict__, "_tokens": [], **changed}
        return votes

    @overload
    def moments(
        self, agreement: AnyAgreement = None, *, variance: Literal[True] = True, constant_couplings: bool = False
    ) -> Moments: ...
    @overload
    def moments(
        self, agreement: AnyAgreement = None, *, variance: Literal[False], constant_couplings: bool = False
    ) -> Means: ...
    @overload
    def moments(
        self, agreement: AnyAgreement = None, *, variance: bool, constant_couplings: bool = False
    ) -> Moments | Means: ...
    def moments(
        self, agreement: AnyAgreement = None, *, variance: bool = True, constant_couplings: bool = False
    ) -> Moments | Means:
        """Compute mass, mean and variance of the votes per parent.

        Arguments:
            agreement: logits of the couplings, as an `Agreement` or a `Recomputed`; None for 0.
            variance: whether to compute the variance too. If False, the result is `Means`, and its computation is
                faster.
            constant_couplings: treat the couplings as constants, so that the agreement gets no gradient.

        Raises:
            ValueError: ``agreement`` is none of these, an entry of it does not have the shape, the type or the range
                that `Agreement` documents, or the fused kernels would lose a gradient, because the function of a
                `Recomputed` uses a tensor that is not one of its arguments.
        """
        self._last[:] = [(agreement, constant_couplings)]
        if self.fused:
            mass, mean, second, *_ = self._fused(agreement, variance, constant_couplings)
            found: Moments | Means = Moments(mass, mean, second) if variance else Means(mass, mean)
        else:
            parts = self._checked(agreement)
            with without_autocast(self.device):
                options = {"variance": variance, "constant_couplings": constant_couplings}
                found = self._written_out.moments(plain(parts), **options)
        return self._observed(agreement, found)

    def gaussians(self, agreement: AnyAgreement = None, *, floor: float) -> Gaussians:
        """Fit a Gaussian to the votes for each parent. Its variance σ² is the variance of the votes plus ``floor``.

        The result also contains the log volume Σ log σ of each Gaussian. The fused kernels compute it together with the
        moments, which is faster than computing it from the result of `moments` with PyTorch.

        Arguments:
            agreement: logits of the couplings; None for 0.
            floor: constant added to the variances, at least 0.

        Raises:
            ValueError: ``agreement`` is not as in `moments`, or ``floor`` is not a finite number of at least 0.
        """
        if not isinstance(floor, Real) or not 0 <= floor < math.inf:  # a tensor would get no gradient
            raise ValueError(f"floor must be a finite number of at least 0; got {described(floor)}")
        if not self.fused:
            mass, mean, variance = self.moments(agreement)
            return Gaussians(mass, mean, variance, log_volume(variance, floor))
        self._last[:] = [(agreement, False)]
        mass, mean, variance, _, _, _, volume = self._fused(agreement, floor=float(floor))
        self._observed(agreement, Moments(mass, mean, variance))
        return Gaussians(mass, mean, variance, volume)

    def _observed(self, agreement: AnyAgreement, found: Moments | Means) -> Moments | Means:
        """Report a pass to all observers, and return its moments."""
        for observe in observers:
            observe(self, agreement() if isinstance(agreement, Recomputed) else agreement, found)
        return found

    def _fused(
        self, given: AnyAgreement, variance: bool = True, constant_couplings: bool = False, floor: float | None = None
    ) -> tuple[Tensor, ...]:
        later = given if isinstance(given, Recomputed) and not constant_couplings else None
        parts = self._checked(given) if later is None else Agreement()
        tokens = self._next_tokens(parts[:5] if later is None else later.tensors)
        direct = bool(tokens) and self._direct
        if later is not None:
            parts = self._checked(later.constant() if direct else later)
        if constant_couplings:
            tensors = {name: x.detach() for name, x in parts._asdict().items() if isinstance(x, Tensor)}
            parts = parts._replace(**tensors)  # type: ignore[arg-type]
        pose, activation, transform = self._pose, self._activation, self._transform
        if torch.is_grad_enabled():
            pose, transform = pose.detach(), transform.detach()
            activation = None if activation is None else activation.detach()
        *agreement, variance_floor, inverse_temperature = kernel_arguments(parts)
        arguments = (
            pose,
            activation,
            transform,
            self._edge_lists,
            self.routing_map.parent_sites,
            *agreement,
            variance_floor,
            inverse_temperature,
            not self._pose_logits and all(x is None for x in agreement),
            *self._options,
            variance,
            constant_couplings,
            floor,
        )
        if direct and later is not None:
            again = partial(kernel_tensors, later.function, self.dtype)
            return fused.recomputed_moments(again, later.tensors, tokens, *arguments)
        return (fused.direct_moments if direct else fused.moments)(tokens, *arguments)

    def activation_sums(self) -> Float[Tensor, "B P"]:
        """For each parent site, sum the activations of its children. The mass of a parent is at most this sum."""
        routing_map, device = self.routing_map, self.device
        child, parent, _ = routing_map.edges_on(device).unbind(1)
        dtype = self.dtype if device.type == "mps" else torch.float64  # each sum adds one number after the other
        if self._activation is None:
            of_sites = self._pose.new_full(self._pose.shape[:2], self._pose.shape[2], dtype=dtype)
        else:
            of_sites = self._activation.to(dtype).sum(dim=2)
        sums = of_sites.new_zeros(of_sites.shape[0], routing_map.parent_sites)
        return added_at(sums, 1, parent, of_sites[:, child]).to(self.dtype)

    def couplings(self, agreement: AnyAgreement = None) -> Float[Tensor, "B J E C"]:
        """Compute the couplings, in the order of the map's edges.

        The couplings in one softmax sum to 1; with ``none_of_the_above``, their sum is below 1. If the result needs a
        gradient, all votes are stored, even with ``backend="fused"``.

        Arguments:
            agreement: logits of the couplings; None for 0.

        Raises:
            ValueError: ``agreement`` is not as in `moments`.
        """
        parts = self._checked(agreement)
        given = (self._pose, self._transform, *parts[:5])
        differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        if not self.fused or differentiated:
            with without_autocast(self.device):
                return self._written_out.couplings(plain(parts))
        layer = self._pose, self._transform, self._edge_lists, self.routing_map.parent_sites
        by_child = fused.couplings(*layer, *kernel_arguments(parts), *self._options)
        return by_child.index_select(2, self.routing_map.place_by_child.on(self.device))

    def weights(self, agreement: AnyAgreement = None) -> Float[Tensor, "B J E C"]:
        """Compute the weight of every vote, ``w_ij = activation_i · coupling_ij``, in the order of the map's edges."""
        couplings = self.couplings(agreement)
        if self._activation is None:
            return couplings
        child = self.routing_map.edges_on(self.device)[:, 0]
        return couplings * self._activation.index_select(1, child)[:, None]

    def materialised(self) -> Float[Tensor, "B J E C R N"]:
        """Compute and return all votes. The result has B·J·E·C·R·N elements."""
        with without_autocast(self.device):
            return self.routing_map.votes(in_dtype(self._pose, self.dtype), self._unpacked[0])

    def last_couplings(self) -> Float[Tensor, "B J E C"]:
        """Compute the couplings of the last call of `moments`: constants if it had ``constant_couplings=True``.

        Raises:
            UnknownCouplings: `moments` has not been called.
        """
        if not self._last:
            raise UnknownCouplings(
                "the couplings are unknown, because the rule does not call votes.moments: leave out return_couplings"
            )
        agreement, constant = self._last[0]
        with torch.no_grad() if constant else nullcontext():
            return self.couplings(agreement)

    @property
    def _options(self) -> tuple[bool, bool, bool]:
        """Options of the fused kernels: ``types``, ``none_of_the_above`` and ``by_sample``."""
        return self._competition == "types", self._none_of_the_above, self._by_sample

    @property
    def _written_out(self) -> WrittenVotes:
        graph = torch.is_grad_enabled()
        if self._written is None or (graph and not self._written[0]):  # votes made without gradients lack the graph
            transform, logit_weights = self._unpacked
            activation = None if self._activation is None else in_dtype(self._activation, self.dtype)
            options = self.routing_map, self._competition, self._none_of_the_above, logit_weights
            self._written = graph, WrittenVotes(in_dtype(self._pose, self.dtype), activation, transform, *options)
        return self._written[1]

    @property
    def _unpacked(self) -> tuple[Tensor, Tensor | None]:
        whole = in_dtype(self._transform, self.dtype)
        return unpacked(whole, self.child_shape[3:]) if self._pose_logits else (whole, None)

    def _checked(self, agreement: AnyAgreement) -> Agreement:
        """Check the agreement and convert it to the dtype of the moments. Replace None with an empty `Agreement`."""
        if agreement is None:
            return Agreement()
        if isinstance(agreement, Recomputed):
            agreement = agreement()
        if not isinstance(agreement, Agreement):
            raise ValueError(f"agreement must be an Agreement, a Recomputed or None; got {described(agreement)}")
        *tensors, floor, inverse_temperature = agreement
        check_variance(agreement)
        vectors, dtype = self.parent_shape, self.dtype
        other_dtype = False
        for name, part in zip(Agreement._fields[:5], tensors, strict=True):  # PyTorch 2.9 cannot compile strict=False
            if part is None:
                continue
            shape = vectors[:3] if name == "constant" else vectors
            if not isinstance(part, Tensor) or part.shape != shape:
                raise ValueError(
                    f"{name!r} in the agreement must have shape {list(shape)} to fit the parents; got {described(part)}"
                )
            check_device(f"agreement.{name}", part, self.device)
            if part.dtype != dtype:
                check_floating(f"agreement.{name}", part)
                other_dtype = True
        if not other_dtype:
            return agreement
        constant, linear, quadratic, centre, variance = (None if x is None else in_dtype(x, dtype) for x in tensors)
        return Agreement(constant, linear, quadratic, centre, variance, floor, inverse_temperature)

    def _next_tokens(self, agreement: tuple[Any, ...]) -> list[Tensor]:
        """Return the tokens of the next pass, or [] if the children need no gradient; see `torchcaps.kernels.moments`.

        The tokens are opened again if the previous pass went through the dispatcher and this one does not, or vice
        versa. Each token is returned only once, also if these votes are copied.
        """
        children = self._pose, self._activation, self._transform
        if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in children):
            return []
        direct = not needs_the_dispatcher((*children, *agreement))
        if not self._tokens or direct != self._direct:
            opened = fused.direct_open_votes if direct else fused.open_votes
            sizes = self._edge_lists, self.routing_map.parent_sites, self._passes
            tokens = list(opened(*children, *sizes, *self._options))
            each = len(tokens) // self._passes
            self._tokens = [tokens[first : first + each] for first in range(0, len(tokens), each)]
            self._direct = direct
        return self._tokens.pop(0)
