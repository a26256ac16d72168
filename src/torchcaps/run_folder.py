"""Read and write the files of a run, each atomically: recipe.json, image digests, metrics.csv and metrics.json."""

import csv
import io
import math
import re
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch import nn

from torchcaps.checkpoints import load_best, load_last
from torchcaps.data import Splits, difference, fingerprint
from torchcaps.data.files import PART, WITHOUT_LOCKS, atomically, read_json, write_json
from torchcaps.data.fingerprint import SPLITS
from torchcaps.environment import ENTRIES, changed_environment, environment
from torchcaps.errors import BadInput, DataWarning, unreadable
from torchcaps.options import NEWER, absent, check_kind, fits
from torchcaps.recipe import Recipe

LOCK = ".lock"
"""Name of the lock file in a run folder."""
MEASURED = ("train_loss", "validation_loss", "validation_accuracy_percent", "train_images_per_second", "seconds")
"""Columns of metrics.csv in runs of all versions."""
DIGESTS = "image-digests.safetensors"
LEFTOVER = re.compile(rf"(.+\.(json|csv|ckpt|safetensors|png){PART}|\.writable-\d+)")
"""Names of temporary files that a killed process may leave behind."""


@dataclass(frozen=True)
class Run:
    """Content of a run's recipe.json.

    Arguments:
        recipe: all settings of the training.
        class_names: class names, in the order of the labels.
        image_shape: (channels, height, width) of the images before the preprocessing, which may crop them.
        data: result of `fingerprint`: class names, and for each split the number of images and a checksum.
        environment: versions, commit and hardware of the last training session.
        earlier_environments: versions, commit and hardware of earlier sessions, if the run was resumed elsewhere or
            with other versions.
        test_evaluations: number of times that training ended and evaluated the run on its test split.
    """

    recipe: Recipe
    class_names: list[str]
    image_shape: tuple[int, int, int]
    data: dict[str, Any]
    environment: dict[str, Any]
    earlier_environments: list[dict[str, Any]]
    test_evaluations: int = 0


def read_run(folder: Path) -> Run:
    """Read a run's recipe.json and check that all entries are present and have the right type.

    Raises:
        BadInput: recipe.json is missing or damaged.
    """
    path = folder / "recipe.json"
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise BadInput(f"{folder} {problem}: give a run folder of `torchcaps train`")
    if not path.is_file():
        raise BadInput(f"{folder} has no recipe.json: give a run folder of `torchcaps train`")
    cure = "restore it from a copy, or train again elsewhere"
    saved = read_json(path, cure)
    try:
        content = {"test_evaluations": 0, **saved}
        for name, kind in Run.__annotations__.items():
            if name != "recipe":
                check_kind(name, content[name], kind)
        known = [field.name for field in fields(Recipe)]
        if missing := absent("recipe", known, content["recipe"]):
            raise BadInput(f"recipe: {missing[0]!r} is missing")
        if unknown := content["recipe"].keys() - set(known):
            raise BadInput(f"the setting {min(unknown)!r} is unknown; {NEWER}")
        if not all(isinstance(content["data"][split]["sha256"], str) for split in ("train", "validation", "test")):
            raise BadInput("data: a checksum is missing")
        check_kind("data: class_names", content["data"]["class_names"], list[str])
        for session in (content["environment"], *content["earlier_environments"]):
            [session[entry] for entry in ENTRIES]
        run = {name: content[name] for name in Run.__annotations__}
        return Run(**{**run, "recipe": Recipe(**content["recipe"]), "image_shape": tuple(content["image_shape"])})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(path, error, cure) from error


def write_run(folder: Path, run: Run) -> None:
    """Write a run's recipe.json."""
    write_json(folder / "recipe.json", {**vars(run), "recipe": run.recipe.plain()})


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder, so that no other process trains in it. The folder is created if absent.

    Raises:
        BadInput: another process is training in the folder, or the folder cannot be written to.
    """
    lock = FileLock(folder / LOCK, timeout=0, preserve_lock_file=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise BadInput(f"another process is training in {folder}: wait until it ends, or use another --out") from error
    except OSError as error:
        problem = "has no file locks" if error.errno in WITHOUT_LOCKS else "cannot be written to"
        raise BadInput(f"{folder} {problem} ({error.strerror}): use another folder with --out") from error
    try:
        yield
    finally:
        lock.release()


def existing_run(folder: Path, resume: bool) -> Run | None:
    """Read the run in a folder; return None if the folder is empty or does not exist.

    Raises:
        BadInput: the folder contains a run and `resume` is False, or the folder contains files but no recipe.json.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if not name.startswith(".") and not LEFTOVER.fullmatch(name)]
    if (folder / "recipe.json").is_file():
        run = read_run(folder)
        if not resume:
            raise BadInput(f"{folder} already contains a run: continue it with --resume, or use another --out")
        return run
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise BadInput(
            f"{folder} contains files that do not belong to a run ({others[0]}{more}): use a new or empty --out folder"
        )
    return None


