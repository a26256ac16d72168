"""Training with real processes, files and signals."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from conftest import COMMAND, ENVIRONMENT, SMALL_CAPSNET, TWO_PROCESSES, make_images, train
from torchcaps import Classifier, Prediction
from torchcaps.batches import ImageBatches
from torchcaps.checkpoints import read_checkpoint
from torchcaps.data import Images, Preprocessing, Splits, load_splits
from torchcaps.evaluation import evaluate
from torchcaps.pictures import save_worst
from torchcaps.recipes import create_recipe
from torchcaps.run_folder import read_rows, read_run
from torchcaps.run_writers import AtomicCheckpoints
from torchcaps.split_batches import SplitBatches
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

LOADING = [pytest.param([], marks=pytest.mark.slow), ["--cache", "none", "--workers", "2"]]


def weights_equal(one: Path, other: Path) -> bool:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    last = [torch.load(folder / "last.ckpt", weights_only=True)["state_dict"] for folder in (one, other)]
    return all(torch.equal(first[name], second[name]) for name in first) and all(
        torch.equal(last[0][name], last[1][name]) for name in last[0]
    )


def test_a_run_folder_contains_all_its_files(finished):
    folder, done = finished
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("recipe.json", "metrics.csv", "metrics.json", "last.ckpt", "model.safetensors"),
        *("config.json", "reconstructions.png", "confusion.png", "tensorboard", "image-digests.safetensors", ".lock"),
        *("curves.png", "worst.png"),
    }
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["test_accuracy_percent"] == 100 - metrics["test_error_percent"]
    assert metrics["test_accuracy_percent"] >= 90
    assert metrics["epochs"] == 3
    assert metrics["train_images"] + metrics["validation_images"] + metrics["test_images"] == 80
    said = json.loads((folder / "recipe.json").read_text())
    assert said["class_names"] == ["left", "right"]
    assert said["image_shape"] == [3, 20, 24]
    assert said["environment"]["versions"]["torch"]
    assert "warning" not in (done.stdout + done.stderr).lower()
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    best = max(rows, key=lambda row: (float(row["validation_accuracy_percent"]), -float(row["validation_loss"])))
    assert metrics["best_epoch"] == int(best["epoch"])


@pytest.mark.parametrize("loading", LOADING)
def test_a_killed_run_that_is_resumed_gives_bit_identical_weights(loading, succeeds, images, finished, tmp_path):
    out = tmp_path / "run"
    settings = ["--epochs", "3", "--batch-size", "2", *loading]
    words = [*COMMAND, "train", "capsnet-mnist", "--data", str(images), "--out", str(out), *SMALL_CAPSNET, *settings]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("epoch 1/3"):
                break
        while not (out / "last.ckpt").exists():
            time.sleep(0.01)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert len((out / "metrics.csv").read_text().splitlines()) in (2, 3)  # one epoch, or two on a fast machine
    assert not (out / "metrics.json").exists()
    said = train(succeeds, images, out, *settings, "--resume")
    assert "epoch 3/3" in said
    assert "epoch 1/3" not in said
    assert weights_equal(finished[0], out)
    assert len((out / "metrics.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize("loading", LOADING)
def test_an_interrupted_run_prints_how_to_resume_and_leaves_no_partial_file(loading, images, tmp_path):
    """The process enables Ctrl-C first, because a process started in the background ignores it."""
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    heeding += "from torchcaps import cli; cli.main()"
    out = tmp_path / "run"
    words = ["train", "capsnet-mnist", "--data", str(images), "--out", str(out), *SMALL_CAPSNET]
    words = [sys.executable, "-c", heeding, *words, "--epochs", "200", "--batch-size", "2", *loading]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(words, env=ENVIRONMENT, **pipes) as process:
        for line in process.stdout:
            if line.startswith("epoch 2/200"):
                break
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does, which interrupts the worker processes too
            time.sleep(0.02)
        _, error = process.communicate()
    assert process.returncode == 130
    assert error.splitlines() == [f"interrupted: run the same command with --resume to continue in {out}"]
    assert not list(out.rglob("*.part*"))
    assert torch.load(out / "last.ckpt", weights_only=True)["epoch"] >= 0


INTERRUPTED_TEST = """
import json, os, signal, sys
from torchcaps import cli
from torchcaps.training_module import TrainingModule

