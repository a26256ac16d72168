"""Training time until a network reaches a target validation accuracy, for two networks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from matplotlib.figure import Figure

from torchcaps.benchmarks import DEVICE, compare
from torchcaps.benchmarks.training import capsnet_step
from torchcaps.errors import BadInput
from torchcaps.experiments.study import Outcome, Row, Study, part
from torchcaps.recipes import create_recipe

PORT = "CapsNet, settings of a PyTorch port"
NETWORKS: dict[str, tuple[str, dict[str, str]]] = {
    "CapsNet with a stem": ("capsnet-stem-mnist", {}),
    PORT: ("capsnet-mnist", {"batch_size": "100", "decay_rate": "0.9", "epochs": "10"}),
}
"""Recipe and changed settings of each network. The second network has the batches and the learning rate of
XifengGuo/CapsNet-Pytorch: batches of 100, and a learning rate of 1e-3 that is multiplied by 0.9 per epoch. That
repository trains for 50 epochs on all 60,000 digits, and has other initial transforms and other gradients of the
routing. The second network trains faster here, because routing is fused, and because bf16 is used where it is faster
than float32."""


def run(study: Study) -> Outcome:
    """Measure the training time to the target validation accuracy, and the time of one step without fused routing.

    Raises:
        BadInput: the study has several seeds, or `data` is given.
    """
    study.one_seed()
    if study.data:
        raise BadInput(f"data is {study.data!r}, but the budget of this experiment chooses its data: omit --data")
    data, target = study.choose("mnist-5k", "mnist", "mnist"), study.choose(95.0, 99.5, 99.5)
    rows, curves, epochs_of_port, images = [], {}, 0, 0
    for name, (recipe_name, changes) in NETWORKS.items():
        recipe = replace(create_recipe(recipe_name, changes), data=data)
        recipe = replace(recipe, epochs=study.choose(4, recipe.epochs, recipe.epochs))
        splits = study.splits(recipe)
        if name == PORT:
            recipe = replace(recipe, decay_steps=round(len(splits.train) / recipe.batch_size))
        folder = part(name, 0)
        study.trained(folder, recipe, splits)
        per_epoch = study.epoch_metrics(folder, "validation_accuracy_percent", "seconds")
        accuracies, seconds = zip(*per_epoch, strict=True)
        minutes = [passed / 60 for passed in accumulate(seconds)]
        curves[name] = [*zip(minutes, accuracies, strict=True)]
        epochs = epochs_until(target, accuracies)
        missed = f"does not reach {target} % in {recipe.epochs} epochs"
        outcome = f"reaches {target} % after epoch {epochs}" if epochs else missed
        epochs = epochs or recipe.epochs
        rows.append(Row(f"{name}: {outcome}", [minutes[epochs - 1]], unit="min"))
        if name == PORT:
            epochs_of_port, images = epochs, len(splits.train)

    repeats = study.choose(2, 10, 10)

    def compute() -> float:
        ways = {"reference": capsnet_step("reference")}
        return float(compare("CapsNet, batch 100", ways, images=100, repeats=repeats)[0]["median ms"])

    where, file = ("GPU", "step-gpu") if DEVICE == "cuda" else ("CPU", "step")
    step = study.cached(part(PORT, 0), file, compute) / 1000
    rows.append(
        Row(
            f"{PORT}: training steps only, float32 with materialised votes on the {where}, {step:.2f} s per step",
            [epochs_of_port * math.ceil(images / 100) * step / 60],
            unit="min",
        )
    )
    note = (
        "The minutes include training and validation. The accuracy is measured on the validation split at the end of "
        f"each epoch. The time in the last row is the number of steps multiplied by the median time of {repeats} steps "
        "of the reference implementation. This time excludes data loading and validation. The port, "
        "XifengGuo/CapsNet-Pytorch, trains for 50 epochs. Only its batch size and its learning rate are used here."
    )
    return Outcome(rows, draw(curves, target), [note])


def epochs_until(target: float, accuracies: Sequence[float]) -> int | None:
    """Return the first epoch that ends with at least the target accuracy, counted from 1; None if no epoch does.

    Example:
        >>> epochs_until(99.5, [99.2, 99.5, 99.4]), epochs_until(99.5, [99.2])
        (2, None)
    """
    return next((place for place, accuracy in enumerate(accuracies, 1) if accuracy >= target), None)


def draw(curves: dict[str, list[tuple[float, float]]], target: float) -> Figure:
    """Draw the validation accuracy over minutes, one point per epoch.

    The vertical axis contains the target and the last epoch of every curve; the first epochs may lie below it.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for (name, points), colour in zip(curves.items(), ("#0072B2", "#D55E00"), strict=True):
        axis.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, linewidth=0.8, label=name)
    axis.axhline(target, color="#767676", linewidth=0.8, linestyle="--", label=f"target, {target:g} %")
    axis.set_xscale("log")
    lowest = min(points[-1][1] for points in curves.values())
    highest = max(accuracy for points in curves.values() for _, accuracy in points)
    axis.set_ylim(min(target - 1, lowest) - 0.5, min(100, max(target, highest) + 0.5))
    axis.set_xlabel("minutes of training")
    axis.set_ylabel("validation accuracy %")
    axis.legend(fontsize=8)
    return figure