class Begun(NamedTuple):
    """A checked run that can be started or resumed.

    Arguments:
        run: content of recipe.json.
        digests: for each split, the checksums of its images.
        last: checkpoint to resume from; None to start with the first epoch.
        trained: number of epochs after which the checkpoint `last` was written; 0 without a checkpoint.
    """

    run: Run
    digests: dict[str, Any]
    last: Path | None
    trained: int = 0


def check_run(folder: Path, recipe: Recipe, splits: Splits, module: nn.Module, resume: bool) -> Begun:
    """Check that a run can be started or resumed in a folder. Nothing is written.

    Raises:
        BadInput: the folder contains a run and `resume` is False; the folder contains files but no recipe.json; the run
            was started with other settings; images that the run has already used have changed; a checkpoint or
            metrics.csv is missing or damaged.

    Warns:
        DataWarning: images have changed that the run has not used yet.
    """
    before = existing_run(folder, resume)
    last, rows = folder / "last.ckpt", read_rows(folder / "metrics.csv")
    # A run with one row and no checkpoint starts again: the process was killed after it wrote the row of epoch 1 and
    # before it wrote the checkpoint. If metrics.json exists, the checkpoint was deleted.
    first = len(rows) < 2 and not last.exists() and not (folder / "metrics.json").exists()
    data, digests = fingerprint(splits, None if before is None else before.data)
    earlier: list[dict[str, Any]] = []
    here = environment()
    evaluated = 0 if before is None else before.test_evaluations
    if (folder / "metrics.json").exists():
        evaluated = max(evaluated, read_metrics(folder)["test_evaluations"])
    if before is not None:
        _check_settings(folder, before.recipe, recipe)
        changed = difference(before.data, data)
        only_test = difference({**before.data, "test": data["test"]}, data) is None
        if changed and (first or (only_test and not evaluated)):
            message = f"{folder}: {changed}, but the training has not used these images yet, so it continues"
            warnings.warn(message, DataWarning, stacklevel=3)
        elif changed:
            raise BadInput(
                f"{folder} was started with other data ({changed}): resume with the same data, or use another --out"
            )
        earlier = [*before.earlier_environments, *([] if before.environment == here else [before.environment])]
    run = Run(recipe, [*splits.train.class_names], splits.train.image_shape, data, here, earlier, evaluated)
    if before is None or first or finished(folder, recipe):
        return Begun(run, digests, None)
    trained = load_last(last, module)["epoch"] + 1
    if recipe.choose == "best":
        load_best(folder, module)
    if len(rows) < trained:
        raise BadInput(
            f"{folder / 'metrics.csv'} has {len(rows)} epochs, but last.ckpt has {trained}: restore metrics.csv from a "
            "copy, or train again in another folder"
        )
    if changed := changed_environment(before.environment, run.environment):
        print(f"{folder} was last trained with {changed}: weights can differ by rounding errors", flush=True)
    if before.recipe.epochs != recipe.epochs:
        rate = ", and the cosine of the learning rate now spans all epochs" if recipe.schedule == "cosine" else ""
        one, other = before.recipe.epochs, recipe.epochs
        print(f"{folder} was started with {one} epochs; training continues to epoch {other}{rate}", flush=True)
    return Begun(run, digests, last, trained)


def remove_leftovers(folder: Path, names: re.Pattern[str] = LEFTOVER) -> None:
    """Remove temporary files that a killed process left behind."""
    for path in [path for path in folder.iterdir() if names.fullmatch(path.name)]:
        path.unlink()


def begin_run(folder: Path, begun: Begun) -> None:
    """Write recipe.json and the image digests."""
    remove_leftovers(folder)
    digests = {**_digests_of_pixels(folder, begun.digests), **begun.digests}
    # recipe.json is written first, because it marks the folder as a run.
    write_run(folder, begun.run)
    with atomically(folder / DIGESTS) as stream:
        stream.write(safetensors.numpy.save(digests))


