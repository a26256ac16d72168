"""CIFAR-10: 50,000 training and 10,000 test photographs in colour, 32 x 32 pixels, ten classes.

Krizhevsky, "Learning multiple layers of features from tiny images", technical report, University of Toronto, 2009.
"""

import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch

from torchcaps.data.download import download
from torchcaps.data.files import md5_of
from torchcaps.data.images import Images
from torchcaps.errors import BadInput

ARCHIVE = "cifar-10-binary.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
"""MD5 of the archive."""
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE_BYTES = 3 * 32 * 32
PARTS = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


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
    fetch_cifar10(data_dir)
    return read_cifar10(data_dir / "cifar-10" / ARCHIVE)


def fetch_cifar10(data_dir: Path, progress: bool = True) -> None:
    """Download the archive of CIFAR-10 to `data_dir/cifar-10/` if it is missing, and verify its checksum.

    Arguments:
        data_dir: data folder.
        progress: draw a progress bar on standard error.
    Raises:
        BadInput: the archive has a wrong checksum, or cannot be downloaded or written.
    """
    path = data_dir / "cifar-10" / ARCHIVE
    if not path.exists():
        download([URL], path, MD5, progress, digest=md5_of)
    ((_, problem),) = verify_cifar10(data_dir)
    if problem != "ok":
        raise BadInput(f"{path}: {problem}")


def verify_cifar10(data_dir: Path) -> list[tuple[str, str]]:
    """Check the archive of CIFAR-10 without downloading it; returns `[(file, "ok" or the problem)]`."""
    path = data_dir / "cifar-10" / ARCHIVE
    if not path.exists():
        return [(ARCHIVE, f"missing from {path.parent}")]
    seen = md5_of(path)
    return [(ARCHIVE, "ok" if seen == MD5 else f"its md5 is {seen}, not {MD5}; delete it to download it again")]


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
    try:
        with tarfile.open(archive, "r:gz") as opened:
            members = {Path(member.name).name: member for member in opened if member.isfile()}
            splits = []
            for files in PARTS.values():
                parts = []
                for file in files:
                    if file not in members:
                        raise BadInput(f"{archive}: contains no {file}; download the binary version of CIFAR-10")
                    stream = opened.extractfile(members[file])
                    assert stream is not None
                    parts.append(_rows(stream.read(10_000 * (IMAGE_BYTES + 1) + 1), f"{archive}: {file}"))
                rows = np.concatenate(parts)
                pixels = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy())
                splits.append(Images(pixels, torch.from_numpy(rows[:, 0].astype(np.int64)), CLASS_NAMES))
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise BadInput(f"{archive}: cannot be read ({error}); delete it and download it again") from error
    return splits[0], splits[1]


def _rows(content: bytes, name: str) -> np.ndarray:
    """Convert the content of a file to rows ``[N, 3073]``: the label and the 3,072 pixel values of each image."""
    if not content or len(content) % (IMAGE_BYTES + 1) or len(content) > 10_000 * (IMAGE_BYTES + 1):
        raise BadInput(
            f"{name} is damaged: it must contain 1 to 10,000 images of {IMAGE_BYTES + 1:,} bytes each, including the "
            "label; download the archive again"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, IMAGE_BYTES + 1)
    if rows[:, 0].max() >= len(CLASS_NAMES):
        raise BadInput(f"{name} has the label {rows[:, 0].max()}; labels are 0 to 9; download the archive again")
    return rows
