"""What every model returns, and which images it takes."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.errors import BadInput


class Prediction(NamedTuple):
    """A model's answer to a batch of images.

    Arguments:
        scores: ``[B, classes]``, activations of the class capsules in [0, 1], or logits; the largest is the prediction.
        capsules: the class capsules, or None for a network without any.
        reconstruction: ``[B, channels, height, width]`` in [0, 1], or None for a network without a decoder.
    """

    scores: Float[Tensor, "B classes"]
    capsules: Capsules | None = None
    reconstruction: Float[Tensor, "B channels height width"] | None = None


def check_image_shape(network: str, image_shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """The shape (channels, height, width) as given, unless the network's kernels do not fit into it.

    Raises:
        BadInput: not (channels, height, width), or height or width below ``smallest``.
    """
    if len(image_shape) != 3 or image_shape[0] < 1:
        raise BadInput(f"image_shape must be (channels, height, width); got {tuple(image_shape)}")
    channels, height, width = image_shape
    if min(height, width) < smallest:
        raise BadInput(
            f"images of {height}×{width} are too small for {network}: its kernels need at least "
            f"{smallest}×{smallest}; resize them (data.image_size={smallest} or more)"
        )
    return channels, height, width
