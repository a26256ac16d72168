"""Benchmarks of speed and memory. Implementations are timed in the same run and compared by their median times."""

import csv
import gc
import io
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcaps.data.files import atomically
from torchcaps.environment import environment, is_terminal
from torchcaps.errors import BadInput
from torchcaps.pictures import STYLES
from torchcaps.process_memory import peak_memory, release_free_memory, start_peak

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DEVICE", "SCALE", "compare", "draw_times", "peak_bytes", "progress", "write_csv"]

Way = Callable[[], object]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Device of the benchmarks of routing, memory and training steps."""
SCALE = 8 if DEVICE == "cuda" else 1
"""Factor on the batch size in the benchmarks of routing. A small batch would leave most of a GPU idle."""
HATCHES = ("", "///", "...", "xxx", "---")
"""Patterns of bars, which can be distinguished without their colours."""


def compare(
    case: str, ways: Mapping[str, Way], *, images: int, repeats: int, warm_ups: int = 2
) -> list[dict[str, Any]]:
    """Time several implementations of the same computation.

    The implementations take turns, so a slowdown of the machine affects all of them equally. Each time ends when the
    GPU, if there is one, has finished.

    Arguments:
        case: name of the computation.
        ways: functions to time, keyed by the name of the implementation. Ratios are relative to the first function.
        images: number of images that one call processes.
        repeats: number of timed calls per implementation.
        warm_ups: number of calls per implementation before the timing starts.

    Returns:
        One row per implementation: the median, the 10th percentile and the 90th percentile of the times in
        milliseconds; the images per second; and the median time divided by the median time of the first implementation.
        With fewer than nine repeats, the percentiles are the smallest and the largest time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm_ups + repeats):
        progress(f"{case}: {turn + 1}/{warm_ups + repeats}")
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            _wait_for_gpu()
            seconds[name].append(time.perf_counter() - start)
    rows = []
    first = statistics.median(seconds[next(iter(ways))][warm_ups:])
    for name, times in seconds.items():
        times = times[warm_ups:]
        low, *_, high = statistics.quantiles(times, n=10)  # extrapolated if there are fewer than nine times
        low, high, median = max(low, min(times)), min(high, max(times)), statistics.median(times)
        rows.append(
            {
                "case": case,
                "implementation": name,
                "median ms": round(1e3 * median, 2),
                "10 % ms": round(1e3 * low, 2),
                "90 % ms": round(1e3 * high, 2),
                "images/s": round(images / median, 1),
                "ratio": round(median / first, 2),
                "repeats": repeats,
            }
        )
    return rows


def draw_times(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw the times of `compare`, relative to the first implementation, as bars."""
    from matplotlib.figure import Figure

    cases, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("case", "implementation"))
    figure = Figure(figsize=(9, 1 + (0.1 + 0.13 * len(names)) * len(cases)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for place, (name, style, hatch) in enumerate(zip(names, cycle(STYLES), cycle(HATCHES), strict=False)):
        own = {row["case"]: row["ratio"] for row in rows if row["implementation"] == name}
        places = [cases.index(case) + place * height for case in own]
        look = {"facecolor": style["color"], "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axes.barh(places, [*own.values()], height, align="edge", label=name, **look)
        for y, ratio in zip(places, own.values(), strict=True):
            axes.text(ratio, y + height / 2, f" {ratio:.2g}", va="center", fontsize=7)
    axes.set_yticks([place + 0.4 for place in range(len(cases))], cases)
    axes.set(xlabel=f"time / {names[0]}", ylim=(len(cases), -0.2))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(names))
    return figure


def _wait_for_gpu() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def progress(line: str) -> None:
    """Print a progress message to stderr; on a terminal, each message replaces the previous one."""
    start, end = ("\r\033[K", "") if is_terminal(sys.stderr) else ("", "\n")
    print(f"{start}{line}", end=end, file=sys.stderr)


def peak_bytes(work: Way) -> int:
    """Return the peak memory during a call of `work`, minus the memory before it, in bytes.

    With a GPU, this is the memory of tensors on the GPU, otherwise the memory of this process (Linux only).

    Raises:
        BadInput: there is no GPU, and ``/proc`` or glibc's ``malloc_trim`` is not available.
    """
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    try:
        if not release_free_memory():
            raise OSError("the C library has no malloc_trim")
        before = start_peak()
        work()
        return peak_memory() - before
    except OSError as error:
        raise BadInput(
            f"peak memory cannot be measured here ({error}): run this benchmark on Linux with glibc"
        ) from error


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], command: str, *, on_cpu: bool = False) -> None:
    """Write rows to a CSV file atomically. The command, commit, hardware and versions are added to each row.

    Arguments:
        path: CSV file to write; its folder is created if absent.
        rows: rows with the same keys.
        command: command that measured the rows.
        on_cpu: whether the rows were measured on the CPU even if there is a GPU; then no GPU is named.
    """
    here = environment() | ({"gpu": None} if on_cpu else {})
    beside = {"command": command, "seed": 0, "torch": torch.__version__}
    beside |= {name: here[name] for name in ("commit", "processor", "threads", "gpu")}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*rows[0], *beside], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **beside} for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomically(path) as stream:
        stream.write(text.getvalue().encode())
