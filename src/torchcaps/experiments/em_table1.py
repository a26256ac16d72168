"""Hinton, Sabour & Frosst 2018, table 1: iterations, pose, loss, coordinates and activation of matrix capsules."""

from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from torchcaps.experiments.study import Outcome, Row, Study, part
from torchcaps.recipe import Recipe

PAPER = {
    "T = 1": "90.3",
    "T = 2": "97.8",
    "T = 3": "98.2",
    "T = 5": "96.1",
    "T = 3, vector pose": "97.1",
    "T = 3, no coordinates": "97.4",
    "T = 3, vector pose, no coordinates": "96.8",
    "T = 3, margin loss": "96.8",
    "T = 3, cross-entropy": "94.2",
    "T = 3, mixing proportions": "95.5",
    "CNN": "94.8",
}
MODELS: dict[str, dict[str, Any]] = {
    "T = 1": {"routing_options": {"iterations": 1}},
    "T = 2": {"routing_options": {"iterations": 2}},
    "T = 3": {},
    "T = 5": {"routing_options": {"iterations": 5}},
    "T = 3, vector pose": {"pose": "vector"},
    "T = 3, no coordinates": {"coordinates": False},
    "T = 3, vector pose, no coordinates": {"pose": "vector", "coordinates": False},
    "T = 3, margin loss": {},
    "T = 3, cross-entropy": {},
    "T = 3, mixing proportions": {"routing_options": {"parent_activation": "mixing"}},
}
LOSSES = {"T = 3, margin loss": "margin", "T = 3, cross-entropy": "activation_cross_entropy"}


def recipe_of(study: Study, name: str, seed: int, images: int, epochs: int) -> Recipe:
    """Return the recipe of a row of the table."""
    if name == "CNN":
        return study.recipe(study.toys("cnn-baseline"), seed, images=images, epochs=epochs)
    recipe = study.recipe(study.toys("matrix-capsnet"), seed, images=images, epochs=epochs, **MODELS[name])
    return replace(recipe, loss=LOSSES[name], margin_schedule="none") if name in LOSSES else recipe


def run(study: Study) -> Outcome:
    """Train one network for each row of the table and each seed."""
    images, epochs = study.choose((1_500, 2), (6_000, 8), (21_870, 20))
    found: dict[str, list[float]] = {name: [] for name in PAPER}
    for seed in range(study.seeds):
        for name, values in found.items():
            recipe = recipe_of(study, name, seed, images, epochs)
            splits = study.splits(recipe, images, study.choose(2_000, 10_000, None))
            values.append(study.trained(part(name, seed), recipe, splits)[1]["test_accuracy_percent"])
    rows = [Row(f"{name}: accuracy", values, PAPER[name]) for name, values in found.items()]
    notes = [
        f"Trained on {images:,} images for {epochs} epochs, tested on {len(splits.test):,} images. The widths of the "
        "network are 64/8/16/16; the paper's are 32/32/32/32."
    ]
    return Outcome(rows, draw(rows), [*notes, *study.notes_on_toys()])


def draw(rows: list[Row]) -> Figure:
    """Draw our accuracies as bars and the paper's as markers."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.subplots()
    names = [row.what.removesuffix(": accuracy") for row in rows]
    means = [sum(row.ours) / len(row.ours) for row in rows]
    axis.barh(names, means, color="#0072B2", label="ours")
    axis.plot([float(row.paper or "nan") for row in rows], names, "D", color="#D55E00", label="paper, smallNORB")
    for place, mean in enumerate(means):
        axis.text(mean - 1, place, f"{mean:.1f}", va="center", ha="right", color="white", fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("test accuracy %")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure
