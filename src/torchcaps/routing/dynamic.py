"""Dynamic routing: Sabour, Frosst & Hinton 2017, and the variant of Su 2018 that treats routing as clustering."""

from typing import Literal, NamedTuple, cast, get_args, overload

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.capsules import Capsules, SquashForm, squash, squashed
from torchcaps.checks import check_choice, check_iterations
from torchcaps.kernels import BACKENDS, Backend
from torchcaps.routing.precision import without_autocast
from torchcaps.routing.rule import Rule, capsules_in_dtype, passes_of
from torchcaps.routing.votes import COMPETITIONS, Agreement, Competition, Votes
from torchcaps.routing_map import RoutingMap

Logits = Literal["cumulative", "latest"]
GradientPasses = Literal["all", "last"]


@overload
def dynamic_routing(
    pose: Tensor,
    transform: Tensor,
    routing_map: RoutingMap,
    *,
    iterations: int = ...,
    logits: Logits = ...,
    squash_form: SquashForm = ...,
    inner_squash_form: SquashForm | None = ...,
    gradient_passes: GradientPasses = ...,
    leaky: bool = ...,
    competition: Competition = ...,
    return_couplings: Literal[False] = ...,
    backend: Backend = ...,
) -> Capsules: ...
@overload
def dynamic_routing(
    pose: Tensor,
    transform: Tensor,
    routing_map: RoutingMap,
    *,
    iterations: int = ...,
    logits: Logits = ...,
    squash_form: SquashForm = ...,
    inner_squash_form: SquashForm | None = ...,
    gradient_passes: GradientPasses = ...,
    leaky: bool = ...,
    competition: Competition = ...,
    return_couplings: Literal[True],
    backend: Backend = ...,
) -> tuple[Capsules, Tensor]: ...
def dynamic_routing(
    pose: Float[Tensor, "B S C R Q"],
    transform: Float[Tensor, "K C J Q N"],
    routing_map: RoutingMap,
    *,
    iterations: int = 3,
    logits: Logits = "cumulative",
    squash_form: SquashForm = "sabour",
    inner_squash_form: SquashForm | None = None,
    gradient_passes: GradientPasses = "all",
    leaky: bool = False,
    competition: Competition = "parents",
    return_couplings: bool = False,
    backend: Backend = "auto",
) -> Capsules | tuple[Capsules, Float[Tensor, "B J E C"]]:
    """Compute parents by dynamic routing: a child has large couplings to the parents that agree with its votes.

    Sabour, Frosst & Hinton 2017 (arXiv 1710.09829), procedure 1::

        û_ij = u_i W_ij            b_ij = 0
        repeat `iterations` times:
            c_i = softmax over the parents of child i (b_i)
            v_j = squash(Σ_i c_ij û_ij)
            b_ij = b_ij + û_ij · v_j      (cumulative)   or   û_ij · v_j      (latest; Su 2018)

    u_i is the pose of child i, W_ij its transform for parent j, û_ij its vote, c_ij its coupling, and v_j the pose of
    parent j. The length of a pose is its activation, so a child with a zero pose has no effect. The result has the
    wider dtype of ``pose`` and ``transform``. Autocast does not change it, provided that ``backward`` is called outside
    the autocast context.

    Arguments:
        pose: ``[B, S, C, R, Q]``, poses of the children; the page Concepts explains the dimension letters.
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        routing_map: the graph that connects child sites with parent sites.
        iterations: number of routing iterations, from 1 to 1,000. With 1, the couplings are uniform.
        logits: ``cumulative``: b_ij is the sum of û_ij · v_j over all earlier iterations, as in the paper; ``latest``:
            b_ij is û_ij · v_j of the previous iteration.
        squash_form: squash of the parents in the last iteration: ``sabour``, ``su``, ``exponential``, ``unit`` or
            ``none``; see `torchcaps.squash` for the formulas.
        inner_squash_form: squash of the parents in all earlier iterations: a squash form, or None for the same as
            ``squash_form``. The form ``none`` means no squash. Su's code uses ``logits="latest", squash_form="su",
            inner_squash_form="unit"``.
        gradient_passes: ``all``: backpropagate through all iterations; ``last``: backpropagate through the last
            iteration only, with its couplings as constants.
        leaky: include a "none of the above" parent with logit 0 in each softmax, as in the paper's CIFAR-10 network.
        competition: ``parents``: softmax over all parents of a child, as in the paper; ``types``: softmax over the
            parent types at each parent site, as in the segmentation network of LaLonde & Bagci 2018 (arXiv 1804.04241).
        return_couplings: also return the couplings of the last iteration. If the couplings need a gradient, computing
            them stores all votes, even with ``backend="fused"``.
        backend: ``fused``: kernels that do not store votes and have no second-order gradients; ``reference``: PyTorch
            operations that store all votes; ``auto``: ``fused`` if the kernels can run, otherwise ``reference``.

    Returns:
        Capsules with pose ``[B, P, J, R, N]`` and the length of the pose as activation. With ``return_couplings``, also
        the couplings ``[B, J, E, C]``, in the order of the map's edges.

    Raises:
        ValueError: ``pose`` or ``transform`` does not fit the map, ``iterations`` is not in [1, 1000], an option has an
            unknown value, or the fused backend cannot run.

    Example:
        >>> pose, transform = torch.randn(2, 6, 4, 1, 8), torch.randn(6, 4, 10, 8, 16)
        >>> dynamic_routing(pose, transform, RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """
    options = _Options(iterations, logits, squash_form, inner_squash_form, gradient_passes)
    _check(options)
    passes = 1 if gradient_passes == "last" else iterations
    votes = Votes(pose, None, transform, routing_map, competition, leaky, passes, backend)
    with without_autocast(pose.device):
        parents = capsules_in_dtype(_parents(votes, options), torch.promote_types(pose.dtype, transform.dtype))
        return (parents, votes.last_couplings()) if return_couplings else parents


