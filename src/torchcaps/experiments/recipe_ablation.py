"""Ablation of the recipe matrix-capsnet-toys, tested on a rendering of the toys that is not used in training."""

from dataclasses import replace

from matplotlib.figure import Figure

from torchcaps.data import Splits, load_splits
from torchcaps.errors import BadInput
from torchcaps.experiments.study import Outcome, Row, Study, part, some
from torchcaps.pictures import COLOURS
from torchcaps.recipes import create_recipe
from torchcaps.recipes.matrix_capsules import VARIATIONAL

OTHER_TOYS = 2
"""Seed with which the test toys are rendered. The training toys have seed 0."""
PAPER_ROUTING = {"routing.variance_floor": "0.01", "routing.initial_beta_a": "-15", "routing.tempering": "1"}
CHANGES: dict[str, dict[str, str]] = {
    "the recipe": {},
    "T = 2": {"routing.iterations": "2"},
    "T = 2, routing options of the paper's recipe": {"routing.iterations": "2", **PAPER_ROUTING},
    "T = 3, routing options of the paper's recipe": PAPER_ROUTING,
    "T = 3, not tempered": {"routing.tempering": "1"},
    "T = 1": {"routing.iterations": "1"},
    "crop of 32 pixels": {"crop": "32"},
    "no mixup": {"mixup": "0"},
    "standardised first, with random brightness and contrast": {"standardise": "first"},
    "no stem": {"model.stem": "0", "model.stem_stride": "1"},
    "stem without stride, 8 primary types": {"model.stem_stride": "1", "model.widths": "[64,8,16,16]"},
    "no BatchNorm on primary capsules": {"model.normalise": "false"},
    "spread loss": {"loss": "spread", "margin_schedule": "linear"},
    "exponential schedule of the paper's recipe": {"schedule": "exponential", "warm_up_epochs": "0"},
    "no warm-up": {"warm_up_epochs": "0"},
    "T = 2 in the first epoch, then T = 3": {"early_iterations": "2", "early_epochs": "1"},
    "variational Bayes": {f"model.{name}": str(value).lower() for name, value in VARIATIONAL.items()},
    "uniform routing": {"model.routing": "uniform"},
}


def run(study: Study) -> Outcome:
    """Train the recipe, the recipe with one part changed at a time, and the CNN with the same preprocessing.

    Raises:
        BadInput: `data` is neither None nor ``toys``.
    """
    if study.data not in (None, "toys"):
        raise BadInput(f"data is {study.data!r}, but this experiment supports only the dataset 'toys': omit --data")
    images, epochs = study.choose((1_000, 2), (12_000, 4), (24_300, 6))
    recipes = {name: ("matrix-capsnet-toys", changes) for name, changes in CHANGES.items()}
    recipes["CNN, same preprocessing"] = ("cnn-baseline-toys", {})
    other = load_splits("toys", study.data_dir, render_seed=OTHER_TOYS).test
    other = some(other, study.choose(1_000, 10_000, None))
    rows = []
    for name, (recipe_name, changes) in recipes.items():
        accuracies = []
        for seed in range(study.seeds):
            recipe = replace(create_recipe(recipe_name, changes), seed=seed, epochs=epochs)
            splits = study.splits(recipe, images)
            judged = Splits(splits.train, splits.validation, other)
            accuracies.append(study.trained(part(name, seed), recipe, judged)[1]["test_accuracy_percent"])
        rows.append(Row(f"{name}: accuracy on another rendering", accuracies))
    notes = [
        f"Trained on {len(splits.train):,} images for {epochs} epochs, tested on {len(other):,} images of the toys of "
        f"rendering {OTHER_TOYS}, `torchcaps data render toys --seed {OTHER_TOYS}`. Settings of the recipe were chosen "
        "on these images, but no network was trained on them."
    ]
    return Outcome(rows, draw(rows), notes)


def draw(rows: list[Row]) -> Figure:
    """Draw one point per row, and a line at the accuracy of the unchanged recipe."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    means = [sum(row.ours) / len(row.ours) for row in rows]
    axis.axvline(means[0], color=COLOURS[1], linewidth=1, linestyle="--", label="the recipe")
    axis.plot(means, [row.what.partition(":")[0] for row in rows], "o", color=COLOURS[0])
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    for place, mean in enumerate(means):
        axis.text(mean - 0.5, place, f"{mean:.1f}", va="center", ha="right", fontsize=8, bbox=white)
    axis.invert_yaxis()
    axis.set_xlim(max(0, min(means) - 5), 100)
    axis.set_xlabel("accuracy on toys of another rendering %")
    axis.grid(axis="y", linewidth=0.3)
    axis.legend(fontsize=8, loc="lower left")
    return figure
