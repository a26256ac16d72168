"""A resumed run accepts replaced images that it has not used, and refuses to continue without its best weights.

It counts its evaluations on the test split. A folder without a run cannot be resumed.
"""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from conftest import make_images, train
from test_run_folder import SPLITS, FirstIsBest, digits, tiny
from torchcaps import BadInput, Classifier
from torchcaps.confusion import per_class
from torchcaps.data import Preprocessing, load_splits
from torchcaps.data.files import write_json
from torchcaps.evaluation import evaluate
from torchcaps.model_card import publish
from torchcaps.models import PooledCNN
from torchcaps.run_folder import read_rows, read_run, write_run
from torchcaps.run_report import write_run_report
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture
def photos(tmp_path):
    return make_images(tmp_path / "photos", per_class=10)


DISK = ("--cache", "none", "--workers", 0, "--batch-size", 8, "--epochs", 1)


def test_a_damaged_image_found_in_the_first_epoch_can_be_replaced(call, refused, photos, tmp_path):
    bad, run = photos / "left" / "003.png", tmp_path / "run"
    bad.write_bytes(bad.read_bytes()[:-40])
    assert f"{bad} cannot be read as an image" in train(refused, photos, run, *DISK)
    shutil.copy(photos / "left" / "002.png", bad)
    code, _, error = train(call, photos, run, *DISK, "--resume")
    assert code == 0, error
    assert re.match(r"warning: .*run: the \w+ images, .* have changed, but .* has not used these images yet", error)
    shutil.copy(photos / "left" / "004.png", bad)
    assert "was started with other data" in train(refused, photos, run, *DISK[:-1], 2, "--resume")


def test_checksums_of_pixels_are_kept_if_a_run_is_resumed_with_images_on_disk(call, photos, tmp_path):
    run = tmp_path / "run"
    assert train(call, photos, run, "--cache", "memory", *DISK[2:])[0] == 0
    before = load_file(run / "image-digests.safetensors")
    assert train(call, photos, run, *DISK[:-1], 2, "--resume")[0] == 0
    after = load_file(run / "image-digests.safetensors")
    assert (
        after.keys()
        == before.keys()
        == {name + kind for name in ("train", "validation", "test") for kind in ("", " files")}
    )
    assert all(np.array_equal(after[name], before[name]) for name in before)


