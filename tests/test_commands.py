"""The commands `recipes` and `predict`, the option `--version`, and the folder for results of experiments."""

import csv
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

import torchcaps
from conftest import COMMAND, ENVIRONMENT, new_python
from torchcaps import Classifier, DataWarning, __version__, kernels
from torchcaps.cli import _warn
from torchcaps.cli.common import print_table
from torchcaps.options import meanings
from torchcaps.recipe import Recipe
from torchcaps.recipes import RECIPES, create_recipe, settings_of


def test_the_version_is_printed():
    done = new_python([*COMMAND[1:], "--version"])
    assert (done.returncode, done.stdout) == (0, f"torchcaps {__version__}\n")


def test_the_module_runs_without_docstrings_too():
    done = new_python(["-OO", "-m", "torchcaps", "recipes", "capsnet-mnist"])
    assert done.returncode == 0, done.stderr
    assert "learning_rate" in done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_every_setting_of_a_recipe_has_a_value_and_a_meaning(name):
    recipe = create_recipe(name)
    listed = {key: (value, meaning) for key, value, meaning in settings_of(recipe)}
    assert all(meaning for key, (_, meaning) in listed.items() if not key.startswith("loss."))
    for group in ("model", "data", "loss", "routing"):
        for option, value in getattr(recipe, f"{group}_options").items():
            assert listed[f"{group}.{option}"][0] == value
    assert {"learning_rate", "batch_size", "epochs", "crop"} <= listed.keys()


def test_the_meanings_of_settings_use_the_words_of_the_command_line(call):
    _, printed, _ = call("recipes", "capsnet-mnist")
    assert "a squash form, or null for the same as squash_form" in " ".join(printed.replace("│", " ").split())
    assert not re.search(r"\b(None|True|False)\b", printed)


def test_the_list_of_settings_says_which_settings_have_no_effect():
    listed = {key: meaning for key, _, meaning in settings_of(create_recipe("matrix-capsnet-toys"))}
    idle = {key for key, meaning in listed.items() if "No effect" in meaning}
    assert idle == {"brightness", "contrast", "decay_rate", "decay_steps", "early_iterations", "model.size"}
    assert listed["contrast"].endswith("in [0, 1]. No effect with standardise=last.")


def test_the_meanings_of_options_are_sentences_of_the_docstring():
    def function(one, two, three):
        """Do nothing.

        Arguments:
            one: the first, by Sabour et al. 2017
                and others. More about it.
            two, three: the others.

        Raises:
            nothing: never.
        """

    said = {"one": "the first, by Sabour et al. 2017 and others.", "two": "the others.", "three": "the others."}
    assert meanings(function) == said
    assert meanings(lambda x: x) == {}
    assert not [name for name in Recipe.__dataclass_fields__ if name not in meanings(Recipe)]


def test_the_command_recipes_lists_by_data_and_explains_by_name(call, refused):
    code, out, error = call("recipes", "--data", "own")
    assert code == 0, error
    assert set(re.findall(r"[\w-]+-images", out)) == {name for name in RECIPES if name.endswith("-images")}
    assert "capsnet-mnist" not in out
    header = next(line for line in out.splitlines() if "recipe" in line)
    assert re.findall(r"\w+", header) == ["recipe", "model", "routing", "epochs", "description"]
    code, out, error = call("recipes", "capsnet-images")
    assert code == 0, error
    assert re.search(r"routing\.iterations *│ 3 *│ number of routing iterations", out)
    assert re.search(r"learning_rate *│ 0\.0002 ", out)
    assert "torchcaps train capsnet-images --data FOLDER --set SETTING=VALUE" in out
    assert "did you mean 'capsnet-images'?" in refused("recipes", "capsnet-image")
    assert "no recipe trains on the data 'toy'; did you mean 'toys'?" in refused("recipes", "--data", "toy")
    assert "not both" in refused("recipes", "capsnet-mnist", "--data", "own")


