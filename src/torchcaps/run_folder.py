"""What a run leaves on disk: its recipe and environment, its rows, its checkpoints, its picture. Whole or absent."""

import csv
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from torch import nn

from torchcaps.data import Images, Preparation, Splits
from torchcaps.data.files import atomically, write_json
from torchcaps.errors import BadInput
from torchcaps.recipe import Recipe


def environment() -> dict[str, Any]:
    """Versions, commit and hardware: what has to stand beside every number."""
    versions: dict[str, str | None] = {}
    for package in ("torchcaps", "torch", "lightning", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
        "processor": processor,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _commit() -> str | None:
    source = Path(__file__).resolve().parent
    git = shutil.which("git")
    if git is None or not (source.parents[1] / ".git").exists():
        return None
    run = [git, "-C", str(source)]
    head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*run, "status", "--porcelain", "."], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("-modified" if changed.stdout.strip() else "") if head.returncode == 0 else None


def begun_with(folder: Path) -> dict[str, Any]:
    """The settings of a run; those that came with a later version of this library are at their defaults."""
    defaults = {setting.name: setting.default for setting in fields(Recipe) if setting.default is not MISSING}
    return {**defaults, **json.loads((folder / "recipe.json").read_text())["recipe"]}


def begin_run(folder: Path, recipe: Mapping[str, Any], splits: Splits, resume: bool) -> None:
    """Make the folder and write recipe.json: the recipe's settings, what the data are, the environments.

    Raises:
        BadInput: a run is there already and is not to be resumed, or it was begun with other settings.
    """
    written = folder / "recipe.json"
    earlier: dict[str, Any] = {}
    if written.exists() and not resume:
        raise BadInput(f"{folder} holds a run already: go on with --resume, or name another folder with --out")
    if resume and written.exists():
        before, last = begun_with(folder), json.loads(written.read_text())
        earlier = {"earlier_environments": [*last.get("earlier_environments", []), last["environment"]]}
        longer = {"epochs"} if recipe.get("margin_schedule") != "linear" else set()
        for key, value in json.loads(json.dumps(recipe)).items():
            if before.get(key) != value and key not in longer:
                raise BadInput(f"{folder} was begun with {key}={before.get(key)}, not {value}: resume with the same")
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "recipe": recipe,
        "class_names": splits.train.class_names,
        "image_shape": splits.train.image_shape,
        "environment": environment(),
        **earlier,
    }
    write_json(written, content)


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints that are whole or absent: written beside the file, then renamed over it; loaded without pickle."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # In a thread of its own: a Ctrl-C inside torch.save comes out as RuntimeError, or ends the process.
            with atomically(target) as stream, ThreadPoolExecutor(1) as thread:
                thread.submit(torch.save, checkpoint, stream).result()
        except (OSError, RuntimeError) as error:
            raise BadInput(
                f"{target} could not be written ({error}): free some space and continue with --resume; "
                "the checkpoint before it is untouched"
            ) from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)


def load_checkpoint(path: Path, module: nn.Module) -> dict[str, Any]:
    """A checkpoint that fits the module, read without pickle.

    Raises:
        BadInput: it cannot be read, or it is of another model.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        expected = {name: value.shape for name, value in module.state_dict().items()}
        found = {name: value.shape for name, value in checkpoint["state_dict"].items()}
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{path} is not a readable checkpoint ({reason}): remove it, or name another --out") from error
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different:
        raise BadInput(
            f"{path} is the checkpoint of another model: {different[0]} is "
            f"{list(found.get(different[0], []))} there and {list(expected.get(different[0], []))} here; "
            "name the folder of this recipe's run with --out"
        )
    return checkpoint


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.csv, none where there is no such file."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


PROGRESS_SECONDS = 60.0
"""Between the lines that tell how far a long epoch has come, where no progress bar can be drawn."""


class EpochLog(Callback):
    """One row of metrics.csv and one printed line an epoch; a resumed run goes on below the rows it keeps."""

    def __init__(
        self, path: Path, images: int, watch: Callable[[nn.Module], Mapping[str, float]] | None = None
    ) -> None:
        self.path = path
        self.images = images
        self.watch = watch
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
        if self.watch is not None:
            model = cast(nn.Module, module.model).eval()
            row |= {name: f"{value:.4f}" for name, value in self.watch(model).items()}
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


def save_reconstructions(
    model: nn.Module, preparation: Preparation, images: Images, path: Path, count: int = 10
) -> bool:
    """Draw images above their reconstructions, one column each; False for a model without a decoder."""
    from matplotlib.figure import Figure

    step = max(1, len(images) // count)
    chosen = images.subset(torch.arange(0, len(images), step)[:count])
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        inputs = preparation.plain(chosen.pixels)
        prediction = model(inputs)
    model.train(was_training)
    if prediction.reconstruction is None:
        return False
    figure = Figure(figsize=(1.1 * len(chosen), 2.9), layout="constrained")
    axes = figure.subplots(2, len(chosen), squeeze=False)
    drawn = prediction.reconstruction.clamp(0, 1)
    winners = prediction.scores.argmax(dim=1)
    for column in range(len(chosen)):
        for row, image in enumerate((inputs[column], drawn[column])):
            axis = axes[row, column]
            axis.imshow(image.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
        axes[0, column].set_title(chosen.class_names[int(chosen.labels[column])], fontsize=9)
        axes[1, column].set_xlabel(chosen.class_names[int(winners[column])], fontsize=9)
    axes[0, 0].set_ylabel("image")
    axes[1, 0].set_ylabel("reconstruction")
    with atomically(path) as stream:
        figure.savefig(stream, format="png", dpi=120)
    return True
