"""The fused operators: their registration in PyTorch, torch.compile, torch.export, and inputs that they refuse."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from problems import MAPS, full_problem
from torchcaps import Agreement, Capsules, MatrixCapsNet, Routing, RoutingMap, Votes, dynamic_routing, em_routing
from torchcaps.kernels import _cpu
from torchcaps.kernels import moments as operators

pytestmark = pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built")
OF_VOTES = ("moments", "moments_backward", "votes_backward", "couplings")
NAMES = ("open_votes", *OF_VOTES, "moments with a floor", "moments_backward with a floor")


def calls():
    """Arguments of every operator, keyed by its name. 16 samples fill a vector: kernels do not write unused lanes."""
    pose, activation, transform, *_ = (x.float() for x in full_problem(MAPS["conv"], 5, (4, 4, 4), batch=16))
    layer = (pose, activation, transform, MAPS["conv"].edge_lists.values, MAPS["conv"].parent_sites)
    scalar, vector = (*pose.shape[:1], MAPS["conv"].parent_sites, 5), (4, 4)
    agreement = [torch.randn(scalar), *(0.1 * torch.randn(*scalar, *vector) for _ in range(3))]
    options, plain = (False, True, False), (0.0, 0.0)
    tokens = operators.open_votes(*layer, 1, *options)
    mass, mean, variance, largest, log_mass, log_sums, *_ = operators.moments(
        [], *layer, *agreement, *plain, False, *options, True, False, None
    )
    found, nothing = (mean, largest, log_mass, variance), torch.empty(0)
    gradients = [torch.randn_like(x) for x in (mass, mean, variance)]
    record = [*agreement, log_sums, nothing, *found, *gradients, nothing, nothing]
    coupling_grads, *_ = operators.moments_backward(*layer, record, *options, True)
    variances, numbers = (*agreement[:2], agreement[2].square(), agreement[3]), (0.1, 0.2, 0.5)
    record_with_variances = [*variances, *record[4:-2], torch.randn_like(mass), torch.tensor(numbers)]
    return {
        "open_votes": (*layer, 2, *options),
        "moments": (tokens, *layer, *agreement, *plain, False, *options, True, False, None),
        "moments_backward": (*layer, record, *options, True),
        "votes_backward": (*layer, [*record[:5], coupling_grads, *record[6:]], *options),
        "couplings": (pose, *layer[2:], *agreement, *plain, *options),
        "moments with a floor": (tokens, *layer, *variances, *numbers[1:], False, *options, True, False, numbers[0]),
        "moments_backward with a floor": (*layer, record_with_variances, *options, True),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of opcheck in torch 2.14
@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_opcheck_of_pytorch(name):
    def leaf(x):
        differentiable = (
            name.split()[0] in ("open_votes", "moments") and isinstance(x, torch.Tensor) and x.is_floating_point()
        )
        return x.detach().clone().requires_grad_() if differentiable else x

    arguments = [[leaf(y) for y in x] if isinstance(x, list) else leaf(x) for x in calls()[name]]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.torchcaps, name.split()[0]).default, arguments, test_utils=tests)


@pytest.mark.parametrize("name", OF_VOTES)
def test_edges_out_of_range_are_refused(name):
    arguments = calls()[name]
    place = next(i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and x.dtype == torch.int32)
    lists = arguments[place]
    for wrong, message in (
        (lists + 1, "child site, parent site or transform that does not exist"),
        (lists[:-1], "edge_lists must be .* to fit the children and the routing map; got"),
        (lists.to("meta"), "pose is on cpu and edges on meta: move both to one device"),
    ):
        if name == "votes_backward" and wrong.is_meta:
            continue  # is only called with arguments that `moments` has checked
        with pytest.raises(ValueError, match=message):
            getattr(torch.ops.torchcaps, name)(*arguments[:place], wrong, *arguments[place + 1 :])


@pytest.mark.parametrize("name", OF_VOTES)
def test_kernels_compiled_for_another_version_are_refused(name, monkeypatch):
    arguments, real = calls()[name], operators.addresses
    monkeypatch.setattr(operators, "addresses", lambda *given: [*real(*given), 0])
    with pytest.raises(ValueError, match="belong to another version of the Python files: install torchcaps again"):
        getattr(operators, name)(*arguments)


def test_records_of_passes_with_a_wrong_number_or_shape_of_tensors_are_refused():
    *arguments, records, types, none_of_the_above, by_sample = calls()["votes_backward"]
    for wrong, message in (
        (records[:-1], "must be a multiple of 15; got 14"),
        ([records[1], *records[1:]], "constant must be"),
    ):
        with pytest.raises(ValueError, match=message):
            operators.votes_backward(*arguments, wrong, types, none_of_the_above, by_sample)


@pytest.mark.usefixtures("untyped")
def test_inputs_that_the_kernels_do_not_support_are_refused_or_run_on_the_reference():
    case = full_problem(MAPS["dense"], 4, (5, 2, 13))
    with pytest.raises(
        ValueError, match=r'"fused" does not support this call \(there are no fused kernels for poses of more than 64'
    ):
        Votes(*case[:3], MAPS["dense"], backend="fused")
    assert Votes(*case[:3], MAPS["dense"]).moments().mean.shape == (3, 1, 4, 5, 13)
    with pytest.raises(ValueError, match="backend must be one of auto, reference, fused; got 'fast'"):
        Votes(*case[:3], MAPS["dense"], backend="fast")
    with pytest.raises(ValueError, match=r"'linear' in the agreement must have shape \[3, 1, 4, 5, 13\]"):
        Votes(*case[:3], MAPS["dense"]).moments(Agreement(linear=torch.zeros(3, 1, 4, 5)))


def test_a_warning_says_that_large_votes_are_stored():
    pose, transform = torch.zeros(1, 64, 4, 9, 9).expand(2048, -1, -1, -1, -1), torch.zeros(64, 4, 2, 9, 9)
    routing_map = RoutingMap.dense(64)
    Votes(pose, None, transform, routing_map, backend="reference")
    with pytest.warns(UserWarning, match="poses of more than 64 numbers: routing stores all votes, which needs much"):
        Votes(pose, None, transform, routing_map)
    Votes(pose[:1536], None, transform, routing_map)
    torch.func.vmap(lambda part: (Votes(part, None, transform, routing_map), part)[1])(pose[None])  # needs no warning


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_models_compile_to_one_graph_that_calls_the_operators(backend, python):
    """Runs in its own process, because torch.compile cannot trace the run-time type checks."""
    script = """
