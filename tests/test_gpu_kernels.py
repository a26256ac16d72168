"""The Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter on the CPU."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations

import pytest
import torch

from problems import MAPS as ALL_MAPS
from problems import far, full_problem
from torchcaps import RoutingMap
from torchcaps.kernels import moments as operators
from torchcaps.kernels import padded
from torchcaps.routing.votes import Agreement, Moments, Votes

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
MAPS = {
    "dense": RoutingMap.dense(3),
    "shared": RoutingMap.shared(5),
    "conv": RoutingMap.conv((3, 2), 3, padding=1, stride=2),
    **{name: ALL_MAPS[name] for name in ("one-parent", "irregular", "no-edges")},
}
POSES = {"matrix": (4, 4, 4), "vector": (1, 3, 5), "odd": (3, 2, 2)}
PARTS = Agreement._fields
SUBSETS = [parts for count in range(5) for parts in combinations(PARTS, count)]
CHILDREN = ("pose", "activation", "transform")


@pytest.fixture(scope="module")
def device():
    """Where the kernels run. The interpreter reads their source: they are imported without what the run-time check of
    types puts around a function; and the operators are told to take them for the CPU too."""
    if torch.cuda.is_available():
        yield "cuda"
        return
    finders = sys.meta_path[:]
    sys.meta_path[:] = [finder for finder in finders if "jaxtyping" not in type(finder).__module__]
    import_module("torchcaps.kernels.gpu.moments")
    sys.meta_path[:] = finders
    with pytest.MonkeyPatch.context() as patch:
        for name in ("moments", "moments_backward", "votes_backward", "couplings"):
            kernels = getattr(operators, name)._backend_fns
            patch.setitem(kernels, "cpu", kernels["cuda"])
        yield "cpu"


class Fused:
    """What `Votes` does, by the operators."""

    def __init__(self, pose, activation, transform, routing_map, competition="parents", none_of_the_above=False):
        self.children = (pose, activation, transform, routing_map.edge_lists.on(pose.device))
        self.detached = [None if x is None else x.detach() for x in self.children]
        self.sites, self.options = routing_map.parent_sites, (competition == "types", none_of_the_above)
        self.tokens = operators.open_votes(*self.children, self.sites, 3, *self.options)

    def moments(self, agreement=None, *, variance=True, constant_couplings=False):
        size = len(operators.Record._fields)
        tokens, self.tokens = self.tokens[:size], self.tokens[size:]
        even = agreement is None
        options = (even, *self.options, variance, constant_couplings)
        mass, mean, second, *_ = operators.moments(
            tokens, *self.detached, self.sites, *(agreement or Agreement()), *options
        )
        return Moments(mass, mean, second if variance else None)

    def couplings(self, agreement):
        pose, _, *others = self.detached
        return operators.couplings(pose, *others, self.sites, *agreement, *self.options)


def problem(routing_map, parent_types=3, pose="vector", batch=2):
    """Children, transforms and an agreement, by name, in float64."""
    rows, _, columns = POSES[pose]
    pose, activation, transform, *_ = full_problem(routing_map, parent_types, POSES[pose], child_types=2, batch=batch)
    parents = (batch, routing_map.parent_sites, parent_types)
    constant, *vectors = (
        torch.randn(parents).double(),
        *(0.5 * torch.randn(*parents, rows, columns).double() for _ in range(3)),
    )
    return dict(zip((*CHILDREN, *PARTS), (0.5 * pose, activation, transform, constant, *vectors), strict=True))


def everything(votes, case, routing_map, rule, device="cpu", dtype=torch.float64, **options):
    """What a rule gives, and the gradients of all tensors, of a random weighting."""
    statistics = torch.promote_types(dtype, torch.float32)
    leaves = {
        name: x.to(device, dtype if name in CHILDREN else statistics, copy=True).requires_grad_()
        for name, x in case.items()
    }
    children = (leaves["pose"], leaves.get("activation"), leaves["transform"])
    routing_map = replace(routing_map, edges=routing_map.edges.to(device))
    found = rule(votes(*children, routing_map, **options), Agreement(*(leaves.get(name) for name in PARTS)))
    outputs = [x for x in found if x is not None]
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in outputs]
    sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True)).backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    return [x.detach().double().cpu() for x in (*outputs, *gradients)]


def compare(device, case, routing_map, rule, rtol=1e-9, atol=1e-10, **options):
    found = everything(Fused, case, routing_map, rule, device, **options)
    for one, right in zip(found, everything(Votes, case, routing_map, rule, **options), strict=True):
        torch.testing.assert_close(one, right, rtol=rtol, atol=atol)


def even(votes, agreement):
    return votes.moments()


def one_pass(votes, agreement):
    return votes.moments(agreement)


def without_variance(votes, agreement):
    return votes.moments(agreement, variance=False)


def constant_couplings(votes, agreement):
    return votes.moments(agreement, constant_couplings=True)


def as_in_em(votes, agreement):
    """Three passes in one sweep; the last does not see the second one's mass."""
    first = votes.moments()
    variance = first.variance + 0.1
    constant = torch.log1p(first.mass) - 0.5 * variance.log().sum(dim=(3, 4))
    second = votes.moments(Agreement(constant, quadratic=0.5 / variance, centre=first.mean))
    variance = second.variance + 0.1
    last = votes.moments(agreement._replace(quadratic=0.5 / variance, centre=second.mean))
    return *last, second.mean