def test_a_damaged_test_image_found_in_the_final_test_can_be_replaced(call, refused, photos, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(photos, tmp_path / "split" / "train")
    for path in make_images(tmp_path / "split" / "test", per_class=20).glob("*/00*.png"):
        path.unlink()  # the other images are not among the training images
    bad = tmp_path / "split" / "test" / "right" / "013.png"
    bad.write_bytes(bad.read_bytes()[:-40])
    assert f"{bad} cannot be read as an image" in train(refused, tmp_path / "split", run, *DISK)
    trained = (run / "last.ckpt").read_bytes()
    shutil.copy(photos / "right" / "002.png", bad)
    code, out, error = train(call, tmp_path / "split", run, *DISK, "--resume")
    assert code == 0, error
    assert "the test images, their labels or their order have changed" in error
    assert "epoch 1/1" not in out
    assert (run / "last.ckpt").read_bytes() == trained
    shutil.copy(photos / "right" / "004.png", bad)
    assert "was started with other data" in train(refused, tmp_path / "split", run, *DISK[:-1], 2, "--resume")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choose", ["last", "best"])
def test_a_run_that_stopped_early_is_not_trained_further_when_it_is_resumed(choose, tmp_path, capsys):
    recipe = replace(tiny(12), patience=1, choose=choose)
    right, run = fit(recipe, SPLITS, tmp_path / "right"), tmp_path / "run"
    assert right["epochs"] < 12
    now = right["epochs"]
    line = f"stopped early after epoch {now}: the validation accuracy has not improved since epoch {now - 1}\n"
    assert line in capsys.readouterr().out
    fit(recipe, SPLITS, run)
    (run / "metrics.json").unlink()  # as after a kill between the last epoch and the test
    assert fit(recipe, SPLITS, run, resume=True)["epochs"] == right["epochs"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("right", "run")]
    assert weights[0] == weights[1]
    assert fit(replace(recipe, epochs=14), SPLITS, run, resume=True)["epochs"] > right["epochs"]


class EqualAccuracies(TrainingModule):
    """All epochs have the same accuracy, far from 100 %, and the loss falls by 1e-5 in each epoch."""

    def loss_and_scores(self, images, labels, train):
        scores = self.model(images).scores
        return 0 * scores.sum() + 0.4 - 1e-5 * self.current_epoch, torch.eye(scores.shape[1])[torch.zeros_like(labels)]


@pytest.mark.filterwarnings("ignore")
def test_among_epochs_with_the_same_accuracy_the_one_with_the_lowest_loss_is_the_best(tmp_path):
    metrics = fit(tiny(3), SPLITS, tmp_path / "run", module_class=EqualAccuracies)
    accuracies = {row["validation_accuracy_percent"] for row in read_rows(tmp_path / "run" / "metrics.csv")}
    assert len(accuracies) == 1
    assert accuracies.isdisjoint({"0.0000", "100.0000"})
    assert metrics["best_epoch"] == 3


@pytest.mark.filterwarnings("ignore")
def test_with_more_epochs_a_run_that_stopped_early_waits_for_as_many_epochs_again(tmp_path, capsys):
    recipe = replace(tiny(12), patience=3)
    epochs = [
        fit(replace(recipe, epochs=count), SPLITS, tmp_path, resume=True, module_class=EqualAccuracies)["epochs"]
        for count in (12, 14, 10)
    ]
    assert epochs == [4, 7, 10]  # the last training ends as planned
    assert capsys.readouterr().out.count("the validation accuracy has not improved since epoch 1\n") == 2


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_stopped_early_and_was_trained_further_is_not_finished(tmp_path):
    recipe = replace(tiny(12), patience=3)
    fit(recipe, SPLITS, tmp_path, module_class=EqualAccuracies)

    def interrupt(model):
        if len(read_rows(tmp_path / "metrics.csv")) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(
            replace(recipe, epochs=20),
            SPLITS,
            tmp_path,
            resume=True,
            module_class=EqualAccuracies,
            on_epoch_end=interrupt,
        )
    metrics = fit(recipe, SPLITS, tmp_path, resume=True, module_class=EqualAccuracies)
    assert metrics["epochs"] == len(read_rows(tmp_path / "metrics.csv")) > 6


@pytest.mark.filterwarnings("ignore")
def test_a_finished_run_of_one_epoch_without_its_checkpoint_does_not_start_again(tmp_path):
    fit(tiny(1), SPLITS, tmp_path)
    (tmp_path / "last.ckpt").unlink()
    weights = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(BadInput, match=r"last\.ckpt is missing: restore it"):
        fit(tiny(2), SPLITS, tmp_path, resume=True)
    assert (tmp_path / "model.safetensors").read_bytes() == weights


@pytest.mark.usefixtures("untyped")
@pytest.mark.filterwarnings("ignore")
def test_numbers_of_numpy_in_a_recipe_are_saved_and_the_rate_of_the_last_step_is_logged(tmp_path):
    numbers = {"seed": np.int64(3), "epochs": np.int64(1), "patience": np.int64(4), "shift": np.int64(1)}
    numbers |= {"learning_rate": np.float32(0.5), "gradient_clip": np.float32(1), "weight_decay": np.float64(0.01)}
    recipe = replace(tiny(1), schedule="cosine", **numbers)
    fit(recipe, SPLITS, tmp_path)
    assert read_run(tmp_path).recipe == replace(recipe, seed=3, learning_rate=0.5)
    (row,) = read_rows(tmp_path / "metrics.csv")
    assert float(row["learning_rate"]) == pytest.approx(0.5 * 0.25)  # the third of three steps
    assert fit(replace(recipe, epochs=np.int64(2)), SPLITS, tmp_path, resume=True)["epochs"] == 2


@pytest.mark.filterwarnings("ignore")
def test_a_longer_cosine_is_announced_and_only_a_finished_training_is_published(tmp_path, capsys):
    run, recipe = tmp_path / "run", replace(tiny(1), schedule="cosine")
    fit(recipe, SPLITS, run)
    publish(run, tmp_path / "before")

    def interrupted(model):
        raise KeyboardInterrupt

    edited = read_run(run)
    machine = {**edited.environment, "threads": 77, "versions": {**edited.environment["versions"], "torch": "2.9.0"}}
    write_run(run, replace(edited, environment=machine))
    with pytest.raises(KeyboardInterrupt):
        fit(replace(recipe, epochs=3), SPLITS, run, resume=True, on_epoch_end=interrupted)
    changed = f"torch 2.9.0, not {edited.environment['versions']['torch']}; threads 77, not {torch.get_num_threads()}"
    assert f"{run} was last trained with {changed}: weights" in (printed := capsys.readouterr().out)
    line = f"{run} was started with 1 epochs; training continues to epoch 3, and the cosine of the learning rate now"
    assert line in printed
    with pytest.raises(BadInput, match="is not finished: finish it with `torchcaps train` and --resume"):
        publish(run, tmp_path / "after")
    assert read_run(run).recipe.epochs == 3
    assert fit(recipe, SPLITS, run, resume=True)["epochs"] == 1
    assert read_run(run).recipe.epochs == 1
    publish(run, tmp_path / "after")


@pytest.mark.filterwarnings("ignore")
def test_a_run_whose_best_weights_are_lost_is_not_resumed_from_an_earlier_epoch(tmp_path):
    """This happens if a run was resumed and killed, and best.ckpt was then lost."""
    run = tmp_path / "run"
    fit(tiny(1), SPLITS, run)
    names = ("model.safetensors", "config.json", "metrics.json")
    earlier = {name: (run / name).read_bytes() for name in names}
    fit(tiny(3), SPLITS, run, resume=True)
    losses = [float(row["validation_loss"]) for row in read_rows(run / "metrics.csv")]
    assert losses[2] < losses[1] < losses[0]
    for name, content in earlier.items():
        (run / name).write_bytes(content)
    with pytest.raises(
        BadInput, match=r"best\.ckpt .* best epoch \(epoch 3\) is missing, .* model\.safetensors .* epoch 1"
    ):
        fit(tiny(4), SPLITS, run, resume=True)
    assert fit(replace(tiny(1), name="other", choose="last"), SPLITS, tmp_path / "last")["best_epoch"] == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("earlier", [False, True])
def test_evaluations_on_the_test_split_are_counted_even_if_metrics_are_deleted(earlier, tmp_path):
    """Also if the run was started by an earlier version, which counted them only in metrics.json."""
    assert fit(tiny(1), SPLITS, tmp_path)["test_evaluations"] == 1
    if earlier:
        content = json.loads((tmp_path / "recipe.json").read_text())
        del content["test_evaluations"]
        write_json(tmp_path / "recipe.json", content)
    assert fit(tiny(2), SPLITS, tmp_path, resume=True)["test_evaluations"] == 2
    (tmp_path / "metrics.json").unlink()
    assert fit(tiny(2), SPLITS, tmp_path, resume=True)["test_evaluations"] == 3
    assert read_run(tmp_path).test_evaluations == 3


def test_resuming_in_a_folder_without_a_run_is_refused(refused, images, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("typo", "empty"):
        line = train(refused, images, tmp_path / name, "--resume")
        assert line == f"error: {tmp_path / name} contains no run to continue: correct --out, or leave out --resume"
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("patience", [0, 1])
def test_a_run_without_a_test_is_tested_later_without_more_training(patience, tmp_path):
    """Also a run that stopped early, and without last.ckpt. A training for more epochs is possible after the test."""

    class Watched(FirstIsBest if patience else TrainingModule):
        trained = 0

        def training_step(self, *batch):
            Watched.trained += 1
            return super().training_step(*batch)

    def evaluated(images):
        found = evaluate(PooledCNN.from_pretrained(run), images, recipe.preprocessing(), precision="float32")
        return pytest.approx(found.accuracy_percent), per_class(found.confusion, images.class_names)

    run = tmp_path / "run"
    recipe = tiny(6 if patience else 2, patience=str(patience), crop="20", test_crops="2")
    metrics = fit(recipe, SPLITS, run, module_class=Watched, test=False)
    assert metrics["epochs"] == 2
    assert not {"test_accuracy_percent", "test_error_percent"} & set(metrics)
    assert (metrics["evaluated_split"], metrics["test_evaluations"]) == ("validation", 0)
    assert (metrics["validation_accuracy_percent"], metrics["classes"]) == evaluated(SPLITS.validation)
    trained, weights = Watched.trained, (run / "model.safetensors").read_bytes()
    assert fit(recipe, SPLITS, run, module_class=Watched, resume=True, test=False) == metrics
    started, last = [], (run / "last.ckpt").rename(tmp_path / "last.ckpt")
    # The test images may change as long as they have not been used.
    other, options = replace(SPLITS, test=digits(40, 3)), {"module_class": Watched, "resume": True}
    tested = fit(recipe, other, run, **options, on_start=lambda *_: started.append(True))
    assert (tested["evaluated_split"], tested["test_evaluations"], tested["test_images"]) == ("test", 1, 40)
    assert (tested["test_accuracy_percent"], tested["classes"]) == evaluated(other.test)
    assert tested["best_epoch"] == metrics["best_epoch"]
    assert (Watched.trained, started, (run / "model.safetensors").read_bytes()) == (trained, [], weights)
    with pytest.raises(BadInput, match="was started with other data"):
        fit(recipe, SPLITS, run, **options)
    last.rename(run / "last.ckpt")
    longer = fit(replace(recipe, epochs=7), other, run, **options, test=False)
    assert Watched.trained > trained
    assert "test_accuracy_percent" not in longer
    assert (longer["evaluated_split"], longer["test_evaluations"]) == ("validation", 1)


@pytest.mark.filterwarnings("ignore")
def test_a_test_that_was_killed_before_it_wrote_its_metrics_is_repeated_and_counted(tmp_path):
    fit(tiny(1), SPLITS, tmp_path, test=False)
    before = (tmp_path / "metrics.json").read_bytes()
    fit(tiny(1), SPLITS, tmp_path, resume=True)
    (tmp_path / "metrics.json").write_bytes(before)  # as if the process had been killed just before
    (tmp_path / "last.ckpt").unlink()
    write_run_report(tmp_path, tmp_path / "run.html")
    assert "of the validation images" not in (tmp_path / "run.html").read_text()
    again = fit(tiny(1), SPLITS, tmp_path, resume=True)
    assert (again["evaluated_split"], again["test_evaluations"]) == ("test", 2)


@pytest.mark.filterwarnings("ignore")
def test_a_module_with_weights_of_its_own_is_tested_later(tmp_path):
    class Scaled(TrainingModule):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def loss_and_scores(self, *words):
            loss, scores = super().loss_and_scores(*words)
            return self.scale * loss, scores

    recipe = replace(tiny(1), choose="last")
    fit(recipe, SPLITS, tmp_path, module_class=Scaled, test=False)
    assert fit(recipe, SPLITS, tmp_path, module_class=Scaled, resume=True)["evaluated_split"] == "test"
    assert len([*tmp_path.glob("tensorboard/**/events*")]) == 1


def test_the_command_trains_without_a_test(call, refused, images, tmp_path):
    run, weights = tmp_path / "run", tmp_path / "weights"
    code, out, error = train(call, images, run, "--epochs", 1, "--no-test")
    assert code == 0, error
    assert "test_accuracy_percent" not in out
    assert f"validation images with the worst scores: {run / 'worst.png'}" in out
    assert call("report", run)[0] == 0
    page = (run / "report.html").read_text()
    accuracy = json.loads((run / "metrics.json").read_text())["validation_accuracy_percent"]
    assert f"Validation accuracy {accuracy} % of" in page
    assert "Confusion matrix of the validation images" in page
    assert "was trained with --no-test, so it has no test accuracy" in refused("publish", run, weights)
    code, out, error = train(call, images, run, "--epochs", 1, "--resume")
    assert code == 0, error
    assert "test_accuracy_percent" in out
    assert call("publish", run, weights)[0] == 0
    assert call("evaluate", run)[0] == 0


class RecordingRates(TrainingModule):
    """Records the learning rate of every training step."""

    rates: list[float]

    def training_step(self, batch, batch_index):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_index)


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_with_more_epochs_follows_the_new_schedule_from_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordingRates, "rates", [], raising=False)
    fit(tiny(2, schedule="cosine"), SPLITS, tmp_path / "run", module_class=RecordingRates)
    for folder, epochs in (("run", 4), ("whole", 4)):
        recipe = tiny(epochs, schedule="cosine")
        fit(recipe, SPLITS, tmp_path / folder, module_class=RecordingRates, resume=folder == "run")
    _, resumed, whole = RecordingRates.rates[:6], RecordingRates.rates[6:12], RecordingRates.rates[12:]
    assert len(whole) == 12
    assert resumed == whole[6:]
    assert min(resumed) > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", [None, torch.optim.lr_scheduler.StepLR])
