"""What a run leaves on disk: whose folder it is, its recipe and data, a row an epoch. Whole or absent."""

import csv
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning
import numpy as np
import safetensors.numpy
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import Callback
from safetensors import SafetensorError
from torch import nn

from torchcaps.checkpoints import load_checkpoint
from torchcaps.data import Images, Splits, difference, fingerprint, image_digests
from torchcaps.data.files import atomically, write_json
from torchcaps.environment import environment
from torchcaps.errors import BadInput
from torchcaps.options import absent, check_kind
from torchcaps.recipe import Recipe

LOCK = ".lock"
DIGESTS = "image-digests.safetensors"
LEFTOVER = re.compile(r"(.+\.(json|csv|ckpt|safetensors|png)\.\d+\.part|\.writable-\d+)")
"""What a killed process may leave of a file that it was writing."""
PROGRESS_SECONDS = 60.0
"""Between two printed lines of how far a long epoch has come, where no progress bar can be drawn."""


@dataclass(frozen=True)
class Run:
    """What recipe.json holds of a run.

    Arguments:
        recipe: all settings.
        class_names: in the order of the labels.
        image_shape: (channels, height, width) of the stored images, before cropping.
        data: the summary of `fingerprint`.
        environment: where it was trained last.
        earlier_environments: where it was trained before it was resumed.
    """

    recipe: Recipe
    class_names: list[str]
    image_shape: tuple[int, int, int]
    data: dict[str, Any]
    environment: dict[str, Any]
    earlier_environments: list[dict[str, Any]]


def read_run(folder: Path) -> Run:
    """recipe.json of a run, with every entry there and of its kind.

    Raises:
        BadInput: it is absent or damaged.
    """
    path = folder / "recipe.json"
    if not path.is_file():
        raise BadInput(f"{folder} has no recipe.json: name the folder of a `torchcaps train`")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        for name, kind in Run.__annotations__.items():
            if name != "recipe":
                check_kind(name, said[name], kind)
        known = [field.name for field in fields(Recipe)]
        if missing := absent("recipe", known, said["recipe"]):
            raise BadInput(f"recipe: {missing[0]!r} is absent")
        if unknown := said["recipe"].keys() - set(known):
            raise BadInput(f"recipe: {min(unknown)!r} is unknown")
        if not all(isinstance(said["data"][split]["sha256"], str) for split in ("train", "validation", "test")):
            raise BadInput("data: a checksum is absent")
        said["data"]["class_names"]
        run = {name: said[name] for name in Run.__annotations__}
        return Run(**{**run, "recipe": Recipe(**said["recipe"]), "image_shape": tuple(said["image_shape"])})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path} is damaged ({error!s}): put back a copy, or train again in another folder") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process from training in a folder; the folder is made if absent.

    Raises:
        BadInput: another process trains there, or the folder cannot be written to.
    """
    lock = FileLock(folder / LOCK, timeout=0, preserve_lock_file=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise BadInput(f"another process is training in {folder}: wait for it, or name another --out") from error
    except OSError as error:
        raise BadInput(f"{folder} cannot be written to ({error.strerror}): name another folder with --out") from error
    try:
        yield
    finally:
        lock.release()


def existing_run(folder: Path, resume: bool) -> Run | None:
    """The run that a folder holds, which is then to be resumed; None for an empty or absent folder.

    Raises:
        BadInput: it holds a run that is not to be resumed, or files of somebody else.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if not name.startswith(".") and not LEFTOVER.fullmatch(name)]
    if (folder / "recipe.json").is_file():
        run = read_run(folder)
        if not resume:
            raise BadInput(f"{folder} holds a run already: continue it with --resume, or name another --out")
        return run
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise BadInput(
            f"{folder} holds files that are not of a run ({others[0]}{more}): name a new or empty folder with --out"
        )
    return None


class Begun(NamedTuple):
    """A run that may begin or go on.

    Arguments:
        run: what recipe.json will hold.
        digests: of the images of each split.
        last: the checkpoint to go on from; None at the start.
    """

    run: Run
    digests: dict[str, Any]
    last: Path | None


def check_run(folder: Path, recipe: Recipe, splits: Splits, module: nn.Module, resume: bool) -> Begun:
    """Whether a run may begin in a folder, or go on; nothing is written.

    Raises:
        BadInput: see `existing_run`; the run was begun with other settings or other data; a checkpoint or metrics.csv
            is absent or damaged.
    """
    before = existing_run(folder, resume)
    data, digests = fingerprint(splits)
    earlier: list[dict[str, Any]] = []
    if before is not None:
        _check_settings(folder, before.recipe, recipe)
        changed = difference(before.data, data)
        if changed:
            raise BadInput(
                f"{folder} was begun with other data: {changed}; resume with the same data, or name another --out"
            )
        earlier = [*before.earlier_environments, before.environment]
    run = Run(recipe, [*splits.train.class_names], splits.train.image_shape, data, environment(), earlier)
    last, rows = folder / "last.ckpt", len(read_rows(folder / "metrics.csv"))
    first = rows < 2 and not last.exists()  # an epoch may end, and its checkpoint not yet be written
    if before is None or first or finished(folder, recipe):
        return Begun(run, digests, None)
    trained = load_checkpoint(last, module)["epoch"] + 1
    load_checkpoint(folder / "best.ckpt", module)
    if rows < trained:
        raise BadInput(
            f"{folder / 'metrics.csv'} has {rows} epochs, but last.ckpt {trained}: put back a copy, or train again in "
            "another folder"
        )
    return Begun(run, digests, last)


