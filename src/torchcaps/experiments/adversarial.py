"""Hinton, Sabour & Frosst 2018, section 6: white-box and black-box attacks on matrix capsules and the CNN."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.attacks import Loss, bim, fgsm, gradient_health
from torchcaps.data import Images, Preprocessing
from torchcaps.experiments.study import Outcome, Row, Study, part, percent, some
from torchcaps.losses import spread_loss
from torchcaps.recipe import Recipe

ScoreFunction = Callable[[Tensor], Tensor]
EPSILONS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.5)
TARGETED_EPSILON = 0.25
"""The ε at which the text of the paper reports the success of targeted attacks."""
LOSSES: dict[str, Loss] = {"CNN": functional.cross_entropy, "capsules": partial(spread_loss, margin=1.0)}
"""Losses that the attacks use. With a margin below 1, the spread loss of a confident prediction has no gradient."""
ATTACKS: dict[str, Callable[..., Tensor]] = {"FGSM": fgsm, "BIM": bim}
NETWORKS = ("CNN", "capsules", "uniform couplings")
UNTARGETED = {
    ("FGSM", "CNN"): {0.1: "58", 0.2: "16", 0.5: "3"},
    ("FGSM", "capsules"): {0.1: "86", 0.2: "83", 0.5: "69"},
    ("BIM", "CNN"): {0.1: "52", 0.2: "13", 0.5: "5"},
    ("BIM", "capsules"): {0.1: "84", 0.2: "75", 0.5: "55"},
}
TARGETED = {("FGSM", "CNN"): "59", ("FGSM", "capsules"): "19", ("BIM", "CNN"): "84", ("BIM", "capsules"): "24"}


def classifier(model: nn.Module, preprocessing: Preprocessing) -> ScoreFunction:
    """Return a function of images in [0, 1] that preprocesses the images and returns the model's scores."""
    return lambda images: model(preprocessing.plain_of(images)).scores


