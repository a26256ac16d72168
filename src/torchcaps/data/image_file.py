"""Read one image file."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.checks import check_choice
from torchcaps.errors import BadInput
from torchcaps.threads import without_warnings

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFile import ImageFile

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
"""Pillow's name of the image format for each supported file extension; extensions are in lower case."""
GREY = ("1", "L", "LA", "La")
"""Pillow's modes of greyscale images with at most 8 bits per pixel."""
SMALL_GREYS = {"L;2": 85, "L;4": 17}
"""For Pillow's raw modes of grey PNG images with 2 and 4 bits, the factor by which Pillow multiplies the pixels."""
PNG_METADATA = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Names of the parts of a PNG file that can contain the orientation; without them, `getexif` decodes the pixels."""
LONGEST_SIDE = 10_000
"""Largest side, in pixels, that an image can be resized to."""
Resize = Literal["stretch", "crop", "pad"]
"""How images are resized: stretch them, or keep the aspect ratio and crop what is too long, or add black borders."""


class Size(NamedTuple):
    """Size to which images are resized.

    Arguments:
        height, width: size in pixels.
        resize: how an image of another aspect ratio is resized.
    """

    height: int
    width: int
    resize: Resize = "stretch"


class Facts(NamedTuple):
    """Properties of an image file that can cause a warning.

    Arguments:
        height, width: size in pixels of the upright image, before resizing.
        grey: True if the file is greyscale.
        deep: True if the file has more than 8 bits per pixel and channel.
        several: True if the file contains more than one frame or page.
        transparent: True if the file can have transparent pixels.
        largest: largest value of a 16-bit image, before scaling; for colours, the largest value with the same upper 8
            bits. None for other images, or if the pixels were not decoded.
        black: True if all pixels are black after transparent pixels became black; False if the pixels were not decoded.
    """

    height: int
    width: int
    grey: bool
    deep: bool
    several: bool
    transparent: bool
    largest: int | None = None
    black: bool = False


def read_image(
    path: Path,
    channels: int | None = None,
    image_size: int | Sequence[int] | None = None,
    resize: Resize = "stretch",
) -> UInt8[Tensor, "C H W"]:
    """Read one bmp, gif, jpeg, png, tiff or webp file as uint8 `[C, H, W]`, 0 to 255.

    The image is rotated upright by its EXIF orientation, 16-bit greyscale is scaled to 8 bits, and transparent pixels
    are blended with black. Only the first frame or page is read. Resizing is bilinear and antialiased.

    Arguments:
        path: the file.
        channels: 1 for greyscale, 3 for RGB. If None, the image has one channel if the file is greyscale, else three.
        image_size: side of a square, or (height, width), in pixels, each from 1 to 10,000. None keeps the size of the
            file.
        resize: how an image of another aspect ratio is resized. "stretch" changes its aspect ratio. "crop" keeps the
            centre of the image, as large as possible. "pad" keeps the whole image and adds black borders.

    Raises:
        BadInput: `channels` is not 1, 3 or None; `image_size` is out of its range; `resize` is unknown, or not
            "stretch" although `image_size` is None; the file does not exist, has another format, is damaged, or has
            more pixels than Pillow's limit `Image.MAX_IMAGE_PIXELS`; or Pillow is not installed.

    Example:
        >>> read_image(Path("digit.png"), channels=1, image_size=28).shape  # doctest: +SKIP
        torch.Size([1, 28, 28])
    """
    return decode(file_bytes(path), path, channels, target_size(image_size, resize))[0]


def read_for_network(path: Path, shape: tuple[int, int, int], resize: Resize) -> UInt8[Tensor, "C H W"]:
    """Read an image file with the shape of a network's images, as `read_image`; both channels of a stereo pair get it.

    Arguments:
        path: the file.
        shape: (C, H, W) of the images.
        resize: how an image of another aspect ratio is resized.
    """
    channels, height, width = shape
    return read_image(path, 3 if channels == 3 else 1, (height, width), resize).expand(channels, -1, -1)


def file_bytes(path: Path) -> bytes:
    """Read the content of an image file.

    Raises:
        BadInput: the path is a folder, or the file does not exist or cannot be read.
    """
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a folder: give the path of an image")
        if not path.is_file():
            raise BadInput(f"{path} does not exist: give the path of an image")
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): replace or remove it") from error
    except MemoryError as error:
        raise BadInput(f"{path} does not fit into the free memory: replace or remove it") from error


def check_colour(channels: int | None) -> None:
    """Check that the number of channels to which images are converted is 1, 3 or None.

    Raises:
        BadInput: `channels` is another value.
    """
    if channels not in (None, 1, 3):
        raise BadInput(f"channels must be 1 (grey) or 3 (red, green, blue); got {channels!r}")


def decode(
    content: bytes, name: Path | str, channels: int | None, size: Size | None
) -> tuple[UInt8[Tensor, "C H W"], Facts]:
    """Decode the content of an image file as `read_image` does.

    Arguments:
        content: content of the file.
        name: name of the image for error messages.
        channels: as for `read_image`.
        size: size to which the image is resized; None keeps the size of the file.

    Returns:
        The pixels and the `Facts` of the file.
    """
    check_colour(channels)
    with _opened(content, name) as file:
        from PIL import ImageOps

        raw = _raw_mode(file)
        file.load()
        ImageOps.exif_transpose(file, in_place=True)
        picture: Picture = file
        facts = _facts(file, raw, picture.width, picture.height)
        colour_key = picture.info.get("transparency")
        # Pillow converts the pixels to 8 bits, but not the colour that is transparent.
        if isinstance(colour_key, tuple) and facts.deep:
            picture.info["transparency"] = tuple(value >> 8 for value in colour_key)
        elif isinstance(colour_key, int) and raw in SMALL_GREYS:
            picture.info["transparency"] = colour_key * SMALL_GREYS[raw]
        original, picture = picture, _eight_bits(picture, channels == 1 or (channels is None and facts.grey))
        if facts.deep:
            single = original.mode.startswith("I")
            largest = np.asarray(original if single else picture).max()
            facts = facts._replace(largest=int(largest) if single else int(largest) * 256 + 255)
        if facts.transparent and picture.getbbox() is None:
            facts = facts._replace(black=bool(_transparent(original).any()))
    if size is not None:
        picture = _resized(picture, *size)
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous(), facts


def header(content: bytes, name: Path | str) -> Facts:
    """Read the `Facts` of an image from its header. The pixels are decoded only if a PNG file has metadata after them.

    If the orientation turns the image by 90° or 270°, height and width are exchanged.
    """
    with _opened(content, name) as file:
        from PIL.ExifTags import Base

        width, height = file.size
        if file.format != "PNG" or any(key in content for key in PNG_METADATA):
            metadata = file.getexif()
            if file.format == "TIFF":  # `file.size` is the upright size in some versions of Pillow
                width, height = metadata[Base.ImageWidth], metadata[Base.ImageLength]
            if metadata.get(Base.Orientation, 1) in (5, 6, 7, 8):
                width, height = height, width
        return _facts(file, _raw_mode(file), width, height)


@contextmanager
def _opened(content: bytes, name: Path | str) -> Iterator["ImageFile"]:
    """Open an image; any error raised in the `with` block becomes a `BadInput` that names the image."""
    if find_spec("PIL") is None:
        raise BadInput(f"{name} needs Pillow: pip install 'torchcaps[train]'")
    from PIL import Image, UnidentifiedImageError

    try:
        # The warnings concern metadata, for example.
        with without_warnings(), Image.open(BytesIO(content), formats=tuple(FORMATS.values())) as file:
            most, pixels = Image.MAX_IMAGE_PIXELS, math.prod(file.size)
            if most is not None and pixels > most:
                raise Image.DecompressionBombError(f"{pixels:,} pixels, at most {most:,}")
            yield file
    except Image.DecompressionBombError as error:
        raise BadInput(f"{name} has too many pixels ({error}): make the image smaller") from error
    except UnidentifiedImageError as error:
        known = ", ".join(sorted(set(FORMATS.values())))
        raise BadInput(f"{name} cannot be read as an image (not one of {known}): replace or remove it") from error
    except Exception as error:  # Pillow can raise almost any exception on a damaged file
        raise BadInput(f"{name} cannot be read as an image ({error}): replace or remove it") from error


def _raw_mode(file: "ImageFile") -> str:
    """Return Pillow's name of the pixel format in the file, such as ``RGB;16B``, before the pixels are decoded."""
    arguments = file.tile[0].args if file.tile else ""
    return str(arguments[0] if isinstance(arguments, tuple) and arguments else arguments)


