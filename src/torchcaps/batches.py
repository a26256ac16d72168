"""Load batches of images, with or without worker processes.

This module does not import Lightning, because a worker process that is spawned imports this module.
"""

import math
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchcaps.data import Images, ImagesOnDisk, Preprocessing, Variation
from torchcaps.environment import available_cores
from torchcaps.errors import BadInput
from torchcaps.process_memory import release_free_memory
from torchcaps.recipe import Recipe, batch_starts


class Stored(NamedTuple):
    """A batch before its preprocessing.

    Arguments:
        pixels: images as they are stored.
        labels: their labels.
        variation: random numbers for their augmentation; None for validation and test.
    """

    pixels: UInt8[Tensor, "B C H W"]
    labels: Int64[Tensor, " B"] | Int64[Tensor, "B k"]
    variation: Variation | None


class ImageBatches(Dataset):
    """Dataset of batches: indexed with an array of image indices, it returns these images before the preprocessing.

    Arguments:
        images: the images of one split.
        preprocessing: converts the images to the model's input.
        variation: random numbers for the augmentation in one epoch; None for validation and test.
    """

    def __init__(self, images: Images, preprocessing: Preprocessing, variation: Variation | None = None) -> None:
        self.images = images
        self.preprocessing = preprocessing
        self.variation = variation

    def __getitem__(self, indices: np.ndarray) -> Stored | BadInput:
        try:
            return self.stored(indices)
        except BadInput as error:
            return error  # `Batches` raises it in the training process; a worker process would add a traceback

    def stored(self, indices: np.ndarray) -> Stored:
        """Return the images at `indices` before the preprocessing."""
        chosen = torch.from_numpy(indices)
        variation = None if self.variation is None else self.variation.of(chosen)
        return Stored(self.images.batch(chosen), self.images.labels[chosen], variation)

    def preprocessed(self, batch: Stored, device: torch.device) -> tuple[Tensor, Tensor]:
        """Preprocess a batch, and return its images and labels on a device.

        The images are preprocessed on the GPU if the device is one of NVIDIA or AMD, and otherwise on the CPU.
        """
        where = device if device.type == "cuda" else torch.device("cpu")
        pixels = batch.pixels.to(where, non_blocking=True)
        with torch.autocast(where.type, enabled=False):  # with autocast, rotations would be computed in bf16
            if batch.variation is None:
                images = self.preprocessing.views(pixels)
            else:
                images = self.preprocessing.varied(pixels, batch.variation.to(where))
        return images.to(device), batch.labels.to(device, non_blocking=device.type == "cuda")

    def load(self, indices: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the preprocessed images at `indices` and their labels on a device."""
        return self.preprocessed(self.stored(indices), device)


def split_into_batches(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Split the indices of images into batches; see `batch_starts`."""
    return np.split(order, batch_starts(len(order), batch_size)[1:])


def images_per_batch(batch_size: int, preprocessing: Preprocessing | Recipe) -> int:
    """Return the number of images of a batch for evaluation that has about `batch_size` crops."""
    return max(1, batch_size // preprocessing.test_crops**2)


class Batches(DataLoader):
    """`DataLoader` of preprocessed images and their labels.

    The worker processes only load images. The training process preprocesses them and raises the `BadInput` errors of
    the worker processes.

    Arguments:
        batches: dataset whose items are batches.
        order: indices of the images in the order in which they are loaded.
        batch_size: images per batch.
        workers: number of processes that load images. With 0, the training process loads them itself.
        device: device of the training.
    """

    def __init__(
        self, batches: ImageBatches, order: np.ndarray, batch_size: int, workers: int, device: torch.device
    ) -> None:
        parts = split_into_batches(order, batch_size)
        super().__init__(
            batches,
            sampler=parts,
            batch_size=None,
            num_workers=min(workers, len(parts)),
            pin_memory=torch.cuda.is_available(),
            # The default of Python 3.14 starts slowly, and copies images in memory to every process.
            multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
        )
        self.device = device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in self._loaded():
            if isinstance(batch, BadInput):
                raise batch
            yield cast(ImageBatches, self.dataset).preprocessed(batch, self.device)

    def _loaded(self) -> Iterator[Stored | BadInput]:
        """Load the batches in this process or in worker processes."""
        if self.num_workers:
            self._check_shared_memory()
            release_free_memory()  # otherwise, each worker process can get a copy of the freed memory
        try:
            with _same_sigchld_handler():
                batches = super().__iter__()
        except OSError as error:
            raise BadInput(
                f"{self.num_workers} worker processes cannot start ({error.strerror}): use fewer --workers, or enlarge"
                " /dev/shm"
            ) from error
        try:
            yield from batches
        except (ConnectionError, EOFError) as error:
            if not self.num_workers or str(error).startswith("Caught "):  # an error of the dataset
                raise
            raise RuntimeError("a DataLoader worker exited before its batch was read") from error

    def _check_shared_memory(self) -> None:
        """Check that the batches of all worker processes fit into shared memory. If they do not fit, torch hangs."""
        shared, loaded = Path("/dev/shm"), self.dataset
        if not shared.is_dir() or not isinstance(loaded, ImageBatches):
            return
        numbers = [part for part in (loaded.images.labels, *(loaded.variation or ())) if part is not None]
        image = math.prod(loaded.images.image_shape) + sum(part[:1].nbytes for part in numbers)
        largest = max(len(part) for part in self.sampler) * image
        needed, free = largest * self.num_workers * (self.prefetch_factor or 1), shutil.disk_usage(shared).free
        if needed > free:
            raise BadInput(
                f"{self.num_workers} worker processes need {needed / 1e6:,.0f} MB in /dev/shm, but only "
                f"{free / 1e6:,.0f} MB are free: use fewer --workers (0 needs no /dev/shm) or smaller batches, or "
                "enlarge /dev/shm"
            )


@contextmanager
def _same_sigchld_handler() -> Iterator[None]:
    """Remove the handler of SIGCHLD that PyTorch installs with the first worker processes.

    If a worker process ends early, PyTorch's handler raises RuntimeError at any line of the main thread, even while
    a file is written. Without the handler, the `DataLoader` raises this error within 5 s, when it waits for a batch.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if handler is not None:  # None: the handler is not written in Python and cannot be set again
            signal.signal(signal.SIGCHLD, handler)


def default_workers(images: Images, devices: int = 1) -> int:
    """Return the default number of worker processes per device.

    For images on disk, this is the number of cores divided by the number of devices, rounded down, but at least 1. For
    images in memory, it is 0.
    """
    return max(1, available_cores() // devices) if isinstance(images, ImagesOnDisk) else 0