def as_in_dynamic_routing(votes, agreement):
    """Sums, squashed: the loss reaches the middle pass through its mean alone, and the last one's variance is not."""
    even = votes.moments(variance=False)
    parents = torch.tanh(even.mass[..., None, None] * even.mean)
    middle = votes.moments(Agreement(linear=parents), variance=False)
    parents = parents + torch.tanh(middle.mean)
    return votes.moments(Agreement(linear=parents), variance=False)[1:2]


def last_alone(votes, agreement):
    """The loss does not reach the first pass."""
    found = votes.moments()
    return votes.moments(Agreement(quadratic=0.5 / (found.variance.detach() + 0.1), centre=found.mean.detach()))


@pytest.mark.parametrize("competition", ["parents", "types"])
@pytest.mark.parametrize("routing_map", MAPS)
def test_passes_equal_the_reference(device, routing_map, competition):
    routing_map = MAPS[routing_map]
    for rule in (even, one_pass):
        compare(device, problem(routing_map), routing_map, rule, competition=competition)


@pytest.mark.parametrize("pose", POSES)
@pytest.mark.parametrize("parent_types", [1, 5, 17])
def test_shapes_of_votes_equal_the_reference(device, pose, parent_types):
    routing_map = MAPS["one-parent"]
    compare(device, problem(routing_map, parent_types, pose), routing_map, one_pass)


@pytest.mark.parametrize("parts", SUBSETS, ids="-".join)
def test_parts_of_an_agreement_equal_the_reference(device, parts):
    routing_map = MAPS["one-parent"]
    case = {name: x for name, x in problem(routing_map).items() if name in CHILDREN + parts}
    compare(device, case, routing_map, one_pass)


@pytest.mark.parametrize("rule", [even, one_pass, without_variance, constant_couplings])
def test_kinds_of_passes_equal_the_reference(device, rule):
    routing_map = MAPS["irregular"]
    case = problem(routing_map)
    compare(device, case, routing_map, rule, none_of_the_above=True)
    del case["activation"]
    compare(device, case, routing_map, rule)


@pytest.mark.parametrize("competition", ["parents", "types"])
@pytest.mark.parametrize("rule", [as_in_em, as_in_dynamic_routing, last_alone])
def test_several_passes_equal_the_reference(device, rule, competition):
    compare(device, problem(MAPS["conv"]), MAPS["conv"], rule, competition=competition)
