"""The support of classes in an image in each routing iteration, and the explorer without its page."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from test_models import NETWORKS
from test_models import SMALL as SMALL_OF_ALL
from torchcaps import (
    Capsules,
    Classifier,
    DenseCaps,
    Inspection,
    Preprocessing,
    Routing,
    create_model,
    inspect,
)
from torchcaps.data.mnist_5k import load_mnist_5k
from torchcaps.errors import BadInput
from torchcaps.explore import Explorer, View, attacked, redrawn, sources_of, toy_view, toy_views
from torchcaps.feature_maps import FeatureMap, feature_maps, in_the_image, place_of
from torchcaps.inspection import about_crops
from torchcaps.recording import recorded
from torchcaps.routing import ROUTINGS
from torchcaps.routing import votes as routing_votes

WEIGHTS = Path(__file__).parents[1] / "weights"
SMALL = {
    "capsnet": {"convolution_channels": 8, "primary_types": 2},
    "matrix-capsnet": {"widths": [8, 4, 4, 4]},
}


def classifier(name: str = "capsnet", **options) -> Classifier:
    torch.manual_seed(0)
    model = create_model(name, image_shape=(1, 28, 28), num_classes=3, **SMALL.get(name, {}), **options).eval()
    return Classifier(model, ("ant", "bee", "cat"), (1, 28, 28), Preprocessing())


@pytest.mark.parametrize("rule", ROUTINGS)
@pytest.mark.parametrize("name", SMALL)
def test_support_sums_to_one_per_class_and_pass(name, rule):
    found = inspect(classifier(name, routing=Routing(rule)), torch.rand(1, 28, 28))
    assert found.support.shape[1:] == (3, 28, 28)
    torch.testing.assert_close(found.support.sum(dim=(2, 3)), torch.ones(found.support.shape[:2]))
    assert found.support.min() >= 0


@torch.no_grad()
@pytest.mark.parametrize("rule", ["dynamic", "generative"])
def test_support_equals_the_fraction_of_the_mean_vote_computed_in_loops(rule):
    network = classifier("capsnet", routing=rule)
    for parameter in network.model.class_capsules.routing.parameters():
        nn.init.normal_(parameter)  # the generative rule appends its parameters to the votes
    with recorded(network.model) as layers:
        prediction = network.model(torch.rand(1, 1, 28, 28))
    (layer,) = layers
    children, transform = layer.children, network.model.class_capsules.transform
    assert len(layer.passes) == 3
    couplings = layer.passes[2].votes.couplings(layer.passes[2].agreement)[0]
    if rule == "generative":
        couplings = couplings * children.activation[0]
    direction = nn.functional.normalize(prediction.capsules.pose[0, 0, :, 0], dim=1)
    expected = torch.zeros(3, children.activation.shape[1], children.activation.shape[2])
    for parent in range(3):
        for site in range(expected.shape[1]):
            for kind in range(expected.shape[2]):
                vote = children.pose[0, site, kind, 0] @ transform[site, kind, parent]
                expected[parent, site, kind] = couplings[parent, site, kind] * (vote @ direction[parent])
    expected = expected.clamp_min(0) / expected.clamp_min(0).sum(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(layer.support(2), expected, rtol=1e-4, atol=1e-6)


def test_the_shares_of_the_mass_of_a_parent_sum_to_one():
    model = classifier("matrix-capsnet").model
    with recorded(model) as layers, torch.inference_mode():
        model(torch.rand(1, 1, 28, 28))
    assert [layer.name.split(".")[0] for layer in layers] == ["first_capsules", "second_capsules", "class_capsules"]
    for layer in layers:
        parents = layer.passes[-1].votes.routing_map.edges[:, 1]
        shares = layer.shares(len(layer.passes) - 1)
        sums = torch.zeros(layer.parents.activation.shape[1], len(shares)).index_add(0, parents, shares.sum(dim=2).mT)
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_recording_does_not_change_scores_and_removes_its_hooks():
    model, images = classifier().model, torch.rand(2, 1, 28, 28)
    before = model(images).scores
    with recorded(model):
        assert torch.equal(model(images).scores, before)
    assert not routing_votes.observers
    with pytest.raises(RuntimeError), recorded(model):
        model(torch.rand(1, 1, 28, 28, dtype=torch.double))
    assert not routing_votes.observers
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["capsnet", "matrix-capsnet", "pooled-capsnet"])
def test_positions_of_feature_maps_are_the_centres_of_receptive_fields(name):
    """The gradient of the features of a site shows which pixels are in its receptive field."""
    model = create_model(name, image_shape=(1, 40, 40), num_classes=3, **SMALL.get(name, {})).double().eval()
    image = torch.rand(1, 1, 40, 40, dtype=torch.double, requires_grad=True)
    with recorded(model) as layers, feature_maps(model, layers, image) as maps:
        model(image)
    place, pose = maps[-1], layers[0].children.pose[0].flatten(1)
    assert math.prod(place.grid) == len(pose)
    for row, column in ((1, 1), (2, 1)):
        values = pose[row * place.grid[1] + column]
        gradient = torch.autograd.grad(values.square().sum(), image, retain_graph=True)[0][0, 0]
        for axis, site in ((0, row), (1, column)):
            pixels = (gradient != 0).any(dim=1 - axis).nonzero().flatten()
            centre = (pixels.min() + pixels.max()).item() / 2
            assert centre == pytest.approx(place.first[axis] + site * place.step[axis], abs=1.0)


def test_a_site_is_drawn_at_the_centre_of_its_receptive_field():
    below = torch.zeros(1, 1, 36)
    below[0, 0, 7] = 1.0
    place = FeatureMap((6, 6), (8.0, 8.0), (2.0, 2.0))
    drawn = in_the_image(below, place, 28, 28)[0, 0]
    assert (drawn.argmax() // 28, drawn.argmax() % 28) == (10, 10)
    torch.testing.assert_close(drawn.sum(), torch.ones(()))
    torch.testing.assert_close(drawn[10, 9:12], drawn[10, 10] * torch.tensor([0.5, 1.0, 0.5]))
    with pytest.raises(BadInput, match="36 sites"):
        place_of([FeatureMap((5, 5), (0.0, 0.0), (1.0, 1.0))], 36, sure=True)
    row = in_the_image(torch.ones(1, 1, 3), FeatureMap((1, 3), (3.0, 3.0), (8.0, 8.0)), 24, 24)[0, 0]
    assert (row == row[:1]).all()
    assert row[0].argmax() in range(3, 20)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_capsule_network_can_be_inspected(name):
    size = 48 if name == "generative-capsnet" else 32
    model = create_model(name, image_shape=(2, size, size), num_classes=3, **SMALL_OF_ALL.get(name, {})).eval()
    network = Classifier(model, ("ant", "ant", "cat"), (2, size, size), Preprocessing())
    if name in ("baseline-cnn", "matrix-baseline-cnn", "pooled-cnn"):
        with pytest.raises(BadInput, match="no capsules"):
            inspect(network, torch.zeros(2, size, size))
        return
    for image in (torch.rand(2, size, size), torch.zeros(2, size, size, dtype=torch.uint8)):
        found = inspect(network, image)
        torch.testing.assert_close(found.support.sum(dim=(2, 3)), torch.ones(found.support.shape[:2]))
        assert View(found, []).bars().keys() == {"ant (0)", "ant (1)", "cat"}


def test_images_of_another_shape_are_refused():
    network = classifier()
    for image, problem in (
        (torch.rand(1, 1, 28, 28), r"must have shape \[1, height, width\]; got .*: remove the batch dimension"),
        (torch.rand(3, 28, 28), r"must have shape \[1, height, width\]; got \[3, 28, 28\]$"),
        (torch.zeros(1, 28, 28, dtype=torch.int64), "must be uint8 or floating-point; got"),
    ):
        with pytest.raises(BadInput, match=problem):
            inspect(network, image)
    assert torch.equal(
        inspect(network, np.zeros((1, 28, 28), np.uint8)).support,
        inspect(network, torch.zeros(1, 28, 28, dtype=torch.uint8)).support,
    )


def test_an_attack_does_not_change_the_gradients_of_the_network():
    network = classifier()
    pixels = torch.randint(0, 255, (1, 28, 28), dtype=torch.uint8)
    assert (attacked(network, pixels, 0.1) - pixels / 255).abs().max() <= 0.1 + 1e-6
    assert all(parameter.grad is None for parameter in network.model.parameters())


def test_threads_record_independently():
    classifiers = [classifier("capsnet"), classifier("matrix-capsnet"), classifier("capsnet")]
    images = [torch.rand(1, 28, 28) for _ in range(12)]
    alone = [inspect(classifiers[index % 3], image).support for index, image in enumerate(images)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda index: inspect(classifiers[index % 3], images[index]).support, range(12))]
    assert all(torch.equal(one, other) for one, other in zip(alone, found, strict=True))


def test_the_passes_of_both_runs_of_a_rule_are_recorded():
    model, images = classifier("matrix-capsnet").model, torch.rand(1, 1, 28, 28)
    with recorded(model) as layers, torch.inference_mode():
        model(images)
        model(images)
    assert [len(layer.passes) for layer in layers] == [6, 6, 6]


def test_scores_of_the_central_crop_are_named_if_predictions_average_several_crops(tmp_path):
    pixels = torch.randint(256, (1, 28, 28), dtype=torch.uint8)
    network = create_model("pooled-capsnet", image_shape=(1, 20, 20), num_classes=3).eval()
    one, several = (
        Classifier(network, ("ant", "bee", "cat"), (1, 28, 28), Preprocessing(crop=20, test_crops=n)) for n in (1, 3)
    )
    assert not torch.allclose(inspect(several, pixels).scores, several.predict(pixels[None]).scores[0], atol=1e-4)
    torch.testing.assert_close(inspect(several, pixels).scores, one.predict(pixels[None]).scores[0])
    assert about_crops(one) == ""
    assert about_crops(several) == ", central crop; predictions average 9 crops"
    several.save_pretrained(tmp_path)
    view = Explorer({"crops": tmp_path}).view("crops", pixels, "dynamic", 3, 0.0)
    assert view.sentence().endswith(", central crop; predictions average 9 crops)")


def test_the_support_of_a_digit_is_at_the_position_of_the_digit():
    images, _ = load_mnist_5k()
    strip = torch.cat([images.pixels[images.labels == digit][0] for digit in (3, 8)], dim=2)
    explorer = Explorer({"strips": WEIGHTS / "digit-strips"})
    view = explorer.view("strips", strip, "dynamic", 3, 0.0)
    centres = [(view.found.support[-1, digit].sum(dim=0) * torch.arange(56.0)).sum() for digit in (3, 8)]
    assert centres[0] < 28 < centres[1]
    assert view.order == ["3", "8"]
    assert view.sentence() == "From left to right: 3, 8"
    three = torch.cat([images.pixels[images.labels == digit][1] for digit in (7, 0, 4)], dim=2)
    assert explorer.view("strips", three, "dynamic", 3, 0.0).order == ["7", "0", "4"]


def test_a_network_without_capsules_is_refused():
    with pytest.raises(BadInput, match="no capsules"):
        inspect(classifier("baseline-cnn"), torch.rand(1, 28, 28))


def test_the_figure_and_the_command_write_a_picture(call, refused, tmp_path):
    found = inspect(classifier("capsnet"), torch.zeros(1, 28, 28, dtype=torch.uint8))
    assert isinstance(found, Inspection)
    assert len(found.figure().axes) == 15
    names, scores = tuple(map(str, range(30))), torch.arange(30.0).roll(5)
    support, poses = found.support.repeat(1, 10, 1, 1), found.poses.repeat(10, 1, 1)
    many = replace(found, class_names=names, scores=scores, support=support, poses=poses).figure()
    assert [text.get_text() for text in many.axes[1].get_yticklabels()] == ["0", "1", "2", "3", "4", *names[15:]]
    zeros = replace(found, class_names=names, scores=0 * scores, support=support, poses=poses).figure(25)
    assert [text.get_text() for text in zeros.axes[1].get_yticklabels()] == [*names[:25]]
    assert [bar.get_width() for bar in many.axes[1].patches] == [*range(25, 30), *range(10, 25)]
    digit = tmp_path / "digit.png"
    Image.fromarray(np.pad(np.full((20, 4), 255, np.uint8), ((4, 4), (12, 12)))).save(digit)
    code, out, _ = call("inspect", WEIGHTS / "matrix-capsnet-mnist", digit, "--out", tmp_path / "seen.png")
    assert code == 0
    assert out.startswith("1 (")
    with Image.open(tmp_path / "seen.png") as picture:
        assert picture.width > 300
    for words, message in (
        ((WEIGHTS / "matrix-capsnet-mnist", digit, "--out", tmp_path / "seen.txt"), "ends in .png"),
        ((WEIGHTS / "matrix-capsnet-mnist", digit, "--out", tmp_path / "no" / "seen.png"), "does not exist"),
        ((WEIGHTS / "matrix-capsnet-mnist", tmp_path / "none.png"), "none.png"),
        ((tmp_path, digit), str(tmp_path)),
    ):
        assert message in refused("inspect", *words)


def test_the_explorer_offers_the_rules_that_fit_the_weights():
    explorer = Explorer({"digits": WEIGHTS / "digit-strips", "toys": WEIGHTS / "matrix-capsnet-toys"})
    fitting, own, iterations = explorer.rules("digits")
    assert {"dynamic", "uniform"} <= set(fitting)
    assert (own, iterations) == ("dynamic", 3)
    assert "em" not in fitting
    assert explorer.rules("toys")[1:] == ("em", 3)
    pixels = explorer.drawn("digits", np.pad(np.full((200, 30), 255.0), ((40, 40), (125, 125))))
    views = [explorer.view("digits", pixels, *routing, 0.0) for routing in (("dynamic", 3), ("uniform", 3))]
    assert not torch.equal(views[0].found.scores, views[1].found.scores)
    assert len(explorer.view("digits", pixels, "dynamic", 5, 0.0).found.support) == 5
    attacked = explorer.view("digits", pixels, "dynamic", 3, 0.1)
    assert 0.05 < (attacked.found.image - views[0].found.image).abs().max() <= 0.1 + 1e-6
    assert attacked.found.scores.max() < views[0].found.scores.max()
    assert views[0].picture().shape == views[0].support(3, 1).shape == (280, 280, 3)
    assert sum(views[0].bars().values()) > 0
    assert views[0].pose().shape == (80, 80 * views[0].found.poses.shape[2], 3)


def test_the_explorer_reconstructs_from_a_changed_pose(tmp_path):
    classifier().save_pretrained(tmp_path)
    explorer = Explorer({"net": tmp_path})
    view = explorer.view("net", torch.zeros(1, 28, 28, dtype=torch.uint8), "dynamic", 3, 0.0)
    pose = view.found.poses[int(view.found.scores.argmax())].flatten().tolist()
    same, moved = (
        redrawn(explorer.classifier("net"), view.found, [value + step for value in pose]) for step in (0.0, 2.0)
    )
    assert same.shape == (280, 280, 3)
    assert (same != moved).any()
    with pytest.raises(BadInput, match="this network has no decoder"):
        redrawn(classifier("capsnet", decoder=False), view.found, pose)


def test_toy_view_returns_the_rendered_view_in_the_requested_size():
    views = toy_views(4, 0)
    assert views.shape == (9, 18, 6, 2, 48, 48)
    assert not torch.equal(views[0, 0, 0], views[8, 9, 0])
    assert torch.equal(toy_view((2, 48, 48), 4, 0, 8, 18, 0), views[8, 9, 0])
    assert toy_view((2, 96, 96), 4, 0, 8, 18, 0).shape == (2, 96, 96)
    assert toy_view((1, 28, 28), 4, 0, 8, 18, 0) is None


def test_the_explorer_refuses_folders_without_networks(tmp_path, monkeypatch, refused):
    with pytest.raises(BadInput, match="no network"):
        sources_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="no network in the folder weights/"):
        sources_of(None)
    assert sources_of(WEIGHTS / "digit-strips") == {"digit-strips": WEIGHTS / "digit-strips"}
    classifier("baseline-cnn").save_pretrained(tmp_path / "cnn")
    with pytest.raises(BadInput, match="no capsule network"):
        Explorer({"cnn": tmp_path / "cnn"}).rules("cnn")


class Backbone(nn.Module):
    """Two branches after a dilated convolution, pooling without a module, and a convolution."""

    def __init__(self):
        super().__init__()
        self.dilated = nn.Conv2d(1, 2, 3, dilation=2)
        self.main = nn.Sequential(nn.Conv2d(2, 2, 3, 2, padding=1), nn.Conv2d(2, 2, 3, padding=1))
        self.shortcut, self.last = nn.Conv2d(2, 2, 1, 2), nn.Conv2d(2, 2, 3)

    def forward(self, images):
        images = functional.relu(self.dilated(images))
        return self.last(functional.max_pool2d(functional.relu(self.main(images) + self.shortcut(images)), 2))


def test_the_position_of_a_feature_map_is_the_centre_of_its_receptive_fields():
    model, images = Backbone().double(), torch.rand(1, 1, 44, 36, dtype=torch.float64)
    with feature_maps(model, [], images) as maps, torch.no_grad():
        found = model(images)
    assert maps[-1] == ((8, 6), (2 + 2 * 0.5 + 4, 2 + 2 * 0.5 + 4), (4, 4))
    assert found.shape[2:] == maps[-1].grid


class Conv2dSame(nn.Conv2d):
    """Pads in `forward`, as the class of the same name in timm does."""

    def forward(self, images):
        sides = []
        for size, kernel, stride in zip(images.shape[2:], self.kernel_size, self.stride, strict=True):
            both = max(0, (-(-size // stride) - 1) * stride + kernel - size)
            sides = [both // 2, both - both // 2, *sides]
        return functional.conv2d(functional.pad(images, sides), self.weight, self.bias, self.stride)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    "layers",
    [
        [Conv2dSame(1, 1, 3, 2), nn.ReLU(), Conv2dSame(1, 1, 5), Conv2dSame(1, 1, 4, 3)],
        [nn.Conv2d(1, 1, 3, stride=4), nn.Conv2d(1, 1, 2, padding="same"), nn.Conv2d(1, 1, 4, padding="same")],
        [nn.Conv2d(1, 1, 3, padding="same", dilation=2), nn.AvgPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(2)],
    ],
)
@pytest.mark.parametrize("side", [64, 67])
def test_positions_after_padding_that_is_not_symmetrical_are_right(layers, side):
    model, images = nn.Sequential(*layers).double(), torch.rand(1, 1, side, side, dtype=torch.float64).requires_grad_()
    for parameter in model.parameters():
        parameter.data.abs_()
    with feature_maps(model, [], images) as maps:
        found = model(images)
    row = found.shape[2] // 2
    (pixels,) = torch.autograd.grad(found[0, 0, row, row], images)
    seen = (pixels[0, 0] != 0).nonzero()
    centre = (seen.amin(dim=0) + seen.amax(dim=0)) / 2
    assert centre.tolist() == [first + row * step for first, step in zip(maps[-1].first, maps[-1].step, strict=True)]
    assert maps[-1].grid == found.shape[2:]


def test_padding_of_unknown_size_is_refused():
    class Odd(nn.Conv2d):
        def forward(self, images):
            return super().forward(functional.pad(images, (1, 1, 1, 1)))

    convolution, images = Odd(1, 1, 3), torch.rand(1, 1, 20, 20)
    with (
        feature_maps(convolution, [], images),
        pytest.raises(BadInput, match="Odd turned a 20×20 map into a 20×20 map, which its padding does not explain"),
    ):
        convolution(images)


def test_a_feature_map_of_unknown_position_is_refused():
    convolution, images = nn.Conv2d(1, 1, 1), torch.rand(1, 1, 20, 20)
    with (
        feature_maps(convolution, [], images),
        pytest.raises(BadInput, match="positions of a 7×7 feature map in the image are unknown"),
    ):
        convolution(functional.interpolate(images, (7, 7)))


def test_every_site_of_a_residual_network_is_inside_the_image():
    model = create_model("residual-capsnet", image_shape=(1, 28, 28), num_classes=3)
    found = inspect(Classifier(model, ("ant", "bee", "cat"), (1, 28, 28), Preprocessing()), torch.rand(1, 28, 28))
    torch.testing.assert_close(found.support.sum(dim=(2, 3)), torch.ones(found.support.shape[:2]))


def test_rules_that_are_called_with_named_arguments_are_recorded():
    layer = DenseCaps(6, 4, 8, parent_types=3, parent_pose_size=4)
    children = Capsules(torch.randn(1, 6, 4, 1, 8), torch.rand(1, 6, 4))
    with recorded(layer) as layers:
        layer.routing(children, routing_map=layer.routing_map, transform=layer.transform)
    assert len(layers[0].passes) == 3
    assert layers[0].routing_map is layer.routing_map
    assert layers[0].children is children
