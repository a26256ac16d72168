"""SVHN: its MATLAB files are read as images, and wrong files are refused."""

from hashlib import md5

import numpy as np
import pytest
from scipy.io import savemat

from idx_files import refused
from torchcaps.data import DATASETS, load_splits, read_svhn, svhn
from torchcaps.errors import BadInput

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4)).astype(np.uint8)
DIGITS = np.array([[10], [1], [9], [10]])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", [np.uint8, np.float64])
def test_every_pixel_and_label_has_its_place(compressed, kind, tmp_path):
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": PIXELS, "y": DIGITS.astype(kind)}, do_compression=compressed)
    images = read_svhn(path)
    assert images.pixels.shape == (4, 3, 32, 32)
    assert images.pixels.is_contiguous()
    assert all(
        images.pixels[n, colour, row, column] == PIXELS[row, column, colour, n]
        for n, colour, row, column in [(0, 0, 0, 1), (0, 0, 1, 0), (1, 2, 30, 7), (3, 1, 5, 31)]
    )
    assert (images.pixels.numpy() == np.moveaxis(PIXELS, (3, 2), (0, 1))).all()
    assert images.labels.tolist() == [0, 1, 9, 0]
    assert images.class_names == tuple("0123456789")


def test_the_dataset_is_loaded_from_files_with_the_right_checksums(tmp_path, monkeypatch):
    for file, digits in (("train_32x32.mat", DIGITS), ("test_32x32.mat", DIGITS[:1])):
        path = tmp_path / "svhn" / file
        path.parent.mkdir(exist_ok=True)
        savemat(path, {"X": PIXELS[..., : len(digits)], "y": digits.astype(np.uint8)})
    wrong = md5(path.read_bytes()).hexdigest()
    dataset = DATASETS["svhn"]
    assert [file for file, problem in dataset.verify(tmp_path) if "md5" in problem] == [*svhn.MD5]
    for use in (lambda: load_splits("svhn", tmp_path), lambda: dataset.fetch(tmp_path)):
        with refused(str(tmp_path / "svhn" / "train_32x32.mat"), svhn.MD5["train_32x32.mat"], "delete it"):
            use()
    for file in svhn.MD5:
        monkeypatch.setitem(svhn.MD5, file, md5((tmp_path / "svhn" / file).read_bytes()).hexdigest())
    dataset.fetch(tmp_path)
    assert dataset.verify(tmp_path) == [("train_32x32.mat", "ok"), ("test_32x32.mat", "ok")]
    train, test = dataset.load(tmp_path)
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 9, 0], [0])
    path.write_bytes(path.read_bytes()[:-1])
    with refused(str(path), f"not {wrong}", "delete it"):
        dataset.load(tmp_path)
    path.rename(path.with_name("test_32x32.mat.gz"))
    assert dict(dataset.verify(tmp_path)) == {
        "train_32x32.mat": "ok",
        "test_32x32.mat": f"missing from {tmp_path / 'svhn'}",
    }


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"X": PIXELS}, "contains no array y"),
        ({"y": DIGITS}, "contains no array X"),
        ({"X": PIXELS.astype(np.int16)}, "uint8 [32, 32, 3, N]; got an int16 array [32, 32, 3, 4]"),
        ({"X": PIXELS[:, :31]}, "uint8 [32, 32, 3, N]; got a uint8 array [32, 31, 3, 4]"),
        ({"X": PIXELS[..., 0], "y": DIGITS[:1].astype(float)}, "uint8 [32, 32, 3, N]; got a uint8 array [32, 32, 3]"),
        ({"y": DIGITS.astype(np.int16)}, "uint8 or float64 [N, 1]; got an int16 array [4, 1]"),
        ({"y": DIGITS.T.astype(float)}, "uint8 or float64 [N, 1]; got a float64 array [1, 4]"),
        ({"y": np.ones((4, 1, 2))}, "uint8 or float64 [N, 1]; got a float64 array [4, 1, 2]"),
        ({"y": DIGITS[:3].astype(float)}, "has 4 images but 3 labels"),
        ({"y": (DIGITS % 10).astype(np.uint8)}, "must be from 1 to 10; got 0"),
        ({"y": (DIGITS + 1).astype(np.uint8)}, "must be from 1 to 10; got 11"),
        ({"y": DIGITS - 0.5}, "got 9.5"),
        ({"y": DIGITS * np.nan}, "got nan"),
    ],
)
def test_a_file_with_wrong_arrays_is_refused(content, fault, tmp_path):
    path = tmp_path / "test_32x32.mat"
    right = {} if "contains no" in fault else {"X": PIXELS, "y": DIGITS.astype(np.uint8)}
    savemat(path, {**right, **content})
    with refused(str(path), fault, "download it again"):
        read_svhn(path)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "test_32x32.mat"
    with refused(str(path), "cannot be read"):
        read_svhn(path)
    savemat(path, {"X": PIXELS, "y": DIGITS.astype(np.uint8)}, do_compression=True)
    whole = path.read_bytes()
    for content in (b"", whole[:5_000], whole[:200] + bytes(100) + whole[300:], b"<html>" * 1_000):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="delete it and download it again"):
            read_svhn(path)