def accuracy(attacked: ScoreFunction, images: Images, attack: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return the accuracy on attacked images, in per cent."""
    right = []
    for pixels, labels in zip(images.pixels.split(100), images.labels.split(100), strict=True):
        with torch.no_grad():
            right.append(attacked(attack(pixels.float() / 255, labels)).argmax(dim=1) == labels)
    return percent(torch.cat(right))


def measured(
    model: nn.Module, preprocessing: Preprocessing, loss: Loss, images: Images, other: ScoreFunction
) -> dict[str, Any]:
    """Attack a network, and measure the gradients of its loss with respect to its input, the preprocessed images.

    In black-box attacks, the images are changed with the gradients of the cross-entropy of the network `other`.
    """
    target = classifier(model, preprocessing)
    found: dict[str, Any] = {"untargeted": {}, "black box": {}, "targeted": {}, "targeted, as the paper": {}}
    for name, attack in ATTACKS.items():
        found["untargeted"][name] = [
            accuracy(target, images, lambda x, y, e=epsilon, a=attack: a(target, x, y, e, loss=loss))
            for epsilon in EPSILONS
        ]
        found["black box"][name] = [
            accuracy(target, images, lambda x, y, e=epsilon, a=attack: a(other, x, y, e)) for epsilon in EPSILONS
        ]
        found["targeted"][name] = [success(target, loss, images, attack, epsilon) for epsilon in EPSILONS]
        found["targeted, as the paper"][name] = success(target, loss, images, attack, TARGETED_EPSILON)
    health = [
        gradient_health(model, preprocessing.plain_of(pixels.float() / 255), labels, loss)
        for pixels, labels in zip(images.pixels.split(100), images.labels.split(100), strict=True)
    ]
    counts = [len(labels) for labels in images.labels.split(100)]
    found["zero gradients"] = fmean([one.zero for one in health], counts)
    found["gradient length"] = fmean([one.norm for one in health], counts)
    return found


def success(target: ScoreFunction, loss: Loss, images: Images, attack: Callable[..., Tensor], epsilon: float) -> float:
    """Return the percentage of targeted attacks after which the image is classified as the target class.

    Every image is attacked once for each wrong class.
    """
    classes, hits = len(images.class_names), []
    for pixels, labels in zip(images.pixels.split(100), images.labels.split(100), strict=True):
        for step in range(1, classes):
            wanted = (labels + step) % classes
            attacked = attack(target, pixels.float() / 255, wanted, epsilon, targeted=True, loss=loss)
            with torch.no_grad():
                hits.append(target(attacked).argmax(dim=1) == wanted)
    return percent(torch.cat(hits))


PAPER_SIZES = ((2_000, 5, 200), (21_870, 10, 500), (21_870, 20, None))
RECENT_SIZES = ((2_000, 5, 200), (21_870, 4, 200), (21_870, 4, None))
"""For each budget (quick, standard, paper): numbers of training images, epochs and attacked test images (None: all)."""


def run(
    study: Study,
    recipe_of: Callable[..., Recipe] = Study.toy_recipe,
    sizes: Sequence[tuple[int, int, int | None]] = PAPER_SIZES,
) -> Outcome:
    """Attack the capsules, the capsules with uniform couplings, and the CNN.

    In black-box attacks, the images are changed with the gradients of a second CNN.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NETWORKS}
    images, epochs, count = study.choose(*sizes)
    for seed in range(study.seeds):
        recipes = {name: recipe_of(study, name, seed, images=images, epochs=epochs) for name in NETWORKS}
        splits = study.splits(recipes["CNN"], images)
        attacked = some(splits.test, count)
        second, _ = study.trained(part("second CNN", seed), replace(recipes["CNN"], seed=seed + 1_000), splits)
        for name, recipe in recipes.items():
            model, _ = study.trained(part(name, seed), recipe, splits)
            preprocessing = recipe.preprocessing()

            def compute(model=model, preprocessing=preprocessing, name=name, images=attacked, second=second) -> Any:
                loss = LOSSES["CNN" if name == "CNN" else "capsules"]
                return measured(model, preprocessing, loss, images, classifier(second, preprocessing))

            found[name].append(study.cached(part(name, seed), "attacks", compute))
    rows = []
    for name, results in found.items():
        for attack in ATTACKS:
            for index, epsilon in enumerate(EPSILONS):
                paper = UNTARGETED.get((attack, name), {}).get(epsilon)
                values = [one["untargeted"][attack][index] for one in results]
                rows.append(Row(f"{name}, {attack}, ε = {epsilon}: accuracy", values, paper))
            for index, epsilon in list(enumerate(EPSILONS))[1:]:
                values = [one["targeted"][attack][index] for one in results]
                rows.append(Row(f"{name}, targeted {attack}, ε = {epsilon}: success", values))
            values = [one["targeted, as the paper"][attack] for one in results]
            rows.append(
                Row(f"{name}, targeted {attack}, ε = {TARGETED_EPSILON}: success", values, TARGETED.get((attack, name)))
            )
            for index, epsilon in list(enumerate(EPSILONS))[1:]:
                values = [one["black box"][attack][index] for one in results]
                rows.append(Row(f"{name}, {attack} transferred from another CNN, ε = {epsilon}: accuracy", values))
        rows.append(
            Row(
                f"{name}, numbers of the input with a gradient of exactly 0", [one["zero gradients"] for one in results]
            )
        )
        rows.append(Row(f"{name}, mean gradient norm per input", [one["gradient length"] for one in results], unit=""))
    notes = [
        f"Trained on {images:,} images for {epochs} epochs. Attacks on {len(attacked):,} test images follow the "
        "gradients of the cross-entropy of the CNN and of the spread loss of the capsules. The spread loss has the "
        "margin 1 in the attacks, whichever loss trained the capsules: with a smaller margin, it has no "
        "gradient for confident predictions."
    ]
    return Outcome(rows, draw(found), [*notes, *study.notes_on_toys()])


def draw(found: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draw three panels with ε on the horizontal axis, each with one line per network and attack.

    The panels show the accuracy under untargeted attacks, the success of targeted attacks, and the accuracy under
    black-box attacks.
    """
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    titles = {"untargeted": "accuracy, untargeted", "targeted": "success, targeted", "black box": "accuracy, black box"}
    looks = dict(zip(NETWORKS, (("#D55E00", "s"), ("#0072B2", "o"), ("#767676", "^")), strict=True))
    for axis, (panel, title) in zip(axes, titles.items(), strict=True):
        for name, results in found.items():
            for attack, style in (("FGSM", "-"), ("BIM", "--")):
                mean = torch.tensor([one[panel][attack] for one in results]).mean(dim=0)
                colour, marker = looks[name]
                axis.plot(EPSILONS, mean, style, color=colour, marker=marker, markersize=5, label=f"{name}, {attack}")
        axis.set_xscale("symlog", linthresh=EPSILONS[1])
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.minorticks_off()
        axis.set_xlabel("ε")
        axis.set_title(title)
    axes[0].set_ylabel("share of images %")
    axes[0].set_ylim(0, 100)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, handlelength=4)
    return figure
