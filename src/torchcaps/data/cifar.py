"""CIFAR-10: 50,000 training and 10,000 test photographs, 32 x 32 colour, ten classes.

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
"""Of the archive as it is served."""
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE_BYTES = 3 * 32 * 32
PARTS = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}


def load_cifar10(data_dir: Path) -> tuple[Images, Images]:
    """CIFAR-10 as `(train, test)`, 50,000 and 10,000 photographs, from `data_dir/cifar-10/cifar-10-binary.tar.gz`.

    The archive is downloaded when absent, its checksum verified at every load, and nothing of it is unpacked to disk.

    Raises:
        BadInput: the archive is another or damaged, or cannot be downloaded.
    Example:
        >>> train, test = load_cifar10(Path("data"))  # doctest: +SKIP
    """
    fetch_cifar10(data_dir)
    ((file, problem),) = verify_cifar10(data_dir)
    if problem != "ok":
        raise BadInput(f"{data_dir / 'cifar-10' / file}: {problem}")
    return read_cifar10(data_dir / "cifar-10" / ARCHIVE)


def fetch_cifar10(data_dir: Path, progress: bool = True) -> None:
    """Download the archive to `data_dir/cifar-10/` where it is absent.

    Raises:
        BadInput: it cannot be downloaded (see `download`).
    """
    path = data_dir / "cifar-10" / ARCHIVE
    if not path.exists():
        download([URL], path, MD5, progress, digest=md5_of)


def verify_cifar10(data_dir: Path) -> list[tuple[str, str]]:
    """Check the archive without loading or downloading it: `(file, "ok" or the problem)`."""
    path = data_dir / "cifar-10" / ARCHIVE
    if not path.exists():
        return [(ARCHIVE, f"absent from {path.parent}")]
    seen = md5_of(path)
    return [
        (ARCHIVE, "ok" if seen == MD5 else f"has md5 {seen}, not {MD5}; delete it, and it will be downloaded again")
    ]


def read_cifar10(archive: Path) -> tuple[Images, Images]:
    """`(train, test)` of an archive in CIFAR-10's binary format, with no checksum known.

    Raises:
        BadInput: it is no such archive, or one of its files is damaged.
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
                        raise BadInput(f"{archive}: holds no {file}; get the binary version of CIFAR-10")
                    stream = opened.extractfile(members[file])
                    assert stream is not None
                    parts.append(_rows(stream.read(10_000 * (IMAGE_BYTES + 1) + 1), f"{archive}: {file}"))
                rows = np.concatenate(parts)
                pixels = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy())
                splits.append(Images(pixels, torch.from_numpy(rows[:, 0].astype(np.int64)), CLASS_NAMES))
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise BadInput(f"{archive}: cannot be read ({error}); delete it and get it again") from error
    return splits[0], splits[1]


def _rows(content: bytes, name: str) -> np.ndarray:
    """A label and an image a row."""
    if not content or len(content) % (IMAGE_BYTES + 1) or len(content) > 10_000 * (IMAGE_BYTES + 1):
        raise BadInput(f"{name} is not 1 to 10,000 images of {IMAGE_BYTES + 1} bytes; get the archive again")
    rows = np.frombuffer(content, np.uint8).reshape(-1, IMAGE_BYTES + 1)
    if rows[:, 0].max() >= len(CLASS_NAMES):
        raise BadInput(f"{name} has a label of {rows[:, 0].max()}; labels are 0 to 9: get the archive again")
    return rows
