"""The recipes for your own images, compared on a small training set."""

from dataclasses import replace
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from torchcaps.data import DATASETS
from torchcaps.experiments.study import Outcome, Row, Study, part
from torchcaps.pictures import STYLES
from torchcaps.recipes import OWN_IMAGES, RECIPES

LARGEST = 32
"""Side in pixels of the largest images on which CapsNet is trained; its training time grows fast with the image.

Images of a folder or table are resized to this size.
"""
HELD_OUT = 0.3
"""Fraction of the training images of a folder or table that is held out, if it has no validation split."""
PRETRAINED = "timm-capsnet-images"
"""Recipe that is left out, because it is meant for the weights that timm publishes."""


def run(study: Study) -> Outcome:
    """Train each recipe on a small part of a dataset, and measure its accuracy on validation and test images."""
    source = study.data or study.choose("mnist-5k", "fashion-mnist", "fashion-mnist")
    images, tested, epochs = study.choose((500, 500, 10), (1_000, 10_000, 30), (5_000, 10_000, 30))
    own: dict[str, Any] = {"data": source}
    if source not in DATASETS:
        own |= {"data_options": {"image_size": LARGEST}, "validation_fraction": HELD_OUT}
    every = [make() for name, make in RECIPES.items() if name != PRETRAINED]
    recipes = [recipe for recipe in every if recipe.data == OWN_IMAGES]
    found: dict[str, list[dict[str, float]]] = {}
    curves: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(study.seeds):
        for given in recipes:
            recipe = replace(given, seed=seed, epochs=epochs, **own)
            splits = study.splits(recipe, images, tested)
            if recipe.model == "capsnet" and max(splits.train.image_shape[1:]) > LARGEST:
                continue
            folder = part(recipe.name, seed)
            found.setdefault(recipe.name, []).append(study.trained(folder, recipe, splits)[1])
            if not seed:
                curves[recipe.name] = study.epoch_metrics(folder, "epoch", "validation_accuracy_percent")
    rows = [
        Row(f"{name}: {split} accuracy", [metrics[f"{split}_accuracy_percent"] for metrics in runs])
        for split in ("validation", "test")
        for name, runs in found.items()
    ]
    notes = [
        f"Trained on {len(splits.train):,} images of {source} for {epochs} epochs, tested on {len(splits.test):,} "
        f"images. The epoch is chosen on {len(splits.validation):,} validation images. To choose a recipe for your own "
        "images, compare the validation accuracies: an accuracy on images that were used for a choice is too high."
    ]
    if source not in DATASETS:
        notes.append(
            f"Images are resized to {LARGEST}×{LARGEST} pixels. At a larger size, another recipe may be better."
        )
    if "capsnet-images" not in found:
        notes.append(f"CapsNet is trained only on images of up to {LARGEST}×{LARGEST} pixels.")
    return Outcome(rows, draw(curves), notes)


def draw(curves: dict[str, list[tuple[float, ...]]]) -> Figure:
    """Draw the validation accuracy over the epochs, one curve per recipe."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for (name, points), style in zip(curves.items(), cycle(STYLES), strict=False):
        axis.plot(*zip(*points, strict=True), markersize=4, linewidth=0.8, label=name, **style)
    axis.set_xlabel("epoch")
    axis.set_ylabel("validation accuracy %")
    axis.legend(fontsize=8)
    return figure
