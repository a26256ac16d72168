"""SVHN, cropped: 73,257 training and 26,032 test photographs of house-number digits in colour, 32×32 pixels.

Netzer, Wang, Coates, Bissacco, Wu, Ng, "Reading digits in natural images with unsupervised feature learning", NIPS
workshop, 2011. Format 2 on the website of the dataset: each file contains an image array `X` and a label array `y`.
"""

from pathlib import Path

import numpy as np
import torch

from torchcaps.checks import described
from torchcaps.data.download import RemoteFiles
from torchcaps.data.images import Images
from torchcaps.data.mat_file import read_arrays
from torchcaps.errors import BadInput

MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
FILES = RemoteFiles("svhn", ["http://ufldl.stanford.edu/housenumbers/"], MD5, stored=True)


def load_svhn(data_dir: Path) -> tuple[Images, Images]:
    """Load SVHN as `(train, test)`: 73,257 and 26,032 digits, uint8 `[N, 3, 32, 32]`, ten classes.

    Missing files are downloaded, and the checksums are verified on every load. The extra training images are not used.

    Arguments:
        data_dir: data folder; the two MATLAB files are in `data_dir/svhn/`.

    Raises:
        BadInput: a file has a wrong checksum, cannot be read, or cannot be downloaded.

    Example:
        >>> train, test = load_svhn(Path("data"))  # doctest: +SKIP
    """
    train, test = (read_svhn(FILES.path(data_dir, file), md5) for file, md5 in MD5.items())
    return train, test


def read_svhn(path: Path, md5: str | None = None) -> Images:
    """Read one split from a MATLAB file with the cropped digits of SVHN.

    Arguments:
        path: file with images `X`, uint8 `[32, 32, 3, N]` (row, column, colour, image), and labels `y`, `[N, 1]`. The
            label of the digit 0 is 10.
        md5: the right MD5 of the file; None if it is not known.

    Raises:
        BadInput: the file has another MD5 or cannot be read; an array is missing or has a wrong dtype or shape; the
            numbers of images and labels differ; or a label is not a whole number from 1 to 10.

    Example:
        >>> test = read_svhn(Path("test_32x32.mat"))  # doctest: +SKIP
    """
    pixels, digits = read_arrays(path, ["X", "y"], md5)
    cure = "delete the file and download it again"
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise BadInput(f"X in {path} must be uint8 [32, 32, 3, N]; got {described(pixels)}: {cure}")
    if digits.dtype not in (np.uint8, np.float64) or digits.ndim != 2 or digits.shape[1] != 1:
        raise BadInput(f"y in {path} must be uint8 or float64 [N, 1]; got {described(digits)}: {cure}")
    if len(digits) != pixels.shape[3]:
        raise BadInput(f"{path} has {pixels.shape[3]:,} images but {len(digits):,} labels: {cure}")
    wrong = digits[~np.isin(digits, range(1, 11))]
    if len(wrong):
        raise BadInput(f"labels in {path} must be from 1 to 10; got {wrong[0]:g}: {cure}")
    images = torch.from_numpy(pixels.transpose(3, 2, 0, 1).copy(order="C"))
    return Images(images, torch.from_numpy(digits[:, 0].astype(np.int64) % 10), tuple("0123456789"))
