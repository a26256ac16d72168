"""Scores of an ensemble, and of a whole split: their calibration error, and a table with one row per image."""

import codecs
import csv
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.data import Images
from torchcaps.data.files import atomically

BINS = 15
"""Number of bins of the calibration error, as in Guo et al. 2017."""


class MeanScores(nn.Module):
    """Ensemble of networks that returns the mean of their scores: Mazzia, Salvetti & Chiaberge 2021, section 4.2.

    Arguments:
        models: networks with the same classes and the same input.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.logits = getattr(models[0], "logits", None)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Prediction:
        """Return the mean scores, without capsules or reconstruction. `labels` is ignored."""
        return Prediction(torch.stack([model(images).scores.float() for model in self.models]).mean(dim=0))


def scores_apart(scores: Sequence[float], digits: int = 2) -> list[str]:
    """Format scores with at least `digits` decimals, and with more, up to 6, if this makes more of them different.

    Example:
        >>> scores_apart([0.9998, 0.9996], digits=3)
        ['0.9998', '0.9996']
    """
    ways = [[f"{score:.{count}f}" for score in scores] for count in range(digits, 7)]
    return max(ways, key=lambda shown: len({*shown}))


def probabilities(scores: Float[Tensor, "N K"], logits: bool | None = None, loss: str = "") -> Float[Tensor, "N K"]:
    """Convert the scores of a split to numbers that sum to 1 for each image.

    Logits are converted by a softmax. Activations of class capsules or of sigmoid units are divided by their sum for
    each image, or stay 0 if all of them are 0; a softmax of activations would be nearly uniform: for ten classes, it
    never exceeds 0.24. Activations of a network that was trained with `activation_logit_cross_entropy` are converted by
    the softmax of this loss.

    Arguments:
        scores: ``[N, K]``, the scores of all images of a split.
        logits: whether the scores are logits. If it is unknown (None), or if an activation is negative, the scores are
            activations if all of them are in [0, 1], and otherwise logits.
        loss: name of the loss with which the network was trained; empty if it is unknown.

    Example:
        >>> import torch
        >>> probabilities(torch.tensor([[0.9, 0.3], [0.1, 0.1]]))
        tensor([[0.7500, 0.2500],
                [0.5000, 0.5000]])
    """
    if scores.numel() and not logits and scores.min() >= 0 and (logits is False or scores.max() <= 1 + 1e-6):
        if loss == "activation_logit_cross_entropy":
            return scores.logit(eps=1e-6).softmax(dim=1)
        return scores / scores.sum(dim=1, keepdim=True).clamp_min(1e-12)
    return scores.softmax(dim=1)


def calibration_error_percent(
    scores: Float[Tensor, "N K"], labels: Int64[Tensor, " N"], logits: bool | None = None, loss: str = ""
) -> float:
    """Compute the expected calibration error in per cent. `probabilities` converts the scores to probabilities first.

    Guo, Pleiss, Sun & Weinberger 2017 (arXiv 1706.04599), equation 3. The confidence of a prediction is the highest
    probability of the image. The images are divided by confidence into 15 bins of equal width. In each bin, the mean
    confidence is compared with the accuracy. The error is the mean of the absolute differences, weighted by the number
    of images in the bins.

    Arguments:
        scores: ``[N, K]``, the scores of all images of a split.
        labels: ``[N]``, the true classes.
        logits: whether the scores are logits; None if it is unknown.
        loss: name of the loss with which the network was trained; empty if it is unknown.

    Example:
        >>> import torch
        >>> calibration_error_percent(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))
        0.0
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    # torchmetrics would put a confidence of exactly 1 into a bin of its own.
    confidences = probabilities(scores.float(), logits, loss).clamp(max=1 - 2**-24)
    found = multiclass_calibration_error(confidences, labels, scores.shape[1], n_bins=BINS)
    return round(100 * found.item(), 4)


def top_5_percent(scores: Float[Tensor, "N K"], labels: Int64[Tensor, " N"]) -> float:
    """Compute the percentage of images whose true class has one of the five highest scores.

    Of several equal scores, the first ones count as higher, as in `argmax`.

    Arguments:
        scores: ``[N, K]``, the finite scores of all images of a split, for at least five classes.
        labels: ``[N]``, the true classes.

    Example:
        >>> import torch
        >>> top_5_percent(torch.eye(6), torch.tensor([0, 1, 2, 3, 4, 5]))
        100.0
    """
    labels = labels.long()
    right, classes = scores.gather(1, labels[:, None]), torch.arange(scores.shape[1], device=scores.device)
    higher = torch.where(classes < labels[:, None], scores >= right, scores > right)
    return 100 * (higher.sum(dim=1, dtype=torch.int32) < 5).double().mean().item()


def write_scores(path: Path, images: Images, scores: Float[Tensor, "N K"]) -> None:
    """Write a CSV file with one row per image: index, file, true class, predicted class, and the score of each class.

    Arguments:
        path: file to write.
        images: N images of a split. The column ``file`` is empty if the images were not read from files.
        scores: ``[N, K]``, the scores of the images.

    Raises:
        BadInput: the file cannot be written.
    """
    names, files = images.class_names, [""] * len(images) if images.files is None else images.files.names
    known = [(index, files[index], names[label]) for index, label in enumerate(images.labels.tolist())]
    write_predictions(path, ("index", "file", "true_class"), known, names, scores)


def write_predictions(
    path: Path,
    columns: Sequence[str],
    known: Sequence[Sequence[object]],
    class_names: Sequence[str],
    scores: Float[Tensor, "N K"],
) -> None:
    """Write a CSV file with one row per image: the given columns, the predicted class, and the score of each class.

    Arguments:
        path: file to write.
        columns: names of the given columns, such as ``["file"]``.
        known: for each of the N images, the values in the given columns.
        class_names: names of the K classes.
        scores: ``[N, K]``, the scores of the images.

    Raises:
        BadInput: the file cannot be written.
    """
    with atomically(path) as stream:
        table = csv.writer(codecs.getwriter("utf-8")(stream, "surrogateescape"), lineterminator="\n")
        table.writerow([*columns, "predicted_class", *(f"score {name}" for name in class_names)])
        for facts, best, values in zip(known, scores.argmax(dim=1).tolist(), scores, strict=True):
            table.writerow([*facts, class_names[best], *(f"{value:.6g}" for value in values.tolist())])
