"""The Triton kernels against the reference: on a GPU if there is one, otherwise in Triton's interpreter on the CPU."""

import sys
import warnings
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations

import pytest
import torch

from problems import MAPS as ALL_MAPS
from problems import far, full_problem
from torchcaps import Capsules, RoutingMap, dynamic_routing, em_routing
from torchcaps.kernels import _cpu
from torchcaps.kernels import moments as operators
from torchcaps.kernels.memory import for_kernels, has_strides, lanes_of, padded, sample_stride, samples_last_strides
from torchcaps.routing.votes import Agreement, Gaussians, Moments, Votes, kernel_arguments

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
MAPS = {
    "dense": RoutingMap.dense(3),
    "shared": RoutingMap.shared(5),
    "conv": RoutingMap.conv((3, 2), 3, padding=1, stride=2),
    **{name: ALL_MAPS[name] for name in ("one-parent", "irregular", "no-edges")},
}
SMALL = RoutingMap(torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, 1]]), 2, 2, 2, (1, 2))
POSES = {"matrix": (4, 4, 4), "vector": (1, 3, 5), "odd": (3, 2, 2)}
Reference = partial(Votes, backend="reference")
PARTS = ("constant", "linear", "quadratic", "centre")
SUBSETS = [parts for count in range(5) for parts in combinations(PARTS, count)]
CHILDREN = ("pose", "activation", "transform")


@pytest.fixture(scope="module")
def device():
    """The device of the kernels: a GPU, or the CPU with Triton's interpreter, which reads the source of the kernels.

    The kernels are imported without type checks. For the interpreter, the operators are registered for the CPU.
    """
    finders = sys.meta_path[:]
    sys.meta_path[:] = [finder for finder in finders if "jaxtyping" not in type(finder).__module__]
    import_module("torchcaps.kernels.gpu.moments")
    sys.meta_path[:] = finders
    if torch.cuda.is_available():
        yield "cuda"
        return
    with pytest.MonkeyPatch.context() as patch:
        library = torch.library.Library("torchcaps", "IMPL")
        with warnings.catch_warnings(action="ignore"):
            for name in ("moments", "moments_backward", "votes_backward", "couplings"):
                library.impl(name, partial(operators.on_gpu, name), "CPU", allow_override=True)
        for module in ("kernels.operator", "routing.votes"):
            patch.setattr(f"torchcaps.{module}.needs_the_dispatcher", lambda arguments: True)
        # The interpreter takes about as long for each program, whatever its size.
        sizes = import_module("torchcaps.kernels.gpu.problem")
        patch.setattr(sizes, "SAMPLES", 4)
        patch.setattr(sizes, "PROGRAMS", 16)
        patch.setattr(sizes.Shape, "block_types", property(lambda shape: 4))
        prepare_once(patch)
        yield "cpu"
        library._destroy()


def prepare_once(patch):
    """Let Triton's interpreter prepare each module only once; preparing it at every call takes half of the time."""
    interpreter, prepared = import_module("triton.runtime.interpreter"), set()

    def call(function, *arguments, **options):
        if id(function.fn.__globals__) not in prepared:
            prepared.add(id(function.fn.__globals__))
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    patch.setattr(interpreter.InterpretedFunction, "__call__", call)


class Fused:
    """The same interface as `Votes`, computed by the operators."""

    def __init__(self, pose, activation, transform, routing_map, competition="parents", none_of_the_above=False):
        self.children = (pose, activation, transform, routing_map.edge_lists.on(pose.device))
        self.detached = [None if x is None else x.detach() for x in self.children]
        self.sites, self.options = routing_map.parent_sites, (competition == "types", none_of_the_above, False)
        self.tokens = operators.open_votes(*self.children, self.sites, 3, *self.options)

    def run(self, agreement, *options):
        size = len(operators.Record._fields)
        tokens, self.tokens = self.tokens[:size], self.tokens[size:]
        even = agreement is None
        layer = *self.detached, self.sites, *kernel_arguments(agreement or Agreement()), even, *self.options
        return operators.moments(tokens, *layer, *options)

    def moments(self, agreement=None, *, variance=True, constant_couplings=False):
        mass, mean, second, *_ = self.run(agreement, variance, constant_couplings, None)
        return Moments(mass, mean, second if variance else None)

    def gaussians(self, agreement=None, *, floor):
        mass, mean, variance, _, _, _, log_volume = self.run(agreement, True, False, floor)
        return Gaussians(mass, mean, variance, log_volume)

    def couplings(self, agreement):
        pose, _, *others = self.detached
        return operators.couplings(pose, *others, self.sites, *kernel_arguments(agreement), *self.options)


