"""`torchcaps evaluate` on the data of a run, on moved data, and on new images."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from conftest import make_images, train
from test_run_folder import SPLITS
from torchcaps import BadInput, Classifier, DataWarning, PooledCNN
from torchcaps.confusion import warn_of_one_prediction
from torchcaps.data import ImagesOnDisk, load_test_images, read_image
from torchcaps.evaluation import evaluate
from torchcaps.model_card import publish

pytestmark = pytest.mark.usefixtures("blank_pictures")


def evaluated(call, *words):
    """Return the number of test images, the accuracy, the output and the warnings of `torchcaps evaluate`."""
    code, out, error = call("evaluate", *words)
    assert code == 0, error
    count, accuracy = re.search(r"│ +([\d,]+) +│ +(\d+\.\d\d) +│", out).groups()
    return int(count.replace(",", "")), float(accuracy), out, error


def test_moved_data_have_the_same_test_images_as_before(call, refused, images, tmp_path, monkeypatch):
    root = shutil.copytree(images, tmp_path / "photos")
    out, options = tmp_path / "run", ("--epochs", 1, "--batch-size", 2, "--set", "data.test_fraction=0.5")
    code, _, error = train(call, root, out, *options)
    assert code == 0, error
    count, accuracy, _, error = evaluated(call, out)
    assert (count, error) == (40, "")
    moved = root.rename(tmp_path / "elsewhere")
    assert f"{out} was trained on {root}, which does not exist here: give its path with --data" in refused(
        "evaluate", out
    )
    found = evaluated(call, out, "--data", moved)
    assert found[:2] == (40, accuracy)
    assert (
        "no test split: 40 of 80 images are evaluated; the run used the other 40 in training or validation" in found[2]
    )
    moved.rename(root)
    shutil.copy(root / "left" / "000.png", root / "left" / "copy.png")
    assert "has changed since" in evaluated(call, out, "--data", root)[3]


def test_a_run_without_metrics_is_called_incomplete(call, finished, tmp_path):
    run = shutil.copytree(finished[0], tmp_path / "run")
    (run / "metrics.json").unlink()
    assert "is not finished, or metrics.json is missing" in evaluated(call, run)[3]


@pytest.mark.usefixtures("untyped")
def test_new_labelled_images_are_all_evaluated(call, refused, finished, tmp_path):
    new = make_images(tmp_path / "new", per_class=7, seed=9)
    count, accuracy, out, error = evaluated(call, finished[0], "--data", new)
    assert (count, error) == (14, "")
    assert "has no test split: 14 of 14 images are evaluated\n" in out
    shutil.copytree(new, tmp_path / "split" / "test")
    assert evaluated(call, finished[0], "--data", tmp_path / "split")[:2] == (14, accuracy)
    files = [*new.rglob("*.png")]
    for split, name in (("test", "test.csv"), ("train", "train.csv")):
        lines = ["file,label,split", *(f"{file},{file.parent.name},{split}" for file in files)]
        (tmp_path / name).write_text("\n".join(lines))
        assert evaluated(call, finished[0], "--data", tmp_path / name)[:2] == (14, accuracy)
    assert "cache must be one of auto, memory, none; got 'disk'" in refused(
        "evaluate", finished[0], "--data", new, "--cache", "disk"
    )
    (new / "right").rename(new / "middle")
    line = refused("evaluate", finished[0], "--data", new)
    assert "has the class middle, but the network was trained on left, right" in line


def test_images_of_some_classes_get_the_class_numbers_of_the_network(tmp_path):
    new = make_images(tmp_path / "new", per_class=2)
    images, _ = load_test_images(str(new), ("middle", "right", "left"))
    assert images.class_names == ("middle", "right", "left")
    assert [path.parent.name for path in map(Path, images.files.names)] == ["left", "left", "right", "right"]
    assert images.labels.tolist() == [2, 2, 1, 1]


def test_labelled_images_are_read_from_the_named_columns_of_a_table(tmp_path):
    new = make_images(tmp_path / "new", per_class=2)
    rows = [f"{path},{path.parent.name}" for path in new.rglob("*.png")]
    (tmp_path / "new.csv").write_text("\n".join(["photo,kind", *rows]))
    columns = {"image_column": "photo", "label_column": "kind"}
    found, _ = load_test_images(str(tmp_path / "new.csv"), ("left", "right"), **columns)
    assert found.labels.bincount().tolist() == [2, 2]


def test_new_images_of_a_single_class_are_evaluated(call, finished, tmp_path):
    new = make_images(tmp_path / "new", per_class=3, seed=9)
    shutil.rmtree(new / "right")
    assert evaluated(call, finished[0], "--data", new)[0] == 3
    (new / "right").mkdir()
    assert evaluated(call, finished[0], "--data", new)[0] == 3
    (tmp_path / "new.csv").write_text("\n".join(["file,label", *(f"{file},left" for file in new.rglob("*.png"))]))
    assert evaluated(call, finished[0], "--data", tmp_path / "new.csv")[0] == 3


def test_evaluating_on_training_images_causes_a_warning(call, images, finished, tmp_path):
    code, _, error = call("evaluate", finished[0])
    assert (code, error) == (0, "")
    shutil.copytree(images, tmp_path / "photos" / "test")
    shutil.copytree(images, tmp_path / "photos" / "train")
    code, _, error = call("evaluate", finished[0], "--data", tmp_path / "photos")
    assert code == 0, error
    assert re.search(r"warning: 58 training and 6 validation images of .* are among the 80 test images, so ", error)
    for path in (tmp_path / "photos").rglob("*.png"):
        Image.open(path).save(path.with_suffix(".bmp"))  # other files with the same pixels
        path.unlink()
    for cache in ("memory", "none"):
        code, _, again = call("evaluate", finished[0], "--data", tmp_path / "photos", "--cache", cache)
        assert (code, again) == (0, error)
    everything = load_file(finished[0] / "image-digests.safetensors")
    counts = {"train": 58, "validation": 6, "test": 16}
    assert {name: len(digests) for name, digests in everything.items()} == {
        **counts,
        **{f"{name} files": count for name, count in counts.items()},
    }


def test_a_run_is_evaluated_on_its_validation_images(call, refused, images, finished, tmp_path):
    run, scores = finished[0], tmp_path / "scores.csv"
    accuracy = json.loads((run / "metrics.json").read_text())["validation_accuracy_percent"]
    count, found, out, error = evaluated(call, run, "--split", "validation", "--csv", scores)
    assert (count, found, error) == (6, pytest.approx(accuracy, abs=0.01), "")
    assert re.search(r"┃ validation\b", out)
    assert len(scores.read_text().splitlines()) == 7
    assert evaluated(call, run, "--split", "validation", "--data", images)[:2] == (6, found)
    new = make_images(tmp_path / "new", per_class=7, seed=9)
    line = refused("evaluate", run, "--split", "validation", "--data", new)
    assert f"--split validation needs the data of {run}, but {new} is other data (" in line
    moved = shutil.copytree(images, tmp_path / "moved")
    assert evaluated(call, run, "--split", "validation", "--data", moved)[:2] == (6, found)
    line = refused("evaluate", run, "--split", "validation", "--data", "mnist-5k")
    assert f"--split validation needs the data of {run}, {images}, but --data is mnist-5k" in line
    assert "--split must be one of test, validation; got 'train'" in refused("evaluate", run, "--split", "train")
    other = tmp_path / "other"
    code, _, error = train(call, images, other, "--epochs", 1, "--seed", 1)
    assert code == 0, error
    warning = rf"warning: \d of the 6 validation images are among the training images of {other}, so "
    assert re.search(warning, evaluated(call, run, other, "--split", "validation")[3])
    tuned = tmp_path / "tuned"
    code, _, error = train(call, images, tuned, "--epochs", 1, "--from", other)
    assert code == 0, error
    assert re.search(warning, evaluated(call, tuned, "--split", "validation")[3])


def test_published_weights_are_evaluated_on_given_images(call, refused, finished, tmp_path):
    run, weights = finished[0], tmp_path / "weights"
    weights.mkdir()
    leftover, other = (weights / f"{name}.safetensors.4321.part" for name in ("model", "own"))
    leftover.touch()  # as if a command had been killed
    other.touch()
    assert call("publish", run, weights)[0] == 0
    assert not leftover.exists()
    assert other.exists()
    new = make_images(tmp_path / "new", per_class=7, seed=9)
    right, table = evaluated(call, run, "--data", new), tmp_path / "scores.csv"
    count, accuracy, out, error = evaluated(call, weights, "--data", new, "--csv", table)
    assert (count, accuracy, error) == (14, right[1], "")
    assert "has no test split: 14 of 14 images are evaluated" in out
    assert f"{weights} contains no list of its training images" in out
    assert re.search(rf"{accuracy:.2f} +│ \S+ +│ - +│", out)  # the calibration error depends on the loss
    assert len(table.read_text().splitlines()) == 15
    together = evaluated(call, run, weights, "--data", new)
    assert together[:2] == (14, right[1])
    assert f"{weights} has no recipe.json, so its test images are unknown: give images with --data" in refused(
        "evaluate", weights
    )
    assert "has no recipe.json, so its validation images are unknown" in refused(
        "evaluate", weights, "--data", new, "--split", "validation"
    )
    assert "--split must be one of test, validation; got 'all'" in refused("evaluate", weights, "--split", "all")
    lost = shutil.copytree(run, tmp_path / "lost")
    for name in ("recipe.json", "metrics.json"):
        (lost / name).unlink()
    assert "has no recipe.json: give a run folder of" in refused("evaluate", lost, "--data", new)
    assert re.search(r"│ +\d+\.\d\d +│\n", evaluated(call, run, run, "--data", new)[2])


def test_published_weights_are_evaluated_on_a_named_dataset(call, refused):
    weights = Path(__file__).parents[1] / "weights"
    count, accuracy, out, _ = evaluated(call, weights / "efficient-capsnet-mnist", "--data", "mnist-5k")
    assert (count, accuracy) == (1_000, 100.0)
    assert "contains no list of its training images" in out  # all of these digits are training digits of MNIST
    assert "the classes of mnist-5k and of the network differ (only the data: 0" in refused(
        "evaluate", weights / "matrix-capsnet-toys", "--data", "mnist-5k"
    )


def test_a_model_with_another_number_of_classes_is_refused():
    with pytest.raises(BadInput, match="the model has 3 classes, but the images have 10 class names"):
        evaluate(PooledCNN((1, 28, 28), 3), SPLITS.test)


def test_predicting_one_class_causes_a_warning_only_for_images_of_several_classes():
    with pytest.warns(DataWarning, match="the network predicts cat for every evaluated image"):
        warn_of_one_prediction(torch.tensor([[3, 0], [1, 0]]), ("cat", "dog"))
    warn_of_one_prediction(torch.tensor([[3, 0], [0, 0]]), ("cat", "dog"))
    warn_of_one_prediction(torch.tensor([[3, 0], [1, 1]]), ("cat", "dog"))


@pytest.mark.parametrize("resize", ["crop", "pad"])
def test_a_saved_network_resizes_images_as_its_training_did(resize, succeeds, refused, images, tmp_path):
    path = images / "left" / "000.png"
    size = ("--set", "data.image_size=[24,20]", "--set", f"data.resize={resize}")
    train(succeeds, images, tmp_path / "run", *size, "--epochs", 1)
    classifier = Classifier.from_pretrained(tmp_path / "run")
    scores = classifier.predict(path).scores
    assert torch.equal(scores, classifier.predict(read_image(path, 3, [24, 20], resize)[None]).scores)
    assert not torch.equal(scores, classifier.predict(read_image(path, 3, [24, 20])[None]).scores)
    for data in ((), ("--data", shutil.copytree(images, tmp_path / "copy"))):
        succeeds("evaluate", tmp_path / "run", *data, "--csv", tmp_path / "scores.csv")
        row = next(csv.DictReader((tmp_path / "scores.csv").read_text(encoding="utf-8").splitlines()))
        again = classifier.predict(row["file"]).scores[0]
        assert [float(row["score left"]), float(row["score right"])] == pytest.approx(again.tolist(), abs=1e-5)
    card = publish(tmp_path / "run", tmp_path / "shared").read_text(encoding="utf-8")
    assert {"crop": "resized and cropped to this size", "pad": "resized to fit and padded with black"}[resize] in card
    assert Classifier.from_pretrained(tmp_path / "shared").resize == resize
    assert "resize is 'pad', but image_size is None: give image_size too (data.image_size)" in train(
        refused, images, tmp_path / "other", "--set", "data.resize=pad"
    )


def test_workers_load_the_images_of_an_evaluation(call, finished, images, tmp_path, monkeypatch):
    test_images, folder, decode = tmp_path / "photos", tmp_path / "processes", ImagesOnDisk.batch
    shutil.copytree(images, test_images)
    folder.mkdir()

    def batch(self, indices):
        (folder / str(os.getpid())).touch()
        return decode(self, indices)

    monkeypatch.setattr(ImagesOnDisk, "batch", batch)
    rows = []
    for workers in (0, 2):
        words = finished[0], "--data", test_images, "--cache", "none", "--batch-size", 1, "--workers", workers
        rows.append(evaluated(call, *words)[:2])
        assert len([path for path in folder.iterdir() if path.name != str(os.getpid())]) == workers
        shutil.rmtree(folder)
        folder.mkdir()
    assert rows[0] == rows[1]
    with pytest.raises(BadInput, match="workers must be an integer of at least 0; got -1"):
        evaluate(Classifier.from_pretrained(finished[0]), SPLITS.test, workers=-1)
