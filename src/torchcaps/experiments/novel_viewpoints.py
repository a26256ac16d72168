"""Hinton, Sabour & Frosst 2018, table 2: trained on familiar viewpoints, tested on novel ones."""

from collections.abc import Callable, Mapping, Sequence

import torch
from matplotlib.figure import Figure

from torchcaps.data import Images, Splits
from torchcaps.data.images import cut
from torchcaps.experiments.study import Outcome, Row, Study, accuracy_of, part, some
from torchcaps.recipe import Recipe
from torchcaps.recipes.matrix_capsules import with_variational_bayes

FAMILIAR: dict[str, tuple[str, tuple[int, ...]]] = {
    "azimuth": ("azimuth", (30, 32, 34, 0, 2, 4)),
    "elevation": ("elevation", (0, 1, 2)),
}
"""For azimuth and elevation: the attribute of the images, and its values in training.

As in smallNORB, an azimuth n means 10° · n, and an elevation n means 30° + 5° · n.
"""
PAPER = {
    ("azimuth", "CNN"): ("96.3", "80.0"),
    ("azimuth", "capsules"): ("96.3", "86.5"),
    ("elevation", "CNN"): ("95.7", "82.2"),
    ("elevation", "capsules"): ("95.7", "87.7"),
}
NETWORKS = ("CNN", "capsules", "uniform couplings")
VARIATIONAL_BAYES = "capsules with variational Bayes"
RECENT_NETWORKS = (*NETWORKS, VARIATIONAL_BAYES)
COLOURS_AND_MARKERS = {
    "CNN": ("#D55E00", "s"),
    "capsules": ("#0072B2", "o"),
    "uniform couplings": ("#999999", "^"),
    VARIATIONAL_BAYES: ("#009E73", "v"),
}
MATCHED = 1.0
"""Largest difference between two accuracies on familiar viewpoints that count as equal, in percentage points."""


def by_viewpoint(images: Images, split: str) -> tuple[Images, Images]:
    """Split images into those from familiar viewpoints and those from novel viewpoints."""
    attribute, values = FAMILIAR[split]
    others = sorted(set(images.attributes[attribute].tolist()) - set(values))
    return images.where(**{attribute: values}), images.where(**{attribute: others})


def unmatched(split: str, found: Mapping[str, Sequence[tuple[float, float]]]) -> list[str]:
    """Return a note for each run whose accuracy on familiar viewpoints differs too much from the accuracy of the CNN.

    Arguments:
        split: ``azimuth`` or ``elevation``.
        found: for each network, the accuracies on familiar and on novel viewpoints, one pair per seed.
    """
    return [
        f"{split}, {name}, seed {seed}: the accuracy on familiar viewpoints is {Row('', [familiar]).measured()}, but "
        f"{Row('', [cnn]).measured()} for the CNN, so the accuracies on novel viewpoints are not comparable."
        for name, pairs in found.items()
        for seed, ((familiar, _), (cnn, _)) in enumerate(zip(pairs, found["CNN"], strict=True))
        if abs(familiar - cnn) > MATCHED
    ]


def recent_recipe(study: Study, network: str, seed: int, *, images: int, epochs: int) -> Recipe:
    """Return the recipe of one of `RECENT_NETWORKS`, with settings of later papers.

    Only the recipe with variational Bayes computes the BatchNorm statistics before each evaluation.
    """
    if network == VARIATIONAL_BAYES:
        return with_variational_bayes(study.recent_toy_recipe("capsules", seed, images=images, epochs=epochs))
    return study.recent_toy_recipe(network, seed, images=images, epochs=epochs)


