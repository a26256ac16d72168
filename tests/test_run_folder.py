"""Run folders: their files, the check that the data are unchanged, and resuming."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from conftest import COMMAND, ENVIRONMENT, SMALL_CAPSNET, make_images, train
from torchcaps import BadInput, DataWarning, Diverged
from torchcaps.checkpoints import SEAL, read_checkpoint
from torchcaps.data import Images, Splits, fingerprint, image_digests
from torchcaps.data.files import write_json
from torchcaps.recipes import create_recipe
from torchcaps.run_folder import read_rows, read_run
from torchcaps.run_writers import AtomicCheckpoints
from torchcaps.seen_images import seen_in_training
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("blank_pictures")
THREE = ("--epochs", 3, "--batch-size", 2)


def digits(count=60, seed=0):
    """Grey squares whose brightness depends on their class."""
    labels = torch.arange(count) % 10
    noise = torch.randint(0, 10, (count, 1, 28, 28), generator=torch.Generator().manual_seed(seed))
    pixels = (20 * labels[:, None, None, None] + noise).to(torch.uint8)
    return Images(pixels, labels, tuple("0123456789"))


def tiny(epochs, **settings):
    recipe = create_recipe("pooled-cnn-mnist", {"batch_size": "20", "precision": "float32", **settings})
    return replace(recipe, epochs=epochs)


SPLITS = Splits(digits(60, 0), digits(20, 1), digits(20, 2))


class FirstIsBest(TrainingModule):
    """The validation metric falls after each epoch, so that the first epoch is the best."""

    def log(self, name, value, **options):
        super().log(name, -float(self.current_epoch) if name == "validation_rank" else value, **options)


@pytest.mark.filterwarnings("ignore")
def test_a_run_folder_contains_weights_once_and_the_optimiser_once(tmp_path):
    """During a run, best.ckpt contains only the best weights; at the end, model.safetensors replaces it."""
    sizes = []

    def look(model):
        sizes.append({path.name: path.stat().st_size for path in (tmp_path / "run").glob("*.ckpt")})
        return {}

    for choose in ("best", "last"):
        fit(tiny(2, choose=choose), SPLITS, tmp_path / "run", on_epoch_end=look)
        weights = (tmp_path / "run" / "model.safetensors").stat().st_size
        assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == ["last.ckpt"]
        assert 3 * weights < (tmp_path / "run" / "last.ckpt").stat().st_size < 3.2 * weights
        assert fit(tiny(3, choose=choose), SPLITS, tmp_path / "run", resume=True)["epochs"] == 3
        assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == ["last.ckpt"]
        shutil.rmtree(tmp_path / "run")
    assert [sorted(found) for found in sizes] == [[], ["best.ckpt", "last.ckpt"], [], ["last.ckpt"]]
    assert weights < sizes[1]["best.ckpt"] < 1.1 * weights


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("moved", [False, True])
def test_a_moved_run_keeps_its_best_epoch_when_it_is_resumed(moved, tmp_path):
    folder = tmp_path / "run"
    assert fit(tiny(2), SPLITS, folder, module_class=FirstIsBest)["best_epoch"] == 1
    first = (folder / "model.safetensors").read_bytes()
    if moved:
        shutil.copytree(folder, tmp_path / "copy")
        shutil.rmtree(folder)
        folder = tmp_path / "copy"
    metrics = fit(tiny(3), SPLITS, folder, resume=True, module_class=FirstIsBest)
    assert (metrics["best_epoch"], metrics["epochs"]) == (1, 3)
    assert (folder / "model.safetensors").read_bytes() == first
    assert moved or folder.exists()


def test_a_folder_with_other_files_is_refused_and_not_changed(refused, images, tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "config.json").write_text("{}")
    assert "files that do not belong to a run (README.md and 1 more)" in train(refused, images, folder)
    assert "files that do not belong to a run" in train(refused, images, folder, "--resume")
    (folder / "recipe.json").write_text('{"flour": 500}')
    assert "recipe.json is damaged" in train(refused, images, folder, "--resume")
    monkeypatch.chdir(folder)
    assert "--out must be the name of a folder; got ''" in train(refused, images, "")
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "config.json").read_text() == "{}"
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "recipe.json"}


def test_a_folder_with_only_hidden_files_can_become_a_run_folder(call, images, tmp_path):
    (tmp_path / ".gitkeep").write_text("")
    (tmp_path / ".DS_Store").write_text("")
    code, _, error = train(call, images, tmp_path, "--epochs", 1)
    assert code == 0, error
    assert (tmp_path / ".gitkeep").exists()


def test_other_files_in_a_run_folder_are_not_changed(call, images, run):
    (run / "README.md").write_text("mine")
    (run / "metrics.json").unlink()
    code, _, error = train(call, images, run, *THREE, "--resume")
    assert code == 0, error
    assert (run / "README.md").read_text() == "mine"


def test_resuming_a_finished_run_changes_nothing_and_does_not_test_again(call, images, run):
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    code, out, error = train(call, images, run, *THREE, "--resume")
    assert code == 0, error
    assert "is finished" in out
    after = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert {name for name in before if before[name] != after[name]} <= {"recipe.json", "image-digests.safetensors"}


def test_a_finished_run_can_be_trained_for_more_epochs(call, refused, images, finished, run, tmp_path):
    code, out, error = train(call, images, run, "--epochs", 4, "--batch-size", 2, "--resume")
    assert code == 0, error
    assert "was started with 3 epochs; training continues to epoch 4" in out
    assert "epoch 3/" not in out
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["epochs"], metrics["test_evaluations"]) == (4, 2)
    assert read_run(run).recipe.epochs == 4
    code, _, error = train(call, images, tmp_path / "whole", "--epochs", 4, "--batch-size", 2)
    assert code == 0, error
    one, other = (read_checkpoint(folder / "last.ckpt")["state_dict"] for folder in (run, tmp_path / "whole"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert metrics["best_epoch"] == json.loads((tmp_path / "whole" / "metrics.json").read_text())["best_epoch"]
    assert "has already been trained for 4 epochs" in train(
        refused, images, run, "--epochs", 2, "--batch-size", 2, "--resume"
    )
    assert read_run(run).recipe.epochs == 4


@pytest.mark.filterwarnings("ignore")
def test_a_run_whose_margin_depends_on_the_number_of_epochs_refuses_more_epochs(tmp_path, capsys):
    recipe = replace(tiny(1), loss="spread", margin_schedule="linear", loss_options={})
    fit(recipe, SPLITS, tmp_path / "run")
    assert "  margin 0.90  validation" in capsys.readouterr().out
    with pytest.raises(BadInput, match="margin rises linearly over all epochs"):
        fit(replace(recipe, epochs=2), SPLITS, tmp_path / "run", resume=True)


def test_resuming_with_other_data_is_refused(call, refused, tmp_path):
    root, out = make_images(tmp_path / "images"), tmp_path / "run"
    code, _, error = train(call, root, out, "--epochs", 1)
    assert code == 0, error
    again = (root, out, "--epochs", 2, "--resume")
    (root / "left" / "000.png").rename(tmp_path / "000.png")
    assert "there were 58 train images and there are now 57" in train(refused, *again)
    shutil.copy(root / "left" / "001.png", root / "left" / "000.png")
    assert "have changed" in train(refused, *again)
    shutil.copy(tmp_path / "000.png", root / "left" / "000.png")
    (root / "left").rename(root / "west")
    assert "the classes were left, right and are now right, west" in train(refused, *again)
    (root / "west").rename(root / "left")
    elsewhere = root.rename(tmp_path / "elsewhere")
    code, _, error = train(call, elsewhere, *again[1:])
    assert code == 0, error
    assert read_run(out).recipe.data == str(elsewhere)


def test_the_fingerprint_depends_on_labels_order_and_split():
    one, other = digits(40, 0), digits(40, 1)
    same = fingerprint(Splits(one, one, other))[0]
    assert same == fingerprint(Splits(digits(40, 0), one, other))[0]
    turned = Images(one.pixels, one.labels.flip(0), one.class_names)
    backwards = one.subset(torch.arange(39, -1, -1))
    for changed in (Splits(turned, one, other), Splits(backwards, one, other), Splits(other, one, one)):
        assert fingerprint(changed)[0] != same
    assert len(set(image_digests(one).tolist())) == 40
    wide = Images(one.pixels.reshape(40, 1, 14, 56), one.labels, one.class_names)
    assert not set(image_digests(one).tolist()) & set(image_digests(wide).tolist())


@pytest.mark.filterwarnings("ignore")
def test_splits_without_images_are_refused_before_training(tmp_path):
    nothing = digits(0)
    for name, splits in (
        ("train", Splits(nothing, digits(20), digits(20))),
        ("validation", Splits(digits(20), nothing, digits(20))),
        ("test", Splits(digits(20), digits(20), nothing)),
    ):
        with pytest.raises(BadInput, match=f"the {name} split has no images"):
            fit(tiny(1), splits, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_flipped_bit_in_a_checkpoint_is_detected(tmp_path):
    """The bits are in the weights, the state of the optimiser, the entries of the archive, or the checksum."""
    network = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    small = {"epoch": 2, "state_dict": network.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    AtomicCheckpoints().save_checkpoint(small, tmp_path / "last.ckpt")
    assert read_checkpoint(tmp_path / "last.ckpt")["epoch"] == 2
    content = (tmp_path / "last.ckpt").read_bytes()
    random = np.random.default_rng(0)
    places = [
        *random.integers(0, 8 * len(content), 1000),
        *random.integers(8 * (len(content) - 100), 8 * len(content), 50),
    ]
    for place in places:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << (place % 8)
        (tmp_path / "last.ckpt").write_bytes(damaged)
        with pytest.raises(BadInput, match="wrong checksum"):
            read_checkpoint(tmp_path / "last.ckpt")
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "last.ckpt").write_bytes(content[:length])
        with pytest.raises(BadInput, match="wrong checksum"):
            read_checkpoint(tmp_path / "last.ckpt")


def test_a_checkpoint_can_be_read_by_torch_with_weights_only(finished, tmp_path):
    read = torch.load(finished[0] / "last.ckpt", weights_only=True)
    assert read["epoch"] == read_checkpoint(finished[0] / "last.ckpt")["epoch"] == 2
    AtomicCheckpoints().save_checkpoint({"trap": Trainer}, tmp_path / "trap.ckpt")
    with pytest.raises(BadInput, match="more than tensors and plain data") as refused:
        read_checkpoint(tmp_path / "trap.ckpt")
    assert "weights_only" not in str(refused.value)
    assert SEAL in (tmp_path / "trap.ckpt").read_bytes()


def test_missing_or_damaged_best_weights_are_refused_before_training(refused, images, run):
    again = (images, run, "--epochs", 4, "--batch-size", 2, "--resume")
    (run / "best.ckpt").write_bytes(b"damaged")
    assert "best.ckpt is damaged" in train(refused, *again)
    (run / "best.ckpt").unlink()
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[:-1])
    assert "model.safetensors is damaged" in train(refused, *again)
    (run / "model.safetensors").unlink()
    assert "has neither best.ckpt nor model.safetensors: restore one of these files from a copy" in train(
        refused, *again
    )
    (run / "model.safetensors").write_bytes(weights)
    (run / "last.ckpt").rename(run / "kept")
    assert "last.ckpt is missing: restore it from a copy" in train(refused, *again)
    (run / "kept").rename(run / "last.ckpt")
    for rows in ("", "x,y\n", "epoch,seconds\n"):
        (run / "metrics.csv").write_text(rows)
        assert "metrics.csv has 0 epochs, but last.ckpt has 3" in train(refused, *again)
    (run / "metrics.csv").unlink()
    assert "metrics.csv has 0 epochs, but last.ckpt has 3" in train(refused, *again)
    assert read_run(run).recipe.epochs == 3


def test_damaged_files_of_a_run_are_refused_by_name(refused, images, run):
    again = (images, run, "--epochs", 4, "--batch-size", 2, "--resume")
    of_text = (run / "metrics.csv").read_text().replace("0.", "x.")
    for name, damages in {
        "recipe.json": ["{", "[]", "null", '{"recipe": {}}', "\x00"],
        "metrics.csv": ["epoch\n1\n", "epoch,seconds\n1,2,3\n", of_text, "nonsense", 'a,b\n"'],
    }.items():
        whole = (run / name).read_bytes()
        for damage in damages:
            (run / name).write_text(damage)
            assert re.search(rf"{name} (is damaged|has 0 epochs)", train(refused, *again))
        (run / name).write_bytes(whole)
    said = json.loads((run / "recipe.json").read_text())
    for change in (
        {"class_names": [1, 2]},
        {"environment": {}},
        {"earlier_environments": [{"commit": "a"}]},
        {"image_shape": [20, 24]},
        {"data": 5},
        {"data": {**said["data"], "class_names": [{}]}},
        {"recipe": {**said["recipe"], "shift": "a"}},
        {"recipe": {**said["recipe"], "model": ["capsnet"]}},
        {"recipe": {key: value for key, value in said["recipe"].items() if key != "seed"}},
        {"recipe": {**said["recipe"], "surprise": 1}},  # the last change, as a newer version would write it
    ):
        (run / "recipe.json").write_text(json.dumps({**said, **change}))
        assert "recipe.json is damaged" in train(refused, *again)
        assert "recipe.json is damaged" in (line := refused("evaluate", run))
    assert "'surprise' is unknown; if a newer version of torchcaps wrote the file, update torchcaps)" in line
    (run / "recipe.json").write_text(json.dumps(said))
    (run / "image-digests.safetensors").write_bytes(b"")
    with pytest.raises(BadInput, match=r"image-digests\.safetensors is damaged"):
        seen_in_training(run, digits())


def test_temporary_files_of_a_killed_process_are_removed_by_the_next_process(call, images, run):
    (run / "metrics.json").unlink()
    for name in ("last.ckpt.123.part", "metrics.csv.45.part", ".writable-6"):
        (run / name).write_text("half")
    (run / "mine.part").write_text("mine")
    code, _, error = train(call, images, run, *THREE, "--resume")
    assert code == 0, error
    assert {path.name for path in run.glob("*.part")} == {"mine.part"}
    assert not (run / ".writable-6").exists()


def test_two_processes_cannot_train_in_one_folder(images, refused, tmp_path):
    out = tmp_path / "run"
    words = [*COMMAND, "train", "capsnet-mnist", "--data", str(images), "--out", str(out), *SMALL_CAPSNET]
    with subprocess.Popen([*words, "--epochs", "200"], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("epoch 1/200"):
                break
        assert "another process is training in" in train(refused, images, out, "--epochs", 200, "--resume")
        process.send_signal(signal.SIGKILL)
    assert read_run(out).recipe.epochs == 200
    assert "already contains a run" in train(refused, images, out)


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_is_not_finite_raises_diverged(tmp_path):
    with pytest.raises(Diverged, match="not finite"):
        fit(replace(tiny(1), learning_rate=1e30), SPLITS, tmp_path / "run")


def test_a_file_that_cannot_be_written_is_named_and_not_changed(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(BadInput, match=r"table\.csv could not be written \(File too large\)"):
            write_json(path, ["0"] * 10_000)
        tensors = {"x": torch.zeros(10_000)}
        with pytest.raises(BadInput, match=r"last\.ckpt could not be written"):
            AtomicCheckpoints().save_checkpoint(tensors, tmp_path / "last.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_an_interruption_before_training_prints_one_line(images, tmp_path):
    """Also during the import of torch, and after more than one Ctrl-C."""
    words = [*COMMAND, "train", "capsnet-mnist", "--data", str(images), "--out", str(tmp_path / "run")]
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "sys.argv[0] = 'torchcaps'; from torchcaps import cli; print('ready', flush=True); cli.main()"
    words = [words[0], "-c", start, *words[3:]]
    for delay in (0.2, 0.6, 1.5):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, env=ENVIRONMENT, **pipes) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(delay)
            while process.poll() is None:
                os.kill(process.pid, signal.SIGINT)
                time.sleep(0.02)
            _, error = process.communicate()
        assert process.returncode == 130, error
        assert len(error.splitlines()) == 1
        begun = (tmp_path / "run" / "recipe.json").exists()
        assert error.startswith("interrupted" if begun else ("interrupted\n", "interrupted: nothing was written\n"))


@pytest.mark.filterwarnings("ignore")
def test_metrics_contain_the_recall_of_every_class(tmp_path):
    metrics = fit(tiny(1), SPLITS, tmp_path / "run")
    assert [*metrics["classes"]] == list("0123456789")
    assert all(one["images"] == 2 for one in metrics["classes"].values())
    recall = [one["recall_percent"] for one in metrics["classes"].values()]
    assert sum(recall) / 10 == pytest.approx(metrics["test_accuracy_percent"])


def test_predicting_one_class_for_all_images_causes_a_warning(tmp_path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(replace(tiny(1), learning_rate=1e-9), SPLITS, tmp_path / "run")
    said = [str(one.message) for one in found if one.category is DataWarning]
    assert len(said) == 1
    assert re.match("the network predicts . for every evaluated image", said[0])


@pytest.mark.filterwarnings("ignore")
def test_all_measured_values_are_in_metrics_csv(tmp_path):
    values = iter([{"a,\nb": 1.0}, None, {"c": 2.0}])
    fit(tiny(3), SPLITS, tmp_path / "run", on_epoch_end=lambda model: next(values), logger="none")
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert [(row["a,\nb"], row["c"]) for row in rows] == [("1.0000", ""), ("", ""), ("", "2.0000")]
