from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from problems import MAPS, cases, dynamic_routing_in_loops, random_case
from torchcaps import ROUTINGS, Capsules, DynamicRouting, RoutingMap, dynamic_routing

SU = {"logits": "latest", "squash_form": "su", "inner_squash_form": "unit"}
OPTIONS = {
    "sabour": {},
    "latest": {"logits": "latest"},
    "su": SU,
    "one-pass": {"iterations": 1},
    "five-passes": {"iterations": 5},
    "leaky": {"leaky": True},
    "types": {"competition": "types"},
    "leaky-types": {"leaky": True, "competition": "types"},
    "no-squash": {"squash_form": "none", "inner_squash_form": "sabour"},
}


def rule(options):
    return partial(dynamic_routing, return_couplings=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("options", "routing_map"), [*product(OPTIONS, MAPS)])
def test_dynamic_routing_has_the_properties_of_a_routing_rule(options, routing_map, dtype):
    case = random_case(MAPS[routing_map], seed=0, dtype=dtype)
    for law in laws.ALL:
        law(rule(OPTIONS[options]), case)
    total = {key: value for key, value in OPTIONS[options].items() if key in ("leaky", "competition")}
    laws.couplings_sum_to_one(rule(OPTIONS[options]), case, **total)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(sorted(OPTIONS)))
def test_dynamic_routing_has_these_properties_on_random_problems(case, options):
    for law in laws.ALL:
        law(rule(OPTIONS[options]), case)
    total = {key: value for key, value in OPTIONS[options].items() if key in ("leaky", "competition")}
    laws.couplings_sum_to_one(rule(OPTIONS[options]), case, **total)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(("options", "routing_map"), [*product(OPTIONS, MAPS)])
def test_gradients_equal_finite_differences(options, routing_map):
    case = random_case(MAPS[routing_map], seed=1, dtype=torch.float64, sizes=(1, 2, 2))
    laws.gradients_are_right(rule(OPTIONS[options]), case, fast=(options, routing_map) != ("sabour", "dense"))


@pytest.mark.parametrize(("options", "routing_map"), [*product(OPTIONS, MAPS)])
def test_dynamic_routing_equals_the_pseudo_code_of_the_paper(options, routing_map):
    case = random_case(MAPS[routing_map], seed=2, dtype=torch.float64)
    parents, couplings = dynamic_routing_in_loops(case, **OPTIONS[options])
    capsules, found = rule(OPTIONS[options])(*case)
    torch.testing.assert_close(capsules.pose, parents, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, couplings, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-15, 1e-6, 1e3, 1e6])
@pytest.mark.parametrize("options", OPTIONS)
def test_tiny_and_huge_poses_give_finite_parents(options, scale, dtype):
    case = random_case(MAPS["conv"], seed=3, dtype=dtype)
    pose = (case.pose * scale).requires_grad_()
    transform = case.transform.clone().requires_grad_()
    capsules, couplings = rule(OPTIONS[options])(pose, transform, case.routing_map)
    capsules.pose.sum().backward()
    for value in (capsules.pose, capsules.activation, couplings, pose.grad, transform.grad):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_identical_votes_give_a_parent_with_their_direction(options):
    pose = torch.randn(2, 1, 1, 1, 3, dtype=torch.float64).expand(2, 5, 1, 1, 3)
    transform = torch.randn(1, 1, 4, 3, 6, dtype=torch.float64)
    vote = torch.einsum("bq,jqn->bjn", pose[:, 0, 0, 0], transform[0, 0])
    parents = rule(OPTIONS[options])(pose, transform, RoutingMap.shared(5))[0].pose[:, 0, :, 0]
    torch.testing.assert_close(
        parents / parents.norm(dim=-1, keepdim=True), vote / vote.norm(dim=-1, keepdim=True), rtol=1e-9, atol=1e-9
    )


def test_one_child_and_one_parent_without_squash_give_the_vote():
    case = random_case(RoutingMap.dense(1), seed=4, dtype=torch.float64, sizes=(2, 1, 1))
    parents = dynamic_routing(*case, squash_form="none").pose
    torch.testing.assert_close(parents[:, 0, 0], case.pose[:, 0, 0] @ case.transform[0, 0, 0])


