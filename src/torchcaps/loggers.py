"""Loggers of a training run, chosen by name: TensorBoard, CSV, Weights & Biases and MLflow, all from Lightning."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from torchcaps.checks import check_choice
from torchcaps.data.files import FULL
from torchcaps.errors import BadInput, first_line
from torchcaps.recipe import Recipe

LoggerName = Literal["tensorboard", "csv", "wandb", "mlflow", "none"]


def check_logger(name: str) -> None:
    """Check that a logger exists and that its package is installed.

    Raises:
        BadInput: the name is unknown, or the package is missing.

    Example:
        >>> check_logger("tensorbord")
        Traceback (most recent call last):
        ...
        torchcaps.errors.BadInput: logger must be one of tensorboard, csv, wandb, mlflow, none; got 'tensorbord'
    """
    check_choice("logger", name, get_args(LoggerName), BadInput)
    if name in ("wandb", "mlflow") and find_spec(name) is None:
        raise BadInput(f"the logger {name} needs the package {name}: pip install {name}, or use another --logger")


def create_logger(name: str, folder: Path, recipe: Recipe) -> Logger | Literal[False]:
    """Create the logger of a training run.

    In the run folder, ``tensorboard`` writes to tensorboard/, and ``csv`` writes to csv/version_N/, with a new N each
    time training is resumed. ``wandb`` and ``mlflow`` read their settings from environment variables, for example
    ``WANDB_MODE=offline``. ``mlflow`` writes to the database mlflow.db in the run folder if ``MLFLOW_TRACKING_URI`` is
    not set.

    Arguments:
        name: one of `LoggerName`. For ``none``, the function returns False.
        folder: run folder. Its name is the name of the run.
        recipe: recipe of the run. MLflow uses the recipe's name as the name of the experiment. Weights & Biases and
            MLflow log the recipe's settings.

    Raises:
        BadInput: the name is unknown, the package is missing, or the logger cannot start.
    """
    check_logger(name)
    if name == "none":
        return False
    try:
        logger: Logger
        if name == "tensorboard":
            logger = TensorBoard(folder, name="", version="tensorboard")
        elif name == "csv":
            logger = Table(folder, name="csv")
        elif name == "wandb":
            logger = Wandb(name=folder.name, save_dir=folder, project="torchcaps", config=recipe.plain())
        else:
            tracking: dict[str, Any] = {"tracking_uri": os.environ.get("MLFLOW_TRACKING_URI")}
            if not tracking["tracking_uri"]:
                tracking["tracking_uri"] = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
                tracking["artifact_location"] = (folder.resolve() / "mlartifacts").as_uri()
            logger = Mlflow(recipe.name, folder.name, **tracking)
        _ = logger.experiment
    except Exception as error:  # each service raises its own errors
        reason = first_line(error)
        full = isinstance(error, OSError) and error.errno in FULL
        cure = f"free disk space in {folder}" if full else "change its settings"
        raise BadInput(f"the logger {name} cannot start ({reason}): {cure}, or use --logger none") from error
    if name == "mlflow":
        logger.log_hyperparams(recipe.plain())
    return logger


class OneLineErrors:
    """Mixin for loggers: if a value cannot be logged, raise `BadInput` with the cause and the cure."""

    cure = "free disk space, or restore the folder if it was moved"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._write(lambda: super(OneLineErrors, self).log_metrics(metrics, step))

    def log_graph(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: the graph of the model is not logged."""

    def save(self) -> None:
        self._write(super().save)

    def finalize(self, status: str) -> None:
        self._write(lambda: super(OneLineErrors, self).finalize(status))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # Lightning turns a failed write into a ValueError; each service has its own errors
            place = getattr(self, "log_dir", None) or type(self).__name__
            raise BadInput(
                f"{place} could not be written ({error.__cause__ or error}): {self.cure}, then continue with --resume"
            ) from error


class TensorBoard(OneLineErrors, TensorBoardLogger):
    """TensorBoard logger that reports a failed write in one line."""


class Table(OneLineErrors, CSVLogger):
    """CSV logger that reports a failed write in one line."""


class Wandb(OneLineErrors, WandbLogger):
    """Weights & Biases logger that reports a failed write in one line."""

    cure = "check the connection, or set WANDB_MODE=offline"


class Mlflow(OneLineErrors, MLFlowLogger):
    """MLflow logger that reports a failed write in one line."""

    cure = "check the server in MLFLOW_TRACKING_URI"
