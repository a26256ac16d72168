"""EM routing: Hinton, Sabour & Frosst 2018, with the corrections of Gritzman 2019."""

from typing import Any, Literal, NamedTuple, cast, get_args, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules, check_capsules
from torchcaps.checks import (
    check_activation,
    check_choice,
    check_device,
    check_floating,
    check_iterations,
    check_number,
    check_sizes,
    described,
)
from torchcaps.kernels import BACKENDS, Backend
from torchcaps.kernels.gaussian import log_volume
from torchcaps.routing.agreement import COMPETITIONS
from torchcaps.routing.precision import in_dtype, without_autocast
from torchcaps.routing.rule import LayerShape, Rule, capsules_in_dtype
from torchcaps.routing.votes import Agreement, Competition, Votes
from torchcaps.routing_map import RoutingMap

TemperatureSchedule = Literal["rising", "constant"]
ParentActivation = Literal["logistic", "mixing"]
TEMPERATURE_SCHEDULES, PARENT_ACTIVATIONS = get_args(TemperatureSchedule), get_args(ParentActivation)


class EMPass(NamedTuple):
    """Result of one iteration of EM routing.

    Arguments:
        couplings: ``[B, J, E, C]``, couplings R_ij at the start of this iteration, in the order of the map's edges.
        mean: ``[B, P, J, R, N]``, mean μ_j of the votes for each parent.
        variance: ``[B, P, J, R, N]``, variance σ_j² of the votes for each parent, including the variance floor.
        activation: ``[B, P, J]``, activation a_j of each parent.
    """

    couplings: Float[Tensor, "B J E C"]
    mean: Float[Tensor, "B P J R N"]
    variance: Float[Tensor, "B P J R N"]
    activation: Float[Tensor, "B P J"]


