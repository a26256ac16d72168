"""On the fused kernels, every rule has the same outputs and gradients as with materialised votes."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import check_against_reference
from problems import MAPS, full_problem
from torchcaps import (
    ROUTINGS,
    Agreement,
    Capsules,
    Routing,
    RoutingMap,
    SharedCaps,
    Votes,
    dynamic_routing,
    em_routing,
)
from torchcaps.kernels import _cpu
from torchcaps.kernels import moments as operators
from torchcaps.routing import LayerShape

pytestmark = pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built")
BACKENDS = ("fused", "reference")
ROWS, INNER, COLUMNS = POSE = (2, 3, 4)
BATCHES_AND_TYPES = [(3, 2), (3, 17), (17, 2), (17, 17)]
"""The kernels' vectors hold samples, or parent types where there are few samples."""


def both(name, routing_map, parent_types):
    """Create a rule with random parameters in evaluation mode, once with the fused backend, once with the reference."""
    shape = LayerShape(routing_map.transforms, 3, parent_types, (ROWS, INNER), (ROWS, COLUMNS))
    rule = ROUTINGS[name].for_layer(shape).double().eval()
    for parameter in rule.parameters():
        nn.init.normal_(parameter, std=0.5)
    rules = [copy.deepcopy(rule) for _ in BACKENDS]
    for each, backend in zip(rules, BACKENDS, strict=True):
        each.backend = backend
    return rules


def everything(rule, tensors, routing_map):
    """Poses and activations of the parents, and the gradients of a random sum of them for all inputs and parameters."""
    rule.zero_grad()
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    parents = rule(Capsules(*leaves[:2]), leaves[2], routing_map)
    random = torch.Generator().manual_seed(1)
    sum((x * torch.randn(x.shape, generator=random, dtype=x.dtype)).sum() for x in parents).backward()
    learned = [*leaves, *(x for x in rule.parameters() if x.requires_grad)]
    return [*parents, *(torch.zeros_like(x) if x.grad is None else x.grad for x in learned)]


def close(found, right, rtol=1e-7, atol=1e-8):
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def forbid_materialised_votes(monkeypatch):
    def refuse(*_):
        raise AssertionError("votes were written to memory")

    monkeypatch.setattr(RoutingMap, "votes", refuse)


