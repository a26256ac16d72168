"""MNIST and Fashion-MNIST: 60,000 training and 10,000 test images, 28×28 greyscale, ten classes.

MNIST: LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", Proc. IEEE 86, 1998.
Fashion-MNIST: Xiao, Rasul, Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms", arXiv:1708.07747, 2017.
"""

from pathlib import Path

import numpy as np
import torch

from torchcaps.data.download import RemoteFiles
from torchcaps.data.idx import read_idx
from torchcaps.data.images import Images
from torchcaps.errors import BadInput

FILES = {
    "mnist": RemoteFiles(
        folder="mnist",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        md5={
            "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
            "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
            "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
            "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
        },
    ),
    "fashion-mnist": RemoteFiles(
        folder="fashion-mnist",
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        md5={
            "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
            "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
            "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
        },
    ),
}
"""Files of each dataset, keyed by the name of the dataset."""
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def load_mnist(data_dir: Path) -> tuple[Images, Images]:
    """Load MNIST as `(train, test)`: 60,000 and 10,000 digits, uint8 `[N, 1, 28, 28]`, ten classes.

    Missing files are downloaded, and the checksums are verified on every load.

    Arguments:
        data_dir: data folder; the four IDX files, raw or gzipped, are in `data_dir/mnist/`.

    Raises:
        BadInput: a file has a wrong checksum, cannot be read, or cannot be downloaded.

    Example:
        >>> train, test = load_mnist(Path("data"))  # doctest: +SKIP
    """
    return _load(FILES["mnist"], data_dir, tuple("0123456789"))


def load_fashion_mnist(data_dir: Path) -> tuple[Images, Images]:
    """Load Fashion-MNIST as `(train, test)`: 60,000 and 10,000 pictures, uint8 `[N, 1, 28, 28]`, ten classes.

    Missing files are downloaded, and the checksums are verified on every load.

    Arguments:
        data_dir: data folder; the four IDX files, raw or gzipped, are in `data_dir/fashion-mnist/`.

    Raises:
        BadInput: a file has a wrong checksum, cannot be read, or cannot be downloaded.

    Example:
        >>> train, test = load_fashion_mnist(Path("data"))  # doctest: +SKIP
    """
    return _load(FILES["fashion-mnist"], data_dir, CLOTHES)


def load_idx_pair(images: Path, labels: Path, class_names: tuple[str, ...]) -> Images:
    """Load one split from a file of images and a file of labels in the IDX format, without verifying a checksum.

    Arguments:
        images: IDX file of images `[N, H, W]`, raw or gzipped.
        labels: IDX file of labels `[N]`, raw or gzipped.
        class_names: names of the classes, in the order of the labels.

    Raises:
        BadInput: a file cannot be read or is damaged; the two files are swapped; the numbers of images and labels
            differ; or a label is not an index of `class_names`.

    Example:
        >>> letters = load_idx_pair(Path("letters-images"), Path("letters-labels"), tuple("abc"))  # doctest: +SKIP
    """
    return _pair((images, read_idx(images)), (labels, read_idx(labels)), class_names)


def _load(files: RemoteFiles, data_dir: Path, class_names: tuple[str, ...]) -> tuple[Images, Images]:
    def read(file: str) -> tuple[Path, np.ndarray]:
        path = files.path(data_dir, file)
        return path, read_idx(path, files.md5[file])

    def split(prefix: str) -> Images:
        return _pair(read(f"{prefix}-images-idx3-ubyte"), read(f"{prefix}-labels-idx1-ubyte"), class_names)

    return split("train"), split("t10k")


def _pair(one: tuple[Path, np.ndarray], other: tuple[Path, np.ndarray], class_names: tuple[str, ...]) -> Images:
    (images, pixels), (labels, classes) = one, other
    if pixels.ndim != 3 or classes.ndim != 1:
        raise BadInput(
            f"{images} has {pixels.ndim} dimensions (images have 3) and {labels} has {classes.ndim}"
            " (labels have 1): check whether the two files are swapped"
        )
    if len(pixels) != len(classes):
        raise BadInput(f"{images} has {len(pixels)} images but {labels} has {len(classes)} labels: download both again")
    try:
        return Images(torch.from_numpy(pixels)[:, None], torch.from_numpy(classes).long(), class_names)
    except BadInput as error:
        raise BadInput(f"{labels}: {error}") from error
