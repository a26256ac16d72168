"""Parts of Lightning's trainer that write the run folder: metrics.csv and checkpoints.

They are apart from `run_folder` and `checkpoints`, so that commands that only read a run start without Lightning.
"""

import csv
import io
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import lightning
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from torch import nn

from torchcaps.checkpoints import read_checkpoint, save_sealed
from torchcaps.checks import described
from torchcaps.data.files import atomically
from torchcaps.errors import BadInput
from torchcaps.estimate import duration
from torchcaps.run_folder import read_rows
from torchcaps.threads import evaluating

PROGRESS_SECONDS = 10.0
"""Seconds between two printed lines of progress within an epoch, if there is no progress bar."""


class AtomicCheckpoints(TorchCheckpointIO):
    """Lightning plugin that writes each checkpoint to a temporary file, which is then renamed.

    The checksum is verified at every read.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # torch.save runs in a thread, because Ctrl-C inside torch.save raises RuntimeError or ends the process.
        with atomically(target) as stream, ThreadPoolExecutor(1) as thread:
            thread.submit(save_sealed, checkpoint, stream).result()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)  # Lightning would also remove a folder


class RunCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that keeps its best score if the run folder is renamed, copied or mounted elsewhere.

    Lightning's own callback forgets the best score if the path of the folder has changed. This class
    replaces the old folder with the new folder in all saved paths. It ignores paths of other files, which
    a changed checkpoint could contain, because Lightning removes the files at these paths.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        def here(path: str) -> str:
            name = Path(path).name
            return str(Path(self.dirpath or "") / name) if name in ("best.ckpt", "last.ckpt") else ""

        moved: dict[str, Any]
        moved = {key: here(state_dict[key]) for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
        moved["dirpath"] = self.dirpath
        moved["best_k_models"] = {
            path: score for before, score in state_dict["best_k_models"].items() if (path := here(before))
        }
        super().load_state_dict({**state_dict, **moved})


class ProgressBar(RichProgressBar):
    """Lightning's progress bar, which counts epochs from 1, as the printed lines do, and shows no metrics."""

    def __init__(self) -> None:
        super().__init__(leave=False)

    def _get_train_description(self, current_epoch: int) -> str:
        return f"epoch {current_epoch + 1}/{self.trainer.max_epochs}"

    def get_metrics(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> dict[str, Any]:
        return {}


class EpochLog(Callback):
    """Callback that writes one row of metrics.csv and prints one line per epoch.

    When a run is resumed, the rows of its earlier epochs are kept.

    Arguments:
        path: path of metrics.csv.
        images: number of training images.
        measure: function that takes the model, in evaluation mode, and is called after every epoch. If the function
            returns values, they are added to the row and given to the logger.
        evaluated: number of images on which the network runs between two epochs: the validation images, and the images
            for the statistics of BatchNorm. The time of this evaluation is estimated until the first epoch has ended.
    """

    def __init__(
        self,
        path: Path,
        images: int,
        measure: Callable[[nn.Module], Mapping[str, float] | None] | None = None,
        evaluated: int = 0,
    ) -> None:
        self.path = path
        self.images = images
        self.evaluated = evaluated
        self.measure = measure
        self.rows: list[dict[str, Any]] = []
        self.start = self.printed = self.train_seconds = self.learning_rate = 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        rows = read_rows(self.path)
        self.rows = [row for row in rows if int(row["epoch"]) <= trainer.current_epoch]
        if len(self.rows) < len(rows) and trainer.is_global_zero:
            self._write()

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.start = self.printed = time.perf_counter()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, batch: Any, batch_index: int
    ) -> None:
        self.learning_rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: Any, batch_index: int
    ) -> None:
        now = time.perf_counter()
        self.train_seconds = now - self.start
        if trainer.is_global_zero and trainer.progress_bar_callback is None and now - self.printed > PROGRESS_SECONDS:
            self.printed = now
            steps = int(trainer.num_training_batches)
            done = (batch_index + 1) / steps
            epochs = (trainer.max_epochs or 0) - trainer.current_epoch
            training = self.train_seconds / done  # of an epoch
            left = training * (epochs - done) + self._seconds_of_evaluation(training) * epochs
            print(
                f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  step {batch_index + 1}/{steps}  "
                f"{done * self.images / self.train_seconds:.0f} images/s  {duration(left)} left",
                flush=True,
            )

    def _seconds_of_evaluation(self, training: float) -> float:
        """Return the time between two epochs, given the time of the training steps of one epoch."""
        if not self.rows:  # a forward pass takes about a third of a training step
            return training * self.evaluated / (3 * self.images)
        last = self.rows[-1]
        return max(0.0, float(last["seconds"]) - self.images / float(last["train_images_per_second"]))

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        seen = trainer.callback_metrics
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch + 1,
            "train_loss": f"{float(seen['train_loss']):.6f}",
            "validation_loss": f"{float(seen['validation_loss']):.6f}",
            "validation_accuracy_percent": f"{float(seen['validation_accuracy_percent']):.4f}",
            "validation_recall_percent": f"{float(seen['validation_recall_percent']):.4f}",
            "learning_rate": f"{self.learning_rate:.8f}",
            "train_images_per_second": f"{self.images / self.train_seconds:.2f}",
            "seconds": f"{time.perf_counter() - self.start:.2f}",
        }
        logged = {"learning_rate": self.learning_rate}
        if self.measure is not None:
            model = cast(nn.Module, module.model)
            with evaluating(model):
                measured = self.measure(model) or {}
            row |= _checked_columns(measured, row)
            logged |= {str(name): float(value) for name, value in measured.items()}
        for logger in trainer.loggers:  # `module.log` would mix the names with those of the module, such as "step"
            logger.log_metrics({**logged, "epoch": trainer.current_epoch}, step=trainer.global_step - 1)
        self.rows.append(row)
        self._write()
        left = float(row["seconds"]) * ((trainer.max_epochs or 0) - trainer.current_epoch - 1)
        weighted = getattr(module, "class_weights", None) is not None
        recall = f"mean recall {float(row['validation_recall_percent']):.2f} %  " if weighted else ""
        margins = cast(list[float], getattr(module, "margins_per_epoch", list)())
        margin = f"margin {margins[trainer.current_epoch]:.2f}  " if margins else ""  # the loss rises with the margin
        print(
            f"epoch {row['epoch']}/{trainer.max_epochs}  loss {row['train_loss']}  {margin}"
            f"validation accuracy {float(row['validation_accuracy_percent']):.2f} %  {recall}"
            f"{float(row['train_images_per_second']):.0f} images/s" + (f"  {duration(left)} left" if left else ""),
            flush=True,
        )

    def _write(self) -> None:
        text = io.StringIO()
        names = dict.fromkeys(name for row in self.rows for name in row)
        table = csv.DictWriter(text, [*names], lineterminator="\n")
        table.writeheader()
        table.writerows(self.rows)
        with atomically(self.path) as stream:
            stream.write(text.getvalue().encode())


def _checked_columns(measured: Any, row: Mapping[str, Any]) -> dict[str, str]:
    """Check and format the values that `on_epoch_end` returned for additional columns of metrics.csv."""
    try:
        values = {name: f"{float(value):.4f}" for name, value in measured.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise BadInput(
            f"on_epoch_end must return a dictionary of numbers or None; got {described(measured)}"
        ) from error
    if known := [name for name in values if name in row]:
        raise BadInput(f"on_epoch_end returned {known[0]!r}, a column that metrics.csv already has: use another name")
    return values