def test_all_images_of_a_folder_are_predicted_and_written_to_a_table(call, finished, images, tmp_path):
    folder = tmp_path / "new"
    (folder / "deep").mkdir(parents=True)
    shutil.copy(images / "left" / "000.png", folder / "deep" / "a, b.png")
    shutil.copy(images / "right" / "000.png", folder / "z.PNG")
    shutil.copy(images / "right" / "001.png", folder / ".hidden.png")
    shutil.copytree(images / "right", folder / ".hidden")
    (folder / "notes.txt").write_text("no image")
    code, out, error = call("predict", finished[0], folder)
    assert code == 0, error
    assert re.findall(r"deep/a, b\.png|z\.PNG|hidden|notes", out) == ["deep/a, b.png", "z.PNG"]
    table = tmp_path / "table.csv"
    code, out, error = call("predict", finished[0], folder, images / "left" / "001.png", "--csv", table)
    assert (code, out) == (0, f"predictions for 3 images: {table}\n"), error
    with table.open(newline="") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["file", "predicted_class", "score left", "score right"]
    paths = [folder / "deep" / "a, b.png", folder / "z.PNG", images / "left" / "001.png"]
    answer = Classifier.from_pretrained(finished[0]).predict(paths)
    for row, path, name, scores in zip(rows, paths, answer.predicted_classes, answer.scores.tolist(), strict=True):
        assert row == [str(path), name, *(f"{score:.6g}" for score in scores)]


def test_linked_folders_of_images_are_predicted(call, finished, images, tmp_path):
    (tmp_path / "new").mkdir()
    for name in ("left", "right"):
        (tmp_path / "new" / name).symlink_to(images / name)
    code, _, error = call("predict", finished[0], tmp_path / "new", "--csv", tmp_path / "table.csv")
    assert code == 0, error
    with (tmp_path / "table.csv").open(newline="") as stream:
        listed = [row["file"] for row in csv.DictReader(stream)]
    assert listed == [str(path) for path in sorted((tmp_path / "new").glob("*/*.png"))]
    assert listed


def unprivileged(folder, *words):
    """Run a command in a folder. As root, it runs without the capabilities that override permissions."""
    less = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    options = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([*less, *COMMAND, *map(str, words)], **options, check=False)


@pytest.mark.parametrize("verb", ["predict", "data show"])
def test_a_subfolder_that_cannot_be_read_is_refused(verb, finished, images, tmp_path):
    shutil.copytree(images, tmp_path / "new")
    locked = tmp_path / "new" / "right" / "more"
    locked.mkdir(mode=0)
    run = [str(finished[0])] if verb == "predict" else []
    done = unprivileged(tmp_path, *verb.split(), *run, tmp_path / "new")
    locked.chmod(0o700)
    assert (done.returncode, done.stdout) == (2, "")
    cure = "change its permissions, or give only folders that can be read"
    assert done.stderr == f"error: {locked} cannot be read (Permission denied): {cure}\n"


def test_an_image_of_a_table_that_cannot_be_read_is_not_called_missing(images, tmp_path):
    shutil.copytree(images, tmp_path / "new")
    table = tmp_path / "labels.csv"
    table.write_text("path,label\nnew/left/000.png,left\nnew/right/000.png,right\n")
    (tmp_path / "new").chmod(0)
    done = unprivileged(tmp_path, "data", "show", table)
    (tmp_path / "new").chmod(0o700)
    image = tmp_path / "new/left/000.png"
    cure = "change the permissions of its folder"
    assert done.stderr == f"error: {image} in line 2 of {table} cannot be read (Permission denied): {cure}\n"


LONG = "/home/somebody/projects/bears/" + 10 * "images-of-2024/" + "0001.png"


def printed_cells(capsys, columns, row):
    """Print a table of one row and return the text of each column, joined over the lines, and the longest line."""
    print_table(columns, [row])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("│", "└"))]
    parts = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[:-1]]
    return ["".join(cells) for cells in zip(*parts, strict=True)], max(map(len, lines)), len(parts)


