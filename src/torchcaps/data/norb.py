"""smallNORB and the files it comes in, which the toys of `toys.py` and NORB's own jittered-cluttered set share.

LeCun, Huang, Bottou, "Learning methods for generic object recognition with invariance to pose and lighting", CVPR 2004.
The format is the "binary matrix" of that data's page: a magic number for the type, the number of dimensions, one size
per dimension (never fewer than three are stored), then the elements, row-major; all numbers little-endian.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

from torchcaps.data.download import download
from torchcaps.data.files import content_of, present, uncompressed_md5
from torchcaps.data.images import Images
from torchcaps.errors import BadInput

TYPES: dict[int, np.dtype[Any]] = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}
"""Magic number → type of the elements: images and categories and attributes."""
OTHER_TYPES = {0x1E3D4C51: "float32", 0x1E3D4C52: "packed", 0x1E3D4C53: "float64", 0x1E3D4C56: "int16"}
LARGEST = 2**34
"""Bytes. A header that promises more is taken for a damaged one."""
MOST_DIMENSIONS = 8
ATTRIBUTES = ("instance", "elevation", "azimuth", "lighting")
"""Columns of an info file: toy within its category, elevation 30° + 5° · n, azimuth 10° · n, lighting."""
CATEGORIES = ("animal", "human", "airplane", "truck", "car")
PARTS = {"train": "5x46789x9x18x6x2x{0}x{0}-training", "test": "5x01235x9x18x6x2x{0}x{0}-testing"}
"""Split → the middle of its files' names: categories, instances, elevations, azimuths, lightings, cameras, size."""
KINDS = ("dat", "cat", "info")

MIRRORS = ("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",)
MD5 = {
    "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat": "8138a0902307b32dfa0025a36dfa45ec",
    "smallnorb-5x46789x9x18x6x2x96x96-training-cat.mat": "fd5120d3f770ad57ebe620eb61a0b633",
    "smallnorb-5x46789x9x18x6x2x96x96-training-info.mat": "19faee774120001fc7e17980d6960451",
    "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat": "e9920b7f7b2869a8f1a12e945b2c166c",
    "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat": "fd5120d3f770ad57ebe620eb61a0b633",
    "smallnorb-5x01235x9x18x6x2x96x96-testing-info.mat": "7c5b871cc69dcadec1bf6a18141f5edc",
}
"""File of smallNORB → MD5 of its uncompressed content; the mirrors serve each with `.gz`."""


@dataclass(frozen=True, eq=False)
class NorbFiles:
    """One split as its three files hold it.

    Arguments:
        images: ``[N, cameras, H, W]``, uint8.
        categories: ``[N]``.
        info: ``[N, columns]``; the first four columns are `ATTRIBUTES`.
    """

    images: UInt8[np.ndarray, "N cameras H W"]
    categories: Int[np.ndarray, " N"]
    info: Int[np.ndarray, "N columns"]


def parse_norb(content: bytes | bytearray, name: str) -> Shaped[np.ndarray, "..."]:
    """Turn the bytes of a binary-matrix file into an array of uint8 or int32.

    Arguments:
        content: the whole uncompressed file.
        name: what to call it in an error.
    Raises:
        BadInput: wrong magic, another type of element, sizes beyond all reason, or more or fewer bytes than promised.
    Example:
        >>> parse_norb(norb_bytes(np.array([[1, 2], [3, 4]], dtype=np.int32)), "info")
        array([[1, 2],
               [3, 4]], dtype=int32)
    """
    kind, sizes, start = _header(content, name)
    promised = start + math.prod(sizes) * kind.itemsize
    if len(content) != promised:
        much = "more" if len(content) > promised else f"{len(content):,} bytes"
        raise BadInput(f"{name}: the header promises {promised:,} bytes, the file holds {much}; get the file again")
    return np.frombuffer(content, dtype=kind, offset=start).reshape(sizes).astype(kind.newbyteorder("="), copy=True)


