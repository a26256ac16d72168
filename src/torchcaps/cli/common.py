"""Options and helper functions that several commands use."""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchcaps.errors import BadInput, printable

if TYPE_CHECKING:
    from torchcaps.classifier import Classifier
    from torchcaps.data import Splits
    from torchcaps.recipe import Recipe

DataDir = Annotated[Path, typer.Option("--data-dir", help="Folder that contains the datasets.")]
Cache = Annotated[
    str,
    typer.Option(
        help="How your own images are loaded. memory: decoded once and kept in memory; none: decoded again in every "
        "epoch; auto: memory if enough of it is free, otherwise none."
    ),
]


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str = "") -> None:
    """Print a table. Markup in cells is not interpreted, and characters that cannot be printed are escaped."""
    table = Table(*columns, title=Text(printable(title)) if title else None)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    console = Console()
    Console(width=console.width if console.is_terminal else 140).print(table)


def print_version(asked: bool | None) -> bool:
    """Print the version of torchcaps and exit, if `--version` was given."""
    if asked:
        import torchcaps

        print(f"torchcaps {torchcaps.__version__}")
        raise typer.Exit
    return False


def run_folder(text: str) -> Path:
    """Parse the path of a run folder. An empty path, most likely an unset shell variable, is rejected."""
    if not text.strip():
        raise typer.BadParameter("the name of the run folder is empty; give a name.")
    return Path(text)


def setting(text: str) -> tuple[str, str]:
    """Parse the value of `--set`, written as key=value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"--set {text}: give key=value, such as --set shift=0")
    return key, value


def keep_heap_warm() -> None:
    """On Linux, keep freed memory in the process, because returning it to the operating system slows training down."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def writable_file(path: Path, option: str = "--out", new_folder: bool = False) -> None:
    """Check, before a long computation starts, that the file given by `option` can be written.

    If `new_folder` is True, the folder of the file need not exist.
    """
    if path.is_dir():
        raise BadInput(f"{option} is {path}, which is a folder: give the name of a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise BadInput(f"{option} is {path}, which is a link or a device: give the name of a file")
    if not new_folder and not path.parent.is_dir():
        raise BadInput(f"{option} is {path}, but the folder {path.parent} does not exist: create it")
    writable(path.parent, option)


def writable(folder: Path, option: str = "--out") -> None:
    """Check, before a long computation starts, that the folder given by `option` can be written to."""
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BadInput(
            f"{option}: the folder {folder} cannot be written to ({error.strerror}); use another folder"
        ) from error
    if not existed:
        folder.rmdir()


def splits_for(
    classifier: "Classifier", recipe: "Recipe | None", name: str, data_dir: Path, cache: str = "auto"
) -> "Splits":
    """Load a dataset, or a folder or a table of images, and check that image shape and classes match a classifier.

    Images of a folder or a table are resized to the classifier's image shape. If `name` is the data of `recipe`, the
    splits are the same as when the classifier was trained with this recipe.
    """
    from torchcaps.data import DATASETS, load_splits

    channels, height, width = classifier.image_shape
    options: dict[str, Any] = {"size": height, "stereo": channels == 2} if recipe is None else dict(recipe.data_options)
    if name in DATASETS:
        options = {key: value for key, value in options.items() if key in DATASETS[name].options}
    else:
        options = options if recipe is not None and name == recipe.data else {}
        options |= {"image_size": (height, width), "channels": channels}
    if recipe is not None:
        options |= {"validation_fraction": recipe.validation_fraction, "seed": recipe.seed}
        if name == recipe.data:
            options["validation_attribute"] = recipe.validation_attribute
    splits = load_splits(name, data_dir, cache=cache, **options)  # type: ignore[arg-type]
    found = splits.train
    if found.class_names != tuple(classifier.class_names):
        raise BadInput(
            f"{name} has the classes {', '.join(found.class_names)}, but the network was trained on "
            f"{', '.join(classifier.class_names)}; give --data with the same classes"
        )
    if found.image_shape != classifier.image_shape:
        raise BadInput(
            f"{name} has images of shape {found.image_shape}, but the network was trained on {classifier.image_shape}; "
            "give --data with images of the same shape"
        )
    return splits
