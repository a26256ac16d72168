"""Gritzman 2019 (arXiv 1907.00652), figure 5: contribution of each correction to EM routing."""

import re
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from torchcaps.data import Images
from torchcaps.errors import Diverged
from torchcaps.experiments.study import Outcome, Row, Study, accuracy_of, part, some
from torchcaps.pictures import STYLES

ITERATIONS = (1, 2, 3)
PAPER = {1: "86.2", 2: "95.4", 3: "93.7"}
UNNORMALISED: dict[str, Any] = {"normalise_data": False, "inverse_temperature": 0.01, "initial_beta_a": -1500.0}
"""Options that switch off `normalise_data` of `EMRouting` and set the paper's inverse temperature, λ = 0.01.

With `normalise_data`, λ is 1 and β_a starts at -15. Here β_a starts at -1500, so that the initial λ β_a is -15 too.
"""
OFF: dict[str, dict[str, Any]] = {
    "all corrections": {},
    "no variance floor": {"variance_floor": 0.0},
    "data not normalised": UNNORMALISED,
    "competition over types alone": {"competition": "types"},
    "no correction": {"variance_floor": 0.0, "competition": "types", **UNNORMALISED},
}


def run(study: Study) -> Outcome:
    """Switch off each correction in turn, and then all corrections together, for one to three routing iterations."""
    images, epochs = study.choose((1_000, 2), (6_000, 6), (21_870, 20))
    rows, broken = [], []
    curves: dict[tuple[int, str], list[float]] = {}
    for iterations in ITERATIONS:
        for name, options in OFF.items():
            chosen = []
            for seed in range(study.seeds):
                routing = {"iterations": iterations, **options}
                recipe = study.recipe(
                    study.toys("matrix-capsnet"), seed, images=images, epochs=epochs, routing_options=routing
                )
                splits = study.splits(recipe, images, study.choose(1_000, 4_000, None))
                folder = part(f"T = {iterations}, {name}", seed)

                def watch(model: nn.Module, test: Images = splits.test, recipe=recipe) -> dict[str, float]:
                    return {"test_accuracy_percent": accuracy_of(model, some(test, 2_000), recipe.preprocessing())}

                try:
                    chosen.append(study.trained(folder, recipe, splits, watch)[1]["test_accuracy_percent"])
                except Diverged as error:
                    cause = error.__cause__ if isinstance(error.__cause__, Diverged) else error
                    reason = re.split(r"; | \(", cause.reason)[0]
                    broken.append(f"T = {iterations}, {name}, seed {seed} diverged: {reason}.")
                every = [value for (value,) in study.epoch_metrics(folder, "test_accuracy_percent")]
                curves.setdefault((iterations, name), every)
            paper = PAPER[iterations] if name == "all corrections" else None
            rows += [Row(f"T = {iterations}, {name}: accuracy", chosen, paper)] if chosen else []
    notes = [
        f"Trained on {images:,} images for {epochs} epochs, tested on {len(splits.test):,} images. The reported epoch "
        "is chosen on the validation split. The figure shows the test accuracy of every epoch, which is not used to "
        "choose the reported epoch.",
        "The variance floor is 0.01; Gritzman's is 0.0001. In the rows without normalisation of the data, the inverse "
        "temperature is the paper's, λ = 0.01.",
    ]
    return Outcome(rows, draw(curves), [*notes, *broken, *study.notes_on_toys()])


def draw(curves: dict[tuple[int, str], list[float]]) -> Figure:
    """Draw the test accuracy over epochs, one panel per number of iterations."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(ITERATIONS), sharey=True)
    for axis, iterations in zip(axes, ITERATIONS, strict=True):
        for name, style in zip(OFF, STYLES, strict=True):
            values = curves[iterations, name]
            axis.plot(range(1, len(values) + 1), values, markersize=4, label=name, **style)
        axis.set_title(f"T = {iterations}")
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("test accuracy %")
    axes[-1].legend(fontsize=7)
    return figure
