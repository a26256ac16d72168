"""Iterations and decoder of CapsNet beside the baseline CNN: Sabour, Frosst & Hinton 2017, table 1, MNIST."""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from torchcaps.experiments.study import NARROW_CAPSNET, NARROW_CNN, Outcome, Row, Study, part
from torchcaps.recipe import Recipe

PAPER = {
    "baseline CNN": "99.61",
    "T = 1, no decoder": "99.66 ± 0.03",
    "T = 1, decoder": "99.71 ± 0.01",
    "T = 3, no decoder": "99.65 ± 0.04",
    "T = 3, decoder": "99.75 ± 0.01",
}
EPOCHS = {"quick": 3, "standard": 8, "paper": 50}


def recipe_of(study: Study, name: str, seed: int) -> Recipe:
    """The recipe of one row: nets of half the width but at `paper`, on the 5,000 embedded digits at `quick`."""
    reduced = study.budget != "paper"
    epochs, small = EPOCHS[study.budget], "-5k" if study.budget == "quick" else ""
    if name == "baseline CNN":
        options: dict[str, Any] = NARROW_CNN if reduced else {}
        recipe = study.recipe("cnn-baseline-mnist", seed, images=60_000, epochs=epochs, **options)
        return replace(recipe, data=f"mnist{small}", decay_steps=recipe.decay_steps if not small else 16)
    options = {"iterations": int(name[4]), "decoder": name.endswith("no decoder") is False}
    options |= NARROW_CAPSNET if reduced else {}
    recipe = study.recipe(f"capsnet-mnist{small}", seed, images=60_000, epochs=epochs, **options)
    return recipe if options["decoder"] else replace(recipe, reconstruction_weight=0.0)


def run(study: Study) -> Outcome:
    """Every row of the table, each trained from the start."""
    found: dict[str, list[float]] = {name: [] for name in PAPER}
    for seed in range(study.seeds):
        for name, values in found.items():
            recipe = recipe_of(study, name, seed)
            values.append(study.trained(part(name, seed), recipe, study.splits(recipe))[1]["test_accuracy_percent"])
    rows = [Row(f"{name}: accuracy", values, PAPER[name]) for name, values in found.items()]
    notes = {
        "quick": "3,600 digits of MNIST's training split, tested on 1,000 others of them; nets of half the paper's "
        "width, the CNN of an eighth; three epochs.",
        "standard": "Nets of half the paper's width, the CNN of an eighth; eight epochs.",
        "paper": "",
    }[study.budget]
    return Outcome(rows, draw(rows), [notes] if notes else [])


def draw(rows: list[Row]) -> Figure:
    """Errors, one bar a row and a point a seed."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        errors = [100 - value for value in row.ours]
        axis.barh(place, sum(errors) / len(errors), color="#999999" if "CNN" in row.what else "#0072B2")
        axis.plot(errors, [place] * len(errors), "k.", markersize=4)
        axis.plot(
            100 - float((row.paper or "nan").split()[0]), place, "D", color="#D55E00", label=None if place else "paper"
        )
    axis.set_yticks(range(len(rows)), [row.what.removesuffix(": accuracy") for row in rows])
    axis.invert_yaxis()
    axis.set_xlabel("test error %")
    axis.legend(fontsize=8)
    return figure
