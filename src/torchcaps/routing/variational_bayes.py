"""Variational Bayes routing: Ribeiro, Leontidis & Kollias 2020 (arXiv 1905.11455)."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchcaps.capsules import Capsules
from torchcaps.checks import check_choice, check_iterations, check_sizes
from torchcaps.kernels import in_onnx_export
from torchcaps.routing.agreement import COMPETITIONS
from torchcaps.routing.rule import LayerShape, Rule
from torchcaps.routing.votes import Agreement, Competition, Recomputed, Votes


class VariationalBayesRouting(Rule):
    """Variational Bayes routing: fit a mixture of Gaussians with priors; parents with narrow Gaussians become active.

    Ribeiro, Leontidis & Kollias 2020, with diagonal precisions. V_ij is the vote of child i for parent j. Its weight is
    w_ij = a_i c_ij, where a_i is the activation of the child and c_ij its coupling. R_j = Σ_i w_ij is the mass of the
    votes for parent j, and μ_j their weighted mean. D is the number of elements of a pose. ψ is the digamma function
    and σ the logistic function. π_j is the mixing proportion, Λ_j the precision matrix and H_j the entropy of the
    Gaussian of parent j. α_j, κ_j, ν_j, m_j and Ψ_j are the parameters of the posterior, and E is the expectation under
    the posterior::

        c_ij = 1 / number of parents of child i
        repeat `iterations` times:
            α_j = 1 + R_j        κ_j = 1 + R_j        ν_j = D + 1 + R_j
            m_j = R_j μ_j / κ_j
            1 / Ψ_j = 1 + Σ_i w_ij (V_ij - μ_j)² + R_j μ_j² / κ_j                           elementwise
            E ln π_j = ψ(α_j) - ψ(Σ α over the types at the site of j)
            E ln|Λ_j| = Σ_d ψ((ν_j + 1 - d) / 2) + D ln 2 + Σ ln Ψ_j                        d = 1, …, D
            c_i = softmax over the parents (E ln π_j + ½ E ln|Λ_j| - ½ [D / κ_j + ν_j Σ Ψ_j (V_ij - m_j)²])
        H_j = ½ (D ln 2πe - E ln|Λ_j|)
        a_j = σ(BatchNorm(β_a - (β_u + e^(E ln π_j) H_j)))
        pose_j = BatchNorm(m_j)

    The priors are as in the authors' code: α_0 = κ_0 = 1, ν_0 = D + 1, m_0 = 0 and Ψ_0 = 1. With these priors, no
    variance floor is needed, even for a parent with one vote or no vote. The two BatchNorms have no learned parameters.
    They compute one mean and variance per parent type, over samples and sites, and for poses also over the elements of
    a pose. In training mode, the BatchNorm of the activation cancels β_a and β_u, as in the authors' code. Therefore
    β_a and β_u have gradient 0, apart from rounding errors, and change the result only in evaluation mode.

    This rule differs from the authors' code in two ways. First, in their code the initial couplings are 1 / J, even if
    a child has several parent sites; only the couplings of later iterations are normalised over all parents. Second,
    the denominator of their softmax is at least 1e-11. If the votes of a child are far from every parent, the couplings
    of the child therefore sum to less than 1 in their code, and large votes give NaN. Here each softmax always sums
    to 1.

    Arguments:
        parent_types: number of parent types (J). β_a and β_u have one number per type.
        iterations: number of routing iterations, including the first, whose couplings are uniform; from 1 to 1,000.
        competition: ``parents``: softmax over all parents of a child, as in the authors' code; ``types``: softmax over
            the parent types at each site. With ``types``, the first couplings are 1 / J.

    Raises:
        ValueError: ``parent_types`` is below 1, ``iterations`` is not in [1, 1000], or ``competition`` is unknown. When
            the rule is called: the transform has another number of parent types; or in training mode, the batch has
            only one sample and the layer only one parent site.

    Example:
        >>> from torchcaps import RoutingMap
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> rule = VariationalBayesRouting(parent_types=10)
        >>> rule(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    def __init__(self, parent_types: int, iterations: int = 3, competition: Competition = "parents") -> None:
        super().__init__()
        check_sizes(parent_types=parent_types)
        check_iterations(iterations)
        check_choice("competition", competition, COMPETITIONS)
        self.parent_types = parent_types
        self.iterations = iterations
        self.competition = competition
        self.beta_a = nn.Parameter(torch.empty(parent_types))
        self.beta_u = nn.Parameter(torch.empty(parent_types))
        self.activation_norm = nn.BatchNorm1d(parent_types, affine=False)
        self.pose_norm = nn.BatchNorm1d(parent_types, affine=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set β_a and β_u to 0."""
        nn.init.zeros_(self.beta_a)
        nn.init.zeros_(self.beta_u)

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "VariationalBayesRouting":
        """Create the rule for a layer, using the layer's number of parent types."""
        return cls(layer.parent_types, **options)

    def route(self, votes: Votes) -> Capsules:
        """Compute the poses from the posterior means m_j, and the activations from the entropies H_j."""
        if votes.parent_shape[2] != self.parent_types:
            raise ValueError(
                f"transform has {votes.parent_shape[2]} parent types (J), but this rule was created for "
                f"{self.parent_types}: create the rule with parent_types={votes.parent_shape[2]}"
            )
        check_iterations(self.iterations)
        found = votes.moments()
        for _ in range(self.iterations - 1):
            found = votes.moments(Recomputed(posterior_agreement, *found))
        posterior = Posterior.of(*found)
        numbers = posterior.centre.shape[3] * posterior.centre.shape[4]
        entropy = (numbers * math.log(2 * math.pi * math.e) - posterior.log_precision) / 2
        beta_a, beta_u = (beta.to(entropy.dtype) for beta in (self.beta_a, self.beta_u))
        logit = normalised(self.activation_norm, beta_a - (beta_u + posterior.log_part.exp() * entropy))
        return Capsules(normalised(self.pose_norm, posterior.centre), logit.sigmoid())


class Posterior(NamedTuple):
    """The posterior of the Gaussians of the parents, in the letters of `VariationalBayesRouting`.

    Arguments:
        centre: m_j, ``[B, P, J, R, N]``.
        scale: 1 / Ψ_j, ``[B, P, J, R, N]``.
        freedom: ν_j, ``[B, P, J]``.
        log_part: E ln π_j, ``[B, P, J]``.
        log_precision: ``E ln|Λ_j|``, ``[B, P, J]``.
    """

    centre: Tensor
    scale: Tensor
    freedom: Tensor
    log_part: Tensor
    log_precision: Tensor

    @classmethod
    def of(cls, mass: Tensor, mean: Tensor, variance: Tensor) -> "Posterior":
        """Compute the posterior from the moments of the votes."""
        numbers, counted = mean.shape[3] * mean.shape[4], 1 + mass
        freedom, weight = numbers + counted, mass[..., None, None]
        centre = weight / (1 + weight) * mean
        scale = 1 + weight * variance + centre * mean
        log_part = digamma(counted) - digamma(counted.sum(dim=2, keepdim=True))
        log_precision = sum_of_digammas((freedom + 1 - numbers) / 2, numbers)
        log_precision = log_precision + numbers * math.log(2) - scale.log().sum(dim=(3, 4))
        return cls(centre, scale, freedom, log_part, log_precision)


def posterior_agreement(mass: Tensor, mean: Tensor, variance: Tensor) -> Agreement:
    """Compute the agreement of the next iteration from the moments of the votes."""
    centre, scale, freedom, log_part, log_precision = Posterior.of(mass, mean, variance)
    numbers = mean.shape[3] * mean.shape[4]
    constant = log_part + (log_precision - numbers / (1 + mass)) / 2
    return Agreement(constant, centre=centre, variance=scale / freedom[..., None, None])


def sum_of_digammas(x: Tensor, count: int) -> Tensor:
    """Compute ``Σ ψ(x + k / 2)``, k = 0, …, count - 1, for x of at least 1, with two digamma functions.

    All other terms follow from ``ψ(x + 1) = ψ(x) + 1 / x``.
    """
    steps = torch.arange(max(0, count - 2), device=x.device)
    rest = ((count - 1 - steps) // 2 / (x[..., None] + steps / 2)).sum(dim=-1)
    return (count + 1) // 2 * digamma(x) + count // 2 * digamma(x + 0.5) + rest


def digamma(x: Tensor) -> Tensor:
    """Compute the digamma function of numbers of at least 1. ONNX has no such operator: see `written_digamma`."""
    return written_digamma(x) if in_onnx_export() else x.digamma()


def written_digamma(x: Tensor) -> Tensor:
    """Compute the digamma function of numbers of at least 1, with operations that ONNX supports.

    The formula is ``ψ(x) = ψ(x + 6) - Σ 1 / (x + k)``, k = 0 … 5, with the asymptotic series of ``ψ(x + 6)``.
    """
    above = x + 6
    inverse = 1 / above.square()
    series = inverse * (1 / 12 - inverse * (1 / 120 - inverse * (1 / 252 - inverse / 240)))
    steps = torch.stack([1 / (x + k) for k in range(6)]).sum(dim=0)
    return above.log() - 0.5 / above - series - steps


def normalised(norm: nn.BatchNorm1d, values: Tensor) -> Tensor:
    """Normalise values ``[B, P, J, ...]`` per parent type with a BatchNorm. The result has the dtype of the values."""
    buffers = dict(norm.named_buffers())
    statistics = {name: x.to(values.dtype) if x.is_floating_point() else x for name, x in buffers.items()}
    types_first = values.transpose(1, 2)
    flat = types_first.flatten(2)
    same = all(statistics[name] is buffer for name, buffer in buffers.items())
    found = norm(flat) if same else functional_call(norm, statistics, flat)  # torch.jit.trace refuses functional_call
    normalised = found.view(types_first.shape).transpose(1, 2)
    for name, buffer in buffers.items():
        if statistics[name] is not buffer and norm.training:
            buffer.copy_(statistics[name])
    return normalised
