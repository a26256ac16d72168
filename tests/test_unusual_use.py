"""Uses of networks, losses and layers that are legitimate but rare: they work, or are refused in one line."""

import math
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp, replace_all_batch_norm_modules_, vmap
from torch.testing._internal.two_tensor import TwoTensor

from problems import full_problem
from test_models import NETWORKS, SMALL
from torchcaps import (
    MODELS,
    BadInput,
    CapsNet,
    Capsules,
    Classifier,
    EMRouting,
    Prediction,
    Preprocessing,
    Routing,
    RoutingMap,
    Rule,
    create_model,
    em_routing,
    inspect,
)
from torchcaps.convolution import Im2colConv2d
from torchcaps.layers import DenseCaps
from torchcaps.losses import LOSSES, margin_loss, reconstruction_loss, spread_loss
from torchcaps.models import Pretrained
from torchcaps.primary import PoseNorm, PrimaryCaps
from torchcaps.routing import ROUTINGS, LayerShape, SelfRouting, UniformRouting
from torchcaps.routing.votes import Agreement, Votes

TINY = {"image_shape": (1, 20, 20), "num_classes": 3, "convolution_channels": 8, "primary_types": 2}
BLANK = torch.zeros(1, 1, 20, 20, dtype=torch.uint8)


def classifier_of(model):
    return Classifier(model, ("ant", "bee", "cat"), (1, 20, 20), Preprocessing())


@pytest.mark.parametrize("use", [lambda c: c.predict(BLANK), lambda c: inspect(c, BLANK[0])])
def test_predictions_leave_each_module_in_its_own_mode(use):
    model = CapsNet(**TINY, stem=True)
    frozen = model.convolution[1].eval()
    use(classifier_of(model))
    assert not frozen.training
    assert all(module.training for module in model.modules() if module is not frozen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_classifier_predicts_in_the_dtype_of_its_network(dtype):
    classifier = classifier_of(CapsNet(**TINY).to(dtype))
    assert classifier.predict(BLANK).scores.isfinite().all()
    found = inspect(classifier, BLANK[0])
    assert found.support.isfinite().all()
    assert found.figure().axes


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_on_the_meta_device_gives_the_shape_of_its_scores(name):
    with torch.device("meta"):
        model = create_model(name, image_shape=(1, 28, 28), **SMALL[name]).eval()
        scores = model(torch.zeros(2, 1, 28, 28)).scores
    assert scores.shape == (2, model.options["num_classes"])


@pytest.mark.parametrize("rule", ROUTINGS)
def test_an_empty_batch_has_gradients_of_zero(rule):
    layer = DenseCaps(6, 4, 8, 3, 16, routing=Routing(rule))
    pose = torch.randn(0, 6, 4, 1, 8, requires_grad=True)
    parents = layer(Capsules(pose, torch.rand(0, 6, 4)))
    found = torch.autograd.grad(parents.pose.sum() + parents.activation.sum(), [pose, layer.transform])
    assert found[0].shape == pose.shape
    assert not found[1].any()


def test_batched_gradients_of_fused_routing_are_refused_and_of_the_reference_computed():
    layer, pose = DenseCaps(6, 4, 8, 3, 16), torch.randn(1, 6, 4, 1, 8)
    call = lambda x: layer(Capsules(x, torch.ones(1, 6, 4))).pose  # noqa: E731
    jacobian = torch.autograd.functional.jacobian
    with pytest.raises(RuntimeError, match="does not support batched gradients: use backend="):
        jacobian(call, pose, vectorize=True)
    layer.routing.backend = "reference"
    torch.testing.assert_close(jacobian(call, pose, vectorize=True), jacobian(call, pose))


@pytest.mark.filterwarnings("ignore")  # torch's quantization is deprecated
def test_a_decoder_runs_as_a_replica_and_quantized():
    model, images = CapsNet(**TINY).eval(), torch.rand(2, 1, 20, 20)
    right = model(images).reconstruction
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    torch.testing.assert_close(quantized(images).reconstruction, right, rtol=0, atol=0.05)
    replica = deepcopy(model)
    for layer in replica.modules():  # as in torch.nn.parallel.replicate
        for name, weight in [*layer._parameters.items()]:
            layer._parameters.pop(name)
            setattr(layer, name, None if weight is None else weight.detach())
    assert torch.equal(replica(images).reconstruction, right)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by torch itself
def test_a_classifier_of_a_compiled_network_is_saved_as_the_plain_network(tmp_path):
    model = CapsNet(**TINY).eval()
    classifier_of(torch.compile(model)).save_pretrained(tmp_path)
    found = Classifier.from_pretrained(tmp_path).predict(BLANK).scores
    assert torch.equal(found, classifier_of(model).predict(BLANK).scores)
    with pytest.raises(BadInput, match="Linear cannot be saved"):
        classifier_of(nn.Linear(2, 2)).save_pretrained(tmp_path / "other")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by torch itself
def test_im2col_convolution_supports_forward_mode_differentiation_and_vmap():
    layer, images = Im2colConv2d(2, 3, 3, stride=2, padding=1), torch.randn(4, 2, 7, 7)
    plain = nn.Conv2d(2, 3, 3, stride=2, padding=1)
    plain.load_state_dict(layer.state_dict())
    change = torch.randn_like(images)
    torch.testing.assert_close(jvp(layer, (images,), (change,))[1], jvp(plain, (images,), (change,))[1])
    torch.testing.assert_close(vmap(lambda x: layer(x[None])[0])(images), plain(images))


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["dynamic", pytest.param("em", marks=pytest.mark.slow)])
def test_compiled_functions_support_the_transforms_of_torch_func(rule, backend, python):
    """Runs in its own process, because torch.compile cannot trace the run-time type checks."""
    code = f"""
from functools import partial
import torch
from torch.func import grad, jvp, vmap
from torchcaps import Capsules, DenseCaps

activation, pose, change = torch.rand(2, 6, 4), torch.randn(2, 6, 4, 1, 8), torch.randn(2, 6, 4, 1, 8)
layer = DenseCaps(6, 4, 8, 3, 16, routing={rule!r}).eval()
run = lambda pose: layer(Capsules(pose, activation)).activation
derivative = lambda function: lambda pose: jvp(function, (pose,), (change,))[1]
gradient, shifted = grad(lambda pose: run(pose).sum()), vmap(lambda shift: run(pose + shift).sum())
expected, shifts = derivative(run)(pose), torch.linspace(0, 1, 3)
assert expected.norm() > 0
compiled = partial(torch.compile, backend={backend!r}, fullgraph=True)
torch.testing.assert_close(compiled(derivative(run))(pose), expected)
torch.testing.assert_close(derivative(torch.compile(run, backend={backend!r}))(pose), expected)
torch.testing.assert_close(compiled(gradient)(pose), gradient(pose))
torch.testing.assert_close(compiled(shifted)(shifts), shifted(shifts))
"""
    done = python(["-c", code])
    assert done.returncode == 0, done.stderr