def read_norb(path: Path) -> Shaped[np.ndarray, "..."]:
    """Read a binary-matrix file, raw or gzipped.

    Raises:
        BadInput: the file cannot be read, its gzip stream is cut or corrupt, or `parse_norb` refuses it.
    Example:
        >>> read_norb(Path("smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz")).shape  # doctest: +SKIP
        (24300, 2, 96, 96)
    """

    def promised(header: bytes) -> int:
        kind, sizes, start = _header(header, str(path))
        return start + math.prod(sizes) * kind.itemsize

    return parse_norb(content_of(path, 8 + 4 * MOST_DIMENSIONS, promised), str(path))


def norb_bytes(array: Shaped[np.ndarray, "..."]) -> bytes:
    """The binary-matrix file that holds an array of uint8 or int32: what `parse_norb` reads.

    Raises:
        BadInput: another type of element, or more dimensions than the format is read with.
    """
    magic = next((magic for magic, kind in TYPES.items() if kind == array.dtype.newbyteorder("<")), None)
    if magic is None or not 1 <= array.ndim <= MOST_DIMENSIONS:
        raise BadInput(f"an array of {array.dtype} and {array.ndim} dimensions: give uint8 or int32 and 1 to 8")
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    return struct.pack(f"<2I{len(sizes)}I", magic, array.ndim, *sizes) + array.astype(TYPES[magic]).tobytes()


def load_norb_files(folder: Path, prefix: str, split: str, size: int) -> NorbFiles:
    """The three files of one split, `PREFIX-5x…-training-dat.mat` and so on, raw or with `.gz`.

    Raises:
        BadInput: a file is absent or damaged, or the three disagree.
    """
    paths = []
    for kind in KINDS:
        path = folder / norb_file(prefix, split, size, kind)
        found = present(path)
        if found is None:
            raise BadInput(f"{path}: absent, and so is the same with .gz; give the folder that holds it")
        paths.append(found)
    images, categories, info = (read_norb(path) for path in paths)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise BadInput(f"{paths[0]}: holds {_kind(images)}, not uint8 images [N, cameras, H, W]")
    if categories.ndim != 1 or categories.dtype != np.int32:
        raise BadInput(f"{paths[1]}: holds {_kind(categories)}, not int32 categories [N]")
    if info.ndim != 2 or info.dtype != np.int32 or info.shape[1] < len(ATTRIBUTES):
        raise BadInput(f"{paths[2]}: holds {_kind(info)}, not int32 [N, 4 or more]: {', '.join(ATTRIBUTES)}")
    for path, array in ((paths[1], categories), (paths[2], info)):
        if len(array) != len(images):
            raise BadInput(f"{paths[0]} holds {len(images)} images but {path} {len(array)} rows; get both files again")
    return NorbFiles(images, categories, info)


def norb_file(prefix: str, split: str, size: int, kind: str) -> str:
    """The published name of a file: prefix, instances, size, split and kind (dat, cat or info)."""
    return f"{prefix}-{PARTS[split].format(size)}-{kind}.mat"