def begin_run(folder: Path, begun: Begun) -> None:
    """Write recipe.json: settings, what the data are, the environments. Remove what a killed run left."""
    for path in [path for path in folder.iterdir() if LEFTOVER.fullmatch(path.name)]:
        path.unlink()
    # recipe.json first: it makes the folder a run's
    write_json(folder / "recipe.json", {**vars(begun.run), "recipe": begun.run.recipe.plain()})
    with atomically(folder / DIGESTS) as stream:
        stream.write(safetensors.numpy.save(begun.digests))


def _check_settings(folder: Path, before: Recipe, recipe: Recipe) -> None:
    one, other = before.plain(), recipe.plain()
    for key in one.keys() - {"epochs", "data"}:  # the data may lie in another place: their checksums are compared
        if one[key] != other[key]:
            raise BadInput(f"{folder} was begun with {key}={one[key]}, not {other[key]}: resume with the same")
    if one["epochs"] == other["epochs"]:
        return
    if recipe.margin_schedule == "linear":
        raise BadInput(
            f"{folder} was begun with epochs={before.epochs}, not {recipe.epochs}: its margin rises linearly over all "
            "epochs, so their number cannot change; train anew in another folder"
        )
    trained = len(read_rows(folder / "metrics.csv"))
    if recipe.epochs < trained:
        raise BadInput(f"{folder} has trained {trained} epochs already: give --epochs {trained} or more")


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """metrics.json of a run that has ended with these epochs; None where it has not, or a result is absent.

    Raises:
        BadInput: metrics.json is damaged.
    """
    if not all((folder / name).is_file() for name in ("metrics.json", "model.safetensors", "config.json")):
        return None
    metrics = read_metrics(folder)
    return metrics if metrics["epochs_planned"] == recipe.epochs else None


def read_metrics(folder: Path) -> dict[str, Any]:
    """metrics.json of a run.

    Raises:
        BadInput: it is damaged.
    """
    path = folder / "metrics.json"
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
        float(metrics["test_accuracy_percent"]), int(metrics["epochs_planned"]), int(metrics["test_evaluations"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadInput(f"{path} is damaged ({error}): remove it and run the command with --resume") from error
    return metrics


def seen_in_training(folder: Path, images: Images) -> dict[str, int]:
    """How many of these images are among a run's training and validation images, by the name of the split.

    Raises:
        BadInput: the run's checksums of its images are absent or damaged.
    """
    path = folder / DIGESTS
    try:
        known = safetensors.numpy.load(path.read_bytes())
        digests = image_digests(images)
        return {name: int(np.isin(digests, known[name]).sum()) for name in ("train", "validation")}
    except (OSError, LookupError, SafetensorError) as error:
        raise BadInput(f"{path} is absent or damaged ({error}): put back a copy") from error


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv; none where it does not exist.

    Raises:
        BadInput: it is damaged.
    """
    if not path.exists():
        return []
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines(), strict=True))
        for number, row in enumerate(rows, start=1):
            float(row["seconds"]), float(row["train_images_per_second"])
            if int(row["epoch"]) != number or None in row or None in row.values():
                raise ValueError(f"row {number} is not whole")
        return rows
    except (OSError, ValueError, LookupError, TypeError, csv.Error) as error:
        raise BadInput(f"{path} is damaged ({error}): put back a copy, or train again in another folder") from error


class EpochLog(Callback):
    """One row of metrics.csv and one printed line an epoch; a resumed run goes on below the rows it keeps."""

    def __init__(
        self, path: Path, images: int, measure: Callable[[nn.Module], Mapping[str, float]] | None = None
    ) -> None:
        self.path = path
        self.images = images
        self.measure = measure
        self.rows: list[dict[str, Any]] = []
        self.start = self.told = self.train_seconds = 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.rows = [row for row in read_rows(self.path) if int(row["epoch"]) <= trainer.current_epoch]

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.start = self.told = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: Any, batch_index: int
    ) -> None:
        now = time.perf_counter()
        self.train_seconds = now - self.start
        if trainer.is_global_zero and trainer.progress_bar_callback is None and now - self.told > PROGRESS_SECONDS:
            self.told = now
            done = (batch_index + 1) / trainer.num_training_batches
            print(
                f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {100 * done:.0f} %  "
                f"{done * self.images / self.train_seconds:.0f} images/s",
                flush=True,
            )

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        seen = trainer.callback_metrics
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch + 1,
            "train_loss": f"{float(seen['train_loss']):.6f}",
            "validation_loss": f"{float(seen['validation_loss']):.6f}",
            "validation_accuracy_percent": f"{float(seen['validation_accuracy_percent']):.4f}",
            "learning_rate": f"{trainer.optimizers[0].param_groups[0]['lr']:.8f}",
            "train_images_per_second": f"{self.images / self.train_seconds:.2f}",
            "seconds": f"{time.perf_counter() - self.start:.2f}",
        }
        if self.measure is not None:
            model = cast(nn.Module, module.model).eval()
            row |= {name: f"{value:.4f}" for name, value in self.measure(model).items()}
            model.train()
        self.rows.append(row)
        lines = [",".join(row), *(",".join(str(value) for value in kept.values()) for kept in self.rows)]
        with atomically(self.path) as stream:
            stream.write(("\n".join(lines) + "\n").encode())
        left = float(row["seconds"]) * ((trainer.max_epochs or 0) - trainer.current_epoch - 1)
        print(
            f"epoch {row['epoch']}/{trainer.max_epochs}  loss {row['train_loss']}  "
            f"validation {float(row['validation_accuracy_percent']):.2f} %  "
            f"{float(row['train_images_per_second']):.0f} images/s  {left / 60:.1f} min left",
            flush=True,
        )