def test_layers_with_batch_norm_run_without_running_statistics():
    capsules = replace_all_batch_norm_modules_(PrimaryCaps(1, 4, 8, 5, normalise="affine"))
    norm = replace_all_batch_norm_modules_(PoseNorm(4, (1, 8)))
    found = vmap(lambda image: norm(capsules(image[None])).pose, randomness="error")(torch.randn(3, 1, 9, 9))
    assert found.isfinite().all()


def test_self_routing_runs_under_vmap_over_its_own_parameters():
    rule, children = SelfRouting(6, 4, 3, (1, 8)), Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
    transform, routing_map = torch.randn(6, 4, 3, 8, 8), RoutingMap.dense(6)
    sets = [{name: torch.randn_like(x) for name, x in rule.named_parameters()} for _ in range(2)]
    stacked = {name: torch.stack([one[name] for one in sets]) for name in sets[0]}
    call = lambda given: functional_call(rule, given, (children, transform, routing_map)).pose  # noqa: E731
    torch.testing.assert_close(vmap(call)(stacked), torch.stack([call(one) for one in sets]))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    "call",
    [
        lambda: margin_loss(torch.rand(4, 3), torch.tensor([1])),
        lambda: margin_loss(torch.rand(4, 3), torch.rand(1, 3)),
        lambda: margin_loss(torch.rand(4, 3), torch.zeros(4).long(), sample_weights=torch.ones(4, 1)),
        lambda: spread_loss(torch.rand(4, 3), torch.tensor([1])),
        lambda: reconstruction_loss(torch.rand(2, 1, 4, 4), torch.rand(2, 3, 4, 4)),
    ],
)
def test_a_loss_refuses_shapes_that_would_be_broadcast(call):
    message = r"must fit the shape \[.*\] of .*; got a float|target must be integers \[4\], .*; got an int64 ten"
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_accept_every_integer_dtype_and_keep_double_precision(name):
    scores, target = torch.rand(4, 3, dtype=torch.double, requires_grad=True), torch.tensor([0, 1, 2, 0])
    right = LOSSES[name](scores, target)
    assert right.dtype == torch.double
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(LOSSES[name](scores, target.to(dtype)), right)
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, target), scores)
    assert LOSSES[name](torch.zeros(4, 3, dtype=torch.half), target).isfinite()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_pass_without_gradients_does_not_remove_the_gradients_of_later_passes(backend):
    leaves = [x.requires_grad_() for x in full_problem(RoutingMap.conv((3, 3), 2), 3, (2, 2, 3))[:3]]
    gradients = []
    for context in (torch.no_grad, nullcontext):
        votes = Votes(*leaves, RoutingMap.conv((3, 3), 2), passes=2, backend=backend)
        with context():
            first = votes.moments().mean.detach()
        loss = votes.moments(Agreement(linear=first)).mean.square().sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*gradients)


