"""Experiments that reproduce tables and figures of papers. `EXPERIMENTS` lists them by name."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchcaps.checks import check_choice, check_integer
from torchcaps.data import check_source
from torchcaps.data.files import write_json, write_picture
from torchcaps.environment import environment
from torchcaps.errors import BadInput, nearest
from torchcaps.experiments import (
    adversarial,
    affnist,
    capsnet_table1,
    dimensions,
    em_mnist,
    em_table1,
    epoch_selection,
    health,
    multimnist,
    novel_viewpoints,
    own_images,
    pitfalls,
    recipe_ablation,
    time_to_accuracy,
    two_digits,
    vote_agreement,
)
from torchcaps.experiments.study import BUDGETS, Outcome, Row, Study
from torchcaps.recipe import resolve_precision
from torchcaps.run_folder import read_rows, read_run

__all__ = ["EXPERIMENTS", "Experiment", "Outcome", "Row", "Study", "run_experiment"]


@dataclass(frozen=True)
class Experiment:
    """An experiment that reproduces a table or figure of a paper.

    Arguments:
        run: function that takes the study and returns the outcome.
        title: one-line description.
        paper: source of the experiment.
        standard: whether the folder `results/` of the repository contains the result for the budget ``standard``.
        draws_seed_0: whether the figure shows only seed 0, also if there are several seeds.
    """

    run: Callable[[Study], Outcome]
    title: str
    paper: str
    standard: bool = False
    draws_seed_0: bool = False


EXPERIMENTS: dict[str, Experiment] = {
    "two-digits": Experiment(
        two_digits.run,
        "Trained on single digits, tested on two or more side by side",
        "Su 2018",
        standard=True,
        draws_seed_0=True,
    ),
    "two-digits-recent": Experiment(
        partial(two_digits.run, recipe_of=two_digits.recent_recipe),
        "Trained on single digits that are shifted, rotated and squeezed, tested on two or more side by side",
        "Su 2018",
        standard=True,
        draws_seed_0=True,
    ),
    "capsnet-table1": Experiment(
        capsnet_table1.run,
        "CapsNet on MNIST: routing iterations and decoder, compared with the baseline CNN",
        "Sabour, Frosst & Hinton 2017, table 1",
        standard=True,
    ),
    "multimnist": Experiment(
        multimnist.run,
        "Two overlapping digits, recognised and reconstructed separately",
        "Sabour, Frosst & Hinton 2017, section 6",
        standard=True,
        draws_seed_0=True,
    ),
    "multimnist-recent": Experiment(
        partial(
            multimnist.run,
            networks=multimnist.NETWORKS[:2],
            recipe_of=Study.recent_digit_recipe,
            sizes=multimnist.RECENT_SIZES,
        ),
        "Two overlapping digits, recognised by CapsNet with a stem",
        "Sabour, Frosst & Hinton 2017, section 6",
        standard=True,
        draws_seed_0=True,
    ),
    "affnist": Experiment(
        affnist.run,
        "Trained on translated digits, tested on affine-transformed digits",
        "Sabour, Frosst & Hinton 2017, section 5.2",
        standard=True,
        draws_seed_0=True,
    ),
    "affnist-recent": Experiment(
        partial(affnist.run, recipe_of=Study.recent_digit_recipe),
        "Trained on translated digits, tested on affine-transformed digits: CapsNet with a stem",
        "Sabour, Frosst & Hinton 2017, section 5.2",
        standard=True,
        draws_seed_0=True,
    ),
    "dimensions": Experiment(
        dimensions.run,
        "What the dimensions of a class capsule mean",
        "Sabour, Frosst & Hinton 2017, figure 4",
        standard=True,
    ),
    "em-table1": Experiment(
        em_table1.run,
        "Matrix capsules: routing iterations, pose, loss, coordinates and activation",
        "Hinton, Sabour & Frosst 2018, table 1",
        standard=True,
    ),
    "pitfalls": Experiment(
        pitfalls.run,
        "Contribution of each correction to EM routing",
        "Gritzman 2019, figure 5",
        standard=True,
        draws_seed_0=True,
    ),
    "recipe-ablation": Experiment(
        recipe_ablation.run,
        "Contribution of each part of the recipe matrix-capsnet-toys, on toys never used in training",
        "Our own experiment",
        standard=True,
    ),
    "novel-viewpoints": Experiment(
        novel_viewpoints.run,
        "Trained on some viewpoints, tested on others",
        "Hinton, Sabour & Frosst 2018, table 2",
        standard=True,
        draws_seed_0=True,
    ),
    "novel-viewpoints-recent": Experiment(
        partial(
            novel_viewpoints.run,
            recipe_of=novel_viewpoints.recent_recipe,
            networks=novel_viewpoints.RECENT_NETWORKS,
        ),
        "Trained on some viewpoints, tested on others, with the settings of matrix-capsnet-toys",
        "Hinton, Sabour & Frosst 2018, table 2",
        standard=True,
        draws_seed_0=True,
    ),
    "adversarial": Experiment(
        adversarial.run,
        "White-box and black-box attacks on capsules and the CNN",
        "Hinton, Sabour & Frosst 2018, figure 3",
        standard=True,
    ),
    "adversarial-recent": Experiment(
        partial(adversarial.run, recipe_of=Study.recent_toy_recipe, sizes=adversarial.RECENT_SIZES),
        "White-box and black-box attacks, with the settings of matrix-capsnet-toys",
        "Hinton, Sabour & Frosst 2018, figure 3",
        standard=True,
    ),
    "vote-agreement": Experiment(
        vote_agreement.run,
        "Distance of the votes from each class capsule, per routing iteration",
        "Hinton, Sabour & Frosst 2018, figure 2",
        standard=True,
    ),
    "em-mnist": Experiment(
        em_mnist.mnist,
        "Matrix capsules on MNIST",
        "Hinton, Sabour & Frosst 2018, section 5",
        standard=True,
        draws_seed_0=True,
    ),
    "em-cifar10": Experiment(
        em_mnist.cifar10, "Matrix capsules on CIFAR-10", "Hinton, Sabour & Frosst 2018, section 5", draws_seed_0=True
    ),
    "time-to-accuracy": Experiment(
        time_to_accuracy.run,
        "Training time to a validation accuracy of 99.5 % on MNIST",
        "Our own experiment",
        standard=True,
    ),
    "epoch-selection": Experiment(
        epoch_selection.run,
        "Efficient-CapsNet on MNIST: accuracy if the epoch is chosen on the test digits",
        "Mazzia, Salvetti & Chiaberge 2021",
        standard=True,
    ),
    "own-images": Experiment(
        own_images.run,
        "The recipes for your own images, on a small training set",
        "Our own experiment",
        standard=True,
        draws_seed_0=True,
    ),
    "health": Experiment(
        health.run,
        "Dead capsules, entropy of couplings and gradients: routing against uniform couplings",
        "Our own experiment, after published criticism of routing",
        standard=True,
    ),
}
"""Experiments by name."""


def run_experiment(
    name: str,
    *,
    budget: str = "quick",
    data: str | None = None,
    seeds: int = 1,
    data_dir: Path = Path("data"),
    out: Path = Path("runs/experiments"),
    results: Path = Path("results"),
) -> tuple[Outcome, Path]:
    """Run or resume an experiment, and write its result and its figure.

    Arguments:
        name: a key of `EXPERIMENTS`.
        budget: ``quick``, ``standard`` or ``paper``, from the shortest to the longest training.
        data: name of a dataset that replaces the experiment's own dataset; None keeps the experiment's own dataset.
        seeds: number of seeds with which each network is trained.
        data_dir: folder of the datasets.
        out: folder for the training runs, which are saved in ``out/NAME-BUDGET``, or in ``out/NAME-BUDGET-DATA``
            if `data` is given.
        results: folder for ``NAME-BUDGET.json`` and ``NAME-BUDGET.png``. The file names also contain `data`, if
            given, and the number of seeds, if it is larger than 1.

    Returns:
        The outcome, and the path of the figure.

    Raises:
        BadInput: `name` or `budget` is unknown, `seeds` is below 1, `data` is empty, or the experiment does not support
            `data` or `seeds`.
    """
    if name not in EXPERIMENTS:
        raise BadInput(f"unknown experiment {name!r}{nearest(name, EXPERIMENTS)}")
    check_choice("budget", budget, BUDGETS, BadInput)
    check_integer("seeds", seeds, 1, error=BadInput)
    if data is not None:
        check_source(data)
    label, here = "-".join([name, budget, *([Path(data).name] if data else [])]), environment()
    folder = out / label
    study = Study(budget, data, seeds, data_dir, folder)  # type: ignore[arg-type]
    outcome = EXPERIMENTS[name].run(study)
    runs = [read_run(run) for run in study.runs]
    machines = [one for run in runs for one in (*run.earlier_environments, run.environment)]
    seconds = [float(row["seconds"]) for run in study.runs for row in read_rows(run / "metrics.csv")]
    commits = [*dict.fromkeys([*(one["commit"] for one in machines), *study.commits, here["commit"]])]
    precisions = [run.recipe.precision for run in runs] or [resolve_precision("auto")]
    versions = [one["versions"] for one in [*machines, here]]
    command = ["torchcaps", "experiment", name, "--budget", budget, "--seeds", str(seeds)]
    results.mkdir(parents=True, exist_ok=True)
    stem = label if seeds == 1 else f"{label}-{seeds}-seeds"
    picture = results / f"{stem}.png"
    if seeds > 1 and EXPERIMENTS[name].draws_seed_0:
        outcome.figure.suptitle("; ".join(filter(None, [outcome.figure.get_suptitle(), "seed 0"])))
    write_picture(picture, outcome.figure)
    content = {
        "experiment": name,
        "budget": budget,
        "data": data,
        "seeds": seeds,
        "command": shlex.join([*command, "--data", data] if data else command),
        "rows": [row._asdict() for row in outcome.rows],
        "notes": outcome.notes,
        "training_minutes": round(sum(seconds) / 60, 1),
        "environment": {
            **{key: _all_of([one[key] for one in [*machines, here]]) for key in ("processor", "threads", "gpu")},
            "versions": {package: _all_of([one.get(package) for one in versions]) for package in here["versions"]},
            "commit": here["commit"],
            "precision": _all_of(precisions),
            "commits": [commit for commit in commits if commit],
        },
    }
    write_json(results / f"{stem}.json", content)
    return outcome, picture


def _all_of(values: Sequence[Any]) -> Any:
    """Return the value if all are equal, otherwise the list of the different values."""
    different = [value for index, value in enumerate(values) if value not in values[:index]]
    return different[0] if len(different) == 1 else different
