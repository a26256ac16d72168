"""Hinton, Sabour & Frosst 2018, section 5: matrix capsules on MNIST and CIFAR-10."""

from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure

from torchcaps.data import Images
from torchcaps.errors import caption
from torchcaps.experiments.study import Outcome, Row, Study, part, scores_of


def mnist(study: Study) -> Outcome:
    """Train a matrix capsule network on MNIST twice: with two routing iterations and with uniform couplings."""
    images, epochs = study.choose((4_000, 4), (54_000, 8), (54_000, 30))
    return compared(study, "mnist", images, epochs, "99.56", 64)


def cifar10(study: Study) -> Outcome:
    """Train a matrix capsule network on CIFAR-10. Its first convolution has 256 channels, as in the paper.

    The network is trained twice: once with two routing iterations and once with uniform couplings.
    """
    images, epochs = study.choose((2_000, 4), (45_000, 8), (45_000, 60))
    return compared(study, "cifar-10", images, epochs, "88.1", 256)


def compared(study: Study, data: str, images: int, epochs: int, paper: str, channels: int) -> Outcome:
    """Train the network with two routing iterations and with uniform couplings, and compare the test accuracies."""
    images = study.at_most(images, study.data or data)
    rows, wrong = [], None
    for name, iterations in (("T = 2", 2), ("uniform couplings", 1)):
        found = []
        for seed in range(study.seeds):
            options: dict[str, Any] = {"routing_options": {"iterations": iterations}, "widths": (channels, 8, 16, 16)}
            recipe = study.recipe("matrix-capsnet-mnist-paper", seed, images=images, epochs=epochs, **options)
            recipe = replace(recipe, data=study.data or data)
            splits = study.splits(recipe, images, study.choose(2_000, None, None))
            model, metrics = study.trained(part(name, seed), recipe, splits)
            found.append(metrics["test_accuracy_percent"])
            if wrong is None:
                scores = scores_of(model, splits.test.pixels, recipe.preprocessing())
                wrong = (splits.test, scores)
        rows.append(Row(f"{name}: accuracy", found, paper if iterations == 2 else None))
    assert wrong is not None
    notes = [f"Trained on {images:,} images for {epochs} epochs. The widths of the network are {channels}/8/16/16."]
    return Outcome(rows, draw(*wrong), [*notes, *study.notes_on_data(study.data or data, data)])


def draw(images: Images, scores: torch.Tensor) -> Figure:
    """Draw the first misclassified test images."""
    wrong = (scores.argmax(dim=1) != images.labels).nonzero().flatten()[:24]
    names = [caption(name, 14) for name in images.class_names]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(3, 8).flatten()
    for axis in axes:
        axis.axis("off")
    for axis, index in zip(axes, wrong.tolist(), strict=False):
        pixels = images.pixels[index]
        axis.imshow((pixels if len(pixels) == 3 else pixels[:1]).permute(1, 2, 0).numpy(), cmap="gray")
        true, predicted = names[int(images.labels[index])], names[int(scores[index].argmax())]
        axis.set_title(f"{true}\npredicted {predicted}", fontsize=7, parse_math=False)
    figure.suptitle("first misclassified test images")
    return figure
