"""Options and helper functions that several commands use."""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from torchcaps.errors import BadInput, listed, printable

if TYPE_CHECKING:
    from torchcaps.classifier import Classifier
    from torchcaps.data import Splits
    from torchcaps.recipe import Recipe

DataDir = Annotated[Path, typer.Option("--data-dir", help="Folder that contains the datasets.")]
MOST_CLASSES = 20
Cache = Annotated[
    str,
    typer.Option(
        help="How your own images are loaded. memory: decode once and keep in memory; none: decode at each use; auto: "
        "memory if enough of it is free, otherwise none."
    ),
]

RUN_FILES = ("recipe.json", "metrics.csv", "metrics.json", "last.ckpt", "best.ckpt", "image-digests.safetensors")
"""Files of a run folder that a folder with only weights does not have."""
NETWORK_FILES = (*RUN_FILES, "config.json", "model.safetensors")
"""Files of a run or of a saved network, which no other output may replace."""
WIDTH = 140
"""Width of a table in a pipe or a file, unless it needs more."""
LONG_WORD, SHORT_WORD = 16, 8
"""In a terminal that is too narrow for a table, words longer than the first number, then the second, are broken."""


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str = "") -> None:
    """Print a table. No cell is cut off, markup is not interpreted, and characters that cannot be printed are escaped.

    In a terminal, cells are wrapped so that the table fits the width of the terminal. In a pipe or a file, the first
    column is never wrapped, and no word is broken.
    """
    lines = [[printable(str(cell)) for cell in row] for row in (columns, *rows)]
    cells = [*zip(*lines, strict=True)]
    console, borders = Console(), 3 * len(cells) + 1
    room = console.width if console.is_terminal else WIDTH
    widths = _column_widths(cells, room - borders, console.is_terminal)
    headers = [
        Column(Text(column[0]), width=width, overflow="fold") for column, width in zip(cells, widths, strict=True)
    ]
    table = Table(*headers, title=Text(printable(title)) if title else None)
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    Console(width=max(room, sum(widths) + borders)).print(table)


def _column_widths(cells: Sequence[Sequence[str]], room: int, terminal: bool) -> list[int]:
    """Return the widths of columns with these cells; the widest columns are narrowed until all columns fit."""
    widths = [max(map(cell_len, column)) for column in cells]
    words = [max(cell_len(word) for cell in (*column, "-") for word in cell.split()) for column in cells]
    long = [min(word, LONG_WORD) for word in words]
    short = [min(word, SHORT_WORD) for word in words]
    steps = ([widths[0], *long[1:]], long, short) if terminal else ([widths[0], *words[1:]],)
    for least in steps:
        while sum(widths) > room and widths != least:
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            widths[widest] -= 1
    return widths


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
        raise typer.BadParameter("must be the name of a folder; got ''")
    return Path(text)


