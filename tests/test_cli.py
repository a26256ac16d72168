"""The command line: what it prints, and that every bad input gives exit code 2 and an error of one line."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import COMMAND, ENVIRONMENT, SMALL_CAPSNET
from torchcaps import MODELS, Classifier, model_card
from torchcaps.model_card import about
from torchcaps.recipes import RECIPES
from torchcaps.scores import MeanScores


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_its_own_name_a_known_model_and_a_docstring(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    assert recipe.model in MODELS
    assert RECIPES[name].__doc__


def test_recipes_info_and_data_print_their_lists(call):
    listed = call("recipes")[1]
    assert all(name in listed for name in (*RECIPES, "em", "initial_beta_a=-25.0"))
    described = call("recipes", "matrix-capsnet-toys")[1]
    assert "matrix-capsnet-toys-paper has the paper's settings" in described
    assert "`" not in described
    assert "float32" in call("info")[1] or "bf16" in call("info")[1]
    assert "mnist-5k" in call("data", "list")[1]
    assert call("data", "fetch", "mnist-5k")[0] == 0


def test_a_dataset_is_shown_in_one_picture(call, refused, images, tmp_path, monkeypatch):
    picture = tmp_path / "sheet.png"
    code, said = call("data", "show", images, "--out", picture, "--columns", 3, "--set", "data.image_size=[10,12]")[:2]
    assert (code, said.strip()) == (0, f"picture of 2 classes: {picture}")
    with Image.open(picture) as drawn:
        assert 300 < drawn.width < 420
        assert 160 < drawn.height < 220
    assert "did you mean 'data.image_size'?" in refused("data", "show", images, "--set", "data.image_siz=16")
    assert "data.seed" not in refused("data", "show", images, "--set", "data.seed=1").partition("Known")[2]
    assert "--set must be an option of the data" in refused("data", "show", images, "--set", "shift=3")
    toys = ("data", "show", "toys", "--data-dir", tmp_path, "--set")
    assert "size must be 96 or a divisor of 48; got 50" in refused(*toys, "data.size=50", "--set", "data.render_seed=1")
    assert "did you mean 'data.render_seed'?" in refused(*toys, "data.render_sed=1")
    assert "did you mean 'toys'" in refused("data", "render", "toy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images.png").write_text("mine")
    assert "images.png exists already" in refused("data", "show", images)
    assert (tmp_path / "images.png").read_text() == "mine"
    shutil.copytree(images, tmp_path / "photos" / "below")
    monkeypatch.chdir(tmp_path / "photos" / "below")
    assert call("data", "show", ".")[0] == 0
    assert [path.name for path in Path().glob("*.png")] == ["below.png"]


def test_the_commands_evaluate_and_predict_print_their_results(call, finished, images):
    code, _, error = call("evaluate", finished[0], "--precision", "fp16")
    assert (code, "precision must be one of auto, bf16, float32" in error) == (2, True)
    code, out, error = call("evaluate", finished[0], "--precision", "float32", "--batch-size", 3)
    assert code == 0, error
    assert "accuracy" in out
    code, out, error = call("predict", finished[0], images / "left" / "000.png", images / "right" / "000.png")
    assert code == 0, error
    assert "left" in out
    assert "right" in out


def test_a_published_network_predicts_like_its_run_and_has_a_model_card(
    call, refused, finished, images, tmp_path, monkeypatch
):
    run, weights = finished[0], tmp_path / "weights" / "left-right"
    code, out, error = call("publish", run, weights)
    assert code == 0, error
    assert "MiB" in out
    assert {path.name for path in weights.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    card = (weights / "README.md").read_text()
    metrics = json.loads((run / "metrics.json").read_text())
    assert f"{metrics['test_accuracy_percent']:.2f} % of {metrics['test_images']} images" in card
    assert Classifier.from_pretrained(weights).model.decoder is None
    picture = images / "left" / "000.png"
    answers = [Classifier.from_pretrained(folder).predict(picture).scores for folder in (run, weights)]
    assert torch.equal(*answers)
    assert str(tmp_path) not in card
    assert "The network was trained only on images, with" in card
    code, _, error = call("publish", run, tmp_path / "my weights")
    assert code == 0, error
    assert "torchcaps predict 'my weights' IMAGE" in (tmp_path / "my weights" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    assert call("publish", "--", run, "-net")[0] == 0
    assert "torchcaps predict ./-net IMAGE" in (tmp_path / "-net" / "README.md").read_text()
    odd = shutil.copytree(run, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    config["images"]["class_names"] = ["<b>`left", "ri\nght"]
    (odd / "config.json").write_text(json.dumps(config))
    assert call("publish", odd, tmp_path / "odd-names")[0] == 0
    assert r"2 classes: \<b\>\`left, ri\\nght." in (tmp_path / "odd-names" / "README.md").read_text()
    monkeypatch.setattr(model_card, "MOST_CLASSES", 1)
    assert call("publish", run, tmp_path / "many")[0] == 0
    assert "2 classes: left and 1 more, see config.json." in (tmp_path / "many" / "README.md").read_text()
    again = shutil.copytree(run, tmp_path / "again")
    content = json.loads((again / "recipe.json").read_text())
    content["recipe"]["pretrained"] = "weights/cats"
    (again / "recipe.json").write_text(json.dumps(content))
    assert call("publish", again, tmp_path / "cats")[0] == 0
    card = (tmp_path / "cats" / "README.md").read_text()
    assert "The training started with weights from weights/cats. The network was trained on images, with" in card
    (tmp_path / "unfinished").mkdir()
    assert "no recipe.json" in refused("publish", tmp_path / "unfinished", tmp_path / "more")


def test_a_run_is_trained_saved_and_evaluated_with_the_given_rule(succeeds, images, tmp_path):
    words = ("--set", "model.routing=attention", "--set", "routing.iterations=3", *SMALL_CAPSNET)
    succeeds("train", "capsnet-mnist", "--data", images, "--out", tmp_path / "run", "--epochs", 1, *words)
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert (recipe["model_options"]["routing"], recipe["routing_options"]) == ("attention", {"iterations": 3})
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["routing"]["class_capsules"]
    assert (saved["rule"], saved["options"]["iterations"]) == ("attention", 3)
    succeeds("evaluate", tmp_path / "run")


def test_an_unknown_name_is_refused_with_the_nearest_known_name(refused):
    assert "did you mean 'capsnet-mnist'" in refused("train", "capsnet-mnst")
    assert "did you mean 'epochs'" in refused("train", "capsnet-mnist", "--set", "epoch=3")
    assert "did you mean 'routing.iterations'" in refused("train", "capsnet-mnist", "--set", "iterations=1")
    assert "did you mean 'decay_rate'" in refused("train", "capsnet-mnist", "--set", "lr_decay=0.9")
    assert "--data FOLDER" in refused("train", "capsnet-images")
    assert "--data FOLDER" in refused("train", "cnn-images")
    assert "did you mean 'routing.iterations'" in refused("train", "capsnet-mnist", "--set", "routing.iteration=3")
    assert "did you mean 'attention'" in refused("train", "capsnet-mnist", "--set", "model.routing=atention")
    assert "--foo" in refused("train", "capsnet-mnist", "--foo")
    assert "--epochs" in refused("train", "capsnet-mnist", "--epochs", "ten")
    assert "SETTING=VALUE" in refused("train", "capsnet-mnist", "--set", "epochs")
    assert "mnist" in refused("train", "capsnet-mnist", "--data", "mnits")
    assert "did you mean 'mnist'" in refused("data", "fetch", "mnits")


def damage(path, how):
    body = (2).to_bytes(4, "big") + (4).to_bytes(4, "big") * 2 + bytes(range(32))
    content = gzip.compress(bytes.fromhex("00000d03" if how == "magic" else "00000803") + body)
    path.write_bytes(content[:-12] if how == "truncated" else content)


@pytest.mark.parametrize(("how", "word"), [("truncated", "ended before"), ("magic", "magic"), ("sum", "md5")])
def test_damaged_data_files_are_refused(refused, tmp_path, how, word):
    (tmp_path / "mnist").mkdir()
    damage(tmp_path / "mnist" / "train-images-idx3-ubyte.gz", how)
    line = refused("train", "capsnet-mnist", "--data-dir", tmp_path, "--out", tmp_path / "run")
    assert "train-images-idx3-ubyte.gz" in line
    assert word in line.lower()
    assert not (tmp_path / "run").exists()


def test_damaged_image_folders_are_refused(refused, tmp_path):
    root = tmp_path / "images"
    root.mkdir()
    (root / "only").mkdir()
    Image.fromarray(np.zeros((20, 20), np.uint8)).save(root / "only" / "a.png")
    assert "class" in refused("train", "capsnet-mnist", "--data", root, "--out", tmp_path / "run")
    shutil.copytree(root / "only", root / "other")
    for grey, name in enumerate(("only", "other")):
        for index in range(4):
            Image.fromarray(np.full((5, 5), grey, np.uint8)).save(root / name / f"{index}.png")
        (root / name / "a.png").unlink()
    assert "images for CapsNet must be at least 17×17 pixels; got 5×5" in refused(
        "train", "capsnet-mnist", "--data", root, "--out", tmp_path / "run"
    )
    (root / "only" / "0.png").write_bytes(b"not an image")
    assert "0.png" in refused("train", "capsnet-mnist", "--data", root, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_and_damaged_run_folders_are_refused(refused, call, tmp_path, finished, images):
    assert "does not exist: give a run folder" in refused("evaluate", tmp_path / "nowhere")
    assert "no config.json" in refused("evaluate", tmp_path)
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (tmp_path / "empty").mkdir()
    assert "contains no images" in refused("predict", run, tmp_path / "empty")
    assert "xyz.png does not exist" in refused("predict", run, tmp_path / "xyz.png")
    assert "classes" in refused("evaluate", run, "--data", "mnist-5k")
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors" in refused("evaluate", run)
    (run / "model.safetensors").unlink()
    assert "no model.safetensors" in refused("predict", run, images / "left" / "000.png")
    (run / "model.safetensors").write_bytes(weights)
    (run / "recipe.json").write_text("{")
    assert "damaged" in refused("evaluate", run)
    (run / "config.json").unlink()
    assert "no config.json: restore it from a copy of this run" in refused("predict", run, images)
    (run / "metrics.json").unlink()
    assert "no config.json: finish the training of this run with" in refused("predict", run, images)


def test_evaluate_averages_the_scores_of_several_runs(call, refused, finished, tmp_path):
    run, other = finished[0], shutil.copytree(finished[0], tmp_path / "other")
    network = Classifier.from_pretrained(other)
    network.model.class_capsules.transform.data = network.model.class_capsules.transform.data.flip(2)
    network.save_pretrained(other)  # this network confuses the two classes
    errors = []
    for runs in ([run], [run, other, other]):
        code, out, error = call("evaluate", *runs)
        assert code == 0, error
        errors.append(float(re.findall(r"(\d+\.\d\d) ", out)[1]))
    assert "mean of 3 runs" in out
    assert errors[0] == pytest.approx(100 - errors[1])
    assert errors[0] != errors[1]
    images = torch.rand(4, *network.image_shape)
    scores = [Classifier.from_pretrained(folder).model(images).scores for folder in (run, other)]
    mean = MeanScores([Classifier.from_pretrained(folder).model for folder in (run, other)])(images).scores
    torch.testing.assert_close(mean, (scores[0] + scores[1]) / 2)
    config = json.loads((other / "config.json").read_text())
    for name, value, alike in (("brightness", 0.5, True), ("standardise", "last", False)):
        config["images"]["preprocessing"][name] = value
        (other / "config.json").write_text(json.dumps(config))
        if alike:
            assert call("evaluate", run, other)[0] == 0
        else:
            assert f"differ in {name}" in refused("evaluate", run, other)
    (other / "recipe.json").unlink()
    assert "no recipe.json" in refused("evaluate", run, other)


def test_weights_are_not_published_into_a_run_folder(refused, finished):
    weights = (finished[0] / "model.safetensors").read_bytes()
    assert "is the folder of a run" in refused("publish", finished[0], finished[0])
    assert (finished[0] / "model.safetensors").read_bytes() == weights


def test_an_output_folder_that_cannot_be_created_is_refused(refused, tmp_path, images):
    (tmp_path / "file").write_text("")
    assert "--out" in refused("train", "capsnet-mnist", "--data", images, "--out", tmp_path / "file" / "run")


def test_devices_must_divide_the_batch(refused, tmp_path, images):
    line = refused(
        "train", "capsnet-mnist", "--data", images, "--out", tmp_path / "run", "--devices", 3, *SMALL_CAPSNET
    )
    assert "a divisor of the batch size" in line
    assert not torch.distributed.is_initialized()


STRANGE = ("long" * 50, "$a_$", r"$\frac$", "[copy]", "[b]x", "\x1b[31mred", "été→×")


def test_class_names_with_markup_and_control_characters_can_be_trained_and_printed(succeeds, tmp_path):
    for k, name in enumerate(STRANGE):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(10):
            pixels = np.full((20, 20), 40 * k + index, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    out = tmp_path / "o[/b]"
    words = ("--data", tmp_path / "photos", "--out", out, "--epochs", 1, *SMALL_CAPSNET)
    said = succeeds("train", "capsnet-mnist", *words)
    for shown in ("[copy]", "[b]x", r"\x1b[31mred", r"$\frac$"):
        assert shown in said
    assert "\x1b" not in said
    said = succeeds("predict", out, tmp_path / "photos" / "[copy]" / "0.png")
    assert "[copy]/0.png" in said.replace("\n", "")
    succeeds("data", "show", tmp_path / "photos", "--out", tmp_path / "sheet.png")


def test_a_font_without_the_characters_of_the_class_names_causes_one_warning(call, images, tmp_path):
    for folder, name in zip(sorted(images.iterdir()), ("\U00013080", "\U00013081\U00013082"), strict=True):
        shutil.copytree(folder, tmp_path / "hieroglyphs" / name)
    code, _, error = call("data", "show", tmp_path / "hieroglyphs", "--out", tmp_path / "sheet.png")
    assert code == 0
    assert error.count("lacks some characters, and pictures show boxes instead") == 1
    assert "Glyph" not in error


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "cp1252"},
        pytest.param({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, marks=pytest.mark.slow),
    ],
)
def test_training_works_if_the_encoding_of_the_output_lacks_some_characters(variables, images, tmp_path):
    words = [
        *COMMAND,
        "train",
        "capsnet-mnist",
        "--data",
        images,
        "--out",
        tmp_path / "run",
        "--epochs",
        1,
        *SMALL_CAPSNET,
    ]
    environment = {**ENVIRONMENT, **variables}
    done = subprocess.run([str(word) for word in words], capture_output=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert b"test_accuracy_percent" in done.stdout


def test_a_model_card_describes_a_named_dataset_but_no_folder_of_the_same_name(tmp_path):
    assert about("mnist") == " (Handwritten digits, white on black, 10 classes)"
    assert about(str(tmp_path / "mnist")) == about("photos") == ""
