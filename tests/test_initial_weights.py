"""Initial weights of capsule layers, of matrix capsules and of capsule heads: their spread, set by options or sizes."""

import json
import math
import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch

from torchcaps import (
    MODELS,
    ROUTINGS,
    AttentionCapsNet,
    BadInput,
    CapsNet,
    CapsuleHead,
    CapsuleLayer,
    Capsules,
    ClassCaps,
    ConvCaps,
    DenseCaps,
    EfficientCapsNet,
    EMRouting,
    MatrixCapsNet,
    Routing,
    RoutingMap,
    SelfRoutingCapsNet,
    SharedCaps,
    margin_loss,
)


@pytest.mark.parametrize("std", [0.01, 0.3])
def test_initial_transforms_differ_from_the_identity_by_the_given_deviation(std):
    """The normal distribution is truncated at two standard deviations, so its own deviation is 0.88 times as large."""
    layers = [
        ConvCaps((4, 4), 8, 8, kernel_size=3, initial_std=std),
        ClassCaps(torch.rand(9, 2), 32, 16, initial_std=std),
    ]
    for layer in layers:
        noise = layer.transform.detach() - torch.eye(4)
        assert noise.std().item() == pytest.approx(0.88 * std, rel=0.05)
        assert 1.9 * std < noise.abs().max() <= 2 * std


def test_initial_transforms_of_shared_caps_are_uniform_with_a_range_that_depends_on_all_parents():
    transform = SharedCaps(8, parent_types=10, parent_pose_size=16).transform.detach()
    bound = (6 / (8 + 10 * 16)) ** 0.5
    assert 0.98 * bound < transform.abs().max() <= bound
    assert transform.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_poses_and_activations_of_matrix_capsules_have_initial_weights_of_different_deviations():
    model = MatrixCapsNet(primary_initial_std=0.5, activation_initial_std=3.0, initial_std=0.3, class_initial_std=0.01)
    weights = [model.primary_capsules.convolution.weight, model.primary_capsules.activation.weight]
    weights += [layer.transform - torch.eye(4) for layer in (model.first_capsules, model.second_capsules)]
    weights += [model.class_capsules.transform - torch.eye(4)]
    for weight, std in zip(weights, (0.5, 3.0, 0.3, 0.3, 0.01), strict=True):
        assert weight.std().item() == pytest.approx(0.88 * std, rel=0.15)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("classes", [3, 10, 100])
@pytest.mark.parametrize("rule", ["dynamic", "uniform", "self_attention"])
def test_a_head_with_any_number_of_classes_learns_with_the_margin_loss(rule, classes):
    """If all initial scores were near 1, or most of them 0, it would learn almost nothing in these steps."""
    head, centres = CapsuleHead((16, 2, 2), classes, types=8, routing=rule), torch.randn(classes, 16)
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(100):
        labels = torch.randint(0, classes, (64,))
        features = (centres[labels] + 0.1 * torch.randn(64, 16))[:, :, None, None].expand(-1, -1, 2, 2)
        scores = head(features).scores
        optimizer.zero_grad()
        margin_loss(scores, labels).backward()
        optimizer.step()
    assert (scores.argmax(dim=1) == labels).float().mean() > 0.9


def test_a_head_with_poses_of_one_element_is_not_saturated_on_a_large_map():
    head = CapsuleHead((16, 28, 28), 2, types=8, pose_size=(1, 1), coordinates=False)
    scores = head(torch.randn(8, 16, 28, 28)).scores
    assert scores.min() > 0.01
    assert scores.max() < 0.99


def test_the_deviations_of_efficient_and_attention_networks_depend_on_the_sizes_of_the_layer():
    transform = EfficientCapsNet(decoder=False).class_capsules.transform
    largest = 2 * math.sqrt(2 / (10 * 16 * 8))  # the distribution is truncated at two standard deviations
    assert 0.98 * largest < transform.abs().max() <= largest
    network = AttentionCapsNet()
    sites = math.prod(network.second_capsules.parent_grid)
    layers = (network.first_capsules, 32, 9), (network.second_capsules, 32, 9), (network.class_capsules, 10, sites)
    for layer, parents, children in layers:
        assert layer.transform.std().item() == pytest.approx(math.sqrt(parents / (4 * 32 * children)), rel=0.05)


def test_a_deviation_of_0_gives_the_identity():
    assert torch.equal(ConvCaps((4, 4), 2, 3, 3, initial_std=0.0).transform[0, 0, 0], torch.eye(4))
    assert not ClassCaps(torch.rand(9, 2), 2, 3, initial_std=0.0, around_identity=False).transform.any()


