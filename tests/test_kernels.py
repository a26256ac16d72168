"""The fused kernels have the same outputs and gradients as the reference."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from conftest import check_against_reference, on_every_instruction_set
from problems import (
    MAPS,
    cases,
    dynamic_routing_in_loops,
    em_routing_in_loops,
    far,
    full_problem,
    random_case,
)
from torchcaps import Agreement, Capsules, MatrixCapsNet, Routing, RoutingMap, Votes, dynamic_routing, em_routing
from torchcaps.kernels import _cpu, cpu_instruction_sets

pytestmark = [
    pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built"),
    pytest.mark.usefixtures("untyped"),  # other tests check the types of the same functions
]
POSES = {"matrix": (4, 4, 4), "vector": (1, 8, 16), "odd": (3, 2, 5)}


def everything(tensors, routing_map, dtype=torch.float64, **options):
    """Pose and activation of the parents, and the gradients of a random sum of both for all five inputs."""
    leaves = [tensor.detach().to(dtype).clone().requires_grad_() for tensor in tensors]
    parents = em_routing(Capsules(*leaves[:2]), leaves[2], routing_map, *leaves[3:], **options)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=random, dtype=torch.float64).to(dtype) for part in parents]
    sum((part * weight).sum() for part, weight in zip(parents, weights, strict=True)).backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [part.detach() for part in parents] + gradients


def where_on(results, activation):
    """Set the activation gradients of inactive children to 0; for a parent with little mass, they can reach e^60."""
    return [*results[:3], results[3] * (activation > 0), *results[4:]]


def relative_errors(run):
    """Return the errors of the fused kernels in float32, divided by those of the reference, per instruction set."""
    exact, reference = (run(dtype=dtype, backend="reference") for dtype in (torch.float64, torch.float32))
    return {
        name: [(far(x, z) + 1e-8) / (far(y, z) + 1e-8) for x, y, z in zip(fused, reference, exact, strict=True)]
        for name, fused in on_every_instruction_set(partial(run, dtype=torch.float32, backend="fused")).items()
    }


def check_mean(errors):
    """Check that the geometric mean of the relative errors of several problems is below 2."""
    for name in cpu_instruction_sets():
        assert torch.tensor([error for one in errors for error in one[name]]).log().mean().exp() < 2, name


@pytest.mark.parametrize("parent_types", [1, 5, 10, 16, 33])
@pytest.mark.parametrize(("routing_map", "pose"), [*product(MAPS, POSES)])
def test_em_equals_the_reference(routing_map, pose, parent_types):
    case = full_problem(MAPS[routing_map], parent_types, POSES[pose])
    near = (0.1 * case[0], *case[1:])
    check_against_reference(partial(everything, near, MAPS[routing_map]), rtol=1e-7, atol=1e-8)

    def of_active(**options):
        return where_on(everything(case, MAPS[routing_map], **options), case[1])

    several = {"iterations": 5, "normalise_data": False, "inverse_temperature": 0.1}
    mixing = {"parent_activation": "mixing"}
    for options in ({}, {"iterations": 1}, {"competition": "types"}, several, mixing, {**mixing, "iterations": 1}):
        check_against_reference(partial(of_active, **options), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("routing_map", "pose"), [*product(MAPS, POSES)])
def test_em_in_float32_has_at_most_twice_the_error_of_the_reference(routing_map, pose):
    """Errors are averaged geometrically over 27 problems, because the errors of a few problems depend on chance."""

    def errors():
        case = full_problem(MAPS[routing_map], 16, POSES[pose])
        return relative_errors(lambda **options: where_on(everything(case, MAPS[routing_map], **options), case[1]))

    check_mean([errors() for _ in range(27)])


@settings(max_examples=300)
@given(
    cases(),
    st.sampled_from([1e-15, 1e-6, 1.0, 1e3, 1e6]),
    st.sampled_from([0.0, 1.0, 0.5, 1e-18, 1e-30]),
    st.booleans(),
    st.sampled_from(["logistic", "mixing"]),
)
def test_extreme_children_give_finite_values_and_gradients(case, scale, active, repeated, form):
    pose = case.pose[:, :1, :1].expand_as(case.pose) if repeated else case.pose
    activation = torch.full(pose.shape[:3], active, dtype=pose.dtype)
    betas = [torch.zeros(case.transform.shape[2], dtype=pose.dtype) for _ in range(2)]
    tensors = (pose * scale, activation, case.transform, *betas)
    for value in everything(tensors, case.routing_map, pose.dtype, backend="fused", parent_activation=form):
        assert torch.isfinite(value).all()


@pytest.mark.slow
@settings(max_examples=10_000)
@given(cases(), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from(["logistic", "mixing"]), st.integers(0, 2**31))
def test_em_and_dynamic_routing_equal_the_reference_on_random_problems(case, scale, form, seed):
    """In float64 with two passes, because more passes can magnify rounding errors: see `check_properties`.

    The test compares gradients of the logarithm of an activation, because the gradient of a small activation is a
    difference of large terms.
    """
    torch.manual_seed(seed)
    pose, transform = scale * case.pose.double(), scale * case.transform.double()
    activation = (3 * torch.rand(pose.shape[:3]) - 1).clamp(0, 1).double()
    betas = torch.randn(2, transform.shape[2]).double()
    results = []
    for backend in ("fused", "reference"):
        tensors, options = (pose, activation, transform, *betas), {"iterations": 2, "parent_activation": form}
        em = everything(tensors, case.routing_map, backend=backend, **options)
        em[3] = activation * em[3]
        results.append(em + dynamic((pose, transform), case.routing_map, backend=backend))
    for found, right in zip(*results, strict=True):
        assert (found - right).norm() <= 1e-12 + 1e-9 * right.norm()


def test_parents_with_little_mass_and_distant_votes_are_as_exact_as_the_reference():
    torch.manual_seed(3)
    routing_map = RoutingMap.shared(12)
    pose, activation, transform, beta_u, beta_a = full_problem(routing_map, 3, (4, 4, 4), child_types=1, batch=1)
    for scale in (0.01, 1.0, 30.0):
        case = (scale * pose, activation, transform, beta_u, beta_a)
        exact = everything(case, routing_map, backend="reference", iterations=4)
        single = [
            everything(case, routing_map, torch.float32, backend=name, iterations=4) for name in ("fused", "reference")
        ]
        for found, reference, right in zip(*single, exact, strict=True):
            assert far(found, right) <= 4 * far(reference, right) + 1e-4


@pytest.mark.parametrize(("routing_map", "parent_types"), [("conv", 16), ("dense", 5), ("shared", 5)])
def test_em_is_bit_identical_for_any_number_of_threads(routing_map, parent_types):
    """The cases cover vectors of parent types and vectors of samples, with separate and with shared transforms."""
    case = full_problem(MAPS[routing_map], parent_types, (4, 4, 4), batch=40)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = everything(case, MAPS[routing_map], torch.float32, backend="fused")
        torch.set_num_threads(3)
        three = everything(case, MAPS[routing_map], torch.float32, backend="fused")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, second) for first, second in zip(one, three, strict=True))


def test_strided_empty_and_bfloat16_inputs_are_accepted():
    pose, activation, transform, beta_u, beta_a = full_problem(MAPS["conv"], 5, (4, 4, 4))
    right = em_routing(Capsules(pose, activation), transform, MAPS["conv"], beta_u, beta_a, backend="fused")
    turned = Capsules(pose.mT.contiguous().mT, activation.mT.contiguous().mT)
    found = em_routing(turned, transform.mT.contiguous().mT, MAPS["conv"], beta_u, beta_a, backend="fused")
    assert torch.equal(found.pose, right.pose)
    empty = em_routing(Capsules(pose[:0], activation[:0]), transform, MAPS["conv"], beta_u, beta_a, backend="fused")
    assert empty.pose.shape[0] == 0
    for tensor in everything((pose[:0], activation[:0], transform, beta_u, beta_a), MAPS["conv"], backend="fused")[2:]:
        assert not tensor.any()
    moved = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for x in (pose, activation, transform)]
    shifted = em_routing(Capsules(*moved[:2]), moved[2], MAPS["conv"], beta_u, beta_a, backend="fused")
    assert torch.equal(shifted.pose, right.pose)
    half = Capsules(pose.bfloat16(), activation.bfloat16())
    assert em_routing(half, transform.bfloat16(), MAPS["conv"], beta_u, beta_a, backend="fused").pose.isfinite().all()
    assert em_routing(half, transform, MAPS["conv"], beta_u, beta_a, backend="fused").pose.dtype == torch.float64


@pytest.mark.parametrize("part", ["pose", "activation"])
def test_the_gradients_of_a_single_output_equal_the_reference(part):
    both = []
    leaves = [tensor.requires_grad_() for tensor in full_problem(MAPS["conv"], 5, (4, 4, 4))]
    for backend in ("fused", "reference"):
        parents = em_routing(Capsules(*leaves[:2]), leaves[2], MAPS["conv"], *leaves[3:], backend=backend)
        both.append(torch.autograd.grad(getattr(parents, part).square().sum(), leaves, allow_unused=True))
    for found, right in zip(*both, strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if right is None else right, rtol=1e-6, atol=1e-7)


def test_the_backward_pass_allocates_less_than_half_of_what_the_forward_pass_saves():
    """Autograd must not allocate zeros as gradients of the tensors that the forward pass saves."""
    children = Capsules(torch.randn(4, 9, 1, 4, 4, requires_grad=True), torch.rand(4, 9, 1))
    betas = [torch.zeros(16) for _ in range(2)]
    parents = em_routing(children, torch.randn(4, 1, 16, 4, 4), RoutingMap.conv((3, 3), 2), *betas, backend="fused")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        parents.pose.sum().backward()
    kept = 4 * 4 * 16 * 36 * 3 * 4
    assert 0 < max(event.self_cpu_memory_usage for event in seen.events()) < kept / 2


@pytest.mark.parametrize("routing_map", MAPS)
def test_em_and_dynamic_routing_equal_the_procedures_of_their_papers(routing_map):
    case = random_case(MAPS[routing_map], seed=2, dtype=torch.float64)
    activation = (3 * torch.rand(case.pose.shape[:3], dtype=torch.float64) - 1).clamp(0, 1)
    betas = torch.randn(2, 4, dtype=torch.float64)
    for options in ({}, {"parent_activation": "mixing"}):
        mean, _, active, _ = em_routing_in_loops(case, activation, *betas.tolist(), **options)
        found = em_routing(Capsules(case.pose, activation), *case[1:], *betas, backend="fused", **options)
        torch.testing.assert_close(found, Capsules(mean, active), rtol=1e-10, atol=1e-10)
    parents, _ = dynamic_routing_in_loops(case)
    torch.testing.assert_close(dynamic_routing(*case, backend="fused").pose, parents, rtol=1e-10, atol=1e-12)


def test_the_gradients_of_a_model_equal_the_reference():
    images = torch.rand(2, 2, 20, 20)
    rules = [Routing("em", backend=name) for name in ("fused", "reference")]
    models = [MatrixCapsNet((2, 20, 20), 3, widths=(4, 2, 3, 3), routing=rule) for rule in rules]
    models[1].load_state_dict(models[0].state_dict())
    gradients = []
    for model in models:
        model(images).scores.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found, right in zip(*gradients, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-2, atol=2e-3)


DYNAMIC = {
    "sabour": {},
    "su": {"logits": "latest", "squash_form": "su", "inner_squash_form": "unit"},
    "one-pass": {"iterations": 1},
    "five-passes": {"iterations": 5, "inner_squash_form": "none"},
    "leaky": {"leaky": True},
    "types": {"competition": "types"},
    "last-gradient": {"gradient_passes": "last"},
}


def dynamic(tensors, routing_map, dtype=torch.float64, **options):
    """Pose and activation of the parents, and the gradients of a random sum of both for pose and transform."""
    leaves = [tensor.detach().to(dtype).clone().requires_grad_() for tensor in tensors]
    parents = dynamic_routing(*leaves, routing_map, **options)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=random, dtype=torch.float64).to(dtype) for part in parents]
    sum((part * weight).sum() for part, weight in zip(parents, weights, strict=True)).backward()
    return [part.detach() for part in parents] + [leaf.grad for leaf in leaves]


def dynamic_problem(routing_map, parent_types, pose, batch=5):
    children, _, transform, *_ = full_problem(routing_map, parent_types, pose, batch=batch)
    return 0.5 * children, 0.5 * transform


@pytest.mark.parametrize("parent_types", [1, 10, 16, 33])
@pytest.mark.parametrize(("routing_map", "options"), [*product(MAPS, DYNAMIC)])
def test_dynamic_routing_equals_the_reference(routing_map, options, parent_types):
    for pose in POSES.values():
        case = dynamic_problem(MAPS[routing_map], parent_types, pose)
        run = partial(dynamic, case, MAPS[routing_map], **DYNAMIC[options])
        check_against_reference(run, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("routing_map", "options"), [*product(MAPS, DYNAMIC)])
def test_dynamic_routing_in_float32_has_at_most_twice_the_error_of_the_reference(routing_map, options):
    cases = (dynamic_problem(MAPS[routing_map], 10, pose) for pose in (*POSES.values(), *POSES.values()))
    runs = (partial(dynamic, case, MAPS[routing_map], **DYNAMIC[options]) for case in cases)
    check_mean([relative_errors(run) for run in runs])


@settings(max_examples=200)
@given(cases(), st.sampled_from(sorted(DYNAMIC)), st.sampled_from([0.0, 1e-30, 1e-15, 1e-6, 1.0, 1e3, 1e6]))
def test_dynamic_routing_gives_finite_values_and_gradients(case, options, scale):
    """Without a squash, huge votes overflow after five passes; that case runs only with votes of normal size."""
    assume(options != "five-passes" or scale <= 1)
    found = dynamic(
        (case.pose * scale, case.transform), case.routing_map, case.pose.dtype, backend="fused", **DYNAMIC[options]
    )
    assert all(torch.isfinite(value).all() for value in found)


def test_dynamic_routing_is_bit_identical_for_any_number_of_threads():
    before = torch.get_num_threads()
    for routing_map in ("dense", "conv"):
        case = dynamic_problem(MAPS[routing_map], 10, (1, 8, 16), batch=40)
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(dynamic(case, MAPS[routing_map], torch.float32, backend="fused"))
        torch.set_num_threads(before)
        assert all(torch.equal(one, three) for one, three in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", range(5))
def test_a_nan_is_never_turned_into_a_number(which, dtype):
    case = [x.to(dtype) for x in full_problem(MAPS["conv"], 16, (4, 4, 4))]
    case[which].view(-1)[-1] = torch.nan

    def are_nan(backend):
        children, rest = Capsules(*case[:2]), (case[2], MAPS["conv"], *case[3:])
        found = [x for t in (1, 3) for x in em_routing(children, *rest, iterations=t, backend=backend)]
        if which in (0, 2):
            found.append(dynamic_routing(case[0], case[2], MAPS["conv"], backend=backend).pose)
        return [torch.isnan(x) for x in found]

    check_against_reference(are_nan, rtol=0, atol=0)


def test_a_parent_with_activation_near_one_has_the_right_gradients():
    case = full_problem(MAPS["conv"], 4, (4, 4, 4))
    case = (*case[:4], torch.full((4,), 15.0))
    options = {"temperature_schedule": "constant", "normalise_data": False}
    exact = everything(case, MAPS["conv"], backend="reference", **options)
    found = everything(case, MAPS["conv"], torch.float32, backend="fused", **options)
    assert far(found[-1], exact[-1]) < 1e-3


def faint(case):
    return case[0], torch.full_like(case[1], 1e-30), *case[2:]


def faint_and_far_first(case):
    pose, activation = case[0].clone(), torch.ones_like(case[1])
    pose[:, 0, 0], activation[:, 0, 0] = 1e6, 1e-10
    return pose, activation, *case[2:]


def twin_parents_far_from_all(case):
    pose = case[0].clone()
    pose[:, 0] *= 300
    return pose, torch.ones_like(case[1]), case[2][:, :, :1].repeat(1, 1, 4, 1, 1), *(x[:1].repeat(4) for x in case[3:])


@pytest.mark.parametrize("change", [faint, faint_and_far_first, twin_parents_far_from_all])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_inputs_have_at_most_four_times_the_error_of_the_reference(change, dtype):
    torch.manual_seed(5)
    case = change(full_problem(MAPS["shared"], 4, (4, 4, 4)))
    exact = everything(case, MAPS["shared"], backend="reference")
    found, reference = (everything(case, MAPS["shared"], dtype, backend=name) for name in ("fused", "reference"))
    for one, other, right in zip(found, reference, exact, strict=True):
        assert far(one, right) <= 4 * far(other, right) + (1e-4 if dtype == torch.float32 else 1e-7)


def test_gradients_are_finite_if_half_of_the_children_are_inactive():
    torch.manual_seed(6)
    case = full_problem(MAPS["shared"], 4, (4, 4, 4))
    activation = torch.ones_like(case[1])
    activation[:, ::2] = 0
    for value in everything((1e3 * case[0], activation, *case[2:]), MAPS["shared"], torch.float32, iterations=5):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("squash_form", ["sabour", "su", "unit"])
def test_squash_of_huge_sums_has_the_right_tiny_gradient(squash_form):
    pose, transform = dynamic_problem(MAPS["dense"], 3, (1, 8, 16))
    case = (1e8 * pose, transform)
    options = {"squash_form": squash_form, "iterations": 1}
    exact = dynamic(case, MAPS["dense"], backend="reference", **options)
    for found, right in zip(
        dynamic(case, MAPS["dense"], torch.float32, backend="fused", **options), exact, strict=True
    ):
        assert far(found, right) < 1e-3


@pytest.mark.parametrize("active", ["first", "last", "all"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(("sites", "types"), [(6000, 2), (1, 6000)])
def test_moments_of_many_children_are_accurate_in_float32(batch, active, sites, types):
    """The children of an object in a corner of an image are not typical of the others."""
    pose, transform, weights = (
        torch.randn(batch, sites * types, 1, 4),
        torch.randn(1, types, 3, 4, 4),
        torch.randn(3, 4),
    )
    pose[:, {"first": slice(10, None), "last": slice(-10), "all": slice(0)}[active]] = 0
    pose = pose.view(batch, sites, types, 1, 4)

    def everything(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in (pose, transform)]
        votes = Votes(leaves[0], None, leaves[1], RoutingMap.shared(sites), passes=3, backend=backend)
        even = votes.moments(variance=False)
        found = votes.moments()
        sharp = Agreement(quadratic=0.5 / (found.variance + 0.1), centre=found.mean, linear=0.1 * found.mean)
        last = votes.moments(sharp)
        moments = [even.mean, found.mean, found.variance, last.mass, last.mean, last.variance]
        loss = (moments[-2] * weights.to(dtype)[:, None]).sum() + sum(
            (x + 0.01).log().sum() for x in (found.variance, last.variance)
        )
        return [*moments, *torch.autograd.grad(loss, leaves)]

    exact = everything(torch.float64, "reference")
    for name, results in on_every_instruction_set(partial(everything, torch.float32, "fused")).items():
        for index, (found, right) in enumerate(zip(results, exact, strict=True)):
            assert far(found, right) < (1e-5 if index < 6 else 1e-4), (name, index)  # gradients depend on quotients


def test_an_infinite_mass_is_not_nan():
    pose, activation = torch.ones(1, 1000, 1, 1, 4), torch.full((1, 1000, 1), 1e36)
    transform = 4 * torch.eye(4).repeat(1, 1, 1, 1, 1)
    for found in on_every_instruction_set(Votes(pose, activation, transform, RoutingMap.shared(1000)).moments).values():
        assert found.mass.isinf().all()
        torch.testing.assert_close(found.mean, torch.full_like(found.mean, 4))