def as_images(files: NorbFiles, size: int | None, stereo: bool, class_names: Sequence[str] = CATEGORIES) -> Images:
    """A split as images of `size` pixels, one channel per camera, that keep their attributes.

    Arguments:
        files: the split.
        size: pixels a side, a divisor of the files'; each pixel is the mean of the square it covers. None: as they are.
        stereo: both cameras as two channels; else the first camera alone.
        class_names: of the categories, in their order.
    Raises:
        BadInput: the size does not divide that of the files, or a category has no name.
    """
    pixels = torch.from_numpy(files.images if stereo else files.images[:, :1])
    side = pixels.shape[2]
    if size is not None and size != side:
        if size < 1 or side % size or pixels.shape[3] != side:
            raise BadInput(f"size is {size}: give one that divides the images' {side} pixels, or leave it out")
        pixels = torch.cat([_shrunk(part, side // size) for part in pixels.split(1024)])
    attributes = {name: torch.from_numpy(files.info[:, column]).long() for column, name in enumerate(ATTRIBUTES)}
    return Images(pixels.contiguous(), torch.from_numpy(files.categories).long(), tuple(class_names), attributes)


def load_smallnorb(data_dir: Path, *, size: int = 48, stereo: bool = True) -> tuple[Images, Images]:
    """smallNORB as `(train, test)`, from `data_dir/smallnorb`: 24,300 stereo pairs each, of toys not seen in the other.

    The six files, raw or with `.gz`, are downloaded there when absent, and their checksums verified at every load.

    Arguments:
        data_dir: the folder above.
        size: pixels a side; 96 as published, or a divisor of it, 48 as in Hinton, Sabour & Frosst 2018.
        stereo: both cameras as two channels; else the first camera alone.
    Raises:
        BadInput: a file is damaged or is another, or cannot be downloaded, or the size does not divide 96.
    Example:
        >>> train, test = load_smallnorb(Path("data"))  # doctest: +SKIP
    """
    if not 1 <= size <= 96 or 96 % size:
        raise BadInput(f"size is {size}: give one that divides 96")
    fetch_smallnorb(data_dir)
    for file, problem in verify_smallnorb(data_dir):
        if problem != "ok":
            raise BadInput(f"{data_dir / 'smallnorb' / file}: {problem}")
    splits = (load_norb_files(data_dir / "smallnorb", "smallnorb", split, 96) for split in PARTS)
    train, test = (as_images(files, size, stereo) for files in splits)
    return train, test


def fetch_smallnorb(data_dir: Path, progress: bool = True) -> None:
    """Download what is absent of smallNORB to `data_dir/smallnorb/`; leave what is there.

    Raises:
        BadInput: a file cannot be downloaded (see `download`).
    """
    for file, md5 in MD5.items():
        if present(data_dir / "smallnorb" / file) is None:
            path = data_dir / "smallnorb" / f"{file}.gz"
            download([f"{mirror}{file}.gz" for mirror in MIRRORS], path, md5, progress)


def verify_smallnorb(data_dir: Path) -> list[tuple[str, str]]:
    """Check the six files of smallNORB without loading or downloading: `(file, "ok" or the problem)` for each."""
    found = []
    for file, md5 in MD5.items():
        path = present(data_dir / "smallnorb" / file)
        try:
            problem = f"absent from {data_dir / 'smallnorb'}" if path is None else None
            if path is not None and (seen := uncompressed_md5(path)) != md5:
                problem = f"its content has md5 {seen}, not {md5}; delete it, and it will be downloaded again"
        except BadInput as error:
            problem = str(error)
        found.append((file, problem or "ok"))
    return found


def _shrunk(pixels: UInt8[Tensor, "N C H W"], factor: int) -> UInt8[Tensor, "N C h w"]:
    return torch.nn.functional.avg_pool2d(pixels.float(), factor).round().to(torch.uint8)


def _header(content: bytes | bytearray, name: str) -> tuple[np.dtype, tuple[int, ...], int]:
    """Type, sizes and length of the header."""
    magic = int.from_bytes(content[:4], "little")
    if len(content) < 4 or magic not in TYPES:
        other = f"elements of {OTHER_TYPES[magic]}" if magic in OTHER_TYPES else f"it begins with 0x{magic:08X}"
        raise BadInput(f"{name}: not a binary matrix of bytes or int32 ({other}); get the file again")
    dimensions = int.from_bytes(content[4:8], "little")
    start = 8 + 4 * max(3, dimensions)
    if len(content) < 8 or not 1 <= dimensions <= MOST_DIMENSIONS:
        raise BadInput(f"{name}: its header promises {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}; get it again")
    if len(content) < start:
        raise BadInput(f"{name}: cut off within its header; get the file again")
    sizes = struct.unpack_from(f"<{dimensions}I", content, 8)
    if not 0 < math.prod(sizes) * TYPES[magic].itemsize <= LARGEST:
        raise BadInput(f"{name}: its header promises an array of {' x '.join(map(str, sizes))}; get the file again")
    return TYPES[magic], sizes, start


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {list(array.shape)}"
