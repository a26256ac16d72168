"""Estimate the memory and the time of a training run from a few real steps."""

import gc
import json
import shlex
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import numpy as np
import torch
from torch import nn

from torchcaps.batches import ImageBatches, default_workers
from torchcaps.compilation import CALLS, compiling
from torchcaps.data import DATASETS, Splits
from torchcaps.devices import SMALLER_BATCHES, clear_memory_errors, training_device
from torchcaps.environment import processes
from torchcaps.errors import DataWarning
from torchcaps.process_memory import peak_memory, release_free_memory, start_peak
from torchcaps.recipe import Recipe, batch_starts
from torchcaps.split_batches import SplitBatches
from torchcaps.training_module import TrainingModule, images_for_batch_norms

MOST_STEPS = 6
"""Largest number of steps whose time is measured, after a step to warm up."""
BUDGET_SECONDS = 2.0
"""No further step is measured after this many seconds."""
PATIENCE_SECONDS = 10.0
"""A message is printed if the measurement takes longer than this number of seconds."""


MOST_PARAMETERS, MOST_SECONDS = 30_000_000, 4 * 3600
"""`print_estimate` warns if a CapsNet has more than ``MOST_PARAMETERS`` parameters. On your own images, it also
warns if the training of a CapsNet takes more than ``MOST_SECONDS`` seconds."""


@dataclass(frozen=True)
class Estimate:
    """Expected memory and time of a training run.

    Arguments:
        parameters: number of parameters.
        memory_bytes: peak memory of each process; on GPUs, peak memory of each device. 0 if it cannot be measured, as
            on Windows.
        state_bytes: the part of ``memory_bytes`` for the weights, their gradients and the state of the optimiser.
        step_bytes: the part of ``memory_bytes`` for everything else in a training step, mainly activations.
        epoch_seconds: time of an epoch, including validation and the BatchNorm statistics for it.
        seconds: time of all epochs that are left, and of the evaluation after the last epoch.
        devices: number of processes that train together.
        workers: number of worker processes that load images, over all devices. ``memory_bytes`` does not include their
            memory.

    Example:
        >>> found = Estimate(8_200_000, 10**9, 131_200_000, 300_000_000, 90.0, 900.0)
        >>> print(found.text(10, datetime(2026, 1, 1, 23, 50)))
        8,200,000 parameters; memory about 1.0 GB, including 131 MB for weights, gradients and optimiser and 300 MB
        for a training step
        about 90 s per epoch; epochs left: 10; training ends at about 2026-01-02 00:05
    """

    parameters: int
    memory_bytes: int
    state_bytes: int
    step_bytes: int
    epoch_seconds: float
    seconds: float
    devices: int = 1
    workers: int = 0

    def text(self, epochs: int, now: datetime) -> str:
        """Describe the estimate in two lines.

        Arguments:
            epochs: number of epochs that are left.
            now: time at which the training starts.
        """
        end = now + timedelta(seconds=self.seconds)
        clock = f"{end:%H:%M}" if end.date() == now.date() else f"{end:%Y-%m-%d %H:%M}"
        each = f" in each of {self.devices} processes" if self.devices > 1 else ""
        more = f"; {self.workers} worker processes need additional memory" if self.workers else ""
        memory = f"memory about {_size(self.memory_bytes)}{each}" if self.memory_bytes else "memory unknown"
        return (
            f"{self.parameters:,} parameters; {memory}, including {_size(self.state_bytes)} for weights, gradients and "
            f"optimiser and {_size(self.step_bytes)} for a training step{more}\n"
            f"about {duration(self.epoch_seconds)} per epoch; epochs left: {epochs}; training ends at about {clock}"
        )