def _perturbed(model):
    """Replace all parameters and all statistics of a network by 7, as a training might."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)
    return model


def _reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def _networks():
    for name in MODELS:
        if name not in ("timm-capsnet", "baseline-cnn"):  # the second is large, and has no layers of torchcaps
            yield pytest.param(lambda name=name: MODELS[name]((1, 29, 29), 5), id=name)
    for routing in ROUTINGS:
        yield pytest.param(lambda routing=routing: CapsNet((1, 17, 17), 5, routing=routing), id=f"capsnet-{routing}")
    yield pytest.param(lambda: CapsNet((1, 28, 28), 5, stem=True), id="capsnet with stem")
    stds = {"primary_initial_std": 0.5, "activation_initial_std": 3.0, "initial_std": 0.3, "class_initial_std": 0.01}
    yield pytest.param(
        lambda: MatrixCapsNet(**stds, routing=Routing("em", initial_beta_a=-15.0)), id="matrix-capsnet stds"
    )
    yield pytest.param(lambda: CapsuleHead((64, 3, 3), 5, routing="dynamic"), id="capsule head")


@pytest.mark.parametrize("make", [*_networks()])
def test_reset_parameters_draws_the_weights_of_a_new_network(make):
    new, again = make(), _perturbed(make()).apply(_reset)
    statistics = dict(again.named_buffers())
    for name, buffer in new.named_buffers():
        assert torch.equal(statistics[name], buffer), name
    weights = dict(again.named_parameters())
    for name, weight in new.named_parameters():
        found = weights[name]
        assert (found.requires_grad, found.dtype) == (weight.requires_grad, weight.dtype), name
        if weight.numel() > 1 and (weight == weight.flatten()[0]).all():
            assert torch.equal(found, weight), name
        else:
            assert not torch.equal(found, weight), name  # drawn at random, not copied
        if weight.numel() > 1000:
            assert found.std().item() == pytest.approx(weight.std().item(), rel=0.15), name
            assert found.mean().item() == pytest.approx(weight.mean().item(), abs=0.15 * weight.std().item()), name


def test_layers_with_given_transforms_draw_new_ones_with_the_given_function_only():
    layer = CapsuleLayer(RoutingMap.dense(2), torch.ones(2, 4, 3, 8, 16), "uniform")
    with pytest.raises(RuntimeError, match=r"CapsuleLayer cannot draw new transforms.*call initialise"):
        layer.apply(_reset)
    layer.initialise(partial(torch.nn.init.constant_, val=2.0))
    assert (layer.transform == 2).all()
    assert layer.transform.is_leaf
    assert layer.transform.requires_grad
    with torch.no_grad():
        layer.transform.zero_()
    deepcopy(layer).apply(_reset)
    assert (layer.transform == 0).all()
    layer.apply(_reset)
    assert (layer.transform == 2).all()


def test_a_network_on_the_meta_device_gets_its_values_from_reset_parameters():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = torch.nn.ModuleList([DenseCaps(4, 8, 8, 5, 16), EMRouting(5, initial_beta_a=-3.0)])
    layer, rule = model.to_empty(device="cpu").apply(_reset)
    assert layer.transform.std().item() == pytest.approx(0.88 * 1.36 * 5 / (4 * 8 * 16) ** 0.5, rel=0.05)
    assert (rule.beta_a == -3).all()
    assert (rule.beta_u == 0).all()
    assert layer(Capsules(torch.randn(2, 4, 8, 1, 8), torch.rand(2, 4, 8))).pose.isfinite().all()


def test_a_loaded_network_knows_the_initial_values_of_its_rules(tmp_path):
    rule = EMRouting(16, initial_beta_a=-2.0)
    MatrixCapsNet((1, 17, 17), widths=[8, 8, 8, 16], routing=Routing("em", initial_beta_a=-15.0)).save_pretrained(
        tmp_path
    )
    again = MatrixCapsNet.from_pretrained(tmp_path)
    assert rule.saved_options["initial_beta_a"] == -2
    assert (_perturbed(again).apply(_reset).first_capsules.routing.beta_a == -15).all()
    config = json.loads((tmp_path / "config.json").read_text())
    for saved in config["routing"].values():
        del saved["options"]["initial_beta_a"]  # files of earlier versions lack it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert MatrixCapsNet.from_pretrained(tmp_path).first_capsules.routing.initial_beta_a == 0


def test_a_rule_with_fewer_options_than_its_base_class_is_saved(tmp_path, monkeypatch):
    class Strict(EMRouting):
        def __init__(self, parent_types: int, iterations: int = 2) -> None:
            super().__init__(parent_types, iterations, variance_floor=0.5)

    monkeypatch.setitem(ROUTINGS, "strict", Strict)
    CapsNet((1, 17, 17), 5, routing=Routing("strict", iterations=1)).save_pretrained(tmp_path)
    loaded = CapsNet.from_pretrained(tmp_path).class_capsules.routing
    assert isinstance(loaded, Strict)
    assert (loaded.iterations, loaded.variance_floor) == (1, 0.5)
    changed = CapsNet((1, 17, 17), 5, routing="strict")
    changed.class_capsules.routing.tempering = 0.5
    with pytest.raises(BadInput, match=r"tempering is 0.5 here, but would be 1.0\): return"):
        changed.save_pretrained(tmp_path / "changed")


def test_layers_of_pytorch_can_be_fused():
    """`torch.ao.quantization` finds layers by their exact class."""
    model = SelfRoutingCapsNet((1, 28, 28), 5).eval()
    images = torch.rand(2, 1, 28, 28)
    before = model(images).scores
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.fuse_modules(model, [["features.0", "features.1", "features.2"]], inplace=True)
    torch.testing.assert_close(model(images).scores, before)


def test_a_subclass_with_arguments_of_its_own_can_be_reset():
    class Stemmed(CapsNet):
        def __init__(self) -> None:
            super().__init__((1, 28, 28), 5, stem=True)

    model, before = _perturbed(Stemmed()), Stemmed().convolution[0].weight.std().item()
    assert model.apply(_reset).convolution[0].weight.std().item() == pytest.approx(before, rel=0.15)
