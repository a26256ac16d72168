"""Read your own images from a table: a CSV file of paths and labels, Parquet files, or a Hugging Face dataset."""

import csv
import hashlib
import os
from collections.abc import Sequence
from glob import escape
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchcaps.data.files import FULL, expanded
from torchcaps.data.image_file import Resize, file_bytes
from torchcaps.data.image_files import Paths
from torchcaps.data.image_list import ImageList, remarks_on_names, train_and_test
from torchcaps.data.images import Images
from torchcaps.errors import BadInput, first_line, printable

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hf:"
"""Prefix of the name of a dataset on the Hugging Face Hub."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Separator of the columns for each extension of a text file."""
IMAGE_COLUMNS = ("image", "img", "path", "file", "filename", "file_name")
"""If `image_column` is not given, a column with one of these names is used as the column of images."""
LABEL_COLUMNS = ("label", "labels", "class", "category")
"""If `label_column` is not given, a column with one of these names is used as the column of labels."""
MOST_COLUMNS = 20
"""An error message lists at most this many columns."""
LAST_BYTES = 2**16
"""Length of the end of a Parquet file that identifies its content."""
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""Keys are the accepted names of splits; values are "train", "validation" or "test"."""


def is_table(name: str) -> bool:
    """Return whether `name` stands for a table: a file, a folder of Parquet files, a saved dataset, or ``hf:NAME``."""
    path = expanded(name)
    if name.startswith(HUB) or os.path.isfile(path):
        return True
    saved = ("dataset_dict.json", "dataset_info.json")
    return os.path.isdir(path) and (any((path / file).is_file() for file in saved) or bool(_parquet_files(path)))


def load_image_table(
    source: str | Path,
    *,
    image_size: int | Sequence[int] | None = None,
    resize: Resize = "stretch",
    channels: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    image_column: str | None = None,
    label_column: str | None = None,
    progress: bool = True,
) -> tuple[Images, Images]:
    """Read a table of images and labels as `(train, test)`.

    The first row of a .csv file (comma-separated) or .tsv file (tab-separated) contains the column names. One column
    contains the paths of the image files, relative to the folder of the table. Another column contains the labels. An
    optional column ``split`` contains train, validation or test. Spaces around column names and labels are ignored.

    Parquet files, folders saved by ``datasets.save_to_disk``, and datasets on the Hugging Face Hub have a column with
    the encoded images and a column of labels. If the source has splits, they are used unchanged. Reading these sources
    requires the extra ``torchcaps[datasets]``.

    If there is no test split, the fraction `test_fraction` of each class is held out. Images are rotated upright by
    their EXIF orientation, transparent pixels are blended with black, and only the first frame or page is read. This
    function does not read a validation split; `load_splits` does.

    Arguments:
        source: path of a .csv, .tsv or .parquet file; path of a folder of Parquet files or of a saved dataset; or
            ``"hf:NAME"`` or ``"hf:NAME:CONFIGURATION"`` for a dataset on the Hub.
        image_size: size to which every image is resized, in pixels from 1 to 10,000: 32 for a square, or [height,
            width]. None keeps the sizes, which must then be the same for all images.
        resize: how images of another aspect ratio are resized, as for `read_image`: "stretch", "crop" or "pad".
        channels: 1 for greyscale, 3 for RGB; with None, 1 if all images are greyscale, else 3.
        seed: seed for choosing the test images if there is no test split, at least 0.
        test_fraction: fraction of each class to hold out if there is no test split, in (0, 1).
        progress: draw a progress bar on standard error if there are more than 2,000 images.
        image_column: name of the column of images. If None, `load_image_table` uses the column of type ``Image``. If
            no column has this type, it uses the column with a usual name, such as ``image`` or ``path``.
        label_column: name of the column of labels. If None, `load_image_table` uses the column of type
            ``ClassLabel``. If no column has this type, it uses the column with a usual name, such as ``label`` or
            ``class``.

    Raises:
        BadInput: the source cannot be read; the column of images or of labels is missing or ambiguous; a row has no
            image or no label; the same file is listed twice; a split has an unknown name; there are fewer than two
            classes; an image cannot be read; the images have different sizes and `image_size` is None; an argument is
            out of its range; or the images do not fit into memory.

    Warns:
        DataWarning: a split is skipped because of its name; a source other than a .csv or .tsv file has a column
            ``split``, which is not read; a file has several frames; resizing changes the aspect ratio by more than 5 %;
            16-bit images are nearly black; or two class names look the same.

    Example:
        >>> train, test = load_image_table("photos.csv", image_size=32)  # doctest: +SKIP
    """
    images = list_table(str(source), image_column, label_column)
    options: dict[str, Any] = {"image_size": image_size, "resize": resize, "channels": channels, "progress": progress}
    return train_and_test(images, test_fraction, seed, **options)


def list_table(
    name: str, image_column: str | None = None, label_column: str | None = None, least: int = 2
) -> ImageList:
    """List the images of a table with at least `least` classes. For the format of the table, see `load_image_table`."""
    path = expanded(name)
    if not name.startswith(HUB) and path.suffix.lower() in DELIMITERS:
        images = _list_text(path, image_column, label_column)
    else:
        images = _list_dataset(name, path, image_column, label_column)
    if len(images.class_names) < least:
        raise BadInput(f"{name} has only the class {images.class_names[0]}: give images of at least {least} classes")
    return images


def _list_text(path: Path, image_column: str | None, label_column: str | None) -> ImageList:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, delimiter=DELIMITERS[path.suffix.lower()], strict=True)
            columns = [column.strip() for column in reader.fieldnames or []]
            columns = ["split" if column.lower() == "split" else column for column in columns]
            reader.fieldnames = columns
            rows, numbers = [], []
            for row in reader:
                rows.append(row)
                numbers.append(reader.line_num)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): give a file that can be read") from error
    except (ValueError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read as a table ({error}): save it as UTF-8 text") from error
    if len(columns) == 1 and (marks := [mark for mark in ";,\t|" if mark in columns[0]]):
        used = DELIMITERS[path.suffix.lower()]
        if used in marks:
            raise BadInput(f"the first line of {path} is one quoted column: remove the quotes around whole lines")
        raise BadInput(f"the columns of {path} are separated by {marks[0]!r}: separate them by {used!r}")
    image_column = _column(path, "image_column", image_column, IMAGE_COLUMNS, columns)
    label_column = _column(path, "label_column", label_column, LABEL_COLUMNS, columns)
    if columns.count("split") > 1:
        raise BadInput(f"{path} has several columns named split: rename all but one")
    splits: dict[str, list[int]] = {}
    lines: dict[str, int] = {}
    files = []
    for index, (row, line) in enumerate(zip(rows, numbers, strict=True)):
        if None in row or None in row.values():
            raise BadInput(f"line {line} of {path} has another number of columns than the first line: correct the line")
        for column in (image_column, label_column):
            if not row[column].strip():
                raise BadInput(
                    f"column {printable(column)} is empty in line {line} of {path}: fill it in or remove the line"
                )
        file = path.parent / row[image_column]
        try:
            file.stat()
        except PermissionError as error:
            cure = "change the permissions of its folder"
            raise BadInput(f"{file} in line {line} of {path} cannot be read ({error.strerror}): {cure}") from error
        except (OSError, ValueError) as error:
            cure = "correct the path or remove the line"
            raise BadInput(f"{file} in line {line} of {path} does not exist: {cure}") from error
        files.append(file)
        first = lines.setdefault(os.path.abspath(file), line)
        if first != line:
            twice = f"lines {first} and {line} name the same file {printable(row[image_column])}"
            raise BadInput(f"{twice} in {path}: remove one of them")
        found = row.get("split", "train").strip().lower()
        if found not in SPLITS:
            raise BadInput(
                f"split must be train, validation or test; got {printable(found)!r} in line {line} of {path}"
            )
        splits.setdefault(SPLITS[found], []).append(index)
    labels = [row[label_column].strip() for row in rows]
    return _image_list(str(path), Paths(files), labels, None, splits)


class Rows:
    """A `Source` that reads one image per row of a Hugging Face dataset.

    Arguments:
        dataset: dataset with a column of encoded images.
        column: name of this column.
        names: name of each image for messages.
    """

    def __init__(self, dataset: "Dataset", column: str, names: Sequence[str]) -> None:
        self.dataset = dataset
        self.column = column
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def read(self, index: int) -> bytes:
        try:
            image = self.dataset[index][self.column]
        except Exception as error:  # a damaged file can raise almost any exception
            raise BadInput(f"{self.name(index)} cannot be read ({error}): replace the file") from error
        if image is None or (image["bytes"] is None and not image["path"]):
            raise BadInput(f"{self.name(index)} has no image: remove the row")
        if image["bytes"] is not None:
            return image["bytes"]
        try:
            return file_bytes(Path(image["path"]))
        except BadInput as error:
            raise BadInput(f"{self.name(index)}: {error}") from error


def _list_dataset(name: str, path: Path, image_column: str | None, label_column: str | None) -> ImageList:
    if find_spec("datasets") is None:
        raise BadInput(f"{name} needs Hugging Face datasets: pip install 'torchcaps[datasets]'")
    try:
        import datasets
    except ImportError as error:
        raise BadInput(
            f"{name} needs Hugging Face datasets, which cannot be imported ({first_line(error)}): pip install -U "
            "'torchcaps[datasets]'"
        ) from error

    found, remarks = _open_dataset(name, path), []
    splits: dict[str, list[int]] = {}
    names: list[str] = []
    parts, labels = [], []
    of_splits: dict[str, Sequence[str] | None] = {}
    for split, dataset in found.items():
        if split not in SPLITS:
            remarks.append(f"{name}: skipped the split {split}; only train, validation and test are read")
            continue
        features = dataset.features
        pictures = [key for key, kind in features.items() if isinstance(kind, datasets.Image)] or IMAGE_COLUMNS
        classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)] or LABEL_COLUMNS
        column = _column(name, "image_column", image_column, pictures, features)
        label = _column(name, "label_column", label_column, classes, features)
        kind = features[label]
        class_names = of_splits[split] = kind.names if isinstance(kind, datasets.ClassLabel) else None
        for other, names_there in of_splits.items():
            if names_there != class_names:
                lists = [", ".join(one or ["no names"]) for one in (names_there, class_names)]
                raise BadInput(
                    f"column {label} of {name} has different lists of class names in the splits {other} ({lists[0]}) "
                    f"and {split} ({lists[1]}): save all splits with the same ClassLabel"
                )
        try:
            labels += dataset[label][:]
            part = dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        except Exception as error:  # a damaged file can raise almost any exception
            raise BadInput(
                f"column {column} of {name} does not contain images, or the file is damaged ({error}): choose another"
                " with --set data.image_column=NAME, or replace the file"
            ) from error
        parts.append(part if column == "image" else part.rename_column(column, "image"))
        splits.setdefault(SPLITS[split], []).extend(range(len(names), len(names) + len(dataset)))
        names += [f"{name}, row {row} of {split}" for row in range(len(dataset))]
    if any("split" in dataset.column_names for dataset in found.values()):
        remarks.append(f"the column split of {name} is not read: save each split in its own file, such as test.parquet")
    if not splits:
        raise BadInput(
            f"{name} has no split named train, validation or test (its splits: {', '.join(found)}): rename a split"
        )
    for row, one in enumerate(labels):
        if one in (None, "") or (class_names is not None and not 0 <= one < len(class_names)):
            raise BadInput(f"{names[row]} has no label: remove the row")
        if not isinstance(one, str | int):
            raise BadInput(f"the label of {names[row]} is {one!r}: give one string or one whole number per image")
    rows = Rows(datasets.concatenate_datasets(parts), "image", names)
    images = _image_list(name, rows, labels, class_names, splits)
    images.remarks.extend(remarks)
    return images


def _open_dataset(name: str, path: Path) -> dict[str, "Dataset"]:
    """Open a saved dataset, Parquet files, or a dataset on the Hub; returns its splits by name."""
    import datasets

    found: Any
    logged, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        if name.startswith(HUB):
            owner_and_name, _, configuration = name.removeprefix(HUB).partition(":")
            found = datasets.load_dataset(owner_and_name, configuration or None)
        elif path.is_file():
            found = datasets.load_dataset("parquet", _state_of([path]), data_files=escape(str(path)))
        elif files := _parquet_files(path):
            by_split: dict[str, list[str]] = {}
            for file in files:
                by_split.setdefault(file.stem.partition("-")[0], []).append(escape(str(file)))
            found = datasets.load_dataset("parquet", _state_of(files), data_files=by_split)
        else:
            found = datasets.load_from_disk(str(path))
            for dataset in [found] if isinstance(found, datasets.Dataset) else found.values():
                dataset.data.table.validate(full=True)  # reading a damaged Arrow file can crash the process
    except Exception as error:  # the library and the Hub raise many kinds of errors
        reason = error.__cause__ or error  # the error of `datasets` itself may say only that an error occurred
        full = isinstance(reason, OSError) and reason.errno in FULL
        cure = "free disk space, or set HF_HOME to another folder" if full else "check the name or the files"
        raise BadInput(f"{name} cannot be opened as a dataset ({reason}): {cure}") from error
    finally:
        datasets.logging.set_verbosity(logged)
        if not bars:
            datasets.enable_progress_bars()
    splits = {"train": found} if isinstance(found, datasets.Dataset) else found
    return {split: dataset.with_format(None) for split, dataset in splits.items()}


def _state_of(files: Sequence[Path]) -> str:
    """Return a name for the content of Parquet files, made from their sizes and their last bytes.

    The library `datasets` caches a file by its path and modification time, which stay the same if a file is replaced by
    an archive tool. It also caches by the given name. The last bytes contain the positions of all columns.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - LAST_BYTES))
            digest.update(f"{size} ".encode() + stream.read())
    return f"content-{digest.hexdigest()}"


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))


