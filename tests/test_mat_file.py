"""Numeric arrays in MATLAB files: valid files are read as by SciPy, and damaged files are refused."""

import struct
import tracemalloc
import zlib
from hashlib import md5

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from idx_files import damaged, refused
from torchcaps.data import mat_file
from torchcaps.data.files import CHUNK
from torchcaps.data.mat_file import read_arrays, read_struct
from torchcaps.errors import BadInput

HEADER = bytes(124) + b"\x00\x01IM"


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def array(name: str, matrix_class: int, shape: tuple[int, ...], stored: int, numbers: bytes) -> bytes:
    head = element(6, bytes([matrix_class, *[0] * 7])) + element(5, np.array(shape, "<i4").tobytes())
    return element(14, head + element(1, name.encode()) + element(stored, numbers))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float64])
def test_read_struct_returns_the_same_arrays_as_scipy(compressed, kind, tmp_path):
    values = np.random.default_rng(0).integers(0, 100, (7, 5)).astype(kind)
    struct = {"first": values, "text": "words", "cells": np.array([[1, "a"]], dtype=object), "last": values[:1]}
    savemat(tmp_path / "one.mat", {"before": values, "it": struct, "after": 1}, do_compression=compressed)
    last, first = read_struct(tmp_path / "one.mat", "it", ["last", "first"])
    expected = loadmat(tmp_path / "one.mat", simplify_cells=True)["it"]
    assert first.dtype == expected["first"].dtype
    assert (first == expected["first"]).all()
    assert (last[0] == expected["last"]).all()
    with pytest.raises(BadInput, match="it has no field middle"):
        read_struct(tmp_path / "one.mat", "it", ["middle"])
    with pytest.raises(BadInput, match="contains no struct other"):
        read_struct(tmp_path / "one.mat", "other", ["first"])
    with pytest.raises(BadInput, match="before is not a struct"):
        read_struct(tmp_path / "one.mat", "before", ["first"])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_read_arrays_returns_the_same_arrays_as_scipy(compressed, kind, tmp_path):
    path = tmp_path / "arrays.mat"
    large = np.random.default_rng(0).integers(0, 100, (2, 3, 4, 5)).astype(kind)
    limits = np.finfo(kind) if kind in ("f4", "f8") else np.iinfo(kind)
    large[1, 2, 3, :2] = limits.min, limits.max
    content = {"small": large[0, 0, :1, :1], "words": "text", "large": large, "cells": np.array([[1, "a"]], object)}
    savemat(path, content, do_compression=compressed)
    found = read_arrays(path, ["large", "small"])
    for one, name in zip(found, ("large", "small"), strict=True):
        expected = loadmat(path)[name]
        assert (one.dtype, one.shape) == (expected.dtype, expected.shape)
        assert (one == expected).all()
    with refused(str(path), "contains no array huge, tiny"):
        read_arrays(path, ["tiny", "large", "huge"])
    with refused(str(path), "words is not numeric", "delete it and download it again"):
        read_arrays(path, ["words"])


def test_a_compressed_array_of_several_chunks_is_read(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (3 * CHUNK, 1)).astype(np.uint8)
    savemat(tmp_path / "long.mat", {"values": values}, do_compression=True)
    assert (tmp_path / "long.mat").stat().st_size > 3 * CHUNK
    assert (read_arrays(tmp_path / "long.mat", ["values"])[0] == values).all()


