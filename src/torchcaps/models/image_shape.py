"""Check the image shape for which a network is created, and the images that the network is given."""

from collections.abc import Sequence

from torch import Tensor

from torchcaps.checks import check_shape, described
from torchcaps.errors import BadInput


def check_image_shape(network: str, image_shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """Check that images are large enough for a network, and return their shape as (channels, height, width).

    Arguments:
        network: name of the network in the error message.
        image_shape: (channels, height, width).
        smallest: smallest height and width that the network supports.

    Raises:
        BadInput: ``image_shape`` does not consist of three integers of at least 1, or the height or width is below
            ``smallest``.
    """
    try:
        check_shape("image_shape", image_shape, "channels, height, width")
    except ValueError as error:
        raise BadInput(str(error)) from None
    channels, height, width = image_shape
    if min(height, width) < smallest:
        raise BadInput(
            f"images of {height}×{width} are too small for {network}: its kernels need at least "
            f"{smallest}×{smallest}; resize the images (data.image_size={smallest} or more)"
        )
    return channels, height, width


def check_images(images: Tensor, image_shape: tuple[int, int, int], any_size: bool = False) -> None:
    """Check that a batch of images fits a network.

    Arguments:
        images: images ``[B, channels, height, width]``.
        image_shape: (channels, height, width), for which the network was created.
        any_size: whether the network accepts other heights and widths than those in ``image_shape``.

    Raises:
        ValueError: ``images`` is not a floating-point tensor of this shape.
    """
    known = 1 if any_size else 3
    if images.ndim == 4 and images.shape[1 : 1 + known] == image_shape[:known] and images.is_floating_point():
        return
    expected = f"[B, {image_shape[0]}, height, width]" if any_size else f"[B, {', '.join(map(str, image_shape))}]"
    if images.ndim == 3:
        cure = "add the dimension of the batch, as in images[None]"
    elif not images.is_floating_point():
        cure = "scale the pixels to [0, 1], as in images / 255"
    elif images.ndim == 4:
        cure = f"convert the images, or create the network with image_shape={tuple(images.shape[1:])}"
    else:
        cure = "reshape the images"
    raise ValueError(f"images must be a floating-point tensor {expected}; got {described(images)}: {cure}")
