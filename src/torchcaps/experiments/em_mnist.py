"""Matrix capsules on MNIST: Hinton, Sabour & Frosst 2018, section 5."""

import torch
from matplotlib.figure import Figure

from torchcaps.data import Images
from torchcaps.experiments.study import Outcome, Row, Study, part, scores_of


def run(study: Study) -> Outcome:
    """The small net, and the same with uniform couplings."""
    images, epochs = study.choose((4_000, 4), (54_000, 8), (54_000, 30))
    rows, wrong = [], None
    for name, iterations in (("T = 2", 2), ("uniform couplings", 1)):
        found = []
        for seed in range(study.seeds):
            recipe = study.recipe("matrix-capsnet-mnist", seed, images=images, epochs=epochs, iterations=iterations)
            splits = study.splits(recipe, images, study.choose(2_000, None, None))
            model, metrics = study.trained(part(name, seed), recipe, splits)
            found.append(metrics["test_accuracy_percent"])
            if wrong is None:
                scores = scores_of(model, splits.test.pixels, recipe.preparation())
                wrong = (splits.test, scores)
        rows.append(Row(f"{name}: accuracy", found, "99.56" if iterations == 2 else None))
    assert wrong is not None
    return Outcome(rows, draw(*wrong), [f"{images:,} training images, {epochs} epochs; the small net (64/8/16/16)."])


def draw(images: Images, scores: torch.Tensor) -> Figure:
    """The first digits that are taken for others."""
    wrong = (scores.argmax(dim=1) != images.labels).nonzero().flatten()[:24]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(3, 8).flatten()
    for axis in axes:
        axis.axis("off")
    for axis, index in zip(axes, wrong.tolist(), strict=False):
        axis.imshow(images.pixels[index, 0], cmap="gray")
        axis.set_title(
            f"{images.class_names[images.labels[index]]}, taken for {images.class_names[scores[index].argmax()]}",
            fontsize=7,
        )
    figure.suptitle("the first test digits that are taken for others")
    return figure
