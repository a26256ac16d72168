"""The losses of the papers, as functions of what a model returns."""

from collections.abc import Callable

from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional


def margin_loss(
    scores: Float[Tensor, "B classes"],
    target: Int64[Tensor, "B"] | Float[Tensor, "B classes"],
    positive_margin: float = 0.9,
    negative_margin: float = 0.1,
    negative_weight: float = 0.5,
) -> Float[Tensor, ""]:
    """Margin loss on the lengths of the class capsules: Sabour, Frosst & Hinton 2017, equation 4; Su 2018 weighs 0.25.

    ::

        L_k = T_k max(0, m⁺ - |v_k|)² + λ (1 - T_k) max(0, |v_k| - m⁻)²      summed over classes, mean over the batch

    Arguments:
        scores: ``[B, classes]``, in [0, 1].
        target: class of each sample ``[B]``, or 0/1 per class ``[B, classes]``: several may be present.
        positive_margin: m⁺, in (0, 1].
        negative_margin: m⁻, in [0, 1).
        negative_weight: λ, at least 0.

    Example:
        >>> import torch
        >>> margin_loss(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))
        tensor(0.)
    """
    present = functional.one_hot(target, scores.shape[1]).to(scores) if target.ndim == 1 else target.to(scores)
    missing = (positive_margin - scores).clamp_min(0).square()
    false = (scores - negative_margin).clamp_min(0).square()
    return (present * missing + negative_weight * (1 - present) * false).sum(dim=1).mean()


def reconstruction_loss(
    reconstruction: Float[Tensor, "B channels height width"], images: Float[Tensor, "B channels height width"]
) -> Float[Tensor, ""]:
    """Sum of squared errors over the pixels, mean over the batch: Sabour, Frosst & Hinton 2017, section 4.1.

    The paper adds 0.0005 of this *sum* to the margin loss; on a mean over 784 pixels that would be 0.392.

    Example:
        >>> import torch
        >>> reconstruction_loss(torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
        tensor(4.)
    """
    return (reconstruction.float() - images.float()).square().flatten(1).sum(dim=1).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "margin": margin_loss,
    "cross_entropy": functional.cross_entropy,
}

__all__ = ["LOSSES", "margin_loss", "reconstruction_loss"]
