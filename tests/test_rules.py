"""Rules that use the moments of votes: the properties of a routing rule, and the procedures of their papers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import laws
from problems import MAPS, cases, random_case
from torchcaps import (
    ROUTINGS,
    Agreement,
    AttentionRouting,
    Capsules,
    DynamicRouting,
    RoutingMap,
    Rule,
    SelfAttentionRouting,
    SelfRouting,
    UniformRouting,
    VariationalBayesRouting,
    Votes,
    dynamic_routing,
)
from torchcaps.kernels import _cpu
from torchcaps.routing import LayerShape
from torchcaps.testing import check_rule

NUMBERS = 5  # columns of a vote in tests/problems.py, of one row


def rules(case):
    """Create every rule with random parameters."""
    torch.manual_seed(3)
    rows, sizes = case.pose.shape[3], case.transform.shape[:3]
    made = {
        "self-routing": SelfRouting(*sizes, (rows, case.pose.shape[4])),
        "self-attention": SelfAttentionRouting(*sizes),
        "uniform": UniformRouting(),
        "attention": AttentionRouting(rows * NUMBERS, iterations=3),
        "attention over types": AttentionRouting(rows * NUMBERS, iterations=3, competition="types"),
    }
    for rule in made.values():
        for parameter in rule.parameters():
            nn.init.normal_(parameter)
    return made


NAMES = ("uniform", "attention", "attention over types", "self-routing", "self-attention")
OF_CHILDREN = ("self-routing", "self-attention")
"""Rules with parameters for each child and parent type: another order of types calls for another order of theirs."""


def as_function(rule):
    """Turn a rule into a function for the laws: pose, transform and map in, capsules and couplings out."""

    def route(pose, transform, routing_map):
        activation = torch.linalg.vector_norm(pose, dim=(-2, -1)).clamp(0, 1)
        return rule.to(pose.dtype)(Capsules(pose, activation), transform, routing_map, return_couplings=True)

    return route


@settings(max_examples=25)
@given(cases(), st.sampled_from(NAMES))
def test_every_rule_has_the_properties_of_a_routing_rule(case, name):
    rule = as_function(rules(case)[name])
    with torch.no_grad():
        if name not in OF_CHILDREN:
            laws.invariant_to_order_of_children(rule, case)
            laws.equivariant_to_order_of_parent_types(rule, case)
        laws.samples_are_independent(rule, case)
        laws.same_input_same_bits(rule, case)
        if name in ("uniform", "attention"):
            laws.couplings_sum_to_one(rule, case)
        if name == "self-routing":
            laws.inactive_child_has_no_effect(rule, case)
    laws.zero_poses_are_finite(rule, case)


@pytest.mark.parametrize("routing_map", MAPS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_every_rule_equal_finite_differences(name, routing_map):
    case = random_case(MAPS[routing_map], 0, torch.float64)
    laws.gradients_are_right(as_function(rules(case)[name]), case, fast=True)


def votes_in_loops(case, b):
    """The votes of sample b: (edge, child type, parent type) → list of numbers."""
    pose, transform, routing_map = case
    return {
        (e, c, j): (pose[b, s, c] @ transform[k, c, j]).flatten().tolist()
        for e, (s, _, k) in enumerate(routing_map.edges.tolist())
        for c in range(transform.shape[1])
        for j in range(transform.shape[2])
    }


def softmax_over_types(logit):
    return {
        (e, c, j): math.exp(x) / sum(math.exp(y) for other, y in logit.items() if other[:2] == (e, c))
        for (e, c, j), x in logit.items()
    }


def attention_in_loops(case, iterations, types):
    """Algorithm 1 of Tsai et al. 2020 in plain loops; returns poses only."""
    pose, transform, routing_map = case
    edges = routing_map.edges.tolist()
    parents = torch.zeros(pose.shape[0], routing_map.parent_sites, transform.shape[2], 1, NUMBERS, dtype=torch.float64)
    for b in range(pose.shape[0]):
        vote = votes_in_loops(case, b)
        rivals = {
            one: [
                other
                for other in vote
                if other[1] == one[1] and (other[0] == one[0] if types else edges[other[0]][0] == edges[one[0]][0])
            ]
            for one in vote
        }
        coupling = {one: 1 / len(rivals[one]) for one in vote}
        for t in range(iterations):
            parent = {}
            for p in range(routing_map.parent_sites):
                for j in range(transform.shape[2]):
                    voters = [one for one in vote if edges[one[0]][1] == p and one[2] == j]
                    total = [sum(coupling[one] * vote[one][h] for one in voters) for h in range(NUMBERS)]
                    mean = sum(total) / NUMBERS
                    variance = sum((x - mean) ** 2 for x in total) / NUMBERS
                    parent[p, j] = [(x - mean) / math.sqrt(variance + 1e-5) for x in total]
            if t == iterations - 1:
                break
            logit = {
                one: sum(x * y for x, y in zip(vote[one], parent[edges[one[0]][1], one[2]], strict=True))
                / math.sqrt(NUMBERS)
                for one in vote
            }
            coupling = {
                one: math.exp(logit[one]) / sum(math.exp(logit[other]) for other in rivals[one]) for one in vote
            }
        for (p, j), values in parent.items():
            parents[b, p, j, 0] = torch.tensor(values, dtype=torch.float64)
    return parents, coupling


@pytest.mark.parametrize("routing_map", MAPS)
@pytest.mark.parametrize("competition", ["parents", "types"])
def test_attention_equals_the_procedure_of_its_paper(routing_map, competition):
    case = random_case(MAPS[routing_map], 1, torch.float64)
    rule = AttentionRouting(NUMBERS, iterations=3, competition=competition).double()
    children = Capsules(case.pose, torch.rand(case.pose.shape[:3]).double())
    found, couplings = rule(children, case.transform, case.routing_map, return_couplings=True)
    expected, last = attention_in_loops(case, 3, competition == "types")
    torch.testing.assert_close(found.pose, expected, rtol=1e-9, atol=1e-10)
    for (e, c, j), value in last.items():
        assert couplings[-1, j, e, c].item() == pytest.approx(value, rel=1e-9)
    score = rule.score(found.pose.flatten(3)).squeeze(3).sigmoid()
    torch.testing.assert_close(found.activation, score)


@pytest.mark.usefixtures("untyped")
def test_attention_does_not_normalise_poses_of_one_element():
    """LayerNorm of one number is a constant, and LayerNorm of two numbers is almost one."""
    rule = AttentionRouting(1, iterations=2).double()
    children, transform = torch.randn(2, 1, 5, 1, 4, dtype=torch.float64), torch.randn(1, 5, 3, 4, 1).double()
    votes = torch.einsum("bchi,cji->bcj", children[:, 0], transform[0, :, :, :, 0])
    pose = votes.mean(dim=1) * 5 / 3
    pose = ((votes * pose[:, None]).softmax(dim=2) * votes).sum(dim=1)
    found = rule(Capsules(children, torch.rand(2, 1, 5).double()), transform, RoutingMap.dense(1))
    torch.testing.assert_close(found.pose, pose[:, None, :, None, None])
    torch.testing.assert_close(found.activation, rule.score(pose[:, None, :, None]).squeeze(3).sigmoid())
    with pytest.raises(ValueError, match="pose_size is 2, but LayerNorm keeps only the order of two numbers"):
        AttentionRouting(2)


@pytest.mark.usefixtures("untyped")
def test_layers_whose_sizes_differ_from_those_of_the_rule_are_refused():
    case = random_case(MAPS["conv"], 0, torch.float32)
    pose, transform, routing_map = case
    children, sizes = Capsules(pose, torch.rand(pose.shape[:3])), (*transform.shape[:2], transform.shape[2] + 1)
    with pytest.raises(ValueError, match=r"transform must have \[K, C, J\] = .*create the rule with transforms="):
        SelfRouting(*sizes, (pose.shape[3], pose.shape[4]))(children, transform, routing_map)
    with pytest.raises(ValueError, match=r"poses of the children are .*, but .*create the rule with child_pose_shape="):
        SelfRouting(*transform.shape[:3], (pose.shape[3], pose.shape[4] + 1))(children, transform, routing_map)
    with pytest.raises(ValueError, match=rf"parent types \(J\).*create the rule with parent_types={sizes[2] - 1}"):
        VariationalBayesRouting(sizes[2])(children, transform, routing_map)


@pytest.mark.parametrize("routing_map", MAPS)
@pytest.mark.parametrize("rows", [1, 3])
def test_self_routing_equals_the_equations_of_its_paper(routing_map, rows):
    """Equations 3 to 5 of Hahn et al. 2019 in plain loops."""
    case = random_case(MAPS[routing_map], 4, torch.float64, rows=rows)
    pose, transform, _ = case
    activation = torch.rand(pose.shape[:3]).double()
    rule = rules(case)["self-routing"].double()
    found, couplings = rule(Capsules(pose, activation), transform, case.routing_map, return_couplings=True)
    edges = case.routing_map.edges.tolist()
    for b in range(len(pose)):
        vote = votes_in_loops(case, b)
        logit = {
            (e, c, j): rule.bias[edges[e][2], c, j].item()
            + sum(
                pose[b, edges[e][0], c, r, q].item() * rule.weight[edges[e][2], c, j, q, r].item()
                for r in range(rows)
                for q in range(pose.shape[4])
            )
            for e, c, j in vote
        }
        coupling = softmax_over_types(logit)
        for one, value in coupling.items():
            assert couplings[b, one[2], one[0], one[1]].item() == pytest.approx(value, rel=1e-9)
        for p in range(case.routing_map.parent_sites):
            for j in range(transform.shape[2]):
                weight = {
                    one: activation[b, edges[one[0]][0], one[1]].item() * coupling[one]
                    for one in vote
                    if edges[one[0]][1] == p and one[2] == j
                }
                mass, total = sum(weight.values()), sum(weight[one] / coupling[one] for one in weight)
                mean = [
                    sum(weight[one] * vote[one][h] for one in weight) / mass if mass else 0.0
                    for h in range(rows * NUMBERS)
                ]
                assert found.activation[b, p, j].item() == pytest.approx(mass / total if total else 0.0, rel=1e-9)
                assert found.pose[b, p, j].flatten().tolist() == pytest.approx(mean, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("routing_map", MAPS)
def test_self_attention_equals_the_equations_of_its_paper(routing_map):
    """Section 3.2 of Mazzia et al. 2021 in plain loops."""
    case = random_case(MAPS[routing_map], 5, torch.float64)
    pose, transform, _ = case
    rule = rules(case)["self-attention"].double()
    children = Capsules(pose, torch.rand(pose.shape[:3]).double())
    found, couplings = rule(children, transform, case.routing_map, return_couplings=True)
    edges = case.routing_map.edges.tolist()
    for b in range(len(pose)):
        vote = votes_in_loops(case, b)
        voters = {
            (p, j): [one for one in vote if edges[one[0]][1] == p and one[2] == j]
            for p in range(case.routing_map.parent_sites)
            for j in range(transform.shape[2])
        }
        everybody = {of: [sum(vote[one][h] for one in ones) for h in range(NUMBERS)] for of, ones in voters.items()}
        coupling = softmax_over_types(
            {
                one: sum(x * y for x, y in zip(vote[one], everybody[edges[one[0]][1], one[2]], strict=True))
                / math.sqrt(NUMBERS)
                for one in vote
            }
        )
        for one, value in coupling.items():
            assert couplings[b, one[2], one[0], one[1]].item() == pytest.approx(value, rel=1e-8)
        for (p, j), ones in voters.items():
            weight = {one: coupling[one] + rule.bias[edges[one[0]][2], one[1], j].item() for one in ones}
            s = [sum(weight[one] * vote[one][h] for one in ones) for h in range(NUMBERS)]
            length = math.sqrt(sum(x * x for x in s))
            v = [(1 - math.exp(-length)) * x / length if length else 0.0 for x in s]
            assert found.pose[b, p, j, 0].tolist() == pytest.approx(v, rel=1e-8, abs=1e-10)
            assert found.activation[b, p, j].item() == pytest.approx(math.sqrt(sum(x * x for x in v)), rel=1e-8)


def test_uniform_routing_equals_dynamic_routing_with_one_iteration():
    for routing_map in MAPS.values():
        case = random_case(routing_map, 2, torch.float64)
        children = Capsules(case.pose, torch.rand(case.pose.shape[:3]).double())
        found = UniformRouting()(children, case.transform, routing_map)
        right = dynamic_routing(case.pose, case.transform, routing_map, iterations=1, backend="reference")
        torch.testing.assert_close(found.pose, right.pose, rtol=1e-12, atol=1e-14)


def test_dynamic_routing_written_as_a_new_rule_equals_dynamic_routing():
    class Sabour(Rule):
        weighs_activations = False

        def route(self, votes: Votes) -> Capsules:
            total = None
            for _ in range(3):
                found = votes.moments(None if total is None else Agreement(linear=total), variance=False)
                sums = found.mass[..., None, None] * found.mean
                length = torch.linalg.vector_norm(sums, dim=(3, 4), keepdim=True)
                pose = sums * length / (1 + length.square())
                total = pose if total is None else total + pose
            return Capsules(pose, torch.linalg.vector_norm(pose, dim=(3, 4)))

    case = random_case(MAPS["conv"], 0, torch.float64)
    children = Capsules(case.pose, torch.ones(case.pose.shape[:3]).double())
    found, couplings = Sabour()(children, case.transform, case.routing_map, return_couplings=True)
    right, last = DynamicRouting(backend="reference")(children, case.transform, case.routing_map, return_couplings=True)
    torch.testing.assert_close(found.pose, right.pose)
    torch.testing.assert_close(couplings, last)


def test_rules_compute_in_float32_under_autocast_and_in_half_precision():
    """In half precision, only the result is rounded."""
    children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
    transform = torch.randn(6, 4, 10, 8, 16)
    shape = LayerShape(6, 4, 10, (1, 8), (1, 16))
    for rule in (kind.for_layer(shape).eval() for kind in ROUTINGS.values()):
        plain = rule(children, transform, RoutingMap.dense(6))
        with torch.autocast("cpu", torch.bfloat16):
            cast = rule(children, transform, RoutingMap.dense(6))
        torch.testing.assert_close(cast.pose, plain.pose)
        rounded = Capsules(*(x.bfloat16() for x in children)), transform.bfloat16()
        assert Votes(rounded[0].pose, None, rounded[1], RoutingMap.dense(6)).fused == (_cpu is not None)
        half = rule.bfloat16()(*rounded, RoutingMap.dense(6))
        right = rule(Capsules(*(x.float() for x in rounded[0])), rounded[1].float(), RoutingMap.dense(6))
        torch.testing.assert_close(half, Capsules(*(x.bfloat16() for x in right)), rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "uniform" else [pytest.mark.slow]) for name in ROUTINGS]
)
def test_every_rule_passes_check_rule(name, python):
    """Runs in its own process, because torch.compile cannot trace the run-time type checks."""
    script = f"from torchcaps import ROUTINGS, testing; testing.check_rule(ROUTINGS[{name!r}].for_layer)"
    done = python(["-c", script])
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("untyped")
def test_check_rule_finds_wrong_rules():
    class Leaking(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose + pose.mean(dim=0), activation)

    class LeakingFromTheLastSample(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose * activation[-1].mean(), activation)

    class Undefined(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose / pose.norm(), activation)

    class Detached(Rule):
        def route(self, votes):
            found = votes.moments()
            return Capsules(found.mean, found.mass * found.mass.detach())

    class Transposed(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose.mT, activation)

    class OneActivationPerNumber(UniformRouting):
        def route(self, votes):
            pose, _ = super().route(votes)
            return Capsules(pose, pose.square())

    class NotLearning(UniformRouting):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose * self.scale.detach(), activation)

    class FiniteInDoubleOnly(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose, activation / (pose.square().sum(dim=(3, 4)) + 1e-60).sqrt())

    class TwoFaced(UniformRouting):
        def route(self, votes):
            pose, activation = super().route(votes)
            return Capsules(pose if self.backend == "reference" else 1.01 * pose, activation)

    for rule, law in (
        (
            Transposed,
            "on the dense map: The parents and the couplings have the right shapes, and activations are at least 0. "
            ".pose must be",
        ),
        (
            OneActivationPerNumber,
            "on the dense map: The parents and the couplings have the right shapes, and activations are at least 0. "
            ".OneActivationPerNumber.route must",
        ),
        (NotLearning, "on the dense map: Gradients match finite differences, also for the parameters"),
        (FiniteInDoubleOnly, "all poses are zero. .a value or gradient is not finite with torch.float32 inputs"),
        (TwoFaced, "the rule fails this test on the dense map: The fused kernels and the reference give"),
        (Leaking, "the rule fails this test on the dense map: A sample gives the same result"),
        (LeakingFromTheLastSample, "the rule fails this test on the dense map: A sample gives the same result"),
        (
            Undefined,
            "the rule fails this test on the dense map: (A sample|Values and gradients are finite if all poses)",
        ),
        (Detached, "the rule fails this test on the dense map: Gradients match"),
    ):
        with pytest.raises(AssertionError, match=law):
            check_rule(lambda layer, rule=rule: rule())