@clear_memory_errors(SMALLER_BATCHES)
def estimate(
    module: TrainingModule,
    splits: Splits,
    epochs: int,
    *,
    devices: int = 1,
    workers: int = 0,
    test: bool = True,
    say: Callable[[str], None] = print,
) -> Estimate:
    """Estimate the memory and the time of a training run: run a few training steps on a copy of the module.

    The steps use real batches. The module and the random state of PyTorch are not changed, so the trained weights are
    bit-identical with and without an estimate. After a warm-up step, steps are measured until about two seconds have
    passed, but at most six steps. If the warm-up step takes longer than two seconds on a CPU, its time is used instead.
    On a GPU, the warm-up step includes the compilation of kernels, so its time is never used, and validation is timed
    in its second run. If the recipe compiles the network, the first three steps are the warm-up.

    On a CPU, the estimated memory is the resident memory of the process: Python and its libraries, the images of all
    splits, weights, gradients, the state of the optimiser, and everything that a step allocates. On a GPU, the
    estimated memory is everything that PyTorch allocates on the device. The estimated time does not include the writing
    of checkpoints.

    Arguments:
        module: model, loss and recipe, before the training.
        splits: training, validation and test images.
        epochs: number of epochs that are left.
        devices: number of processes that train together. The estimate itself runs in one process.
        workers: number of worker processes that load images, over all devices. They are not started for the estimate.
        test: whether the test images are evaluated after the last epoch.
        say: function that is called with a message if the estimate takes longer than ten seconds.

    Raises:
        BadInput: the memory runs out, or PyTorch cannot compile the network.
    """
    recipe = module.recipe
    kind = training_device().type
    generators = [torch.cuda.current_device()] if kind == "cuda" else []
    with torch.random.fork_rng(generators), _message_if_slow(say), compiling() if recipe.compile else nullcontext():
        held = _start_memory(kind)
        copy = deepcopy(module).to(kind).train()
        steps = _Steps(copy, splits, devices, kind)
        seconds = [steps.train() for _ in range(CALLS if recipe.compile else 1)][-1:]
        weights = sum(one.nbytes for one in copy.state_dict().values())
        gradients = sum(one.nbytes for one in copy.parameters() if one.requires_grad)
        states = (value for state in steps.optimizer.state.values() for value in state.values())
        optimizer = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        start = time.perf_counter()
        while (kind != "cpu" or recipe.compile or seconds[0] < BUDGET_SECONDS) and len(seconds) <= MOST_STEPS:
            seconds.append(steps.train())
            if time.perf_counter() - start > BUDGET_SECONDS:
                break
        if kind != "cpu":
            steps.validate()
        per_image = steps.validate()
    step = statistics.median(seconds[1:] or seconds)
    starts = len(batch_starts(len(splits.train) // devices, recipe.batch_size // devices))
    epoch = starts * step + len(splits.validation) * per_image / devices
    epoch += images_for_batch_norms(copy, recipe, len(splits.train)) * per_image
    images = (len(splits.validation) + (len(splits.test) if test else 0)) * recipe.test_crops**2
    return Estimate(
        parameters=sum(one.numel() for one in module.model.parameters()),
        memory_bytes=steps.peak and steps.peak + optimizer,
        state_bytes=weights + gradients + optimizer,
        step_bytes=max(0, steps.peak - held - weights - gradients),
        epoch_seconds=epoch,
        seconds=epochs * epoch + images * per_image / devices,
        devices=devices,
        workers=workers,
    )


def print_estimate(
    module: TrainingModule,
    epochs: int,
    *,
    splits: Splits,
    devices: int = 1,
    workers: int | None = None,
    test: bool = True,
) -> None:
    """Print an estimate of the memory and the time of a training run.

    Arguments:
        module: model, loss and recipe, before the training.
        epochs: number of epochs that are left.
        splits: training, validation and test images.
        devices: number of processes that train together on this machine.
        workers: number of worker processes per training process that load images; None for the default of `fit`.
        test: whether the test images are evaluated after the last epoch.

    Warns:
        DataWarning: a CapsNet has more than 30 million parameters, or is expected to train on your own images for more
            than four hours.
    """
    parameters = sum(one.numel() for one in module.model.parameters())
    if parameters > MOST_PARAMETERS:
        _warn_of_large_images(module.recipe, splits, parameters, "")
    here, machines = processes(devices)
    workers = here * machines * (default_workers(splits.train, here) if workers is None else workers)
    sizes = {"devices": here * machines, "workers": workers}
    found = estimate(module, splits, epochs, **sizes, test=test, say=partial(print, flush=True))
    gc.collect()  # the module that the estimate has trained is part of a reference cycle
    release_free_memory()  # the training would add its memory to the memory of the estimate
    print(found.text(epochs, datetime.now()), flush=True)
    if parameters <= MOST_PARAMETERS and found.seconds > MOST_SECONDS and module.recipe.data not in DATASETS:
        _warn_of_large_images(module.recipe, splits, parameters, f" and trains for about {duration(found.seconds)}")


def _warn_of_large_images(recipe: Recipe, splits: Splits, parameters: int, time_taken: str) -> None:
    """If the model is a CapsNet, warn that it is too large for the images, and suggest smaller networks."""
    _, height, width = splits.train.image_shape
    if recipe.model != "capsnet":
        return
    words = ["torchcaps", "train", "residual-capsnet-images", "--data", recipe.data]
    for name, value in recipe.data_options.items():
        words += ["--set", f"data.{name}={json.dumps(value, separators=(',', ':'))}"]
    stem = "" if recipe.model_options.get("stem") else "add --set model.stem=true or "
    warnings.warn(
        f"CapsNet has {parameters:,} parameters on images of {height}×{width} pixels{time_taken}, because it has "
        f"separate weights for each position of the image. To keep CapsNet, {stem}choose a smaller data.image_size. "
        f"Or train a network that shares weights between positions: `{shlex.join(words)}`",
        DataWarning,
        stacklevel=2,
    )


class _Steps:
    """Runs training steps on the first batches of an epoch, and a validation step."""

    def __init__(self, module: TrainingModule, splits: Splits, devices: int, kind: str) -> None:
        self.module, self.kind, recipe = module, kind, module.recipe
        self.optimizer: torch.optim.Optimizer = module.configure_optimizers()["optimizer"]
        self.size = max(1, recipe.batch_size // devices)
        self.batches, self.order = SplitBatches(splits, recipe).epoch(0)
        self.validation = ImageBatches(splits.validation, recipe.preprocessing())
        self.next = self.peak = 0

    def train(self) -> float:
        """Run one training step and return its time in seconds."""
        start = time.perf_counter()
        chosen = self.order[self.next : self.next + self.size]
        self.next = self.next + self.size if self.next + 2 * self.size <= len(self.order) else 0
        images, labels = self.batches.load(chosen, torch.device(self.kind))
        self.optimizer.zero_grad()
        with self.module.autocast(self.kind):
            loss, _ = self.module.loss_and_scores(images, labels, train=True)
        loss.backward()
        self.peak = self.peak or _peak_memory(self.kind)  # later peaks include the state of the optimiser
        if clip := self.module.recipe.gradient_clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        self.optimizer.step()
        loss.item()  # waits until a GPU has finished the step
        return time.perf_counter() - start

    def validate(self) -> float:
        """Run the model on one batch of validation images, and return the time in seconds per image."""
        self.module.eval()
        start = time.perf_counter()
        first = np.arange(min(self.size, len(self.validation.images)))
        views, labels = self.validation.load(first, torch.device(self.kind))
        with torch.no_grad(), self.module.autocast(self.kind):
            loss, _ = self.module.loss_and_scores(views[0], labels, train=False)
        loss.item()
        return (time.perf_counter() - start) / len(labels)


def duration(seconds: float) -> str:
    """Format a time as seconds, minutes or hours, depending on its length.

    Example:
        >>> duration(0.2), duration(95.0), duration(900.0), duration(30_000.0)
        ('1 s', '95 s', '15 min', '8.3 hours')
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 999_500_000 else f"{count / 1e6:.0f} MB"


def _start_memory(kind: str) -> int:
    """Start to measure the peak memory, and return the memory in bytes that is in use now."""
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    release_free_memory()
    try:
        return start_peak()
    except OSError:
        return _peak_memory(kind)


def _peak_memory(kind: str) -> int:
    if kind == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        return peak_memory()
    except OSError:
        if sys.platform == "win32":
            return 0
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def _message_if_slow(say: Callable[[str], None]) -> Iterator[None]:
    text = "measuring a few training steps to estimate the time takes more than ten seconds; please wait"
    timer = threading.Timer(PATIENCE_SECONDS, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