@overload
def em_routing(
    children: Capsules,
    transform: Tensor,
    routing_map: RoutingMap,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int = ...,
    competition: Competition = ...,
    variance_floor: float = ...,
    normalise_data: bool = ...,
    inverse_temperature: float = ...,
    temperature_schedule: TemperatureSchedule = ...,
    parent_activation: ParentActivation = ...,
    mean_damping: float = ...,
    tempering: float = ...,
    return_passes: Literal[False] = ...,
    backend: Backend = ...,
) -> Capsules: ...
@overload
def em_routing(
    children: Capsules,
    transform: Tensor,
    routing_map: RoutingMap,
    beta_u: Tensor,
    beta_a: Tensor,
    *,
    iterations: int = ...,
    competition: Competition = ...,
    variance_floor: float = ...,
    normalise_data: bool = ...,
    inverse_temperature: float = ...,
    temperature_schedule: TemperatureSchedule = ...,
    parent_activation: ParentActivation = ...,
    mean_damping: float = ...,
    tempering: float = ...,
    return_passes: Literal[True],
    backend: Backend = ...,
) -> tuple[Capsules, list[EMPass]]: ...
def em_routing(
    children: Capsules,
    transform: Float[Tensor, "K C J Q N"],
    routing_map: RoutingMap,
    beta_u: Float[Tensor, "J"],
    beta_a: Float[Tensor, "J"],
    *,
    iterations: int = 3,
    competition: Competition = "parents",
    variance_floor: float = 1e-4,
    normalise_data: bool = True,
    inverse_temperature: float = 1.0,
    temperature_schedule: TemperatureSchedule = "rising",
    parent_activation: ParentActivation = "logistic",
    mean_damping: float = 0.0,
    tempering: float = 1.0,
    return_passes: bool = False,
    backend: Backend = "auto",
) -> Capsules | tuple[Capsules, list[EMPass]]:
    """Compute parents by EM routing: fit a Gaussian to the votes for each parent; couple children to likely parents.

    Hinton, Sabour & Frosst 2018, procedure 1, in log space::

        R_ij = 1 / (number of parents of child i)
        repeat `iterations` times:
            M-step, per parent:   r_ij = R_ij a_i       V_ij = M_i W_ij
                μ_j^h = Σ_i r_ij V_ij^h / Σ_i r_ij
                (σ_j^h)² = Σ_i r_ij (V_ij^h - μ_j^h)² / Σ_i r_ij + floor
                cost_j = Σ_h (β_u + log σ_j^h) · Σ_i r_ij / mean_data
                a_j = logistic(λ_t (β_a - cost_j))
            E-step, per child (not in the last iteration):
                log p_ij = -Σ_h [ (V_ij^h - μ_j^h)² / 2(σ_j^h)² + log σ_j^h + ½ log 2π ]
                R_ij = a_j p_ij / Σ_k a_k p_ik

    M_i and a_i are the pose and the activation of child i, W_ij is its transform for parent j, V_ij its vote, and R_ij
    its coupling. h runs over the elements of a vote. μ_j and a_j are the pose and the activation of parent j.

    The defaults include three corrections of Gritzman 2019 (arXiv 1907.00652). A floor is added to the variance,
    because a single vote has variance 0. The cost is divided by mean_data = number of children / number of parents of
    the layer; otherwise the activations of a layer with few parents would saturate. (Gritzman's code counts only the
    children of one parent and the parent types of one site.) All parents of a child compete for the child.

    Only mean_data counts children with activation 0. A parent whose children all have activation 0 has mean 0 and cost
    0. The result has the widest dtype of pose, activation and transform. Autocast does not change it, provided that
    ``backward`` is called outside the autocast context.

    Arguments:
        children: pose ``[B, S, C, R, Q]`` and activation ``[B, S, C]`` in [0, 1].
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        routing_map: the graph that connects child sites with parent sites.
        beta_u: ``[J]``, β_u in the formula of cost_j.
        beta_a: ``[J]``, β_a in the formula of a_j; a larger β_a gives a parent a higher activation.
        iterations: number of routing iterations, from 1 to 1,000.
        competition: ``parents``: the couplings R_ij of a child sum to 1 over all of its parents; ``types``: they sum to
            1 over the parent types at each parent site, as in most implementations, and start at 1 / J. The code of
            Hinton et al. does neither: its couplings sum to 1 over the parent sites, separately for each parent type.
        variance_floor: constant added to σ², at least 0: 1e-4 in Gritzman's paper (1e-9 in his code), 5e-4 in the code
            of Hinton et al., none in their paper. Without one, a parent with a single vote is NaN from iteration 2 on.
        normalise_data: divide the cost by mean_data. If False, as in the paper, mean_data is 1.
        inverse_temperature: inverse temperature λ of the activations, above 0. The paper uses 0.01, with
            ``normalise_data=False``; the code of its authors corresponds to 0.02, and 0.005 for the class capsules.
            Gritzman's code corresponds to 1, with β_a divided by 100.
        temperature_schedule: ``constant``: λ_t = λ; ``rising``, the authors' schedule: λ_t = λ (1 - 0.95^(t+1)) in
            iteration t = 0, 1, ….
        parent_activation: ``logistic``: a_j as in the M-step; ``mixing``: a_j ∝ Σ_i r_ij, with sum 1 over the layer.
        mean_damping: weight of the previous iteration's mean in the new mean, in [0, 1); σ² and the E-step use the new
            mean. The authors' code uses 0.1, and also multiplies the first mean by 0.9.
        tempering: factor on log (a_j p_ij) in the E-step, in (0, 1]; 1 in the paper. The elements of a pose are treated
            as independent, which makes the couplings overconfident; a smaller factor makes the couplings softer.
        return_passes: also return the result of every iteration. If the couplings need a gradient, computing them
            stores all votes, even with ``backend="fused"``.
        backend: ``fused``: kernels that do not store votes and have no second-order gradients; ``reference``: PyTorch
            operations that store all votes; ``auto``: ``fused`` if the kernels can run, otherwise ``reference``.

    Returns:
        The parents: pose ``[B, P, J, R, N]`` and activation ``[B, P, J]``, which are the mean and the activation of the
        last iteration. With ``return_passes``, also a list with one `EMPass` per iteration.

    Raises:
        ValueError: ``children``, ``transform``, ``beta_u`` or ``beta_a`` does not fit the map, an option is out of its
            range or has an unknown value, or the fused backend cannot run.

    Example:
        >>> children = Capsules(torch.randn(2, 9, 4, 4, 4), torch.rand(2, 9, 4))
        >>> transform = torch.randn(4, 4, 6, 4, 4)
        >>> parents = em_routing(children, transform, RoutingMap.conv((3, 3), 2), torch.zeros(6), torch.zeros(6))
        >>> parents.pose.shape, parents.activation.shape
        (torch.Size([2, 4, 6, 4, 4]), torch.Size([2, 4, 6]))
    """
    options = _Options(
        iterations,
        variance_floor,
        normalise_data,
        inverse_temperature,
        temperature_schedule,
        parent_activation,
        mean_damping,
        tempering,
    )
    _check(options)
    check_capsules(children)
    pose, activation = children
    votes = Votes(pose, activation, transform, routing_map, competition, passes=iterations, backend=backend)
    check_activation(activation, pose)
    dtype = torch.promote_types(torch.promote_types(pose.dtype, activation.dtype), transform.dtype)
    with without_autocast(pose.device):
        passes: list[EMPass] | None = [] if return_passes else None
        parents = capsules_in_dtype(_parents(votes, beta_u, beta_a, options, passes), dtype)
    return parents if passes is None else (parents, passes)


