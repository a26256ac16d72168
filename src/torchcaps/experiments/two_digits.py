"""Su 2018: networks trained on single digits and tested on several digits side by side.

The order of the digits is read from the couplings.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from torchcaps.capsules import Capsules, lengths
from torchcaps.data import Images, Preprocessing, Splits
from torchcaps.errors import BadInput, caption
from torchcaps.experiments.study import Outcome, Row, Study, part, percent, scores_of
from torchcaps.losses import margin_loss
from torchcaps.models import PooledCapsNet
from torchcaps.recipe import Recipe
from torchcaps.recipes import RECIPES
from torchcaps.training_module import TrainingModule

NETWORKS = {"CNN": "pooled-cnn-mnist", "capsules": "pooled-capsnet-mnist", "uniform couplings": "pooled-capsnet-mnist"}
PAPER = {"CNN": ("about 40", "about 10"), "capsules": ("over 90", "over 90")}
LONGEST = 5
ORDERS = ("couplings", "contributions")


def strips(images: Images, length: int, count: int, seed: int = 0) -> Images:
    """Join images of different classes side by side into strips, with labels ``[count, length]`` from left to right.

    Arguments:
        images: images to choose from.
        length: number of images per strip, at most the number of classes.
        count: number of strips.
        seed: seed of the random choice.

    Raises:
        BadInput: `images` have fewer than `length` classes.
    """
    random = np.random.default_rng([seed, length])
    labels = images.labels.numpy()
    members = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    if len(members) < length:
        raise BadInput(
            f"length is {length}, but the images of a strip must have different classes, and there are only "
            f"{len(members)} classes: reduce length"
        )
    order = random.permuted(np.tile(list(members), (count, 1)), axis=1)[:, :length]
    chosen = torch.tensor([[random.choice(members[label]) for label in row] for row in order])
    return Images(torch.cat(images.pixels[chosen].unbind(1), dim=3), torch.from_numpy(order), images.class_names)


def named_alike(scores: Float[Tensor, "n classes"], labels: Int64[Tensor, "n length"]) -> Tensor:
    """Return, for each image with k labels, whether these are the k classes with the highest scores, in any order."""
    best = scores.topk(labels.shape[1], dim=1).indices
    return (best.sort(dim=1).values == labels.sort(dim=1).values).all(dim=1)


class StripClassifier(TrainingModule):
    """Training module for single digits that is also evaluated on strips of digits.

    A prediction for a strip of n digits is correct if the n classes with the highest scores are the digits.
    """

    def loss_and_scores(self, images: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        if labels.ndim == 1:
            return super().loss_and_scores(images, labels, train)
        scores = self.scores(images)
        present = functional.one_hot(labels, scores.shape[1]).sum(dim=1).to(scores.dtype)
        return margin_loss(scores, present, **self.recipe.loss_options), scores

    def count(self, scores: Tensor, labels: Tensor) -> None:
        if labels.ndim == 1:
            super().count(scores, labels)
        else:
            wrong = ~named_alike(scores, labels)
            super().count(wrong.long(), torch.zeros_like(wrong, dtype=torch.long))


class Traced(NamedTuple):
    """Lengths of the class capsules, and the contribution of each position of the feature map to these lengths.

    Arguments:
        lengths: lengths of the class capsules.
        couplings: coupling c_ij of each position i of the feature map with each class capsule j.
        contributions: ``c_ij û_ij · s_j / |s_j|`` for each class capsule j and each position i. Here ``û_ij`` is the
            vote of position i for class capsule j, and ``s_j = Σ_i c_ij û_ij`` is the class capsule before squashing.
            The sum of the contributions over all positions is ``|s_j|``.
    """

    lengths: Float[Tensor, "B J"]
    couplings: Float[Tensor, "B J rows columns"]
    contributions: Float[Tensor, "B J rows columns"]


def traced(model: PooledCapsNet, images: Float[Tensor, "B C H W"]) -> Traced:
    """Run a model, and trace its class capsules back to the positions of the feature map."""
    features = model.trunk(images).float()
    pose = features.flatten(2).mT[:, :, None, None, :]
    layer = model.class_capsules
    parents, couplings = layer(Capsules(pose, lengths(pose)), return_couplings=True)
    votes = torch.einsum("bsq,jqn->bjsn", pose[:, :, 0, 0], layer.transform[0, 0])
    direction = torch.nn.functional.normalize(parents.pose[:, 0, :, 0], dim=2)
    parts = couplings.flatten(2) * torch.einsum("bjsn,bjn->bjs", votes, direction)
    grid = features.shape[2:]
    return Traced(parents.activation.squeeze(1), couplings.flatten(2).unflatten(2, grid), parts.unflatten(2, grid))


def read_order(
    model: PooledCapsNet, pixels: UInt8[Tensor, "n C H W"], length: int
) -> dict[str, Int64[Tensor, "n length"]]:
    """Find the `length` classes with the highest scores, and order them by position in the image, from left to right.

    Returns two orders: by the horizontal centre of the couplings of each class capsule, and by the horizontal centre of
    the contributions to each class capsule.
    """
    read: dict[str, list[Tensor]] = {by: [] for by in ORDERS}
    for some in pixels.split(100):
        with torch.inference_mode():
            trace = traced(model, Preprocessing().plain(some))
        best = trace.lengths.topk(length, dim=1).indices
        for by, maps in zip(ORDERS, (trace.couplings, trace.contributions.clamp_min(0)), strict=True):
            weight = maps.sum(dim=2).gather(1, best[:, :, None].expand(-1, -1, maps.shape[3]))
            place = (weight * torch.arange(maps.shape[3])).sum(dim=2) / weight.sum(dim=2).clamp_min(1e-12)
            read[by].append(best.gather(1, place.argsort(dim=1)))
    return {by: torch.cat(parts) for by, parts in read.items()}


def paper_recipe(study: Study, network: str, seed: int, data: str) -> Recipe:
    """Return the recipe of a network of Su 2018.

    The number of epochs and `decay_steps` depend on the budget, so that the learning rate decays faster in shorter
    training runs.
    """
    recipe = replace(RECIPES[NETWORKS[network]](), seed=seed, data=data)
    if network == "uniform couplings":
        recipe = replace(recipe, routing_options={"iterations": 1})
    epochs, decay_steps = study.choose((4, 60), (14, 300), (20, 300))
    return replace(recipe, epochs=epochs, decay_steps=decay_steps)


def recent_recipe(study: Study, network: str, seed: int, data: str) -> Recipe:
    """Return `paper_recipe` with digits shifted, rotated and squeezed in training, and a cosine schedule."""
    recipe = paper_recipe(study, network, seed, data)
    recipe = replace(recipe, shift=2, rotation=30.0, squeeze=0.25, schedule="cosine")
    return replace(recipe, epochs=study.choose(4, 10, 20))


def run(study: Study, recipe_of: Callable[[Study, str, int, str], Recipe] = paper_recipe) -> Outcome:
    """Train networks on single digits and test them on strips of digits.

    The networks are Su's CNN, Su's capsules, and the same capsules with uniform couplings.

    Raises:
        BadInput: the test images of the dataset have fewer than five classes.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NETWORKS}
    shown: tuple[PooledCapsNet, Images] | None = None
    data = study.data or "mnist"
    for seed in range(study.seeds):
        for name in NETWORKS:
            recipe = recipe_of(study, name, seed, data)
            splits = study.splits(recipe, *study.choose((10_000, 2_000), (None, None), (None, None)))
            if (classes := len(splits.test.labels.unique())) < LONGEST:
                raise BadInput(
                    f"data is {data!r}, whose test images have {classes} classes, but this experiment joins images of "
                    f"{LONGEST} different classes: use a dataset with at least {LONGEST} classes"
                )
            count = study.choose(1_000, 10_000, 10_000)
            splits = Splits(splits.train, strips(splits.validation, 2, count // 5), splits.test)
            model, metrics = study.trained(part(name, seed), recipe, splits, module_class=StripClassifier)

            def evaluate(model=model, test=splits.test, count=count) -> dict[str, Any]:
                pairs = strips(test, 2, count)
                scores = scores_of(model, pairs.pixels)
                recognised = named_alike(scores, pairs.labels)
                above_half = scores.topk(2, dim=1).values[:, 1] > 0.5
                result: dict[str, Any] = {"a": percent(recognised), "b": percent(recognised & above_half)}
                result["order"] = {}
                for length in range(2, LONGEST + 1) if isinstance(model, PooledCapsNet) else ():
                    several = strips(test, length, count)
                    orders = read_order(model, several.pixels, length)
                    result["order"][str(length)] = [
                        percent(named_alike(scores_of(model, several.pixels), several.labels)),
                        *(percent((orders[by] == several.labels).all(dim=1)) for by in ORDERS),
                    ]
                return result

            strip = study.cached(part(name, seed), "strips", evaluate)
            found[name].append({"single": metrics["test_accuracy_percent"], **strip})
            if name == "capsules" and shown is None:
                shown = (cast(PooledCapsNet, model), splits.test)
    rows = []
    for name, results in found.items():
        paper = PAPER.get(name, (None, None))
        rows += [
            Row(f"{name}, one digit", [one["single"] for one in results], "99.3" if name in PAPER else None),
            Row(f"{name}, two digits (a): two highest scores correct", [one["a"] for one in results], paper[0]),
            Row(f"{name}, two digits (b): also both scores above 0.5", [one["b"] for one in results], paper[1]),
        ]
    for name in ("capsules", "uniform couplings"):
        for length in range(2, LONGEST + 1):
            for index, what in enumerate(("all recognised", *(f"in the right order, by {by}" for by in ORDERS))):
                rows.append(
                    Row(f"{name}, {length} digits: {what}", [one["order"][str(length)][index] for one in found[name]])
                )
    assert shown is not None
    varied = " that are shifted, rotated and squeezed" if recipe.rotation else ""
    notes = [
        f"Trained for {recipe.epochs} epochs on single digits{varied}. The evaluated epoch is the one that recognises "
        "the most validation strips of two digits. In the rows (a), a strip is correct if the two highest scores "
        "belong to its digits. In the rows (b), both scores must also be above 0.5. To find the order of the digits, "
        "the experiment sorts the class capsules by the horizontal centre of their couplings or of their "
        "contributions. The contribution of a position is how much it adds to the length of the class capsule. "
        "Uniform couplings are all equal, so the order by couplings is no better than chance."
    ]
    return Outcome(rows, draw(*shown), [*notes, *study.notes_on_data(data)])


def draw(model: PooledCapsNet, images: Images) -> Figure:
    """Draw strips of two and three digits, the lengths of all class capsules, and the couplings of the longest ones."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots(4, 5, width_ratios=[2, 2.2, 1.6, 1.6, 1.6])
    names = [caption(name, 12) for name in images.class_names]
    rotation = 90 if max(map(len, names)) > 2 else 0
    for row, length in enumerate((2, 2, 3, 3)):
        strip = strips(images, length, 2, seed=1)
        pixels, labels = strip.pixels[row % 2, None], strip.labels[row % 2]
        with torch.inference_mode():
            trace = traced(model, Preprocessing().plain(pixels))
        best = read_order(model, pixels, length)["couplings"][0]
        axes[row, 0].imshow(pixels[0, 0].numpy(), cmap="gray")
        axes[row, 0].set_title(" ".join(names[label] for label in labels), fontsize=9, parse_math=False)
        colours = ["#0072B2" if label in best else "#999999" for label in range(len(names))]
        axes[row, 1].bar(range(len(names)), trace.lengths[0].numpy(), color=colours)
        axes[row, 1].set_xticks(range(len(names)), names, fontsize=7, rotation=rotation, parse_math=False)
        axes[row, 1].set_ylim(0, 1)
        axes[row, 1].set_title("length of each class capsule", fontsize=9)
        for column in range(3):
            axis = axes[row, 2 + column]
            if column >= length:
                axis.axis("off")
                continue
            couplings = trace.couplings[0, best[column]]
            axis.imshow(couplings.numpy(), cmap="viridis", vmin=0)
            title = f"couplings of {names[int(best[column])]}, 0 to {couplings.max():.2f}"
            axis.set_title(title, fontsize=9, parse_math=False)
    for axis in [*axes[:, 0], *axes[:, 2:].flat]:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure
