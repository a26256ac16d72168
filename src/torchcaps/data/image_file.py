"""One image file as pixels."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = {
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".png": "PNG",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
"""Ending of a file that is read, in any case → its format in Pillow."""
LONGEST_SIDE = 10_000
"""Pixels to which an image is resized at most."""


class Facts(NamedTuple):
    """What a person may want to know of an image file.

    Arguments:
        height, width: upright, before resizing.
        largest: the largest value of 16-bit grey, before scaling; None for other pixels.
        several: the file holds more frames or pages than the one that is read.
    """

    height: int
    width: int
    largest: int | None
    several: bool


def read_image(
    path: Path, channels: int | None = None, image_size: int | Sequence[int] | None = None
) -> UInt8[Tensor, "C H W"]:
    """Read one bmp, gif, jpeg, png, tiff or webp file as `[C, H, W]`, 0 to 255.

    The camera's orientation is honoured, 16-bit grey is scaled to 8 bits, what is transparent is laid on black, and
    only the first frame or page is read. Resizing is bilinear, antialiased, to exactly the size asked for.

    Arguments:
        path: the file.
        channels: 1 grey, 3 red-green-blue; None for what the file holds.
        image_size: side, or height and width, in pixels, at most 10,000; None for what the file holds.
    Raises:
        BadInput: channels or image_size make no sense, or the file is absent, of another format, damaged or so large
            that it looks like an attack.
    Example:
        >>> read_image(Path("digit.png"), channels=1, image_size=28).shape  # doctest: +SKIP
        torch.Size([1, 28, 28])
    """
    return read_with_facts(path, channels, height_and_width(image_size))[0]


def read_with_facts(
    path: Path, channels: int | None, size: tuple[int, int] | None
) -> tuple[UInt8[Tensor, "C H W"], Facts]:
    """What `read_image` reads, and the facts of the file."""
    if find_spec("PIL") is None:
        raise BadInput(f"{path}: Pillow, which reads images, is not installed; install torchcaps[train]")
    from PIL import Image, ImageOps, UnidentifiedImageError

    if channels not in (None, 1, 3):
        raise BadInput(f"channels is {channels!r}; give 1 (grey) or 3 (red, green, blue)")
    if path.is_dir():
        raise BadInput(f"{path} is a folder; give the path of an image")
    if not path.is_file():
        raise BadInput(f"{path}: no such file; give the path of an image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks about metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # Not by its path: Pillow 13 maps uncompressed TIFFs into memory and garbles those that a camera turned.
            with path.open("rb") as stream, Image.open(stream, formats=tuple(FORMATS.values())) as file:
                file.load()
                picture = ImageOps.exif_transpose(file)
                # A camera's JPEG may carry a preview or a depth map, which is not another frame.
                several = file.format != "MPO" and getattr(file, "is_animated", False)
            deep = picture.mode.startswith("I")
            largest = int(np.asarray(picture).max()) if deep else None
            picture = _eight_bits(picture, channels)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadInput(f"{path}: too many pixels ({error}); make it smaller") from error
    except UnidentifiedImageError as error:
        known = ", ".join(sorted(set(FORMATS.values())))
        raise BadInput(f"{path}: cannot be read as an image (it is none of {known}); replace or remove it") from error
    except Exception as error:  # a damaged file can raise almost anything from within Pillow
        raise BadInput(f"{path}: cannot be read as an image ({error}); replace or remove it") from error
    width, height = picture.size
    if size is not None:
        picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(picture))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
    return pixels, Facts(height, width, largest, several)


def height_and_width(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """The size that an option image_size asks for.

    Raises:
        BadInput: it is neither one whole number from 1 to 10,000, nor two, nor None.
    """
    if image_size is None:
        return None
    sides: list[Any] = [*image_size] if isinstance(image_size, list | tuple) else [image_size] * 2
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= LONGEST_SIDE for side in sides):
        written = image_size if isinstance(image_size, str) else ""
        example = f"[{written}]" if written.replace(",", "", 1).isdecimal() and "," in written else "[48,24]"
        raise BadInput(
            f"image_size is {image_size!r}; give one whole number of pixels from 1 to {LONGEST_SIDE:,}, or height and"
            f" width in brackets: image_size={example}"
        )
    return sides[0], sides[1]


def _eight_bits(picture: "Picture", channels: int | None) -> "Picture":
    from PIL import Image

    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown scale: save it with 8 or 16 bits")
    if picture.mode.startswith("I"):  # 16-bit grey: 65535 / 257 = 255
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65_535:
            raise ValueError(f"its pixels are {values.min()} to {values.max()}, not the 0 to 65535 of 16 bits")
        picture = Image.fromarray((values.astype(np.float64) / 257).round().astype(np.uint8))
    grey = channels == 1 or (channels is None and picture.mode in ("1", "L", "LA", "La"))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "black"), picture)
    return picture.convert("L" if grey else "RGB")
