"""Which images a network takes."""

from collections.abc import Sequence

from torchcaps.errors import BadInput


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
