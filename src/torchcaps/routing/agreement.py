"""Inputs and outputs of `Votes.moments` and `Votes.gaussians`: `Agreement`, `Moments`, `Means` and `Gaussians`."""

import math
from typing import Literal, NamedTuple, get_args

from jaxtyping import Float
from torch import Tensor

from torchcaps.checks import described

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