class _Options(NamedTuple):
    """The options of EM routing that do not concern the votes."""

    iterations: int
    variance_floor: float
    normalise_data: bool
    inverse_temperature: float
    temperature_schedule: TemperatureSchedule
    parent_activation: ParentActivation
    mean_damping: float
    tempering: float


def _parents(
    votes: Votes, beta_u: Tensor, beta_a: Tensor, options: _Options, passes: list[EMPass] | None = None
) -> Capsules:
    """Compute the parents by EM routing. Append the result of every iteration to ``passes``."""
    _, parent_sites, parent_types, rows, columns = votes.parent_shape
    _check_betas(beta_u, beta_a, votes)
    iterations, floor, tempering = options.iterations, options.variance_floor, options.tempering
    mean_data = 1.0
    if options.normalise_data:
        mean_data = votes.routing_map.child_sites * votes.child_shape[2] / (parent_sites * parent_types)
    agreement = None
    beta_u, beta_a = in_dtype(beta_u, votes.dtype), in_dtype(beta_a, votes.dtype)
    cost = float(rows * columns) * beta_u
    for t in range(iterations):
        if options.mean_damping and agreement is not None:
            mass, undamped, undamped_variance = votes.moments(agreement)
            mean = (1 - options.mean_damping) * undamped + options.mean_damping * cast(Tensor, agreement.centre)
            moved = torch.where(mass[..., None, None] > 0, (undamped - mean).square(), 0)
            variance = undamped_variance + moved
            volume = log_volume(variance, floor)
        else:
            mass, mean, variance, volume = votes.gaussians(agreement, floor=floor)
        if options.parent_activation == "logistic":
            rising = 1 - 0.95 ** (t + 1) if options.temperature_schedule == "rising" else 1
            inverse_temperature = options.inverse_temperature * rising
            scale = -inverse_temperature / mean_data
            logit = torch.add(inverse_temperature * beta_a, (cost + volume) * mass, alpha=scale)
            log_activation = functional.logsigmoid(logit)
        else:
            log_activation = _log_proportions(mass)
        if passes is not None:
            passes.append(EMPass(votes.couplings(agreement), mean, variance + floor, log_activation.exp()))
        if t + 1 < iterations:
            constant = log_activation - volume
            agreement = Agreement(
                constant if tempering == 1 else tempering * constant,
                centre=mean,
                variance=variance,
                variance_floor=floor,
                inverse_temperature=tempering,
            )
    return Capsules(mean, log_activation.exp())


def _log_proportions(mass: Float[Tensor, "B P J"]) -> Float[Tensor, "B P J"]:
    """Compute the log of each parent's share of the layer's mass. Shares are clamped to the smallest normal number."""
    tiny, total = torch.finfo(mass.dtype).tiny, mass.sum(dim=(1, 2), keepdim=True)
    empty = total < tiny  # False for NaN, which must remain NaN
    return torch.where(empty, 0, mass / torch.where(empty, 1, total)).clamp_min(tiny).log()


def _check_betas(beta_u: Tensor, beta_a: Tensor, votes: Votes) -> None:
    types = votes.parent_shape[2]
    for name, beta in (("beta_u", beta_u), ("beta_a", beta_a)):
        if not isinstance(beta, Tensor) or beta.ndim != 1 or beta.shape[0] != types:
            raise ValueError(
                f"{name} must be [{types}], one number per parent type of the transform; got {described(beta)}: "
                f"for {types} parent types, use EMRouting({types})"
            )
        check_floating(name, beta)
        check_device(name, beta, votes.device)


def _check(options: _Options) -> None:
    check_iterations(options.iterations)
    check_number("variance_floor", options.variance_floor, "[0, inf)")
    check_number("inverse_temperature", options.inverse_temperature, "(0, inf)")
    check_number("mean_damping", options.mean_damping, "[0, 1)")
    check_number("tempering", options.tempering, "(0, 1]")
    check_choice("temperature_schedule", options.temperature_schedule, TEMPERATURE_SCHEDULES)
    check_choice("parent_activation", options.parent_activation, PARENT_ACTIVATIONS)