@pytest.mark.parametrize("width", [70, 80, 120])
def test_a_table_in_a_terminal_shows_all_columns_beside_a_long_path(width, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    row = (LONG, "grizzly", "0.98", "polar", "0.01")
    cells, longest, _ = printed_cells(capsys, ("image", "class", "score", "runner-up", "score"), row)
    assert tuple(cells) == row
    assert longest <= width
    row = (LONG, LONG, "12,345", "98.75", "1.25", "0.53")
    columns = ("run", "data", "test images", "accuracy %", "error %", "calibration error %")
    cells, longest, _ = printed_cells(capsys, columns, row)
    assert tuple(cells) == row
    assert longest <= width


def test_a_table_in_a_pipe_is_wider_only_if_a_path_needs_it(capsys):
    cells, _, lines = printed_cells(capsys, ("image", "class", "score"), (LONG, "grizzly bear", "0.98"))
    assert (cells, lines) == ([LONG, "grizzlybear", "0.98"], 2)
    _, longest, lines = printed_cells(capsys, ("setting", "value", "meaning"), ("epochs", "30", "the " * 100))
    assert (longest <= 140, lines) == (True, 4)


def test_a_table_is_written_completely_or_not_at_all(refused, finished, images, tmp_path):
    table, folder = tmp_path / "table.csv", tmp_path / "new"
    folder.mkdir()
    assert "contains no images" in refused("predict", finished[0], folder)
    (folder / "b.png").write_text("damaged")
    table.write_text("before")
    assert "b.png cannot be read as an image" in refused("predict", finished[0], folder, "--csv", table)
    gone = refused("predict", finished[0], folder, tmp_path / "gone.png", "--csv", table)
    assert re.search("none of the 2 images can be read; the first: .*b.png", gone)
    assert table.read_text() == "before"
    assert "does not exist" in refused("predict", finished[0], folder, "--csv", tmp_path / "none" / "table.csv")


def test_damaged_images_are_named_and_the_other_images_are_predicted(call, finished, images, tmp_path):
    folder, table = tmp_path / "new", tmp_path / "table.csv"
    folder.mkdir()
    for name in ("a.png", "d.png"):
        shutil.copy(images / "left" / "000.png", folder / name)
    (folder / "b.png").write_text("damaged")
    (folder / "c.png").write_bytes((folder / "a.png").read_bytes()[:200])
    for words in ((), ("--csv", table)):
        code, out, error = call("predict", finished[0], folder, *words)
        assert code == 0
        assert re.fullmatch(
            "warning: no prediction: .*b.png cannot be .*: replace or remove it\n"
            "warning: no prediction: .*c.png cannot be .*: replace or remove it\n",
            error,
        )
        assert "b.png" not in out
    assert out == f"predictions for 2 images: {table}\n"
    assert [Path(row[0]).name for row in csv.reader(table.read_text().splitlines())] == ["file", "a.png", "d.png"]


def test_the_results_of_an_experiment_are_in_the_folder_of_its_runs(call, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "out" / "results") in refused("experiment", "report", "--out", tmp_path / "out")
    assert "results contains no result" in refused("experiment", "report")
    assert "--out must be the name of a folder; got ''" in refused("experiment", "dimensions", "--out", "")


def test_recipes_for_own_images_differ_only_in_network_loss_and_learning_rate():
    recipes = [vars(create_recipe(name)) for name in ("capsnet-images", "matrix-capsnet-images", "cnn-images")]
    network = {"name", "model", "model_options", "routing_options", "loss", "reconstruction_weight"}
    rate = {"learning_rate", "schedule", "warm_up_epochs"}
    different = {key for key in recipes[0] if len({str(recipe[key]) for recipe in recipes}) > 1}
    assert different <= network | rate
    assert {key for key in recipes[1] if recipes[1][key] != recipes[2][key]} <= network
    variational = vars(create_recipe("variational-capsnet-images"))
    of_routing = {"name", "model_options", "routing_options"}
    assert {key for key in variational if variational[key] != recipes[1][key]} == of_routing


def test_kernels_that_cannot_be_loaded_are_one_line_with_the_cure(tmp_path):
    package = Path(torchcaps.__file__).parent
    shutil.copytree(package, tmp_path / "torchcaps", ignore=shutil.ignore_patterns("__pycache__", "_cpu*"))
    damaged = tmp_path / "torchcaps" / "kernels" / f"_cpu{EXTENSION_SUFFIXES[0]}"
    damaged.write_text("not a library")
    script = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
sys.path.insert(0, sys.argv.pop(1))
from torchcaps.cli import main
main()
"""
    words = [sys.executable, "-c", script, tmp_path, "info"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: the fused kernels cannot be loaded ({damaged}: ")
    assert "TORCHCAPS_NO_KERNELS=1" in line


def test_without_lightning_the_extra_is_named():
    script = """
import sys
from importlib import import_module

sys.modules["lightning"] = None
for name in ("training", "evaluation"):
    try:
        import_module(f"torchcaps.{name}")
    except ModuleNotFoundError as error:
        print(error)
"""
    done = new_python(["-c", script])
    assert done.stdout.splitlines() == [
        f"torchcaps.{name} needs lightning: pip install 'torchcaps[train]'" for name in ("training", "evaluation")
    ], done.stderr


def test_a_torchvision_for_another_version_of_torch_is_named_in_one_line(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms is missing")')
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    words = [*COMMAND, "train", "capsnet-mnist-5k", "--dry-run"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: torchvision does not fit this version of torch (operator torchvision::nms is")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own kernels")
def test_benchmarks_need_the_fused_kernels(refused, monkeypatch):
    monkeypatch.setattr(kernels, "_cpu", None)
    for what in ("routing", "rules", "train", "memory", "devices"):
        assert "this installation was built without them: install torchcaps with a compiler" in refused("bench", what)


def test_a_command_prints_a_warning_only_once(capsys):
    for _ in range(2):
        show = partial(_warn, set())
        for text in ("one", "two", "one"):
            show(DataWarning(text), DataWarning)
    assert capsys.readouterr().err == 2 * "warning: one\nwarning: two\n"


def test_an_error_names_the_option_or_setting_that_was_typed(refused, images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("train", "capsnet-mnist", "--data", images, "--out", "runs", "--dry-run")
    for typed, said in (
        (("--lr", 0), "error: --lr must be a finite number above 0; got 0.0"),
        (("--set", "learning_rate=0"), "error: learning_rate must be a finite number above 0; got 0.0"),
        (("--set", "learning_rate=1", "--lr", -1), "--set learning_rate=1 and --lr -1.0 change the same setting"),
        (
            ("--set", "epochs=3", "--epochs", 2),
            "error: --set epochs=3 and --epochs 2 change the same setting: leave one out",
        ),
        (("--set", "batch_size=0", "--batch-size", 0), "error: --batch-size must be"),
        (("--set", "data.image_size=0"), "error: data.image_size must be"),
        (("--set", "routing.iterations=0"), "these options: routing.iterations must be an integer from 1 to 1,000"),
        (("--set", "model.image_size=3", "--set", "data.image_size=0"), "error: unknown setting 'model.image_size'"),
        (("--workers", -1), "error: --workers must be an integer of at least 0; got -1"),
    ):
        assert said in refused(*words, *typed)
    toys = ("train", "matrix-capsnet-toys-paper", "--dry-run", "--set", "data.size=7", "--set", "model.size=small")
    assert "error: size must be 96 or a divisor of 48; got 7" in refused(*toys)
    (tmp_path / "logger").mkdir()
    (tmp_path / "logger" / "mine.txt").touch()
    said = refused("train", "capsnet-mnist", "--data", images, "--out", "logger")
    assert said.startswith("error: logger contains files that do not belong to a run (mine.txt)")
