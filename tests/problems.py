"""Random routing problems on every kind of routing map, and the papers' procedures as plain loops."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchcaps import RoutingMap
from torchcaps.testing import Case

MAPS = {
    "dense": RoutingMap.dense(4),
    "shared": RoutingMap.shared(4),
    "conv": RoutingMap.conv((3, 4), kernel_size=2),
    "conv-stride-padding": RoutingMap.conv((4, 3), kernel_size=3, stride=2, padding=1),
    "one-parent": RoutingMap(torch.tensor([[2, 0, 2], [0, 0, 0], [0, 0, 1], [2, 0, 2]]), 3, 1, 3, (1, 1)),
    "irregular": RoutingMap(
        torch.tensor([[2, 1, 0], [0, 3, 1], [2, 1, 0], [0, 0, 1], [3, 1, 0], [2, 3, 1]]), 4, 4, 3, (2, 2)
    ),
    "no-edges": RoutingMap(torch.zeros(0, 3, dtype=torch.int64), 2, 2, 1, (1, 2)),
}
"""Irregular: unsorted and repeated edges, a child site without a parent, a parent site without a child, an unused
transform. One-parent: several edges from a child site to the one parent site."""


def random_case(
    routing_map: RoutingMap, seed: int, dtype: torch.dtype, sizes: tuple[int, ...] = (2, 3, 4), rows: int = 1
) -> Case:
    """Random poses and transforms with variance 1; `sizes` are (batch, child types, parent types)."""
    batch, child_types, parent_types = sizes
    generator = torch.Generator().manual_seed(seed)
    pose = torch.randn(batch, routing_map.child_sites, child_types, rows, 3, generator=generator, dtype=dtype)
    transform = torch.randn(routing_map.transforms, child_types, parent_types, 3, 5, generator=generator, dtype=dtype)
    return Case(pose, transform, routing_map)


def full_problem(
    routing_map: RoutingMap, parent_types: int, pose: tuple[int, int, int], child_types: int = 3, batch: int = 3
) -> tuple[Tensor, ...]:
    """Pose (rows × inner), activation (some 0, some 1), transform (inner × columns), beta_u and beta_a, in float64."""
    rows, inner, columns = pose
    activation = torch.rand(batch, routing_map.child_sites, child_types).double()
    activation[0, :, 0] = 0
    activation[-1, :, -1] = 1
    return (
        torch.randn(batch, routing_map.child_sites, child_types, rows, inner).double(),
        activation,
        torch.randn(routing_map.transforms, child_types, parent_types, inner, columns).double(),
        0.3 * torch.randn(parent_types).double(),
        torch.randn(parent_types).double(),
    )


def far(found: Tensor, exact: Tensor) -> float:
    """Return the relative error of `found` in the Euclidean norm."""
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-6)).item()


@st.composite
def maps(draw: st.DrawFn) -> RoutingMap:
    kind = draw(st.sampled_from(["dense", "shared", "conv", "any"]))
    if kind == "any":
        sizes = [draw(st.integers(1, 4)) for _ in range(3)]
        edges = draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), max_size=8))
        return RoutingMap(torch.tensor(edges, dtype=torch.int64).reshape(-1, 3), *sizes, (1, sizes[1]))
    if kind != "conv":
        sites = draw(st.integers(1, 6))
        return RoutingMap.dense(sites) if kind == "dense" else RoutingMap.shared(sites)
    kernel = draw(st.integers(1, 3))
    grid = (draw(st.integers(kernel, 5)), draw(st.integers(kernel, 5)))
    return RoutingMap.conv(grid, kernel, stride=draw(st.integers(1, 2)), padding=draw(st.integers(0, kernel - 1)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return random_case(draw(maps()), draw(st.integers(0, 2**31)), dtype, sizes, rows=draw(st.integers(1, 3)))


def dynamic_routing_in_loops(
    case: Case,
    iterations: int = 3,
    logits: str = "cumulative",
    squash_form: str = "sabour",
    inner_squash_form: str | None = None,
    leaky: bool = False,
    competition: str = "parents",
) -> tuple[Tensor, Tensor]:
    """Procedure 1 of Sabour, Frosst & Hinton 2017 in plain loops: parents ``[B, P, J, 1, N]`` and couplings."""
    pose, transform, routing_map = case
    edges = routing_map.edges.tolist()
    child_types, parent_types = transform.shape[1:3]
    size_in, size_out = transform.shape[3:]
    sites = range(routing_map.parent_sites)
    parents = torch.zeros(pose.shape[0], routing_map.parent_sites, parent_types, 1, size_out, dtype=torch.float64)
    couplings = torch.zeros(pose.shape[0], parent_types, len(edges), child_types, dtype=torch.float64)
    for b in range(pose.shape[0]):
        u, w = pose[b].tolist(), transform.tolist()
        children = [(e, c) for e in range(len(edges)) for c in range(child_types)]
        vote = {
            (e, c, j): [
                sum(u[edges[e][0]][c][0][q] * w[edges[e][2]][c][j][q][n] for q in range(size_in))
                for n in range(size_out)
            ]
            for e, c in children
            for j in range(parent_types)
        }
        logit = dict.fromkeys(vote, 0.0)
        for t in range(iterations):
            coupling = {}
            for e, c, j in vote:
                rivals = {e} if competition == "types" else {k for k in range(len(edges)) if edges[k][0] == edges[e][0]}
                reached = [k for k in vote if k[0] in rivals and k[1] == c]
                total = sum(math.exp(logit[k]) for k in reached) + (1.0 if leaky else 0.0)
                coupling[e, c, j] = math.exp(logit[e, c, j]) / total
            form = squash_form if t == iterations - 1 else inner_squash_form or squash_form
            parent = {}
            for p in sites:
                for j in range(parent_types):
                    voters = [k for k in vote if edges[k[0]][1] == p and k[2] == j]
                    s = [sum(coupling[k] * vote[k][n] for k in voters) for n in range(size_out)]
                    parent[p, j] = _squash_in_loops(s, form)
            for e, c, j in vote:
                agreement = sum(x * y for x, y in zip(vote[e, c, j], parent[edges[e][1], j], strict=True))
                logit[e, c, j] = agreement + (logit[e, c, j] if logits == "cumulative" else 0.0)
        for (p, j), v in parent.items():
            parents[b, p, j, 0] = torch.tensor(v, dtype=torch.float64)
        for (e, c, j), r in coupling.items():
            couplings[b, j, e, c] = r
    return parents, couplings


def _squash_in_loops(s: list[float], form: str) -> list[float]:
    length = math.sqrt(sum(x * x for x in s))
    scale = {
        "none": 1.0,
        "unit": 1 / length if length else 0.0,
        "sabour": length / (1 + length**2),
        "su": length / (0.5 + length**2),
    }[form]
    return [scale * x for x in s]


def em_routing_in_loops(
    case: Case,
    activation: Tensor,
    beta_u: list[float],
    beta_a: list[float],
    *,
    iterations: int = 3,
    competition: str = "parents",
    variance_floor: float = 1e-4,
    normalise_data: bool = True,
    inverse_temperature: float = 1.0,
    temperature_schedule: str = "rising",
    parent_activation: str = "logistic",
    mean_damping: float = 0.0,
    tempering: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Procedure 1 of Hinton, Sabour & Frosst 2018 with the corrections of Gritzman 2019, in plain loops.

    Returns:
        Mean and variance ``[B, P, J, R, N]``, activation ``[B, P, J]`` and couplings ``[B, J, E, C]`` of the last pass.
        A parent without votes has mean 0, and its variance is the variance floor.
    """
    pose, transform, routing_map = case
    edges = routing_map.edges.tolist()
    child_types, parent_types, size = transform.shape[1:4]
    rows, columns = pose.shape[3], transform.shape[4]
    parents = [(p, j) for p in range(routing_map.parent_sites) for j in range(parent_types)]
    shape = (pose.shape[0], routing_map.parent_sites, parent_types, rows, columns)
    means, variances = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    activations = torch.zeros(shape[:3], dtype=torch.float64)
    couplings = torch.zeros(pose.shape[0], parent_types, len(edges), child_types, dtype=torch.float64)
    mean_data = routing_map.child_sites * child_types / len(parents) if normalise_data else 1.0
    for b in range(pose.shape[0]):
        m, a, w = pose[b].tolist(), activation[b].tolist(), transform.tolist()
        vote, child, parent = {}, {}, {}
        for e, (s, p, k) in enumerate(edges):
            for c in range(child_types):
                for j in range(parent_types):
                    child[e, c, j], parent[e, c, j] = (s, c), (p, j)
                    vote[e, c, j] = [
                        sum(m[s][c][r][q] * w[k][c][j][q][n] for q in range(size))
                        for r in range(rows)
                        for n in range(columns)
                    ]
        rivals = {}
        for one in vote:
            rivals[one] = [
                other
                for other in vote
                if child[other] == child[one] and (competition == "parents" or other[0] == one[0])
            ]
        coupling = {one: 1 / len(rivals[one]) for one in vote}
        mean = {}
        for t in range(iterations):
            scale = inverse_temperature * (1 - 0.95 ** (t + 1) if temperature_schedule == "rising" else 1)
            routed = {one: coupling[one] * a[child[one][0]][child[one][1]] for one in vote}
            everything = sum(routed.values())
            variance, active = {}, {}
            for one in parents:
                voters = [v for v in vote if parent[v] == one]
                data = sum(routed[v] for v in voters)
                before = mean.get(one)
                mean[one] = [
                    sum(routed[v] * vote[v][h] for v in voters) / data if data else 0.0 for h in range(rows * columns)
                ]
                if before:
                    mean[one] = [
                        (1 - mean_damping) * new + mean_damping * old
                        for new, old in zip(mean[one], before, strict=True)
                    ]
                variance[one] = [
                    (sum(routed[v] * (vote[v][h] - mean[one][h]) ** 2 for v in voters) / data if data else 0.0)
                    + variance_floor
                    for h in range(rows * columns)
                ]
                cost = sum((beta_u[one[1]] + math.log(math.sqrt(x))) * data / mean_data for x in variance[one])
                active[one] = 1 / (1 + math.exp(-scale * (beta_a[one[1]] - cost)))
                if parent_activation == "mixing":
                    active[one] = data / everything if everything else 0.0
            used = dict(coupling)
            log_p = {}
            for v in vote:
                log_p[v] = math.log(max(active[parent[v]], 1e-300)) - sum(
                    (x - mu) ** 2 / (2 * square) + math.log(math.sqrt(square)) + 0.5 * math.log(2 * math.pi)
                    for x, mu, square in zip(vote[v], mean[parent[v]], variance[parent[v]], strict=True)
                )
                log_p[v] *= tempering
            for v in vote:
                largest = max(log_p[other] for other in rivals[v])
                total = sum(math.exp(log_p[other] - largest) for other in rivals[v])
                coupling[v] = math.exp(log_p[v] - largest) / total
        for p, j in parents:
            means[b, p, j] = torch.tensor(mean[p, j], dtype=torch.float64).reshape(rows, columns)
            variances[b, p, j] = torch.tensor(variance[p, j], dtype=torch.float64).reshape(rows, columns)
            activations[b, p, j] = active[p, j]
        for (e, c, j), r in used.items():
            couplings[b, j, e, c] = r
    return means, variances, activations, couplings


class LargestResult(TorchDispatchMode):
    """Mode that records the largest number of elements in a result of PyTorch's operators."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *(x.numel() for x in tensors)])
        return result
