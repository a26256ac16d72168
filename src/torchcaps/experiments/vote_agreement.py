"""Hinton, Sabour & Frosst 2018, figure 2: distances of votes from each class capsule, weighted by couplings."""

import torch
from jaxtyping import Bool, Float, Int64
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.data import Images, Preprocessing
from torchcaps.errors import caption
from torchcaps.experiments.study import Outcome, Row, Study, scores_of
from torchcaps.recording import recorded

IMAGES = 500
"""Number of correctly and of incorrectly classified images, drawn at random, on which distances are measured."""


def distances(
    model: nn.Module, images: Float[Tensor, "B C H W"]
) -> list[tuple[Float[Tensor, "B J votes"], Float[Tensor, "B J votes"]]]:
    """Return, per routing iteration, the votes' distances from the mean of their class capsule, and the couplings."""
    with torch.inference_mode():
        with recorded(model) as layers:
            model(images)
        layer = next(layer for layer in layers if layer.name == "class_capsules.routing")
        votes = layer.passes[0].votes.materialised()
        found = []
        for one in layer.passes:
            mean = layer.routing_map.at_edges(one.moments.mean.transpose(1, 2))
            distance = (votes - mean.unsqueeze(3)).flatten(4).norm(dim=4)
            found.append((distance.flatten(2), one.votes.couplings(one.agreement).flatten(2)))
        return found


def run(study: Study) -> Outcome:
    """Measure the distances of votes from the capsule of the true class, on right and on wrong predictions."""
    study.one_seed()
    images, epochs = study.choose((3_000, 6), (21_870, 10), (21_870, 20))
    recipe = study.recipe(
        study.toys("matrix-capsnet"), 0, images=images, epochs=epochs, routing_options={"iterations": 3}
    )
    splits = study.splits(recipe, images)
    model, metrics = study.trained("capsules-seed0", recipe, splits)
    preprocessing, test = recipe.preprocessing(), splits.test
    predicted = scores_of(model, test.pixels, preprocessing).argmax(dim=1)
    right = predicted == test.labels
    masks = {"correct": right, "incorrect": ~right}
    groups = {name: drawn(mask) for name, mask in masks.items() if mask.any()}
    rows = [Row("accuracy", [metrics["test_accuracy_percent"]])]
    first = []
    for name, chosen in groups.items():
        weighted: list[Tensor] = []
        plain: list[Tensor] = []
        for batch in chosen.split(50):
            passes = distances(model, preprocessing.plain(test.pixels[batch]))
            if not weighted:
                first.append([(distance[0], coupling[0]) for distance, coupling in passes])
            own = torch.arange(len(batch)), test.labels[batch]
            weighted.append(torch.stack([_mean(distance[own], coupling[own]) for distance, coupling in passes]))
            plain.append(torch.stack([distance[own].mean(dim=1) for distance, _ in passes]))
        for measure, parts in (("weighted by coupling", weighted), ("all votes equal", plain)):
            for number, mean in enumerate(torch.cat(parts, dim=1).mean(dim=1).tolist()):
                of = f"{name}ly classified images, iteration {number + 1}"
                rows.append(Row(f"{of}: distance of votes from the true class, {measure}", [mean], unit=""))
    counts = " and ".join(f"{len(chosen)} {name}ly classified" for name, chosen in groups.items())
    notes = [
        "The distance is that of a vote from the mean of the capsule of the true class. It is averaged over the votes "
        f"of {counts} test images, drawn at random."
    ]
    if study.data != "smallnorb":
        notes.append("The images are rendered toys; the paper's are from smallNORB.")
    shown = {name: int(chosen[0]) for name, chosen in groups.items()}
    return Outcome(rows, draw(first, test, predicted, shown, preprocessing), notes)


def drawn(mask: Bool[Tensor, " N"]) -> Int64[Tensor, " n"]:
    """Draw at most `IMAGES` images of a mask at random, because the images of a split are sorted by toy."""
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(0))
    return order[mask[order]][:IMAGES]


def _mean(distance: Float[Tensor, "B votes"], coupling: Float[Tensor, "B votes"]) -> Float[Tensor, "B"]:
    return (distance * coupling).sum(dim=1) / coupling.sum(dim=1).clamp_min(1e-12)


def draw(
    passes: list[list[tuple[Tensor, Tensor]]],
    images: Images,
    predicted: Int64[Tensor, " N"],
    chosen: dict[str, int],
    preprocessing: Preprocessing,
) -> Figure:
    """Draw, per image, a grid of histograms with one row per routing iteration and one column per class."""
    classes, iterations = len(images.class_names), len(passes[0])
    figure = Figure(figsize=(2.1 * classes + 1.5, 4.25 * len(chosen)), layout="constrained")
    everything = figure.subplots(len(chosen) * iterations, classes + 1, squeeze=False)
    for index, (outcome, image) in enumerate(chosen.items()):
        axes = everything[index * iterations : (index + 1) * iterations]
        shown = preprocessing.plain(images.pixels[image, None])[0, 0]
        for row, (distance, coupling) in enumerate(passes[index]):
            axes[row, 0].axis("off")
            colours = {int(predicted[image]): "#D55E00", int(images.labels[image]): "#0072B2"}
            for label, name in enumerate(images.class_names):
                axis = axes[row, label + 1]
                axis.hist(
                    distance[label],
                    bins=30,
                    range=(0, distance.max().item()),
                    weights=coupling[label],
                    color=colours.get(label, "#999999"),
                )
                axis.set_yticks([])
                axis.tick_params(labelsize=7)
                if row == 0:
                    remark = {int(predicted[image]): " (predicted)", int(images.labels[image]): " (true)"}
                    title = f"{caption(name, 12)}{remark.get(label, '')}"
                    axis.set_title(title, fontsize=9, parse_math=False)
            axes[row, 1].set_ylabel(f"iteration {row + 1}", fontsize=9)
        axes[0, 0].imshow(shown.numpy(), cmap="gray")
        axes[0, 0].set_title(f"{outcome}ly classified", fontsize=9)
    figure.supxlabel(
        "distance of a vote from the mean of the class capsule, weighted by its coupling\n"
        "blue: true class; orange: predicted class, if wrong",
        fontsize=9,
    )
    return figure
