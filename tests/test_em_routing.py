from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import laws
from problems import MAPS, cases, em_routing_in_loops, random_case
from torchcaps import Capsules, EMRouting, RoutingMap, em_routing
from torchcaps.kernels import _cpu

OPTIONS = {
    "corrected": {},
    "one-pass": {"iterations": 1},
    "five-passes": {"iterations": 5},
    "types": {"competition": "types"},
    "no-mean-data": {"normalise_data": False},
    "published-temperature": {"inverse_temperature": 0.01, "normalise_data": False},
    "constant": {"inverse_temperature": 0.5, "temperature_schedule": "constant"},
    "mixing": {"parent_activation": "mixing"},
    "tempered": {"tempering": 0.25},
    "options of the released code": {
        "mean_damping": 0.1,
        "variance_floor": 5e-4,
        "competition": "types",
        "normalise_data": False,
    },
}


def rule(options):
    """EM routing with the same β for all parent types; the activation of a child grows with the length of its pose."""

    def run(pose, transform, routing_map):
        activation = pose.square().sum(dim=(-2, -1)).tanh()
        beta = pose.new_ones(transform.shape[2])
        last = em_routing(
            Capsules(pose, activation), transform, routing_map, 0.3 * beta, 0.7 * beta, return_passes=True, **options
        )[1][-1]
        return Capsules(last.mean, last.activation), last.couplings

    return run


def problem(routing_map, seed=0, dtype=torch.float64, sizes=(2, 3, 4), rows=2):
    """A random case, the activations of its children (some 0, some 1), beta_u and beta_a."""
    case = random_case(MAPS[routing_map], seed, dtype, sizes, rows)
    activation = (3 * torch.rand(case.pose.shape[:3], dtype=dtype) - 1).clamp(0, 1)
    beta_u, beta_a = torch.randn(2, sizes[2], dtype=dtype)
    return case, activation, beta_u, beta_a