def test_a_tensor_subclass_in_a_parameter_of_a_rule_keeps_all_gradients():
    pose, activation, transform, *_ = full_problem(RoutingMap.conv((3, 3), 2), 3, (2, 2, 3))
    leaves, beta = [x.requires_grad_() for x in (pose, activation, transform)], torch.ones(3).double()
    gradients = []
    for beta_u in (beta, TwoTensor(beta, beta.clone())):
        parents = em_routing(
            Capsules(*leaves[:2]), leaves[2], RoutingMap.conv((3, 3), 2), beta_u, torch.zeros(3).double()
        )
        gradients.append(torch.autograd.grad(parents.pose.square().sum(), leaves))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["em", "dynamic", "attention", "self_routing"])
def test_an_exported_rule_computes_in_float32_under_autocast(name):
    routing_map = RoutingMap.conv((3, 3), 2)
    children = Capsules(torch.randn(2, 9, 2, 2, 2), torch.rand(2, 9, 2))
    rule = ROUTINGS[name].for_layer(LayerShape(4, 2, 3, (2, 2), (2, 2))).eval()
    rule.backend = "reference"
    transform = torch.randn(4, 2, 3, 2, 2)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rule = rule

        def forward(self, pose, activation, transform):
            return tuple(self.rule(Capsules(pose, activation), transform, routing_map))

    exported = torch.export.export(Layer(), (*children, transform)).module()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(exported(*children, transform), tuple(rule(children, transform, routing_map)))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_votes_compute_in_float32_under_autocast(backend):
    pose, activation, transform, *_ = (x.float() for x in full_problem(RoutingMap.conv((3, 3), 2), 3, (2, 2, 3)))
    votes = Votes(pose, activation, transform, RoutingMap.conv((3, 3), 2), backend=backend)
    plain = votes.moments()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(votes.moments(), plain)
        assert votes.materialised().dtype == torch.float32


def test_a_pose_with_the_negative_bit_is_read_with_its_sign():
    pose, activation, transform, *_ = full_problem(RoutingMap.conv((3, 3), 2), 3, (2, 2, 3))
    votes, right = (
        Votes(x, activation, transform, RoutingMap.conv((3, 3), 2)).moments() for x in (torch._neg_view(pose), -pose)
    )
    torch.testing.assert_close(votes, right)


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("rule", [*ROUTINGS, Routing("em", parent_activation="mixing")])
def test_nan_in_a_pose_remains_nan_in_the_activations(rule, backend):
    layer = DenseCaps(6, 4, 8, parent_types=3, parent_pose_size=4, routing=rule).eval()
    layer.routing.backend = backend
    children = Capsules(torch.randn(1, 6, 4, 1, 8), torch.rand(1, 6, 4))
    children.pose[0, 0, 0, 0, 0] = children.activation[0, 0, 0] = math.nan
    assert layer(children).activation.isnan().any()


def test_an_option_of_em_routing_can_be_changed_during_training():
    children, transform = Capsules(torch.randn(2, 9, 4, 4, 4), torch.rand(2, 9, 4)), torch.randn(1, 4, 6, 4, 4)
    rule, changed = EMRouting(6, inverse_temperature=0.1), EMRouting(6)
    changed.inverse_temperature = 0.1
    assert changed.saved_options == rule.saved_options
    found = [one(children, transform, RoutingMap.shared(9)).activation for one in (rule, changed)]
    assert torch.equal(*found)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", ["cross_entropy", "activation_cross_entropy", "activation_logit_cross_entropy"])
def test_a_target_that_is_not_a_class_index_is_refused(name):
    scores = torch.rand(2, 3)
    for target in (torch.tensor([0.9, 1.7]), torch.tensor([[0, 1, 0], [1, 0, 0]]), torch.tensor([1])):
        with pytest.raises(ValueError, match=r"target must be integers \[2\], one class index per sample"):
            LOSSES[name](scores, target)
    with pytest.raises(ValueError, match="target must be from 0 to 2 for 3 classes; got -100 to 0"):
        LOSSES[name](scores, torch.tensor([0, -100]))


