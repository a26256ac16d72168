"""Routing maps and options of your own networks: saving refuses what loading would not create again."""

import pytest
import torch

from test_own_networks import IMAGES, Small, small
from torchcaps import MODELS, BadInput, CapsuleLayer, DenseCaps, Prediction, RoutingMap, create_model

__all__ = ["small"]
pytestmark = pytest.mark.usefixtures("untyped")


class Sparse(Small):
    """Network whose hidden capsules have random edges."""

    def __init__(self, image_shape=(1, 8, 8), num_classes=3, seed=None, sites=(0, 1), routing="dynamic"):
        super().__init__(image_shape, num_classes, routing)
        generator = torch.Generator() if seed is None else torch.Generator().manual_seed(seed)
        if seed is None:
            generator.seed()
        child = torch.randperm(36, generator=generator)[:20]
        edges = torch.stack([child, torch.arange(20) % 4, torch.zeros(20, dtype=torch.int64)], dim=1)
        self.hidden = CapsuleLayer(RoutingMap(edges, 36, 4, 1, (2, 2)), torch.randn(1, 2, 2, 4, 4), routing)
        self.classes = DenseCaps(4, 2, 4, num_classes, 8, routing=routing)

    def forward(self, images, labels=None):
        capsules = self.classes(self.hidden(self.primary(images)))
        return Prediction(capsules.activation[:, 0], capsules)


def test_a_map_that_the_loaded_network_would_not_have_is_not_lost_in_silence(monkeypatch, small, tmp_path):
    monkeypatch.setitem(MODELS, "sparse", Sparse)
    with pytest.raises(BadInput, match=r"layer hidden \(routing_map is 'a map of 20 edges .*: create the map from the"):
        Sparse().save_pretrained(tmp_path)
    network = Sparse(seed=1)
    network.save_pretrained(tmp_path)
    assert torch.equal(Sparse.from_pretrained(tmp_path)(IMAGES).scores, network(IMAGES).scores)
    network.hidden.routing_map = Sparse(seed=2).hidden.routing_map
    with pytest.raises(BadInput, match="layer hidden"):
        network.save_pretrained(tmp_path)


class Lazy(Sparse):
    """Network that creates its first map in the first call, and keeps a list of maps."""

    def __init__(self, image_shape=(1, 8, 8), num_classes=3, sites=(0, 1), routing="dynamic"):
        super().__init__(image_shape, num_classes, 1, sites, routing)
        self.first = None
        self.maps = [RoutingMap.dense(3), RoutingMap.dense(4)]

    def forward(self, images, labels=None):
        self.first = self.first or RoutingMap.dense(36)
        return super().forward(images)


def test_maps_that_are_created_in_the_first_call_and_maps_in_lists_are_compared_too(monkeypatch, small, tmp_path):
    monkeypatch.setitem(MODELS, "lazy", Lazy)
    network = Lazy()
    network(IMAGES)
    network.save_pretrained(tmp_path)
    network.maps[1] = RoutingMap.dense(5)
    with pytest.raises(BadInput, match=r"layer Lazy \(maps\[1\] is 'a map of 5 edges"):
        network.save_pretrained(tmp_path)
    for name in ("image_shape", "num_classes"):
        with pytest.raises(BadInput, match=f"{name} must be at least 1"):
            create_model("lazy", **{"image_shape": (1, 8, 8), name: 0 if name == "num_classes" else (1, 0, 8)})


@pytest.mark.parametrize("sites", [[0, -1], [], [0.5], ["a"], [[0, 1], [1, 2]], 0, -1])
def test_a_network_can_have_options_of_any_numbers_and_lists(sites, monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "sparse", Sparse)
    create_model("sparse", seed=0, sites=sites).save_pretrained(tmp_path)
    assert Sparse.from_pretrained(tmp_path).options["sites"] == sites
