"""Your own images: a folder per class, in one tree or in train/ and test/."""

import warnings
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from torchcaps.data.images import Images, cut_indices
from torchcaps.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP"}
"""Ending of a file that is read, in any case → its format in Pillow."""
MANY = 2_000
"""Files from which on a progress bar is drawn."""


def load_image_folder(
    root: Path,
    *,
    image_size: int | Sequence[int] | None = None,
    channels: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    progress: bool = True,
) -> tuple[Images, Images]:
    """Read a folder of images as `(train, test)`; the names of the class folders are the class names, sorted.

    Either `root/train/<class>/*` and `root/test/<class>/*` (other folders beside them are not read), or
    `root/<class>/*`, of which `test_fraction` of each class is held out, fixed by the seed. Passed over are names that
    begin with a dot, files that are not png, jpg, jpeg, bmp or webp, and folders within a class. Files are taken in
    the order of their names; pixels are read as `read_image` does.

    Arguments:
        root: the folder.
        image_size: side, or height and width, in pixels, to which every image is resized; None where all agree.
        channels: 1 grey, 3 red-green-blue; None for 1 where all files are grey, else 3.
        seed: of the split of one tree, 0 or greater.
        test_fraction: of the split of one tree, above 0 and below 1.
        progress: draw a progress bar on standard error for more than 2,000 files.
    Raises:
        BadInput: the layout is neither of the two, a class is empty or in only one of train/ and test/, sizes differ
            and no image_size is given, or a file cannot be read.
    Example:
        >>> train, test = load_image_folder(Path("photos"), image_size=32)  # doctest: +SKIP
    """
    if not root.is_dir():
        raise BadInput(f"{root}: no such folder; give one that holds a folder of images per class")
    halves = [half for half in ("train", "test") if (root / half).is_dir() and _folders(root / half)]
    if len(halves) == 1:
        other = {"train": "test", "test": "train"}[halves[0]]
        raise BadInput(f"{root}: {halves[0]}/ holds classes but {other}/ does not; add a folder per class to {other}/")
    trees = [_tree(root / half) for half in halves] or [_tree(root)]
    class_names = tuple(trees[0])
    for name in sorted(set(trees[0]) ^ set(trees[-1])):
        there, absent = (root / half for half in (halves if name in trees[0] else halves[::-1]))
        raise BadInput(f"{there / name}: this class is not in {absent}; add {absent / name} or remove this one")
    files = [(file, class_names.index(name)) for tree in trees for name, members in tree.items() for file in members]
    labels = torch.tensor([label for _, label in files])
    if halves:
        first = sum(len(members) for members in trees[0].values())
        train, test = torch.arange(first), torch.arange(first, len(files))
    else:
        for name, members in trees[0].items():
            if len(members) == 1:
                raise BadInput(f"{members[0]}: the only image of class {name}, which no split can share; add another")
        train, test = cut_indices(labels, test_fraction, seed)
    pixels = _read_all([file for file, _ in files], channels, image_size, progress)
    return (
        Images(torch.stack([pixels[i] for i in train]), labels[train], class_names),
        Images(torch.stack([pixels[i] for i in test]), labels[test], class_names),
    )


def read_image(
    path: Path, channels: int | None = None, image_size: int | Sequence[int] | None = None
) -> UInt8[Tensor, "C H W"]:
    """Read one png, jpeg, bmp or webp file as `[C, H, W]`, 0 to 255.

    The camera's orientation is honoured, 16-bit grey is scaled to 8 bits, what is transparent is laid on black, and
    only the first frame is read. Resizing is bilinear, antialiased, to exactly the size asked for.

    Arguments:
        path: the file.
        channels: 1 grey, 3 red-green-blue; None for what the file holds.
        image_size: side, or height and width, in pixels; None for what the file holds.
    Raises:
        BadInput: channels or image_size make no sense, or the file is absent, of another format, damaged or so large
            that it looks like an attack.
    Example:
        >>> read_image(Path("digit.png"), channels=1, image_size=28).shape  # doctest: +SKIP
        torch.Size([1, 28, 28])
    """
    if find_spec("PIL") is None:
        raise BadInput(f"{path}: Pillow, which reads images, is not installed; install torchcaps[train]")
    from PIL import Image, ImageOps

    if channels not in (None, 1, 3):
        raise BadInput(f"channels is {channels}; give 1 (grey) or 3 (red, green, blue)")
    size = _height_and_width(image_size)
    if not path.is_file():
        raise BadInput(f"{path}: no such file; give the path of an image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=tuple(FORMATS.values())) as file:
                file.load()
                picture = _eight_bits(ImageOps.exif_transpose(file), channels)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadInput(f"{path}: too many pixels to be an honest image ({error}); make it smaller") from error
    except Exception as error:  # a damaged file can raise almost anything from within Pillow
        raise BadInput(f"{path}: cannot be read as an image ({error}); replace or remove it") from error
    if size is not None:
        picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(picture))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def _tree(root: Path) -> dict[str, list[Path]]:
    tree = {
        folder.name: sorted(
            file
            for file in folder.iterdir()
            if file.suffix.lower() in FORMATS and file.is_file() and not file.name.startswith(".")
        )
        for folder in _folders(root)
    }
    if len(tree) < 2:
        found = f"only one class folder, {next(iter(tree))}" if tree else "no class folders"
        raise BadInput(f"{root}: {found}; give a folder that holds a folder of images for each of two or more classes")
    for name, members in tree.items():
        if not members:
            raise BadInput(f"{root / name}: holds no {', '.join(FORMATS)} file; add images or remove the folder")
    return tree


def _folders(root: Path) -> list[Path]:
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _read_all(
    files: list[Path], channels: int | None, image_size: int | Sequence[int] | None, progress: bool
) -> list[Tensor]:
    pixels: list[Tensor] = []
    for file in _tracked(files, progress and len(files) > MANY):
        pixels.append(read_image(file, channels, image_size))
        (height, width), (first_height, first_width) = pixels[-1].shape[1:], pixels[0].shape[1:]
        if (height, width) != (first_height, first_width):
            raise BadInput(
                f"{files[0]} is {first_width} x {first_height} pixels but {file} is {width} x {height}; give all one"
                " size with --set data.image_size=N"
            )
    most = max(len(image) for image in pixels)
    return [image.expand(most, -1, -1) for image in pixels]


def _tracked(files: list[Path], shown: bool) -> Iterable[Path]:
    if not shown or find_spec("rich") is None:
        return files
    from rich.console import Console
    from rich.progress import track

    return track(files, "reading images", console=Console(stderr=True))


def _height_and_width(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise BadInput(f"image_size is {image_size}; give one number of pixels, or height and width")
    return size


def _eight_bits(picture: "Picture", channels: int | None) -> "Picture":
    from PIL import Image

    if picture.mode.startswith("I"):  # 16-bit grey: 65535 / 257 = 255
        picture = Image.fromarray((np.asarray(picture).astype(np.float64) / 257).round().clip(0, 255).astype(np.uint8))
    grey = channels == 1 or (channels is None and picture.mode in ("1", "L", "LA", "La"))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "black"), picture)
    return picture.convert("L" if grey else "RGB")