def problem(routing_map, parent_types=3, pose="vector", batch=2, child_types=2):
    """Pose, activation, transform and the parts of an agreement, keyed by name, in float64."""
    rows, _, columns = POSES[pose]
    pose, activation, transform, *_ = full_problem(routing_map, parent_types, POSES[pose], child_types, batch)
    parents = (batch, routing_map.parent_sites, parent_types)
    constant, *vectors = (
        torch.randn(parents).double(),
        *(0.5 * torch.randn(*parents, rows, columns).double() for _ in range(3)),
    )
    return dict(zip((*CHILDREN, *PARTS), (0.5 * pose, activation, transform, constant, *vectors), strict=True))


def everything(votes, case, routing_map, rule, device="cpu", dtype=torch.float64, **options):
    """Return the outputs of a rule, and the gradients of a random sum of the outputs for all tensors."""
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


@pytest.mark.parametrize(("pose", "parent_types"), [("vector", 1), ("matrix", 5), ("odd", 5), ("matrix", 17)])
def test_votes_of_every_shape_equal_the_reference(device, pose, parent_types):
    """A batch of five with votes of 4×4 for 17 parent types is larger than one block of the kernels."""
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


@pytest.mark.skipif(_cpu is None and not torch.cuda.is_available(), reason="the operators are not built")
def test_rules_equal_the_reference(device):
    """The rules call `Votes`, as in a layer."""
    tensors, results = full_problem(SMALL, 3, POSES["vector"], child_types=2, batch=2), []
    for backend, where in (("fused", device), ("reference", "cpu")):
        leaves = [x.to(where, copy=True).requires_grad_() for x in tensors]
        pose, activation, transform, *betas = leaves
        routing_map = replace(SMALL, edges=SMALL.edges.to(where))
        by_em = em_routing(Capsules(0.3 * pose, activation), transform, routing_map, *betas, backend=backend)
        by_agreement = dynamic_routing(pose, transform, routing_map, leaky=True, backend=backend)
        (by_em.pose.square().sum() + by_em.activation.sum() + by_agreement.pose[..., 0].sum()).backward()
        outputs = (*by_em, by_agreement.pose)
        results.append([x.detach().cpu() for x in (*outputs, *(leaf.grad for leaf in leaves))])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-8)


@pytest.fixture
def direct(device, monkeypatch):
    """The device of the kernels; the rules call them without PyTorch's dispatcher, also in the interpreter."""
    if device == "cpu":
        monkeypatch.setattr("torchcaps.kernels.CPU_DTYPES", (torch.float32, torch.float64, torch.bfloat16))
        monkeypatch.setattr("torchcaps.routing.votes.needs_the_dispatcher", lambda arguments: False)
        monkeypatch.setattr(operators.moments, "direct", partial(operators.on_gpu, "moments", direct=True))
    return device


def passes_of_em(tensors, device, backend):
    """The parents of EM routing, and the gradients of children and transforms."""
    pose, activation, transform, *betas = (x.to(device) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (pose, activation, transform)]
    routing_map = replace(SMALL, edges=SMALL.edges.to(device))
    parents = em_routing(Capsules(*leaves[:2]), leaves[2], routing_map, *betas, backend=backend)
    found = torch.autograd.grad(parents.pose.double().square().sum() + parents.activation.double().sum(), leaves)
    return [x.detach().double().cpu() for x in (*parents, *found)]


