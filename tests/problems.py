"""Routing problems: random ones on every kind of map, and the papers' pseudo-code in plain loops to check against."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from laws import Case
from torchcaps import RoutingMap


def random_case(routing_map: RoutingMap, seed: int, dtype: torch.dtype, sizes: tuple[int, ...] = (2, 3, 4)) -> Case:
    """Poses and transforms of unit scale; sizes are (batch, child types, parent types)."""
    batch, child_types, parent_types = sizes
    generator = torch.Generator().manual_seed(seed)
    pose = torch.randn(batch, routing_map.child_sites, child_types, 1, 3, generator=generator, dtype=dtype)
    transform = torch.randn(routing_map.transforms, child_types, parent_types, 3, 5, generator=generator, dtype=dtype)
    return Case(pose, transform, routing_map)


@st.composite
def maps(draw: st.DrawFn) -> RoutingMap:
    kind = draw(st.sampled_from(["dense", "shared", "conv"]))
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
    return random_case(draw(maps()), draw(st.integers(0, 2**31)), dtype, sizes)


def dynamic_routing_in_loops(
    case: Case, iterations: int, logits: str, squash_form: str, inner_squash_form: str | None, leaky: bool
) -> tuple[Tensor, Tensor]:
    """Procedure 1 of Sabour, Frosst & Hinton 2017 on plain lists: parents ``[B, P, J, 1, N]`` and couplings."""
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
                reached = [k for k in vote if edges[k[0]][0] == edges[e][0] and k[1] == c]
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
