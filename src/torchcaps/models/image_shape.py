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
    channels, height, width = map(int, image_shape)
    if min(height, width) < smallest:
        if width < smallest <= min(channels, height):
            raise BadInput(
                f"image_shape must be (channels, height, width) with at least {smallest}×{smallest} pixels; got "
                f"{(channels, height, width)}: if the channels come last, use {(width, channels, height)}"
            )
        raise BadInput(
            f"images for {network} must be at least {smallest}×{smallest} pixels; got {height}×{width}: make them "
            f"larger (with `torchcaps train`: --set data.image_size={smallest}, or crop={smallest} if they are cropped)"
        )
    return channels, height, width


def check_images(images: Tensor, image_shape: tuple[int, int, int], smallest: int = 0) -> None:
    """Check that a batch of images fits a network.

    Arguments:
        images: images ``[B, channels, height, width]``.
        image_shape: (channels, height, width), for which the network was created.
        smallest: if not 0, the network accepts images of any height and width of at least this number.

    Raises:
        ValueError: ``images`` is not a floating-point tensor of this shape.
    """
    is_tensor = isinstance(images, Tensor)
    known = 1 if smallest else 3
    right_shape = is_tensor and images.ndim == 4 and images.shape[1 : 1 + known] == image_shape[:known]
    too_small = right_shape and min(images.shape[2:]) < smallest
    right_shape = right_shape and not too_small
    if right_shape and images.is_floating_point():
        return
    channels, height, width = image_shape
    expected = f"[B, {channels}, height, width]" if smallest else f"[B, {channels}, {height}, {width}]"
    shape = tuple(images.shape) if is_tensor else ()
    if not is_tensor:
        cure = "convert them, as in torch.as_tensor(images)"
    elif too_small:
        cure = f"resize them to at least {smallest}×{smallest} pixels"
    elif right_shape:
        cure = "scale the pixels to [0, 1], as in images / 255"
    elif shape == image_shape:
        cure = "add the dimension of the batch, as in images[None]"
    elif channels == 1 and shape[1:] == (height, width):
        cure = "add the dimension of the channels, as in images[:, None]"
    elif shape[1:] == (height, width, channels):
        cure = "move the dimension of the channels, as in images.permute(0, 3, 1, 2)"
    elif len(shape) == 4:
        cure = f"convert the images, or create the network with image_shape={shape[1:]}"
    else:
        cure = "reshape the images"
    raise ValueError(f"images must be a floating-point tensor {expected}; got {described(images)}: {cure}")
