"""Models work with PyTorch's tools: the meta device, torch.compile, torch.export, ONNX, torch.func, half precision."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from problems import MAPS, full_problem
from test_models import NETWORKS
from torchcaps import (
    ROUTINGS,
    CapsNet,
    Capsules,
    ConvCaps,
    Prediction,
    Routing,
    Rule,
    SharedCaps,
    create_model,
    dynamic_routing,
    em_routing,
    margin_loss,
    reconstruction_loss,
)
from torchcaps.kernels import _cpu
from torchcaps.routing import LayerShape, routing_options

SMALL = {
    "capsnet": {"convolution_channels": 4, "primary_types": 2, "class_pose_size": 4},
    "baseline-cnn": {"channels": (4, 4, 4), "hidden_sizes": (8, 8)},
    "pooled-capsnet": {"class_pose_size": 4},
    "matrix-capsnet": {"widths": (4, 2, 3, 3), "routing": Routing("em", iterations=2)},
    "matrix-baseline-cnn": {"channels": (4, 4), "hidden_size": 8},
    "self-routing-capsnet": {"width": 4, "types": 4, "pose_size": 8, "capsule_layers": 1},
    "attention-capsnet": {"channels": 8, "types": 4},
    "generative-capsnet": {"channels": 8, "parts": 4, "padding": 1},
    "residual-capsnet": {"widths": (4, 8), "types": 2},
    "timm-capsnet": {"backbone": "test_resnet", "types": 2},
}
EXPORTED = [
    name if name in ("capsnet", "matrix-capsnet", "pooled-cnn") else pytest.param(name, marks=pytest.mark.slow)
    for name in NETWORKS
]
"""An export takes seconds, so only three networks are exported in the fast tests."""
built = pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built")


def small(name):
    return create_model(name, image_shape=(1, 18, 18), num_classes=3, **SMALL.get(name, {})).eval()


def images(batch=2):
    return torch.rand(batch, 1, 18, 18)


def same(found, right):
    """Return whether the scores, capsules and reconstructions of two predictions are bit-identical."""
    leaves = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(right), strict=True)
    return all(one is other or torch.equal(one, other) for one, other in leaves)


def made_on_meta_and_assigned(name, weights):
    with torch.device("meta"):
        model = small(name)
    model.load_state_dict(weights, assign=True)
    return model


def made_on_meta_and_emptied(name, weights):
    with torch.device("meta"):
        model = small(name)
    model.to_empty(device="cpu").load_state_dict(weights)
    return model


def moved_to_meta_and_back(name, weights):
    model = small(name).to("meta")
    model.load_state_dict(weights, assign=True)
    return model


@pytest.mark.parametrize("way", [made_on_meta_and_assigned, made_on_meta_and_emptied, moved_to_meta_and_back])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_that_was_on_the_meta_device_gives_bit_identical_predictions(name, way):
    model, batch = small(name), images()
    again = way(name, model.state_dict()).eval()
    assert same(again(batch), model(batch))
    assert same(again(batch), model(batch))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_copied_or_pickled_model_gives_bit_identical_predictions(name):
    model, batch = small(name), images()
    model(batch)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(again(batch), model(batch))
    of_norms = {"running_mean", "running_var", "num_batches_tracked"}
    of_images = {"mean", "std"} if name == "timm-capsnet" else set()
    assert {path.rpartition(".")[2] for path, _ in model.named_buffers()} <= of_norms | of_images


def test_shared_caps_creates_its_routing_map_once_per_number_of_children():
    layer = SharedCaps(3, 4, 5)
    children = Capsules(torch.randn(2, 6, 2, 1, 3), torch.rand(2, 6, 2))
    with torch.inference_mode():
        layer(children)
    first = layer._map
    layer(children).activation.sum().backward()
    assert layer._map is first
    layer(Capsules(children.pose[:, :5], children.activation[:, :5]))
    assert layer._map.child_sites == 10


OTHERS = [name for name in NETWORKS if name != "capsnet"]


@pytest.mark.parametrize(
    "names", [["capsnet"], pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["capsnet", "others"]
)
def test_models_compile_to_one_graph_for_any_batch_size(names, python):
    """Runs in its own process, because torch.compile cannot trace the run-time type checks."""
    script = f"""
import torch
from torchcaps import Routing, create_model

torch.manual_seed(0)
for name, options in { ({name: SMALL.get(name, {}) for name in names})!r}.items():
    torch._dynamo.reset()
    model = create_model(name, image_shape=(1, 18, 18), num_classes=3, **options).eval()
    for weights in model.parameters():
        if not weights.any():  # scores would be equal
            torch.nn.init.normal_(weights, std=0.1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5):
        images, labels = torch.rand(batch, 1, 18, 18, requires_grad=True), torch.arange(batch) % 3
        leaves, found = [images, *(weights for weights in model.parameters() if weights.requires_grad)], []
        for run in (model, compiled):
            scores, _, drawn = run(images, labels)
            loss = scores.square().sum() + (0 if drawn is None else drawn.square().sum())
            found.append([scores, *torch.autograd.grad(loss, leaves, allow_unused=True)])
        assert found[0][1].any(), name
        for right, one in zip(*found, strict=True):
            assert (right is None) == (one is None)
            if right is not None:
                torch.testing.assert_close(one, right, rtol=1e-3, atol=1e-4)
