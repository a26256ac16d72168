"""Evaluation of a network on a split with Lightning."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    import lightning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torchcaps.evaluation needs lightning: pip install 'torchcaps[train]'", name=error.name
    ) from error

from torchcaps.batches import Batches, ImageBatches, default_workers, images_per_batch
from torchcaps.checks import check_integer, described
from torchcaps.classifier import Classifier
from torchcaps.data import Images, Preprocessing
from torchcaps.devices import SMALLER_BATCHES, clear_memory_errors
from torchcaps.environment import is_terminal, under_torchrun
from torchcaps.errors import BadInput, first_line
from torchcaps.recipe import PRECISIONS, Precision, Recipe, resolve_precision
from torchcaps.scores import top_5_percent
from torchcaps.threads import evaluating
from torchcaps.training_module import TrainingModule

NO_FOLDER = os.devnull
"""Root folder of the `Trainer`. In a job of SLURM, Lightning would load ``hpc_ckpt_*.ckpt`` from a real folder."""


class Evaluation(NamedTuple):
    """Result of `evaluate`.

    Arguments:
        accuracy_percent: percentage of images whose true class has the highest score.
        confusion: ``[K, K]``, number of images for each true class (row) and each predicted class (column).
        calibration_error_percent: expected calibration error; None if an image shows several classes.
        scores: ``[N, K]``, the scores of each image; None if an image shows several classes.
        top_5_percent: percentage of images whose true class has one of the five highest scores; None if there are ten
            classes or fewer, or if an image shows several classes.
    """

    accuracy_percent: float
    confusion: Int64[Tensor, "K K"]
    calibration_error_percent: float | None
    scores: Float[Tensor, "N K"] | None
    top_5_percent: float | None = None


@clear_memory_errors(SMALLER_BATCHES)
def evaluate(
    model: nn.Module | Classifier,
    images: Images,
    preprocessing: Preprocessing | None = None,
    *,
    batch_size: int = 128,
    precision: Precision = "auto",
    loss: str = "",
    workers: int | None = None,
) -> Evaluation:
    """Compute the accuracy and the confusion matrix of a model on a split, using one device.

    At the end, the model is on the device where it was before.

    Arguments:
        model: a `Classifier`, a model of `MODELS`, or a `MeanScores` of several models.
        images: images of the split.
        preprocessing: conversion of the images to the model's input. By default, the preprocessing of the
            `Classifier`; for a model, the whole image with pixels in [0, 1].
        batch_size: images per batch. The result does not depend on it, except for rounding errors.
        precision: ``bf16``, ``float32`` or ``auto``. ``auto`` uses bf16 on hardware that computes convolutions
            faster in bf16, else float32.
        loss: name of the loss of the training, for the calibration error (see `torchcaps.scores.probabilities`).
        workers: number of worker processes that read and decode images. The default is 0, or, for images on disk, the
            number of cores.

    Raises:
        BadInput: `images` is not an `Images` or is empty, or does not fit the classifier or the model's number of
            classes; another thread trains the model; `precision` is unknown; `workers` is negative; a score is not
            finite; or the memory runs out.
        KeyboardInterrupt: the evaluation was interrupted, for example by Ctrl-C.
    """
    if workers is not None:
        check_integer("workers", workers, 0, error=BadInput)
    if not isinstance(images, Images) or not len(images):
        got = images if isinstance(images, Images) else described(images)
        raise BadInput(f"images must be a torchcaps.data.Images with at least one image; got {got}")
    if isinstance(model, Classifier):
        for name, expected in (("class_names", model.class_names), ("image_shape", model.image_shape)):
            if tuple(getattr(images, name)) != tuple(expected):
                raise BadInput(
                    f"{name} of the images is {getattr(images, name)}, but {expected} in the classifier: evaluate "
                    "images that fit the classifier"
                )
        preprocessing = preprocessing or model.preprocessing
        model = model.model
    classes = getattr(model, "options", {}).get("num_classes", len(images.class_names))
    if classes != len(images.class_names):
        raise BadInput(
            f"the model has {classes} classes, but the images have {len(images.class_names)} class names: evaluate "
            "images with the classes of the training"
        )
    module = TrainingModule(model, Recipe("evaluate", "", "", batch_size=batch_size, loss=loss or "margin"), classes)
    trainer = lightning.Trainer(
        devices=1,
        precision=PRECISIONS[resolve_precision(precision)],  # type: ignore[arg-type]
        plugins=cluster(),
        default_root_dir=NO_FOLDER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=is_terminal(sys.stdout),
        enable_model_summary=False,
    )
    preprocessing = preprocessing or Preprocessing()
    batches = ImageBatches(images, preprocessing)
    workers, runs_on = default_workers(images) if workers is None else workers, trainer.strategy.root_device
    loader = Batches(batches, np.arange(len(images)), images_per_batch(batch_size, preprocessing), workers, runs_on)
    device = next((weights.device for weights in model.parameters()), torch.device("cpu"))
    try:
        with evaluating(model):
            accuracy = accuracy_on(trainer, module, loader, "use fewer --workers or smaller batches (--batch-size)")
    finally:
        model.to(device)  # Lightning has moved it to the CPU
    scores = None if module.scored is None else module.scored[:, :-1]
    top_5 = None if scores is None or classes <= 10 else top_5_percent(scores, images.labels)
    return Evaluation(accuracy, module.tested, module.calibration_error_percent(), scores, top_5)


def cluster() -> list[Any]:
    """Return a plugin for the `Trainer` which ignores cluster variables other than those of `torchrun`.

    In a job of SLURM, Lightning would otherwise write checkpoints to the working directory on SIGUSR1, and ask for the
    job to be started again.
    """
    return [] if under_torchrun() else [LightningEnvironment()]


class OwnHandler(Callback):
    """Keeps the process's own handler of SIGTERM, such as that of the command line, if several processes train.

    Lightning's handler would wait for the other processes, which may not have received the signal.
    """

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if trainer.world_size > 1 and callable(self.handler) and in_main_thread:
            signal.signal(signal.SIGTERM, self.handler)

    def on_test_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.on_train_start(trainer, pl_module)


@contextmanager
def clear_errors(trainer: lightning.Trainer, cure: str) -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C and SIGTERM, and BadInput if a worker process ends.

    On Ctrl-C, Lightning raises SystemExit(1), or ValueError if the trainer does not run in the main thread, and ignores
    further signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
        if trainer.received_sigterm:  # in the last batch
            raise KeyboardInterrupt
    except (SystemExit, ValueError) as error:
        own = getattr(error, "code", None) == 1 or "signal only works in main thread" in str(error)
        if isinstance(error, SIGTERMException) or (own and isinstance(error.__context__, KeyboardInterrupt)):
            raise KeyboardInterrupt from error
        raise
    except RuntimeError as error:
        if trainer.received_sigterm:  # which can also have ended the worker processes
            raise KeyboardInterrupt from error
        if not any(
            text in str(error) for text in ("DataLoader worker", "Too many open files", "allocate shared memory")
        ):
            raise
        guard = "" if sys.platform == "linux" else '. A script must train below `if __name__ == "__main__":`'
        raise BadInput(
            f"a worker process ended while it decoded images ({first_line(error)}), perhaps because memory ran out: "
            f"{cure}{guard}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, handler)


def accuracy_on(trainer: lightning.Trainer, module: TrainingModule, batches: DataLoader, cure: str) -> float:
    """Test the module on batches with Lightning, and return the accuracy in per cent."""
    with clear_errors(trainer, cure):
        return trainer.test(module, batches, verbose=False)[0]["test_accuracy_percent"]