import sys
import torch
from torchcaps import CapsNet, EfficientCapsNet, MatrixCapsNet, Routing, margin_loss

torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = False
device = "cuda" if torch.cuda.is_available() else "cpu"
em, dynamic = (Routing(name, backend="fused") for name in ("em", "dynamic"))
models = [
    MatrixCapsNet((2, 20, 20), 3, widths=(4, 2, 3, 3), routing=em),
    CapsNet((2, 20, 20), 3, convolution_channels=8, primary_types=2, decoder=False, routing=dynamic),
]
if device == "cuda" and sys.argv[1] == "inductor":  # on a CPU, its gradients are wrong: pytorch/pytorch#185702
    models.append(EfficientCapsNet((2, 28, 28), 3, decoder=False))
for model in models:
    gradients, shape = [], (32, *model.options["image_shape"])
    images, labels = torch.rand(shape, device=device), torch.randint(0, 3, (32,), device=device)
    for each in (model.to(device), torch.compile(model, fullgraph=True, backend=sys.argv[1])):
        model.zero_grad()
        margin_loss(each(images).scores, labels).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found, right in zip(*gradients, strict=True):
        if sys.argv[1] == "inductor":  # it computes sums in another order
            assert (found - right).norm() < 0.003 * right.norm()
        else:
            torch.testing.assert_close(found, right)
