"""Check the image shape for which a network is created."""

from collections.abc import Sequence

from torchcaps.errors import BadInput


def check_image_shape(network: str, image_shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """Check that images are large enough for a network, and return their shape as (channels, height, width).

    Arguments:
        network: name of the network in the error message.
        image_shape: (channels, height, width).
        smallest: smallest height and width that the network supports.

    Raises:
        BadInput: ``image_shape`` does not have three numbers, or has less than 1 channel, or the height or width is
            below ``smallest``.
    """
    if len(image_shape) != 3 or image_shape[0] < 1:
        raise BadInput(
            f"image_shape must be (channels, height, width) with at least 1 channel; got {tuple(image_shape)}"
        )
    channels, height, width = image_shape
    if min(height, width) < smallest:
        raise BadInput(
            f"images of {height}×{width} are too small for {network}: its kernels need at least "
            f"{smallest}×{smallest}; resize the images (data.image_size={smallest} or more)"
        )
    return channels, height, width
