import copy
import json
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from torchcaps import (
    MODELS,
    ROUTINGS,
    AttentionRouting,
    BadInput,
    CapsNet,
    EMRouting,
    GenerativeRouting,
    MatrixCapsNet,
    PooledCapsNet,
    Routing,
    SelfRouting,
    create_model,
    margin_loss,
)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_capsnet_has_the_parameters_of_the_paper():
    convolution = 9 * 9 * 256 + 256
    primary = 9 * 9 * 256 * 256 + 256
    digits = 6 * 6 * 32 * 8 * 10 * 16
    decoder = (160 * 512 + 512) + (512 * 1024 + 1024) + (1024 * 784 + 784)
    assert parameters(create_model("capsnet", decoder=False)) == convolution + primary + digits == 6_804_224
    assert parameters(create_model("capsnet")) == 6_804_224 + decoder == 8_215_568


def test_the_baseline_cnn_has_the_parameters_of_the_paper():
    convolutions = (25 + 1) * 256 + (25 * 256 + 1) * 256 + (25 * 256 + 1) * 128
    linear = (28 * 28 * 128 + 1) * 328 + (328 + 1) * 192 + (192 + 1) * 10
    assert parameters(create_model("baseline-cnn")) == convolutions + linear == 35_445_522


def test_the_networks_of_su_have_the_parameters_of_the_author():
    trunk = (9 + 1) * 64 + (9 * 64 + 1) * 64 + (9 * 64 + 1) * 128 + (9 * 128 + 1) * 128
    assert parameters(create_model("pooled-cnn")) == trunk + 129 * 128 + 129 * 10 == 276_810
    assert parameters(create_model("pooled-capsnet")) == trunk + 128 * 160 == 279_488


def test_matrix_capsnet_has_the_parameters_of_the_paper():
    def by_hand(features, primary, first, second, transform, channels=2, classes=5):
        convolution = (25 * channels + 1) * features
        primary_capsules = features * primary * 17
        capsules = 9 * primary * first * transform + 9 * first * second * transform + second * classes * transform
        return convolution + primary_capsules + capsules + 2 * (first + second + classes)

    stereo = {"image_shape": (2, 32, 32), "num_classes": 5}
    small, base = (create_model("matrix-capsnet", size=size, **stereo) for size in ("small", "base"))
    assert parameters(small) == by_hand(64, 8, 16, 16, 16) == 68_618
    assert parameters(base) == by_hand(32, 32, 32, 32, 16) == 316_650
    vector = create_model("matrix-capsnet", pose="vector", **stereo)
    assert parameters(vector) == by_hand(64, 8, 16, 16, 256)
    assert parameters(create_model("matrix-capsnet", widths=(8, 2, 3, 4), **stereo)) == by_hand(8, 2, 3, 4, 16)


def test_a_stem_adds_the_weights_of_its_convolutions_and_batch_norms():
    plain, deep = (MatrixCapsNet((2, 32, 32), 5, stem=stem) for stem in (0, 2))
    assert parameters(deep) - parameters(plain) == 2 * (64 * 64 * 9 + 64) + 3 * 128
    assert deep.second_capsules.parent_grid == plain.second_capsules.parent_grid
    halved = MatrixCapsNet((2, 32, 32), 5, stem=3, stem_stride=2)
    added = 9 * (64 * 64 + 64 * 128 + 128 * 128) + 64 + 2 * 128 + 2 * (64 + 64 + 128 + 128) + 64 * 8 * 17
    assert parameters(halved) - parameters(plain) == added
    assert parameters(MatrixCapsNet((2, 32, 32), 5, normalise=True)) - parameters(plain) == 128


