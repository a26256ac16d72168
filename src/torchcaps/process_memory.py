"""Memory of this process: available, used now, and peak; control groups, which limit memory and cores on Linux."""

import ctypes
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Folder of all control groups. Containers and job systems use these groups to limit memory and cores."""
MEMBERSHIP = Path("/proc/self/cgroup")
"""File that lists the control groups of this process."""


def control_groups(controller: str) -> list[Path]:
    """Return the folders of the control groups of this process, with those that contain them, in versions 1 and 2.

    Arguments:
        controller: ``memory`` or ``cpu``.
    """
    try:
        lines = MEMBERSHIP.read_text(errors="surrogateescape").split("\n")
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers or controller in controllers.split(","):
            root = CONTROL_GROUPS / (controller if controllers else "")
            inside = Path(path.strip("/"))
            found += [root / inside, *(root / parent for parent in inside.parents)]
    return found


def free_memory() -> int | None:
    """Return the memory in bytes that this process can still use; None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    first_version = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    versions = first_version, ("memory.max", "memory.current", "inactive_file")
    for group, (limit, used, cache) in product(control_groups("memory"), versions):
        cached = 0  # the system frees this cache of files if needed
        with suppress(OSError, ValueError):
            lines = (group / "memory.stat").read_text().splitlines()
            cached = int(next((line.partition(" ")[2] for line in lines if line.startswith(f"{cache} ")), 0))
        with suppress(OSError, ValueError):  # ValueError: the limit is "max"
            most, now = (int((group / name).read_text()) for name in (limit, used))
            free = min(free, most - now + cached)
    return free


def keep_freed_memory() -> None:
    """Keep freed memory in this process. Returning it to the operating system slows training down. Linux only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, -1)  # never trim; a positive number could be at most 2 GiB


def release_free_memory() -> bool:
    """Ask the C library to return the freed memory of this process to the operating system.

    Returns:
        True if the C library supports this, as glibc does.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)
    return trim is not None


def start_peak() -> int:
    """Reset the peak memory of the process, and return the memory in bytes that the process uses now.

    Raises:
        OSError: ``/proc`` is not available.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """Return the peak memory of the process in bytes.

    The peak counts from the last call of `start_peak`, or else from the start of the process.

    Raises:
        OSError: ``/proc`` is not available.
    """
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no entry {name}")