@pytest.mark.parametrize("routing_map", MAPS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_rule_equals_the_reference(name, routing_map):
    routing_map = MAPS[routing_map]
    for batch, parent_types in BATCHES_AND_TYPES:
        pose, activation, transform, *_ = full_problem(routing_map, parent_types, POSE, batch=batch)
        case = (0.5 * pose, activation.clamp_min(0.1), 0.5 * transform)
        rules = dict(zip(BACKENDS, both(name, routing_map, parent_types), strict=True))

        def run(backend, rules=rules, case=case):
            return everything(rules[backend], case, routing_map)

        check_against_reference(run, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ROUTINGS)
def test_no_rule_materialises_votes_on_the_fused_kernels(name, monkeypatch):
    pose, activation, transform, *_ = full_problem(MAPS["conv"], 5, POSE)
    fused, reference = both(name, MAPS["conv"], 5)
    with torch.no_grad():
        right = reference(Capsules(pose, activation), transform, MAPS["conv"], return_couplings=True)
    forbid_materialised_votes(monkeypatch)
    everything(fused, (pose, activation, transform), MAPS["conv"])
    with torch.no_grad():
        parents, couplings = fused(Capsules(pose, activation), transform, MAPS["conv"], return_couplings=True)
    close((*parents, couplings), (*right[0], right[1]))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("part", range(3))
def test_a_nan_gives_nan_in_the_same_parents_as_in_the_reference(name, part):
    case = [x.clone() for x in full_problem(MAPS["conv"], 5, POSE)[:3]]
    case[part].view(-1)[-1] = torch.nan
    found, right = (rule(Capsules(*case[:2]), case[2], MAPS["conv"]) for rule in both(name, MAPS["conv"], 5))
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
    reaches = part != 1 or getattr(ROUTINGS[name], "weighs_activations", True)
    assert found.pose.isnan().any() == reaches


@pytest.mark.parametrize("routing_map", MAPS)
@pytest.mark.parametrize(
    "options",
    [
        {"mean_damping": 0.3},
        {"mean_damping": 0.3, "competition": "types", "parent_activation": "mixing"},
        {"tempering": 0.25},
        {"tempering": 0.25, "competition": "types", "iterations": 5, "variance_floor": 0.1},
    ],
)
def test_options_of_em_equal_the_reference(options, routing_map, monkeypatch):
    case = full_problem(MAPS[routing_map], 5, POSE)
    results = []
    for backend in BACKENDS[::-1]:
        if backend == "fused":
            forbid_materialised_votes(monkeypatch)
        leaves = [x.clone().requires_grad_() for x in (0.3 * case[0], case[1].clamp_min(0.1), *case[2:])]
        children, chosen = Capsules(*leaves[:2]), {**options, "backend": backend}
        parents = em_routing(children, leaves[2], MAPS[routing_map], *leaves[3:], **chosen)
        loss = parents.pose.square().sum() + parents.activation.sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        results.append((*parents, *gradients))
    close(*results)


def test_all_passes_of_em_equal_the_reference(monkeypatch):
    pose, activation, transform, *betas = full_problem(MAPS["conv"], 5, POSE)
    options = {"mean_damping": 0.1, "return_passes": True}
    right = em_routing(Capsules(pose, activation), transform, MAPS["conv"], *betas, **options, backend="reference")[1]
    forbid_materialised_votes(monkeypatch)
    found = em_routing(Capsules(pose, activation), transform, MAPS["conv"], *betas, **options, backend="fused")[1]
    for one, other in zip(found, right, strict=True):
        close(one, other)


@pytest.mark.parametrize("options", [{}, {"gradient_passes": "last"}, {"leaky": True}])
def test_couplings_of_dynamic_routing_equal_the_reference(options, monkeypatch):
    pose, _, transform, *_ = full_problem(MAPS["irregular"], 5, POSE)
    problem, options = (pose, transform, MAPS["irregular"]), {**options, "return_couplings": True}
    right, couplings = dynamic_routing(*problem, **options, backend="reference")
    forbid_materialised_votes(monkeypatch)
    found, fused = dynamic_routing(*problem, **options, backend="fused")
    close((*found, fused), (*right, couplings))


def test_gradients_of_couplings_equal_the_reference():
    leaves = [x.requires_grad_() for x in full_problem(MAPS["conv"], 5, POSE)[:3]]
    gradients = []
    for rule in both("attention", MAPS["conv"], 5):
        couplings = rule(Capsules(*leaves[:2]), leaves[2], MAPS["conv"], return_couplings=True)[1]
        gradients.append(torch.autograd.grad(couplings.square().sum(), (leaves[0], leaves[2])))
    close(*gradients)


def three_passes(votes):
    """Compute the moments of three passes; the agreement of a pass depends on the moments of the previous pass."""
    agreement, found = None, []
    for _ in range(3):
        found.append(votes.moments(agreement))
        agreement = Agreement(-found[-1].variance.sum(dim=(3, 4)), found[-1].mean, 0.5 + found[-1].variance)
    return found


def of_votes(loss, backend, passes=3, **options):
    """Compute the gradients of pose, activation and transform for a loss of three passes over the votes."""
    torch.manual_seed(2)
    leaves = [x.requires_grad_() for x in full_problem(MAPS["conv"], 5, POSE)[:3]]
    votes = Votes(*leaves, MAPS["conv"], passes=passes, backend=backend, **options)
    return torch.autograd.grad(loss(three_passes(votes)), leaves)


def every_pass(found):
    return sum(part.square().sum() for one in found for part in one)


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
@pytest.mark.parametrize("competition", ["parents", "types"])
@pytest.mark.parametrize("none_of_the_above", [False, True])
def test_gradients_are_right_if_passes_is_too_large_or_too_small(passes, competition, none_of_the_above):
    options = {"competition": competition, "none_of_the_above": none_of_the_above}
    close(*(of_votes(every_pass, backend, passes, **options) for backend in BACKENDS))


@pytest.mark.parametrize(
    "loss",
    [
        lambda found: found[0].mean.square().sum(),
        lambda found: found[1].mass.square().sum(),
        lambda found: found[1].variance.sum() + found[0].mass.sum(),
    ],
)
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_right_if_the_loss_ignores_some_passes(loss, passes):
    close(*(of_votes(loss, backend, passes) for backend in BACKENDS))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("used", ["variance", "log_volume", "mean", "all"])
@pytest.mark.parametrize(("batch", "parent_types"), BATCHES_AND_TYPES)
def test_gaussians_and_their_gradients_equal_the_reference(batch, parent_types, used, uniform):
    pose, activation, transform, *_ = full_problem(MAPS["conv"], parent_types, POSE, batch=batch)
    parents = (batch, MAPS["conv"].parent_sites, parent_types)
    given = torch.randn(parents).double(), *(0.3 * torch.randn(*parents, ROWS, COLUMNS).double() for _ in range(2))

    def run(backend):
        leaves = [x.detach().clone().requires_grad_() for x in (pose, activation, transform, *given)]
        votes = Votes(*leaves[:3], MAPS["conv"], backend=backend)
        agreement = None if uniform else Agreement(leaves[3], quadratic=leaves[4].square(), centre=leaves[5])
        found = votes.gaussians(agreement, floor=0.2)
        parts = found if used == "all" else [getattr(found, used)]
        gradients = torch.autograd.grad(sum(x.square().sum() for x in parts), leaves, materialize_grads=True)
        return [*found, *gradients]

    check_against_reference(run, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("constant_couplings", [False, True])
@pytest.mark.parametrize("inverse_temperature", [1.0, 0.3])
@pytest.mark.parametrize(("batch", "parent_types"), BATCHES_AND_TYPES)
def test_an_agreement_with_variances_equals_one_with_the_factors(
    batch, parent_types, inverse_temperature, constant_couplings
):
    pose, activation, transform, *_ = full_problem(MAPS["conv"], parent_types, POSE, batch=batch)
    parents = (batch, MAPS["conv"].parent_sites, parent_types)
    given = torch.randn(parents).double(), *(torch.rand(*parents, ROWS, COLUMNS).double() for _ in range(2))

    def run(backend, written=False):
        leaves = [x.detach().clone().requires_grad_() for x in (pose, activation, transform, *given)]
        votes = Votes(*leaves[:3], MAPS["conv"], backend=backend)
        constant, variance, centre = leaves[3:]
        if written:
            factor = inverse_temperature / (2 * (variance + 0.1))
            agreement = Agreement(constant, quadratic=factor, centre=centre)
        else:
            agreement = Agreement(constant, None, None, centre, variance, 0.1, inverse_temperature)
        found = votes.moments(agreement, constant_couplings=constant_couplings)
        gradients = torch.autograd.grad(sum(x.square().sum() for x in found), leaves, materialize_grads=True)
        with torch.no_grad():
            return [*found, *gradients, votes.couplings(agreement)]

    check_against_reference(run, rtol=1e-7, atol=1e-8)
    close(run("reference"), run("reference", written=True))


def test_an_agreement_with_a_variance_and_wrong_options_is_refused():
    pose, activation, transform, *_ = full_problem(MAPS["conv"], 5, POSE)
    votes = Votes(pose, activation, transform, MAPS["conv"])
    variance = votes.moments().variance
    with pytest.raises(ValueError, match="both quadratic and variance: give one of them"):
        votes.moments(Agreement(quadratic=variance, variance=variance))
    for options in ({"variance_floor": -0.1}, {"inverse_temperature": 0.0}, {"inverse_temperature": float("nan")}):
        with pytest.raises(ValueError, match="variance_floor must be a finite number of at least 0, and inverse_temp"):
            votes.moments(Agreement(variance=variance, **options))
        with pytest.raises(ValueError, match="need a variance; got variance=None, variance_floor="):
            votes.moments(Agreement(**options))


@pytest.mark.parametrize("batch", [3, 17])
def test_gradients_are_right_if_the_saved_tensors_come_back_with_other_strides(batch):
    """As with ``torch.autograd.graph.save_on_cpu(pin_memory=True)``, which returns contiguous tensors."""
    leaves = [x.requires_grad_() for x in full_problem(MAPS["conv"], 5, POSE, batch=batch)[:3]]
    gradients = []
    for pack in (lambda x: x, lambda x: x.detach().clone(memory_format=torch.contiguous_format)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            votes = Votes(*leaves, MAPS["conv"], passes=2, backend="fused")
            first = votes.gaussians(floor=0.1)
            agreement = Agreement(-first.log_volume, None, None, first.mean, first.variance, 0.1)
            loss = sum(x.square().sum() for x in votes.gaussians(agreement, floor=0.1))
        gradients.append(torch.autograd.grad(loss, leaves))
    close(*gradients)


def test_a_variance_far_below_the_floor_has_right_gradients():
    """A single vote has variance 0, so the log volume does not depend on its activation."""
    pose, transform = torch.randn(1, 1, 1, 4, 4), torch.randn(1, 1, 5, 4, 4)
    for backend in BACKENDS:
        activation = torch.full((1, 1, 1), 1e-10).requires_grad_()
        votes = Votes(pose, activation, transform, RoutingMap.dense(1), backend=backend)
        loss = votes.gaussians(floor=3e-3).log_volume.sum()
        assert torch.autograd.grad(loss, activation)[0].item() == 0


def test_operators_accept_tokens_in_a_tuple():
    pose, activation, transform, *_ = full_problem(MAPS["conv"], 5, POSE)
    layer = (pose.requires_grad_(), activation, transform, MAPS["conv"].edge_lists.values, MAPS["conv"].parent_sites)
    options = (False, False, False)
    tokens = operators.open_votes(*layer, 1, *options)
    detached = (pose.detach(), *layer[1:])
    for given in (list(tokens), tuple(tokens)):
        found = operators.moments(given, *detached, *4 * [None], 0.0, 0.0, True, *options, True, False, None)
        assert found[1].requires_grad


def test_gaussians_have_the_log_volume_of_the_variance_plus_the_floor():
    pose, activation, transform, *_ = full_problem(MAPS["conv"], 5, POSE)
    for backend in BACKENDS:
        votes = Votes(pose, activation, transform, MAPS["conv"], backend=backend)
        (*found, log_volume), moments = votes.gaussians(floor=0.2), votes.moments()
        close(found, moments)
        close([log_volume], [(moments.variance + 0.2).sqrt().log().sum(dim=(3, 4))])


def test_a_second_backward_through_the_same_graph_gives_the_same_gradients():
    leaves = [x.requires_grad_() for x in full_problem(MAPS["conv"], 5, POSE)[:3]]
    loss = every_pass(three_passes(Votes(*leaves, MAPS["conv"], passes=3, backend="fused")))
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    for x in leaves:
        x.grad = None
    loss.backward(retain_graph=True)
    loss.backward()
    close([x.grad for x in leaves], [2 * x for x in once], rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_rules_with_activation_checkpointing_have_the_same_gradients(name, use_reentrant):
    rule, _ = both(name, MAPS["conv"], 5)
    leaves = [x.requires_grad_() for x in full_problem(MAPS["conv"], 5, POSE)[:3]]

    def run(pose, activation, transform):
        parents = rule(Capsules(pose, activation), transform, MAPS["conv"])
        return parents.pose.square().sum() + parents.activation.sum()

    gradients = []
    for loss in (run(*leaves), checkpoint(run, *leaves, use_reentrant=use_reentrant)):
        for x in (*leaves, *rule.parameters()):
            x.grad = None
        loss.backward()
        learned = [x for x in (*leaves, *rule.parameters()) if x.grad is not None]
        gradients.append([x.grad.clone() for x in learned])
    close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("routing_map", MAPS)
def test_none_of_the_above_with_competition_among_types_equals_plain_loops(routing_map):
    """Each softmax runs over the types at one site and one more logit 0; tested fused and with the reference."""
    routing_map = MAPS[routing_map]
    pose, activation, transform, *_ = full_problem(routing_map, 3, POSE)
    linear = 0.3 * torch.randn(3, routing_map.parent_sites, 3, ROWS, COLUMNS).double()
    for backend in BACKENDS:
        votes = Votes(pose, activation, transform, routing_map, "types", none_of_the_above=True, backend=backend)
        couplings, mass = votes.couplings(Agreement(linear=linear)), votes.moments(Agreement(linear=linear)).mass
        expected = torch.zeros_like(mass)
        for b in range(3):
            for e, (s, p, k) in enumerate(routing_map.edges.tolist()):
                for c in range(3):
                    fits = [((pose[b, s, c] @ transform[k, c, j]) * linear[b, p, j]).sum().exp() for j in range(3)]
                    for j in range(3):
                        coupling = fits[j] / (sum(fits) + 1)
                        torch.testing.assert_close(couplings[b, j, e, c], coupling, rtol=1e-9, atol=1e-12)
                        expected[b, p, j] += coupling * activation[b, s, c]
        torch.testing.assert_close(mass, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ROUTINGS)
def test_masked_children_have_no_effect(name):
    """docs/concepts.md says how to mask children: with activation 0, or with pose 0 if the rule ignores activations."""
    rule = Routing(name, normalise_data=False) if name == "em" else name
    layer = SharedCaps(8, 5, 16, routing=rule).eval()
    pose, activation = torch.randn(2, 50, 4, 1, 8), torch.rand(2, 50, 4)
    masked = activation if getattr(layer.routing, "weighs_activations", True) else pose
    masked[:, 20:] = 0
    found, right = layer(Capsules(pose, activation)), layer(Capsules(pose[:, :20], activation[:, :20]))
    torch.testing.assert_close(found.pose, right.pose, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.activation, right.activation, rtol=1e-4, atol=1e-5)