@pytest.mark.parametrize("side", [17, 18, 19, 20, 28, 36])
def test_capsnet_with_a_stem_has_the_expected_number_of_parameters(side):
    model = CapsNet((2, side, side), 5, convolution_channels=16, primary_types=3, stem=True, decoder=False).eval()
    convolutions = 25 * 2 * 4 + 9 * (4 * 8 + 8 * 8 + 8 * 16) + 2 * (4 + 8 + 8 + 16)
    sites = (-(-side // 4) - 2) ** 2
    assert parameters(model) == convolutions + 9 * 16 * 24 + 24 + sites * 3 * 5 * 8 * 16
    assert model(torch.rand(2, 2, side, side)).scores.shape == (2, 5)


@pytest.mark.parametrize("options", [{"convolution_channels": 18}, {"im2col": True}])
def test_capsnet_with_a_stem_refuses_options_that_a_stem_does_not_support(options):
    with pytest.raises(ValueError, match="with stem=True, use a multiple of 4 as convolution_channels"):
        CapsNet(stem=True, **options)


def test_efficient_capsnet_has_the_parameters_of_the_authors():
    convolutions = 5 * 5 * 32 + 32 + 9 * (32 * 64 + 64 * 64 + 64 * 128) + 64 + 64 + 128
    norms, primary = 2 * (32 + 64 + 64 + 128), 9 * 9 * 128 + 128
    routed = 16 * 10 * 8 * 16 + 16 * 10
    assert parameters(create_model("efficient-capsnet", decoder=False)) == convolutions + norms + primary + routed
    assert convolutions + norms + primary + routed == 161_824


def test_the_self_routing_network_has_the_parameters_of_the_authors():
    channels = (2, 16, 32, 32, 64, 64, 128)
    backbone = sum(9 * below * above + 2 * above for below, above in pairwise(channels))
    primary = 9 * 128 * (32 + 512) + 2 * (32 + 512)
    routed, unused = 16 * 32 * 5 * (16 + 1), 16 * 32 * 5 * 16
    stereo = {"image_shape": (2, 32, 32), "num_classes": 5}
    model = create_model("self-routing-capsnet", **stereo)
    assert parameters(model) == backbone + primary + routed + unused == 856_064
    scores = model(torch.rand(3, 2, 32, 32)).scores
    torch.testing.assert_close(scores.sum(dim=1), torch.ones(3))
    deeper = create_model("self-routing-capsnet", capsule_layers=1, **stereo)
    assert parameters(deeper) - parameters(model) == 9 * 32 * 32 * (16 * 16 + 16 + 1) + 2 * 512


def test_the_attention_network_has_the_parameters_of_the_authors():
    convolution, primary, norm = 27 * 256 + 256, 256 * 512, 2 * 16
    routed = (2 * 9 * 32 * 32 + 25 * 32 * 10) * 16 + 3 * (32 + 17)
    model = create_model("attention-capsnet", image_shape=(3, 32, 32))
    assert parameters(model) == convolution + primary + norm + routed == 561_331
    assert all(layer.routing.competition == "types" for layer in (model.first_capsules, model.class_capsules))
    model(torch.rand(2, 3, 32, 32)).scores.sum().backward()  # DistributedDataParallel waits for every gradient
    assert all((weights.grad is not None) == weights.requires_grad for weights in model.parameters())
    assert sum(weights.numel() for weights in model.parameters() if not weights.requires_grad) == 2 * 17


def test_the_generative_network_has_the_parameters_of_the_author_except_a_batchnorm_and_the_biases_of_votes():
    convolutions = (9 * 4 * 64 + 64 + 2 * 4) + 5 * (9 * 64 * 64 + 64 + 2 * 64)
    primary = 2 * 64 + 65 * 64 * 17
    routed = 64 * (16 + 2) + 64 * 5 * (16 + 2)
    for side in (96, 48):
        model = create_model("generative-capsnet", image_shape=(2, side, side), num_classes=5)
        assert parameters(model) == convolutions + primary + routed == 265_416


def test_the_matrix_baseline_cnn_has_the_parameters_of_the_paper():
    by_hand = (50 + 1) * 32 + (800 + 1) * 64 + (8 * 8 * 64 + 1) * 1024 + 1025 * 5
    model = create_model("matrix-baseline-cnn", image_shape=(2, 32, 32), num_classes=5)
    assert parameters(model) == by_hand == 4_253_349


@pytest.mark.parametrize(
    ("stem", "grid", "places"),
    [
        ({}, (14, 16), [(0, 0), (1, 2), (13, 15)]),
        ({"stem": 3}, (14, 16), [(2, 2), (6, 9)]),
        ({"stem": 3, "stem_stride": 2}, (13, 15), [(3, 3), (6, 9)]),
    ],
)
def test_coordinates_of_children_are_the_centres_of_their_receptive_fields(stem, grid, places):
    routing = Routing("em", iterations=1)
    model = create_model("matrix-capsnet", image_shape=(1, 72, 80), routing=routing, **stem).eval()
    assert model.second_capsules.parent_grid == grid
    coordinates = model.class_capsules.coordinates.reshape(*grid, 2)
    for row, column in places:
        image = torch.zeros(1, 1, 72, 80, requires_grad=True)
        capsules = model.first_capsules(model.primary_capsules(model.convolution(image + torch.rand(1, 1, 72, 80))))
        model.second_capsules(capsules).pose[0, grid[1] * row + column].sum().backward()
        seen = image.grad[0, 0].abs() > 0
        middle = [(lines.min() + lines.max() + 1) / 2 for lines in seen.nonzero().double().unbind(1)]
        expected = torch.tensor([middle[0] / 72, middle[1] / 80])
        torch.testing.assert_close(coordinates[row, column], expected.float())


SMALL = {
    "capsnet": {"convolution_channels": 8, "primary_types": 2},
    "baseline-cnn": {"channels": (4, 4, 4), "hidden_sizes": (8, 8)},
    "pooled-cnn": {},
    "pooled-capsnet": {},
    "efficient-capsnet": {"channels": (4, 4, 4, 16)},
    "matrix-capsnet": {"widths": (4, 2, 3, 3)},
    "matrix-baseline-cnn": {"channels": (4, 4), "hidden_size": 8},
    "self-routing-capsnet": {"width": 4, "types": 4, "pose_size": 8, "capsule_layers": 1},
    "attention-capsnet": {"channels": 8, "types": 4},
    "generative-capsnet": {"channels": 8, "parts": 4, "padding": 1},
    "residual-capsnet": {"widths": (4, 8), "types": 2},
    "timm-capsnet": {"backbone": "test_resnet", "types": 2},
}


def has_timm():
    """Return whether timm can be imported; a torchvision built for another version of torch raises RuntimeError."""
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


HAS_TIMM = has_timm()
NETWORKS = [name for name in MODELS if HAS_TIMM or name != "timm-capsnet"]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [(3, 17, 23), (1, 40, 20), (2, 33, 33)])
def test_models_take_any_image_shape_and_class_count(name, shape):
    model = create_model(name, image_shape=shape, num_classes=7, **SMALL.get(name, {}))
    prediction = model(torch.rand(2, *shape), torch.tensor([0, 6]))
    assert prediction.scores.shape == (2, 7)
    if prediction.reconstruction is not None:
        assert prediction.reconstruction.shape == (2, *shape)


@pytest.mark.parametrize("name", NETWORKS)
def test_scores_are_activations_unless_the_model_states_that_they_are_logits(name):
    model = create_model(name, image_shape=(1, 28, 28), **SMALL.get(name, {})).eval()
    scores = model(30 * torch.randn(8, 1, 28, 28)).scores
    assert bool(((scores >= 0) & (scores <= 1)).all()) is not model.logits


@pytest.mark.parametrize("name", NETWORKS)
def test_the_scores_of_an_image_do_not_depend_on_its_batch(name):
    model = create_model(name, image_shape=(1, 28, 28), **SMALL.get(name, {})).eval()
    images = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(model(images[1:2]).scores, model(images).scores[1:2], rtol=1e-4, atol=1e-5)


def test_the_decoder_uses_the_capsule_of_the_label_or_else_the_longest_capsule():
    model = CapsNet(**SMALL["capsnet"])
    images = torch.rand(4, 1, 28, 28)
    free = model(images)
    longest = free.scores.argmax(dim=1)
    assert torch.equal(free.reconstruction, model(images, longest).reconstruction)
    assert not torch.equal(free.reconstruction, model(images, (longest + 1) % 10).reconstruction)


def test_unknown_models_and_options_are_refused_with_the_nearest_name():
    with pytest.raises(BadInput, match="did you mean 'capsnet'"):
        create_model("capsnett")
    with pytest.raises(BadInput, match="did you mean 'decoder'"):
        create_model("capsnet", decode=False)


@pytest.mark.parametrize("name", NETWORKS)
def test_loaded_models_have_the_saved_weights_and_options(name, tmp_path):
    model = create_model(name, image_shape=(1, 28, 28), num_classes=4, **SMALL.get(name, {})).eval()
    model.save_pretrained(tmp_path / "saved")
    again = MODELS[name].from_pretrained(tmp_path / "saved").eval()
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(again(images).scores, model(images).scores)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["options"]["num_classes"] == 4
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(model.state_dict())


@pytest.mark.parametrize("name", ["capsnet", "matrix-capsnet", "pooled-capsnet", "self-routing-capsnet"])
@pytest.mark.parametrize("rule", ROUTINGS)
def test_every_model_is_trained_and_saved_with_every_rule(name, rule, tmp_path):
    model = create_model(name, image_shape=(1, 20, 20), num_classes=3, routing=rule, **SMALL[name])
    images, labels = torch.rand(3, 1, 20, 20), torch.tensor([0, 1, 2])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):  # in the first step, some rules have gradients only for their own parameters
        optimizer.zero_grad()
        margin_loss(model(images, labels).scores, labels).backward()
        optimizer.step()
    first = next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    assert first.weight.grad.abs().max() > 1e-6
    layers = [layer for layer in model.modules() if hasattr(layer, "routing")]
    assert all(type(layer.routing) is ROUTINGS[rule] for layer in layers)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    model.eval().save_pretrained(tmp_path)
    random_state = torch.get_rng_state()
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(again(images).scores, model(images).scores)
    described = [(type(x.routing), x.routing.saved_options) for x in again.modules() if hasattr(x, "routing")]
    assert described == [(type(x.routing), x.routing.saved_options) for x in layers]


