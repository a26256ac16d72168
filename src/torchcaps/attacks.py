"""Gradient attacks on any network that classifies images in [0, 1], and statistics of the network's gradients."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from torchcaps.capsules import Prediction, check_labels
from torchcaps.checks import bounds, check_floating, check_number, check_sizes, described, has_values

Network = Callable[[Tensor], Tensor | Prediction]
"""Function of images ``[B, C, H, W]`` in [0, 1] that returns scores ``[B, classes]``, or a `Prediction` with scores."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Function of scores ``[B, classes]`` and class indices ``[B]`` that returns the mean loss of the batch."""


def input_gradient(
    network: Network, images: Float[Tensor, "B C H W"], labels: Int64[Tensor, "B"], loss: Loss
) -> Float[Tensor, "B C H W"]:
    """Compute the gradient of each image's loss with respect to its pixels.

    Raises:
        ValueError: ``images`` is not a floating-point tensor, ``labels`` is not a tensor, a label is not a class, the
            network cannot be called, or torch.inference_mode is active.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients cannot be computed inside torch.inference_mode(): leave this context")
    if not callable(network):
        raise ValueError(f"network must be a function of images; got {described(network)}: give classifier.model")
    check_floating("images", images)
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels must be a tensor; got {described(labels)}: use torch.as_tensor")
    images = images.detach().clone().requires_grad_()  # a clone, because images can be an inference tensor
    with torch.enable_grad():
        found = network(images)
        scores = found.scores if isinstance(found, Prediction) else found
        # PyTorch ignores the label -100. Other losses can have labels of another kind.
        if loss is functional.cross_entropy and labels.ndim == 1 and isinstance(scores, Tensor) and scores.ndim == 2:
            check_labels(labels, scores.shape[1])
            labels = labels.long()
        total = len(images) * loss(scores, labels)
    return torch.autograd.grad(total, images)[0]


def fgsm(
    network: Network,
    images: Float[Tensor, "B C H W"],
    labels: Int64[Tensor, "B"],
    epsilon: float,
    *,
    targeted: bool = False,
    loss: Loss = functional.cross_entropy,
) -> Float[Tensor, "B C H W"]:
    """Attack images with the fast gradient sign method.

    Goodfellow, Shlens & Szegedy 2015 (arXiv 1412.6572), section 4.

    ::

        x' = clip(x + ε sign ∇ₓ loss(x, label), 0, 1)      untargeted
        x' = clip(x - ε sign ∇ₓ loss(x, label), 0, 1)      targeted

    Arguments:
        network: any differentiable function of images in [0, 1] that returns scores ``[B, classes]`` or a `Prediction`.
        images: images to attack, in [0, 1].
        labels: class indices ``[B]``: the true classes or, if `targeted`, the classes that the attack aims at.
        epsilon: ε, in [0, 1].
        targeted: True to lower the loss for `labels`, False to raise it.
        loss: function of scores and labels that returns the mean loss of the batch.

    Raises:
        ValueError: ``epsilon`` or a pixel is not in [0, 1], a label is not a class, or torch.inference_mode is active.

    Example:
        >>> images = torch.full((1, 1, 1, 2), 0.5)
        >>> fgsm(lambda x: x.flatten(1), images, torch.tensor([0]), 0.25)
        tensor([[[[0.2500, 0.7500]]]])
    """
    return _step(network, images, labels, _checked_epsilon(epsilon, images), targeted, loss)


def bim(
    network: Network,
    images: Float[Tensor, "B C H W"],
    labels: Int64[Tensor, "B"],
    epsilon: float,
    *,
    steps: int = 10,
    targeted: bool = False,
    loss: Loss = functional.cross_entropy,
) -> Float[Tensor, "B C H W"]:
    """Attack images with the basic iterative method.

    Kurakin, Goodfellow & Bengio 2017 (arXiv 1607.02533), section 2.2. The method applies `fgsm` repeatedly, in
    `steps` steps of size ε / `steps`. After each step, every pixel is clipped to [0, 1] and to the range of ±ε around
    its original value.

    Arguments:
        network: any differentiable function of images in [0, 1] that returns scores ``[B, classes]`` or a `Prediction`.
        images: images to attack, in [0, 1].
        labels: class indices ``[B]``: the true classes or, if `targeted`, the classes that the attack aims at.
        epsilon: ε, in [0, 1].
        steps: number of steps, at least 1.
        targeted: True to lower the loss for `labels`, False to raise it.
        loss: function of scores and labels that returns the mean loss of the batch.

    Raises:
        ValueError: ``epsilon`` or a pixel is not in [0, 1], ``steps`` is below 1, a label is not a class, or
            torch.inference_mode is active.

    Example:
        >>> images = torch.full((1, 1, 1, 2), 0.5)
        >>> bim(lambda x: x.flatten(1), images, torch.tensor([0]), 0.25)
        tensor([[[[0.2500, 0.7500]]]])
    """
    epsilon = _checked_epsilon(epsilon, images)
    check_sizes(steps=steps)
    attacked = images
    for _ in range(steps):
        attacked = _step(network, attacked, labels, epsilon / steps, targeted, loss)
        attacked = attacked.clamp(images - epsilon, images + epsilon)
    return attacked


def _step(network: Network, images: Tensor, labels: Tensor, epsilon: float, targeted: bool, loss: Loss) -> Tensor:
    """Change each pixel by ε along the sign of its gradient, and clip it to [0, 1]."""
    step = epsilon * input_gradient(network, images, labels, loss).sign()
    return (images - step if targeted else images + step).clamp(0, 1)


def _checked_epsilon(epsilon: float, images: Tensor) -> float:
    """Check that ε and the images are in [0, 1]; rounding errors of the images are accepted."""
    check_number("epsilon", epsilon, "[0, 1]")
    check_floating("images", images)
    if has_values(images) and images.numel():
        low, high = bounds(images)
        if low < -1e-3 or high > 1 + 1e-3:
            raise ValueError(
                f"images must be in [0, 1]; got {low:g} to {high:g}: divide pixels from 0 to 255 by 255, and let the "
                "network standardise images"
            )
    return float(epsilon)


class GradientHealth(NamedTuple):
    """Statistics of the gradients of the loss with respect to the images.

    `fgsm` and `bim` follow these gradients.

    Arguments:
        zero: percentage of pixels with a gradient of exactly 0; each channel counts separately.
        norm: Euclidean norm of the gradient of an image's own loss, averaged over the images.
    """

    zero: float
    norm: float


def gradient_health(
    network: Network,
    images: Float[Tensor, "B C H W"],
    labels: Int64[Tensor, "B"],
    loss: Loss = functional.cross_entropy,
) -> GradientHealth:
    """Measure the gradients of the loss with respect to the images.

    If these gradients vanish, gradient attacks fail, but other attacks can still succeed.

    Arguments:
        network: any differentiable function of images that returns scores ``[B, classes]`` or a `Prediction`. It should
            be the network alone, without the preprocessing of the images: standardisation would give every pixel a
            gradient.
        images: input of the network.
        labels: class indices ``[B]``.
        loss: function of scores and labels that returns the mean loss of the batch.

    Example:
        >>> gradient_health(lambda x: 0 * x.flatten(1), torch.rand(1, 1, 1, 2), torch.tensor([0])).zero
        100.0
    """
    gradient = input_gradient(network, images, labels, loss)
    norm = gradient.flatten(1).norm(dim=1).mean().item()
    return GradientHealth(100 * (gradient == 0).sum().item() / gradient.numel(), norm)
