"""Reader for numeric arrays in a MATLAB file. It rejects damaged files; SciPy's reader crashes on some of them."""

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

import numpy as np

from torchcaps.data.files import CHUNK, content_as_stored
from torchcaps.errors import BadInput

HEADER_BYTES = 128
MATRIX, COMPRESSED = 14, 15
STRUCT = 2
NAME_BYTES = 1024
"""Number of bytes at the start of a matrix that contain its flags, its shape and its name."""
STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
"""NumPy dtype of the stored numbers, by element type."""
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""NumPy dtype of the values, by matrix class. MATLAB can store the values in a smaller dtype, one of `STORED`."""


class DamagedFile(ValueError):
    """Reason why a MATLAB file cannot be read. It is reported as `BadInput`, with the path of the file."""


def read_arrays(path: Path, names: Sequence[str], md5: str | None = None) -> list[np.ndarray]:
    """Read numeric arrays from a file in MATLAB's format 5 (`save -v6` or `-v7`).

    The arrays can be read-only.

    Arguments:
        path: path of the file.
        names: names of the arrays to read. The arrays are returned in this order.
        md5: the right MD5 of the file; None if it is not known.

    Raises:
        BadInput: the file has another MD5 or format or is damaged, or one of the arrays is missing or not numeric.

    Example:
        >>> pixels, labels = read_arrays(Path("test_32x32.mat"), ["X", "y"])  # doctest: +SKIP
    """
    content = content_as_stored(path, md5)
    with _damage_reported(path):
        variables = ((name, kind, body) for name, kind, body in _variables(content) if name in names)
        found = {name: _numbers(_matrix(kind, body), name) for name, kind, body in variables}
        if absent := set(names) - found.keys():
            raise DamagedFile(f"the file contains no array {', '.join(sorted(absent))}")
        return [found[name] for name in names]


def read_struct(path: Path, name: str, fields: Sequence[str]) -> list[np.ndarray]:
    """Read numeric fields of a 1×1 struct from a file in MATLAB's format 5 (`save -v6` or `-v7`).

    Arguments:
        path: path of the file.
        name: name of the struct.
        fields: names of the fields to read. The arrays are returned in this order.

    Raises:
        BadInput: the file has another format or is damaged, or the struct or one of the fields is missing.

    Example:
        >>> images, labels = read_struct(Path("test.mat"), "affNISTdata", ["image", "label_int"])  # doctest: +SKIP
    """
    content = content_as_stored(path)
    with _damage_reported(path):
        found = next(((kind, body) for own_name, kind, body in _variables(content) if own_name == name), None)
        if found is None:
            raise DamagedFile(f"the file contains no struct {name}")
        flags, _, _, parts = _parts(_matrix(*found))
        if flags[0] != STRUCT:
            raise DamagedFile(f"{name} is not a struct")
        length = int.from_bytes(_next(parts)[1], "little")
        names = bytes(_next(parts)[1])
        known = [names[at : at + length].split(b"\0")[0].decode() for at in range(0, len(names), length)]
        bodies = {key: part for key, (_, part) in zip(known, parts, strict=False)}
        if absent := set(fields) - bodies.keys():
            raise DamagedFile(f"{name} has no field {', '.join(sorted(absent))}")
        return [_numbers(bodies[field], field) for field in fields]


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, ArithmeticError, MemoryError, zlib.error) as error:
        raise BadInput(
            f"{path} cannot be read ({error or type(error).__name__}): delete it and download it again"
        ) from error


def _variables(content: bytes) -> Iterator[tuple[str, int, memoryview]]:
    """Yield the name of each variable in a MATLAB file, and the type and content of its element."""
    if content[HEADER_BYTES - 4 : HEADER_BYTES] != b"\x00\x01IM":
        raise DamagedFile("the header is not the header of a little-endian MATLAB 5 file")
    for kind, body in _elements(memoryview(content)[HEADER_BYTES:]):
        _, _, name, _ = _parts(_matrix(kind, body, NAME_BYTES))
        yield bytes(name).decode("latin-1"), kind, body


def _matrix(kind: int, body: memoryview, most: int | None = None) -> memoryview:
    """Return the matrix of a variable, of which at most the first `most` bytes are decompressed."""
    return _inflated(body, most) if kind == COMPRESSED else body


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and content of each element of a MATLAB file or matrix."""
    at = 0
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<II", data, at)
        start = at + 8
        if kind >> 16:  # an element of 4 bytes or less: one word with length and type, then the content
            kind, length, start = kind & 0xFFFF, kind >> 16, at + 4
        end = start + length
        if end > len(data) or (start == at + 4 and length > 4):
            raise DamagedFile("the file ends within an element")
        yield kind, data[start:end]
        at = end if kind == COMPRESSED else at + -(-(end - at) // 8) * 8


def _next(parts: Iterator[tuple[int, memoryview]]) -> tuple[int, memoryview]:
    for part in parts:
        return part
    raise DamagedFile("an element is missing")


def _parts(matrix: memoryview) -> tuple[memoryview, memoryview, memoryview, Iterator[tuple[int, memoryview]]]:
    """Split a matrix into its flags, its shape, its name, and the elements after these."""
    parts = _elements(matrix)
    head = [part for _, part in islice(parts, 3)]
    if len(head) < 3 or not head[0]:
        raise DamagedFile("an element is missing")
    return head[0], head[1], head[2], parts


def _inflated(body: memoryview, most: int | None) -> memoryview:
    """Decompress the matrix in a compressed element, up to its declared length or up to `most` bytes."""
    inflater = zlib.decompressobj()
    head = inflater.decompress(body[:CHUNK], 8)
    kind, length = struct.unpack("<II", head.ljust(8, b"\0"))
    if kind != MATRIX or len(head) < 8:
        raise DamagedFile("a compressed element contains no matrix")
    length = length if most is None else min(length, most)
    content = bytearray()
    rest = (body[at : at + CHUNK] for at in range(CHUNK, len(body), CHUNK))
    for chunk in chain([memoryview(inflater.unconsumed_tail)], rest):
        if len(content) == length:
            break
        content += inflater.decompress(chunk, length - len(content))
    if len(content) < length:
        raise DamagedFile("the file ends within a compressed element")
    return memoryview(content)


def _numbers(matrix: memoryview, name: str) -> np.ndarray:
    flags, shape, _, parts = _parts(matrix)
    kind, content = _next(parts)
    if flags[0] not in CLASSES or kind not in STORED:
        raise DamagedFile(f"{name} is not numeric")
    values = np.frombuffer(content, STORED[kind])
    sides = np.frombuffer(shape, "<i4").tolist()
    if min(sides, default=-1) < 0 or math.prod(sides) != len(values):
        raise DamagedFile(f"{name} has {len(values):,} numbers, but its shape is {sides}")
    with np.errstate(all="raise"):
        return values.astype(CLASSES[flags[0]], copy=False).reshape(sides, order="F")
