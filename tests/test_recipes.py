"""The recipes of the papers: each trains its network on images of its dataset."""

from pathlib import Path

import pytest
import torch
from torch import nn

from torchcaps.data import Images, Splits
from torchcaps.errors import BadInput
from torchcaps.models import create_model
from torchcaps.recipes import OWN_IMAGES, RECIPES
from torchcaps.run_folder import read_run
from torchcaps.training import new_module

SHAPES = {
    "mnist": (1, 28, 10),
    "mnist-5k": (1, 28, 10),
    "fashion-mnist": (1, 28, 10),
    "cifar-10": (3, 32, 10),
    "cifar-100": (3, 32, 100),
    "svhn": (3, 32, 10),
    "smallnorb": (2, 48, 5),
    "toys": (2, 48, 5),
}
"""Channels, side in pixels and number of classes of each dataset."""


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe().data != OWN_IMAGES])
def test_a_recipe_trains_its_network_on_images_of_its_dataset(name):
    recipe = RECIPES[name]()
    assert recipe.data in SHAPES, f"add {recipe.data} to SHAPES"
    channels, side, classes = SHAPES[recipe.data]
    side = recipe.data_options.get("size", side)
    pixels = torch.randint(0, 256, (4, channels, side, side), dtype=torch.uint8)
    images = Images(pixels, torch.tensor([0, 1, 2, classes - 1]), tuple(map(str, range(classes))))
    module = new_module(recipe, Splits(images, images, images))
    preprocessing = recipe.preprocessing()
    inputs = preprocessing.varied(pixels, preprocessing.variation(seed=0, epoch=0, count=len(pixels)))
    loss, scores = module.loss_and_scores(inputs, images.labels, train=True)
    loss.backward()
    assert scores.shape == (4, classes)
    gradients = [p.grad for p in module.model.parameters() if p.grad is not None]
    assert all(torch.isfinite(x).all() for x in (loss, *gradients))
    assert sum(x.abs().sum() for x in gradients) > 0


def test_efficient_capsnet_for_smallnorb_has_the_parameters_of_the_authors():
    options = {**RECIPES["efficient-capsnet-smallnorb"]().model_options, "num_classes": 5}
    convolutions = 7 * 7 * 2 * 32 + 32 + 9 * (32 * 64 + 64 * 64 + 64 * 128) + 64 + 64 + 128
    norms, primary, routed = 2 * (32 + 64 + 64 + 128), 8 * 8 * 128 + 128, 16 * 5 * 8 * 16 + 16 * 5
    model = create_model("efficient-capsnet", image_shape=(2, 48, 48), **options)
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + primary + routed == 151_664
    assert [type(layer) for layer in model.features[:3]] == [nn.Conv2d, nn.LeakyReLU, nn.InstanceNorm2d]
    smallest = create_model("efficient-capsnet", image_shape=(2, 23, 23), **options)
    assert smallest(torch.rand(1, 2, 23, 23)).scores.shape == (1, 5)
    with pytest.raises(BadInput, match="at least 23×23"):
        create_model("efficient-capsnet", image_shape=(2, 22, 22), **options)


def test_a_run_of_an_earlier_version_can_be_read():
    """If a new setting makes this test fail, add its name to LATER in options.py."""
    run = Path(__file__).parents[1] / "results" / "efficient-capsnet-mnist-seed0"
    assert read_run(run).recipe.name == "efficient-capsnet-mnist"