"""
    done = python(["-W", "error", "-c", script])
    assert done.returncode == 0, done.stderr


def varied(name):
    """Create a small model and replace weights that are all zero by random ones, so that the scores differ."""
    model = small(name)
    for weights in model.parameters():
        if not weights.any():
            torch.nn.init.normal_(weights, std=0.1)
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_channels_last_format_gives_the_same_scores(name):
    model, batch = varied(name), images()
    right = model(batch).scores
    strides = {path: weights.stride() for path, weights in model.named_parameters() if weights.ndim == 5}
    assert bool(strides) == ("capsnet" in name)
    model.to(memory_format=torch.channels_last)
    assert strides == {path: weights.stride() for path, weights in model.named_parameters() if weights.ndim == 5}
    convolutions = [module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert all(weights.is_contiguous(memory_format=torch.channels_last) for weights in convolutions)
    found = model(batch.to(memory_format=torch.channels_last)).scores
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    found.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch.func itself
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_double_precision_never_rounds_to_single_precision(name):
    """The derivative in a random direction equals a finite difference, to more digits than single precision has."""
    model, batch = varied(name).double(), images().double()
    for module in model.modules():
        if isinstance(module, Rule):
            module.backend = "reference"
    direction = torch.randn_like(batch)

    def scores(images):
        return model(images).scores

    found, change = torch.func.jvp(scores, (batch,), (direction,))
    assert found.dtype == torch.float64
    assert change.abs().max() > 1e-6
    differences = (scores(batch + 1e-7 * direction) - scores(batch - 1e-7 * direction)) / 2e-7
    torch.testing.assert_close(change, differences, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_has_finite_gradients_under_autocast(name):
    model, batch = varied(name), images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(batch).scores
    assert scores.dtype == torch.float32
    assert 0 < (scores - model(batch).scores).abs().max() < 0.05
    scores.sum().backward()
    assert all(torch.isfinite(weights.grad).all() for weights in model.parameters() if weights.grad is not None)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_give_finite_predictions(name, dtype):
    model = small(name)
    exact = model(images := torch.rand(2, 1, 18, 18))
    prediction = model.to(dtype)(images.to(dtype))
    for part in torch.utils._pytree.tree_leaves(prediction):
        assert part is None or torch.isfinite(part).all()
    assert (prediction.scores.float() - exact.scores).abs().max() < 0.05


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_of_an_image_does_not_depend_on_its_batch(name):
    """This includes a batch of one: for some strides, BatchNorm of torch 2.13 then computes wrong gradients on CPUs."""
    model, batch = varied(name).double(), images(3).double().requires_grad_()
    (together,) = torch.autograd.grad(model(batch).scores.square().sum(), batch)
    for index in range(3):
        one = batch[index : index + 1].detach().requires_grad_()
        (alone,) = torch.autograd.grad(model(one).scores.square().sum(), one)
        torch.testing.assert_close(alone[0], together[index], rtol=1e-6, atol=1e-9 * together.abs().max().item())


@pytest.mark.parametrize("loss", ["margin", "spread"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.usefixtures("untyped")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch.func itself
def test_torch_func_computes_the_gradients_of_each_sample(name, loss):
    from torchcaps.losses import LOSSES

    model = small(name)
    weights, batch, labels = dict(model.named_parameters()), images(3), torch.tensor([2, 0, 1])

    def loss_of_one(weights, image, label):
        prediction = functional_call(model, weights, (image[None], label[None]))
        drawn = prediction.reconstruction
        drawing = 0 if drawn is None else 0.01 * reconstruction_loss(drawn, image[None])
        return LOSSES[loss](prediction.scores, label[None]) + drawing

    each = vmap(partial(grad(loss_of_one), weights))(batch, labels)
    for sample in range(3):
        alone = grad(loss_of_one)(weights, batch[sample], labels[sample])
        for found, right in zip(each.values(), alone.values(), strict=True):
            torch.testing.assert_close(found[sample], right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("rule", ROUTINGS)
def test_layers_with_activation_checkpointing_have_the_same_gradients(rule, backend):
    if backend == "fused" and _cpu is None:
        pytest.skip("the fused kernels are not built")
    options = {"backend": backend} if "backend" in routing_options(rule) else {}
    layer = ConvCaps((3, 3), 2, 3, kernel_size=2, routing=Routing(rule, **options))
    children = Capsules(torch.randn(2, 9, 2, 4, 4, requires_grad=True), torch.rand(2, 9, 2))
    gradients = []
    for run in (layer, lambda given: checkpoint(layer, given, use_reentrant=False)):
        parents = run(children)
        leaves = (children.pose, *layer.parameters())
        loss = parents.pose.square().sum() + parents.activation.sum()
        gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    assert gradients[0][0].any()
    assert same(*gradients)


def counted(rule, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    with FlopCounterMode(display=False) as forward:
        parents = rule(*leaves)
    with FlopCounterMode(display=False) as backward:
        (parents.pose.sum() + parents.activation.sum()).backward()
    return forward.get_total_flops(), backward.get_total_flops()


@built
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("rule", ["em", "dynamic"])
@pytest.mark.parametrize("routing_map", ["dense", "conv", "irregular"])
def test_fused_operators_report_about_as_many_flops_as_the_reference(rule, routing_map, iterations):
    pose, activation, transform, *betas = full_problem(MAPS[routing_map], 10, (4, 4, 4), child_types=8)

    def em(backend, pose, transform, activation, *betas):
        children, options = Capsules(pose, activation), {"iterations": iterations, "backend": backend}
        return em_routing(children, transform, MAPS[routing_map], *betas, **options)

    def dynamic(backend, pose, transform):
        return dynamic_routing(pose, transform, MAPS[routing_map], iterations=iterations, backend=backend)

    run, leaves = (em, (pose, transform, activation, *betas)) if rule == "em" else (dynamic, (pose, transform))
    fused, reference = (counted(partial(run, backend), leaves) for backend in ("fused", "reference"))
    assert fused == pytest.approx(reference, rel=0.1)


@built
def test_fused_self_routing_reports_the_flops_of_the_reference_without_the_votes():
    """See the docstring of `torchcaps.kernels.flops`."""
    pose, activation, transform, *_ = full_problem(MAPS["conv"], 10, (4, 4, 4), child_types=8)
    rule = ROUTINGS["self_routing"].for_layer(LayerShape(*transform.shape[:3], pose.shape[3:], (4, 4)))

    def run(backend, pose, transform, activation):
        rule.backend = backend
        return rule(Capsules(pose, activation), transform, MAPS["conv"])

    fused, reference = (counted(partial(run, name), (pose, transform, activation)) for name in ("fused", "reference"))
    votes = 2 * pose.shape[0] * len(MAPS["conv"].edges) * 4 * transform.shape[1:3].numel() * 4 * 4
    assert (fused[0] + votes, fused[1]) == reference


def has_fused(program):
    """Return whether a program contains a fused operator, also in the subgraphs of its autocast regions."""
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return any("torchcaps" in str(node.target) for graph in graphs for node in graph.nodes)


@built
@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", EXPORTED)
def test_a_saved_exported_program_gives_the_same_prediction_for_any_batch_size(name):
    model = small(name)
    program = torch.export.export(model, (images(),), dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
    assert has_fused(program) == ("capsnet" in name and name != "pooled-capsnet")  # poses of 128 numbers are too large
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for batch in (1, 5):
        found = again(given := images(batch))
        assert type(found) is Prediction
        assert found.capsules is None or type(found.capsules) is Capsules
        torch.testing.assert_close(found.scores, model(given).scores)


@pytest.mark.usefixtures("untyped")
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
)  # of torch.onnx itself
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if one == "matrix-capsnet" else one for one in EXPORTED]
)
def test_onnx_runtime_gives_the_same_scores_for_any_batch_size(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, file = small(name), tmp_path / "model.onnx"
    for weights in model.parameters():
        if not weights.any():  # scores would be equal
            torch.nn.init.normal_(weights, std=0.1)
    program = torch.onnx.export(model, (images(),), dynamo=True, dynamic_shapes={"images": {0: "batch"}}, verbose=False)
    # onnxruntime's ScatterND adds to one element in several threads at once
    nodes = program.model_proto.graph.node
    assert not [node.name for node in nodes if node.op_type == "ScatterND" and node.attribute]
    program.save(file)
    session = runtime.InferenceSession(file)
    for batch in (1, 5):
        given = images(batch)
        right = model(given)
        found = [torch.from_numpy(part) for part in session.run(None, {"images": given.numpy()})]
        leaves = [part for part in torch.utils._pytree.tree_leaves(right) if part is not None]
        assert torch.equal(found[0].argmax(dim=1), right.scores.argmax(dim=1))
        for one, other in zip(found, leaves, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_gradients_of_both_losses_are_finite_in_bfloat16():
    model = CapsNet((1, 18, 18), 3, **SMALL["capsnet"]).bfloat16()
    labels = torch.tensor([0, 2])
    prediction = model(images().bfloat16(), labels)
    loss = margin_loss(prediction.scores, labels) + reconstruction_loss(prediction.reconstruction, images())
    loss.backward()
    assert all(torch.isfinite(weights.grad).all() for weights in model.parameters() if weights.grad is not None)