class _Options(NamedTuple):
    """The options of dynamic routing that `_parents` reads."""

    iterations: int
    logits: Logits
    squash_form: SquashForm
    inner_squash_form: SquashForm | None
    gradient_passes: GradientPasses


def _check(options: _Options) -> None:
    check_iterations(options.iterations)
    for name, value, allowed in (
        ("logits", options.logits, get_args(Logits)),
        ("gradient_passes", options.gradient_passes, get_args(GradientPasses)),
        ("squash_form", options.squash_form, get_args(SquashForm)),
        ("inner_squash_form", options.inner_squash_form or options.squash_form, get_args(SquashForm)),
    ):
        check_choice(name, value, allowed)


def _parents(votes: Votes, options: _Options) -> Capsules:
    """Compute the parents by dynamic routing."""
    constant = options.gradient_passes == "last"
    inner_form = options.squash_form if options.inner_squash_form is None else options.inner_squash_form
    earlier = votes.detach() if constant else votes
    agreement = None
    for _ in range(options.iterations - 1):
        fitted = earlier.moments(agreement, variance=False)
        parents = squash(fitted.mass[..., None, None] * fitted.mean, inner_form)
        if agreement is not None and options.logits == "cumulative":
            parents = parents + cast(Tensor, agreement.linear)
        agreement = Agreement(linear=parents)
    fitted = votes.moments(agreement, variance=False, constant_couplings=constant)
    return squashed(fitted.mass[..., None, None] * fitted.mean, options.squash_form)


class DynamicRouting(Rule):
    """Dynamic routing by agreement, as the rule of a capsule layer: Sabour, Frosst & Hinton 2017, procedure 1.

    ::

        û_ij = u_i W_ij            b_ij = 0
        repeat `iterations` times:
            c_i = softmax over the parents of child i (b_i)
            v_j = squash(Σ_i c_ij û_ij)
            b_ij = b_ij + û_ij · v_j      (cumulative)   or   û_ij · v_j      (latest; Su 2018)

    u_i is the pose of child i, W_ij its transform for parent j, û_ij its vote, c_ij its coupling, and v_j the pose of
    parent j. The length of v_j is the activation of parent j.

    Arguments:
        iterations: number of routing iterations, from 1 to 1,000. With 1, the couplings are uniform.
        logits: ``cumulative``: b_ij is the sum of û_ij · v_j over all earlier iterations, as in the paper; ``latest``:
            b_ij is û_ij · v_j of the previous iteration.
        squash_form: squash of the parents in the last iteration: ``sabour``, ``su``, ``exponential``, ``unit`` or
            ``none``; see `torchcaps.squash` for the formulas.
        inner_squash_form: squash of the parents in all earlier iterations: a squash form, or None for the same as
            ``squash_form``. The form ``none`` means no squash.
        gradient_passes: ``all``: backpropagate through all iterations; ``last``: backpropagate through the last
            iteration only, with its couplings as constants.
        leaky: include a "none of the above" parent with logit 0 in each softmax.
        backend: ``fused``: kernels that do not store votes and have no second-order gradients; ``reference``: PyTorch
            operations that store all votes; ``auto``: ``fused`` if the kernels can run, otherwise ``reference``.
        competition: ``parents``: softmax over all parents of a child, as in the paper; ``types``: softmax over the
            parent types at each parent site, as in the segmentation network of LaLonde & Bagci 2018 (arXiv 1804.04241).

    Raises:
        ValueError: ``iterations`` is not in [1, 1000], or an option has an unknown value.

    Example:
        >>> rule = DynamicRouting(iterations=3)
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> rule(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).activation.shape
        torch.Size([2, 1, 10])
    """

    weighs_activations = False
    later_options = ("competition",)

    def __init__(
        self,
        iterations: int = 3,
        logits: Logits = "cumulative",
        squash_form: SquashForm = "sabour",
        inner_squash_form: SquashForm | None = None,
        gradient_passes: GradientPasses = "all",
        leaky: bool = False,
        backend: Backend = "auto",
        competition: Competition = "parents",
    ) -> None:
        super().__init__()
        self.iterations = iterations
        self.logits: Logits = logits
        self.squash_form: SquashForm = squash_form
        self.inner_squash_form: SquashForm | None = inner_squash_form
        self.gradient_passes: GradientPasses = gradient_passes
        self.leaky = leaky
        self.competition = competition
        self.backend = backend
        _check(self._options)
        check_choice("competition", competition, COMPETITIONS)
        check_choice("backend", backend, BACKENDS)

    @property
    def none_of_the_above(self) -> bool:  # type: ignore[override]
        """Whether every softmax includes a parent with logit 0: the option ``leaky``."""
        return self.leaky

    @property
    def passes(self) -> int:
        """Number of calls of `Votes.moments` through which gradients flow."""
        return 1 if self.gradient_passes == "last" else passes_of(self.iterations)

    @property
    def _options(self) -> _Options:
        return _Options(*(getattr(self, name) for name in _Options._fields))

    def route(self, votes: Votes) -> Capsules:
        """Compute the poses of the last iteration, and their lengths as activations."""
        _check(options := self._options)
        return _parents(votes, options)
