"""Runs of experiments: their continuation, their provenance, their figures, and data that an experiment refuses."""

import json
import os
import runpy
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from image_trees import tree
from torchcaps import environment
from torchcaps.data import Images, Splits
from torchcaps.errors import BadInput, Diverged
from torchcaps.experiments import EXPERIMENTS, Row, Study, run_experiment
from torchcaps.experiments.study import Outcome
from torchcaps.recipes import create_recipe
from torchcaps.run_folder import changed_setting

IMAGES = Images(torch.arange(40 * 784).view(40, 1, 28, 28).to(torch.uint8), torch.arange(40) % 4, tuple("abcd"))
SPLITS = Splits(IMAGES, IMAGES, IMAGES)


def small(data: str = "photos", **settings):
    recipe = create_recipe("pooled-cnn-mnist", {"precision": "float32", "epochs": "1"})
    return replace(recipe, data=data, batch_size=20, **settings)


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_loaded_if_its_images_are_the_same_and_the_refusal_names_what_differs(tmp_path):
    study = Study("quick", None, 1, tmp_path, tmp_path)
    metrics = study.trained("net-seed0", small(), SPLITS)[1]
    written = (tmp_path / "net-seed0" / "metrics.json").stat().st_mtime_ns
    assert study.trained("net-seed0", small("elsewhere/photos/"), SPLITS)[1] == metrics
    assert (tmp_path / "net-seed0" / "metrics.json").stat().st_mtime_ns == written
    folder, other = tmp_path / "net-seed0", replace(IMAGES, labels=IMAGES.labels.flip(0))
    for changes, splits, message in (
        ({"precision": "bf16"}, SPLITS, "with precision=float32, not bf16: continue it on the hardware and with the"),
        (
            {"model_options": {"im2col": True}},
            SPLITS,
            "with model.im2col=the default, not True: continue it",
        ),
        ({"epochs": 2}, SPLITS, f"{folder} was started with epochs=1, not 2: use another --out"),
        ({}, Splits(IMAGES, IMAGES, other), "was started with other data (the test images, their labels or their"),
    ):
        with pytest.raises(BadInput) as caught:
            study.trained("net-seed0", replace(small(), **changes), splits)
        assert message in str(caught.value)
    assert (tmp_path / "net-seed0" / "metrics.json").stat().st_mtime_ns == written
    (folder / "metrics.csv").unlink()
    with pytest.raises(BadInput, match=r"metrics\.csv is missing or empty: restore it from a copy"):
        study.trained("net-seed0", small(), SPLITS)


def test_a_changed_setting_has_the_name_that_the_command_line_uses():
    recipe = create_recipe("capsnet-mnist")
    assert changed_setting(recipe, replace(recipe, data="elsewhere")) is None
    assert changed_setting(recipe, replace(recipe, name="other", epochs=99)) == "name=capsnet-mnist, not other"
    for settings, text in (
        ({"routing.iterations": "1"}, "routing.iterations=the default, not 1"),
        ({"shift": "3"}, "shift=2, not 3"),
    ):
        assert changed_setting(recipe, create_recipe("capsnet-mnist", settings)) == text


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_diverges_belongs_to_the_runs_of_its_experiment(tmp_path, monkeypatch):
    def spoil(model):
        torch.nn.init.constant_(next(model.parameters()), torch.nan)
        return {}

    def run(study):
        wrong = (
            r"^net-seed0 diverged: loss is nan at step \d+ \(epoch 2, training\); .*: use another --budget or --data$"
        )
        with pytest.raises(Diverged, match=wrong):
            study.trained("net-seed0", small(epochs=2), SPLITS, spoil)
        assert len(study.epoch_metrics("net-seed0", "seconds")) == 1
        assert study.runs == [study.folder / "net-seed0"]
        path = study.runs[0] / "recipe.json"
        said = json.loads(path.read_text())
        said["environment"]["commit"] = "0123abc"
        path.write_text(json.dumps(said))
        return Outcome([Row("net", [1.0])], Figure())

    monkeypatch.setitem(EXPERIMENTS, "short", replace(EXPERIMENTS["pitfalls"], run=run))
    run_experiment("short", data_dir=tmp_path, out=tmp_path / "runs", results=tmp_path)
    assert "0123abc" in json.loads((tmp_path / "short-quick.json").read_text())["environment"]["commits"]


@pytest.mark.parametrize(("seeds", "draws_seed_0", "title"), [(1, True, ""), (2, True, "seed 0"), (2, False, "")])
def test_a_figure_of_seed_0_says_so_if_there_are_several_seeds(seeds, draws_seed_0, title, tmp_path, monkeypatch):
    figures = []

    def run(study):
        figures.append(Figure())
        return Outcome([Row("net", [1.0] * study.seeds)], figures[0])

    short = replace(EXPERIMENTS["pitfalls"], run=run, draws_seed_0=draws_seed_0)
    monkeypatch.setitem(EXPERIMENTS, "short", short)
    run_experiment("short", seeds=seeds, data_dir=tmp_path, out=tmp_path, results=tmp_path)
    assert figures[0].get_suptitle() == title


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "tree_of", "message"),
    [
        ("multimnist", {"mode": "RGB", "size": (28, 28)}, "images have the shape (3, 28, 28), but"),
        ("multimnist-recent", {"size": (32, 28)}, "images have the shape (1, 28, 32), but"),
        ("two-digits", {"size": (28, 28)}, "whose test images have 3 classes, but"),
    ],
)
def test_images_that_an_experiment_cannot_use_are_refused_before_the_training(
    name, tree_of, message, refused, tmp_path
):
    data = tree(tmp_path / "photos", ("a", "b", "c"), 20, **tree_of)
    line = refused("experiment", name, "--data", data, "--out", tmp_path / "runs")
    assert f"data is '{data}', whose" in line
    assert message in line
    assert not [*(tmp_path / "runs").rglob("recipe.json")]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_of_changed_code_is_marked(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # in a hook of git, they name another repository
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    code = tmp_path / "src" / "torchcaps" / "environment.py"
    code.parent.mkdir(parents=True)
    shutil.copy(environment.__file__, code)
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    commit = runpy.run_path(str(code))["environment"]()["commit"]
    assert len(commit) == 40
    code.write_text(code.read_text() + "\n")
    assert runpy.run_path(str(code))["environment"]()["commit"] == f"{commit}-modified"