def _facts(file: "ImageFile", raw: str, width: int, height: int) -> Facts:
    # MPO is a JPEG file with an additional preview or depth map, which does not count as a frame.
    several = file.format != "MPO" and getattr(file, "is_animated", False)
    single = file.mode.startswith("I")
    grey = single or file.mode in GREY or raw.startswith("LA;")
    deep = single or (";16" in raw and not raw.startswith("BGR"))  # BMP files have 16 bits per pixel, not per channel
    return Facts(height, width, grey, deep, several, file.has_transparency_data)


def _transparent(picture: "Picture") -> np.ndarray:
    """Return which pixels of an image are transparent."""
    if picture.mode.startswith("I"):
        return np.asarray(picture) == picture.info["transparency"]
    return np.asarray(picture.convert("RGBA").getchannel("A")) < 255


def target_size(image_size: int | Sequence[int] | None, resize: Resize = "stretch") -> Size | None:
    """Convert the options `image_size` and `resize` to a `Size`; None if `image_size` is None.

    Raises:
        BadInput: `image_size` is neither None, nor a whole number from 1 to 10,000, nor a list or tuple of two such
            numbers; `resize` is unknown; or images are to be cropped or padded, but `image_size` is None.
    """
    check_choice("resize", resize, get_args(Resize), BadInput)
    if image_size is None:
        if resize != "stretch":
            raise BadInput(f"resize is {resize!r}, but image_size is None: give image_size too (data.image_size)")
        return None
    sides: list[Any] = [*image_size] if isinstance(image_size, list | tuple) else [image_size] * 2
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= LONGEST_SIDE for side in sides):
        written = image_size if isinstance(image_size, str) else ""
        example = f"[{written}]" if written.replace(",", "", 1).isdecimal() and "," in written else "[48,24]"
        raise BadInput(
            f"image_size must be an integer from 1 to {LONGEST_SIDE:,}, or height and width in brackets, such as "
            f"{example}; got {image_size!r}"
        )
    return Size(sides[0], sides[1], resize)


