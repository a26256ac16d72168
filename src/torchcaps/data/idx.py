"""Read uint8 arrays from IDX files, the file format of MNIST. Format: LeCun, Cortes, Burges, "The MNIST database"."""

import math
import struct
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from torchcaps.data.files import check_length, content_of
from torchcaps.errors import BadInput

DIMENSIONS = {0x00000801: 1, 0x00000803: 3}
"""Number of dimensions for each magic number: 1 for labels `[N]`, 3 for images `[N, H, W]`."""
LARGEST = 2**31
"""Largest array in bytes; a header that declares a larger one is treated as damaged."""


def parse_idx(content: bytes | bytearray, name: str) -> UInt8[np.ndarray, "..."]:
    """Decode an IDX file as a uint8 array: `[N]` for labels, `[N, H, W]` for images.

    Layout: a magic number (0x00000801 or 0x00000803), one size per dimension, then one byte per element, row-major.
    The magic number and the sizes are 32-bit big-endian integers.

    Arguments:
        content: the whole uncompressed file.
        name: name of the file in error messages.

    Raises:
        BadInput: the magic number is wrong, the declared array is empty or larger than 2 GiB, or `content` is longer or
            shorter than the header declares.

    Example:
        >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels")
        array([7, 9], dtype=uint8)
    """
    sizes = _sizes(content, name)
    start = 4 + 4 * len(sizes)
    promised = start + math.prod(sizes)
    check_length(name, content, promised)
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes).copy()


def read_idx(path: Path, md5: str | None = None) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file, raw or gzipped, as a uint8 array: `[N]` for labels, `[N, H, W]` for images.

    Arguments:
        path: the file. Its first bytes show whether it is gzipped; its name does not matter.
        md5: the right MD5 of the uncompressed content; None if it is not known.

    Raises:
        BadInput: the file cannot be read, its gzip stream is truncated or corrupt, its content is not an IDX array of
            uint8, or its content has another MD5.

    Example:
        >>> read_idx(Path("train-images-idx3-ubyte.gz")).shape  # doctest: +SKIP
        (60000, 28, 28)
    """

    def promised(header: bytes) -> int:
        sizes = _sizes(header, str(path))
        return 4 + 4 * len(sizes) + math.prod(sizes)

    return parse_idx(content_of(path, 16, promised, md5), str(path))


def _sizes(content: bytes | bytearray, name: str) -> tuple[int, ...]:
    magic = int.from_bytes(content[:4], "big")
    if len(content) < 4 or magic not in DIMENSIONS:
        raise BadInput(
            f"{name} is not an IDX file of uint8 (it starts with 0x{content[:4].hex()}, not with the magic number"
            " 0x00000801 or 0x00000803): download it again"
        )
    dimensions = DIMENSIONS[magic]
    if len(content) < 4 + 4 * dimensions:
        raise BadInput(f"{name} is cut off within its header: download it again")
    sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    if not 0 < math.prod(sizes) <= LARGEST:
        declared = "×".join(map(str, sizes))
        raise BadInput(
            f"{name} declares an array of {declared} bytes, but an array must have 1 byte to 2 GiB: download it again"
        )
    return sizes
