"""White-box and black-box attacks on matrix capsules and on the CNN: Hinton, Sabour & Frosst 2018, section 5.2."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.data import Images, Preparation
from torchcaps.experiments.attacks import Classifier, Loss, bim, fgsm, gradient_health
from torchcaps.experiments.study import Outcome, Row, Study, part, percent, some
from torchcaps.losses import spread_loss

EPSILONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
TARGETED_EPSILON = 0.25
ATTACKS: dict[str, Callable[..., Tensor]] = {"FGSM": fgsm, "BIM": bim}
NETWORKS = ("CNN", "capsules", "uniform couplings")
UNTARGETED = {
    ("FGSM", "CNN"): {0.1: "58", 0.2: "16", 0.5: "3"},
    ("FGSM", "capsules"): {0.1: "86", 0.2: "83", 0.5: "69"},
    ("BIM", "CNN"): {0.1: "52", 0.2: "13", 0.5: "5"},
    ("BIM", "capsules"): {0.1: "84", 0.2: "75", 0.5: "55"},
}
TARGETED = {("FGSM", "CNN"): "59", ("FGSM", "capsules"): "19", ("BIM", "CNN"): "84", ("BIM", "capsules"): "24"}


def classifier(model: nn.Module, preparation: Preparation) -> Classifier:
    """A model as a function of images in [0, 1]."""
    return lambda images: model(preparation.plain_of(images)).scores


def accuracy(attacked: Classifier, images: Images, attack: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Accuracy on attacked images, in per cent."""
    right = []
    for pixels, labels in zip(images.pixels.split(100), images.labels.split(100), strict=True):
        with torch.no_grad():
            right.append(attacked(attack(pixels.float() / 255, labels)).argmax(dim=1) == labels)
    return percent(torch.cat(right))


def measured(target: Classifier, loss: Loss, images: Images, other: Classifier) -> dict[str, Any]:
    """Everything about one network; `other` makes the black-box attacks, with a cross-entropy."""
    found: dict[str, Any] = {"untargeted": {}, "black box": {}, "targeted": {}}
    for name, attack in ATTACKS.items():
        found["untargeted"][name] = [
            accuracy(target, images, lambda x, y, e=epsilon, a=attack: a(target, x, y, e, loss=loss))
            for epsilon in EPSILONS
        ]
        found["black box"][name] = [
            accuracy(target, images, lambda x, y, e=epsilon, a=attack: a(other, x, y, e)) for epsilon in EPSILONS
        ]
        found["targeted"][name] = success(target, loss, images, attack)
    health = [
        gradient_health(target, pixels.float() / 255, labels, loss)
        for pixels, labels in zip(images.pixels.split(100), images.labels.split(100), strict=True)
    ]
    found["zero gradients"] = sum(one.zero for one in health) / len(health)
    found["gradient length"] = sum(one.norm for one in health) / len(health)
    return found


def success(target: Classifier, loss: Loss, images: Images, attack: Callable[..., Tensor]) -> float:
    """Share of images taken for the target, mean over all classes but their own, in per cent."""
    classes, hits = len(images.class_names), []
    for pixels, labels in zip(images.pixels.split(100), images.labels.split(100), strict=True):
        for step in range(1, classes):
            wanted = (labels + step) % classes
            attacked = attack(target, pixels.float() / 255, wanted, TARGETED_EPSILON, targeted=True, loss=loss)
            with torch.no_grad():
                hits.append(target(attacked).argmax(dim=1) == wanted)
    return percent(torch.cat(hits))


def run(study: Study) -> Outcome:
    """Capsules, the CNN, and capsules with uniform couplings under attack; attacks of a second CNN on all three."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NETWORKS}
    for seed in range(study.seeds):
        images, epochs = study.choose((2_000, 5), (21_870, 10), (21_870, 20))
        recipes = {
            "CNN": study.recipe(study.toys("cnn-baseline"), seed, images=images, epochs=epochs),
            "capsules": study.recipe(study.toys("matrix-capsnet"), seed, images=images, epochs=epochs, iterations=2),
            "uniform couplings": study.recipe(
                study.toys("matrix-capsnet"), seed, images=images, epochs=epochs, iterations=1
            ),
        }
        splits = study.splits(recipes["CNN"], images)
        attacked = some(splits.test, study.choose(200, 1_000, None))
        second, _ = study.trained(part("second CNN", seed), replace(recipes["CNN"], seed=seed + 1_000), splits)
        for name, recipe in recipes.items():
            model, _ = study.trained(part(name, seed), recipe, splits)
            preparation = recipe.preparation()

            def compute(model=model, preparation=preparation, name=name, images=attacked, second=second) -> Any:
                loss = functional.cross_entropy if name == "CNN" else spread_loss
                return measured(classifier(model, preparation), loss, images, classifier(second, preparation))

            found[name].append(study.once(f"{part(name, seed)}-attacked", compute))
    rows = []
    for name, results in found.items():
        for attack in ATTACKS:
            for index, epsilon in enumerate(EPSILONS):
                paper = UNTARGETED.get((attack, name), {}).get(epsilon)
                values = [one["untargeted"][attack][index] for one in results]
                rows.append(Row(f"{name}, {attack}, ε = {epsilon}: accuracy", values, paper))
            values = [one["targeted"][attack] for one in results]
            rows.append(
                Row(f"{name}, targeted {attack}, ε = {TARGETED_EPSILON}: success", values, TARGETED.get((attack, name)))
            )
            values = [one["black box"][attack][1] for one in results]
            rows.append(Row(f"{name}, {attack} made on another CNN, ε = {EPSILONS[1]}: accuracy", values))
        rows.append(Row(f"{name}, gradients of pixels that are exactly 0", [one["zero gradients"] for one in results]))
        rows.append(Row(f"{name}, length of an image's gradient", [one["gradient length"] for one in results], unit=""))
    return Outcome(rows, draw(found), study.notes_on_toys())


def draw(found: dict[str, list[dict[str, Any]]]) -> Figure:
    """Accuracy over ε, white box and black box, one line a network and attack."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    colours = dict(zip(NETWORKS, ("#D55E00", "#0072B2", "#999999"), strict=True))
    for axis, panel in zip(axes, ("untargeted", "black box"), strict=True):
        for name, results in found.items():
            for attack, style in (("FGSM", "-"), ("BIM", "--")):
                mean = torch.tensor([one[panel][attack] for one in results]).mean(dim=0)
                axis.plot(
                    EPSILONS, mean, style, color=colours[name], marker="o", markersize=3, label=f"{name}, {attack}"
                )
        axis.set_xlabel("ε")
        axis.set_title("white box" if panel == "untargeted" else "made on another CNN")
    axes[0].set_ylabel("accuracy %")
    axes[0].set_ylim(0, 100)
    axes[1].legend(fontsize=8)
    return figure
