"""Devices of a training run: their number, deterministic algorithms, the process group, errors if memory runs out."""

import atexit
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from torchcaps.data import Splits
from torchcaps.environment import check_variables, processes
from torchcaps.errors import BadInput
from torchcaps.recipe import Recipe
from torchcaps.threads import Shared

SMALLER_BATCHES = "use smaller batches (--batch-size), or free memory"
"""Cure in an error message if the memory runs out."""


def check_devices(devices: int, recipe: Recipe) -> None:
    """Check that every batch can be split evenly among the processes, and that every process has a GPU if there is one.

    Raises:
        BadInput: `devices` is below 1, does not divide the batch size, or is larger than the number of GPUs; the
            recipe compiles the network and `devices` is above 1; or the environment variables RANK or LOCAL_RANK are
            set, although `torchrun` has not started this process.
    """
    check_variables(devices)
    here, together = processes(devices)[0], math.prod(processes(devices))
    if recipe.compile and together > 1:
        raise BadInput(f"devices must be 1 with compile=true; got {together}: use one device, or set compile=false")
    if together < 1 or recipe.batch_size % together:
        raise BadInput(f"devices must be a divisor of the batch size {recipe.batch_size}; got {together}")
    if torch.cuda.is_available() and here > (gpus := torch.cuda.device_count()):
        raise BadInput(f"devices must be at most {gpus}, the number of GPUs of this machine; got {here}")


def training_device() -> torch.device:
    """Return the device on which a training in one process runs."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def check_shares(splits: Splits, devices: int) -> None:
    """Check that every split has at least one image for each process.

    Raises:
        BadInput: a split has fewer images than there are processes.
    """
    together = math.prod(processes(devices))
    for name, images in vars(splits).items():
        if not len(images):
            raise BadInput(f"the {name} split has no images: add images to each class")
        if len(images) < together:
            raise BadInput(f"devices must be at most {len(images)}, the size of the {name} split; got {together}")


@contextmanager
def reproducible() -> Iterator[None]:
    """Use deterministic algorithms, and restore the settings of PyTorch at the end.

    The settings hold for all threads of the process. If several threads train, they are restored when the last training
    ends. The environment variable CUBLAS_WORKSPACE_CONFIG stays set, because PyTorch reads it only once.

    An operation without a deterministic algorithm causes a warning of PyTorch. It causes an error if the user has
    called ``torch.use_deterministic_algorithms(True)`` before. Uninitialised memory is not filled, although this is
    PyTorch's default with deterministic algorithms: filling takes time, and torchcaps never reads such memory.
    """
    with _SETTINGS():
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    from torch._inductor import config

    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # PyTorch can read it only at the first matrix product
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    attention = _attention_algorithms() if torch.cuda.is_available() else {}
    compiling = getattr(config, "deterministic", None)  # the next lines change it, but not in old versions of PyTorch
    options: Any = torch.utils.deterministic
    filling, timing = options.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only or not enabled)
        for enable in attention:
            enable(False)
        options.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        for enable, before in attention.items():
            enable(before)
        options.fill_uninitialized_memory = filling
        torch.backends.cudnn.benchmark = timing
        if compiling is not None:
            config.deterministic = compiling


_SETTINGS = Shared(_deterministic)


def _attention_algorithms() -> dict[Callable[[bool], None], bool]:
    """Return functions that switch attention algorithms on or off, each with its present state.

    The gradients of these algorithms are not deterministic if PyTorch only warns.
    """
    cuda = torch.backends.cuda
    return {
        cuda.enable_flash_sdp: cuda.flash_sdp_enabled(),
        cuda.enable_mem_efficient_sdp: cuda.mem_efficient_sdp_enabled(),
        cuda.enable_cudnn_sdp: cuda.cudnn_sdp_enabled(),
    }


@contextmanager
def process_group_closed_at_exit() -> Iterator[None]:
    """Close PyTorch's process group when Python exits, if the body succeeds and there is a process group.

    Without this, a thread of the gloo backend may still hold tensors while Python shuts down. The process is then
    aborted, and Lightning kills the processes that still write results. After an error, the group stays open, because
    closing it would wait for the other processes.
    """
    atexit.unregister(_close_process_group)
    yield
    if distributed.is_available() and distributed.is_initialized():
        atexit.register(_close_process_group)


def _close_process_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of error messages if the memory of a GPU runs out."""
OUT_OF_CPU_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc")
"""Parts of error messages if the memory of the CPU runs out."""


def is_memory_error(error: BaseException) -> bool:
    """Return whether the memory of a GPU or of the CPU ran out."""
    parts = (*OUT_OF_MEMORY, *OUT_OF_CPU_MEMORY)
    known = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in str(error) for part in parts)
    return known and "pin memory" not in str(error)  # pinned memory is not the memory of the GPU


@contextmanager
def clear_memory_errors(cure: str) -> Iterator[None]:
    """Raise `BadInput` if the memory of a GPU or of the CPU runs out.

    Arguments:
        cure: what the user can do.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_memory_error(error):
            raise
        on_cpu = isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_CPU_MEMORY)
        raise BadInput(f"the memory of the {'CPU' if on_cpu else 'GPU'} ran out: {cure}") from error
