"""Networks and capsule layers in your own code: shared transforms, training, saving, export and inspection."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from torchcaps import (
    MODELS,
    ROUTINGS,
    Agreement,
    BadInput,
    CapsNet,
    CapsuleLayer,
    Capsules,
    Classifier,
    DenseCaps,
    Diverged,
    DynamicRouting,
    EMRouting,
    Prediction,
    Preprocessing,
    PrimaryCaps,
    Routing,
    RoutingMap,
    Rule,
    UniformRouting,
    create_model,
    inspect,
    squashed,
)
from torchcaps.decoder import has_optional_decoder
from torchcaps.export import export_classifier
from torchcaps.models import Pretrained
from torchcaps.models.pretrained import check_loadable, read_config
from torchcaps.recipe import Recipe
from torchcaps.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("untyped")
IMAGES, LABELS = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])


class Small(Pretrained):
    """Network whose subclasses change one part. The routing rule has no annotation."""

    def __init__(self, image_shape=(1, 8, 8), num_classes=3, routing="dynamic"):
        super().__init__()
        self.primary = PrimaryCaps(image_shape[0], 2, (1, 4), 3)
        self.classes = DenseCaps(36, 2, 4, num_classes, 8, routing=routing)

    def forward(self, images, labels=None):
        capsules = self.classes(self.primary(images))
        return Prediction(capsules.activation[:, 0], capsules)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(MODELS, "small", Small)


def module(model, **settings):
    return TrainingModule(model, Recipe("small", "small", "mnist-5k", precision="float32", **settings), num_classes=3)


def classifier_of(model):
    return Classifier(model.eval(), ("a", "b", "c"), (1, 8, 8), Preprocessing())


class Spread(Rule):
    """A rule without a constructor."""

    def route(self, votes):
        found = votes.moments()
        return Capsules(found.mean, torch.exp(-found.variance.mean(dim=(3, 4))))


def test_a_rule_without_a_constructor_is_saved(monkeypatch, small, tmp_path):
    monkeypatch.setitem(ROUTINGS, "spread", Spread)
    Small(routing="spread").save_pretrained(tmp_path)
    assert type(Small.from_pretrained(tmp_path).classes.routing) is Spread


def test_attributes_that_were_changed_after_the_creation_are_not_lost_in_silence(monkeypatch, small, tmp_path):
    class Warm(Small):
        def __init__(self, image_shape=(1, 8, 8), num_classes=3, temperature=1.0, routing="dynamic"):
            super().__init__(image_shape, num_classes, routing)
            self.temperature = temperature

    monkeypatch.setitem(ROUTINGS, "spread", Spread)
    one, other = Small(routing="spread"), Warm()
    one.classes.routing.competition = "types"
    other.temperature = 0.5
    with pytest.raises(BadInput, match=r"competition is 'types' here, but would be 'parents'"):
        one.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"layer Warm \(temperature is 0\.5 here, but would be 1\.0\): undo the change"):
        other.save_pretrained(tmp_path)
    Warm(temperature=0.5).save_pretrained(tmp_path)
    assert Warm.from_pretrained(tmp_path).temperature == 0.5


def test_scores_per_pixel_are_refused_by_the_classifier(small):
    class Dense(Small):
        def forward(self, images, labels=None):
            return Prediction(super().forward(images).scores[..., None].expand(-1, -1, 5))

    with pytest.raises(BadInput, match=r"scores of Dense must be \[B, classes\]; got \[2, 3, 5\]: call the network"):
        classifier_of(Dense()).predict(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))


def test_classes_that_were_defined_again_are_saved_under_their_names(monkeypatch, tmp_path):
    """As in a notebook whose cell was run again."""

    def defined():
        class Rerun(Spread):
            pass

        class Again(Small):
            pass

        monkeypatch.setitem(ROUTINGS, "rerun", Rerun)
        monkeypatch.setitem(MODELS, "again", Again)
        return Again

    network = defined()(routing="rerun")
    defined()
    network.save_pretrained(tmp_path)
    assert read_config(tmp_path).model == "again"
    assert type(MODELS["again"].from_pretrained(tmp_path).classes.routing) is ROUTINGS["rerun"]


def test_a_layer_trains_a_copy_of_the_transforms():
    transform = torch.randn(6, 4, 3, 8, 5)
    before = transform.clone()
    layers = [CapsuleLayer(RoutingMap.dense(6), transform, rule, draw=nn.init.ones_) for rule in ("dynamic", "em")]
    with torch.no_grad():
        layers[0].transform.add_(1)
    assert torch.equal(transform, before)
    assert (layers[1].transform == 1).all()


def test_layers_with_the_same_parameter_share_their_transforms():
    shared = nn.Parameter(torch.randn(6, 4, 3, 8, 5))
    layers = nn.ModuleList(CapsuleLayer(RoutingMap.dense(6), shared, "dynamic") for _ in range(2))
    assert [id(parameter) for parameter in layers.parameters()] == [id(shared)]


def test_a_rule_without_annotation_can_be_given_with_options(small, tmp_path):
    model = create_model("small", routing=Routing("dynamic", iterations=2))
    model.save_pretrained(tmp_path)
    assert Small.from_pretrained(tmp_path).classes.routing.iterations == 2
    assert Small.from_pretrained(tmp_path, routing=Routing("dynamic", iterations=4)).classes.routing.iterations == 4


class Repeated(UniformRouting):
    """A rule that is not in `ROUTINGS`."""

    iterations = 3


def test_early_iterations_change_only_routing_rules(small):
    model = Small(routing=Repeated())
    model.messages = nn.Identity()
    model.messages.iterations = 4
    training = module(model, epochs=2, early_epochs=1, early_iterations=1)
    training.set_iterations(early=True)
    assert (model.classes.routing.iterations, model.messages.iterations) == (1, 4)


def test_a_network_with_shared_transforms_is_refused_before_it_is_trained():
    model = CapsNet((1, 17, 17), 3, convolution_channels=4, primary_types=2, decoder=False)
    model.again = DenseCaps(1, 2, 8, 3, 16)
    model.again.transform = model.class_capsules.transform
    with pytest.raises(BadInput, match=r"again.transform and class_capsules.transform\): give each layer its own"):
        check_loadable(model)
    model.again.transform = nn.Parameter(model.class_capsules.transform.detach()[:, 1:])
    with pytest.raises(BadInput, match=r"class_capsules.transform and again.transform\): give each layer its own"):
        check_loadable(model)


def test_a_rule_that_stores_an_argument_under_another_name_is_not_saved():
    class Renamed(UniformRouting):
        def __init__(self, competition="parents"):
            super().__init__()
            self.rivals = competition

    with pytest.raises(BadInput, match=r"Renamed does not store the argument 'competition' .* define saved_options"):
        _ = Renamed("types").saved_options


def test_the_sizes_of_a_rule_are_compared_with_the_layer_if_the_rule_saves_them():
    class Sized(Rule):
        def __init__(self, pose_size):
            super().__init__()
            self.pose_size = pose_size

    class Saved(Sized):
        @property
        def saved_options(self):
            return {"pose_size": self.pose_size}

    assert DenseCaps(6, 2, 4, 3, 8, routing=Sized(4))
    with pytest.raises(ValueError, match="made for pose_size=4, but the layer has pose_size=8"):
        DenseCaps(6, 2, 4, 3, 8, routing=Saved(4))


def test_only_a_decoder_that_is_an_option_is_left_out(small, tmp_path):
    class Encoded(Small):
        def __init__(self, image_shape=(1, 8, 8), num_classes=3, routing="dynamic"):
            super().__init__(image_shape, num_classes, routing)
            self.decoder = nn.Conv2d(1, 1, 1)

        def forward(self, images, labels=None):
            return super().forward(self.decoder(images))

    assert not has_optional_decoder(Encoded())
    sizes = {"image_shape": (1, 20, 20), "convolution_channels": 4, "primary_types": 2}
    assert [has_optional_decoder(create_model("capsnet", **sizes, decoder=one)) for one in (True, False)] == [
        True,
        False,
    ]
    exported = export_classifier(classifier_of(Encoded()), tmp_path / "model.pt2", "pt2")
    assert exported.same_classes == 6


def test_a_network_without_the_usual_arguments_is_saved_and_loaded(monkeypatch, tmp_path):
    class Renamed(Pretrained):
        def __init__(self, classes=3):
            super().__init__()
            self.linear = nn.Linear(64, classes)

        def forward(self, images, labels=None):
            return Prediction(self.linear(images.flatten(1)))

    monkeypatch.setitem(MODELS, "renamed", Renamed)
    classifier, pixels = classifier_of(Renamed()), np.zeros((1, 1, 8, 8), dtype=np.uint8)
    classifier.save_pretrained(tmp_path)
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict(pixels).scores, classifier.predict(pixels).scores)


def test_networks_with_another_forward_are_refused(small):
    class WithoutLabels(Small):
        def forward(self, images):
            return super().forward(images)

    class OnlyScores(Small):
        def forward(self, images, labels=None):
            return super().forward(images).scores

    with pytest.raises(BadInput, match=r"WithoutLabels.forward takes no labels: define it as"):
        module(WithoutLabels()).loss_and_scores(IMAGES, LABELS, train=True)
    with pytest.raises(BadInput, match=r"OnlyScores.forward must return a torchcaps.Prediction; got a float32 tensor"):
        module(OnlyScores()).loss_and_scores(IMAGES, LABELS, train=True)


def test_a_module_with_any_output_can_diverge(small):
    @dataclass
    class Found:
        capsules: object

    class Wrapped(nn.Module):
        def forward(self, capsules):
            return Found(capsules)

    class Diverging(Small):
        def __init__(self, image_shape=(1, 8, 8), num_classes=3, routing="dynamic"):
            super().__init__(image_shape, num_classes, routing)
            self.wrapped = Wrapped()

        def forward(self, images, labels=None):
            capsules = self.wrapped(self.classes(self.primary(images))).capsules
            return Prediction(capsules.activation[:, 0] / 0, capsules)

    training = module(Diverging())
    with pytest.raises(Diverged, match="first value that is not finite is the loss itself"):
        training._loss(IMAGES, LABELS, train=False)


class Functional(Small):
    """Network whose features are computed with or without a convolution module, and weighted by a gate per channel."""

    def __init__(self, image_shape=(1, 8, 8), num_classes=3, routing="dynamic", gated=False):
        super().__init__(image_shape, num_classes, routing)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.ReLU()) if gated else None

    def forward(self, images, labels=None):
        convolution = self.primary.convolution
        if self.gate is None:
            features = functional.conv2d(images, convolution.weight, convolution.bias)
        else:
            features = convolution(images)
            features = features * self.gate(features)
        capsules = self.classes(squashed(features.flatten(2).mT.unflatten(2, (2, 1, 4))))
        return Prediction(capsules.activation[:, 0], capsules)


def test_inspection_refuses_features_whose_positions_are_unknown(small):
    with pytest.raises(BadInput, match="no convolution or pooling module computed"):
        inspect(classifier_of(Functional()), torch.zeros(1, 8, 8, dtype=torch.uint8))


def test_inspection_ignores_weights_per_channel(small):
    model = Functional(gated=True)
    nn.init.zeros_(model.gate[1].weight)
    nn.init.ones_(model.gate[1].bias)
    pixels = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8)
    plain = Small()
    plain.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(*(inspect(classifier_of(one), pixels).support for one in (model, plain)))


def test_a_network_whose_capsules_are_all_at_one_position_is_inspected():
    model = create_model("generative-capsnet", image_shape=(2, 29, 29), num_classes=3)
    classifier = Classifier(model.eval(), ("a", "b", "c"), (2, 29, 29), Preprocessing())
    support = inspect(classifier, torch.zeros(2, 29, 29, dtype=torch.uint8)).support
    torch.testing.assert_close(support, torch.full_like(support, 1 / 29**2))


def test_couplings_of_a_pass_with_constant_couplings_have_no_gradient():
    class Focused(Rule):
        def __init__(self):
            super().__init__()
            self.focus = nn.Parameter(torch.ones(()))

        def route(self, votes):
            even = votes.moments(variance=False)
            found = votes.moments(Agreement(linear=self.focus * even.mean), constant_couplings=True)
            return Capsules(found.mean, found.mass)

    pose, transform = torch.randn(2, 6, 4, 1, 8, requires_grad=True), torch.randn(6, 4, 10, 8, 16, requires_grad=True)
    children = Capsules(pose, torch.rand(2, 6, 4))
    parents, couplings = Focused()(children, transform, RoutingMap.dense(6), return_couplings=True)
    assert not couplings.requires_grad
    torch.testing.assert_close(couplings.sum(dim=1), torch.ones(2, 6, 4))
    assert parents.pose.requires_grad


def test_the_representation_of_a_rule_shows_its_options_and_those_of_its_base_class():
    class Softer(EMRouting):
        def __init__(self, parent_types, softness=4, **options):
            super().__init__(parent_types, tempering=1 / softness, **options)
            self.softness = softness

    shown = repr(Softer(3, mean_damping=0.1))
    assert shown.startswith("Softer(parent_types=3, softness=4, iterations=3, ")
    assert "mean_damping=0.1, tempering=0.25" in shown
    assert repr(UniformRouting("su")) == "UniformRouting(squash_form='su')"


@pytest.mark.parametrize("rule", [EMRouting(3), DynamicRouting()])
@pytest.mark.parametrize("iterations", ["3", None, 2.5, 0, 1001])
def test_iterations_that_are_wrong_after_a_change_are_refused(rule, iterations):
    layer = DenseCaps(6, 4, 8, 3, 16, routing=rule)
    layer.routing.iterations = iterations
    with pytest.raises(ValueError, match="iterations must be an integer from 1 to 1,000; got"):
        layer(Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4)))
