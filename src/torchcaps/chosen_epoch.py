"""Which epoch's weights a training keeps, computed from metrics.csv."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchcaps.errors import BadInput
from torchcaps.recipe import Recipe
from torchcaps.run_folder import read_metrics, read_rows
from torchcaps.training_module import validation_rank


def best_epoch(folder: Path, recipe: Recipe) -> int:
    """Return the number of the epoch whose weights a finished training kept, counted from 1.

    Raises:
        BadInput: metrics.json or metrics.csv is damaged.
    """
    if (folder / "metrics.json").exists() and (known := read_metrics(folder).get("best_epoch")):
        return int(known)
    ranks = _ranks(read_rows(folder / "metrics.csv"), recipe)
    return 1 + ranks.index(max(ranks))


def check_best(folder: Path, recipe: Recipe, trained: int) -> None:
    """Check, for a training that goes on after its end, that no better epoch than that of model.safetensors is lost.

    Arguments:
        folder: run folder.
        recipe: recipe of the run.
        trained: number of epochs that last.ckpt has trained; 0 if there is none.

    Raises:
        BadInput: best.ckpt is missing, and an epoch that model.safetensors does not hold was better.
    """
    if recipe.choose == "last" or (folder / "best.ckpt").exists() or not (folder / "metrics.json").exists():
        return
    kept, ranks = best_epoch(folder, recipe), _ranks(read_rows(folder / "metrics.csv")[:trained], recipe)
    later = ranks[int(read_metrics(folder).get("epochs", trained)) :]
    # Numbers in metrics.csv are rounded, so a smaller difference does not tell which epoch was better.
    if later and max(later) > ranks[kept - 1] + 1e-5:
        raise BadInput(
            f"{folder / 'best.ckpt'} is missing: epoch {1 + ranks.index(max(later))} was better than epoch {kept}, "
            "which model.safetensors holds: restore best.ckpt from a copy, or train again in another folder"
        )


def _ranks(rows: Sequence[Mapping[str, str]], recipe: Recipe) -> list[float]:
    """Rank the epochs as in their training. Rows of earlier versions have no recall."""
    name = "validation_accuracy_percent" if recipe.class_weights == "none" else "validation_recall_percent"
    values = [(row.get(name) or row["validation_accuracy_percent"], float(row["validation_loss"])) for row in rows]
    return [validation_rank(float(reached), loss) for reached, loss in values]
