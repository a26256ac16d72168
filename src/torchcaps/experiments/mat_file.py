"""A struct of arrays in a MATLAB file, read without trusting the file: SciPy crashes on some damaged ones."""

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from torchcaps.errors import BadInput

HEADER_BYTES = 128
MATRIX, COMPRESSED = 14, 15
STRUCT = 2
STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
"""Type of an element → how its numbers are stored."""
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""Class of a matrix → what its numbers are; MATLAB stores doubles that are whole in fewer bytes."""


def read_struct(path: Path, name: str, fields: Sequence[str]) -> list[np.ndarray]:
    """Numeric fields of a struct of one element, in MATLAB's format 5 (`save -v6` or `-v7`).

    Arguments:
        path: the file.
        name: of the struct.
        fields: their names, in the order in which they are wanted.
    Raises:
        BadInput: the file is of another format or damaged, or holds no such struct or field.
    Example:
        >>> images, labels = read_struct(Path("test.mat"), "affNISTdata", ["image", "label_int"])  # doctest: +SKIP
    """
    try:
        content = memoryview(path.read_bytes())
        if content[HEADER_BYTES - 4 : HEADER_BYTES] != b"\x00\x01IM":
            raise ValueError("not in MATLAB's format 5, little-endian")
        for kind, body in _elements(content[HEADER_BYTES:]):
            matrix = _inflated(body) if kind == COMPRESSED else body
            parts = _elements(matrix)
            flags, _, own_name = (part for _, part in islice(parts, 3))
            if bytes(own_name) != name.encode():
                continue
            if flags[0] != STRUCT:
                raise ValueError(f"{name} is no struct")
            length = int.from_bytes(next(parts)[1], "little")
            names = bytes(next(parts)[1])
            known = [names[at : at + length].split(b"\0")[0].decode() for at in range(0, len(names), length)]
            bodies = {key: part for key, (_, part) in zip(known, parts, strict=False)}
            if absent := set(fields) - bodies.keys():
                raise ValueError(f"{name} has no {', '.join(sorted(absent))}")
            return [_numbers(bodies[field]) for field in fields]
        raise ValueError(f"it holds no {name}")
    except StopIteration as error:
        raise BadInput(f"{path}: cannot be read (an element is absent); get it again") from error
    except (OSError, ValueError, LookupError, MemoryError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read ({error or type(error).__name__}); get it again") from error


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Type and content, one element after the other."""
    at = 0
    while at + 8 <= len(data):
        kind, length = struct.unpack_from("<II", data, at)
        start = at + 8
        if kind >> 16:  # of four bytes at most: length and type share a word, the content is the next
            kind, length, start = kind & 0xFFFF, kind >> 16, at + 4
        end = start + length
        if end > len(data) or (start == at + 4 and length > 4):
            raise ValueError("it ends within an element")
        yield kind, data[start:end]
        at = end if kind == COMPRESSED else at + -(-(end - at) // 8) * 8


def _inflated(body: memoryview) -> memoryview:
    """The matrix in a compressed element, and no byte beyond what it promises."""
    inflater = zlib.decompressobj()
    head = inflater.decompress(body, 8)
    kind, length = struct.unpack("<II", head.ljust(8, b"\0"))
    if kind != MATRIX or len(head) < 8:
        raise ValueError("a compressed element holds no matrix")
    content = inflater.decompress(inflater.unconsumed_tail, length) if length else b""
    if len(content) < length:
        raise ValueError("it ends within a compressed element")
    return memoryview(content)


def _numbers(body: memoryview) -> np.ndarray:
    parts = _elements(body)
    flags, shape, _ = (part for _, part in islice(parts, 3))
    kind, content = next(parts)
    if flags[0] not in CLASSES or kind not in STORED:
        raise ValueError("a field that should hold numbers does not")
    values = np.frombuffer(content, STORED[kind])
    sides = np.frombuffer(shape, "<i4").tolist()
    if min(sides, default=-1) < 0 or math.prod(sides) != len(values):
        raise ValueError(f"{len(values):,} numbers where the shape is {sides}")
    return values.astype(CLASSES[flags[0]], copy=False).reshape(sides, order="F")
