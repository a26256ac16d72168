"""Health of routing (dead capsules, gradients, entropy of the couplings), compared with uniform couplings.

This is our own experiment, after Mitterreiter, Koch, Giesen & Laue 2023, Everett, Zhong & Leontidis 2023, and Gu &
Tresp 2020.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.data import Images
from torchcaps.experiments.study import Outcome, Row, Study, part, some
from torchcaps.losses import LOSSES
from torchcaps.recipe import Recipe
from torchcaps.recording import recorded

DEAD = 0.01
"""A capsule is dead if its activation is at most this value for every image."""


def layers_of(model: nn.Module, images: Images, recipe: Recipe) -> dict[str, dict[str, float]]:
    """Measure, for each layer, its share of dead parents, entropy of couplings and gradient norm of transforms.

    A parent capsule (one type at one position) is dead if its activation is at most 0.01 for every image. The
    normalised entropy of the couplings of a child is their entropy, divided by the entropy of uniform couplings. It is
    1 for uniform couplings, and 0 if the child couples to one parent only. The result is the mean over the children,
    weighted by their activations.
    """
    found: dict[str, dict[str, float]] = {}
    most: dict[str, Tensor] = {}
    preprocessing = recipe.preprocessing()
    batches = list(zip(images.pixels.split(50), images.labels.split(50), strict=True))
    for pixels, labels in batches:
        model.zero_grad()
        with recorded(model) as layers:
            scores = model(preprocessing.plain(pixels), labels).scores
        LOSSES[recipe.loss](scores, labels, **recipe.loss_options).backward()
        for layer in layers:
            name, last = layer.name.removesuffix(".routing"), layer.passes[-1]
            gradient = cast(Tensor, model.get_parameter(f"{name}.transform").grad)
            length = gradient.norm().item() / len(batches)
            with torch.no_grad():
                child, sites = layer.routing_map.edges_on(pixels.device)[:, 0], layer.routing_map.child_sites
                entropies = []
                for agreement in (last.agreement, None):
                    each = torch.special.entr(last.votes.couplings(agreement).double()).sum(dim=1)
                    entropies.append(each.new_zeros(len(each), sites, each.shape[2]).index_add_(1, child, each))
                entropy, largest = entropies
                weight = layer.children.activation.double() * (largest > 1e-9)
                relative = (weight * entropy / largest.clamp_min(1e-9)).sum() / weight.sum().clamp_min(1e-12)
                activation = layer.parents.activation.amax(dim=0)
            most[name] = torch.maximum(most[name], activation) if name in most else activation
            row = found.setdefault(name, {"dead": 0.0, "entropy": 0.0, "gradient": 0.0})
            row["entropy"] += relative.item() / len(batches)
            row["gradient"] += length
    for name, activation in most.items():
        found[name]["dead"] = 100 * (activation <= DEAD).double().mean().item()
    model.zero_grad()
    return found


def run(study: Study) -> Outcome:
    """Measure CapsNet on digits and matrix capsules on toys, each network with routing and with uniform couplings."""
    images, epochs = study.choose((2_000, 4), (21_870, 8), (21_870, 20))
    digits = study.choose("capsnet-mnist-5k", "capsnet-mnist-5k", "capsnet-mnist")
    toys = study.toys("matrix-capsnet")
    digit_epochs = study.choose(3, 8, 10)
    recipes = {
        "CapsNet, T = 3": study.recipe(
            digits, 0, images=60_000, epochs=digit_epochs, routing_options={"iterations": 3}
        ),
        "CapsNet, uniform couplings": study.recipe(
            digits, 0, images=60_000, epochs=digit_epochs, routing_options={"iterations": 1}
        ),
        "matrix capsules, T = 2": study.recipe(
            toys, 0, images=images, epochs=epochs, routing_options={"iterations": 2}
        ),
        "matrix capsules, uniform couplings": study.recipe(
            toys, 0, images=images, epochs=epochs, routing_options={"iterations": 1}
        ),
    }
    rows: list[Row] = []
    found: dict[str, list[dict[str, Any]]] = {}
    for name, plain in recipes.items():
        accuracies, healths = [], []
        for seed in range(study.seeds):
            recipe = replace(plain, seed=seed)
            splits = study.splits(
                recipe, None if name.startswith("CapsNet") else images, study.choose(2_000, None, None)
            )
            model, metrics = study.trained(part(name, seed), recipe, splits)
            accuracies.append(metrics["test_accuracy_percent"])
            sample = some(splits.validation, 200)
            healths.append(
                study.cached(part(name, seed), "health", lambda m=model, s=sample, r=recipe: layers_of(m, s, r))
            )
        rows.append(Row(f"{name}: accuracy", accuracies))
        for layer in healths[0]:
            label = f"{name}, {layer.replace('_', ' ')}"
            rows += [
                Row(f"{label}: dead capsules", [one[layer]["dead"] for one in healths]),
                Row(
                    f"{label}: entropy of the couplings, relative to uniform couplings",
                    [100 * one[layer]["entropy"] for one in healths],
                ),
                Row(f"{label}: gradient norm of the transforms", [one[layer]["gradient"] for one in healths], unit=""),
            ]
        found[name] = healths
    return Outcome(rows, draw(found), ["Dead capsules, entropies and gradients are measured on 200 validation images."])


def draw(found: dict[str, list[dict[str, Any]]]) -> Figure:
    """Draw one panel per measure, with one bar per layer."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    colours = ("#0072B2", "#999999", "#009E73", "#E69F00")
    for axis, measure, title in zip(
        axes,
        ("dead", "entropy", "gradient"),
        ("dead capsules %", "entropy of couplings, relative to uniform couplings", "gradient norm of the transforms"),
        strict=True,
    ):
        place, names = 0, []
        for (network, healths), colour in zip(found.items(), colours, strict=True):
            for layer in healths[0]:
                value = sum(one[layer][measure] for one in healths) / len(healths)
                axis.barh(place, value, color=colour)
                names.append(f"{network}: {layer.replace('_capsules', '')}" if axis is axes[0] else "")
                place += 1
        axis.set_yticks(range(place), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
        if measure == "gradient":
            axis.set_xscale("log")
        else:
            axis.set_xlim(0, 100 if measure == "dead" else 1)
    return figure
