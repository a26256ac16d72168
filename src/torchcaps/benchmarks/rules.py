"""Benchmark of routing rules on the two ConvCaps layers of the small `MatrixCapsNet`.

Fused kernels are compared with the reference implementation and with materialised votes. Materialised votes are
computed with unfold and one einsum. The softmax of the couplings runs over the parent types at one site, as in most
implementations. The fused kernels and the reference implementation use the same softmax here, so all implementations
compute the same result.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.benchmarks import DEVICE, SCALE
from torchcaps.benchmarks.routing import Problem
from torchcaps.capsules import Capsules
from torchcaps.routing import ROUTINGS, GenerativeRouting, LayerShape, SelfRouting
from torchcaps.routing.variational_bayes import VariationalBayesRouting, normalised
from torchcaps.routing_map import RoutingMap

BATCH = 32 * SCALE


def patches(pose: Tensor, activation: Tensor, grid: tuple[int, int], stride: int) -> tuple[Tensor, Tensor]:
    """Gather poses ``[B, P, 9, C, R, Q]`` and activations ``[B, P, 9 · C, 1]`` of the 3×3 child sites per parent."""
    batch, _, types, rows, columns = pose.shape
    planes = torch.cat([pose.flatten(2), activation], dim=2).mT.unflatten(2, grid)
    windows = functional.unfold(planes, 3, stride=stride).unflatten(1, (-1, 9))
    numbers, sites = types * rows * columns, windows.shape[3]
    poses = windows[:, :numbers].reshape(batch, types, rows, columns, 9, sites).permute(0, 5, 4, 1, 2, 3)
    return poses, windows[:, numbers:].permute(0, 3, 2, 1).reshape(batch, sites, 9 * types, 1)


def attention(rule: Any, votes: Tensor, activation: Tensor, poses: Tensor) -> tuple[Tensor, Tensor]:
    """Route materialised votes by inverted dot-product attention."""
    parents = rule.norm(votes.sum(dim=2) / votes.shape[3])
    for _ in range(rule.iterations - 1):
        logits = torch.einsum("bpijn,bpjn->bpij", votes, parents) / math.sqrt(votes.shape[4])
        parents = rule.norm(torch.einsum("bpij,bpijn->bpjn", logits.softmax(dim=3), votes))
    return parents, rule.score(parents).squeeze(3).sigmoid()


def self_routing(rule: SelfRouting, votes: Tensor, activation: Tensor, poses: Tensor) -> tuple[Tensor, Tensor]:
    """Route materialised votes by self-routing."""
    logits = torch.einsum("bpkcrq,kcjqr->bpkcj", poses, rule.weight) + rule.bias
    routed = logits.flatten(2, 3).softmax(dim=3) * activation
    mass = routed.sum(dim=2)
    return torch.einsum("bpij,bpijn->bpjn", routed, votes) / mass[..., None], mass / activation.sum(dim=2)


def variational_bayes(
    rule: VariationalBayesRouting, votes: Tensor, activation: Tensor, poses: Tensor
) -> tuple[Tensor, Tensor]:
    """Route materialised votes by variational Bayes."""
    couplings, numbers = votes.new_full(votes.shape[:4], 1 / votes.shape[3]), votes.shape[4]
    for _ in range(rule.iterations):
        routed = (couplings * activation)[..., None]
        mass = routed.sum(dim=2)
        mean = (routed * votes).sum(dim=2) / mass
        scatter = (routed * (votes - mean[:, :, None]).square()).sum(dim=2)
        counted, freedom = (1 + mass)[..., 0], (numbers + 1 + mass)[..., 0]
        centre = mass / (1 + mass) * mean
        scale = 1 + scatter + centre * mean
        log_part = counted.digamma() - counted.sum(dim=2, keepdim=True).digamma()
        log_precision = ((freedom[..., None] - torch.arange(numbers, device=votes.device)) / 2).digamma().sum(dim=3)
        log_precision = log_precision + numbers * math.log(2) - scale.log().sum(dim=3)
        distance = ((votes - centre[:, :, None]).square() / scale[:, :, None]).sum(dim=4)
        logits = log_part + (log_precision - numbers / counted) / 2
        couplings = (logits[:, :, None] - freedom[:, :, None] * distance / 2).softmax(dim=3)
    entropy = (numbers * math.log(2 * math.pi * math.e) - log_precision) / 2
    logit = normalised(rule.activation_norm, rule.beta_a - (rule.beta_u + log_part.exp() * entropy))
    return normalised(rule.pose_norm, centre), logit.sigmoid()


def generative(rule: GenerativeRouting, votes: Tensor, activation: Tensor, poses: Tensor) -> tuple[Tensor, Tensor]:
    """Route materialised votes by generative routing."""
    use, ignore = rule.beta_use.flatten(0, 1), rule.beta_ignore.flatten(0, 1)
    couplings = votes.new_full(votes.shape[:4], 1 / votes.shape[3])
    for _ in range(rule.iterations):
        routed = couplings * activation
        mass = routed.sum(dim=2)
        logit = (routed * use).sum(dim=2) - ((activation - routed) * ignore).sum(dim=2)
        weight = routed[..., None] / (mass[:, :, None, :, None] + rule.mass_floor)
        pose = (weight * votes).sum(dim=2)
        variance = (weight * (votes - pose[:, :, None]).square()).sum(dim=2) + rule.variance_floor
        distance = ((votes - pose[:, :, None]).square() / (2 * variance[:, :, None])).sum(dim=4)
        prior = functional.logsigmoid(logit) - 0.5 * variance.log().sum(dim=3)
        couplings = (prior[:, :, None] - distance).softmax(dim=3)
    return pose, logit.sigmoid()


MATERIALISED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "attention": attention,
    "variational_bayes": variational_bayes,
    "self_routing": self_routing,
    "generative": generative,
}


def rule_stack(name: str, batch: int = BATCH, *, grid: int = 14, types: tuple[int, int, int] = (8, 16, 16)) -> Problem:
    """Create the `Problem` of two ConvCaps layers, 14×14×8 → 6×6×16 → 4×4×16 capsules, for a rule in `MATERIALISED`."""
    torch.manual_seed(0)
    layers: list[Any] = []
    size = (grid, grid)
    sizes: list[tuple[tuple[int, int], int, RoutingMap]] = []
    for stride, below, above in ((2, *types[:2]), (1, *types[1:])):
        rule: Any = cast(Any, ROUTINGS[name]).for_layer(LayerShape(9, below, above, (4, 4), (4, 4)))
        rule.competition = "types"
        for parameter in rule.parameters():
            nn.init.normal_(parameter, std=0.1)
        rule.register_parameter("transform", nn.Parameter(0.3 * torch.randn(9, below, above, 4, 4)))
        layers.append(rule.to(DEVICE))
        sizes.append((size, stride, RoutingMap.conv(size, 3, stride)))
        size = sizes[-1][2].parent_grid
    pose = torch.randn(batch, grid * grid, types[0], 4, 4, device=DEVICE).requires_grad_()
    activation = torch.rand(batch, grid * grid, types[0], device=DEVICE).requires_grad_()

    def routed(backend: str) -> list[Tensor]:
        capsules = Capsules(pose, activation)
        for rule, (_, _, routing_map) in zip(layers, sizes, strict=True):
            rule.backend = backend
            capsules = rule(capsules, rule.transform, routing_map)
        return list(capsules)

    def materialised(route: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        found, active = pose, activation
        for rule, (below, stride, _) in zip(layers, sizes, strict=True):
            poses, children = patches(found, active, below, stride)
            votes = torch.einsum("bpkcrq,kcjqn->bpkcjrn", poses, rule.transform).flatten(5).flatten(2, 3)
            found, active = route(rule, votes, children, poses)
            found = found.unflatten(3, (4, 4))
        return [found, active]

    compiled = cache(lambda: torch.compile(MATERIALISED[name], dynamic=False))
    ways = {
        "fused": lambda: routed("fused"),
        "reference": lambda: routed("reference"),
        "materialised votes": lambda: materialised(MATERIALISED[name]),
        "materialised votes, compiled": lambda: materialised(compiled()),
    }
    used = [pose, activation, *(x for rule in layers for x in rule.parameters())]
    seen = torch.autograd.grad(ways["fused"]()[0].square().sum(), used, allow_unused=True)
    leaves = [x for x, grad in zip(used, seen, strict=True) if grad is not None and grad.norm() > 1e-3]
    return Problem(leaves, ways, [(way, ways["reference"]) for way in ways.values()])


def rule_problems() -> dict[str, tuple[Callable[[int], Problem], int]]:
    """Return the routing problem and batch size of each rule in `MATERIALISED`."""
    return {f"{name}, ConvCaps stack": (partial(rule_stack, name), BATCH) for name in MATERIALISED}