def test_a_compressed_array_is_read_up_to_its_declared_length(tmp_path, monkeypatch):
    monkeypatch.setattr(mat_file, "CHUNK", 64)
    content = array("y", 9, (2, 2), 2, bytes([1, 2, 3, 4])) + bytes(1 << 24)
    (tmp_path / "y.mat").write_bytes(HEADER + element(15, zlib.compress(content)))
    tracemalloc.start()
    (found,) = read_arrays(tmp_path / "y.mat", ["y"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == [[1, 3], [2, 4]]
    assert peak < 1 << 20


def test_an_empty_array_is_read(tmp_path):
    savemat(tmp_path / "y.mat", {"y": np.zeros((0, 3), np.uint8)})
    (found,) = read_arrays(tmp_path / "y.mat", ["y"])
    assert (found.shape, found.dtype) == ((0, 3), np.uint8)


def test_variables_that_are_not_read_are_not_decompressed(tmp_path):
    savemat(tmp_path / "y.mat", {"big": np.zeros((1 << 24, 1), np.uint8), "y": np.arange(3)}, do_compression=True)
    tracemalloc.start()
    assert read_arrays(tmp_path / "y.mat", ["y"])[0].tolist() == [[0, 1, 2]]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_array_that_is_stored_in_a_smaller_dtype_has_the_dtype_of_its_class(tmp_path):
    path = tmp_path / "y.mat"
    path.write_bytes(HEADER + array("y", 6, (3, 2), 2, bytes([1, 2, 3, 4, 5, 10])))
    (found,) = read_arrays(path, ["y"])
    assert found.dtype == np.float64
    assert found.tolist() == [[1, 4], [2, 5], [3, 10]]
    path.write_bytes(HEADER + array("y", 9, (1, 1), 9, np.array([np.nan]).tobytes()))
    with refused(str(path), "delete it and download it again"):
        read_arrays(path, ["y"])
    path.write_bytes(HEADER + array("y", 9, (2, 2), 2, bytes(3)))
    with refused(str(path), "y has 3 numbers, but its shape is [2, 2]"):
        read_arrays(path, ["y"])


@pytest.mark.parametrize(("stored", "kind"), [(1, "i1"), (2, "u1"), (3, "<i2"), (4, "<u2"), (5, "<i4"), (6, "<u4")])
def test_floating_point_numbers_that_are_stored_as_integers_keep_their_sign(stored, kind, tmp_path):
    limits = [np.iinfo(kind).min, np.iinfo(kind).max]
    (tmp_path / "y.mat").write_bytes(HEADER + array("y", 6, (1, 2), stored, np.array(limits, kind).tobytes()))
    assert read_arrays(tmp_path / "y.mat", ["y"])[0].tolist() == [limits]


def test_a_file_with_another_checksum_is_refused(tmp_path):
    path = tmp_path / "y.mat"
    savemat(path, {"y": np.arange(3)})
    right = md5(path.read_bytes()).hexdigest()
    assert read_arrays(path, ["y"], right)[0].tolist() == [[0, 1, 2]]
    with refused(str(path), right, f"not {'0' * 32}", "delete it to download it again"):
        read_arrays(path, ["y"], "0" * 32)


def test_a_damaged_file_of_arrays_is_refused(tmp_path):
    path = tmp_path / "one.mat"
    with refused(str(path), "cannot be read", "No such file"):
        read_arrays(path, ["y"])
    whole = array("y", 9, (2, 2), 2, bytes(4))
    faults = {
        "the header is not": bytes(128) + whole,
        "no array y": HEADER,
        "ends within an element": HEADER + whole[:-8],
        "(the file ends within an element": HEADER + element(14, whole[8:40] + struct.pack("<HH5s7x", 1, 5, b"yyyyy")),
        "an element is missing": HEADER + element(14, b""),
        "(an element is missing": HEADER + element(14, element(6, b"") + whole[24:]),
        "y is not numeric": HEADER + array("y", 4, (2, 2), 2, bytes(4)),
        "(y is not numeric": HEADER + array("y", 9, (2, 2), 16, bytes(4)),
        "ends within a compressed": HEADER + element(15, zlib.compress(whole)[:-12]),
        "contains no matrix": HEADER + element(15, zlib.compress(element(9, bytes(16)))),
        "numbers, but its shape is [-2, -2]": HEADER + array("y", 9, (-2, -2), 2, bytes(4)),
    }
    for fault, content in faults.items():
        path.write_bytes(content)
        with refused(str(path), fault, "delete it and download it again"):
            read_arrays(path, ["y"])


@given(st.booleans(), st.lists(st.tuples(st.integers(0, 1_500), st.integers(0, 255)), min_size=1, max_size=6))
@example(False, [(140, 9)])
@settings(max_examples=300, deadline=None, database=None)
def test_a_file_with_random_damage_raises_bad_input_or_gives_arrays(tmp_path_factory, compressed, changes):
    path = tmp_path_factory.getbasetemp() / "damaged-arrays.mat"
    values = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    savemat(path, {"X": values, "y": np.arange(6.0)[:, None], "z": np.ones(3, np.uint8)}, do_compression=compressed)
    path.write_bytes(damaged(path.read_bytes(), changes))
    try:
        found, said = read_arrays(path, ["z", "X", "y"]), ""
    except BadInput as error:
        found, said = [], str(error)
    assert all(isinstance(one, np.ndarray) for one in found)
    assert len(found) == 3 or (str(path) in said and "\n" not in said)
