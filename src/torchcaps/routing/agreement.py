"""Inputs and outputs of `Votes.moments` and `Votes.gaussians`."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import check_device, check_floating, described
from torchcaps.kernels.gaussian import half_precision
from torchcaps.routing.precision import in_dtype, without_autocast

Competition = Literal["parents", "types"]
COMPETITIONS: tuple[Competition, ...] = get_args(Competition)


class Agreement(NamedTuple):
    """Logits of the couplings, as a quadratic function of the votes. A logit measures how well a vote fits a parent.

    ::

        logit = constant + Σ linear · d - Σ quadratic · d²        d = V - centre

    V is the vote of a child for a parent. The sums run over the elements of the vote. A softmax over the parents of a
    child turns the child's logits into couplings. A tensor that is None counts as 0; if all are None, all couplings of
    a child are equal.

    For the log density of a Gaussian, give ``variance`` instead of ``quadratic``::

        quadratic = inverse_temperature / 2σ²        σ² = variance + variance_floor

    The fused kernels compute ``quadratic`` from ``variance`` each time they need it, and do not store it.

    Arguments:
        constant: ``[B, P, J]``: batch, parent sites, parent types. A large constant rounds the other terms
            of the logit: in float32, a constant of -1e4 rounds them to multiples of about 1e-3. To exclude a parent,
            use -∞. If all parents of a child are excluded, its couplings are NaN, or 0 if the softmax includes "none of
            the above".
        linear, quadratic, centre, variance: ``[B, P, J, R, N]``, with rows and columns of a vote in the last two
            dimensions.
        variance_floor: constant added to ``variance``, at least 0.
        inverse_temperature: factor on the squared distances, above 0.

    Example:
        >>> import torch
        >>> Agreement(linear=torch.zeros(2, 1, 10, 1, 16)).constant is None
        True
    """

    constant: Float[Tensor, "B P J"] | None = None
    linear: Float[Tensor, "B P J R N"] | None = None
    quadratic: Float[Tensor, "B P J R N"] | None = None
    centre: Float[Tensor, "B P J R N"] | None = None
    variance: Float[Tensor, "B P J R N"] | None = None
    variance_floor: float = 0.0
    inverse_temperature: float = 1.0


class Recomputed:
    """An agreement that is computed from tensors, and computed again in the backward pass. This needs less memory.

    A pass stores the tensors of its agreement for the backward pass, and PyTorch stores intermediate results of their
    computation. With this class, the fused kernels store only ``tensors`` instead: usually the moments of the previous
    pass, which are stored in any case.

    Arguments:
        function: function that takes ``tensors`` and returns an `Agreement`. It must return the same result each time,
            and get every tensor that needs a gradient as an argument. It runs without autocast.
        tensors: arguments of ``function``.

    Raises:
        ValueError: one of ``tensors`` is not a tensor.

    Example:
        >>> import torch
        >>> from torchcaps import RoutingMap, Votes
        >>> def closer(mass, mean, variance):
        ...     return Agreement(quadratic=1 / (1 + variance), centre=mean)
        >>> votes = Votes(torch.randn(2, 6, 4, 1, 8), None, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6))
        >>> votes.moments(Recomputed(closer, *votes.moments())).mean.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    def __init__(self, function: Callable[..., Agreement], *tensors: Tensor) -> None:
        for x in tensors:
            if not isinstance(x, Tensor):
                raise ValueError(f"all arguments of Recomputed after the function must be tensors; got {described(x)}")
        self.function, self.tensors = function, tensors

    def __call__(self) -> Agreement:
        """Compute the agreement."""
        return _computed(self.function, self.tensors)

    def constant(self) -> Agreement:
        """Compute the agreement without gradients.

        Raises:
            ValueError: the function uses a tensor that needs a gradient, and that is not one of its arguments.
        """
        agreement = _computed(self.function, [x.detach() for x in self.tensors])
        if isinstance(agreement, Agreement) and any(isinstance(x, Tensor) and x.requires_grad for x in agreement):
            raise ValueError(
                "the function of Recomputed uses a tensor that needs a gradient, but not as an argument: give the "
                "tensor to Recomputed after the function"
            )
        return agreement


def _computed(function: Callable[..., Agreement], tensors: Sequence[Tensor]) -> Agreement:
    """Call a function without autocast, which would be off in the backward pass."""
    with without_autocast(tensors[0].device) if tensors else nullcontext():
        return function(*tensors)


AnyAgreement = Agreement | Recomputed | None


class Moments(NamedTuple):
    """Mass, mean and variance of the votes for each parent.

    The weight w of a vote V is the activation of the child times the coupling of the child and the parent.

    Use ``reshape`` or ``flatten`` instead of ``view``: tensors from the fused kernels are not always contiguous in
    memory. An elementwise operation keeps the memory layout, so its result may not be contiguous either.
    Do not change the tensors in place: the backward pass needs them.

    Arguments:
        mass: Σ w, ``[B, P, J]``: batch, parent sites, parent types.
        mean: Σ w V / Σ w, ``[B, P, J, R, N]``; 0, with gradient 0, if all children have activation 0.
        variance: Σ w (V - mean)² / Σ w, ``[B, P, J, R, N]``.

    Example:
        >>> import torch
        >>> mass, mean = torch.ones(2, 1, 10), torch.zeros(2, 1, 10, 1, 16)
        >>> Moments(mass, mean, variance=mean + 1).mean.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    mass: Float[Tensor, "B P J"]
    mean: Float[Tensor, "B P J R N"]
    variance: Float[Tensor, "B P J R N"]


class Means(NamedTuple):
    """Mass and mean of the votes for each parent: `Moments` without the variance.

    Arguments:
        mass: Σ w, ``[B, P, J]``: batch, parent sites, parent types.
        mean: Σ w V / Σ w, ``[B, P, J, R, N]``; 0, with gradient 0, if all children have activation 0.

    Example:
        >>> import torch
        >>> Means(mass=torch.ones(2, 1, 10), mean=torch.zeros(2, 1, 10, 1, 16)).mean.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    mass: Float[Tensor, "B P J"]
    mean: Float[Tensor, "B P J R N"]


