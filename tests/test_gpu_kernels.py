"""The Triton kernels against the reference: on a GPU if there is one, otherwise in Triton's interpreter on the CPU."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import combinations

import pytest
import torch

from gpu_problems import CHILDREN, MAPS, PARTS, SMALL, Fused, problem
from problems import far
from torchcaps import RoutingMap
from torchcaps.routing.votes import Agreement, Votes

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
Reference = partial(Votes, backend="reference")
SEVERAL_BLOCKS = pytest.param("matrix", 17, marks=() if torch.cuda.is_available() else pytest.mark.slow)
"""Votes of 4×4 for 17 parent types need several blocks of the kernels. In the interpreter, so do those for 5 types."""
SUBSETS = [parts for count in range(5) for parts in combinations(PARTS, count)]


def everything(votes, case, routing_map, rule, device="cpu", dtype=torch.float64, **options):
    """Return the outputs of a rule, and the gradients of a random sum of the outputs for all tensors."""
    statistics = torch.promote_types(dtype, torch.float32)
    leaves = {
        name: x.to(device, dtype if name in CHILDREN else statistics, copy=True).requires_grad_()
        for name, x in case.items()
    }
    children = (leaves["pose"], leaves.get("activation"), leaves["transform"])
    routing_map = replace(routing_map, edges=routing_map.edges.to(device))
    if "logit_weights" in leaves:
        options["logit_weights"] = leaves["logit_weights"]
    found = rule(votes(*children, routing_map, **options), Agreement(*(leaves.get(name) for name in PARTS)))
    outputs = [x for x in found if x is not None]
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x) for x in outputs]
    sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True)).backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    return [x.detach().double().cpu() for x in (*outputs, *gradients)]


def compare(device, case, routing_map, rule, rtol=1e-9, atol=1e-10, **options):
    found = everything(Fused, case, routing_map, rule, device, **options)
    for one, right in zip(found, everything(Reference, case, routing_map, rule, **options), strict=True):
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
    """Three passes that share one sweep; the loss does not depend on the mass of the second pass."""
    first = votes.gaussians(floor=0.1)
    constant = torch.log1p(first.mass) - first.log_volume
    second = votes.gaussians(Agreement(constant, None, None, first.mean, first.variance, 0.1, 0.7), floor=0.1)
    agreement = agreement._replace(quadratic=None, centre=second.mean, variance=second.variance, variance_floor=0.1)
    mass, mean, variance, log_volume = votes.gaussians(agreement, floor=0.1)
    return mass, mean, variance, log_volume, second.mean


def with_small_variances(votes, agreement):
    variance = 1e-3 * agreement.quadratic.square()
    return votes.moments(Agreement(None, None, None, agreement.centre, variance, 1e-4, 0.3))


def as_in_dynamic_routing(votes, agreement):
    """Three passes without variance; the loss depends on the second pass through its mean only."""
    even = votes.moments(variance=False)
    parents = torch.tanh(even.mass[..., None, None] * even.mean)
    middle = votes.moments(Agreement(linear=parents), variance=False)
    parents = parents + torch.tanh(middle.mean)
    return votes.moments(Agreement(linear=parents), variance=False)[1:2]


def last_alone(votes, agreement):
    """Two passes; no gradient flows to the first pass."""
    found = votes.moments()
    return votes.moments(Agreement(quadratic=0.5 / (found.variance.detach() + 0.1), centre=found.mean.detach()))


@pytest.mark.parametrize(
    ("routing_map", "competition"),
    [*((name, "parents") for name in MAPS), ("irregular", "types"), ("no-edges", "types")],
)
def test_every_routing_map_equals_the_reference(device, routing_map, competition):
    routing_map = MAPS[routing_map]
    compare(device, problem(routing_map), routing_map, one_pass, competition=competition)


@pytest.mark.parametrize(("pose", "parent_types"), [("vector", 1), ("matrix", 5), ("odd", 5), SEVERAL_BLOCKS])
def test_votes_of_every_shape_equal_the_reference(device, pose, parent_types):
    compare(device, problem(SMALL, parent_types, pose, batch=5), SMALL, one_pass)


@pytest.mark.parametrize("parts", SUBSETS, ids="-".join)
def test_every_part_of_an_agreement_equals_the_reference(device, parts):
    case = {name: x for name, x in problem(SMALL).items() if name in CHILDREN + parts}
    compare(device, case, SMALL, one_pass)


@pytest.mark.parametrize("rule", [even, one_pass, without_variance, constant_couplings])
def test_every_kind_of_pass_equals_the_reference(device, rule):
    case = problem(SMALL)
    compare(device, case, SMALL, rule, none_of_the_above=True)
    del case["activation"]
    compare(device, case, SMALL, rule, competition="types")


@pytest.mark.parametrize(
    ("rule", "competition"),
    [(as_in_em, "parents"), (as_in_em, "types"), (as_in_dynamic_routing, "parents"), (last_alone, "types")],
)
def test_several_passes_equal_the_reference(device, rule, competition):
    compare(device, problem(SMALL), SMALL, rule, competition=competition)


@pytest.mark.parametrize(("pose", "rule"), [("vector", even), ("matrix", one_pass), ("odd", as_in_dynamic_routing)])
def test_logits_that_depend_on_poses_equal_the_reference(device, pose, rule):
    case = problem(SMALL, 5, pose)
    weights = torch.randn(*case["transform"].shape[:3], case["pose"][0, 0, 0].numel() + 1).double()
    compare(device, case | {"logit_weights": weights}, SMALL, rule, competition="types")


def test_couplings_equal_the_reference(device):
    for name, none_of_the_above in (("irregular", False), ("conv", True), ("no-edges", False)):
        case, order = problem(MAPS[name], 17), MAPS[name].edges[:, 0].argsort(stable=True)
        children, agreement = [case[part] for part in CHILDREN], Agreement(*(case[part] for part in PARTS))
        right = Reference(*children, MAPS[name], none_of_the_above=none_of_the_above).couplings(agreement)
        fused = Fused(*(x.to(device) for x in children), MAPS[name], none_of_the_above=none_of_the_above)
        found = fused.couplings(Agreement(*(case[part].to(device) for part in PARTS)))
        torch.testing.assert_close(found.cpu(), right[:, :, order], rtol=1e-9, atol=1e-10)


def test_none_of_the_above_with_competition_among_types_equals_the_reference(device):
    case = problem(SMALL)
    fused = Fused(*(case[part].to(device) for part in CHILDREN), SMALL, "types", none_of_the_above=True)
    couplings = fused.couplings(Agreement(case["constant"].to(device))).cpu()
    constant = torch.nn.functional.pad(case["constant"], (0, 1)).softmax(dim=2)[..., :-1].transpose(1, 2)
    by_child = SMALL.edges[SMALL.edges[:, 0].argsort(stable=True)]
    right = constant[:, :, by_child[:, 1], None].expand_as(couplings)
    torch.testing.assert_close(couplings, right, rtol=1e-9, atol=1e-10)
    reached = Reference(*(case[part] for part in CHILDREN), SMALL).activation_sums()
    torch.testing.assert_close(fused.moments().mass.cpu(), (reached / 4)[..., None].expand(2, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_children_in_half_precision_have_moments_in_float32(device, dtype):
    case = {name: x.to(dtype).double() for name, x in problem(SMALL, 5, "matrix").items()}
    exact = everything(Reference, case, SMALL, one_pass)
    narrow = everything(Fused, case, SMALL, one_pass, device, dtype)
    close, rounded = (1e-4, 1e-4) if dtype == torch.float32 else (1e-4, 1e-2)
    for index, (found, right) in enumerate(zip(narrow, exact, strict=True)):
        is_of_children = 3 <= index < 6
        assert far(found, right) < (rounded if is_of_children else close)


@pytest.mark.parametrize("faint", [0.0, 1e-20, 1e-30, 1e-37])
def test_children_with_tiny_activations_have_the_right_moments(device, faint):
    case = problem(SMALL)
    activation = case["activation"]
    activation[0], activation[1, ::2] = faint * activation[0].clamp_min(0.2), faint * activation[1, ::2]
    case["activation"] = activation.float().double()
    options = {"none_of_the_above": True}
    exact = everything(Reference, case, SMALL, one_pass, **options)
    found = everything(Fused, case, SMALL, one_pass, device, torch.float32, **options)
    for index, (one, right) in enumerate(zip(found, exact, strict=True)):
        is_of_activation = index == 4
        if is_of_activation and faint == 1e-37:  # the gradient is too large for float32
            continue
        assert far(one, right) < 1e-3


def test_a_parent_with_couplings_too_small_for_float32_has_the_right_moments(device):
    """The logarithms of the couplings are about -300, so the couplings themselves are 0 in float32."""
    case = problem(SMALL)
    case["constant"][..., 1] -= 300
    exact = everything(Reference, case, SMALL, one_pass)
    found = everything(Fused, case, SMALL, one_pass, device, torch.float32)
    assert all(far(one, right) < 1e-3 for one, right in zip(found, exact, strict=True))


def test_the_log_volume_without_floor_equals_the_reference(device):
    case, routing_map = problem(MAPS["dense"]), MAPS["dense"]
    for used in ([], ["constant", "quadratic", "centre"]):
        given = {name: x for name, x in case.items() if name in (*CHILDREN, *used)}
        compare(device, given, routing_map, lambda votes, agreement: votes.gaussians(agreement, floor=0.0)[3:])


def test_a_parent_with_a_very_negative_logit_has_the_right_gradients(device):
    for activation in (None, 1.0, 1e-15):
        case = problem(MAPS["shared"])
        names = (
            ["pose", "transform", "constant"] if activation is None else ["pose", "activation", "transform", "constant"]
        )
        case = {name: case[name] for name in names}
        case["constant"][..., 0] = -1e9
        if activation is not None:
            case["activation"] *= activation
        exact = everything(Reference, case, MAPS["shared"], without_variance)
        found = everything(Fused, case, MAPS["shared"], without_variance, device, dtype=torch.float32)
        for name, one, other in zip(["mass", "mean", *names[:-1]], found, exact, strict=False):
            assert far(one / other.norm(), other / other.norm()) < 1e-5, name


@pytest.mark.filterwarnings("ignore:divide by zero|invalid value")
@pytest.mark.parametrize("none_of_the_above", [False, True])
def test_a_child_whose_parents_are_all_excluded_equals_the_reference(device, none_of_the_above):
    case = problem(MAPS["conv"])
    case["constant"][0] = -torch.inf
    one, right = (
        everything(votes, case, MAPS["conv"], one_pass, where, none_of_the_above=none_of_the_above)
        for votes, where in ((Fused, device), (Reference, "cpu"))
    )
    for found, expected in zip(one[:3], right[:3], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, equal_nan=True)
        assert bool(found[0].isnan().any()) != none_of_the_above


def test_equal_votes_have_no_variance(device):
    one_child = RoutingMap(torch.tensor([[0, 0, 0], [1, 1, 0]], device=device), 2, 2, 1, (1, 2))
    pose = (100 + torch.rand(33, 2, 1, 4, 4)).to(device)
    activation = (0.01 + torch.rand(33, 2, 1)).to(device)
    found = Fused(pose, activation, torch.eye(4, device=device).expand(1, 1, 3, 4, 4), one_child).moments()
    torch.testing.assert_close(found.mean, pose.expand(33, 2, 3, 4, 4))
    assert not found.variance.any()


def test_gradients_through_a_variance_do_not_underflow(device):
    def rule(votes, agreement):
        _, mean, variance = votes.moments()
        return votes.moments(Agreement(centre=mean, variance=variance, variance_floor=1e-3))[1:2]

    case = problem(MAPS["conv"])
    case = {"pose": 1e12 * case["pose"], "transform": case["transform"]}
    exact = everything(Reference, case, MAPS["conv"], rule)
    found = everything(Fused, case, MAPS["conv"], rule, device, dtype=torch.float32)
    assert max(map(far, found, exact)) < 1e-3


def test_forward_and_backward_compute_the_same_large_logits(device):
    for seed in range(4):
        torch.manual_seed(seed)
        case = {name: x.float().double() for name, x in problem(SMALL).items()}
        exact = everything(Reference, case, SMALL, with_small_variances)
        found = everything(Fused, case, SMALL, with_small_variances, device, torch.float32)
        of_pose = 3
        assert far(found[of_pose], exact[of_pose]) < 1e-3


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("part", [*CHILDREN, *PARTS])
def test_a_nan_is_never_turned_into_a_number(device, part, place):
    """The activation of the first child is 0."""
    case = problem(SMALL)
    case[part].view(-1)[place] = torch.nan
    for rule in (even, one_pass) if part in CHILDREN else (one_pass,):
        moments = []
        for votes, where in ((Fused, device), (Reference, "cpu")):
            given = {name: x.to(where) for name, x in case.items()}
            children = votes(*(given[name] for name in CHILDREN), replace(SMALL, edges=SMALL.edges.to(where)))
            moments.append(rule(children, Agreement(*(given[name] for name in PARTS))))
        for one, other in zip(*moments, strict=True):
            assert torch.equal(one.isnan().cpu(), other.isnan())


def test_an_empty_batch_has_no_gradients(device):
    case = {name: x if name == "transform" else x[:0] for name, x in problem(SMALL).items()}
    for rule in (even, one_pass):
        found = everything(Fused, case, SMALL, rule, device)
        assert found[0].shape == (0, 2, 3)
        assert not any(x.any() for x in found)


def test_sums_over_many_children_equal_the_reference(device):
    routing_map = RoutingMap.shared(16)
    case = problem(routing_map, parent_types=1, child_types=1)
    compare(device, case, routing_map, one_pass)