"""
    warnings = ["-W", "error"] if backend == "aot_eager" else []
    done = python([*warnings, "-c", script, backend])
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("untyped")
def test_a_model_with_the_reference_backend_can_be_exported():
    model = MatrixCapsNet((2, 20, 20), 3, widths=(4, 2, 3, 3), routing=Routing("em", backend="reference"))
    images = torch.rand(2, 2, 20, 20)
    exported = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(exported(images).scores, model(images).scores)


@pytest.mark.parametrize("dispatched", [{0}, {1}, {0, 1}])
def test_passes_through_the_dispatcher_and_direct_passes_have_the_same_gradients(dispatched):
    gradients, problem = [], full_problem(MAPS["conv"], 5, (4, 4, 4))[:3]
    for through in (set(), dispatched):
        leaves = [x.detach().clone().requires_grad_() for x in problem]
        votes, agreement, loss = Votes(*leaves, MAPS["conv"], passes=2), None, 0
        for number in range(2):
            with FlopCounterMode(display=False) if number in through else nullcontext():
                found = votes.moments(agreement)
            agreement = Agreement(centre=found.mean, quadratic=0.1 / (1 + found.variance))
            loss = loss + found.mean.square().sum() + found.variance.sum() + found.mass.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([x.grad for x in leaves])
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("untyped")
def test_numpy_booleans_are_accepted():
    pose, transform = torch.randn(2, 6, 4, 1, 8, requires_grad=True), torch.randn(6, 4, 10, 8, 16)
    found, expected = (dynamic_routing(pose, transform, RoutingMap.dense(6), leaky=leaky) for leaky in (np.True_, True))
    assert torch.equal(found.pose, expected.pose)


class ParameterOfAnotherClass(torch.nn.Parameter):
    pass


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("options", [{}, {"variance_floor": np.float64(1e-3)}, {"iterations": np.int64(2)}])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, ParameterOfAnotherClass])
def test_numpy_numbers_and_subclasses_of_parameter_have_the_gradients_of_the_reference(options, kind):
    pose, activation, transform, *betas = full_problem(MAPS["conv"], 5, (4, 4, 4))
    gradients = []
    for backend in ("fused", "reference"):
        leaves = [kind(x.detach().clone()) for x in (transform, *betas)]
        em_routing(
            Capsules(pose, activation), leaves[0], MAPS["conv"], *leaves[1:], backend=backend, **options
        ).activation.square().sum().backward()
        gradients.append([x.grad for x in leaves])
    torch.testing.assert_close(*gradients)


def test_hooks_that_replace_gradients_between_the_operators_are_refused():
    pose = torch.randn(2, 4, 3, 1, 3, requires_grad=True)
    moments = Votes(pose, None, torch.randn(4, 3, 2, 3, 4), RoutingMap.dense(4)).moments()
    of_votes = next(function for function, _ in moments.mean.grad_fn.next_functions if function is not None)
    hook = of_votes.register_prehook(lambda gradients: tuple(None if x is None else x * 1 for x in gradients))
    with pytest.raises(RuntimeError, match='let the hook return None for empty gradients, or use backend="reference"'):
        moments.mean.sum().backward(retain_graph=True)
    hook.remove()
    moments.mean.sum().backward()
    assert pose.grad is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torch_func_and_forward_mode_derivatives_run_on_the_reference():
    pose, activation, transform, *betas = full_problem(MAPS["conv"], 5, (4, 4, 4))

    def routed(pose, backend="auto"):
        return em_routing(Capsules(pose, activation), transform, MAPS["conv"], *betas, backend=backend).pose.sum()

    slope = torch.func.grad(routed)(pose)
    tangent = torch.func.jvp(routed, (pose,), (torch.ones_like(pose),))[1]
    torch.testing.assert_close(tangent, slope.sum())
    with forward_ad.dual_level():
        dual = routed(forward_ad.make_dual(pose, torch.ones_like(pose)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)
    pose.requires_grad_()
    (once,) = torch.autograd.grad(routed(pose, "fused"), pose, create_graph=True)
    torch.testing.assert_close(once, slope)
    with pytest.raises(RuntimeError, match=r'differentiated only once: .* set backend to "reference"'):
        once.sum().backward()
