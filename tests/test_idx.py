"""The IDX format of MNIST's files."""

import gzip
import struct
from hashlib import md5

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import examples
from idx_files import idx, refused
from torchcaps.data import parse_idx, read_idx, uncompressed_md5
from torchcaps.errors import BadInput


@pytest.mark.parametrize("array", [np.arange(7), np.arange(2 * 3 * 5).reshape(2, 3, 5)])
def test_idx_files_are_read_raw_and_gzipped_whatever_their_name(array, tmp_path):
    content = idx(array)
    assert np.array_equal(parse_idx(content, "x"), array)
    for name, stored in (("raw.gz", content), ("zipped", gzip.compress(content))):
        (tmp_path / name).write_bytes(stored)
        found = read_idx(tmp_path / name)
        assert found.dtype == np.uint8
        assert found.flags.writeable
        assert np.array_equal(found, array)
        assert uncompressed_md5(tmp_path / name) == md5(content).hexdigest()


def test_content_that_is_not_an_idx_file_is_refused():
    good = idx(np.arange(6).reshape(1, 2, 3))
    for content, part in (
        (b"", "not an IDX file"),
        (b"\0\0\x08", "not an IDX file"),
        (b"\0\0\x0d\x03" + good[4:], "0x00000d03"),
        (b"<html><body>not found", "0x3c68746d"),
        (good[:9], "within its header"),
        (good[:-1], "21 bytes"),
        (good + b"\0", "more"),
        (struct.pack(">4I", 0x803, *3 * [2**32 - 1]), "4294967295×4294967295"),
        (struct.pack(">4I", 0x803, 0, 2**32 - 1, 2**32 - 1), "0×4294967295"),
    ):
        with refused("file-name", part):
            parse_idx(content, "file-name")


def test_read_idx_refuses_damaged_files(tmp_path):
    path = tmp_path / "labels.gz"
    zipped = gzip.compress(idx(np.arange(200)))
    corrupt = bytearray(zipped)
    corrupt[-8] ^= 1  # changes the checksum of gzip; no byte is missing
    for stored in (zipped[:-1], zipped[:20], zipped[:2], bytes(corrupt), zipped + b"rubbish"):
        path.write_bytes(stored)
        with refused(str(path), "download it again"):
            read_idx(path)
        with refused(str(path)):
            uncompressed_md5(path)
    with refused("absent.gz"):
        read_idx(tmp_path / "absent.gz")
    with refused(str(tmp_path)):
        read_idx(tmp_path)


def test_read_idx_does_not_read_more_bytes_than_the_header_declares(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(idx(np.arange(10)) + bytes(50_000_000), compresslevel=1))
    read = []
    genuine = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: read.append(size) or genuine(self, size))
    with refused("bomb.gz", "has more"):
        read_idx(bomb)
    assert 0 < sum(read) < 3_000_000


SMALL = [idx(np.arange(5)), idx(np.arange(12).reshape(3, 2, 2))]
SEEDS = SMALL + [gzip.compress(content, mtime=0) for content in SMALL]


def mutate(content: bytes, kind: int, place: int, value: int) -> bytes:
    kind = ["set", "flip", "cut", "drop", "extend", "repeat"][kind % 6]
    place = place % (len(content) + 1)
    before, after = content[:place], content[place:]
    if kind == "set":
        return before + bytes([value]) + after[1:]
    if kind == "flip":
        return before + bytes(byte ^ 1 << value % 8 for byte in after[:1]) + after[1:]
    if kind == "cut":
        return before
    if kind == "drop":
        return before + after[1 + value % 8 :]
    if kind == "extend":
        return content + bytes([value]) * place
    return before + content + after


@given(st.binary(min_size=4, max_size=10))
@settings(max_examples=examples(3_000, search=10_000), deadline=None, database=None)
def test_a_damaged_idx_file_raises_bad_input_or_gives_an_array(tmp_path_factory, chosen):
    path = tmp_path_factory.getbasetemp() / "damaged"
    content = SEEDS[chosen[0] % 4]
    for i in range(1, len(chosen) - 2, 3):
        content = mutate(content, *chosen[i : i + 3])
    path.write_bytes(content)
    for read in (lambda: read_idx(path), lambda: parse_idx(content, "damaged")):
        try:
            found = read()
        except BadInput as error:
            found = str(error)
        if isinstance(found, str):
            assert "damaged" in found
            assert "\n" not in found
        else:
            assert found.dtype == np.uint8
            assert found.ndim in (1, 3)
            assert found.size > 0