def run(
    study: Study, recipe_of: Callable[..., Recipe] = Study.toy_recipe, networks: Sequence[str] = NETWORKS
) -> Outcome:
    """Compare the capsules against the CNN on novel viewpoints.

    The capsules are evaluated after the epoch in which their accuracy on familiar viewpoints is closest to the CNN's.

    Arguments:
        study: options of the experiment.
        recipe_of: function that returns the recipe of a network. It takes the study, the name of the network, the seed,
            and the keyword arguments ``images`` and ``epochs``.
        networks: names of the networks. The first must be ``CNN``, because the others are compared with it.
    """
    images, epochs = study.choose((1_000, 3), (7_290, 16), (7_290, 60))
    rows: list[Row] = []
    incomparable: list[str] = []
    curves: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for split in FAMILIAR:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in networks}
        for seed in range(study.seeds):
            for name in networks:
                recipe = recipe_of(study, name, seed, images=images, epochs=epochs)
                splits = study.splits(recipe)
                everything = Images(
                    torch.cat([splits.train.pixels, splits.validation.pixels]),
                    torch.cat([splits.train.labels, splits.validation.labels]),
                    splits.train.class_names,
                    {
                        key: torch.cat([splits.train.attributes[key], splits.validation.attributes[key]])
                        for key in splits.train.attributes
                    },
                )
                familiar_views = some(by_viewpoint(everything, split)[0], round(images / 0.9))
                train, validation = cut(familiar_views, 0.1, seed)
                familiar, novel = (
                    some(part, study.choose(500, 4_000, None)) for part in by_viewpoint(splits.test, split)
                )

                preprocessing = recipe.preprocessing()

                def watch(model, familiar=familiar, novel=novel, preprocessing=preprocessing) -> dict[str, float]:
                    return {
                        "familiar_percent": accuracy_of(model, familiar, preprocessing),
                        "novel_percent": accuracy_of(model, novel, preprocessing),
                    }

                folder = part(f"{split}, {name}", seed)
                model, _ = study.trained(folder, recipe, Splits(train, validation, familiar), watch)
                every = study.epoch_metrics(folder, "familiar_percent", "novel_percent")
                if name == "CNN":
                    chosen = study.cached(
                        folder, "viewpoints", lambda model=model, watch=watch: list(watch(model).values())
                    )
                else:
                    level = found["CNN"][-1][0]
                    chosen = min(every, key=lambda pair: abs(pair[0] - level))
                found[name].append((chosen[0], chosen[1]))
                curves.setdefault((split, name), every)
        for name, pairs in found.items():
            paper = PAPER.get((split, name), (None, None))
            rows += [
                Row(f"{split}, {name}: familiar viewpoints", [pair[0] for pair in pairs], paper[0]),
                Row(f"{split}, {name}: novel viewpoints", [pair[1] for pair in pairs], paper[1]),
            ]
        incomparable += unmatched(split, found)
    notes = [
        "The epoch of the CNN is chosen on validation images of familiar viewpoints. The epoch of the capsule network "
        "is the one whose accuracy on familiar viewpoints of the test split is closest to the accuracy of the CNN, as "
        "in the paper. The novel viewpoints are never used to choose an epoch. Each network is tested on "
        f"{len(familiar):,} images with familiar and {len(novel):,} with novel viewpoints."
    ]
    return Outcome(rows, draw(curves), [*notes, *incomparable, *study.notes_on_toys()])


def draw(curves: dict[tuple[str, str], list[tuple[float, ...]]]) -> Figure:
    """Plot the accuracy on novel viewpoints against the accuracy on familiar viewpoints, one point per epoch."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = dict(zip(FAMILIAR, figure.subplots(1, len(FAMILIAR), sharey=True), strict=True))
    for (split, name), every in curves.items():
        colour, marker = COLOURS_AND_MARKERS[name]
        axes[split].plot(*zip(*every, strict=True), color=colour, marker=marker, linewidth=0.8, label=name)
    for split, axis in axes.items():
        axis.set_title(f"novel {split}")
        axis.set_xlabel("accuracy on familiar viewpoints %")
    axes["azimuth"].set_ylabel("accuracy on novel viewpoints %")
    axes["azimuth"].legend(fontsize=8)
    return figure