def test_an_own_learning_rate_schedule_is_kept(tmp_path, monkeypatch, schedule):
    class Own(RecordingRates):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return optimizer if schedule is None else ([optimizer], [schedule(optimizer, step_size=1, gamma=0.5)])

    monkeypatch.setattr(RecordingRates, "rates", [], raising=False)
    fit(tiny(2, schedule="cosine", warm_up_epochs="1.0"), SPLITS, tmp_path / "run", module_class=Own)
    fit(tiny(3, schedule="cosine", warm_up_epochs="1.0"), SPLITS, tmp_path / "run", module_class=Own, resume=True)
    rates = [0.1, 0.1, 0.1] if schedule is None else [0.1, 0.05, 0.025]
    assert RecordingRates.rates == [rate for rate in rates for _ in range(3)]


def test_of_equal_scores_every_command_names_the_first_class(call, tmp_path):
    names = tuple("abcdefghijkl")
    model = PooledCNN((1, 28, 28), num_classes=len(names))
    for weights in model.parameters():
        torch.nn.init.zeros_(weights)
    Classifier(model, names, (1, 28, 28), Preprocessing()).save_pretrained(tmp_path / "flat")
    Image.new("L", (28, 28)).save(tmp_path / "digit.png")
    code, out, error = call("predict", tmp_path / "flat", tmp_path / "digit.png")
    assert code == 0, error
    answer = Classifier.from_pretrained(tmp_path / "flat").predict(tmp_path / "digit.png")
    assert len(answer.scores.unique()) == 1
    assert answer.predicted_classes == ["a"]
    assert re.search(r"digit\.png\W+a\W+0\.\d+\W+b\W", out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cache", ["memory", "none"])
def test_a_run_is_not_resumed_with_images_that_are_resized_in_another_way(cache, images, tmp_path):
    def splits(resize):
        return load_splits(images, tmp_path, image_size=[24, 20], resize=resize, cache=cache)

    recipe = replace(tiny(1), data=str(images))
    fit(recipe, splits("pad"), tmp_path / "run")
    with pytest.raises(BadInput, match=r"was started with other data \(resize was pad and is now crop\)"):
        fit(replace(recipe, epochs=2), splits("crop"), tmp_path / "run", resume=True)
    assert fit(replace(recipe, epochs=2), splits("pad"), tmp_path / "run", resume=True)["epochs"] == 2
