"""Generative routing: the procedure of its paper, the properties of a routing rule, gradients, and training steps."""

import math

import pytest
import torch
from hypothesis import given, settings

import laws
from problems import MAPS, cases, random_case
from torchcaps import Capsules, RoutingMap
from torchcaps.routing.generative import GenerativeRouting


def random_rule(transform, **options):
    """Create a rule with random β, in the dtype and for the sizes of a transform ``[K, C, J, Q, N]``."""
    rule = GenerativeRouting(*transform.shape[:3], **options).to(transform.dtype)
    generator = torch.Generator().manual_seed(4)
    for beta in rule.parameters():
        beta.data = torch.randn(beta.shape, generator=generator).to(transform.dtype)
    return rule


def as_function(rule):
    """Turn the rule into a function for the laws; a child with pose 0 has activation 0."""

    def route(pose, transform, routing_map):
        activation = -torch.expm1(-pose.square().sum(dim=(3, 4)))
        return rule(Capsules(pose, activation), transform, routing_map, return_couplings=True)

    return route


def heinsen_in_loops(case, activation, rule):
    """Heinsen 2019 in plain loops: pose ``[B, P, J, R, N]``, activation ``[B, P, J]``, couplings ``[B, J, E, C]``."""
    edges = case.routing_map.edges.tolist()
    m, a, w = case.pose.tolist(), activation.tolist(), case.transform.tolist()
    beta_use, beta_ignore = rule.beta_use.tolist(), rule.beta_ignore.tolist()
    child_types, parent_types = case.transform.shape[1:3]
    rows, columns, size = case.pose.shape[3], case.transform.shape[4], case.pose.shape[4]
    parents = [(p, j) for p in range(case.routing_map.parent_sites) for j in range(parent_types)]
    pose, active, couplings = [], [], torch.zeros(len(m), parent_types, len(edges), child_types, dtype=torch.float64)
    for b in range(len(m)):
        votes = [(e, c, j) for e in range(len(edges)) for c in range(child_types) for j in range(parent_types)]
        child = {v: (edges[v[0]][0], v[1]) for v in votes}
        parent = {v: (edges[v[0]][1], v[2]) for v in votes}
        vote, price_use, price_ignore = {}, {}, {}
        for v in votes:
            e, c, j = v
            s, k = edges[e][0], edges[e][2]
            price_use[v], price_ignore[v] = beta_use[k][c][j], beta_ignore[k][c][j]
            vote[v] = [
                sum(m[b][s][c][r][q] * w[k][c][j][q][n] for q in range(size))
                for r in range(rows)
                for n in range(columns)
            ]
        siblings = {v: [other for other in votes if child[other] == child[v]] for v in votes}
        voters = {one: [v for v in votes if parent[v] == one] for one in parents}
        share = {v: 1 / len(siblings[v]) for v in votes}
        logit, mean, variance = {}, {}, {}
        for t in range(rule.iterations):
            if t:
                log_p = {}
                for v in votes:
                    one = parent[v]
                    log_p[v] = -sum(
                        (x - mu) ** 2 / (2 * square) + math.log(math.sqrt(square))
                        for x, mu, square in zip(vote[v], mean[one], variance[one], strict=True)
                    ) - math.log(1 + math.exp(-logit[one]))
                largest = {v: max(log_p[other] for other in siblings[v]) for v in votes}
                share = {
                    v: math.exp(log_p[v] - largest[v])
                    / sum(math.exp(log_p[other] - largest[v]) for other in siblings[v])
                    for v in votes
                }
            used = {v: a[b][child[v][0]][child[v][1]] * share[v] for v in votes}
            ignored = {v: a[b][child[v][0]][child[v][1]] - used[v] for v in votes}
            for one in parents:
                logit[one] = sum(price_use[v] * used[v] for v in voters[one])
                logit[one] -= sum(price_ignore[v] * ignored[v] for v in voters[one])
                mass = sum(used[v] for v in voters[one]) + rule.mass_floor
                mean[one] = [sum(used[v] * vote[v][h] for v in voters[one]) / mass for h in range(rows * columns)]
                variance[one] = [
                    sum(used[v] * (vote[v][h] - mean[one][h]) ** 2 for v in voters[one]) / mass + rule.variance_floor
                    for h in range(rows * columns)
                ]
        pose.append([mean[one] for one in parents])
        active.append([1 / (1 + math.exp(-logit[one])) for one in parents])
        for (e, c, j), value in share.items():
            couplings[b, j, e, c] = value
    shape = (len(m), case.routing_map.parent_sites, parent_types)
    numbers = torch.tensor(pose, dtype=torch.float64), torch.tensor(active, dtype=torch.float64)
    return numbers[0].view(*shape, rows, columns), numbers[1].view(shape), couplings


