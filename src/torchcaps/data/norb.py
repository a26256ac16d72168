"""Load smallNORB. Read and write the file format of smallNORB, which the rendered toys of `toys.py` also use.

LeCun, Huang, Bottou, "Learning methods for generic object recognition with invariance to pose and lighting", CVPR 2004.
The website of smallNORB calls this format "binary matrix". A file consists of a magic number for the type of the
elements, the number of dimensions, one size per dimension (arrays with fewer than three dimensions still store three
sizes), and the elements, row-major. All numbers are little-endian.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

from torchcaps.checks import described
from torchcaps.data.download import RemoteFiles
from torchcaps.data.files import check_length, content_of, present
from torchcaps.data.images import Images
from torchcaps.errors import BadInput

TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}
"""Element types by magic number: uint8 for images, int32 for categories and attributes."""
OTHER_TYPES = {0x1E3D4C51: "float32", 0x1E3D4C52: "packed", 0x1E3D4C53: "float64", 0x1E3D4C56: "int16"}
LARGEST = 2**34
"""Largest array in bytes; a header that declares a larger one is treated as damaged."""
MOST_DIMENSIONS = 8
ATTRIBUTES = ("instance", "elevation", "azimuth", "lighting")
"""First columns of an info file. An instance is the number of a toy within its category. An elevation n means
30° + 5° · n, an azimuth n means 10° · n."""
CATEGORIES = ("animal", "human", "airplane", "truck", "car")
PARTS = {"train": "5x46789x9x18x6x2x{0}x{0}-training", "test": "5x01235x9x18x6x2x{0}x{0}-testing"}
"""Middle part of the file names of each split, as values separated by x: the number of categories; the instances, one
digit each; the numbers of elevations, azimuths, lightings and cameras; and the height and width of the images."""
KINDS = ("dat", "cat", "info")

MD5 = {
    "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat": "8138a0902307b32dfa0025a36dfa45ec",
    "smallnorb-5x46789x9x18x6x2x96x96-training-cat.mat": "fd5120d3f770ad57ebe620eb61a0b633",
    "smallnorb-5x46789x9x18x6x2x96x96-training-info.mat": "19faee774120001fc7e17980d6960451",
    "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat": "e9920b7f7b2869a8f1a12e945b2c166c",
    "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat": "fd5120d3f770ad57ebe620eb61a0b633",
    "smallnorb-5x01235x9x18x6x2x96x96-testing-info.mat": "7c5b871cc69dcadec1bf6a18141f5edc",
}
FILES = RemoteFiles("smallnorb", ["https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/"], MD5)


@dataclass(frozen=True, eq=False)
class NorbFiles:
    """Content of the three files of a split: images, categories and attributes.

    Arguments:
        images: ``[N, cameras, H, W]``, uint8.
        categories: labels, ``[N]``.
        info: attributes, ``[N, columns]``; the first four columns are `ATTRIBUTES`.
    """

    images: UInt8[np.ndarray, "N cameras H W"]
    categories: Int[np.ndarray, " N"]
    info: Int[np.ndarray, "N columns"]


def parse_norb(content: bytes | bytearray, name: str) -> Shaped[np.ndarray, "..."]:
    """Decode a binary-matrix file, the format of smallNORB, as an array of uint8 or int32.

    Arguments:
        content: the whole uncompressed file.
        name: name of the file in error messages.

    Raises:
        BadInput: the magic number stands for neither uint8 nor int32; the number of dimensions is not 1 to 8; the
            declared array is empty or larger than 16 GiB; or `content` is longer or shorter than the header declares.

    Example:
        >>> parse_norb(norb_bytes(np.array([[1, 2], [3, 4]], dtype=np.int32)), "info")
        array([[1, 2],
               [3, 4]], dtype=int32)
    """
    kind, sizes, start = _header(content, name)
    promised = start + math.prod(sizes) * kind.itemsize
    check_length(name, content, promised)
    return np.frombuffer(content, dtype=kind, offset=start).reshape(sizes).astype(kind.newbyteorder("="), copy=True)


def read_norb(path: Path) -> Shaped[np.ndarray, "..."]:
    """Read a binary-matrix file, the format of smallNORB, as an array of uint8 or int32.

    Arguments:
        path: the file, raw or gzipped.

    Raises:
        BadInput: the file cannot be read, its gzip stream is truncated or corrupt, or its content is not a binary
            matrix of uint8 or int32.

    Example:
        >>> read_norb(Path("smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz")).shape  # doctest: +SKIP
        (24300, 2, 96, 96)
    """

    def promised(header: bytes) -> int:
        kind, sizes, start = _header(header, str(path))
        return start + math.prod(sizes) * kind.itemsize

    return parse_norb(content_of(path, 8 + 4 * MOST_DIMENSIONS, promised), str(path))


def norb_bytes(array: Shaped[np.ndarray, "..."]) -> bytes:
    """Encode an array of uint8 or int32 as a binary-matrix file, the format that `parse_norb` decodes.

    Raises:
        BadInput: the array is not uint8 or int32, or does not have 1 to 8 dimensions.
    """
    magic = next((magic for magic, kind in TYPES.items() if kind == array.dtype.newbyteorder("<")), None)
    if magic is None or not 1 <= array.ndim <= MOST_DIMENSIONS:
        raise BadInput(f"array must be uint8 or int32 with 1 to 8 dimensions; got {array.dtype} with {array.ndim}")
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    return struct.pack(f"<2I{len(sizes)}I", magic, array.ndim, *sizes) + array.astype(TYPES[magic]).tobytes()


def load_norb_files(folder: Path, prefix: str, split: str, size: int) -> NorbFiles:
    """Read the three files of one split, such as `PREFIX-5x…-training-dat.mat`, raw or gzipped as `….gz`.

    Raises:
        BadInput: a file is missing or damaged; an array has a wrong type or shape; or the numbers of rows differ.
    """
    paths = []
    for kind in KINDS:
        path = folder / norb_file(prefix, split, size, kind)
        found = present(path)
        if found is None:
            raise BadInput(f"neither {path} nor {path.name}.gz exists: give the folder that contains one of them")
        paths.append(found)
    images, categories, info = (read_norb(path) for path in paths)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise BadInput(f"{paths[0]} must be uint8 [N, cameras, H, W]; got {described(images)}: download it again")
    if categories.ndim != 1 or categories.dtype != np.int32:
        raise BadInput(f"{paths[1]} must be int32 [N]; got {described(categories)}: download it again")
    if info.ndim != 2 or info.dtype != np.int32 or info.shape[1] < len(ATTRIBUTES):
        raise BadInput(
            f"{paths[2]} must be int32 [N, 4 or more] with the columns {', '.join(ATTRIBUTES)}; got {described(info)}: "
            "download it again"
        )
    for path, array in ((paths[1], categories), (paths[2], info)):
        if len(array) != len(images):
            raise BadInput(f"{paths[0]} has {len(images)} images but {path} has {len(array)} rows: download both again")
    return NorbFiles(images, categories, info)


def norb_file(prefix: str, split: str, size: int, kind: str) -> str:
    """Return the name of a file, formed as in smallNORB.

    Arguments:
        prefix: first part of the name.
        split: "train" or "test".
        size: height and width of the images in pixels.
        kind: "dat" for the file of images, "cat" for categories, "info" for attributes.
    """
    return f"{prefix}-{PARTS[split].format(size)}-{kind}.mat"


def as_images(files: NorbFiles, size: int | None, stereo: bool) -> Images:
    """Convert a split, including its attributes, to `Images` with one channel per camera.

    Arguments:
        files: the split.
        size: side of the square images in pixels; must divide the stored side. A pixel is the mean of a square block
            of stored pixels. None keeps the stored side.
        stereo: True for both cameras as two channels, False for the first camera only.

    Raises:
        BadInput: `size` does not divide the stored height, the images are to be shrunk but are not square, or a
            category is not an index of `CATEGORIES`.
    """
    pixels = torch.from_numpy(files.images if stereo else files.images[:, :1])
    side = pixels.shape[2]
    if size is not None and size != side:
        if pixels.shape[3] != side:
            raise BadInput(f"size is {size}, but the images are not square: omit size")
        if size < 1 or side % size:
            raise BadInput(f"size must be a divisor of {side}, the height of the images; got {size}")
        pixels = torch.cat([_shrunk(part, side // size) for part in pixels.split(1024)])
    attributes = {name: torch.from_numpy(files.info[:, column]).long() for column, name in enumerate(ATTRIBUTES)}
    return Images(pixels.contiguous(), torch.from_numpy(files.categories).long(), CATEGORIES, attributes)


def load_smallnorb(data_dir: Path, *, size: int = 48, stereo: bool = True) -> tuple[Images, Images]:
    """Load smallNORB as `(train, test)`: 24,300 stereo pairs each, uint8 `[N, 2, size, size]`, five classes.

    The two splits show different toys. Each image has the attributes instance, elevation, azimuth and lighting. Missing
    files are downloaded, and the checksums are verified on every load.

    Arguments:
        data_dir: data folder; the six files, raw or gzipped, are in `data_dir/smallnorb/`.
        size: height and width in pixels, a divisor of 96, the published size. Hinton, Sabour & Frosst 2018 use 48.
        stereo: True for both cameras as two channels, False for the first camera only.

    Raises:
        BadInput: `size` does not divide 96, or a file has a wrong checksum, cannot be read, or cannot be downloaded.

    Example:
        >>> train, test = load_smallnorb(Path("data"))  # doctest: +SKIP
    """
    if not 1 <= size <= 96 or 96 % size:
        raise BadInput(f"size must be a divisor of 96; got {size}")
    FILES.fetch(data_dir)
    splits = (load_norb_files(data_dir / "smallnorb", "smallnorb", split, 96) for split in PARTS)
    train, test = (as_images(files, size, stereo) for files in splits)
    return train, test


def _shrunk(pixels: UInt8[Tensor, "N C H W"], factor: int) -> UInt8[Tensor, "N C h w"]:
    return torch.nn.functional.avg_pool2d(pixels.float(), factor).round().to(torch.uint8)


def _header(content: bytes | bytearray, name: str) -> tuple[np.dtype, tuple[int, ...], int]:
    """Read the type of the elements, the sizes of the array, and the length of the header in bytes."""
    magic = int.from_bytes(content[:4], "little")
    if len(content) < 4 or magic not in TYPES:
        other = f"elements of {OTHER_TYPES[magic]}" if magic in OTHER_TYPES else f"it starts with 0x{magic:08X}"
        raise BadInput(f"{name} is not a binary matrix of uint8 or int32 ({other}): download it again")
    dimensions = int.from_bytes(content[4:8], "little")
    start = 8 + 4 * max(3, dimensions)
    if len(content) < 8 or not 1 <= dimensions <= MOST_DIMENSIONS:
        raise BadInput(f"{name} declares {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}: download it again")
    if len(content) < start:
        raise BadInput(f"{name} is cut off within its header: download it again")
    sizes = struct.unpack_from(f"<{dimensions}I", content, 8)
    if not 0 < math.prod(sizes) * TYPES[magic].itemsize <= LARGEST:
        declared = "×".join(map(str, sizes))
        raise BadInput(
            f"{name} declares an array of {declared} elements, but an array must not be empty and must"
            " not exceed 16 GiB: download it again"
        )
    return TYPES[magic], sizes, start
