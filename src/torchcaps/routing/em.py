"""EM routing: Hinton, Sabour & Frosst 2018, with the corrections of Gritzman 2019."""

import math
from typing import Any, Literal, NamedTuple, cast, get_args, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules, check_capsules
from torchcaps.checks import check_choice, check_device, check_floating, check_iterations, check_sizes, described
from torchcaps.kernels import Backend
from torchcaps.routing.rule import LayerShape
from torchcaps.routing.votes import Agreement, Competition, Votes, in_dtype
from torchcaps.routing_map import RoutingMap

TemperatureSchedule = Literal["rising", "constant"]
ParentActivation = Literal["logistic", "mixing"]


class EMPass(NamedTuple):
    """What one pass of EM routing found.

    Arguments:
        couplings: R_ij that went into the pass, ``[B, J, E, C]``, in the order of the map's edges.
        mean: μ_j, ``[B, P, J, R, N]``.
        variance: σ_j², of the same shape, at least the floor.
        activation: a_j, ``[B, P, J]``.
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
    """Fit a Gaussian to each parent's votes and share each child among them: Hinton, Sabour & Frosst 2018, procedure 1.

    ::

        R_ij = 1 / (number of parents child i reaches)
        repeat `iterations` times:
            M-step, per parent:   r_ij = R_ij a_i       V_ij = M_i W_ij
                μ_j^h = Σ_i r_ij V_ij^h / Σ_i r_ij
                (σ_j^h)² = Σ_i r_ij (V_ij^h - μ_j^h)² / Σ_i r_ij + floor
                cost_j = Σ_h (β_u + log σ_j^h) · Σ_i r_ij / mean_data
                a_j = logistic(λ (β_a - cost_j))
            E-step, per child (not in the last pass):
                log p_ij = -Σ_h [ (V_ij^h - μ_j^h)² / 2(σ_j^h)² + log σ_j^h + ½ log 2π ]
                R_ij = a_j p_ij / Σ_k a_k p_ik

    in log space. The defaults hold the corrections of Gritzman 2019 (arXiv 1907.00652): the variance floor (a single
    child has no variance), mean_data = children / parents of the layer (else layers with few parents saturate), and
    couplings that compete over every parent a child reaches. A child of activation 0 counts for nothing; a parent whose
    children are all off has mean 0 and the cost 0. Computed in the widest dtype of children and transform, whatever
    autocast says.

    Arguments:
        children: pose ``[B, S, C, R, Q]`` and activation ``[B, S, C]`` in [0, 1].
        transform: ``[K, C, J, Q, N]``, the map's transforms.
        routing_map: which child site feeds which parent site.
        beta_u: ``[J]``, the cost of describing a datum with no parent active (with its sign turned).
        beta_a: ``[J]``, the cost of activating a parent (with its sign turned).
        iterations: T, from 1 to 1,000.
        competition: ``parents``, every type at every site that a child reaches; ``types`` at one site alone, as most
            implementations have it (and R_ij = 1 / J at the start).
        variance_floor: added to σ², at least 0; Gritzman has 1e-4, the authors' code 5e-4, the paper none: then a
            parent with a single voter is NaN.
        normalise_data: divide Σ r by mean_data in the cost; the paper does not.
        inverse_temperature: λ, what a rise without end would reach, above 0. The paper's 0.01 belongs beside costs of
            many data (``normalise_data=False``); beside the cost of one, 1 is its equal, and so Gritzman's code has it.
        temperature_schedule: ``rising``, λ (1 - 0.95^(t+1)) in pass t = 0, 1, …, as the authors; or ``constant``.
        parent_activation: ``logistic``, or ``mixing`` proportions: a_j ∝ Σ_i r_ij, summing to 1 over the layer.
        mean_damping: share of the last pass's mean kept in the next, in [0, 1); the authors' code has 0.1.
        tempering: a factor on log (a_j p_ij) in the E-step, in (0, 1]; the paper has 1. The numbers of a pose are
            counted as independent, so that the couplings are too sure; a smaller factor makes them less so.
        return_passes: also return what every pass found; its couplings write all votes to memory where a gradient is
            asked for.
        backend: ``fused`` never writes a vote to memory and is not differentiated twice; ``reference`` writes all of
            them; ``auto`` is fused where it can be.

    Returns:
        The parents: mean ``[B, P, J, R, N]`` and activation ``[B, P, J]`` of the last pass; with one `EMPass` a pass
        where asked for.

    Raises:
        ValueError: children, transform or β do not fit the map, an option is out of its range or unknown, or the
            backend cannot.

    Example:
        >>> children = Capsules(torch.randn(2, 9, 4, 4, 4), torch.rand(2, 9, 4))
        >>> transform = torch.randn(4, 4, 6, 4, 4)
        >>> parents = em_routing(children, transform, RoutingMap.conv((3, 3), 2), torch.zeros(6), torch.zeros(6))
        >>> parents.pose.shape, parents.activation.shape
        (torch.Size([2, 4, 6, 4, 4]), torch.Size([2, 4, 6]))
    """
    _check_options(
        iterations,
        competition,
        variance_floor,
        inverse_temperature,
        temperature_schedule,
        parent_activation,
        mean_damping,
        tempering,
    )
    _check_tensors(children, transform, routing_map, beta_u, beta_a)
    dtype = torch.promote_types(torch.promote_types(children.pose.dtype, children.activation.dtype), transform.dtype)
    mean_data = 1.0
    if normalise_data:
        capsules_below = routing_map.child_sites * transform.shape[1]
        mean_data = capsules_below / (routing_map.parent_sites * transform.shape[2])
    inverse_temperatures = [
        inverse_temperature * (1 - 0.95 ** (t + 1) if temperature_schedule == "rising" else 1)
        for t in range(iterations)
    ]
    with torch.autocast(children.pose.device.type, enabled=False):
        pose, activation = in_dtype(children.pose, dtype), in_dtype(children.activation, dtype)
        votes = Votes(
            pose, activation, in_dtype(transform, dtype), routing_map, competition, passes=iterations, backend=backend
        )
        agreement, passes = None, []
        cost, beta_a = pose.shape[3] * transform.shape[4] * in_dtype(beta_u, votes.dtype), in_dtype(beta_a, votes.dtype)
        for t, inverse_temperature in enumerate(inverse_temperatures):
            fitted = votes.moments(agreement)
            mass, mean, variance = fitted.mass, fitted.mean, cast(Tensor, fitted.variance)
            if mean_damping and agreement is not None:
                mean = (1 - mean_damping) * fitted.mean + mean_damping * cast(Tensor, agreement.centre)
                moved = (fitted.mean - mean).square()
                variance = variance + torch.where(mass[..., None, None] > 0, moved, 0)
            half_precision, log_volume = votes.gaussian(variance, variance_floor)
            if parent_activation == "logistic":
                scale = -inverse_temperature / mean_data
                logit = torch.addcmul(inverse_temperature * beta_a, cost + log_volume, mass, value=scale)
                log_activation = functional.logsigmoid(logit)
            else:
                log_activation = _log_proportions(mass)
            if return_passes:
                passes.append(EMPass(votes.couplings(agreement), mean, variance + variance_floor, log_activation.exp()))
            if t + 1 < iterations:
                constant = log_activation - log_volume
                if tempering < 1:
                    constant, half_precision = tempering * constant, tempering * half_precision
                agreement = Agreement(constant, quadratic=half_precision, centre=mean)
        parents = Capsules(in_dtype(mean, dtype), in_dtype(log_activation.exp(), dtype))
    return (parents, passes) if return_passes else parents


def _log_proportions(mass: Float[Tensor, "B P J"]) -> Float[Tensor, "B P J"]:
    """The logarithm of each parent's part of the layer's mass; of parts near 0, that of the smallest number."""
    tiny, total = torch.finfo(mass.dtype).tiny, mass.sum(dim=(1, 2), keepdim=True)
    some = total >= tiny
    return torch.where(some, mass / torch.where(some, total, 1), 0).clamp_min(tiny).log()


def _check_tensors(
    children: Capsules, transform: Tensor, routing_map: RoutingMap, beta_u: Tensor, beta_a: Tensor
) -> None:
    check_capsules(children)
    pose, activation = children
    routing_map.check(pose, transform)
    if not isinstance(activation, Tensor) or activation.shape != pose.shape[:3]:
        raise ValueError(f"activation must be [B, S, C] = {list(pose.shape[:3])}, as pose; got {described(activation)}")
    check_floating("activation", activation)
    check_device("activation", activation, pose)
    types = transform.shape[2]
    for name, beta in (("beta_u", beta_u), ("beta_a", beta_a)):
        if not isinstance(beta, Tensor) or beta.ndim != 1 or beta.shape[0] != types:
            raise ValueError(
                f"{name} must be [{types}], a number for each parent type of the transform; got {described(beta)}: "
                f"in a layer of {types} parent types, use EMRouting({types})"
            )
        check_floating(name, beta)
        check_device(name, beta, pose)


def _check_options(
    iterations: int,
    competition: str,
    variance_floor: float,
    inverse_temperature: float,
    temperature_schedule: str,
    parent_activation: str,
    mean_damping: float,
    tempering: float,
) -> None:
    check_iterations(iterations)
    if not 0 <= variance_floor < math.inf:
        raise ValueError(f"variance_floor must be at least 0; got {variance_floor}")
    if not 0 < inverse_temperature < math.inf:
        raise ValueError(f"inverse_temperature must be above 0; got {inverse_temperature}")
    if not 0 <= mean_damping < 1:
        raise ValueError(f"mean_damping must be in [0, 1); got {mean_damping}")
    if not 0 < tempering <= 1:
        raise ValueError(f"tempering must be in (0, 1]; got {tempering}")
    for name, value, allowed in (
        ("competition", competition, get_args(Competition)),
        ("temperature_schedule", temperature_schedule, get_args(TemperatureSchedule)),
        ("parent_activation", parent_activation, get_args(ParentActivation)),
    ):
        check_choice(name, value, allowed)


class EMRouting(nn.Module):
    """`em_routing` with its options fixed and its β learned, as the rule of a capsule layer.

    Arguments:
        parent_types: J; β_u and β_a are one number per parent type; mixing proportions need neither.
        initial_beta_a: β_a at the start, where β_u is 0. Below 0, a parent that no child chose is off, at an activation
            of logistic(λ β_a). β_a moves in steps of the learning rate, so that it does not get there by itself.
        The others are those of `em_routing`.

    Raises:
        ValueError: an option is out of its range or unknown.

    Example:
        >>> rule = EMRouting(parent_types=6)
        >>> children = Capsules(torch.randn(2, 9, 4, 4, 4), torch.rand(2, 9, 4))
        >>> rule(children, torch.randn(1, 4, 6, 4, 4), RoutingMap.shared(9)).activation.shape
        torch.Size([2, 1, 6])
    """

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
        _check_options(
            iterations,
            competition,
            variance_floor,
            inverse_temperature,
            temperature_schedule,
            parent_activation,
            mean_damping,
            tempering,
        )
        check_sizes(parent_types=parent_types)
        check_choice("backend", backend, get_args(Backend))
        self.parent_types = parent_types
        learned = parent_activation == "logistic"
        self.beta_u = nn.Parameter(torch.zeros(parent_types), requires_grad=learned)
        self.beta_a = nn.Parameter(torch.full((parent_types,), float(initial_beta_a)), requires_grad=learned)
        self.options: dict[str, Any] = {
            "iterations": iterations,
            "competition": competition,
            "variance_floor": variance_floor,
            "normalise_data": normalise_data,
            "inverse_temperature": inverse_temperature,
            "temperature_schedule": temperature_schedule,
            "parent_activation": parent_activation,
            "mean_damping": mean_damping,
            "tempering": tempering,
            "backend": backend,
        }

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "EMRouting":
        """The rule for the parent types of a layer."""
        return cls(layer.parent_types, **options)

    def passes(self, children: Capsules, transform: Tensor, routing_map: RoutingMap) -> list[EMPass]:
        """Every pass in full; see `em_routing`."""
        betas = self.beta_u, self.beta_a
        return em_routing(children, transform, routing_map, *betas, return_passes=True, **self.options)[1]

    @overload
    def forward(
        self, children: Capsules, transform: Tensor, routing_map: RoutingMap, return_couplings: Literal[False] = False
    ) -> Capsules: ...
    @overload
    def forward(
        self, children: Capsules, transform: Tensor, routing_map: RoutingMap, return_couplings: Literal[True]
    ) -> tuple[Capsules, Tensor]: ...
    def forward(self, children, transform, routing_map, return_couplings=False):
        """Parents' capsules, and the couplings of the last pass ``[B, J, E, C]`` where asked for."""
        if return_couplings:
            last = self.passes(children, transform, routing_map)[-1]
            return Capsules(last.mean, last.activation), last.couplings
        return em_routing(children, transform, routing_map, self.beta_u, self.beta_a, **self.options)

    @property
    def backend(self) -> Backend:
        """Which kernels compute the votes; see `em_routing`."""
        return self.options["backend"]

    @backend.setter
    def backend(self, backend: Backend) -> None:
        self.options["backend"] = backend

    @property
    def saved_options(self) -> dict[str, Any]:
        """What the rule is made with; β_u and β_a are weights."""
        return {"parent_types": len(self.beta_u), **self.options}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
