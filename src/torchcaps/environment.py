"""Versions, commit and hardware, which are saved with every result; numbers of processes and of cores."""

import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchcaps.errors import BadInput
from torchcaps.process_memory import control_groups

LAUNCHER = "TORCHCAPS_LAUNCHER"
"""Environment variable with the number of the process whose training has started this process."""
_LAUNCHED = os.environ.get(LAUNCHER) == str(os.getppid()) and os.environ.get("LOCAL_RANK", "0") != "0"
ENTRIES = ("versions", "commit", "processor", "threads", "gpu")
"""Entries of the result of `environment`."""


def first_process() -> bool:
    """Return whether this process is the first process of a training run. Only the first process writes and prints.

    The variables RANK and LOCAL_RANK have a meaning only if `torchrun` or a training has started this process.
    """
    return os.environ.get("RANK") == "0" if under_torchrun() else not _LAUNCHED


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
    sizes = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")}
    if wrong := [f"{name}={value}" for name, value in sizes.items() if not value.isdecimal()]:
        raise BadInput(
            f"the environment variable TORCHELASTIC_RUN_ID is set, but {wrong[0]} is not a number: unset "
            "TORCHELASTIC_RUN_ID, or start the training with torchrun"
        )
    here = int(sizes["LOCAL_WORLD_SIZE"])
    return here, int(sizes["WORLD_SIZE"]) // max(1, here)


def check_ranks() -> None:
    """Check that the variables that Lightning reads when it is imported are numbers.

    Raises:
        BadInput: RANK, LOCAL_RANK or SLURM_PROCID is set, but not a number.
    """
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise BadInput(f"the environment variable {name} is not a number; got {value!r}: unset {name}")


def check_variables(devices: int) -> None:
    """Check that no environment variable makes Lightning expect processes that nobody has started.

    Raises:
        BadInput: RANK or LOCAL_RANK is set, but neither `torchrun` nor a training has started this process.
    """
    if under_torchrun() or _LAUNCHED or os.environ.get(LAUNCHER) == str(os.getpid()):
        return
    for name in ("RANK", "LOCAL_RANK"):
        if os.environ.get(name, "0") != "0" or (name in os.environ and devices > 1):
            raise BadInput(
                f"the environment variable {name} is set, but torchrun has not started this process: unset {name}, or "
                "start the training with torchrun"
            )


def prepare_processes(devices: int) -> None:
    """Check that this process runs a script or a module, which further processes can run too; set `LAUNCHER` for them.

    Raises:
        BadInput: `devices` is above 1, but this process runs no script, and `torchrun` has not started it.
    """
    if devices == 1 or under_torchrun() or _LAUNCHED:
        return
    main = sys.modules["__main__"]
    runs_file = getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")
    if hasattr(sys, "ps1") or not runs_file:
        raise BadInput(
            f"devices must be 1 in an interactive session and in python -c; got {devices}: save the program as a "
            "script, which the other processes can run, or start it with torchrun"
        )
    os.environ[LAUNCHER] = str(os.getpid())


def environment() -> dict[str, Any]:
    """Return the versions of Python and the libraries, the commit, the processor, the number of threads and the GPU."""
    import torch

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


def changed_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how two results of `environment` differ, except for the commit; an empty string if they do not differ.

    Example:
        >>> machine = {"versions": {"torch": "2.13.0"}, "processor": "Xeon", "threads": 2, "gpu": None}
        >>> changed_environment(machine, {**machine, "threads": 4})
        'threads 2, not 4'
    """
    one, other = (
        {**machine["versions"], **{key: machine[key] for key in ("processor", "threads", "gpu")}}
        for machine in (before, now)
    )
    return "; ".join(f"{key} {one[key]}, not {other.get(key)}" for key in one if one[key] != other.get(key))


def made_by_intel() -> bool:
    """Return whether the processor is made by Intel."""
    return "GenuineIntel" in (_cpuinfo() or platform.processor())


def is_terminal(stream: Any) -> bool:
    """Return whether a stream such as `sys.stdout` is a terminal. An object that replaces it may lack ``isatty``."""
    return bool(getattr(stream, "isatty", bool)())


def available_cores() -> int:
    """Return the number of processor cores that this process may use. A container can limit it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in control_groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # ValueError: there is no limit
                quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
                cores = min(cores, math.ceil(quota / period)) if quota > 0 and period > 0 else cores
    return cores


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