def _resized(picture: "Picture", height: int, width: int, resize: Resize) -> "Picture":
    from PIL import Image, ImageOps

    if resize == "crop":
        return ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
    if resize == "stretch":
        return picture.resize((width, height), Image.Resampling.BILINEAR)
    # The same as ImageOps.pad, which fails if a side of the resized image rounds to 0.
    ratio = picture.width / picture.height
    if ratio > width / height:
        inside = width, max(1, round(picture.height / picture.width * width))
    else:
        inside = max(1, round(ratio * height)), height
    padded = Image.new(picture.mode, (width, height))
    position = round((width - inside[0]) / 2), round((height - inside[1]) / 2)
    padded.paste(picture.resize(inside, Image.Resampling.BILINEAR), position)
    return padded


def _eight_bits(picture: "Picture", grey: bool) -> "Picture":
    from PIL import Image

    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range: save it with 8 or 16 bits")
    if picture.mode.startswith("I"):  # 16-bit greyscale: 65535 / 257 = 255
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65_535:
            raise ValueError(
                f"its pixel values range from {values.min()} to {values.max()}, beyond the 16-bit range 0 to 65535"
            )
        if picture.has_transparency_data:
            values = np.where(_transparent(picture), 0, values)
        picture = Image.fromarray((values.astype(np.float64) / 257).round().astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "black"), picture)
    mode = "L" if grey else "RGB"
    return picture if picture.mode == mode else picture.convert(mode)  # convert would copy the image
