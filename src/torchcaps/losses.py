"""Loss functions of the papers, computed from a model's prediction."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Integer, Real
from torch import Tensor
from torch.nn import functional

from torchcaps.capsules import check_labels, one_hot, wide
from torchcaps.checks import (
    INTEGERS,
    check_choice,
    check_not_negative,
    check_number,
    check_reconstructible,
    check_sizes,
    check_values,
    described,
)
from torchcaps.errors import BadInput

IGNORE_NONE = -(2**63)
"""Class that PyTorch ignores in a target. Its default, -100, would hide wrong classes."""


def margin_loss(
    scores: Float[Tensor, "B classes"],
    target: Integer[Tensor, "B"] | Real[Tensor, "B classes"] | Bool[Tensor, "B classes"],
    positive_margin: float = 0.9,
    negative_margin: float = 0.1,
    negative_weight: float = 0.5,
    *,
    sample_weights: Float[Tensor, "B"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the margin loss on the lengths of the class capsules.

    Sabour, Frosst & Hinton 2017, equation 4::

        L_k = T_k max(0, m⁺ - |v_k|)² + λ (1 - T_k) max(0, |v_k| - m⁻)²    summed over classes, averaged over the batch

    ``|v_k|`` is the length of the capsule of class k. T_k is 1 if the sample shows class k, and 0 otherwise.

    Arguments:
        scores: ``[B, classes]``, lengths of the class capsules, in [0, 1].
        target: ``[B]``, the class of each sample; or ``[B, classes]``, 1 for every class in the sample and 0 otherwise.
        positive_margin: m⁺, length above which a class in the sample has no loss, in (0, 1].
        negative_margin: m⁻, length below which a class not in the sample has no loss, in [0, 1).
        negative_weight: λ, weight of the loss of classes not in the sample, at least 0. Su 2018 uses 0.25.
        sample_weights: ``[B]``, factor of each sample's loss, at least 0; for class weights, ``weights[target]``.

    Raises:
        ValueError: ``scores``, ``target`` or ``sample_weights`` does not have the documented shape; a score on a CPU is
            negative; a one-dimensional ``target`` is not an integer tensor with values in [0, classes); a
            two-dimensional ``target`` has a value outside [0, 1]; a weight is negative; or a margin or
            ``negative_weight`` is out of range.

    Example:
        >>> import torch
        >>> margin_loss(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))
        tensor(0.)
    """
    _check_scores(scores)
    check_not_negative("scores", scores)
    check_number("positive_margin", positive_margin, "(0, 1]")
    check_number("negative_margin", negative_margin, "[0, 1)")
    check_number("negative_weight", negative_weight, "[0, inf)")
    if not isinstance(target, Tensor) or target.ndim == 1:
        present = one_hot(_classes(target, scores), scores.shape[1], "target").to(scores)
    else:
        present = target.to(scores)
        _check_shape("target", present, scores.shape, "scores")
        check_values("target", present, 0.0, 1.0)
    missing = (positive_margin - scores).clamp_min(0).square()
    false = (scores - negative_margin).clamp_min(0).square()
    return _mean((present * missing + negative_weight * (1 - present) * false).sum(dim=1), sample_weights)


def reconstruction_loss(
    reconstruction: Float[Tensor, "B channels height width"] | None, images: Float[Tensor, "B channels height width"]
) -> Float[Tensor, ""]:
    """Compute the reconstruction loss: squared errors, summed over the pixels and averaged over the batch.

    Sabour, Frosst & Hinton 2017, section 4.1. The paper adds 0.0005 times this sum to the margin loss. For MNIST
    images, which have 784 pixels, the added term is 0.392 times the mean squared error. The computation uses the wider
    dtype of the two arguments, and at least float32.

    Arguments:
        reconstruction: ``[B, channels, height, width]``, output of the decoder, in [0, 1].
        images: ``[B, channels, height, width]``, the images to reconstruct, in [0, 1].

    Raises:
        ValueError: ``reconstruction`` is not a tensor, or has another shape than ``images``; ``images`` is not a
            floating-point tensor; or on a CPU, ``reconstruction`` is in [0, 1], and ``images`` is not.

    Example:
        >>> import torch
        >>> reconstruction_loss(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
        tensor(4.)
    """
    if not isinstance(reconstruction, Tensor):
        raise ValueError(
            f"reconstruction must be a tensor; got {described(reconstruction)}: create the network with a decoder"
        )
    if not isinstance(images, Tensor) or not (images.is_floating_point() or images.dtype == torch.bool):
        raise ValueError(
            f"images must be floating-point numbers in [0, 1]; got {described(images)}: convert them, as in images / "
            "255 for pixels up to 255"
        )
    _check_shape("reconstruction", reconstruction, images.shape, "images")
    check_reconstructible(images, reconstruction)
    dtype = torch.promote_types(torch.promote_types(reconstruction.dtype, images.dtype), torch.float32)
    return (reconstruction.to(dtype) - images.to(dtype)).square().flatten(1).sum(dim=1).mean()


