"""Training that starts from saved weights."""

import json
import re
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from conftest import SMALL_CAPSNET, make_images, train
from torchcaps.errors import BadInput
from torchcaps.fine_tuning import load_matching
from torchcaps.models import create_model
from torchcaps.recipes import create_recipe

pytestmark = pytest.mark.usefixtures("blank_pictures")
OF_CLASSES = {"class_capsules.transform", "decoder.layers.0.weight"}


@pytest.fixture
def three(images, tmp_path):
    """Images of three classes: the two classes of the finished run and one more class."""
    folder = shutil.copytree(images, tmp_path / "three")
    shutil.move(make_images(tmp_path / "other", seed=1) / "left", folder / "middle")
    return folder


def test_tensors_of_other_classes_keep_random_values_and_all_others_are_loaded(finished, three):
    recipe = create_recipe("capsnet-mnist", {"pretrained": str(finished[0]), "model.convolution_channels": "8"})
    options = {"image_shape": (3, 20, 24), "convolution_channels": 8, "primary_types": 2}
    saved = load_file(finished[0] / "model.safetensors")
    for names, fresh in ((("left", "right"), set()), (("up", "down"), OF_CLASSES), (("a", "b", "c"), OF_CLASSES)):
        torch.manual_seed(7)
        model = create_model("capsnet", num_classes=len(names), **options)
        random, state = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
        said = load_matching(model, recipe, names)
        assert torch.equal(torch.get_rng_state(), state)
        for key, value in model.state_dict().items():
            assert torch.equal(value, random[key] if key in fresh else saved[key])
        assert f"{len(saved) - len(fresh)} of {len(saved)} tensors loaded" in said
        assert said.partition("initial values: ")[2] == (", ".join(sorted(fresh)) or "none")


def test_a_run_records_its_initial_weights_and_can_be_resumed(call, refused, finished, three, tmp_path):
    run = tmp_path / "run"
    words = (three, run, "--from", finished[0])
    code, out, _ = train(call, *words, "--dry-run")
    assert (code, "tensors loaded" in out, run.exists()) == (0, True, False)
    code, out, error = train(call, *words, "--epochs", 1)
    assert code == 0, error
    assert re.search(r"tensors loaded \(.* % of the weights\); random initial values: class_capsules.transform", out)
    assert json.loads((run / "recipe.json").read_text())["recipe"]["pretrained"] == str(finished[0])
    assert "pretrained=" in train(refused, three, run, "--epochs", 2, "--resume")
    code, out, error = train(call, *words, "--epochs", 2, "--resume")
    assert code == 0, error
    assert "tensors loaded" not in out
    code, _, error = train(call, three, tmp_path / "whole", *words[2:], "--epochs", 2)
    assert code == 0, error
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_weights_of_another_network_are_refused(refused, finished, images, tmp_path):
    words = ("--data", images, "--out", tmp_path / "run", "--epochs", 1, "--from", finished[0])
    line = refused("train", "pooled-cnn-mnist", *words)
    assert "contains weights of the model capsnet, but the recipe pooled-cnn-mnist trains the model pooled-cnn" in line
    wide = ("--set", "model.convolution_channels=16", "--set", "model.primary_types=3", "--set", "model.decoder=false")
    line = refused("train", "capsnet-mnist", *words, *SMALL_CAPSNET, *wide, "--set", "model.primary_pose_size=4")
    assert "no weights that fit" in line
    assert "convolution_channels, primary_types, primary_pose_size, decoder" in line
    assert "does not exist: give a run folder" in refused(
        "train", "capsnet-mnist", *words[:-1], tmp_path / "none", *SMALL_CAPSNET
    )
    assert not (tmp_path / "run").exists()


def test_weights_trained_with_another_standardise_cause_a_warning(call, finished, images, tmp_path):
    words = (images, tmp_path / "run", "--from", finished[0], "--dry-run", "--set", "reconstruction_weight=0")
    for value, said in (("none", 0), ("last", 1)):
        code, _, error = train(call, *words, "--set", f"standardise={value}")
        assert code == 0
        assert error.count(f"was trained with standardise=none, but capsnet-mnist has standardise={value}") == said


