"""The support of classes for each kind of rule, in the layers below the class capsules, and in the image."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from test_inspection import classifier
from torchcaps import (
    BadInput,
    Capsules,
    Classifier,
    ConvCaps,
    DenseCaps,
    EMRouting,
    Prediction,
    Preprocessing,
    PrimaryCaps,
    Routing,
    SharedCaps,
    inspect,
)
from torchcaps.feature_maps import FeatureMap, in_the_image, place_of
from torchcaps.inspection import _support_below
from torchcaps.recording import recorded


@torch.no_grad()
def test_support_with_self_routing_is_the_share_of_the_mass():
    model = classifier("capsnet", routing="self_routing").model
    for parameter in model.class_capsules.routing.parameters():
        nn.init.normal_(parameter)
    with recorded(model) as layers:
        model(torch.rand(1, 1, 28, 28))
    (layer,) = layers
    found = layer.passes[0]
    mass = found.votes.weights(found.agreement)[0]
    torch.testing.assert_close(layer.support(0), mass / mass.sum(dim=(1, 2), keepdim=True))


@torch.no_grad()
def test_support_is_passed_down_with_the_couplings_of_the_last_pass_of_each_layer():
    model = classifier("matrix-capsnet", routing=Routing("em", iterations=2)).model
    with recorded(model) as layers:
        model(torch.rand(1, 1, 28, 28))
    found = _support_below(layers)
    for number in range(2):
        relevance = layers[-1].support(number).clone()
        for layer in layers[-2::-1]:
            last, edges = layer.passes[-1], layer.routing_map.edges
            shares = last.votes.weights(last.agreement)[0] / last.moments.mass[0].mT[:, edges[:, 1], None]
            given = torch.zeros(3, *layer.children.activation.shape[1:])
            for edge, (child, parent, _) in enumerate(edges.tolist()):
                given[:, child] += relevance[:, parent] @ shares[:, edge]
            relevance = given
        torch.testing.assert_close(found[number], relevance.sum(dim=2), rtol=1e-4, atol=1e-6)


class TwoLayers(nn.Module):
    """An image of 9×9 pixels, 3×3 sites without a bias, one site of hidden capsules, and three class capsules."""

    def __init__(self, rule):
        super().__init__()
        options = {"pose_size": (1, 9), "around_identity": False, "initial_std": 0.5}
        self.primary = PrimaryCaps(1, 2, (1, 9), 3, stride=3, bias=False)
        self.hidden = ConvCaps((3, 3), 2, 4, 3, routing=rule, **options)
        self.classes = DenseCaps(1, 4, 9, 3, 9, routing=rule)

    def forward(self, images, labels=None):
        capsules = self.classes(self.hidden(self.primary(images)))
        return Prediction(capsules.activation[:, 0], capsules)


@pytest.mark.parametrize("rule", ["dynamic", "uniform", "attention", "self_attention", "em", "self_routing"])
def test_capsules_with_a_pose_of_zero_support_no_class(rule):
    image = torch.zeros(1, 9, 9)
    image[0, 3:6, 3:6] = 1  # only the site in the centre sees it
    network = Classifier(TwoLayers(rule).eval(), ("ant", "bee", "cat"), (1, 9, 9), Preprocessing())
    of_centre = in_the_image(torch.eye(9)[4][None, None], FeatureMap((3, 3), (1.0, 1.0), (3.0, 3.0)), 9, 9)
    found = inspect(network, image).support
    torch.testing.assert_close(found, of_centre.expand_as(found))


@pytest.mark.parametrize("first", [-3.0, 0.0, 1.0])
def test_sites_at_the_border_keep_their_support(first):
    below, place = torch.rand(2, 3, 9), FeatureMap((3, 3), (first, first), (4.0, 4.0))
    torch.testing.assert_close(in_the_image(below, place, 9, 11).sum(dim=(2, 3)), below.sum(dim=2))
    for site in range(9):
        drawn = in_the_image(torch.eye(9)[site][None, None], place, 9, 11)
        row, column = (int(max(0, first + 4 * place)) for place in divmod(site, 3))
        assert divmod(int(drawn.argmax()), 11) == (min(row, 8), column)


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.convolution, self.pool = nn.Conv2d(1, 8, 2, stride=2), pool
        self.classes = SharedCaps(4, 3, 8)

    def forward(self, images, labels=None):
        numbers = self.pool(self.convolution(images)).flatten(2).mT.unflatten(2, (2, 1, 4))
        capsules = self.classes(Capsules(numbers, numbers.norm(dim=(3, 4))))
        return Prediction(capsules.activation[:, 0], capsules)


def test_the_place_of_capsules_behind_unknown_operations_is_not_guessed():
    for pool in (lambda x: functional.max_pool2d(x, 2), nn.AdaptiveMaxPool2d(4), nn.Upsample(scale_factor=2)):
        network = Classifier(Pooled(pool).eval(), ("ant", "bee", "cat"), (1, 16, 16), Preprocessing())
        with pytest.raises(BadInput, match=r"but the last feature map from a convolution or pooling module is 8×8"):
            inspect(network, torch.rand(1, 16, 16))
    known = Classifier(Pooled(nn.MaxPool2d(2)).eval(), ("ant", "bee", "cat"), (1, 16, 16), Preprocessing())
    assert inspect(known, torch.rand(1, 16, 16)).support.shape[2:] == (16, 16)


class Flattened(nn.Module):
    def forward(self, children):
        return Capsules(*(part.flatten(1, 2).unsqueeze(2) for part in children))


class Views(nn.Module):
    """Four capsules at each of 6×6 positions, as 144 sites; an earlier feature map has 144 positions."""

    def __init__(self, as_module):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.ReLU())
        self.primary = PrimaryCaps(4, 4, 4, 2, stride=2, bias=False)
        self.flattened = Flattened() if as_module else lambda children: Flattened.forward(None, children)
        self.classes = DenseCaps(144, 1, 4, 3, 8)

    def forward(self, images, labels=None):
        capsules = self.classes(self.flattened(self.primary(self.features(images))))
        return Prediction(capsules.activation[:, 0], capsules)


@pytest.mark.parametrize("as_module", [True, False])
def test_several_sites_at_one_position_are_not_taken_for_an_earlier_map(as_module):
    network = Classifier(Views(as_module).eval(), ("ant", "bee", "cat"), (1, 14, 14), Preprocessing())
    image = torch.zeros(1, 14, 14)
    image[0, 9:13, 1:5] = 1
    support = inspect(network, image).support[-1, 0]
    assert support[6:, :8].sum() > 0.9


def test_capsules_without_a_module_that_returns_them_are_refused_if_the_map_is_uncertain():
    maps = [FeatureMap((12, 12), (1.0, 1.0), (1.0, 1.0)), FeatureMap((6, 6), (1.5, 1.5), (2.0, 2.0))]
    assert place_of(maps, 144, sure=True) is maps[0]
    for positions, given in ((144, maps), (72, maps), (16, [FeatureMap((4, 4), (0.0, 0.0), (2.0, 2.0)), maps[0]])):
        with pytest.raises(BadInput, match="in a module that returns Capsules with one site per position"):
            place_of(given, positions, sure=False)


def test_a_subclass_of_em_can_state_that_its_activation_comes_from_the_mass():
    class OfMass(EMRouting):
        activation_from_mass = True

    assert OfMass(3).activation_from_mass
    assert not EMRouting(3).activation_from_mass


@torch.no_grad()
def test_the_support_of_self_attention_includes_the_learned_bias():
    layer = DenseCaps(6, 1, 8, 3, 8, routing="self_attention")
    layer.routing.bias[0] = 50.0
    children = Capsules(torch.randn(1, 6, 1, 1, 8), torch.rand(1, 6, 1))
    with recorded(layer) as layers:
        _, couplings = layer(children, return_couplings=True)
    votes = torch.einsum("sq,sjqn->jsn", children.pose[0, :, 0, 0], layer.transform[:, 0])
    given = (couplings[0, :, :, 0] + layer.routing.bias[:, 0].T)[..., None] * votes
    along = torch.einsum("jsn,jn->js", given, given.sum(dim=1)).clamp_min(0)
    torch.testing.assert_close(layers[0].support(1)[:, :, 0], along / along.sum(dim=1, keepdim=True))


@torch.no_grad()
def test_the_support_of_em_with_mixing_activations_is_the_share_of_the_mass():
    layer = DenseCaps(6, 1, 8, 3, 8, routing=Routing("em", parent_activation="mixing"))
    with recorded(layer) as layers:
        layer(Capsules(torch.randn(1, 6, 1, 1, 8), torch.rand(1, 6, 1)))
    assert torch.equal(layers[0].support(2), layers[0].shares(2))