def _column(
    name: str | Path, option: str, given: str | None, usual: Sequence[str], columns: Sequence[str] | Any
) -> str:
    """Return `given` if it is the name of a column. If it is None, return the only column whose name is in `usual`."""
    known = ", ".join(printable(column) for column in islice(columns, MOST_COLUMNS)) or "none"
    known += f" and {len(columns) - MOST_COLUMNS:,} more" if len(columns) > MOST_COLUMNS else ""
    if given is not None:
        if given not in columns:
            raise BadInput(
                f"{name} has no column {given}: rename a column to {given}, or choose {option} from its columns:"
                f" {known}"
            )
        if [*columns].count(given) > 1:
            raise BadInput(f"{name} has several columns named {printable(given)}: rename all but one")
        return given
    fitting = [column for column in columns if column in usual]
    if len(fitting) != 1:
        raise BadInput(
            f"the {option.replace('_', ' ')} of {name} is unknown: rename one column to {usual[0]}, or train with"
            f" --set data.{option}=NAME (published weights do not keep this setting); columns of the table: {known}"
        )
    return fitting[0]


def _image_list(
    name: str, source: Any, labels: Sequence[Any], class_names: Sequence[str] | None, splits: dict[str, list[int]]
) -> ImageList:
    if not labels:
        raise BadInput(f"{name} has no images: add rows")
    if class_names is None:
        if len({type(label) for label in labels}) > 1:
            raise BadInput(
                f"{name} has labels that are text and labels that are numbers: write all labels the same way"
            )
        known = sorted(set(labels))
        class_names, labels = [str(label) for label in known], np.searchsorted(known, labels).tolist()
    rows = {split: torch.tensor(indices, device="cpu") for split, indices in splits.items()}
    remarks = [*remarks_on_names(name, class_names, "write both the same way")]
    return ImageList(name, source, torch.tensor(labels, device="cpu"), tuple(class_names), rows, remarks)