class EMRouting(Rule):
    """Rule for capsule layers: EM routing with learned β_u and β_a. Hinton, Sabour & Frosst 2018, procedure 1.

    ::

        R_ij = 1 / (number of parents of child i)
        repeat `iterations` times:
            M-step:   r_ij = R_ij a_i       μ_j, σ_j² = mean and variance of the votes V_ij, weighted with r_ij
                      a_j = logistic(λ_t (β_a - Σ_h (β_u + log σ_j^h) · Σ_i r_ij / mean_data))
            E-step:   R_ij = a_j N(V_ij; μ_j, σ_j²) / Σ_k a_k N(V_ij; μ_k, σ_k²)

    V_ij is the vote of child i for parent j, R_ij its coupling, and a_i the activation of the child. h runs over the
    elements of a vote, and N is the normal density. μ_j and a_j are the pose and the activation of the parent.

    Arguments:
        parent_types: number of parent types (J). β_u and β_a have one number per parent type. With
            ``parent_activation="mixing"``, β_u and β_a are not trained.
        iterations: number of routing iterations, from 1 to 1,000.
        competition: ``parents``: the couplings R_ij of a child sum to 1 over all of its parents; ``types``: they sum to
            1 over the parent types at each parent site, and start at 1 / J.
        variance_floor: constant added to the variances σ² of the votes, at least 0.
        normalise_data: if True, mean_data is the layer's number of children divided by its number of parents; if
            False, mean_data is 1.
        inverse_temperature: inverse temperature λ of the activations, above 0.
        temperature_schedule: ``constant``: λ_t = λ; ``rising``: λ_t = λ (1 - 0.95^(t+1)) in iteration t = 0, 1, ….
        parent_activation: ``logistic``: a_j as in the M-step; ``mixing``: a_j ∝ Σ_i r_ij, with sum 1 over the layer.
        mean_damping: weight of the previous iteration's mean in the new mean, in [0, 1).
        tempering: factor on log (a_j N(V_ij; μ_j, σ_j²)) in the E-step, in (0, 1]; below 1, the couplings are softer.
        backend: ``fused`` (do not store votes), ``reference`` (store all votes), or ``auto``: fused if possible.
        initial_beta_a: initial value of the learned bias β_a of the activations; β_u starts at 0. A parent to which no
            child is coupled has the activation logistic(λ_t β_a), which is 0.1 for β_a = -15 after the default
            iterations. To make it low, start with a strongly negative β_a: training from 0 would take too many steps.

    Raises:
        ValueError: an option is out of its range or has an unknown value.

    Example:
        >>> rule = EMRouting(parent_types=6)
        >>> children = Capsules(torch.randn(2, 9, 4, 4, 4), torch.rand(2, 9, 4))
        >>> rule(children, torch.randn(1, 4, 6, 4, 4), RoutingMap.shared(9)).activation.shape
        torch.Size([2, 1, 6])
    """

    later_options = ("initial_beta_a",)

    def __init__(
        self,
        parent_types: int,
        iterations: int = 3,
        competition: Competition = "parents",
        variance_floor: float = 1e-4,
        normalise_data: bool = True,
        inverse_temperature: float = 1.0,
        temperature_schedule: TemperatureSchedule = "rising",
        parent_activation: ParentActivation = "logistic",
        mean_damping: float = 0.0,
        tempering: float = 1.0,
        backend: Backend = "auto",
        initial_beta_a: float = 0.0,
    ) -> None:
        super().__init__()
        self.parent_types = parent_types
        self.iterations = iterations
        self.competition = competition
        self.variance_floor = variance_floor
        self.normalise_data = normalise_data
        self.inverse_temperature = inverse_temperature
        self.temperature_schedule = temperature_schedule
        self.parent_activation = parent_activation
        if parent_activation == "mixing":
            self.activation_from_mass = True
        self.mean_damping = mean_damping
        self.tempering = tempering
        self.backend = backend
        check_number("initial_beta_a", initial_beta_a, "(-inf, inf)")
        self.initial_beta_a = float(initial_beta_a)
        _check(self._options)
        check_sizes(parent_types=parent_types)
        check_choice("competition", competition, COMPETITIONS)
        check_choice("backend", backend, BACKENDS)
        learned = parent_activation == "logistic"
        self.beta_u, self.beta_a = (nn.Parameter(torch.empty(parent_types), requires_grad=learned) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set β_u and β_a to their initial values."""
        nn.init.zeros_(self.beta_u)
        nn.init.constant_(self.beta_a, self.initial_beta_a)

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "EMRouting":
        """Create the rule for a layer, using the layer's number of parent types."""
        return cls(layer.parent_types, **options)

    @property
    def _options(self) -> _Options:
        return _Options(*(getattr(self, name) for name in _Options._fields))

    def route(self, votes: Votes) -> Capsules:
        """Compute the means and the activations of the last iteration."""
        _check(options := self._options)
        return _parents(votes, self.beta_u, self.beta_a, options)
