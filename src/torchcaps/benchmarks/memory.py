"""Benchmark of the peak memory of routing as batch size, grid size, capsule types or iterations grow."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from torchcaps.benchmarks import peak_bytes, progress
from torchcaps.benchmarks.routing import both, em_stack
from torchcaps.benchmarks.training import matrix_step
from torchcaps.pictures import STYLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROWTH: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "batch": [(batch, {"batch": batch}) for batch in (8, 16, 32, 64)],
    "sites a side": [(grid, {"grid": grid}) for grid in (8, 14, 20, 28)],
    "capsule types": [(types, {"types": (types, types, types)}) for types in (8, 16, 24, 32)],
    "iterations": [(iterations, {"iterations": iterations}) for iterations in (1, 2, 3, 5)],
}
WAYS = ("fused", "reference", "materialised votes")


def bench_memory() -> Iterator[dict[str, Any]]:
    """Measure the peak memory of routing in two ConvCaps layers of the small `MatrixCapsNet`, and of a training step.

    For routing, one forward and backward pass is measured. The batch size is 16, except where it is varied. The
    training step is that of the base `MatrixCapsNet` with a batch of 4 images of 224×224 pixels. ``peak / minimum`` is
    the peak memory divided by the memory that every implementation needs: leaf tensors (inputs and parameters),
    outputs, and the gradients of both. For this ratio, the peak includes the leaf tensors, which are allocated before
    the measurement.
    """
    for what, points in GROWTH.items():
        for value, options in points:
            progress(f"memory: {what} {value}")
            problem = em_stack(**{"batch": 16, **options})
            outputs = problem.ways["fused"]()
            leaves = sum(leaf.nbytes for leaf in problem.leaves)
            needed = 2 * (leaves + sum(x.nbytes for x in outputs))
            for way in WAYS:
                peak = peak_bytes(both(problem, problem.ways[way]))
                yield {
                    "case": what,
                    "value": value,
                    "implementation": way,
                    "peak MiB": _mib(peak),
                    "peak / minimum": round((peak + leaves) / needed, 2),
                }
    progress("memory: MatrixCapsNet base at 224×224")
    step = matrix_step("fused", batch=4, size="base", image_shape=(3, 224, 224))
    yield {
        "case": "MatrixCapsNet base, a step",
        "value": 224,
        "implementation": "fused",
        "peak MiB": _mib(peak_bytes(step)),
        "peak / minimum": "",
    }


def draw_growth(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Draw the peak memory, with one panel for each size that is varied."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, what in zip(figure.subplots(1, len(GROWTH), sharey=True), GROWTH, strict=True):
        for way, style in zip(WAYS, cycle(STYLES), strict=False):
            own = [row for row in rows if row["case"] == what and row["implementation"] == way]
            axes.plot([row["value"] for row in own], [row["peak MiB"] for row in own], label=way, **style)
        axes.set(xlabel=what, yscale="log")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("peak memory, MiB")
    figure.axes[0].legend()
    return figure


def _mib(count: int) -> float:
    return round(count / 2**20, 1)