def _digests_of_pixels(folder: Path, now: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the stored checksums of the pixels of splits whose image files have not changed.

    A run that is resumed with images on disk computes only checksums of their files.
    """
    with suppress(OSError, SafetensorError):
        before = safetensors.numpy.load((folder / DIGESTS).read_bytes())
        return {
            name: before[name]
            for name, files in ((name, f"{name} files") for name in SPLITS)
            if {name, files} <= before.keys() and files in now and np.array_equal(before[files], now[files])
        }
    return {}


def changed_setting(before: Recipe, now: Recipe, ignored: Container[str] = ("data",)) -> str | None:
    """Describe a setting that differs between two recipes; returns None if they have the same settings.

    Arguments:
        before: recipe with which a run was started.
        now: recipe with which the run is to be continued.
        ignored: settings that are not compared. The default is the path of the data, because the data may have moved;
            `difference` compares the images.

    Example:
        >>> changed_setting(Recipe("one", "capsnet", "mnist"), Recipe("one", "capsnet", "digits", epochs=3))
        'epochs=10, not 3'
    """
    one, other = before.by_name(), now.by_name()
    for key in sorted(one.keys() | other.keys(), key=lambda key: (key != "name", key)):  # the recipe's name first
        values = [settings.get(key, "the default") for settings in (one, other)]
        if key not in ignored and values[0] != values[1]:
            return f"{key}={values[0]}, not {values[1]}"
    return None


def _check_settings(folder: Path, before: Recipe, recipe: Recipe) -> None:
    if before.name != recipe.name:
        raise BadInput(
            f"{folder} was started with the recipe {before.name}, not {recipe.name}: resume with the same recipe, or "
            "train in another folder"
        )
    if changed := changed_setting(before, recipe, ignored=("data", "epochs")):
        raise BadInput(f"{folder} was started with {changed}: resume with the same value, or train in another folder")
    if before.epochs == recipe.epochs:
        return
    if recipe.margin_schedule == "linear":
        raise BadInput(
            f"{folder} was started with epochs={before.epochs}, not {recipe.epochs}, and its margin rises linearly "
            "over all epochs, so the number of epochs cannot change: train again in another folder"
        )
    trained = len(read_rows(folder / "metrics.csv"))
    if recipe.epochs < trained:
        raise BadInput(f"{folder} has already been trained for {trained} epochs: use --epochs {trained} or more")


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Return the content of metrics.json if the run in a folder is finished, else None.

    A run is finished if metrics.json, model.safetensors and config.json exist, if the planned number of epochs in
    metrics.json equals ``recipe.epochs``, and if the run was not trained further since. The entry ``evaluated_split``
    is ``test``, or ``validation`` if the run has not been evaluated on its test split.

    Raises:
        BadInput: metrics.json or metrics.csv is damaged.
    """
    if not all((folder / name).is_file() for name in ("metrics.json", "model.safetensors", "config.json")):
        return None
    metrics, rows = read_metrics(folder), read_rows(folder / "metrics.csv")
    same = metrics["epochs_planned"] == recipe.epochs and len(rows) <= metrics.get("epochs", len(rows))
    return metrics if same else None


def read_metrics(folder: Path) -> dict[str, Any]:
    """Read a run's metrics.json.

    Raises:
        BadInput: metrics.json cannot be read or is damaged.
    """
    path, cure = folder / "metrics.json", "delete it and train with --resume"
    saved = read_json(path, cure)
    try:
        metrics = dict(saved)
        split = metrics.setdefault("evaluated_split", "test")  # metrics.json of earlier versions has no such entry
        counts = [metrics[name] for name in (f"{split}_images", "epochs_planned", "test_evaluations")]
        counts.append(metrics.get("epochs", 0))
        valid = split in ("test", "validation") and fits(metrics[f"{split}_accuracy_percent"], float)
        classes = dict(metrics.get("classes") or {}).values()
        if not valid or not all(fits(count, int) for count in counts) or not all(isinstance(x, dict) for x in classes):
            raise ValueError("an entry has another type than expected")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise unreadable(path, error, cure) from error
    return metrics


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of metrics.csv; return an empty list if the file does not exist.

    Raises:
        BadInput: metrics.csv is damaged.
    """
    if not path.exists():
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True))
        for number, row in enumerate(rows, start=1):
            if None in row or None in row.values() or int(row["epoch"]) != number:
                raise ValueError(f"row {number} is incomplete")
            if not all(math.isfinite(float(row[name])) for name in MEASURED):
                raise ValueError(f"row {number} contains a number that is not finite")
        return rows
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise unreadable(path, error, "restore it from a copy, or train again elsewhere") from error