def spread_loss(
    scores: Float[Tensor, "B classes"],
    target: Integer[Tensor, "B"],
    margin: float = 0.9,
    *,
    sample_weights: Float[Tensor, "B"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the spread loss: the target class should be more active than every other class by a margin.

    Hinton, Sabour & Frosst 2018, equation 3::

        L = Σ_{k≠t} max(0, m - (a_t - a_k))²      averaged over the batch

    a_t is the activation of the target class, and a_k the activation of another class. With m = 1, the spread loss is
    the squared hinge loss. The paper raises m from 0.2 to 0.9 during training; `spread_margin` computes this schedule.
    The authors' code also divides the loss by the number of classes.

    Arguments:
        scores: ``[B, classes]``, activations of the class capsules, in [0, 1].
        target: class of each sample ``[B]``.
        margin: m, difference of activations above which a wrong class has no loss, in (0, 1].
        sample_weights: ``[B]``, factor of each sample's loss, at least 0; for class weights, ``weights[target]``.

    Raises:
        ValueError: ``scores`` is not a tensor ``[B, classes]``; ``target`` is not an integer tensor ``[B]`` with values
            in [0, classes); ``sample_weights`` does not have the shape ``[B]``, or a weight is negative; or ``margin``
            is out of range.

    Example:
        >>> import torch
        >>> spread_loss(torch.tensor([[0.9, 0.5, 0.0]]), torch.tensor([0]), margin=0.5)
        tensor(0.0100)
    """
    _check_scores(scores)
    check_number("margin", margin, "(0, 1]")
    target = _classes(target, scores)
    others = 1 - one_hot(target, scores.shape[1], "target").to(scores)
    of_target = scores.gather(1, target[:, None])
    return _mean((others * (margin - (of_target - scores)).clamp_min(0).square()).sum(dim=1), sample_weights)


def spread_margin(schedule: Literal["linear", "official"], step: int, steps: int) -> float:
    """Compute the margin of `spread_loss` at a training step.

    ``linear``: the margin rises from 0.2 at step 0 to 0.9 after the last step (Hinton, Sabour & Frosst 2018, section
    4.1).

    ``official``: the margin is ``0.2 + 0.79 σ(min(10, step / 50,000 - 4))`` with the logistic function σ, as in the
    authors' code; ``steps`` has no effect.

    Arguments:
        schedule: ``linear`` or ``official``.
        step: index of the training step, from 0.
        steps: number of steps in the whole training.

    Raises:
        ValueError: ``schedule`` is not one of the known schedules; or ``step`` is negative.

    Example:
        >>> [spread_margin("linear", step, 100) for step in (0, 50, 100)]
        [0.2, 0.55, 0.9]
    """
    check_choice("schedule", schedule, ("linear", "official"))
    check_number("step", step, "[0, inf)")
    if schedule == "linear":
        return round(0.2 + 0.7 * min(1.0, step / max(1, steps)), 12)
    return 0.2 + 0.79 / (1 + math.exp(-min(10.0, step / 50_000 - 4)))


def cross_entropy(
    scores: Float[Tensor, "B classes"],
    target: Integer[Tensor, "B"],
    label_smoothing: float = 0.0,
    *,
    sample_weights: Float[Tensor, "B"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the softmax cross-entropy of logits, averaged over the batch.

    Arguments:
        scores: ``[B, classes]``, logits; or activations, which are then used as logits.
        target: class of each sample ``[B]``.
        label_smoothing: share of the target probability that is spread evenly over all classes, in [0, 1].
        sample_weights: ``[B]``, factor of each sample's loss, at least 0; for class weights, ``weights[target]``.

    Raises:
        ValueError: ``scores`` is not a tensor ``[B, classes]``; ``target`` is not an integer tensor ``[B]`` with values
            in [0, classes); ``sample_weights`` does not have the shape ``[B]``, or a weight is negative; or
            ``label_smoothing`` is out of range.

    Example:
        >>> import torch
        >>> cross_entropy(torch.ones(2, 2), torch.tensor([0, 1]), sample_weights=torch.tensor([2.0, 0.0]))
        tensor(0.6931)
    """
    _check_scores(scores)
    check_number("label_smoothing", label_smoothing, "[0, 1]")
    reduction = "mean" if sample_weights is None else "none"
    return _mean(
        functional.cross_entropy(
            scores,
            _classes(target, scores),
            reduction=reduction,
            label_smoothing=label_smoothing,
            ignore_index=IGNORE_NONE,
        ),
        sample_weights,
    )


def activation_cross_entropy(
    scores: Float[Tensor, "B classes"],
    target: Integer[Tensor, "B"],
    *,
    sample_weights: Float[Tensor, "B"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the cross-entropy of activations scaled to sum to 1: ``-log(a_t / Σ_k a_k)``, averaged over the batch.

    Hinton, Sabour & Frosst 2018, table 1, report a cross-entropy of the activations, but give no formula. This formula
    is the choice of this library. A share ``a_k / Σ_k a_k`` below 1e-12 counts as 1e-12 and has no gradient, and so
    does a sum below 1e-12.

    Arguments:
        scores: ``[B, classes]``, activations of the class capsules, in [0, 1].
        target: class of each sample ``[B]``.
        sample_weights: ``[B]``, factor of each sample's loss, at least 0; for class weights, ``weights[target]``.

    Raises:
        ValueError: ``scores`` is not a tensor ``[B, classes]``, or has a negative value; ``target`` is not an integer
            tensor ``[B]`` with values in [0, classes); or ``sample_weights`` does not have the shape ``[B]``, or a
            weight is negative. Only on CPUs are the scores checked for negative values.

    Example:
        >>> import torch
        >>> activation_cross_entropy(torch.tensor([[0.5, 0.0, 0.0]]), torch.tensor([0]))
        tensor(0.)
    """
    _check_scores(scores)
    check_not_negative("scores", scores)
    logarithms = functional.normalize(wide(scores), p=1, dim=1).clamp_min(1e-12).log()
    reduction, target = "mean" if sample_weights is None else "none", _classes(target, scores)
    return _mean(functional.nll_loss(logarithms, target, reduction=reduction, ignore_index=IGNORE_NONE), sample_weights)


def activation_logit_cross_entropy(
    scores: Float[Tensor, "B classes"],
    target: Integer[Tensor, "B"],
    *,
    sample_weights: Float[Tensor, "B"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the softmax cross-entropy of the activations' logits ``log(a / (1 - a))``, averaged over the batch.

    Activations are clamped to [1e-6, 1 - 1e-6] before their logits are computed. Between these bounds, this loss has a
    nonzero gradient for every class, unlike the spread loss.

    Arguments:
        scores: ``[B, classes]``, activations of the class capsules, in [0, 1].
        target: class of each sample ``[B]``.
        sample_weights: ``[B]``, factor of each sample's loss, at least 0; for class weights, ``weights[target]``.

    Raises:
        ValueError: ``scores`` is not a tensor ``[B, classes]``, or has a negative value; ``target`` is not an integer
            tensor ``[B]`` with values in [0, classes); or ``sample_weights`` does not have the shape ``[B]``, or a
            weight is negative. Only on CPUs are the scores checked for negative values.

    Example:
        >>> import torch
        >>> activation_logit_cross_entropy(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor(0.6931)
    """
    _check_scores(scores)
    check_not_negative("scores", scores)
    return cross_entropy(wide(scores).logit(eps=1e-6), target, sample_weights=sample_weights)


def balanced_class_weights(labels: Integer[Tensor, " N"], num_classes: int) -> Float[Tensor, " classes"]:
    """Compute one weight per class, inversely proportional to the number of images of the class.

    For N images, K classes and n_k images of class k, the weight of class k is N / (K n_k), as with
    ``class_weight="balanced"`` in scikit-learn. A class without images has the weight of a class with one image. If
    every class has images, the mean weight of the N images is 1, so a weighted loss is about as large as an unweighted
    loss.

    Arguments:
        labels: ``[N]``, the class of each training image.
        num_classes: number of classes (K).

    Raises:
        ValueError: ``labels`` is not an integer tensor ``[N]`` with values in [0, num_classes), or ``num_classes`` is
            not an integer of at least 1.

    Example:
        >>> import torch
        >>> balanced_class_weights(torch.tensor([0, 0, 0, 1]), 2)
        tensor([0.6667, 2.0000])
    """
    check_sizes(num_classes=num_classes)
    check_labels(labels, num_classes)
    counts = labels.long().bincount(minlength=num_classes).clamp_min(1)
    return len(labels) / (num_classes * counts.float())


def check_loss(loss: str, model: str, logits: bool) -> None:
    """Check that a loss accepts the scores of a model.

    Arguments:
        loss: a key of `LOSSES`.
        model: name of the model in the error message.
        logits: whether the scores of the model are logits; otherwise they are activations in [0, 1].

    Raises:
        BadInput: the loss needs activations, and the scores are logits.

    Example:
        >>> check_loss("margin", "capsnet", logits=False)
    """
    if logits and loss in LOSSES_OF_ACTIVATIONS:
        raise BadInput(
            f"loss {loss} needs activations in [0, 1], but the scores of model {model} are logits: set "
            "loss=cross_entropy"
        )


def _classes(target: Tensor, scores: Tensor) -> Tensor:
    if not isinstance(target, Tensor) or target.shape != scores.shape[:1] or target.dtype not in INTEGERS:
        same = isinstance(target, Tensor) and target.shape == scores.shape and scores.shape[1] > 1
        cure = ": pass target.argmax(dim=1); for several classes per sample, use margin_loss" if same else ""
        raise ValueError(
            f"target must be integers [{len(scores)}], one class index per sample; got {described(target)}{cure}"
        )
    target = target.long()
    check_labels(target, scores.shape[1], "target")
    return target


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply each loss by its weight, and divide the sum by the number of samples, not by the sum of the weights."""
    if weights is None:
        return losses.mean()
    _check_shape("sample_weights", weights, losses.shape, "the samples")
    check_values("sample_weights", weights, 0.0, math.inf)
    return (losses * weights.to(losses)).mean()


def _check_scores(scores: Any) -> None:
    if not isinstance(scores, Tensor) or scores.ndim != 2:
        more = ", or flatten all dimensions except the classes" if getattr(scores, "ndim", 0) > 2 else ""
        raise ValueError(f"scores must be a tensor [B, classes]; got {described(scores)}: pass prediction.scores{more}")


def _check_shape(name: str, tensor: Tensor, shape: torch.Size, owner: str) -> None:
    """Check a shape, because tensors of other shapes could be broadcast without an error."""
    if not isinstance(tensor, Tensor) or tensor.shape != shape:
        raise ValueError(f"{name} must fit the shape {list(shape)} of {owner}; got {described(tensor)}")


LOSSES: dict[str, Callable[..., Tensor]] = {
    "margin": margin_loss,
    "cross_entropy": cross_entropy,
    "spread": spread_loss,
    "activation_cross_entropy": activation_cross_entropy,
    "activation_logit_cross_entropy": activation_logit_cross_entropy,
}

LOSSES_OF_ACTIVATIONS = ("margin", "spread", "activation_cross_entropy", "activation_logit_cross_entropy")
"""Losses that need scores in [0, 1]. The cross-entropy accepts all scores."""

NOT_SETTINGS = ("scores", "target", "sample_weights")
"""Arguments that the training loop passes to a loss. All other arguments of a loss are settings of a recipe."""

__all__ = [
    "LOSSES",
    "LOSSES_OF_ACTIVATIONS",
    "NOT_SETTINGS",
    "activation_cross_entropy",
    "activation_logit_cross_entropy",
    "balanced_class_weights",
    "check_loss",
    "cross_entropy",
    "margin_loss",
    "reconstruction_loss",
    "spread_loss",
    "spread_margin",
]
