"""Versions, commit and hardware, which are saved with every result; numbers of processes and of cores."""

import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ENTRIES = ("versions", "commit", "processor", "threads", "gpu")
"""Entries of the result of `environment`."""


def first_process() -> bool:
    """Return whether this process is the first process of a training run. Only the first process writes and prints."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) == 0


def under_torchrun() -> bool:
    """Return whether `torchrun` has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def processes(devices: int) -> tuple[int, int]:
    """Return the number of processes per machine and the number of machines.

    Arguments:
        devices: number of processes to start on this machine. Under `torchrun`, which has started the processes
            already, `devices` is not used.
    """
    if not under_torchrun():
        return devices, 1
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return here, int(os.environ["WORLD_SIZE"]) // here


def environment() -> dict[str, Any]:
    """Return the versions of Python and the libraries, the commit, the processor, the number of threads and the GPU."""
    versions: dict[str, str | None] = {}
    for package in ("torchcaps", "torch", "lightning", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    names = (line.split(":", 1)[1].strip() for line in _cpuinfo().splitlines() if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
        "processor": processor,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def made_by_intel() -> bool:
    """Return whether the processor is made by Intel."""
    return "GenuineIntel" in (_cpuinfo() or platform.processor())


def is_terminal(stream: Any) -> bool:
    """Return whether a stream such as `sys.stdout` is a terminal. An object that replaces it may lack ``isatty``."""
    return bool(getattr(stream, "isatty", bool)())


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpuinfo() -> str:
    """Return the content of /proc/cpuinfo, or an empty string if the system does not have this file."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


@cache
def _commit() -> str | None:
    """Return the commit of the code that this process runs."""
    source = Path(__file__).resolve().parent
    git = shutil.which("git")
    if git is None or not (source.parents[1] / ".git").exists():
        return None
    run = [git, "-C", str(source)]
    head = subprocess.run([*run, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*run, "status", "--porcelain", "."], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("-modified" if changed.stdout.strip() else "") if head.returncode == 0 else None
