"""Programs of users with types. mypy checks this file, and pytest runs it."""

from collections.abc import Sequence
from pathlib import Path
from typing import assert_type

import pytest
import torch
from torch import Tensor

import torchcaps
from torchcaps import (
    Agreement,
    CapsNet,
    CapsuleHead,
    Capsules,
    Classifier,
    DenseCaps,
    Means,
    Prediction,
    Preprocessing,
    PrimaryCaps,
    RoutingMap,
    Rule,
    UniformRouting,
    Votes,
    create_model,
    dynamic_routing,
    reconstruction_loss,
)
from torchcaps.data import load_splits
from torchcaps.models import Pretrained
from torchcaps.routing import LayerShape

IMAGES = torch.rand(2, 1, 20, 20)


class SoftKMeans(Rule):
    def route(self, votes: Votes) -> Capsules:
        found = votes.moments()
        for _ in range(2):
            found = votes.moments(Agreement(linear=found.mean / (1 + found.variance)))
        assert_type(found.variance, Tensor)
        assert_type(votes.moments(variance=False), Means)
        return Capsules(found.mean, found.mean.square().sum(dim=(3, 4)).tanh())


class OwnNetwork(Pretrained):
    def __init__(self, image_shape: Sequence[int] = (1, 20, 20), num_classes: int = 3) -> None:
        super().__init__()
        self.primary = PrimaryCaps(image_shape[0], types=4, pose_size=[4, 4], kernel_size=9, stride=4)
        self.head = CapsuleHead(image_shape, num_classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Prediction:
        return self.head(images)


class OwnClassifier(Classifier):
    pass


def test_networks_return_predictions(tmp_path: Path) -> None:
    model = CapsNet(image_shape=IMAGES.shape[1:], num_classes=3)
    prediction = model(IMAGES, torch.tensor([0, 2]))
    assert_type(prediction, Prediction)
    assert reconstruction_loss(prediction.reconstruction, IMAGES) > 0
    with pytest.raises(AttributeError):
        prediction.scorse  # type: ignore[attr-defined]  # noqa: B018
    assert_type(OwnNetwork()(IMAGES), Prediction)
    create_model("capsnet", image_shape=[1, 20, 20], num_classes=3).save_pretrained(tmp_path / "network")
    assert_type(CapsNet.from_pretrained(tmp_path / "network"), CapsNet)
    OwnClassifier(model, ["a", "b", "c"], (1, 20, 20), Preprocessing()).save_pretrained(tmp_path / "classifier")
    assert_type(OwnClassifier.from_pretrained(tmp_path / "classifier"), OwnClassifier)


def test_layers_return_couplings_only_on_request() -> None:
    children = PrimaryCaps(1, types=4, pose_size=8, kernel_size=9)(IMAGES)
    assert_type(children, Capsules)
    layer = DenseCaps(144, 4, 8, 3, 16, routing=SoftKMeans())
    assert_type(layer(children), Capsules)
    assert_type(layer(children, return_couplings=True), tuple[Capsules, Tensor])
    asked = bool(children.pose.numel())
    assert_type(layer(children, return_couplings=asked), Capsules | tuple[Capsules, Tensor])
    rule, routing_map = SoftKMeans(), RoutingMap.dense(144, "cpu")
    assert_type(rule(children, layer.transform, routing_map), Capsules)
    assert_type(
        dynamic_routing(children.pose, layer.transform, routing_map, return_couplings=True), tuple[Capsules, Tensor]
    )
    assert_type(UniformRouting.for_layer(LayerShape(1, 4, 3, (1, 8), (1, 16))), UniformRouting)


def test_misspelled_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="CapsNte"):
        torchcaps.CapsNte  # type: ignore[attr-defined]  # noqa: B018
    assert not {"Any", "import_module"} & set(dir(torchcaps))
    assert {"CapsNet", "__version__"} <= set(dir(torchcaps))


def test_paths_of_data_can_be_strings(tmp_path: Path) -> None:
    for name, folder in ((Path("mnist-5k"), tmp_path), ("mnist-5k", str(tmp_path))):
        assert len(load_splits(name, folder).test) == 1000