def test_couplings_are_uniform_after_one_pass_and_not_after_two():
    case = random_case(MAPS["dense"], seed=5, dtype=torch.float64)
    once = rule({"iterations": 1})(*case)[1]
    torch.testing.assert_close(once, torch.full_like(once, 1 / 4))
    assert (rule({"iterations": 2})(*case)[1] - once).abs().max() > 1e-3


def test_a_corner_child_of_a_conv_map_has_fewer_parents_than_a_centre_child():
    case = random_case(RoutingMap.conv((4, 4), kernel_size=3), seed=6, dtype=torch.float64)
    couplings = rule({"iterations": 1})(*case)[1]
    child = case.routing_map.edges[:, 0]
    torch.testing.assert_close(couplings[:, :, child == 0], torch.full((2, 4, 1, 3), 1 / 4, dtype=torch.float64))
    torch.testing.assert_close(couplings[:, :, child == 5], torch.full((2, 4, 4, 3), 1 / 16, dtype=torch.float64))


def test_cumulative_logits_sharpen_couplings_and_latest_logits_converge():
    case = random_case(RoutingMap.dense(30), seed=7, dtype=torch.float64)
    sharp = rule({"iterations": 60})(*case)[1].max(dim=1).values.mean()
    settled = [rule({"iterations": t, "logits": "latest"})(*case)[0].pose for t in (60, 61)]
    assert sharp > 0.98
    assert (settled[0] - settled[1]).abs().max() < 1e-3


def test_gradient_through_the_last_pass_only_treats_couplings_as_constants():
    case = random_case(MAPS["dense"], seed=8, dtype=torch.float64)
    transform = case.transform.clone().requires_grad_()
    capsules, couplings = dynamic_routing(
        case.pose, transform, case.routing_map, gradient_passes="last", return_couplings=True
    )
    assert not couplings.requires_grad
    (found,) = torch.autograd.grad(capsules.pose.sum(), transform)
    votes = case.routing_map.votes(case.pose, transform)
    s = case.routing_map.sum_at_parents(torch.einsum("bjec,bjecrn->bjern", couplings, votes))
    v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
    (expected,) = torch.autograd.grad(v.sum(), transform)
    torch.testing.assert_close(found, expected)
    through_all = dynamic_routing(case.pose, transform, case.routing_map).pose
    torch.testing.assert_close(through_all, capsules.pose)
    assert (torch.autograd.grad(through_all.sum(), transform)[0] - expected).abs().max() > 1e-4


def test_dynamic_routing_computes_in_float32_under_autocast():
    case = random_case(MAPS["dense"], seed=9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = dynamic_routing(*case).pose
    assert torch.equal(inside, dynamic_routing(*case).pose)


def test_dynamic_routing_accepts_matrix_poses():
    pose, transform = torch.randn(2, 9, 3, 4, 4), torch.randn(4, 3, 5, 4, 4)
    capsules = dynamic_routing(pose, transform, RoutingMap.conv((3, 3), 2))
    assert capsules.pose.shape == (2, 4, 5, 4, 4)
    assert (capsules.activation < 1).all()


def test_the_module_gives_the_same_parents_as_the_function():
    pose, transform, routing_map = random_case(MAPS["conv"], seed=10, dtype=torch.float64)
    module = ROUTINGS["dynamic"](iterations=2, **SU)
    expected = dynamic_routing(pose, transform, routing_map, iterations=2, **SU)
    assert torch.equal(module(Capsules(pose, pose[..., 0, 0]), transform, routing_map).pose, expected.pose)


@pytest.mark.parametrize(
    "options", [{"iterations": 0}, {"logits": "none"}, {"squash_form": "x"}, {"gradient_passes": "first"}]
)
@pytest.mark.usefixtures("untyped")
def test_unknown_options_are_refused(options):
    with pytest.raises(ValueError, match=r"iterations|logits|squash|gradient_passes"):
        DynamicRouting(**options)


@pytest.mark.usefixtures("untyped")
def test_shapes_that_do_not_match_the_map_are_refused():
    pose, transform, routing_map = random_case(MAPS["dense"], seed=0, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"pose has 3 child sites .* routing map has 4"):
        dynamic_routing(pose[:, :3], transform, routing_map)
    with pytest.raises(ValueError, match="C=2"):
        dynamic_routing(pose[:, :, :2], transform, routing_map)
