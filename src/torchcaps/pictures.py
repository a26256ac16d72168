"""Pictures of reconstructions."""

from pathlib import Path

import torch
from torch import nn

from torchcaps.data import Images, Preparation
from torchcaps.data.files import atomically
from torchcaps.errors import printable


def save_reconstructions(
    model: nn.Module, preparation: Preparation, images: Images, path: Path, count: int = 10
) -> bool:
    """Draw images above their reconstructions, one column per image. Titles are true classes, labels predictions.

    Arguments:
        model: takes images and returns a `Prediction`.
        preparation: how stored images become the model's input.
        images: the split from which evenly spaced images are drawn.
        path: PNG file to write.
        count: largest number of images.

    Returns:
        True if a picture was written, False if the model has no decoder.
    """
    from matplotlib.figure import Figure

    step = max(1, len(images) // count)
    chosen = images.subset(torch.arange(0, len(images), step)[:count])
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        inputs = preparation.plain(chosen.pixels)
        prediction = model(inputs)
    model.train(was_training)
    if prediction.reconstruction is None:
        return False
    figure = Figure(figsize=(1.1 * len(chosen), 2.9), layout="constrained")
    axes = figure.subplots(2, len(chosen), squeeze=False)
    drawn = prediction.reconstruction.clamp(0, 1)
    winners = prediction.scores.argmax(dim=1)
    names = [printable(name) for name in chosen.class_names]
    for column in range(len(chosen)):
        for row, image in enumerate((inputs[column], drawn[column])):
            axis = axes[row, column]
            axis.imshow(image.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0, column].set_title(names[int(chosen.labels[column])], fontsize=9, parse_math=False)
        axes[1, column].set_xlabel(names[int(winners[column])], fontsize=9, parse_math=False)
    axes[0, 0].set_ylabel("image")
    axes[1, 0].set_ylabel("reconstruction")
    with atomically(path) as stream:
        figure.savefig(stream, format="png", dpi=120)
    return True