@pytest.mark.skipif(_cpu is None and not torch.cuda.is_available(), reason="the operators are not built")
def test_half_precision_without_the_dispatcher_equals_the_reference(direct):
    tensors = [x.bfloat16() for x in full_problem(SMALL, 3, POSES["vector"], child_types=2, batch=2)]
    for found, right in zip(
        passes_of_em(tensors, direct, "fused"), passes_of_em(tensors, "cpu", "reference"), strict=True
    ):
        assert far(found, right) < 0.02


@pytest.mark.skipif(_cpu is None and not torch.cuda.is_available(), reason="the operators are not built")
def test_negative_views_equal_the_reference(direct):
    tensors = full_problem(SMALL, 3, POSES["vector"], child_types=2, batch=1)
    negative = [torch._neg_view(-x.to(direct)) for x in tensors]
    for found, right in zip(
        passes_of_em(negative, direct, "fused"), passes_of_em(tensors, "cpu", "reference"), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-7, atol=1e-8)


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
    rules = (even, one_pass) if part in CHILDREN else (one_pass,)
    for rule in rules:
        found, right = (
            everything(votes, case, SMALL, rule, where) for votes, where in ((Fused, device), (Reference, "cpu"))
        )
        for one, other in zip(found[:3], right[:3], strict=True):
            assert torch.equal(one.isnan(), other.isnan())


def test_an_empty_batch_has_no_gradients(device):
    case = {name: x if name == "transform" else x[:0] for name, x in problem(SMALL).items()}
    for rule in (even, one_pass):
        found = everything(Fused, case, SMALL, rule, device)
        assert found[0].shape == (0, 2, 3)
        assert not any(x.any() for x in found)


def test_the_padding_of_the_batch_contains_only_zeros(device):
    fused = Fused(*(problem(SMALL)[part].to(device) for part in CHILDREN), SMALL)
    agreement = Agreement(constant=torch.ones(2, 2, 3, device=device).double())
    log_sums = operators.moments(
        [], *fused.detached, fused.sites, *kernel_arguments(agreement), False, *fused.options, False, False, None
    )[4]
    assert log_sums.shape[0] == (padded(2, lanes_of(fused.detached[0])) if fused.options[2] else 2)
    assert not log_sums[2:].any()


def test_sums_over_many_children_equal_the_reference(device):
    routing_map = RoutingMap.shared(16)
    case = problem(routing_map, parent_types=1, child_types=1)
    compare(device, case, routing_map, one_pass)


@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_have_the_shapes_and_strides_that_the_compiler_expects(device, batch):
    def on_meta(x):
        return [on_meta(y) for y in x] if isinstance(x, list) else x.to("meta") if isinstance(x, torch.Tensor) else x

    case, options = problem(SMALL, batch=batch), (False, True, False)
    pose, activation, transform, *agreement = (x.to(device) for x in case.values())
    layer = pose, activation, transform, SMALL.edge_lists.on(pose.device), SMALL.parent_sites
    forward = [], *layer, *agreement, 0.1, 0.5, False, *options, True, False, 0.1
    mass, mean, variance, largest, log_mass, log_sums, volume = operators.on_gpu("moments", *forward)
    nothing, numbers = mean.new_empty(0), torch.tensor([0.1, 0.1, 0.5], dtype=mean.dtype, device=device)
    record = [*agreement, log_sums, nothing, mean, largest, log_mass, variance, mass, mean, variance, volume, numbers]
    calls = {
        "moments": forward,
        "moments_backward": (*layer, record, *options, True),
        "votes_backward": (*layer, record, *options),
        "couplings": (pose, *layer[2:], *agreement, 0.1, 0.5, *options),
    }
    for name, arguments in calls.items():
        found = operators.on_gpu(name, *arguments)
        expected = getattr(torch.ops.torchcaps, name)(*map(on_meta, arguments))
        for one, right in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected)), strict=True):
            assert (one.shape, one.stride(), one.dtype) == (right.shape, right.stride(), right.dtype), name


@pytest.mark.parametrize("batch", [1, 32, 33])
def test_poses_prepared_for_a_gpu_need_no_copy(batch):
    pose = for_kernels(torch.empty(batch, 2, 3, 4, 4, device="meta"))
    assert has_strides(pose, samples_last_strides((sample_stride(batch), 2, 3, 4, 4)))
