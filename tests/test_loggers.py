"""Loggers: their files, their names, and errors of one line if a logger is missing or cannot write."""

import csv
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from torchcaps import BadInput
from torchcaps.data import Images, Splits
from torchcaps.loggers import check_logger, create_logger
from torchcaps.recipes import create_recipe
from torchcaps.run_folder import read_rows
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

LABELS = torch.arange(40) % 2
PIXELS = (100 * LABELS[:, None, None, None]).expand(-1, 1, 14, 14).to(torch.uint8).contiguous()
IMAGES = Images(PIXELS, LABELS, ("dark", "bright"))
SPLITS = Splits(IMAGES, IMAGES, IMAGES)
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("blank_pictures")]


def recipe_of(epochs):
    recipe = create_recipe("cnn-baseline-mnist", {"epochs": str(epochs), "batch_size": "20", "precision": "float32"})
    return replace(recipe, model_options={"channels": (4,), "hidden_sizes": (4,)})


def logged(path):
    with path.open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["train_loss"]]


def test_the_csv_logger_writes_a_new_table_after_each_resume(tmp_path):
    fit(recipe_of(2), SPLITS, tmp_path / "run", logger="csv")
    fit(recipe_of(3), SPLITS, tmp_path / "run", resume=True, logger="csv")
    folder = tmp_path / "run" / "csv"
    rows = [logged(folder / f"version_{session}" / "metrics.csv") for session in (0, 1)]
    assert [[row["epoch"] for row in each] for each in rows] == [["0", "1"], ["2"]]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_training_without_a_logger_writes_no_logs_and_gives_the_same_weights(tmp_path):
    for name in ("none", "tensorboard"):
        fit(recipe_of(1), SPLITS, tmp_path / name, logger=name)
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("none", "tensorboard")]
    assert names[1] - names[0] == {"tensorboard"}
    assert "learning_rate" in (tmp_path / "none" / "metrics.csv").read_text().splitlines()[0].split(",")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("none", "tensorboard")]
    assert weights[0] == weights[1]


def test_a_logger_receives_the_test_accuracy_once_and_by_its_own_name(tmp_path):
    accuracy = fit(recipe_of(1), SPLITS, tmp_path / "run", logger="csv")["test_accuracy_percent"]
    with (tmp_path / "run" / "csv" / "version_0" / "metrics.csv").open(newline="") as stream:
        found = [row["test_accuracy_percent"] for row in csv.DictReader(stream) if row["test_accuracy_percent"]]
    assert [float(value) for value in found] == [pytest.approx(accuracy, abs=1e-3)]


def test_a_logger_receives_the_columns_of_metrics_csv(tmp_path):
    fit(recipe_of(2), SPLITS, tmp_path / "run", logger="csv", on_epoch_end=lambda model: {"own": 0.25})
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    with (tmp_path / "run" / "csv" / "version_0" / "metrics.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    for name in ("train_loss", "validation_loss", "validation_accuracy_percent", "learning_rate", "own"):
        found = [float(row[name]) for row in table if row[name]]
        assert found == pytest.approx([float(row[name]) for row in rows], abs=1e-4)
        assert found[0] > 0


class OwnRate(TrainingModule):
    def on_train_epoch_end(self):
        self.log("learning_rate", 1.0)


@pytest.mark.parametrize("name", ["validation_rank", "step", "a/dataloader_idx_0"])
def test_values_of_on_epoch_end_change_neither_the_best_epoch_nor_the_steps_of_a_logger(name, tmp_path):
    values = iter((0.9, 0.5))
    usual = fit(recipe_of(2), SPLITS, tmp_path / "usual", logger="csv")
    options = {"logger": "csv", "on_epoch_end": lambda model: {name: next(values)}, "module_class": OwnRate}
    assert fit(recipe_of(2), SPLITS, tmp_path / "run", **options)["best_epoch"] == usual["best_epoch"] == 2
    for run in ("usual", "run"):
        rows = logged(tmp_path / run / "csv" / "version_0" / "metrics.csv")
        assert [row["step"] for row in rows] == ["1", "3"]


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_logs_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    fit(recipe_of(1), SPLITS, tmp_path / "run", logger="wandb")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_mlflow_logs_to_a_database_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    fit(recipe_of(1), SPLITS, tmp_path / "run", logger="mlflow")
    with closing(sqlite3.connect(tmp_path / "run" / "mlflow.db")) as database:
        logged = dict(database.execute("SELECT key, value FROM metrics"))
    row = read_rows(tmp_path / "run" / "metrics.csv")[-1]
    assert logged["validation_accuracy_percent"] == pytest.approx(float(row["validation_accuracy_percent"]), abs=1e-3)


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_an_mlflow_server_that_cannot_be_reached_causes_an_error_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(BadInput, match="the logger mlflow cannot start"):
        create_logger("mlflow", tmp_path / "run", recipe_of(1))


def test_an_unknown_or_missing_logger_is_refused_before_anything_is_written(refused, images, tmp_path, monkeypatch):
    words = ("train", "capsnet-mnist", "--data", images, "--out", tmp_path / "run", "--logger")
    assert "--logger must be one of tensorboard, csv, wandb, mlflow, none; got 'tensorbord'" in refused(
        *words, "tensorbord"
    )
    for name in ("wandb", "mlflow"):
        if find_spec(name) is None:
            assert f"needs the package {name}: pip install {name}" in refused(*words, name)
    assert not (tmp_path / "run").exists()
    check_logger("none")


def test_a_log_that_cannot_be_written_causes_an_error_of_one_line(tmp_path):
    """This test uses the CSV logger; a test in test_outputs.py fills the disk for TensorBoard."""
    logger = create_logger("csv", tmp_path, recipe_of(1))
    logger.log_metrics({"train_loss": 1.0}, 0)
    shutil.rmtree(logger.log_dir)
    (tmp_path / "csv" / "version_0").write_text("a file in its place")
    with pytest.raises(BadInput, match=r"could not be written .* then continue with --resume") as refusal:
        logger.save()
    assert "\n" not in str(refusal.value)
