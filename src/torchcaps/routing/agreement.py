"""What a routing rule asks of votes, and what it is told."""

from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

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

    Fused kernels give mean and variance in a memory layout of their own, which elementwise operations keep. Use
    ``reshape`` or ``flatten`` where ``view`` would need contiguous tensors.

    Arguments:
        mass: Σ w, ``[B, P, J]``.
        mean: Σ w V / Σ w, ``[B, P, J, R, N]``; 0 where all children are off.
        variance: Σ w (V - mean)² / Σ w, of the same shape; None where it was not asked for.
    """

    mass: Float[Tensor, "B P J"]
    mean: Float[Tensor, "B P J R N"]
    variance: Float[Tensor, "B P J R N"] | None