class Gaussians(NamedTuple):
    """A Gaussian for each parent, with diagonal covariance, fitted to the votes.

    ::

        σ² = variance + floor

    The weight w of a vote V is the activation of the child times the coupling of the child and the parent.

    Use ``reshape`` or ``flatten`` instead of ``view``: as in `Moments`, tensors from the fused kernels are not always
    contiguous in memory. Do not change the tensors in place: the backward pass needs them.

    Arguments:
        mass: Σ w, ``[B, P, J]``: batch, parent sites, parent types.
        mean: Σ w V / Σ w, ``[B, P, J, R, N]``; 0, with gradient 0, if all children have activation 0.
        variance: Σ w (V - mean)² / Σ w, ``[B, P, J, R, N]``, without the floor.
        log_volume: Σ log σ over the elements of a vote, ``[B, P, J]``. In this sum, σ² is at least the smallest normal
            number of its dtype, so that a floor of 0 gives finite numbers.

    Example:
        >>> import torch
        >>> mass, mean = torch.ones(2, 1, 10), torch.zeros(2, 1, 10, 1, 16)
        >>> Gaussians(mass, mean, variance=mean + 1, log_volume=0 * mass).variance.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    mass: Float[Tensor, "B P J"]
    mean: Float[Tensor, "B P J R N"]
    variance: Float[Tensor, "B P J R N"]
    log_volume: Float[Tensor, "B P J"]


def check_logit_weights(weights: Tensor, pose: Tensor, transform: Tensor) -> None:
    """Check that weights of logits fit a pose ``[B, S, C, R, Q]`` and a transform ``[K, C, J, Q, N]``."""
    shape = (*transform.shape[:3], pose.shape[3] * pose.shape[4] + 1)
    check_floating("logit_weights", weights)
    if weights.shape != shape:
        raise ValueError(
            f"logit_weights must be [K, C, J, R·Q + 1] = {list(shape)} to fit pose and transform; "
            f"got {described(weights)}"
        )
    check_device("logit_weights", weights, pose.device)


def check_variance(agreement: Agreement) -> None:
    """Check the numbers of an agreement with a variance."""
    floor, inverse_temperature = agreement.variance_floor, agreement.inverse_temperature
    if agreement.variance is None:
        if (floor, inverse_temperature) != (0, 1):
            raise ValueError(
                "variance_floor and inverse_temperature in the agreement need a variance; "
                f"got variance=None, variance_floor={floor} and inverse_temperature={inverse_temperature}"
            )
    elif agreement.quadratic is not None:
        raise ValueError("the agreement has both quadratic and variance: give one of them")
    elif isinstance(floor, Tensor) or isinstance(inverse_temperature, Tensor):
        raise ValueError(
            "variance_floor and inverse_temperature in the agreement must be numbers; "
            f"got {described(floor)} and {described(inverse_temperature)}: to learn one of them, give quadratic = "
            "inverse_temperature / (2 (variance + variance_floor)) instead of variance"
        )
    elif not 0 <= floor < math.inf or not 0 < inverse_temperature < math.inf:
        raise ValueError(
            "in the agreement, variance_floor must be a finite number of at least 0, and inverse_temperature a finite "
            f"number above 0; got {floor} and {inverse_temperature}"
        )


def kernel_arguments(agreement: Agreement) -> tuple[Any, ...]:
    """Return an agreement as arguments of the operators.

    The operators take one tensor for quadratic and variance: it is quadratic if inverse_temperature is 0, and variance
    otherwise. An inverse temperature close to 0 is replaced by a small normal number, so that it does not become 0.
    """
    constant, linear, quadratic, centre, variance, floor, inverse_temperature = agreement
    if variance is None:
        return constant, linear, quadratic, centre, 0.0, 0.0
    return constant, linear, variance, centre, floor, max(inverse_temperature, 4 * torch.finfo(variance.dtype).tiny)


def kernel_tensors(function: Callable[..., Agreement], dtype: torch.dtype, *tensors: Tensor) -> list[Tensor | None]:
    """Return the tensors of an agreement ``function(*tensors)`` as arguments of the operators."""
    return [None if x is None else in_dtype(x, dtype) for x in kernel_arguments(_computed(function, tensors))[:4]]


def plain(agreement: Agreement) -> Agreement:
    """Replace the variance by the quadratic factor."""
    constant, linear, _, centre, variance, floor, inverse_temperature = agreement
    if variance is None:
        return agreement
    return Agreement(constant, linear, half_precision(variance, floor, inverse_temperature), centre)