def test_weights_trained_with_another_resize_cause_a_warning(call, run, images, tmp_path):
    config = json.loads((run / "config.json").read_text())
    for before, now, said in (("stretch", "pad", 0), ("pad", "pad", 0), ("pad", "stretch", 1)):
        config["images"]["resize"] = before
        (run / "config.json").write_text(json.dumps(config))
        words = ("--set", "data.image_size=[20,24]", "--set", f"data.resize={now}", "--from", run, "--dry-run")
        code, _, error = train(call, images, tmp_path / "run2", *words)
        assert code == 0
        assert error.count("was trained with data.resize=pad, but capsnet-mnist has data.resize=stretch") == said


def test_weights_trained_with_another_routing_rule_cause_a_warning(call, finished, images, tmp_path):
    words = (images, tmp_path / "run", "--from", finished[0], "--dry-run")
    for rule, said in (("dynamic", 0), ("uniform", 1)):
        code, _, error = train(call, *words, "--set", f"model.routing={rule}")
        assert code == 0
        assert error.count(f"was trained with the routing rule dynamic, but capsnet-mnist has {rule}") == said


def test_test_images_that_were_training_images_cause_a_warning(call, finished, images, tmp_path):
    split, run, more = tmp_path / "split", tmp_path / "run", tmp_path / "more"
    for name in ("train", "test"):
        shutil.copytree(images, split / name)
    code, _, error = train(call, split, run, "--epochs", 1)
    assert code == 0, error
    assert error.count("warning: ") == 1
    assert re.search(
        rf"72 training and 8 validation images of {run} are among the 80 test images, so the accuracy", error
    )
    code, _, error = train(call, images, more, "--epochs", 1, "--from", run, "--seed", 3)
    assert code == 0, error
    assert error.count("warning: ") == 2
    assert re.search(rf"\d+ training .*images of {run} are among the 16 test images", error)
    assert re.search(rf"\d+ of the \d+ validation images are among the training images of {run}, so the val", error)
    for path in (split / "test").rglob("*.png"):
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    code, _, error = train(call, split, tmp_path / "clean", "--epochs", 1)
    assert (code, error) == (0, "")


def test_training_images_are_recognised_at_another_size(call, finished, images, tmp_path):
    """The checksums of the pixels differ then, but those of the files do not."""
    words = ("--epochs", 1, "--from", finished[0], "--set", "data.image_size=[24,28]", "--seed", 3)
    for cache in ("memory", "none"):
        code, _, error = train(call, images, tmp_path / cache, *words, "--cache", cache)
        assert code == 0, error
        assert re.search(rf"of the \d+ validation images are among the training images of {finished[0]}", error)


def test_a_finished_run_needs_its_initial_weights_no_more(call, finished, images, tmp_path):
    start = shutil.copytree(finished[0], tmp_path / "start")
    words = (images, tmp_path / "run", "--epochs", 1, "--from", start)
    assert train(call, *words)[0] == 0
    shutil.rmtree(start)
    (tmp_path / "run" / "last.ckpt").unlink()
    code, out, error = train(call, *words, "--resume")
    assert (code, error) == (0, "")
    assert "is finished" in out


def test_weights_of_a_rule_that_depend_on_the_classes_are_not_loaded(tmp_path):
    """The preprocessing of the saved network is unknown, so it causes no warning."""
    options = {"image_shape": (1, 24, 24), "convolution_channels": 8, "primary_types": 2, "routing": "self_routing"}
    create_model("capsnet", num_classes=2, **options).save_pretrained(tmp_path)
    recipe = create_recipe("capsnet-mnist", {"pretrained": str(tmp_path), "model.routing": "self_routing"})
    said = load_matching(create_model("capsnet", num_classes=3, **options), recipe, ("a", "b", "c"))
    assert "random initial values: class_capsules.transform, class_capsules.routing." in said


def test_counters_of_batch_norm_are_no_weights_that_fit(tmp_path):
    small, large = (
        create_model("efficient-capsnet", channels=channels, primary_pose_size=channels[0], decoder=False)
        for channels in ((4, 4, 4, 8), (6, 6, 6, 12))
    )
    small.save_pretrained(tmp_path)
    recipe = create_recipe("efficient-capsnet-mnist", {"pretrained": str(tmp_path)})
    with pytest.raises(BadInput, match="has no weights that fit"):
        load_matching(large, recipe, ("a", "b", "c"))