def setting(text: str) -> tuple[str, str]:
    """Parse the value of `--set`, written as SETTING=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"--set must be SETTING=VALUE, such as --set shift=0; got {text}")
    return key, value


def naming_options(**options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command, so that errors name the option or the setting that the user typed.

    Arguments:
        options: for each argument in Python, the option that sets it, such as ``learning_rate="--lr"``.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        arguments = signature(command).parameters

        @wraps(command)
        def named(**given: Any) -> None:
            try:
                command(**given)
            except BadInput as error:
                typed: dict[str, str] = {}
                for text in given.get("settings") or []:
                    key = text.partition("=")[0]
                    name = key.rpartition(".")[2]
                    typed[name] = key if typed.get(name, key) == key else name  # several settings can have one name
                for name, option in options.items():
                    argument = option.removeprefix("--").replace("-", "_")
                    if given.get(argument) != arguments[argument].default:
                        typed[name] = option
                found = re.search(r"(?:^|: )(\w+) (?=must be |is empty)", said := str(error))
                if found is None or found[1] not in typed:
                    raise
                raise BadInput(f"{said[: found.start(1)]}{typed[found[1]]}{said[found.end(1) :]}") from error

        return named

    return decorated


def writable_file(
    path: Path, option: str = "--out", new_folder: bool = False, inputs: Iterable[Path] = (), ending: str = ""
) -> None:
    """Check, before a long computation starts, that the file given by `option` can be written.

    The name of the file must have the `ending`, and the file must not be one of the `inputs`, which the command reads.
    If `new_folder` is True, the folder of the file need not exist.
    """
    if ending and path.suffix.lower() != ending:
        raise BadInput(f"{option} must be a file name that ends in {ending}; got {path}")
    if path.is_dir():
        raise BadInput(f"{option} is {path}, which is a folder: give the name of a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise BadInput(f"{option} is {path}, which is a link or a device: give the name of a file")
    if path.name in NETWORK_FILES and any((path.parent / name).is_file() for name in ("recipe.json", "config.json")):
        raise BadInput(f"{option} is {path}, which is a file of the network in {path.parent}: give another name")
    if path.exists() and any(os.path.exists(one) and path.samefile(one) for one in inputs):
        raise BadInput(f"{option} is {path}, which this command reads: give another name")
    if not new_folder and not path.parent.is_dir():
        raise BadInput(f"{option} is {path}, but the folder {path.parent} does not exist: create it")
    writable(path.parent, option)


def writable(folder: Path, option: str = "--out") -> None:
    """Check, before a long computation starts, that the folder given by `option` can be written to."""
    folder = folder.absolute()
    existing = next(one for one in (folder, *folder.parents) if one.exists() or one.is_symlink())
    probe = existing / f".writable-{os.getpid()}"
    try:
        if existing == folder:
            probe.write_text("")
            probe.unlink()
        else:  # another process may create or remove the missing folders, so they are created in a folder of their own
            (probe / folder.relative_to(existing)).mkdir(parents=True)
            shutil.rmtree(probe)
    except OSError as error:
        raise BadInput(
            f"{option} is {folder}, which cannot be written to ({error.strerror}): use another folder"
        ) from error


def is_inside(folder: Path, data: str) -> bool:
    """Return whether `folder`, which need not exist, is inside the folder of images `data`.

    Class folders can be symbolic links.
    """
    from torchcaps.data import DATASETS
    from torchcaps.data.files import expanded
    from torchcaps.data.image_table import is_table

    if data in DATASETS or is_table(data):
        return False
    root = os.path.abspath(expanded(data))
    return Path(os.path.abspath(folder)).is_relative_to(root) or folder.resolve().is_relative_to(Path(root).resolve())


def splits_for(
    classifier: "Classifier", recipe: "Recipe | None", name: str, data_dir: Path, cache: str = "auto"
) -> "Splits":
    """Load a dataset, or a folder or a table of images, and check that image shape and classes match a classifier.

    Images of a folder or a table are resized to the classifier's image shape. If `name` is the data of `recipe`, the
    splits are the same as when the classifier was trained with this recipe. If `name` is another table, the
    settings `image_column` and `label_column` of the recipe are used for it.
    """
    from torchcaps.data import DATASETS, load_splits
    from torchcaps.data.image_table import is_table

    channels, height, _ = classifier.image_shape
    options: dict[str, Any] = {"size": height, "stereo": channels == 2} if recipe is None else dict(recipe.data_options)
    same = recipe is not None and same_data(name, recipe.data)
    if name in DATASETS:
        options = {key: value for key, value in options.items() if key in DATASETS[name].options}
    else:
        columns = ("image_column", "label_column") if is_table(name) else ()
        options = {key: value for key, value in options.items() if same or key in columns}
        options |= image_options(classifier)
    if recipe is not None:
        options |= {"validation_fraction": recipe.validation_fraction, "seed": recipe.seed}
        if same:
            options["validation_attribute"] = recipe.validation_attribute
    splits = load_splits(name, data_dir, cache=cache, **options)  # type: ignore[arg-type]
    found = splits.train
    if found.class_names != tuple(classifier.class_names) and {*found.class_names} == {*classifier.class_names}:
        pairs = zip(found.class_names, classifier.class_names, strict=False)
        place = next(k for k, (one, other) in enumerate(pairs) if one != other)
        raise BadInput(
            f"{name} has the classes of the network in another order (class {place} is {found.class_names[place]} "
            f"instead of {classifier.class_names[place]}): number its classes as in the config.json of the network"
        )
    if found.class_names != tuple(classifier.class_names):
        raise BadInput(
            f"the classes of {name} and of the network differ ({differences(found.class_names, classifier)}): use "
            "--data to choose images with the same classes"
        )
    if found.image_shape != classifier.image_shape:
        raise BadInput(
            f"{name} has images of shape {found.image_shape}, but the network was trained on {classifier.image_shape}: "
            "use --data to choose images of the same shape"
        )
    return splits


def differences(class_names: Sequence[str], classifier: "Classifier") -> str:
    """Name at most three classes that only the data or only the network has."""
    of_network, of_data = set(classifier.class_names), set(class_names)
    parts = []
    for owner, names in (
        ("the data", [name for name in class_names if name not in of_network]),
        ("the network", [name for name in classifier.class_names if name not in of_data]),
    ):
        if names:
            parts.append(f"only {owner}: {listed(names)}")
    return "; ".join(parts)


def image_options(classifier: "Classifier") -> dict[str, Any]:
    """Return the options of `load_splits` and `load_test_images` with which images get a classifier's image shape."""
    channels, height, width = classifier.image_shape
    return {"image_size": (height, width), "resize": classifier.resize, "channels": channels}


def same_data(one: str, other: str) -> bool:
    """Return whether two names mean the same dataset, or are paths of the same folder or table."""
    from torchcaps.data import DATASETS
    from torchcaps.data.files import expanded
    from torchcaps.data.image_table import HUB

    if any(name in DATASETS or name.startswith(HUB) for name in (one, other)):
        return one == other
    return expanded(one).resolve() == expanded(other).resolve()


def print_classes(classes: dict[str, dict[str, Any]]) -> None:
    """Print the results of `per_class`. If there are many classes, print those with errors and the lowest recall."""
    shown, title = [*classes], ""
    if len(classes) > MOST_CLASSES:
        recall = {name: values["recall_percent"] for name, values in classes.items()}  # None: no images
        wrong = [name for name in classes if classes[name].get("mistaken_for") or recall[name] not in (None, 100)]
        shown = sorted(wrong, key=recall.__getitem__)[:MOST_CLASSES]
        if not shown:
            print(f"no errors in the {len(classes)} classes")
            return
        title = f"the {len(shown)} of {len(classes)} classes with errors"
        if more := len(wrong) - len(shown):
            title = f"the {len(shown)} of {len(classes)} classes with the lowest recall; {more} more have errors"
    keys = ("images", "precision_percent", "recall_percent", "mistaken_for")  # old runs lack the last
    rows = [(name, *(classes[name].get(key) for key in keys)) for name in shown]
    cells = [[("-" if value is None else value) for value in row] for row in rows]
    print_table(("class", "images", "precision %", "recall %", "mistaken for"), cells, title)