def check_properties(options, case):
    """Check the properties of a routing rule; in float32, with a variance floor of 1 and at most two passes.

    If a parent lies midway between two votes, each further pass can multiply rounding errors by thirty. After five
    passes in float32, rounding errors could therefore not be told from a wrong rule.
    """
    chosen = dict(OPTIONS[options])
    if case.pose.dtype == torch.float32:
        chosen |= {"variance_floor": 1.0, "iterations": min(2, chosen.get("iterations", 3))}
    tested = rule(chosen)
    for law in laws.ALL:
        law(tested, case)
    laws.couplings_sum_to_one(tested, case, competition=OPTIONS[options].get("competition", "parents"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("options", "routing_map"), [*product(OPTIONS, MAPS)])
def test_em_routing_has_the_properties_of_a_routing_rule(options, routing_map, dtype):
    check_properties(options, random_case(MAPS[routing_map], seed=0, dtype=dtype, rows=3))


@settings(max_examples=60)
@given(cases(), st.sampled_from(sorted(OPTIONS)))
def test_em_routing_has_these_properties_on_random_problems(case, options):
    check_properties(options, case)


@pytest.mark.parametrize(("options", "routing_map"), [*product(OPTIONS, MAPS)])
def test_em_routing_equals_the_procedure_of_the_paper(options, routing_map):
    case, activation, beta_u, beta_a = problem(routing_map)
    expected = em_routing_in_loops(case, activation, beta_u.tolist(), beta_a.tolist(), **OPTIONS[options])
    children = Capsules(case.pose, activation)
    last = em_routing(
        children, case.transform, case.routing_map, beta_u, beta_a, return_passes=True, **OPTIONS[options]
    )[1][-1]
    for found, right in zip((last.mean, last.variance, last.activation, last.couplings), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(("options", "routing_map"), [*product(OPTIONS, MAPS)])
def test_gradients_equal_finite_differences(options, routing_map):
    case, activation, beta_u, beta_a = problem(routing_map, seed=1, sizes=(1, 2, 2))
    activation = activation.clamp(0.1, 0.9)

    def outputs(*tensors, backend="auto"):
        pose, activation, transform, *betas = tensors
        chosen = {**OPTIONS[options], "return_passes": True, "backend": backend}
        last = em_routing(Capsules(pose, activation), transform, case.routing_map, *betas, **chosen)[1][-1]
        return last[1:] if options == "one-pass" else last

    arguments = (case.pose, activation, case.transform, beta_u, beta_a)
    fast = (options, routing_map) != ("corrected", "dense")
    assert torch.autograd.gradcheck(outputs, tuple(x.requires_grad_() for x in arguments), fast_mode=fast)
    if options == "corrected":
        assert torch.autograd.gradgradcheck(partial(outputs, backend="reference"), arguments, fast_mode=True)


@pytest.mark.usefixtures("untyped")
@settings(max_examples=1000)
@given(
    cases(),
    st.sampled_from(sorted(OPTIONS)),
    st.sampled_from([1e-15, 1e-6, 1.0, 1e3, 1e6]),
    st.sampled_from(["off", "on", "some off", "half on", "faint", "fainter", "fading"]),
    st.booleans(),
)
@example(random_case(MAPS["conv"], 0, torch.float32), "corrected", 1e6, "faint", True)
def test_extreme_children_give_finite_values_and_gradients(case, options, scale, active, repeated):
    pose, transform, routing_map = case
    if repeated:
        pose = pose[:, :1, :1].expand_as(pose)
        transform = transform[:1, :1].expand_as(transform)
    pose = (pose * scale).requires_grad_()
    transform = transform.clone().requires_grad_()
    activation = {
        "off": torch.zeros(pose.shape[:3]),
        "on": torch.ones(pose.shape[:3]),
        "some off": torch.arange(pose.shape[1]).remainder(2)[None, :, None].expand(pose.shape[:3]),
        "half on": torch.full(pose.shape[:3], 0.5),
        "faint": torch.full(pose.shape[:3], 1e-18),
        "fainter": torch.full(pose.shape[:3], 1e-30),
        "fading": torch.logspace(-35, 0, pose.shape[:3].numel()).reshape(pose.shape[:3]),
    }[active]
    activation = activation.to(pose.dtype).clone().requires_grad_()
    beta = [torch.zeros(transform.shape[2], dtype=pose.dtype, requires_grad=True) for _ in range(2)]
    passes = em_routing(
        Capsules(pose, activation), transform, routing_map, *beta, return_passes=True, **OPTIONS[options]
    )[1]
    last = passes[-1]
    spread = (last.variance / (scale * scale + 1e-4)).mean()
    (last.mean.mean() / scale + spread + last.activation.sum() + last.couplings.square().sum()).backward()
    gradients = [tensor.grad for tensor in (pose, activation, transform, *beta) if tensor.grad is not None]
    for value in (*(part for one in passes for part in one), *gradients):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_identical_votes_give_a_parent_with_this_pose(options):
    pose = torch.randn(2, 1, 1, 4, 3, dtype=torch.float64).expand(2, 5, 1, 4, 3)
    transform = torch.randn(1, 1, 4, 3, 6, dtype=torch.float64)
    parents = rule(OPTIONS[options])(pose, transform, RoutingMap.shared(5))[0].pose[:, 0]
    torch.testing.assert_close(parents, torch.einsum("brq,jqn->bjrn", pose[:, 0, 0], transform[0, 0]))


def clusters():
    """Twelve children vote for two parents. For the first parent, nine votes agree; for the second, none agree."""
    torch.manual_seed(0)
    pose = torch.eye(4, dtype=torch.float64).expand(1, 12, 1, 4, 4)
    transform = 3 * torch.randn(12, 1, 2, 4, 4, dtype=torch.float64)
    transform[:9, 0, 0] = torch.ones(4, 4, dtype=torch.float64) + 0.01 * transform[:9, 0, 0]
    return Capsules(pose, torch.ones(1, 12, 1, dtype=torch.float64)), transform, RoutingMap.dense(12)


def test_a_parent_with_clustered_votes_is_more_active_than_a_parent_with_scattered_votes():
    zero = torch.zeros(2, dtype=torch.float64)
    passes = em_routing(*clusters(), zero, zero, iterations=4, return_passes=True)[1]
    last = passes[-1]
    torch.testing.assert_close(last.mean[0, 0, 0], torch.ones(4, 4, dtype=torch.float64), atol=0.05, rtol=0)
    assert last.couplings[0, 0, :9].min() > 0.99
    assert last.couplings[0, 0, 9:].max() < 0.01
    assert last.activation[0, 0, 0] > last.activation[0, 0, 1] + 0.1
    assert len(passes) == 4
    torch.testing.assert_close(passes[0].couplings, torch.full((1, 2, 12, 1), 0.5, dtype=torch.float64))


def test_the_inverse_temperature_of_the_first_pass_is_five_percent_of_the_constant_one():
    zero, case = torch.zeros(2, dtype=torch.float64), clusters()
    rising = em_routing(*case, zero, zero, iterations=1).activation.logit()
    constant = em_routing(*case, zero, zero, iterations=1, temperature_schedule="constant")
    torch.testing.assert_close(rising / constant.activation.logit(), torch.full_like(rising, 0.05))


def test_a_single_child_needs_a_variance_floor():
    case = random_case(RoutingMap.dense(1), seed=3, dtype=torch.float64, sizes=(2, 1, 3))
    assert torch.isfinite(rule({})(*case)[0].activation).all()
    assert not torch.isfinite(rule({"variance_floor": 0.0})(*case)[1]).all()


def test_class_activations_saturate_without_normalise_data():
    """The class layer has the size of Gritzman's 64/8/16/16 network: 5·5·16 children and 5 parents."""
    case = random_case(RoutingMap.shared(25), seed=4, dtype=torch.float64, sizes=(2, 16, 5), rows=4)
    fair = rule({})(*case)[0].activation
    saturated = rule({"normalise_data": False})(*case)[0].activation
    assert ((fair > 0.01) & (fair < 0.99)).all()
    assert fair.max() - fair.min() > 0.05
    assert (torch.minimum(saturated, 1 - saturated) < 1e-9).float().mean() > 0.5


def test_children_are_divided_among_parents_at_all_positions():
    case = random_case(RoutingMap.conv((4, 4), kernel_size=3), seed=5, dtype=torch.float64, rows=4)
    right, wrong = (laws.couplings_of_children(rule({"competition": by}), case) for by in ("parents", "types"))
    torch.testing.assert_close(right, torch.ones_like(right))
    windows = torch.bincount(case.routing_map.edges[:, 0], minlength=16).double()
    assert windows[0] == 1
    assert windows[5] == 4
    torch.testing.assert_close(wrong, windows[None, :, None].expand_as(wrong))
    first = rule({"iterations": 1})(*case)[1]
    child = case.routing_map.edges[:, 0]
    torch.testing.assert_close(first[:, :, child == 0], torch.full((2, 4, 1, 3), 1 / 4, dtype=torch.float64))
    torch.testing.assert_close(first[:, :, child == 5], torch.full((2, 4, 4, 3), 1 / 16, dtype=torch.float64))


def test_mixing_proportions_of_a_layer_sum_to_one():
    case, activation, beta_u, beta_a = problem("conv")
    children = Capsules(case.pose, activation)
    passes = em_routing(
        children, case.transform, case.routing_map, beta_u, beta_a, parent_activation="mixing", return_passes=True
    )[1]
    torch.testing.assert_close(passes[-1].activation.sum(dim=(1, 2)), torch.ones(2, dtype=torch.float64))


def test_beta_is_learned_and_saved_by_the_module():
    module = EMRouting(4)
    case, activation, _, _ = problem("conv", dtype=torch.float32)
    module(Capsules(case.pose, activation), case.transform, case.routing_map).activation.sum().backward()
    assert module.beta_u.grad.abs().min() > 0
    assert module.beta_a.grad.abs().min() > 0
    assert set(module.state_dict()) == {"beta_u", "beta_a"}
    mixing = EMRouting(4, parent_activation="mixing")
    assert not any(parameter.requires_grad for parameter in mixing.parameters())


def test_a_parent_with_tiny_couplings_has_the_same_mean_in_float32_and_float64():
    """The logits of every child favour the first parent by hundreds, so the couplings to the second parent are tiny."""
    children, transform, routing_map = clusters()
    transform[:, 0, 0] = 1.0
    zero = torch.zeros(2, dtype=torch.float64)
    exact = em_routing(children, transform, routing_map, zero, zero, return_passes=True)[1][-1]
    single = Capsules(*(part.float() for part in children))
    found = em_routing(single, transform.float(), routing_map, zero.float(), zero.float(), return_passes=True)[1][-1]
    assert exact.couplings[0, 1].max() < 1e-30
    assert exact.mean[0, 0, 1].abs().max() > 0.1
    torch.testing.assert_close(found.mean, exact.mean.float(), rtol=1e-3, atol=1e-3)


BACKENDS = ["reference", *(["fused"] if _cpu is not None else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing_map", [name for name in MAPS if name != "no-edges"])
@pytest.mark.parametrize("faint", [1e-20, 1e-30, 1e-37])
def test_children_with_tiny_activations_give_the_same_parents_in_float32_and_float64(faint, routing_map, backend):
    """In each image, other children have tiny activations, down to the smallest normal number of float32."""
    case = random_case(MAPS[routing_map], 5, torch.float64, rows=2)
    activation = torch.rand(case.pose.shape[:3], dtype=torch.float64).clamp_min(0.2)
    activation[0] = activation[0] * faint
    activation[1, ::2] = activation[1, ::2] * faint
    betas = torch.randn(2, 4, dtype=torch.float64)
    for options in ({"iterations": 1}, {"iterations": 3}, {"iterations": 2, "parent_activation": "mixing"}):
        exact = em_routing(Capsules(case.pose, activation), *case[1:], *betas, **options, backend="reference")
        single = (x.float() for x in (case.pose, activation, case.transform, *betas))
        pose, active, transform, *both = single
        found = em_routing(Capsules(pose, active), transform, case.routing_map, *both, **options, backend=backend)
        assert exact.pose.abs().max() > 0.1
        torch.testing.assert_close(found.pose.double(), exact.pose, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found.activation.double(), exact.activation, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("faint", [1e-20, 1e-30])
def test_children_with_tiny_activations_have_the_same_gradients_in_float32_and_float64(faint, backend):
    case = random_case(MAPS["conv"], 6, torch.float64, rows=2)
    activation = faint * torch.rand(case.pose.shape[:3], dtype=torch.float64).clamp_min(0.2)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (case.pose, activation, case.transform)]
        betas = torch.zeros(2, 4, dtype=dtype)
        chosen = "reference" if dtype == torch.float64 else backend
        children = Capsules(leaves[0], leaves[1])
        parents = em_routing(children, leaves[2], case.routing_map, *betas, iterations=2, backend=chosen)
        gradients.append(torch.autograd.grad(parents.pose.square().sum(), leaves))
    for exact, found in zip(*gradients, strict=True):
        assert (found.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parent_of_inactive_children_has_mean_zero(backend):
    case = random_case(MAPS["conv"], 7, torch.float32)
    activation = torch.rand(case.pose.shape[:3])
    child, parent, _ = case.routing_map.edges.unbind(1)
    activation[:, child[parent == 1]] = 0
    leaves = [x.requires_grad_() for x in (case.pose, activation, case.transform)]
    children = Capsules(leaves[0], leaves[1])
    parents = em_routing(children, leaves[2], case.routing_map, *torch.zeros(2, 4), backend=backend)
    assert not parents.pose[:, 1].any()
    assert parents.pose[:, 0].all()
    (parents.pose.sum() + parents.activation.sum()).backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


@pytest.mark.parametrize(
    "options",
    [
        {"iterations": 0},
        {"competition": "sites"},
        {"variance_floor": -1.0},
        {"inverse_temperature": 0.0},
        {"temperature_schedule": "falling"},
        {"parent_activation": "softmax"},
        {"mean_damping": 1.0},
        {"tempering": 0.0},
        {"tempering": 1.5},
        {"initial_beta_a": float("nan")},
        {"initial_beta_a": float("-inf")},
    ],
)
@pytest.mark.usefixtures("untyped")
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EMRouting(4, **options)


def test_em_routing_computes_in_float32_under_autocast():
    case, activation, beta_u, beta_a = problem("conv", dtype=torch.float32)
    run = partial(em_routing, Capsules(case.pose, activation), case.transform, case.routing_map, beta_u, beta_a)
    for options in ({"backend": "reference"}, {"backend": "auto"}):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = run(**options)
        for one, other in zip(inside, run(**options), strict=True):
            assert torch.equal(one, other)
