"""Variational Bayes routing: the procedure of its paper, the properties of a routing rule, and its BatchNorm."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

import laws
from problems import MAPS, cases, far, full_problem
from torchcaps import Capsules, RoutingMap
from torchcaps.routing.variational_bayes import VariationalBayesRouting

BETA = ("beta_a", "beta_u")
STATISTICS = tuple(f"{norm}.running_{part}" for norm in ("activation_norm", "pose_norm") for part in ("mean", "var"))
COMPETITIONS = ["parents", "types"]


def trained_rule(parent_types, same=False, **options):
    """A rule in evaluation mode with random β and statistics; with `same`, they are equal for all parent types."""
    rule = VariationalBayesRouting(parent_types, **options).double().eval()
    generator = torch.Generator().manual_seed(5)
    values = rule.state_dict()
    for name in BETA + STATISTICS:
        value = torch.randn(1 if same else parent_types, generator=generator).double()
        if name.endswith("var"):
            value = value.exp()
        if name == "activation_norm.running_mean":
            value = value - 2
        values[name] = value.expand(parent_types).clone()
    rule.load_state_dict(values)
    return rule


def digamma(x):
    """The digamma function: recurrence up to 12, then the asymptotic series."""
    below = 0.0
    while x < 12:
        below -= 1 / x
        x += 1
    series = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760)
    return below + math.log(x) - 1 / (2 * x) - sum(term / x ** (2 * n) for n, term in enumerate(series, 1))


def in_loops(rule, pose, activation, transform, routing_map):
    """The procedure in plain loops: pose ``[B, P, J, R, N]``, activation ``[B, P, J]``, couplings ``[B, J, E, C]``."""
    edges = routing_map.edges.tolist()
    child_types, types, inner, columns = transform.shape[1:]
    rows, sites = pose.shape[3], range(routing_map.parent_sites)
    size = rows * columns
    poses = torch.zeros(pose.shape[0], len(sites), types, rows, columns, dtype=torch.float64)
    activations = torch.zeros(poses.shape[:3], dtype=torch.float64)
    couplings = torch.zeros(pose.shape[0], types, len(edges), child_types, dtype=torch.float64)
    statistics = {name: value.tolist() for name, value in rule.state_dict().items()}

    def normalised(norm, j, value):
        spread = math.sqrt(statistics[f"{norm}.running_var"][j] + 1e-5)
        return (value - statistics[f"{norm}.running_mean"][j]) / spread

    w = transform.tolist()
    for b in range(pose.shape[0]):
        u, a = pose[b].tolist(), activation[b].tolist()
        vote = {
            (e, c, j): [
                sum(u[s][c][r][q] * w[k][c][j][q][n] for q in range(inner)) for r in range(rows) for n in range(columns)
            ]
            for e, (s, _, k) in enumerate(edges)
            for c in range(child_types)
            for j in range(types)
        }
        rivals = {
            (e, c, j): [
                (other, d, i)
                for other, d, i in vote
                if d == c and (other == e if rule.competition == "types" else edges[other][0] == edges[e][0])
            ]
            for e, c, j in vote
        }
        coupling = {one: 1 / len(rivals[one]) for one in vote}
        for t in range(rule.iterations):
            mass, m, psi, nu = {}, {}, {}, {}
            for p in sites:
                for j in range(types):
                    voters = [(e, c, i) for e, c, i in vote if edges[e][1] == p and i == j]
                    weight = {one: coupling[one] * a[edges[one[0]][0]][one[1]] for one in voters}
                    total = sum(weight.values())
                    mu = [sum(weight[v] * vote[v][h] for v in voters) / total if total else 0.0 for h in range(size)]
                    scatter = [sum(weight[v] * (vote[v][h] - mu[h]) ** 2 for v in voters) for h in range(size)]
                    mass[p, j], nu[p, j] = total, size + 1 + total
                    m[p, j] = [total * x / (1 + total) for x in mu]
                    psi[p, j] = [
                        1 / (1 + around + total / (1 + total) * x**2) for around, x in zip(scatter, mu, strict=True)
                    ]
            log_pi = {
                (p, j): digamma(1 + mass[p, j]) - digamma(sum(1 + mass[p, other] for other in range(types)))
                for p, j in mass
            }
            log_lambda = {
                one: sum(digamma((nu[one] + 1 - d) / 2) for d in range(1, size + 1))
                + size * math.log(2)
                + sum(math.log(x) for x in psi[one])
                for one in mass
            }
            if t == rule.iterations - 1:
                break
            likelihood = {}
            for e, c, j in vote:
                parent = edges[e][1], j
                distance = sum(
                    x * (v - centre) ** 2 for x, v, centre in zip(psi[parent], vote[e, c, j], m[parent], strict=True)
                )
                quadratic = size / (1 + mass[parent]) + nu[parent] * distance
                likelihood[e, c, j] = math.exp(log_pi[parent] + log_lambda[parent] / 2 - quadratic / 2)
            coupling = {one: likelihood[one] / sum(likelihood[other] for other in rivals[one]) for one in vote}
        for p, j in mass:
            entropy = size / 2 * math.log(2 * math.pi * math.e) - log_lambda[p, j] / 2
            logit = statistics["beta_a"][j] - (math.exp(log_pi[p, j]) * entropy + statistics["beta_u"][j])
            activations[b, p, j] = 1 / (1 + math.exp(-normalised("activation_norm", j, logit)))
            values = [normalised("pose_norm", j, x) for x in m[p, j]]
            poses[b, p, j] = torch.tensor(values, dtype=torch.float64).reshape(rows, columns)
        for (e, c, j), value in coupling.items():
            couplings[b, j, e, c] = value
    return poses, activations, couplings


@pytest.mark.parametrize(("rows", "iterations"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("competition", COMPETITIONS)
@pytest.mark.parametrize("routing_map", MAPS)
def test_variational_bayes_routing_equals_the_procedure_of_its_paper(routing_map, competition, rows, iterations):
    pose, activation, transform, *_ = full_problem(MAPS[routing_map], 4, (rows, 3, 5), batch=2)
    rule = trained_rule(4, iterations=iterations, competition=competition)
    with torch.no_grad():
        parents, couplings = rule(Capsules(pose, activation), transform, MAPS[routing_map], return_couplings=True)
    exact = in_loops(rule, pose, activation, transform, MAPS[routing_map])
    for found, expected in zip((*parents, couplings), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert 0.05 < parents.activation.mean() < 0.95


def as_function(rule):
    """Turn a rule into a function for the laws; a child with pose 0 has activation 0."""

    def route(pose, transform, routing_map):
        activation = torch.linalg.vector_norm(pose, dim=(-2, -1)).tanh()
        return rule.to(pose.dtype)(Capsules(pose, activation), transform, routing_map, return_couplings=True)

    return route


@settings(max_examples=25)
@given(cases(), st.sampled_from(COMPETITIONS))
def test_variational_bayes_routing_has_the_properties_of_a_routing_rule(case, competition):
    """In float64: logits reach 2,000 here, so that in float32 the order of a sum would change the fourth digit."""
    types = case.transform.shape[2]
    laws.zero_poses_are_finite(as_function(trained_rule(types, competition=competition)), case)
    case = laws.Case(case.pose.double(), case.transform.double(), case.routing_map)
    rule = as_function(trained_rule(types, competition=competition))
    with torch.no_grad():
        for law in laws.ALL:
            if law not in (laws.zero_poses_are_finite, laws.equivariant_to_order_of_parent_types):
                law(rule, case)
        laws.equivariant_to_order_of_parent_types(as_function(trained_rule(types, same=True)), case)
        if competition == "parents":
            laws.couplings_sum_to_one(rule, case)


@pytest.mark.parametrize("routing_map", MAPS)
def test_beta_and_statistics_in_another_order_give_parents_in_this_order(routing_map):
    pose, activation, transform, *_ = full_problem(MAPS[routing_map], 4, (1, 3, 5))
    rule, order = trained_rule(4), torch.tensor([2, 0, 3, 1])
    moved = copy.deepcopy(rule)
    moved.load_state_dict({name: x[order] if x.ndim else x for name, x in rule.state_dict().items()})
    right = rule(Capsules(pose, activation), transform, MAPS[routing_map])
    found = moved(Capsules(pose, activation), transform[:, :, order], MAPS[routing_map])
    torch.testing.assert_close(found.pose, right.pose[:, :, order], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.activation, right.activation[:, :, order], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("routing_map", MAPS)
def test_gradients_equal_finite_differences(routing_map, training):
    pose, activation, transform, *_ = full_problem(MAPS[routing_map], 3, (1, 2, 2), child_types=2, batch=2)
    activation = 0.1 + 0.8 * activation
    rule = trained_rule(3).train(training)
    before = rule.state_dict()

    def outputs(pose, activation, transform, beta_a, beta_u):
        state = {name: x.detach().clone() for name, x in before.items()} | {"beta_a": beta_a, "beta_u": beta_u}
        arguments = (Capsules(pose, activation), transform, MAPS[routing_map], True)
        parents, couplings = functional_call(rule, state, arguments)
        return *parents, couplings

    beta = (getattr(rule, name).detach().clone() for name in BETA)
    inputs = [x.detach().requires_grad_() for x in (pose, activation, transform, *beta)]
    in_full = routing_map == "dense" and not training
    assert torch.autograd.gradcheck(outputs, inputs, fast_mode=not in_full)


def random_batch(batch=8):
    return Capsules(torch.randn(batch, 12, 3, 4, 4), torch.rand(batch, 12, 3)), torch.randn(4, 3, 5, 4, 4) / 2


def test_training_steps_stay_finite_and_change_the_statistics():
    children, transform = random_batch()
    rule = VariationalBayesRouting(5)
    transform = torch.nn.Parameter(transform)
    optimiser = torch.optim.Adam([transform, *rule.parameters()], lr=1e-2)
    first, before = transform.detach().clone(), {name: x.clone() for name, x in rule.named_buffers()}
    losses = []
    for _ in range(3):
        parents = rule(children, transform, RoutingMap.conv((3, 4), 2))
        class_scores = parents.activation.mean(dim=1)
        loss = torch.nn.functional.cross_entropy(class_scores, torch.arange(8) % 5) + parents.pose.tanh().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for value in (*parents, *rule.state_dict().values(), transform):
        assert torch.isfinite(value).all()
    assert (transform - first).abs().max() > 1e-3
    for name, value in rule.named_buffers():
        assert not torch.equal(value, before[name])


def test_beta_changes_activations_only_in_evaluation():
    children, transform = (
        Capsules(*(x.double() for x in part)) if len(part) == 2 else part.double() for part in random_batch()
    )
    routing_map, rule = RoutingMap.conv((3, 4), 2), trained_rule(5)

    def move():
        with torch.no_grad():
            rule.beta_a += torch.randn(5)

    def activations(training):
        return rule.train(training)(children, transform, routing_map).activation

    before = activations(True)
    gradients = torch.autograd.grad(before.square().sum(), [rule.beta_a, rule.beta_u])
    assert max(x.abs().max() for x in gradients) < 1e-12
    move()
    torch.testing.assert_close(activations(True), before, rtol=1e-9, atol=1e-12)

    optimiser, first = (
        torch.optim.SGD(rule.parameters(), lr=0.1),
        [getattr(rule, name).detach().clone() for name in BETA],
    )
    before = activations(False)
    for _ in range(3):
        optimiser.zero_grad()
        (-activations(False).sum()).backward()
        optimiser.step()
    assert (activations(False) > before).all()
    assert (rule.beta_a > first[0]).all()
    assert (rule.beta_u < first[1]).all()


def test_training_normalises_over_samples_and_sites():
    children, transform = random_batch(64)
    parents = VariationalBayesRouting(5)(children, transform, RoutingMap.conv((3, 4), 2))
    logits = parents.activation.logit()
    for values, others in ((logits, (0, 1)), (parents.pose, (0, 1, 3, 4))):
        torch.testing.assert_close(values.mean(dim=others), torch.zeros(5), rtol=0, atol=1e-4)
        torch.testing.assert_close(values.var(dim=others, unbiased=False), torch.ones(5), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("children", ["no child is on", "zero poses", "one child", "far votes", "many children"])
@pytest.mark.parametrize("training", [False, True])
def test_extreme_poses_give_finite_values_in_float32(children, training):
    sites = {"one child": 1, "many children": 3000}.get(children, 6)
    batch = 4 if training else 1
    pose, activation = torch.randn(batch, sites, 2, 1, 4), torch.rand(batch, sites, 2)
    transform = torch.randn(sites, 2, 3, 4, 16)
    if children == "no child is on":
        activation.zero_()
    elif children == "zero poses":
        pose.zero_()
    elif children == "far votes":
        pose *= 1e4
    inputs = [x.requires_grad_() for x in (pose, activation, transform)]
    rule = VariationalBayesRouting(3).train(training)
    parents = rule(Capsules(pose, activation), transform, RoutingMap.dense(sites))
    gradients = torch.autograd.grad(parents.pose.square().sum() + parents.activation.sum(), inputs)
    for value in (*parents, *gradients, *rule.state_dict().values()):
        assert torch.isfinite(value).all()


def test_results_in_float32_are_close_to_results_in_float64():
    pose, activation, transform, *_ = full_problem(MAPS["conv"], 4, (4, 4, 4))
    exact = trained_rule(4)(Capsules(pose, activation), transform, MAPS["conv"])
    found = trained_rule(4).float()(Capsules(pose.float(), activation.float()), transform.float(), MAPS["conv"])
    assert far(found.pose, exact.pose) < 1e-4
    assert far(found.activation, exact.activation) < 1e-4


@pytest.mark.parametrize("training", [False, True])
def test_a_rule_with_weights_of_another_dtype_computes_in_the_dtype_of_its_votes(training):
    children, transform = random_batch()
    plain, half = (VariationalBayesRouting(5).train(training) for _ in range(2))
    half.bfloat16()
    right = plain(children, transform, RoutingMap.conv((3, 4), 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = half(children, transform, RoutingMap.conv((3, 4), 2))
    torch.testing.assert_close(found.pose, right.pose)
    torch.testing.assert_close(found.activation, right.activation)
    for name, value in half.named_buffers():
        torch.testing.assert_close(value, dict(plain.named_buffers())[name].to(value.dtype))


def test_the_saved_options_create_the_same_rule():
    rule = VariationalBayesRouting(5, iterations=2, competition="types")
    again = VariationalBayesRouting(**rule.saved_options)
    assert again.saved_options == {"parent_types": 5, "iterations": 2, "competition": "types"}
    again.load_state_dict(rule.state_dict())


@pytest.mark.parametrize("options", [{"parent_types": 0}, {"iterations": 0}, {"competition": "sites"}])
def test_options_out_of_range_are_refused(options, untyped):
    with pytest.raises(ValueError, match=next(iter(options))):
        VariationalBayesRouting(**{"parent_types": 3, **options})
