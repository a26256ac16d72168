"""The epoch whose weights a training run saves, read from metrics.json or computed from metrics.csv."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchcaps.errors import BadInput
from torchcaps.recipe import Recipe
from torchcaps.run_folder import read_metrics, read_rows
from torchcaps.training_module import WEIGHT_OF_LOSS, ranking_metric, validation_rank


def best_epoch(folder: Path, recipe: Recipe) -> int:
    """Return the epoch whose weights a finished run saved in model.safetensors. The first epoch is 1.

    Raises:
        BadInput: metrics.json or metrics.csv is damaged.
    """
    if (folder / "metrics.json").exists() and (known := read_metrics(folder).get("best_epoch")):
        return int(known)
    ranks = _ranks(read_rows(folder / "metrics.csv"), recipe)
    return 1 + ranks.index(max(ranks))


def check_best(folder: Path, recipe: Recipe, trained: int) -> None:
    """Check, before a finished run is trained for more epochs, that the weights of its best epoch still exist.

    These weights are in best.ckpt or in model.safetensors. If an earlier attempt to train for more epochs reached a
    better epoch and was then interrupted, they are only in best.ckpt.

    Arguments:
        folder: run folder.
        recipe: recipe of the run.
        trained: number of epochs after which last.ckpt was written; 0 if last.ckpt does not exist.

    Raises:
        BadInput: best.ckpt is missing, and model.safetensors does not contain the weights of the best epoch.
    """
    if recipe.choose == "last" or (folder / "best.ckpt").exists() or not (folder / "metrics.json").exists():
        return
    kept, ranks = best_epoch(folder, recipe), _ranks(read_rows(folder / "metrics.csv")[:trained], recipe)
    later = ranks[int(read_metrics(folder).get("epochs", trained)) :]
    # Losses in metrics.csv are rounded to 1e-6, so a smaller difference does not tell which epoch was better.
    if later and max(later) > ranks[kept - 1] + 2e-6 * WEIGHT_OF_LOSS:
        raise BadInput(
            f"{folder / 'best.ckpt'} with the weights of the best epoch (epoch {1 + ranks.index(max(later))}) is "
            f"missing, and the weights in model.safetensors are those of epoch {kept}: restore best.ckpt from a copy, "
            "or train again in another folder with --out"
        )


def _ranks(rows: Sequence[Mapping[str, str]], recipe: Recipe) -> list[float]:
    """Compute the rank of every epoch, as training does. Files of earlier versions have no column for the recall."""
    name = ranking_metric(recipe)
    values = [(row.get(name) or row["validation_accuracy_percent"], float(row["validation_loss"])) for row in rows]
    return [validation_rank(float(reached), loss) for reached, loss in values]
