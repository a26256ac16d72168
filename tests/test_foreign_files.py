"""Files that somebody else made or changed do no harm, and are refused in one line."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import SMALL_CAPSNET, train
from torchcaps import BadInput, Classifier, PooledCapsNet
from torchcaps.checkpoints import read_checkpoint, save_sealed
from torchcaps.data import Preprocessing, load_splits
from torchcaps.data.toys import load_toys, verify_toys
from torchcaps.models import create_model
from torchcaps.options import fits
from torchcaps.run_folder import read_metrics

pytestmark = pytest.mark.usefixtures("blank_pictures")
ESCAPE = "\x1b[31mred"


@pytest.fixture(scope="module")
def classifier():
    return Classifier(PooledCapsNet((1, 20, 20), 2), ("left", "right"), (1, 20, 20), Preprocessing())


def test_a_resumed_run_removes_no_other_files(succeeds, images, tmp_path):
    words = ["train", "capsnet-images", "--data", images, *SMALL_CAPSNET, "--set", "choose=best", "--out"]
    mine = tmp_path / "runs" / "mine" / "precious.txt"
    succeeds(*words, tmp_path / "first", "--epochs", 1)
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    for number, changed in enumerate(("..", "x/recipe.json", "../mine/precious.txt")):
        folder = shutil.copytree(tmp_path / "first", tmp_path / "runs" / str(number))
        checkpoint = read_checkpoint(folder / "last.ckpt")
        for state in checkpoint["callbacks"].values():
            if "best_model_path" in state:
                state |= {"best_model_path": changed, "kth_best_model_path": changed, "best_k_models": {changed: 0.0}}
        with (folder / "last.ckpt").open("wb") as stream:
            save_sealed(checkpoint, stream)
        succeeds(*words, folder, "--epochs", 3, "--resume")
        assert mine.read_text() == "precious"
        assert (folder / "recipe.json").is_file()
        assert (folder / "model.safetensors").is_file()


def optimizer_of(checkpoint):
    return checkpoint["optimizer_states"][0]


def shorter(checkpoint):
    for state in optimizer_of(checkpoint)["state"].values():
        state["exp_avg"] = torch.zeros(1, 1)


def repeated(checkpoint):
    for state in optimizer_of(checkpoint)["state"].values():
        state["exp_avg"] = torch.zeros(1).expand(state["exp_avg"].shape)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (shorter, r"exp_avg of weight 0 has shape \[1, 1\]"),
        (repeated, "exp_avg of weight 0 has shape"),
        (lambda checkpoint: optimizer_of(checkpoint)["param_groups"][0]["params"].reverse(), "other weights"),
        (lambda checkpoint: optimizer_of(checkpoint)["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda checkpoint: optimizer_of(checkpoint)["state"].clear(), "no state"),
        (lambda checkpoint: optimizer_of(checkpoint)["state"][0].pop("exp_avg_sq"), "other entries"),
        (lambda checkpoint: checkpoint.update(loops={}), "fit_loop"),
        (lambda checkpoint: checkpoint.pop("epoch"), "epoch"),
        (lambda checkpoint: checkpoint.update(epoch="1"), "epoch"),
        (lambda checkpoint: checkpoint.update(epoch=-1), "epoch is -1"),
        (lambda checkpoint: checkpoint.pop("optimizer_states"), "optimizer_states"),
        (lambda checkpoint: checkpoint.pop("lr_schedulers"), "lr_schedulers"),
    ],
)
def test_a_checkpoint_with_damaged_entries_is_refused(change, problem, refused, run, images):
    """PyTorch's fused optimisers would write behind the end of tensors that are too small."""
    checkpoint = read_checkpoint(run / "last.ckpt")
    change(checkpoint)
    with (run / "last.ckpt").open("wb") as stream:
        save_sealed(checkpoint, stream)
    before = (run / "model.safetensors").read_bytes()
    error = train(refused, images, run, "--epochs", 4, "--batch-size", 2, "--resume")
    assert re.search(rf"last\.ckpt is damaged .*{problem}", error)
    assert (run / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"evaluated_split": '"><script>'},
        {"test_images": float("inf")},
        {"test_images": "4"},
        {"test_accuracy_percent": 10**400},
        {"test_evaluations": "1"},
        {"epochs": "x"},
        {"classes": {"cat": []}},
    ],
)
def test_metrics_of_other_types_are_refused(change, tmp_path):
    metrics = {"test_accuracy_percent": 50.0, "test_images": 4, "epochs_planned": 1, "test_evaluations": 1}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    assert read_metrics(tmp_path)["evaluated_split"] == "test"
    for damaged in (metrics | change, list(change), str(change), None):
        (tmp_path / "metrics.json").write_text(json.dumps(damaged))
        with pytest.raises(BadInput, match="is damaged"):
            read_metrics(tmp_path)


