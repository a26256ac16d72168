"""Encoded images, such as image files, that are decoded when they are used."""

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, UInt8, UInt64
from torch import Tensor

from torchcaps.data.image_file import Resize, Size, decode, file_bytes
from torchcaps.errors import BadInput

Item = TypeVar("Item")
MANY = 2_000
"""A progress bar is drawn if there are more images than this."""


@runtime_checkable
class Source(Protocol):
    """Protocol for a sequence of encoded images, such as the files of a folder or the rows of a table."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return the name of an image for messages, such as its path."""

    def read(self, index: int) -> bytes:
        """Return the encoded image, such as the content of a JPEG file."""


class Paths:
    """A `Source` that reads image files from disk.

    Arguments:
        paths: paths of the files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return shown(self.paths[index])

    def read(self, index: int) -> bytes:
        return file_bytes(self.paths[index])


class ImageFiles:
    """Some of the images of a `Source`, with a checksum of each encoded image.

    Arguments:
        source: the encoded images.
        digests: 64-bit checksum of each encoded image of the source.
        indices: indices of the chosen images in the source.
        resize: how images are resized when they are decoded, as for `read_image`; None if they all have the same size.
    """

    def __init__(
        self,
        source: Source,
        digests: UInt64[np.ndarray, " N"],
        indices: Int64[Tensor, " M"],
        resize: Resize | None = None,
    ) -> None:
        self.source = source
        self.all_digests = digests
        self.indices = indices
        self.resize = resize

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def names(self) -> list[str]:
        """Names of the images, such as the paths of the files."""
        return [self.source.name(index) for index in self.indices.tolist()]

    @property
    def digests(self) -> UInt64[np.ndarray, " M"]:
        """Checksums of the encoded images."""
        return self.all_digests[self.indices.numpy()]

    def subset(self, indices: Int64[Tensor, " K"]) -> "ImageFiles":
        """Return the images at `indices`, in that order."""
        return ImageFiles(self.source, self.all_digests, self.indices[indices], self.resize)

    def decoded(self, shape: tuple[int, int, int]) -> UInt8[Tensor, "M C H W"]:
        """Decode the images.

        Arguments:
            shape: `(C, H, W)` of the decoded images.

        Raises:
            BadInput: an image cannot be read, or its size differs from `shape` and `resize` is None.
        """
        size = None if self.resize is None else Size(*shape[1:], self.resize)
        pixels = torch.empty(len(self), *shape, dtype=torch.uint8, device="cpu")
        for row, index in enumerate(self.indices.tolist()):
            name = self.source.name(index)
            image, _ = decode(self.source.read(index), name, shape[0], size)
            if tuple(image.shape) != shape:
                raise BadInput(
                    f"{name} is {image.shape[2]}×{image.shape[1]} pixels (width×height), but the other images are "
                    f"{shape[2]}×{shape[1]}: resize all images with --set data.image_size=N (in Python, image_size=N)"
                )
            pixels[row] = image
        return pixels


def tracked(items: Iterable[Item], text: str, images: int) -> Iterable[Item]:
    """Draw a progress bar on standard error while items are read, if they stand for more than `MANY` images."""
    if images <= MANY or find_spec("rich") is None:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, text, console=Console(stderr=True))


def shown(path: Path | str) -> str:
    """Convert a path to printable text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
