"""One file per table or figure of a paper, and the table of them by name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchcaps.data.files import atomically, write_json
from torchcaps.environment import environment
from torchcaps.errors import BadInput, nearest
from torchcaps.experiments import (
    adversarial,
    affnist,
    capsnet_table1,
    dimensions,
    em_mnist,
    em_table1,
    health,
    multimnist,
    novel_viewpoints,
    pitfalls,
    recipe_ablation,
    time_to_accuracy,
    two_digits,
    vote_agreement,
)
from torchcaps.experiments.study import BUDGETS, Outcome, Row, Study
from torchcaps.recipe import resolve_precision
from torchcaps.run_folder import read_rows

__all__ = ["EXPERIMENTS", "Experiment", "Outcome", "Row", "Study", "run_experiment"]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Arguments:
        run: the study → what it found.
        title: one line.
        paper: where it is from.
        standard: its standard result is kept in the repository.
    """

    run: Callable[[Study], Outcome]
    title: str
    paper: str
    standard: bool = False


EXPERIMENTS: dict[str, Experiment] = {
    "two-digits": Experiment(
        two_digits.run, "Trained on one digit, tested on two and more side by side", "Su 2018", standard=True
    ),
    "two-digits-recent": Experiment(
        partial(two_digits.run, recipe_of=two_digits.recent_recipe),
        "Trained on one digit that is moved, rotated and squeezed, tested on two and more side by side",
        "Su 2018",
    ),
    "capsnet-table1": Experiment(
        capsnet_table1.run,
        "CapsNet on MNIST: iterations and decoder, beside the baseline CNN",
        "Sabour, Frosst & Hinton 2017, table 1",
        standard=True,
    ),
    "multimnist": Experiment(
        multimnist.run,
        "Two digits on top of each other, named and drawn apart",
        "Sabour, Frosst & Hinton 2017, section 6",
        standard=True,
    ),
    "multimnist-recent": Experiment(
        partial(
            multimnist.run,
            networks=multimnist.NETWORKS[:2],
            recipe_of=Study.recent_of_digits,
            sizes=multimnist.RECENT_SIZES,
        ),
        "Two digits on top of each other, by CapsNet with a stem",
        "Sabour, Frosst & Hinton 2017, section 6",
    ),
    "affnist": Experiment(
        affnist.run,
        "Trained on moved digits, tested under affine maps",
        "Sabour, Frosst & Hinton 2017, section 5.1",
        standard=True,
    ),
    "affnist-recent": Experiment(
        partial(affnist.run, recipe_of=Study.recent_of_digits),
        "Trained on moved digits, tested under affine maps: CapsNet with a stem",
        "Sabour, Frosst & Hinton 2017, section 5.1",
    ),
    "dimensions": Experiment(
        dimensions.run, "What the dimensions of a class capsule mean", "Sabour, Frosst & Hinton 2017, figure 4"
    ),
    "em-table1": Experiment(
        em_table1.run,
        "Matrix capsules: iterations, pose, loss, coordinates, activation",
        "Hinton, Sabour & Frosst 2018, table 1",
        standard=True,
    ),
    "pitfalls": Experiment(
        pitfalls.run, "What each correction of EM routing is worth", "Gritzman 2019, figure 5", standard=True
    ),
    "recipe-ablation": Experiment(
        recipe_ablation.run,
        "What each part of the recipe matrix-capsnet-toys is worth, on toys that are never trained on",
        "our own",
    ),
    "novel-viewpoints": Experiment(
        novel_viewpoints.run,
        "Trained on some viewpoints, tested on others",
        "Hinton, Sabour & Frosst 2018, table 2",
        standard=True,
    ),
    "novel-viewpoints-recent": Experiment(
        partial(novel_viewpoints.run, recipe_of=Study.recent_of_toys),
        "Trained on some viewpoints, tested on others, with the settings of matrix-capsnet-toys",
        "Hinton, Sabour & Frosst 2018, table 2",
    ),
    "adversarial": Experiment(
        adversarial.run,
        "White-box and black-box attacks on capsules and the CNN",
        "Hinton, Sabour & Frosst 2018, figure 3",
        standard=True,
    ),
    "adversarial-recent": Experiment(
        partial(adversarial.run, recipe_of=Study.recent_of_toys, sizes=adversarial.RECENT_SIZES),
        "White-box and black-box attacks, with the settings of matrix-capsnet-toys",
        "Hinton, Sabour & Frosst 2018, figure 3",
    ),
    "vote-agreement": Experiment(
        vote_agreement.run,
        "How far votes lie from each class capsule, pass by pass",
        "Hinton, Sabour & Frosst 2018, figure 2",
    ),
    "em-mnist": Experiment(em_mnist.mnist, "Matrix capsules on MNIST", "Hinton, Sabour & Frosst 2018, section 5"),
    "em-cifar10": Experiment(
        em_mnist.cifar10, "Matrix capsules on CIFAR-10", "Hinton, Sabour & Frosst 2018, section 5"
    ),
    "time-to-accuracy": Experiment(
        time_to_accuracy.run, "Minutes of training until a validation accuracy of 99.5 % on MNIST", "our own"
    ),
    "health": Experiment(
        health.run,
        "Dead capsules, entropy of couplings, gradients; uniform couplings beside",
        "our own, after its critics",
    ),
}
"""Name → experiment."""


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
    """Run an experiment, or go on with it, and write its result and its picture.

    Arguments:
        name: a key of `EXPERIMENTS`.
        budget: quick, standard or paper.
        data: another dataset, where the experiment can take it.
        seeds: trainings of each network.
        data_dir: folder of the datasets.
        out: its trainings lie in ``out/NAME-BUDGET``, or with other data in ``out/NAME-BUDGET-DATA``.
        results: gets ``NAME-BUDGET.json`` and ``NAME-BUDGET.png``; other data and several seeds are named too.

    Returns:
        What it found, and the path of the picture.

    Raises:
        BadInput: an unknown experiment or budget, or what the experiment refuses.
    """
    if name not in EXPERIMENTS:
        raise BadInput(f"unknown experiment {name!r}{nearest(name, EXPERIMENTS)}")
    if budget not in BUDGETS:
        raise BadInput(f"unknown budget {budget!r}{nearest(budget, BUDGETS)}")
    label, here = "-".join([name, budget, *([data] if data else [])]), environment()
    folder = out / label
    outcome = EXPERIMENTS[name].run(Study(budget, data, seeds, data_dir, folder))
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*/recipe.json"))]
    machines = [one for run in runs for one in (*run.get("earlier_environments", []), run["environment"])]
    seconds = [float(row["seconds"]) for path in folder.glob("*/metrics.csv") for row in read_rows(path)]
    commits = [*dict.fromkeys(one["commit"] for one in [*machines, here] if one["commit"])]
    command = ["torchcaps", "experiment", name, "--budget", budget, "--seeds", str(seeds)]
    results.mkdir(parents=True, exist_ok=True)
    stem = label if seeds == 1 else f"{label}-{seeds}-seeds"
    picture = results / f"{stem}.png"
    with atomically(picture) as stream:
        outcome.figure.savefig(stream, format="png", dpi=120)
    content = {
        "experiment": name,
        "budget": budget,
        "data": data,
        "seeds": seeds,
        "command": " ".join([*command, "--data", data] if data else command),
        "rows": [row._asdict() for row in outcome.rows],
        "notes": outcome.notes,
        "training_minutes": round(sum(seconds) / 60, 1),
        "environment": {**here, "precision": resolve_precision("auto"), "commits": commits},
    }
    write_json(results / f"{stem}.json", content)
    return outcome, picture