@pytest.mark.parametrize("sums", [{}, {"../../../etc/hostname": "0" * 32}])
def test_toys_without_the_checksum_of_every_file_are_refused(sums, tmp_path):
    (tmp_path / "toys").mkdir()
    (tmp_path / "toys" / "toys-48x48-md5.json").write_text(json.dumps(sums))
    with pytest.raises(BadInput, match="does not name exactly the rendered files"):
        load_toys(tmp_path)
    assert "hostname" not in str(verify_toys(tmp_path))


def test_images_of_a_class_name_that_the_network_repeats_are_refused(classifier, refused, images, tmp_path):
    replace(classifier, class_names=("left", "left")).save_pretrained(tmp_path)
    assert "several classes named left" in refused("evaluate", tmp_path, "--data", images)


def test_weights_that_are_nan_are_refused(classifier, tmp_path):
    spoiled = PooledCapsNet((1, 20, 20), 2)
    with torch.no_grad():
        next(spoiled.parameters())[0] = torch.nan
    replace(classifier, model=spoiled).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="contains NaN"):
        Classifier.from_pretrained(tmp_path)


@pytest.mark.parametrize(("model", "option"), [("matrix-capsnet", "stem"), ("self-routing-capsnet", "capsule_layers")])
def test_networks_with_a_billion_layers_are_refused(model, option):
    with pytest.raises(BadInput, match=f"{option} must be an integer from 0 to 100; got 1000000000"):
        create_model(model, image_shape=(1, 28, 28), num_classes=2, **{option: 10**9})


def test_numbers_that_no_float_can_represent_are_refused(refused, images, tmp_path):
    assert not any(fits(value, float) for value in (10**400, np.float32("inf"), np.float64("nan")))
    assert fits(np.float32(1), float)
    words = ("train", "cnn-images", "--data", images, "--out", tmp_path / "run", "--dry-run")
    assert "weight_decay" in refused(*words, "--set", f"weight_decay=1{'0' * 400}")


def test_control_characters_in_class_names_do_not_reach_the_terminal(classifier, succeeds, images, tmp_path):
    replace(classifier, class_names=(ESCAPE, ESCAPE + "der")).save_pretrained(tmp_path / "weights")
    image = next(images.glob("left/*.png"))
    output = succeeds("inspect", tmp_path / "weights", image, "--out", tmp_path / "seen.png")
    assert "red" in output
    assert "\x1b" not in output


def test_files_that_an_editor_saved_with_a_byte_order_mark_are_read(run, succeeds, images):
    for name in ("recipe.json", "config.json", "metrics.json", "metrics.csv"):
        (run / name).write_bytes(b"\xef\xbb\xbf" + (run / name).read_bytes())
    succeeds("evaluate", run)
    assert "is finished" in train(succeeds, images, run, "--epochs", 3, "--batch-size", 2, "--resume")


def test_names_that_are_too_long_for_the_file_system_are_refused(tmp_path):
    for name in ("x" * 300, "x" * 300 + ".csv"):
        with pytest.raises(BadInput, match="is neither a dataset nor an existing folder or table"):
            load_splits(name, tmp_path)
    with pytest.raises(BadInput, match="does not exist"):
        Classifier.from_pretrained(tmp_path / ("x" * 300))