TrainingModule.test_step = lambda *_: os.kill(os.getpid(), signal.SIGINT)
for words in json.loads(sys.argv[1]):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = words
    try:
        cli.main()
    except SystemExit as stop:
        print("exit code", stop.code, file=sys.stderr)
"""


def test_an_interruption_in_a_test_prints_one_line(python, images, finished, tmp_path):
    """Both in the test at the end of a training and in `evaluate`, one after the other in one new process."""
    out = tmp_path / "run"
    training = ["train", "capsnet-mnist", "--data", images, "--out", out, *SMALL_CAPSNET, "--epochs", 1]
    both = [[str(word) for word in words] for words in (training, ["evaluate", finished[0]])]
    done = python(["-c", INTERRUPTED_TEST, json.dumps(both)])
    assert done.returncode == 0, done.stderr
    resume = f"interrupted: run the same command with --resume to continue in {out}"
    assert done.stderr.splitlines() == [resume, "exit code 130", "interrupted", "exit code 130"]
    assert (out / "last.ckpt").exists()
    assert not (out / "metrics.json").exists()


def test_an_interruption_while_a_checkpoint_is_written_leaves_the_old_checkpoint(tmp_path):
    target, writer = tmp_path / "last.ckpt", AtomicCheckpoints()
    writer.save_checkpoint({"epoch": 1}, target)
    tensors = [torch.zeros(100_000) for _ in range(300)]
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for seconds in (0.02, 0.03, 0.04):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            with pytest.raises(KeyboardInterrupt):
                writer.save_checkpoint({"epoch": 2, "tensors": tensors}, target)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(target, weights_only=True) == {"epoch": 1}


@pytest.mark.usefixtures("blank_pictures")
def test_progress_is_printed_as_lines_without_a_terminal(succeeds, images, tmp_path, monkeypatch):
    monkeypatch.setattr("torchcaps.run_writers.PROGRESS_SECONDS", 0.0)
    said = train(succeeds, images, tmp_path / "run", "--epochs", 1, "--batch-size", 14)
    lines = [line for line in said.splitlines() if "step " in line and line.startswith("epoch")]
    for step, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"epoch 1/1  step {step}/5  \d+ images/s  \d+ s left", line)
    assert len(lines) == 5


@pytest.mark.usefixtures("untyped", "blank_pictures")
def test_the_same_seed_gives_the_same_weights_and_another_seed_gives_others(call, images, finished, tmp_path):
    for seed in (0, 1):
        code, _, error = train(call, images, tmp_path / str(seed), "--epochs", 3, "--batch-size", 2, "--seed", seed)
        assert code == 0, error
    assert weights_equal(finished[0], tmp_path / "0")
    assert not weights_equal(finished[0], tmp_path / "1")


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_with_fewer_images_than_processes_is_refused(split, refused, images, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    other = {"val": "test", "test": "val"}[split]
    paths = sorted(images.glob("*/*.png"))
    of_path = dict.fromkeys(paths, "train") | dict.fromkeys([paths[1], paths[-1]], other) | {paths[0]: split}
    lines = [f"{path},{path.parent.name},{of_path[path]}" for path in paths]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *lines]))
    words = ("train", "capsnet-images", "--data", tmp_path / "table.csv", "--out", tmp_path / "run", "--devices", 2)
    for more in ((), ("--dry-run",)):
        assert "--devices must be at most 1, the size of the" in refused(*words, *more)
    assert not (tmp_path / "run").exists()


@TWO_PROCESSES
@pytest.mark.filterwarnings("ignore")
def test_two_processes_train_together(command, tmp_path):
    images = make_images(tmp_path / "photos", per_class=50)
    for path in [*(images / "left").iterdir()][:10]:
        path.unlink()  # 7 validation images: two processes have different numbers of them
    done = train(command, images, tmp_path / "run", "--epochs", 2, "--batch-size", 8, "--devices", 2)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["epochs"] == 2
    assert metrics["test_accuracy_percent"] >= 75
    assert done.stdout.count("epoch 2/2") == 1
    splits, recipe = load_splits(str(images), tmp_path), read_run(tmp_path / "run").recipe
    network, validation, test = Classifier.from_pretrained(tmp_path / "run"), splits.validation, splits.test
    assert len(validation) == 7
    inputs = network.preprocessing.plain(validation.pixels)
    loss, _ = TrainingModule(network.model, recipe, 2).loss_and_scores(inputs, validation.labels, train=False)
    row = read_rows(tmp_path / "run" / "metrics.csv")[metrics["best_epoch"] - 1]
    assert float(row["validation_loss"]) == pytest.approx(float(loss), abs=2e-6)
    scores = evaluate(network.model, test, precision="float32").scores
    save_worst(network.model, network.preprocessing, test, scores, tmp_path / "worst.png")
    assert (imread(tmp_path / "run" / "worst.png") == imread(tmp_path / "worst.png")).all()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_module(refused, images, tmp_path):
    line = train(refused, images, tmp_path / "run", "--epochs", 2, "--lr", 1e30)
    assert "not finite is the output of module " in line
    assert " at step 1 (epoch 1" in line


@pytest.mark.usefixtures("blank_pictures")
def test_a_full_disk_leaves_the_last_good_checkpoint(succeeds, refused, images, finished, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in finished[0].rglob("*") if path.is_file())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={2 * size}", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small tmpfs can be mounted by root alone")
    try:
        train(succeeds, images, disk / "run", "--epochs", 1)
        good = torch.load(disk / "run" / "last.ckpt", weights_only=True)["epoch"]
        room = os.statvfs(disk)
        (disk / "ballast").write_bytes(b"0" * (room.f_bavail * room.f_bsize - 50_000))
        train(refused, images, disk / "run", "--epochs", 2, "--resume")
        assert not list((disk / "run").glob("*.part*"))
        assert torch.load(disk / "run" / "last.ckpt", weights_only=True)["epoch"] == good
        (disk / "ballast").unlink()
        train(succeeds, images, disk / "run", "--epochs", 2, "--resume")
    finally:
        subprocess.run(["umount", disk], check=True)


def even_digits():
    """Ten classes of images of one brightness each; all three splits contain the same images."""
    labels = torch.arange(60) % 10
    pixels = (20 * labels[:, None, None, None]).expand(-1, 1, 28, 28).to(torch.uint8).contiguous()
    return Splits(*3 * [Images(pixels, labels, tuple("0123456789"))])


def train_whole_and_stopped(recipe, folder, stop_after):
    """Train once without interruption, and once with an interruption after some epochs, resumed."""
    epochs = []

    def stop(model):
        epochs.append(model)
        if len(epochs) == stop_after:
            raise KeyboardInterrupt
        return {}

    splits = even_digits()
    fit(recipe, splits, folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(recipe, splits, folder / "stopped", on_epoch_end=stop)
    assert read_checkpoint(folder / "stopped" / "last.ckpt")["epoch"] == stop_after - 2  # the last whole epoch
    fit(recipe, splits, folder / "stopped", resume=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("blank_pictures")
def test_a_resumed_run_with_dropout_gives_bit_identical_weights(tmp_path):
    settings = {"epochs": "4", "batch_size": "20", "precision": "float32"}
    recipe = replace(create_recipe("cnn-baseline-mnist", settings), model_options={"channels": (4, 4, 4)})
    train_whole_and_stopped(recipe, tmp_path, stop_after=3)
    losses = [
        [row["train_loss"] for row in read_rows(tmp_path / name / "metrics.csv")] for name in ("whole", "stopped")
    ]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    assert weights_equal(tmp_path / "whole", tmp_path / "stopped")


def test_a_resumed_run_must_keep_its_settings(refused, images, finished):
    assert "batch_size=2, not 4" in train(refused, images, finished[0], "--epochs", 3, "--batch-size", 4, "--resume")
    assert "--resume" in train(refused, images, finished[0], "--epochs", 3, "--batch-size", 2)


def test_a_checkpoint_of_another_model_is_refused(refused, images, finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    (out / "metrics.json").unlink()
    again = (images, out, "--epochs", 3, "--batch-size", 2, "--resume")
    AtomicCheckpoints().save_checkpoint({"state_dict": {"model.weight": torch.zeros(2)}}, out / "last.ckpt")
    assert "checkpoint of another model" in train(refused, *again)
    (out / "last.ckpt").write_bytes(b"not a checkpoint")
    assert "wrong checksum" in train(refused, *again)


def test_order_and_shifts_depend_only_on_seed_epoch_and_index(images):
    splits = load_splits(str(images), Path("data"))
    recipe = create_recipe("capsnet-mnist", {"batch_size": "8"})

    class At:
        strategy = SimpleNamespace(root_device=torch.device("cpu"))

        def __init__(self, epoch, ranks=1, rank=0):
            self.current_epoch, self.world_size, self.global_rank = epoch, ranks, rank

    def epoch_of(epoch, ranks=1, rank=0):
        data = SplitBatches(splits, recipe)
        data.trainer = At(epoch, ranks, rank)
        return [tensor for batch in data.train_dataloader() for tensor in batch]

    assert all(map(torch.equal, epoch_of(3), epoch_of(3)))
    assert not torch.equal(epoch_of(3)[0], epoch_of(4)[0])
    labels = [torch.cat(epoch_of(3, 2, rank)[1::2]) for rank in (0, 1)]
    assert [len(share) for share in labels] == [len(splits.train) // 2] * 2
    views, _ = ImageBatches(splits.train, Preprocessing()).load(torch.arange(4).numpy(), torch.device("cpu"))
    assert len(views) == 1
    assert views[0].is_contiguous(memory_format=torch.channels_last)
    assert 0 <= views.min() <= views.max() <= 1


@pytest.mark.usefixtures("blank_pictures")
def test_matrix_capsules_train_evaluate_and_predict_on_cropped_colour_images(call, refused, images, tmp_path):
    words = [
        "train",
        "matrix-capsnet-toys-paper",
        "--data",
        images,
        "--set",
        "model.widths=[8,2,3,3]",
        "--set",
        "crop=18",
    ]
    words += ["--set", "test_crops=2", "--epochs", 2, "--batch-size", 4, "--set", "decay_steps=100"]
    code, _, error = call(*words, "--out", tmp_path / "run")
    assert code == 0, error
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["test_images"] == 16
    assert json.loads((tmp_path / "run" / "config.json").read_text())["options"]["image_shape"] == [3, 18, 18]
    code, evaluated, error = call("evaluate", tmp_path / "run")
    assert code == 0, error
    assert f"{metrics['test_accuracy_percent']:.2f}" in evaluated
    code, predicted, error = call("predict", tmp_path / "run", images / "left" / "000.png")
    assert code == 0, error
    assert "000.png" in predicted
    assert "crop must be at most 20, the shorter side of the images; got 21" in refused(
        *words, "--out", tmp_path / "other", "--set", "crop=21"
    )


@pytest.mark.parametrize(("schedule", "rates"), [("cosine", [1, 0.5, 0]), ("exponential", [1, 0.5, 0.25])])
def test_the_learning_rate_follows_its_schedule_after_a_linear_warm_up(schedule, rates):
    recipe = replace(create_recipe("capsnet-mnist"), schedule=schedule, decay_rate=0.5, decay_steps=50, epochs=10)
    for warm_up_epochs, factors in ((0.0, [1, 1, 1]), (10.0, [0.01, 0.51, 1])):
        module = TrainingModule(nn.Linear(1, 1), replace(recipe, warm_up_epochs=warm_up_epochs), 2, steps=100)
        scheduler = module.configure_optimizers()["lr_scheduler"]["scheduler"]
        (rate,) = scheduler.lr_lambdas
        assert [rate(step) for step in (0, 50, 100)] == pytest.approx(
            [a * b for a, b in zip(rates, factors, strict=True)]
        )


def test_mixup_mixes_images_and_their_losses_only_in_training():
    class Sums(nn.Module):
        def forward(self, images, labels):
            self.seen = images
            return Prediction(images.flatten(1).sum(dim=1, keepdim=True).expand(-1, 2) * torch.tensor([1.0, -1.0]))

    recipe = replace(create_recipe("cnn-baseline-mnist"), mixup=1.0)
    module = TrainingModule(Sums(), recipe, 2)
    images, labels = torch.eye(8).view(8, 1, 1, 8), torch.arange(8) % 2
    torch.manual_seed(0)
    loss, _ = module.loss_and_scores(images, labels, train=True)
    mixed = module.model.seen.flatten(1)
    shares = mixed.diagonal()
    torch.testing.assert_close(mixed.sum(dim=1), torch.ones(8))
    changed = shares < 1
    assert changed.any()
    share = shares[changed][0]
    torch.testing.assert_close(shares[changed], share.expand(int(changed.sum())))
    others = torch.where(changed, (mixed - torch.diag(shares)).argmax(dim=1), torch.arange(8))
    scores = torch.tensor([[1.0, -1.0]]).expand(8, 2)
    parts = [functional.cross_entropy(scores, each) for each in (labels, labels[others])]
    torch.testing.assert_close(loss, share * parts[0] + (1 - share) * parts[1])
    module.loss_and_scores(images, labels, train=False)
    assert torch.equal(module.model.seen, images)
