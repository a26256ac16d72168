"""IDX files for tests, and a check for errors of one line."""

import struct
from contextlib import contextmanager

import numpy as np
import pytest

from torchcaps.errors import BadInput


@contextmanager
def refused(*parts: str):
    """Check that the block raises `BadInput` in one line that contains all `parts`."""
    with pytest.raises(BadInput) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{array.ndim + 1}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def damaged(content: bytes, changes: list[tuple[int, int]]) -> bytes:
    """Change bytes of a MATLAB file, and cut it off at some of the places, then append zeros."""
    found = bytearray(content)
    for place, value in changes:
        if place < 280 or len(changes) < 3:
            found[place % len(found)] = value
        else:
            del found[place % len(found) :]
        found += bytes(1)
    return bytes(found)
