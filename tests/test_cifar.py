"""CIFAR-10 and CIFAR-100: their archives are read as images, and wrong archives are refused."""

import tarfile
from hashlib import md5
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from idx_files import refused
from torchcaps.data import DATASETS, cifar, load_splits, read_cifar10, read_cifar100

NAMES = [f"class_{number}" for number in range(100)]


def write(path: Path, files: dict[str, np.ndarray | bytes], cut: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for file, content in files.items():
            content = content if isinstance(content, bytes) else content.tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{file}")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    path.write_bytes(path.read_bytes()[: -cut or None])


@pytest.fixture
def ten():
    """The rows of twelve images, and the six files of CIFAR-10 that contain them."""
    rows = np.random.default_rng(0).integers(0, 256, (12, 3073)).astype(np.uint8)
    rows[:, 0] = np.arange(12) % 10
    files = {f"data_batch_{number + 1}.bin": rows[2 * number : 2 * number + 2] for number in range(5)}
    return rows, {**files, "test_batch.bin": rows[10:]}


@pytest.fixture
def hundred():
    """The rows of five images, and the three files of CIFAR-100 that contain them and the names."""
    rows = np.random.default_rng(0).integers(0, 256, (5, 3074)).astype(np.uint8)
    rows[:, :2] = [[19, 0], [0, 99], [7, 41], [3, 2], [4, 98]]
    return rows, {"train.bin": rows[:3], "test.bin": rows[3:], "fine_label_names.txt": "\n".join(NAMES).encode()}


def test_cifar10_is_read_from_its_archive(ten, tmp_path):
    rows, files = ten
    path = tmp_path / "cifar-10" / "cifar-10-binary.tar.gz"
    with refused(str(path), "cannot be read"):
        read_cifar10(path)
    write(path, files)
    train, test = read_cifar10(path)
    assert train.labels.tolist() + test.labels.tolist() == rows[:, 0].tolist()
    assert train.image_shape == (3, 32, 32)
    assert (train.pixels[3, 2, 5, 7].item(), test.pixels[1, 0, 31, 0].item()) == (
        rows[3, 1 + 2 * 1024 + 5 * 32 + 7],
        rows[11, 1 + 31 * 32],
    )
    write(path, files, cut=4_000)
    with refused(str(path), "download it again"):
        read_cifar10(path)
    write(path, {**files, "test_batch.bin": rows[10:].flatten()[:-1]})
    with refused(str(path), "test_batch.bin", "1 to 10,000 images of 3,073 bytes each, including the label;"):
        read_cifar10(path)
    write(path, {**files, "data_batch_3.bin": np.full((1, 3073), 10, np.uint8)})
    with refused(str(path), "data_batch_3.bin", "must be from 0 to 9; got 10"):
        read_cifar10(path)
    del files["data_batch_4.bin"]
    write(path, files)
    with refused(str(path), "no data_batch_4.bin", "the binary version of CIFAR-10"):
        read_cifar10(path)


def test_cifar100_is_read_from_its_archive(hundred, tmp_path):
    rows, files = hundred
    path = tmp_path / "cifar-100-binary.tar.gz"
    write(path, files)
    train, test = read_cifar100(path)
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 99, 41], [2, 98])
    assert train.class_names == test.class_names == tuple(NAMES)
    assert train.image_shape == (3, 32, 32)
    assert (train.pixels[1, 2, 5, 7].item(), test.pixels[1, 0, 31, 0].item()) == (
        rows[1, 2 + 2 * 1024 + 5 * 32 + 7],
        rows[4, 2 + 31 * 32],
    )
    write(path, {**files, "fine_label_names.txt": "\r\n".join([*NAMES, "", ""]).encode()})
    assert read_cifar100(path)[1].class_names == tuple(NAMES)


def test_a_wrong_archive_of_cifar100_is_refused(hundred, tmp_path, monkeypatch):
    rows, files = hundred
    path = tmp_path / "cifar-100-binary.tar.gz"
    with refused(str(path), "cannot be read"):
        read_cifar100(path)
    for changes, *parts in (
        (
            {"train.bin": rows.flatten()[:-1]},
            "train.bin",
            "1 to 50,000 images of 3,074 bytes each, including the labels;",
        ),
        ({"test.bin": b""}, "test.bin must contain from 1"),
        ({"test.bin": bytes([0, 100, *rows[0, 2:]])}, "test.bin", "must be from 0 to 99; got 100"),
    ):
        write(path, {**files, **changes})
        with refused(str(path), "download the archive again", *parts):
            read_cifar100(path)
    with monkeypatch.context() as patched:
        patched.setitem(vars(cifar.CIFAR100), "most_images", 2)
        write(path, files)
        with refused(str(path), "train.bin", "1 to 2 images"):
            read_cifar100(path)
    for file in files:
        write(path, {name: content for name, content in files.items() if name != file})
        with refused(str(path), f"contains no {file}", "the binary version of CIFAR-100"):
            read_cifar100(path)


@pytest.mark.parametrize(
    "names",
    [NAMES[1:], [*NAMES, "more"], [NAMES[1], *NAMES[1:]], [*NAMES[:5], " ", *NAMES[6:]], [*NAMES[:5], "", *NAMES[5:]]],
)
def test_class_names_that_are_not_a_hundred_different_names_are_refused(names, hundred, tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    write(path, {**hundred[1], "fine_label_names.txt": "\n".join(names).encode()})
    with refused(f"{path}: fine_label_names.txt does not contain 100 different names", "download the archive again"):
        read_cifar100(path)


@pytest.mark.parametrize("version", [cifar.CIFAR10, cifar.CIFAR100])
def test_an_archive_with_a_wrong_checksum_is_refused(version, ten, hundred, tmp_path, monkeypatch):
    dataset, path = DATASETS[version.name], tmp_path / version.name / f"{version.name}-binary.tar.gz"
    assert dataset.verify(tmp_path) == [(f"{version.name}-binary.tar.gz", f"missing from {tmp_path / version.name}")]
    write(path, {**ten[1], **hundred[1]})
    seen = md5(path.read_bytes()).hexdigest()
    problem = f"its md5 is {seen}, not {version.md5}: delete it to download it again"
    assert dataset.verify(tmp_path) == [(path.name, problem)]
    for use in (lambda: load_splits(version.name, tmp_path), lambda: dataset.fetch(tmp_path)):
        with refused(f"{path}: {problem}"):
            use()
    monkeypatch.setitem(version.files.md5, path.name, seen)
    dataset.fetch(tmp_path)
    assert dataset.verify(tmp_path) == [(path.name, "ok")]
    train, test = dataset.load(tmp_path)
    assert (len(train), len(test)) == {"cifar-10": (10, 2), "cifar-100": (3, 2)}[version.name]
