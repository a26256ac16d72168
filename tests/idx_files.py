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
