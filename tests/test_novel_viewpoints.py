"""The experiment novel-viewpoints: its images, recipes, notes and figure."""

import pytest
import torch

from torchcaps.data import Images
from torchcaps.experiments import Study
from torchcaps.experiments.novel_viewpoints import (
    FAMILIAR,
    NETWORKS,
    RECENT_NETWORKS,
    VARIATIONAL_BAYES,
    by_viewpoint,
    draw,
    recent_recipe,
    unmatched,
)
from torchcaps.recipes.matrix_capsules import VARIATIONAL


def test_by_viewpoint_puts_every_image_into_exactly_one_part():
    attributes = {"azimuth": torch.arange(0, 36, 2).repeat(2), "elevation": torch.arange(36) % 9}
    images = Images(torch.zeros(36, 1, 2, 2, dtype=torch.uint8), torch.zeros(36, dtype=torch.long), ("a",), attributes)
    for split, count in (("azimuth", 12), ("elevation", 12)):
        familiar, novel = by_viewpoint(images, split)
        assert (len(familiar), len(novel)) == (count, 36 - count)
        assert not set(familiar.attributes[split].tolist()) & set(novel.attributes[split].tolist())


def test_the_capsule_networks_of_novel_viewpoints_differ_only_in_what_their_routing_needs(tmp_path):
    study = Study("quick", None, 1, tmp_path, tmp_path)
    recipes = {name: vars(recent_recipe(study, name, 3, images=1_000, epochs=2)) for name in RECENT_NETWORKS}
    em = recipes["capsules"]
    assert (em["seed"], em["epochs"], em["routing_options"]["iterations"]) == (3, 2, 3)
    different = {name: {key for key in em if recipe[key] != em[key]} for name, recipe in recipes.items()}
    assert different["uniform couplings"] == {"routing_options"}
    assert different[VARIATIONAL_BAYES] == {"model_options", "routing_options", "batch_norm_images"}
    assert recipes[VARIATIONAL_BAYES]["model_options"] == {**em["model_options"], **VARIATIONAL}


@pytest.mark.parametrize("networks", [NETWORKS, RECENT_NETWORKS])
def test_the_figure_of_novel_viewpoints_shows_every_network(networks):
    every = {(split, name): [(60.0, 50.0), (90.0, 70.0)] for split in FAMILIAR for name in networks}
    for axis in draw(every).axes:
        assert [line.get_label() for line in axis.lines] == [*networks]


def test_a_note_says_which_accuracies_on_novel_viewpoints_are_not_comparable():
    found = {
        "CNN": [(95.175, 68.225), (96.0, 70.0)],
        "capsules": [(94.2, 75.95), (96.9, 74.0)],
        "uniform couplings": [(69.925, 65.575), (97.1, 80.0)],
    }
    first, second = unmatched("azimuth", found)
    assert first.startswith("azimuth, uniform couplings, seed 0: the accuracy on familiar viewpoints is 69.93 %, but")
    assert "95.18 % for the CNN" in first
    assert second.startswith("azimuth, uniform couplings, seed 1: ")
