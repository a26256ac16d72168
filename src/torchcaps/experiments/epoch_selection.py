"""How much the accuracy on the test digits rises if the epoch is chosen on the test digits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import torch
from matplotlib.figure import Figure
from torch import nn

from torchcaps.data import Images
from torchcaps.experiments.study import Outcome, Row, Study, accuracy_of, part, percent, scores_of
from torchcaps.pictures import STYLES
from torchcaps.recipes import RECIPES


def run(study: Study) -> Outcome:
    """Train Efficient-CapsNet, measure its test accuracy after every epoch, and choose the epoch in three ways."""
    images, test_images = study.choose((2_000, 1_000), (None, None), (None, None))
    epochs, data = study.choose(3, 30, 150), study.data or "mnist"
    chosen: dict[str, list[float]] = {"last epoch": [], "best validation epoch": [], "best test epoch": []}
    curves, total = [], torch.zeros(())
    for seed in range(study.seeds):
        recipe = replace(RECIPES["efficient-capsnet-mnist"](), data=data, epochs=epochs, seed=seed)
        splits, folder = study.splits(recipe, images, test_images), part("efficient-capsnet", seed)

        def watch(model: nn.Module, test: Images = splits.test, recipe=recipe) -> dict[str, float]:
            return {"test_accuracy_percent": accuracy_of(model, test, recipe.preprocessing())}

        model, _ = study.trained(folder, recipe, splits, watch)
        names = "validation_accuracy_percent", "validation_loss", "test_accuracy_percent"
        found = study.epoch_metrics(folder, *names)
        curve = [test for _, _, test in found]
        curves.append(curve)
        chosen["last epoch"].append(curve[-1])
        chosen["best validation epoch"].append(max(found, key=lambda epoch: (epoch[0], -epoch[1]))[2])
        chosen["best test epoch"].append(max(curve))
        total = total + scores_of(model, splits.test.pixels, recipe.preprocessing())
    papers = {"best test epoch": "99.74"} if data == "mnist" else {}
    rows = [Row(f"{name}: accuracy", values, papers.get(name)) for name, values in chosen.items()]
    if study.seeds > 1:
        together = percent(total.argmax(dim=1) == splits.test.labels)
        paper = "99.84" if data == "mnist" and study.seeds == 3 else None
        rows.append(Row(f"ensemble of {study.seeds} networks, last epoch: accuracy", [together], paper))
    notes = [
        f"Trained on {len(splits.train):,} images for {epochs} epochs. A row shows the test accuracy of the epoch that "
        "its name states. If several epochs have the highest validation accuracy, the one with the lowest validation "
        "loss counts. The paper trains for 150 epochs with other batches and another learning rate.",
        "The row with the best test epoch is not a valid measurement: it chooses the epoch on the images on which it "
        "is measured. The authors' released code keeps the weights of this epoch.",
    ]
    return Outcome(rows, draw(curves), notes)


def draw(curves: Sequence[Sequence[float]]) -> Figure:
    """Plot the test accuracy of every epoch, one curve per seed, and mark the highest point of each curve."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for seed, (curve, style) in enumerate(zip(curves, cycle(STYLES), strict=False)):
        axes.plot(range(1, len(curve) + 1), curve, label=f"seed {seed}", **{**style, "marker": ""})
        axes.plot(curve.index(max(curve)) + 1, max(curve), "o", color=style["color"])
    low = min(curve[len(curve) // 3] for curve in curves)
    axes.set_ylim(low - 0.05, max(map(max, curves)) + 0.05)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("Circle: epoch with the highest test accuracy")
    axes.legend()
    return figure
