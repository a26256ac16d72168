"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test photographs in colour, 32×32 pixels, 10 or 100 classes.

Krizhevsky, "Learning multiple layers of features from tiny images", technical report, University of Toronto, 2009.
"""

import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from torchcaps.data.download import RemoteFiles
from torchcaps.data.images import Images
from torchcaps.errors import BadInput

SERVER = "https://www.cs.toronto.edu/~kriz/"
PIXEL_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class Version:
    """A version of CIFAR in the binary format.

    Arguments:
        name: name of the dataset and of its folder.
        md5: MD5 of the archive.
        train, test: names of the files of each split in the archive.
        label_bytes: number of labels in front of the pixels of each image, one byte each. The last label is the class.
        most_images: largest number of images in a file.
        classes: number of classes.
        class_names: names of the classes, or the name of the file in the archive that has one name per line.
    """

    name: str
    md5: str
    train: Sequence[str]
    test: Sequence[str]
    label_bytes: int
    most_images: int
    classes: int
    class_names: tuple[str, ...] | str

    @property
    def archive(self) -> str:
        """Name of the archive."""
        return f"{self.name}-binary.tar.gz"

    @cached_property
    def files(self) -> RemoteFiles:
        """The archive, as a file that can be downloaded."""
        return RemoteFiles(self.name, [SERVER], {self.archive: self.md5}, stored=True)

    def load(self, data_dir: Path) -> tuple[Images, Images]:
        """Download the archive if it is missing, otherwise verify its checksum, and read it as `(train, test)`."""
        self.files.fetch(data_dir)
        return _read(data_dir / self.name / self.archive, self)


CIFAR10 = Version(
    name="cifar-10",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    train=[f"data_batch_{number}.bin" for number in range(1, 6)],
    test=["test_batch.bin"],
    label_bytes=1,
    most_images=10_000,
    classes=10,
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
CIFAR100 = Version(
    name="cifar-100",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    train=["train.bin"],
    test=["test.bin"],
    label_bytes=2,
    most_images=50_000,
    classes=100,
    class_names="fine_label_names.txt",
)


def load_cifar10(data_dir: Path) -> tuple[Images, Images]:
    """Load CIFAR-10 as `(train, test)`: 50,000 and 10,000 photographs, uint8 `[N, 3, 32, 32]`, ten classes.

    The archive is downloaded if it is missing. Its checksum is verified on every load. The images are read from the
    archive; no files are unpacked to disk.

    Arguments:
        data_dir: data folder; the archive is `data_dir/cifar-10/cifar-10-binary.tar.gz`.

    Raises:
        BadInput: the archive has a wrong checksum, cannot be read, or cannot be downloaded.

    Example:
        >>> train, test = load_cifar10(Path("data"))  # doctest: +SKIP
    """
    return CIFAR10.load(data_dir)


def load_cifar100(data_dir: Path) -> tuple[Images, Images]:
    """Load CIFAR-100 as `(train, test)`: 50,000 and 10,000 photographs, uint8 `[N, 3, 32, 32]`, a hundred classes.

    The classes are the fine labels. The archive is downloaded if it is missing. Its checksum is verified on every load.
    The images are read from the archive; no files are unpacked to disk.

    Arguments:
        data_dir: data folder; the archive is `data_dir/cifar-100/cifar-100-binary.tar.gz`.

    Raises:
        BadInput: the archive has a wrong checksum, cannot be read, or cannot be downloaded.

    Example:
        >>> train, test = load_cifar100(Path("data"))  # doctest: +SKIP
    """
    return CIFAR100.load(data_dir)


def read_cifar10(archive: Path) -> tuple[Images, Images]:
    """Read an archive in the binary format of CIFAR-10 as `(train, test)`, without verifying a checksum.

    Arguments:
        archive: path of the tar.gz file, with `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.

    Raises:
        BadInput: the archive cannot be read; one of the six files is missing; a file does not consist of 1 to 10,000
            images; or a label is above 9.

    Example:
        >>> train, test = read_cifar10(Path("cifar-10-binary.tar.gz"))  # doctest: +SKIP
    """
    return _read(archive, CIFAR10)


def read_cifar100(archive: Path) -> tuple[Images, Images]:
    """Read an archive in the binary format of CIFAR-100 as `(train, test)`, without verifying a checksum.

    Arguments:
        archive: path of the tar.gz file, with `train.bin`, `test.bin` and `fine_label_names.txt`.

    Raises:
        BadInput: the archive cannot be read; one of the three files is missing; `train.bin` or `test.bin` does not
            consist of 1 to 50,000 images; a fine label is above 99; or `fine_label_names.txt` does not contain 100
            different names.

    Example:
        >>> train, test = read_cifar100(Path("cifar-100-binary.tar.gz"))  # doctest: +SKIP
    """
    return _read(archive, CIFAR100)


def _read(archive: Path, version: Version) -> tuple[Images, Images]:
    too_many = (version.most_images + 1) * (version.label_bytes + PIXEL_BYTES)
    try:
        with tarfile.open(archive, "r:gz") as opened:
            members = {Path(member.name).name: member for member in opened if member.isfile()}

            def content(file: str) -> bytes:
                if file not in members:
                    title = version.name.upper()
                    raise BadInput(f"{archive} contains no {file}: download the binary version of {title}")
                stream = opened.extractfile(members[file])
                assert stream is not None
                return stream.read(too_many)

            names = version.class_names
            if isinstance(names, str):
                names = _class_names(content(names), version.classes, f"{archive}: {names}")
            splits = []
            for files in (version.train, version.test):
                rows = [_rows(content(file), version, f"{archive}: {file}") for file in files]
                pixels = np.concatenate([part[:, version.label_bytes :] for part in rows]).reshape(-1, 3, 32, 32)
                labels = np.concatenate([part[:, version.label_bytes - 1] for part in rows]).astype(np.int64)
                splits.append(Images(torch.from_numpy(pixels), torch.from_numpy(labels), names))
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise BadInput(f"{archive} cannot be read ({error}): delete it and download it again") from error
    return splits[0], splits[1]


def _class_names(content: bytes, count: int, file: str) -> tuple[str, ...]:
    names = tuple(line.strip() for line in content.decode(errors="replace").strip().splitlines())
    if len(names) != count or len({*names} - {""}) != count:
        raise BadInput(f"{file} does not contain {count} different names, one per line: download the archive again")
    return names


def _rows(content: bytes, version: Version, file: str) -> np.ndarray:
    """Convert the content of a file to rows ``[N, label_bytes + 3072]``: the labels and pixels of each image."""
    length, most = version.label_bytes + PIXEL_BYTES, version.most_images
    if not content or len(content) % length or len(content) > most * length:
        raise BadInput(
            f"{file} must contain from 1 to {most:,} images of {length:,} bytes each, including the "
            f"{'label' if version.label_bytes == 1 else 'labels'}; got {len(content):,} bytes: download the archive "
            "again"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, length)
    largest = rows[:, version.label_bytes - 1].max()
    if largest >= version.classes:
        raise BadInput(
            f"labels in {file} must be from 0 to {version.classes - 1}; got {largest}: download the archive again"
        )
    return rows