def test_given_options_of_a_rule_apply_to_every_layer_and_the_model_sets_all_others(tmp_path):
    model = create_model("matrix-capsnet", routing=Routing("em", iterations=2), class_temperature_factor=0.25)
    for layer, inverse_temperature in (
        (model.first_capsules, 1.0),
        (model.second_capsules, 1.0),
        (model.class_capsules, 0.25),
    ):
        options = layer.routing.saved_options
        assert [options[name] for name in ("iterations", "variance_floor")] == [2, 0.01]
        assert options["inverse_temperature"] == inverse_temperature
        assert (layer.routing.beta_a == -15).all()
    pooled = PooledCapsNet(routing=Routing("dynamic", squash_form="none")).class_capsules.routing
    own = {"iterations": 3, "logits": "latest", "squash_form": "none", "inner_squash_form": "unit"}
    assert own.items() <= pooled.saved_options.items()
    assert CapsNet(routing="em").class_capsules.routing.saved_options == EMRouting(10).saved_options
    model.save_pretrained(tmp_path)
    again = MatrixCapsNet.from_pretrained(tmp_path, routing=Routing("em", iterations=1))
    assert again.class_capsules.routing.saved_options == {**options, "iterations": 1}


@pytest.mark.usefixtures("untyped")
def test_every_layer_of_a_model_gets_a_copy_of_a_rule():
    rule = AttentionRouting(16, iterations=3)
    model = create_model("matrix-capsnet", routing=rule, widths=(4, 2, 3, 3))
    layers = (model.first_capsules, model.second_capsules, model.class_capsules)
    assert len({id(part) for part in (rule, *(layer.routing for layer in layers))}) == 4
    assert all(torch.equal(layer.routing.score.weight, rule.score.weight) for layer in layers)
    assert "routing" not in model.options
    for routing, message in (
        (EMRouting(3), r"\(EMRouting\) made for parent_types=3, but the layer has parent_types=10"),
        (AttentionRouting(8), r"\(AttentionRouting\) made for pose_size=8, but the layer has pose_size=16"),
        (GenerativeRouting(9, 2, 3), r"\(GenerativeRouting\) made for child_types=2, but the layer has child_types=3"),
        (SelfRouting(9, 2, 3, (2, 8)), r"child_pose_shape=\(2, 8\), but the layer has child_pose_shape=\(4, 4\)"),
        (EMRouting, "routing must be a Rule, a Routing or a string; got"),
    ):
        with pytest.raises(BadInput, match=message) as refused:
            create_model("matrix-capsnet", routing=routing, widths=(4, 2, 3, 3))
        assert "\n" not in str(refused.value)


