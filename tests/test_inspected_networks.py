"""Inspection of networks that use a layer twice, have two heads, or do not end with one capsule per class."""

import copy

import pytest
import torch
from torch import nn

from torchcaps import (
    BadInput,
    Capsules,
    ClassCaps,
    Classifier,
    ConvCaps,
    PooledCapsNet,
    Prediction,
    Preprocessing,
    PrimaryCaps,
    inspect,
)
from torchcaps.feature_maps import FeatureMap, feature_maps
from torchcaps.recording import recorded


class Stack(nn.Module):
    """Two capsule layers of 25 sites below a class layer; `first` and `second` can be the same layer."""

    def __init__(self, first, second):
        super().__init__()
        self.primary = PrimaryCaps(1, 4, (2, 2), 3, stride=2, squash_form="none", activation="sigmoid")
        self.first, self.second = first, second
        self.classes = ClassCaps(torch.rand(25, 2), 4, 3, (2, 2))

    def forward(self, images, labels=None):
        capsules = self.classes(self.second(self.first(self.primary(images))))
        return Prediction(capsules.activation[:, 0], capsules)


def supports(model, image):
    return inspect(Classifier(model.eval(), ("ant", "bee", "cat"), (1, 12, 12), Preprocessing()), image).support


def test_a_layer_that_a_model_uses_twice_is_two_layers():
    layer, image = ConvCaps((5, 5), 4, 4, 3, padding=1, pose_size=(2, 2)), torch.rand(1, 12, 12)
    shared = Stack(layer, layer)
    separate = copy.deepcopy(shared)
    separate.second = copy.deepcopy(layer)
    assert torch.equal(supports(shared, image), supports(separate, image))


@torch.no_grad()
def test_the_support_of_self_routing_is_the_share_of_each_child_in_the_mass():
    model = nn.Sequential(
        PrimaryCaps(1, 4, (2, 2), 3), ClassCaps(torch.rand(25, 2), 4, 3, (2, 2), routing="self_routing")
    )
    nn.init.normal_(model[1].routing.weight)
    with recorded(model) as layers:
        model(torch.rand(1, 1, 7, 7))
    weights = layers[0].passes[0].votes.weights(layers[0].passes[0].agreement)[0]
    torch.testing.assert_close(layers[0].support(0), weights / weights.sum(dim=(1, 2), keepdim=True))


def test_a_network_may_change_capsules_between_two_layers():
    class Gated(Stack):
        def forward(self, images, labels=None):
            capsules = self.first(self.primary(images))
            capsules = self.second(Capsules(2 * capsules.pose, 0.5 * capsules.activation))
            capsules = self.classes(capsules)
            return Prediction(capsules.activation[:, 0], capsules)

    layers = (ConvCaps((5, 5), 4, 4, 3, padding=1, pose_size=(2, 2)) for _ in range(2))
    torch.testing.assert_close(supports(Gated(*layers), torch.rand(1, 12, 12)).sum(dim=(2, 3)), torch.ones(3, 3))


@pytest.mark.parametrize("change", [lambda x: x, lambda x: 0.9 * x, torch.ones_like])
@pytest.mark.parametrize("dim", [1, 2])
def test_capsules_in_another_order_are_refused(dim, change):
    class Turned(Stack):
        def forward(self, images, labels=None):
            pose, activation = self.first(self.primary(images))
            capsules = self.classes(self.second(Capsules(pose.flip(dim), change(activation.flip(dim)))))
            return Prediction(capsules.activation[:, 0], capsules)

    layers = (ConvCaps((5, 5), 4, 4, 3, padding=1, pose_size=(2, 2)) for _ in range(2))
    with pytest.raises(BadInput, match="in another order"):
        supports(Turned(*layers), torch.rand(1, 12, 12))


class BlurPool2d(nn.Module):
    """Centred blur with stride 2, with the attributes of the class of this name in timm."""

    def __init__(self, channels):
        super().__init__()
        self.filt_size, self.stride, self.padding = 3, 2, [1, 1, 1, 1]
        kernel = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", (kernel[:, None] * kernel).expand(channels, 1, 3, 3).clone())

    def forward(self, maps):
        padded = nn.functional.pad(maps, self.padding, mode="reflect")
        return nn.functional.conv2d(padded, self.kernel, stride=2, groups=len(self.kernel))


def test_the_positions_of_a_blurred_feature_map_are_those_of_the_centres():
    """The positions of a map that an unknown module makes half as large would be half a pixel further."""
    image = torch.rand(1, 1, 12, 12)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), BlurPool2d(4))
    with feature_maps(model, [], image) as maps:
        model(image)
    assert maps[-1] == FeatureMap((6, 6), (0, 0), (2, 2))


def test_a_network_that_runs_on_two_inputs_is_refused():
    class TwoViews(Stack):
        def forward(self, images, labels=None):
            super().forward(images.flip(3))
            return super().forward(images)

    with pytest.raises(BadInput, match=r"the rule classes\.routing ran with different children"):
        supports(TwoViews(nn.Identity(), nn.Identity()), torch.rand(1, 12, 12))


@pytest.mark.parametrize("types", [3, 100])
def test_a_network_whose_capsule_layers_are_no_chain_is_refused(types):
    class TwoHeads(Stack):
        def forward(self, images, labels=None):
            children = self.primary(images)
            self.second(children)
            capsules = self.classes(children)
            return Prediction(capsules.activation[:, 0], capsules)

    model = TwoHeads(nn.Identity(), ClassCaps(torch.rand(25, 2), 4, types, (2, 2)))
    message = r"the parents of second\.routing are not the children of classes\.routing: inspect a network in which"
    with pytest.raises(BadInput, match=message):
        supports(model, torch.rand(1, 12, 12))


def test_a_network_whose_last_capsules_are_not_one_per_class_is_refused():
    class Pooled(Stack):
        def forward(self, images, labels=None):
            capsules = self.second(self.first(self.primary(images)))
            return Prediction(capsules.activation.mean(dim=1), capsules)

    model = Pooled(nn.Identity(), ConvCaps((5, 5), 4, 3, 3, pose_size=(2, 2)))
    with pytest.raises(BadInput, match=r"\(rule second\.routing\) has 9 sites and 3 parent types, but .* 3 classes"):
        supports(model, torch.rand(1, 12, 12))

    class Hidden(Stack):
        def forward(self, images, labels=None):
            capsules = self.classes(self.primary(images))
            capsules = Capsules(-capsules.pose, 1 - capsules.activation)
            return Prediction(capsules.activation[:, 0], capsules)

    with pytest.raises(BadInput, match=r"the parents of the last rule, classes\.routing, are not the class capsules"):
        supports(Hidden(nn.Identity(), nn.Identity()), torch.rand(1, 12, 12))


@pytest.mark.usefixtures("untyped")
def test_an_image_that_is_neither_a_path_nor_pixels_is_refused():
    model = PooledCapsNet((1, 14, 14), 3).eval()
    with pytest.raises(BadInput, match=r"image must be a path, or pixels \[C, H, W\]; got list \[0.5\]"):
        inspect(Classifier(model, ("ant", "bee", "cat"), (1, 14, 14), Preprocessing()), [0.5])


@pytest.mark.usefixtures("untyped")
def test_a_network_without_class_names_is_refused_with_the_cure():
    with pytest.raises(BadInput, match=r"classifier must be a Classifier; got .*: use Classifier"):
        inspect(nn.Sequential(), torch.rand(1, 12, 12))