@pytest.mark.usefixtures("untyped")
def test_one_label_for_several_images_is_refused():
    for labels, message in ((torch.tensor([1]), ""), (torch.eye(3), r".* \[3, 3\]: .*labels\.argmax\(dim=1\)")):
        with pytest.raises(ValueError, match=rf"labels must be integers \[3\]{message}"):
            CapsNet(**TINY)(torch.rand(3, 1, 20, 20), labels)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("options", [{"stride": (1, 2)}, {"padding": (0, 1)}, {"padding": -1}])
def test_im2col_refuses_what_it_does_not_compute(options):
    with pytest.raises(ValueError, match="must be an integer"):
        Im2colConv2d(3, 4, 3, **options)


@pytest.mark.usefixtures("untyped")
def test_a_classifier_checks_its_class_names():
    with pytest.raises(BadInput, match="class_names must be strings; got 0"):
        Classifier(CapsNet(**TINY), (0, 1, 2), (1, 20, 20), Preprocessing())
    with pytest.raises(BadInput, match="class_names has 2 names, but the model has 3 classes"):
        Classifier(CapsNet(**TINY), ("ant", "bee"), (1, 20, 20), Preprocessing())
    assert Classifier(CapsNet(**TINY), ("a", "b", "c"), [1, 20, 20], Preprocessing()).predict(BLANK)


class Gain(UniformRouting):
    def __init__(self, squash_form="sabour", gain=1.0):
        super().__init__(squash_form)
        self.gain = gain


def test_a_rule_that_stores_its_arguments_is_saved(monkeypatch, tmp_path):
    monkeypatch.setitem(ROUTINGS, "gain", Gain)
    CapsNet(**TINY, routing=Routing("gain", gain=3.0)).save_pretrained(tmp_path)
    assert CapsNet.from_pretrained(tmp_path).class_capsules.routing.gain == 3.0


def test_a_rule_with_other_options_than_it_saves_is_refused(monkeypatch, tmp_path):
    class Renamed(UniformRouting):
        def __init__(self, amount=1.0):
            super().__init__()
            self.gain = amount

    class Slow(UniformRouting):
        @property
        def saved_options(self):
            return {"squash_form": self.squash_form}

    class Slower(Slow):
        def __init__(self, slowness=1.0):
            super().__init__()
            self.slowness = slowness

    for rule, problem in (
        (Renamed, "does not store the argument 'amount' of its constructor"),
        (Slower, "inherits saved_options from Slow but has other constructor arguments"),
    ):
        monkeypatch.setitem(ROUTINGS, "own", rule)
        with pytest.raises(BadInput, match=problem):
            CapsNet(**TINY, routing="own").save_pretrained(tmp_path)


def test_parameters_that_are_not_trained_are_still_not_trained_after_loading(tmp_path):
    model = create_model("attention-capsnet", image_shape=(1, 28, 28), **SMALL["attention-capsnet"])
    model.save_pretrained(tmp_path)
    frozen = [
        [name for name, one in of.named_parameters() if not one.requires_grad]
        for of in (model, type(model).from_pretrained(tmp_path))
    ]
    assert frozen[0] == frozen[1] != []


class Scaled(Pretrained, nn.Module):
    """A network with a constant and with a value that is read while the network is created."""

    def __init__(self, image_shape: tuple[int, int, int] = (1, 20, 20), num_classes: int = 3) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.scale = torch.tensor(2.0)
        self.linear = nn.Linear(400, num_classes)

    def forward(self, images, labels=None):
        return Prediction(self.scale * self.linear(images.flatten(1)))


def test_a_network_of_ones_own_with_constants_can_be_loaded(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "scaled", Scaled)
    classifier = classifier_of(Scaled())
    classifier.save_pretrained(tmp_path)
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict(BLANK).scores, classifier.predict(BLANK).scores)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_the_couplings_of_passes_on_detached_votes_are_returned(backend):
    class Detached(Rule):
        def route(self, votes):
            fixed = votes.detach()
            found = fixed.moments()
            found = fixed.moments(Agreement(linear=5 * found.mean))
            return Capsules(found.mean, found.mass)

    torch.manual_seed(0)
    children, rule = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4)), Detached()
    rule.backend = backend
    parents, couplings = rule(children, torch.randn(6, 4, 3, 8, 4), RoutingMap.dense(6), return_couplings=True)
    mass = torch.einsum("bjec,bec->bj", couplings, children.activation)
    torch.testing.assert_close(mass, parents.activation[:, 0])
    assert couplings.std() > 0.1