def test_a_routing_is_an_immutable_name_with_options():
    routing = Routing("em", variance_floor=0.5, iterations=2)
    assert repr(routing) == "Routing('em', iterations=2, variance_floor=0.5)"
    with pytest.raises(FrozenInstanceError):
        routing.name = "dynamic"
    routing.options["iterations"] = 5
    assert routing == Routing("em", iterations=2, variance_floor=0.5) == pickle.loads(pickle.dumps(routing))
    assert routing.replace(iterations=1) == Routing("em", iterations=1, variance_floor=0.5) != routing
    assert copy.deepcopy(MatrixCapsNet(routing=routing)).class_capsules.routing.iterations == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("atention", {}, "unknown routing 'atention'; did you mean 'attention'"),
        (3, {}, "must be a string; got 3"),
        ("em", {"iteration": 2}, "routing em has no option 'iteration'; did you mean 'iterations'"),
        ("em", {"iterations": "2"}, "iterations must be an integer; got '2'"),
        ("em", {"parent_types": 3}, "no option 'parent_types'"),
        ("attention", {"pose_size": 16}, "no option 'pose_size'"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_a_routing_with_an_unknown_name_or_option_is_refused_when_created(name, options, message):
    with pytest.raises(BadInput, match=message):
        Routing(name, **options)


def test_saved_weights_have_the_same_file_permissions_as_other_files(tmp_path):
    create_model("pooled-cnn").save_pretrained(tmp_path / "saved")
    (tmp_path / "other").write_text("")
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "saved" / "model.safetensors", tmp_path / "other")]
    assert modes[0] == modes[1]


