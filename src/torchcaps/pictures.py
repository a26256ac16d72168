"""Pictures of a training run: learning curves, reconstructions, and the images with the worst scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.data import Images, Preprocessing
from torchcaps.data.files import write_picture
from torchcaps.errors import captions
from torchcaps.threads import evaluating

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#999999")
"""Colours that people with colour blindness can distinguish (Okabe & Ito)."""
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#E69F00", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#CC79A7", "linestyle": ":", "marker": "D"},
    {"color": "#000000", "linestyle": (0, (1, 4)), "marker": "v"},
)
"""Styles of several lines in one picture, which can also be distinguished in grey."""


def save_curves(rows: Sequence[Mapping[str, Any]], path: Path, margins: Sequence[float] = ()) -> None:
    """Draw loss, validation accuracy and speed over the epochs, and the mean recall if it differs from the accuracy.

    Arguments:
        rows: rows of metrics.csv, one per epoch.
        path: PNG file to write.
        margins: margin of the spread loss at the end of each epoch, drawn as a dashed line in the panel of the loss,
            because the loss rises with the margin; if empty, no line is drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    loss, accuracy, speed = figure.subplots(1, 3)
    epochs = [int(row["epoch"]) for row in rows]
    for name, colour, marker in (("train_loss", COLOURS[0], "."), ("validation_loss", COLOURS[1], "x")):
        values = [float(row[name]) for row in rows]
        loss.plot(epochs, values, color=colour, marker=marker, label=name.replace("_", " "))
    loss.set_title("loss")
    if margins:
        right = loss.twinx()
        right.plot(epochs, margins[: len(epochs)], color=COLOURS[3], linestyle="--")
        right.set_ylabel("margin (dashed)")
        loss.set_zorder(1)  # the legend covers the line of the margin
        loss.patch.set_visible(False)
    loss.legend(fontsize=8)
    accuracies, recalls = (
        [float(row.get(f"validation_{name}_percent") or "nan") for row in rows] for name in ("accuracy", "recall")
    )
    accuracy.plot(epochs, accuracies, color=COLOURS[1], marker="x", label="accuracy")
    accuracy.set_title("validation accuracy, %")
    if any(abs(one - other) > 0.01 for one, other in zip(accuracies, recalls, strict=True)):
        accuracy.plot(epochs, recalls, color=COLOURS[0], marker=".", label="mean recall")
        accuracy.legend(fontsize=8)
        accuracy.set_title("validation accuracy and mean recall, %")
    speeds = [float(row["train_images_per_second"]) for row in rows]
    speed.plot(epochs, speeds, color=COLOURS[2], marker=".")
    speed.set_title("training images per second")
    speed.set_ylim(0, 1.1 * max(speeds))
    for axis in (loss, accuracy, speed):
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    write_picture(path, figure)


def save_reconstructions(model: nn.Module, preprocessing: Preprocessing, images: Images, path: Path) -> None:
    """Draw images above their reconstructions, one column per image; do nothing if the model has no decoder.

    The true class is written above each column, and the predicted class below.

    Arguments:
        model: network that takes images and returns a `Prediction`.
        preprocessing: conversion of the stored images to the model's input.
        images: images of a split, of which up to ten are drawn, at regular intervals.
        path: PNG file to write.
    """
    step = max(1, len(images) // 10)
    _draw(model, preprocessing, images.subset(range(0, len(images), step)[:10]), path)


def save_worst(
    model: nn.Module,
    preprocessing: Preprocessing,
    images: Images,
    scores: Float[Tensor, "N K"],
    path: Path,
    count: int = 12,
) -> None:
    """Draw the images whose margins (score of the true class minus the highest other score) are lowest.

    If the model has a decoder, the reconstructions are drawn below the images.

    Arguments:
        model: network that takes images and returns a `Prediction`.
        preprocessing: conversion of the stored images to the model's input.
        images: N images of a split.
        scores: ``[N, K]``, the scores of the images.
        path: PNG file to write.
        count: largest number of images to draw.
    """
    labels = images.labels[:, None]
    margins = scores.gather(1, labels).squeeze(1) - scores.scatter(1, labels, -torch.inf).amax(dim=1)
    worst = margins.argsort(stable=True)[:count]
    _draw(model, preprocessing, images.subset(worst), path, scores[worst].argmax(dim=1))


def _draw(
    model: nn.Module, preprocessing: Preprocessing, images: Images, path: Path, winners: Tensor | None = None
) -> None:
    """Draw images, their reconstructions and their predicted classes `winners`.

    If the model has no decoder, draw the images without reconstructions; without `winners`, draw nothing.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    with evaluating(model), torch.inference_mode():
        inputs = preprocessing.plain(images.pixels)
        prediction = model(inputs.to(next(model.parameters())))
    drawn = prediction.reconstruction
    if winners is None:
        if drawn is None:
            return
        winners = prediction.scores.argmax(dim=1).cpu()
    rows = [("image", inputs)] if drawn is None else [("image", inputs), ("reconstruction", drawn.float().cpu())]
    names = captions(images.class_names, 14)  # a column is about 15 letters wide
    width, height = 0.3 + 1.1 * len(images), 0.6 + 1.1 * len(rows)
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    for row, (label, pictures) in enumerate(rows):
        y = 0.85 + 1.1 * row
        axis.text(0.15, y, label, rotation=90, ha="center", va="center")
        for column, image in enumerate(pictures):
            x = 0.85 + 1.1 * column
            down, right = (0.5 * side / max(image.shape[-2:]) for side in image.shape[-2:])
            extent = (x - right, x + right, y + down, y - down)
            axis.imshow(as_picture(image), cmap="gray", vmin=0, vmax=1, extent=extent)
            axis.add_patch(Rectangle((x - right, y - down), 2 * right, 2 * down, fill=False, linewidth=0.8))
    for column, (truth, winner) in enumerate(zip(images.labels, winners.tolist(), strict=True)):
        x = 0.85 + 1.1 * column
        labels = ",\n".join(names[label] for label in truth.reshape(-1).tolist())
        for y, text in ((0.2, labels), (height - 0.2, names[winner])):
            axis.text(x, y, text, ha="center", va="center", fontsize=9, parse_math=False)
    for y, text in ((0.2, "true"), (height - 0.2, "pred.")):
        axis.text(0.02, y, text, ha="left", va="center", fontsize=6, color="#666666")
    axis.set(xlim=(0, width), ylim=(height, 0), aspect="auto")
    write_picture(path, figure)


def as_picture(image: Float[Tensor, "C H W"]) -> Any:
    """Convert an image to an array for matplotlib.

    An image with three channels becomes a colour image. Of any other image, the first channel becomes a grey image. If
    a value is outside [0, 1], as in standardised images, all values are scaled linearly to [0, 1].

    Example:
        >>> as_picture(torch.tensor([[[0.0, 0.5]], [[9.0, 9.0]]])).tolist()
        [[0.0, 0.5]]
    """
    image = image if image.shape[0] == 3 else image[:1]
    if image.min() < 0 or image.max() > 1:
        image = stretched(image)
    return image.permute(1, 2, 0).squeeze(-1).numpy()


def stretched(image: Tensor) -> Tensor:
    """Scale an image linearly, so that its smallest value becomes 0 and its largest 1."""
    return (image - image.min()) / (image.max() - image.min()).clamp_min(1e-6)