@pytest.mark.parametrize("routing_map", MAPS)
@pytest.mark.parametrize(
    ("rows", "options"),
    [(1, {}), (2, {}), (1, {"iterations": 1}), (2, {"iterations": 4, "mass_floor": 0.3, "variance_floor": 0.1})],
)
def test_generative_routing_equals_the_procedure_of_its_paper(routing_map, rows, options):
    case = random_case(MAPS[routing_map], 1, torch.float64, rows=rows)
    activation = torch.rand(case.pose.shape[:3], generator=torch.Generator().manual_seed(2)).double()
    activation[0, :, 0], activation[-1, :, -1] = 0, 1
    rule = random_rule(case.transform, **options)
    found, couplings = rule(Capsules(case.pose, activation), *case[1:], return_couplings=True)
    for ours, loops in zip((*found, couplings), heinsen_in_loops(case, activation, rule), strict=True):
        torch.testing.assert_close(ours, loops, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(cases())
def test_generative_routing_has_the_properties_of_a_routing_rule(case):
    # In float32, a variance floor of 1e-5 magnifies the rounding error of a vote to an error of 2e-4 in a pose.
    route = as_function(random_rule(case.transform, variance_floor=1e-5 if case.pose.dtype == torch.float64 else 0.1))
    with torch.no_grad():
        laws.samples_are_independent(route, case)
        laws.same_input_same_bits(route, case)
        laws.couplings_sum_to_one(route, case)
        laws.inactive_child_has_no_effect(route, case)
    laws.zero_poses_are_finite(route, case)


@settings(max_examples=25)
@given(cases())
def test_the_order_of_children_and_parents_does_not_matter(case):
    # β depends on transform, child type and parent type. The laws change the order of types in the transform only, so
    # they hold only if β is the same for all types.
    rule = random_rule(case.transform, variance_floor=0.1 if case.pose.dtype == torch.float64 else 1.0)
    for beta in rule.parameters():
        beta.data = beta.data[:, :1, :1].expand_as(beta).clone()
    with torch.no_grad():
        laws.invariant_to_order_of_children(as_function(rule), case)
        laws.equivariant_to_order_of_parent_types(as_function(rule), case)


def test_types_and_beta_in_another_order_give_parents_in_this_order():
    case = random_case(MAPS["conv"], 3, torch.float64)
    children = Capsules(case.pose, torch.rand(case.pose.shape[:3]).double())
    rule, moved = random_rule(case.transform), random_rule(case.transform)
    below, above = torch.tensor([2, 0, 1]), torch.tensor([1, 3, 0, 2])
    for beta in moved.parameters():
        beta.data = beta.data[:, below][:, :, above]
    right = rule(children, *case[1:])
    other = Capsules(*(x[:, :, below] for x in children))
    found = moved(other, case.transform[:, below][:, :, above], case.routing_map)
    torch.testing.assert_close(found.pose, right.pose[:, :, above], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.activation, right.activation[:, :, above], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("routing_map", MAPS)
@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_equal_finite_differences(routing_map, rows):
    case = random_case(MAPS[routing_map], 0, torch.float64, rows=rows)
    rule = random_rule(case.transform)
    laws.gradients_are_right(as_function(rule), case, fast=True)


@pytest.mark.parametrize("routing_map", MAPS)
def test_gradients_of_activation_and_beta_equal_finite_differences(routing_map):
    case = random_case(MAPS[routing_map], 0, torch.float64)
    rule = random_rule(case.transform)
    activation = 0.1 + 0.8 * torch.rand(case.pose.shape[:3], generator=torch.Generator().manual_seed(1)).double()

    def outputs(pose, activation, transform, use, ignore):
        weights = {"beta_use": use, "beta_ignore": ignore}
        arguments = Capsules(pose, activation), transform, case.routing_map
        return tuple(torch.func.functional_call(rule, weights, arguments))

    inputs = (case.pose, activation, case.transform, rule.beta_use.detach(), rule.beta_ignore.detach())
    assert torch.autograd.gradcheck(outputs, tuple(x.clone().requires_grad_() for x in inputs), fast_mode=True)


@pytest.mark.parametrize("activation", [0.0, 1e-30, 1e-6, 1.0])
@pytest.mark.parametrize("scale", [0.0, 1e-10, 1.0, 1e3])
@pytest.mark.parametrize("children", [1, 5])
def test_extreme_poses_and_activations_give_finite_values_and_gradients(activation, scale, children):
    pose = (scale * torch.randn(1, children, 1, 1, 4)).requires_grad_()
    transform = torch.randn(children, 1, 3, 4, 4, requires_grad=True)
    activations = torch.full((1, children, 1), activation, requires_grad=True)
    rule = random_rule(transform)
    parents, couplings = rule(Capsules(pose, activations), transform, RoutingMap.dense(children), return_couplings=True)
    (parents.pose.square().sum() + parents.activation.sum()).backward()
    gradients = [x.grad for x in (pose, transform, activations, *rule.parameters())]
    for value in (*parents, couplings, *gradients):
        assert torch.isfinite(value).all()


def test_training_steps_stay_finite_and_change_beta():
    torch.manual_seed(0)
    children = Capsules(torch.randn(4, 9, 3, 4, 4), torch.rand(4, 9, 3))
    transform = torch.nn.Parameter(torch.randn(4, 3, 5, 4, 4) / 4)
    rule, routing_map = GenerativeRouting(4, 3, 5), RoutingMap.conv((3, 3), 2)
    labels = torch.randint(5, (4,))
    optimiser = torch.optim.Adam([transform, *rule.parameters()], lr=0.1)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        scores = rule(children, transform, routing_map).activation.mean(dim=1).logit()
        loss = torch.nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for weights in (transform, rule.beta_use, rule.beta_ignore):
        assert torch.isfinite(weights).all()
    assert rule.beta_use.abs().max() > 0
    assert rule.beta_ignore.abs().max() > 0


@pytest.mark.parametrize("competition", ["parents", "types"])
def test_a_subclass_can_choose_the_parents_that_compete(competition):
    case = random_case(MAPS["conv"], 6, torch.float64)
    activation, rule = torch.rand(case.pose.shape[:3]).double(), random_rule(case.transform, iterations=1)
    rule.competition = competition
    child, parent, kernel = case.routing_map.edges.unbind(1)
    parents = case.transform.shape[2] * (
        child.bincount()[child] if competition == "parents" else torch.ones(len(child))
    )
    used = activation[:, child] / parents[:, None]
    logits = torch.einsum("bec,ecj->bej", used, rule.beta_use[kernel])
    logits = logits - torch.einsum("bec,ecj->bej", activation[:, child] - used, rule.beta_ignore[kernel])
    expected = torch.zeros(len(activation), case.routing_map.parent_sites, logits.shape[2]).double()
    found = rule(Capsules(case.pose, activation), *case[1:]).activation
    torch.testing.assert_close(found, expected.index_add(1, parent, logits).sigmoid())


def test_inputs_in_half_precision_are_routed_in_float32():
    case = random_case(MAPS["conv"], 5, torch.float32)
    children, rule = Capsules(case.pose, torch.rand(case.pose.shape[:3])), random_rule(case.transform)
    plain = rule(children, *case[1:])
    with torch.autocast("cpu", torch.bfloat16):
        cast = rule(children, *case[1:])
    torch.testing.assert_close(cast.pose, plain.pose)
    torch.testing.assert_close(cast.activation, plain.activation)
    half = rule.bfloat16()(Capsules(*(x.bfloat16() for x in children)), case.transform.bfloat16(), case.routing_map)
    rounded = Capsules(*(x.bfloat16().float() for x in children))
    right = rule.float()(rounded, case.transform.bfloat16().float(), case.routing_map)
    torch.testing.assert_close(half, Capsules(*(x.bfloat16() for x in right)), rtol=8e-3, atol=1e-3)


def test_the_saved_options_create_the_same_rule():
    rule = GenerativeRouting(4, 3, 5, iterations=2, variance_floor=0.1, mass_floor=0.01)
    assert GenerativeRouting(**rule.saved_options).saved_options == rule.saved_options


@pytest.mark.parametrize(
    "options", [{"iterations": 0}, {"variance_floor": 0.0}, {"mass_floor": math.inf}, {"parent_types": 0}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GenerativeRouting(**{"transforms": 4, "child_types": 3, "parent_types": 5, **options})


def test_a_layer_whose_sizes_differ_from_those_of_beta_is_refused():
    case = random_case(MAPS["conv"], 0, torch.float32)
    children = Capsules(case.pose, torch.rand(case.pose.shape[:3]))
    message = r"\[K, C, J\] = \[4, 3, 5\], the shape of the parameter β of this rule; got \[4, 3, 4\]"
    with pytest.raises(ValueError, match=message):
        GenerativeRouting(4, 3, 5)(children, *case[1:])
