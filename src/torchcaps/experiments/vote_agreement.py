"""Hinton, Sabour & Frosst 2018, figure 2: distance of the votes from each class capsule, per routing iteration."""

import torch
from jaxtyping import Float, Int64
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.data import Images, Preprocessing
from torchcaps.experiments.study import Outcome, Row, Study, routed, scores_of
from torchcaps.routing import EMRouting


def distances(
    model: nn.Module, images: Float[Tensor, "B C H W"]
) -> list[tuple[Float[Tensor, "B J votes"], Float[Tensor, "B J votes"]]]:
    """Return, per routing iteration, the votes' distances from the mean of their class capsule, and the couplings."""
    with torch.inference_mode():
        routing = routed(model, images)["class_capsules"]
        assert isinstance(routing.rule, EMRouting)
        votes = routing.routing_map.votes(routing.children.pose, routing.transform)
        found = []
        for one in routing.rule.passes(routing.children, routing.transform, routing.routing_map):
            mean = routing.routing_map.at_edges(one.mean.transpose(1, 2))
            distance = (votes - mean.unsqueeze(3)).flatten(4).norm(dim=4)
            found.append((distance.flatten(2), one.couplings.flatten(2)))
        return found


def run(study: Study) -> Outcome:
    """Measure the distances of votes from their parent's mean on a correctly and an incorrectly classified image."""
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
    chosen = {name: int(mask.nonzero()[0]) for name, mask in masks.items() if mask.any()}
    passes = distances(model, preprocessing.plain(test.pixels[[*chosen.values()]]))
    rows = [Row("accuracy", [metrics["test_accuracy_percent"]])]
    for index, (name, image) in enumerate(chosen.items()):
        for number, (distance, coupling) in enumerate(passes):
            weighted = (distance[index] * coupling[index]).sum(dim=1) / coupling[index].sum(dim=1).clamp_min(1e-12)
            label = int(test.labels[image])
            rows.append(
                Row(
                    f"{name}ly classified image, iteration {number + 1}: mean distance of votes from its class capsule",
                    [weighted[label].item()],
                    unit="",
                )
            )
    return Outcome(rows, draw(passes, test, predicted, chosen, preprocessing), study.notes_on_toys())


def draw(
    passes: list[tuple[Tensor, Tensor]],
    images: Images,
    predicted: Int64[Tensor, " N"],
    chosen: dict[str, int],
    preprocessing: Preprocessing,
) -> Figure:
    """Draw, per image, a grid of histograms with one row per routing iteration and one column per class."""
    classes = len(images.class_names)
    figure = Figure(figsize=(2.1 * classes + 1.5, 4.25 * len(chosen)), layout="constrained")
    everything = figure.subplots(len(chosen) * len(passes), classes + 1, squeeze=False)
    for index, (outcome, image) in enumerate(chosen.items()):
        axes = everything[index * len(passes) : (index + 1) * len(passes)]
        shown = preprocessing.plain(images.pixels[image, None])[0, 0]
        for row, (distance, coupling) in enumerate(passes):
            axes[row, 0].axis("off")
            for label, name in enumerate(images.class_names):
                axis = axes[row, label + 1]
                colour = "#999999"
                if label == int(predicted[image]):
                    colour = "#D55E00"
                if label == int(images.labels[image]):
                    colour = "#0072B2"
                axis.hist(
                    distance[index, label],
                    bins=30,
                    range=(0, distance[index].max().item()),
                    weights=coupling[index, label],
                    color=colour,
                )
                axis.set_yticks([])
                axis.tick_params(labelsize=7)
                if row == 0:
                    axis.set_title(name, fontsize=9, color="black" if colour == "#999999" else colour)
            axes[row, 1].set_ylabel(f"iteration {row + 1}", fontsize=9)
        axes[0, 0].imshow(shown.numpy(), cmap="gray")
        axes[0, 0].set_title(f"{outcome}ly classified", fontsize=9)
    figure.supxlabel(
        "distance of a vote from the mean of the class capsule, weighted by its coupling\n"
        "blue: true class; orange: predicted class, if wrong",
        fontsize=9,
    )
    return figure
