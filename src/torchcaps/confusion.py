"""Confusion matrices: precision and recall, a picture of the matrix, and a warning if only one class is predicted."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from torchcaps.checks import bounds
from torchcaps.data.files import write_picture
from torchcaps.errors import DataWarning, captions

MOST_NUMBERED = 20
"""Largest number of classes for which the picture shows every count as a number."""


class ConfusionMatrix(MulticlassConfusionMatrix):
    """Confusion matrix of torchmetrics that needs little memory while PyTorch's algorithms are deterministic.

    The method of the base class would then create a tensor with batch size · K² numbers.
    """

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add the predicted and the true class of several images."""
        matrix: Any = self.confmat
        if preds.ndim == target.ndim + 1:
            preds = preds.argmax(dim=1)
        if preds.shape != target.shape:
            raise ValueError(f"predictions must have the shape of the labels, {[*target.shape]}; got {[*preds.shape]}")
        for name, part in (("predictions", preds), ("labels", target)):
            low, high = bounds(part) if part.numel() else (0, 0)
            if low < 0 or high >= self.num_classes:
                raise ValueError(f"{name} must be from 0 to {self.num_classes - 1}; got {low:g} to {high:g}")
        pairs = (target.long() * self.num_classes + preds.long()).flatten()
        matrix += torch.bincount(pairs, minlength=matrix.numel()).view_as(matrix)


def per_class(confusion: Int64[Tensor, "K K"], class_names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Compute the number of images, the precision and the recall of each class, and the class it is mistaken for.

    The precision is None for a class that is never predicted. The recall is None for a class without images.
    ``mistaken_for`` is the most frequent prediction for the wrongly classified images of this class, or the first of
    several; None if there are no such images.

    Arguments:
        confusion: ``[K, K]``, number of images for each true class (row) and each predicted class (column).
        class_names: class names, in the order of rows and columns.

    Example:
        >>> import torch
        >>> per_class(torch.tensor([[3, 1], [0, 0]]), ("cat", "dog"))["cat"]
        {'images': 4, 'precision_percent': 100.0, 'recall_percent': 75.0, 'mistaken_for': 'dog'}
    """
    most: list[str | None] = []
    for k, row in enumerate(confusion):
        wrong = row.clone()
        wrong[k] = 0
        most.append(class_names[int(wrong.argmax())] if wrong.any() else None)
    correct, of_class, predicted = confusion.diagonal().tolist(), confusion.sum(1).tolist(), confusion.sum(0).tolist()
    return {
        name: {"images": of_class[k], "precision_percent": _share(correct[k], predicted[k])}
        | {"recall_percent": _share(correct[k], of_class[k]), "mistaken_for": most[k]}
        for k, name in enumerate(class_names)
    }


def warn_of_one_prediction(confusion: Int64[Tensor, "K K"], class_names: Sequence[str]) -> None:
    """Warn if the network predicts a single class for images of several classes."""
    predicted = (confusion.sum(dim=0) > 0).nonzero().flatten().tolist()
    if len(predicted) == 1 and int((confusion.sum(dim=1) > 0).sum()) > 1:
        warnings.warn(
            f"the network predicts {class_names[predicted[0]]} for every evaluated image, so it has not "
            "learned the classes: train longer or change --lr",
            DataWarning,
            stacklevel=2,
        )


def save_confusion(confusion: Int64[Tensor, "K K"], class_names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix.

    The number in a cell is the number of images. The colour of a cell shows this number divided by the number of all
    images of the true class.

    Arguments:
        confusion: ``[K, K]``, number of images for each true class (row) and each predicted class (column).
        class_names: class names, in the order of rows and columns.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure

    names = captions(class_names)
    count = len(names)
    side = min(14.0, 3.4 + 0.45 * count)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axis = figure.subplots()
    shares = confusion / confusion.sum(dim=1, keepdim=True).clamp_min(1)
    picture = axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, label="share of the true class")
    named = count <= 3 * MOST_NUMBERED
    numbers = "" if named else " (its place in the list of classes, from 0)"
    axis.set_xlabel(f"predicted class{numbers}")
    axis.set_ylabel(f"true class{numbers}")
    if named:
        axis.set_xticks(range(count), names, rotation=90, parse_math=False, fontsize=8)
        axis.set_yticks(range(count), names, parse_math=False, fontsize=8)
    if count <= MOST_NUMBERED:
        for row in range(count):
            for column in range(count):
                if images := int(confusion[row, column]):
                    colour = "white" if shares[row, column] > 0.5 else "black"
                    axis.text(column, row, str(images), ha="center", va="center", color=colour, fontsize=8)
    write_picture(path, figure)


def _share(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 2) if whole else None