def test_weights_of_another_model_are_refused(tmp_path):
    create_model("pooled-cnn").save_pretrained(tmp_path / "cnn")
    with pytest.raises(BadInput, match="contains the model 'pooled-cnn', not 'pooled-capsnet'"):
        PooledCapsNet.from_pretrained(tmp_path / "cnn")


def test_a_folder_without_safetensors_or_with_a_pickle_is_refused(tmp_path):
    folder = tmp_path / "saved"
    create_model("pooled-cnn").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"model\.safetensors"):
        MODELS["pooled-cnn"].from_pretrained(folder)


def test_small_changes_of_images_change_initial_poses_little():
    """Random initial votes around 0 with sharp couplings would change much; such a network learns little."""
    coarse = torch.randn(64, 2, 8, 8)
    images = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic")
    changed = images + 0.01 * images.std() * torch.randn_like(images)

    def moved(**options):
        model = create_model("matrix-capsnet", image_shape=(2, 32, 32), num_classes=5, **options)
        with torch.no_grad():
            poses, other = (model(x).capsules.pose for x in (images, changed))
        return ((poses - other).norm() / (poses - poses.mean(dim=0)).norm()).item()

    around_zero = {"around_identity": False, "initial_std": 0.5, "class_initial_std": 0.5}
    around_zero["routing"] = Routing("em", variance_floor=1e-4)
    assert max(moved() for _ in range(3)) < 0.05 < min(moved(**around_zero) for _ in range(3))


def test_initial_class_activations_are_not_saturated():
    """If most of an image is empty, most votes are equal, and the logistic function saturates with initial_beta_a=0."""
    images = torch.zeros(32, 1, 28, 28)
    images[:, :, 10:18, 12:16] = torch.rand(32, 1, 8, 4)

    def slope(**options):
        scores = create_model("matrix-capsnet", routing=Routing("em", **options))(images).scores
        return (scores * (1 - scores)).mean().item()

    for iterations in (1, 2, 3):
        assert slope(iterations=iterations) > 0.05
    assert slope(iterations=2, initial_beta_a=0.0, variance_floor=1e-4) < 0.02


def test_a_network_with_an_unknown_rule_is_refused_with_the_name_of_the_rule(tmp_path):
    PooledCapsNet().save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"rule": "dynamic"', '"rule": "own"'))
    with pytest.raises(BadInput, match=r"is 'own', which is not in torchcaps\.ROUTINGS: import the module that adds"):
        PooledCapsNet.from_pretrained(tmp_path)
