"""The estimate before a training run: its text and numbers, and that it does not change the result of the training."""

import re
import shlex
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path

import pytest
import torch

from conftest import SMALL_CAPSNET
from torchcaps.data import Images, Splits
from torchcaps.errors import BadInput
from torchcaps.estimate import Estimate, duration, estimate
from torchcaps.recipes import create_recipe
from torchcaps.training import fit, new_module

pytestmark = pytest.mark.usefixtures("blank_pictures")


def digits(count: int) -> Images:
    labels = torch.arange(count) % 10
    return Images((20 * labels[:, None, None, None]).expand(-1, 1, 28, 28).to(torch.uint8), labels, (*"0123456789",))


SPLITS = Splits(digits(60), digits(20), digits(20))


def module(name="cnn-baseline-mnist", **settings):
    recipe = create_recipe(name, {"batch_size": "20", "precision": "float32", "epochs": "2", **settings})
    if name == "cnn-baseline-mnist":
        recipe = replace(recipe, model_options={"channels": (4, 4, 4)})
    return new_module(recipe, SPLITS)


@pytest.mark.parametrize("settings", [{}, {"mixup": "0.2"}, {"gradient_clip": "0.1", "optimizer": "radam"}])
def test_an_estimate_changes_neither_weights_nor_random_numbers(settings):
    """The network has dropout and the recipe has mixup, because both draw random numbers in every step."""
    one = module(**settings)
    before, state = {name: value.clone() for name, value in one.state_dict().items()}, torch.get_rng_state()
    found = estimate(one, SPLITS, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
    assert all(parameter.grad is None for parameter in one.parameters())
    assert one.training
    assert found.parameters == sum(parameter.numel() for parameter in one.model.parameters())
    assert found.seconds > 2 * found.epoch_seconds > 0


@pytest.mark.filterwarnings("ignore")
def test_an_estimate_does_not_change_the_final_weights(tmp_path):
    recipe, seen = module().recipe, []

    def measure(one, epochs):
        seen.append((epochs, estimate(one, SPLITS, epochs)))

    fit(recipe, SPLITS, tmp_path / "without")
    fit(replace(recipe, epochs=1), SPLITS, tmp_path / "with", on_start=measure)
    fit(recipe, SPLITS, tmp_path / "with", resume=True, on_start=measure)
    assert [epochs for epochs, _ in seen] == [1, 1]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_written_if_on_start_fails(tmp_path):
    def refuse(one, epochs):
        raise BadInput("too slow")

    with pytest.raises(BadInput, match="too slow"):
        fit(module().recipe, SPLITS, tmp_path / "run", on_start=refuse)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    fit(replace(module().recipe, epochs=1), SPLITS, tmp_path / "run")


def test_the_state_consists_of_weights_gradients_and_two_moments_of_adam():
    one = module()
    weights = sum(value.numel() * value.element_size() for value in one.state_dict().values())
    parameters = 4 * sum(value.numel() for value in one.parameters())
    found = estimate(one, SPLITS, 1)
    assert weights + 3 * parameters <= found.state_bytes <= weights + 3 * parameters + 1000
    assert found.memory_bytes > found.state_bytes + found.step_bytes


def test_a_larger_batch_needs_more_memory():
    """The convolutions of this network save 0.6 MB per image for the backward pass."""
    small, large = (estimate(module("pooled-cnn-mnist", batch_size=size), SPLITS, 1) for size in ("2", "60"))
    assert large.step_bytes - small.step_bytes > 20e6


@pytest.mark.parametrize(
    ("name", "images", "seconds"),
    [
        ("pooled-capsnet-mnist", "40", 0),
        ("efficient-capsnet-mnist", "40", 2),
        ("efficient-capsnet-mnist", "90", 3),
    ],
)
def test_the_time_of_an_epoch_includes_the_batch_norm_statistics(name, images, seconds, monkeypatch):
    """The clock advances by one second per step, and the batch has 20 images. There are 60 training images."""
    monkeypatch.setattr("torchcaps.estimate.time.perf_counter", count(0.0).__next__)
    without, found = (estimate(module(name, batch_norm_images=value), SPLITS, 1) for value in ("0", images))
    assert found.epoch_seconds - without.epoch_seconds == pytest.approx(seconds)


def test_the_text_names_the_day_of_the_end_if_it_is_not_today():
    found = Estimate(10, 2_000_000_000, 1_000_000, 999_600_000, 20.0, 3600.0)
    assert found.text(1, datetime(2026, 1, 1, 12, 0)).endswith(
        "about 20 s per epoch; epochs left: 1; training ends at about 13:00"
    )
    assert found.text(3, datetime(2026, 1, 1, 23, 30)).endswith("left: 3; training ends at about 2026-01-02 00:30")
    assert "memory about 2.0 GB, including 1 MB for weights, gradients and optimiser and 1.0 GB for" in found.text(
        1, datetime(2026, 1, 1)
    )
    assert [duration(x) for x in (99.4, 100.0, 5990.0, 6001.0)] == ["99 s", "2 min", "100 min", "1.7 hours"]


def test_the_text_names_the_processes_and_the_worker_processes(call, images, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = Estimate(10, 2_000_000_000, 1_000_000, 999_600_000, 20.0, 3600.0, devices=2, workers=4)
    line = found.text(1, datetime(2026, 1, 1)).partition("\n")[0]
    assert "memory about 2.0 GB in each of 2 processes, including" in line
    assert line.endswith("; 4 worker processes need additional memory")
    words = ("train", "capsnet-mnist", "--data", images, *SMALL_CAPSNET, "--devices", 2, "--dry-run")
    for more, said in ((("--workers", 3), 6), (("--cache", "none"), 2)):
        code, out, error = call(*words, *more)
        assert code == 0, error
        assert "B in each of 2 processes, including " in out
        assert re.search(rf"MB for a training step; {said} worker processes need additional memory\n", out)


@pytest.mark.parametrize(("settings", "crops"), [({}, 1), ({"crop": "20", "test_crops": "3"}, 9)])
def test_the_time_of_the_test_is_left_out_if_there_is_no_test(settings, crops, monkeypatch):
    """The clock advances by one second per step, and per crop of an evaluated image by 1/20 of a second."""
    monkeypatch.setattr("torchcaps.estimate.time.perf_counter", count(0.0).__next__)
    with_test, without = (estimate(module(**settings), SPLITS, 1, test=test) for test in (True, False))
    assert with_test.seconds - without.seconds == pytest.approx(crops * len(SPLITS.test) / 20)


def test_two_devices_share_the_steps_and_the_validation(monkeypatch):
    """The clock advances by one second per step of 10 images, and per validation image by 1/10 of a second."""
    monkeypatch.setattr("torchcaps.estimate.time.perf_counter", count(0.0).__next__)
    found = estimate(module(), SPLITS, 1, devices=2)
    assert found.epoch_seconds == pytest.approx(60 / 2 / 10 + 20 / 2 / 10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the memory of the GPU is measured")
def test_the_memory_is_measured_without_proc_too(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert estimate(module(), SPLITS, 1).memory_bytes > 100e6  # Python and torch alone need more


def test_slow_steps_cause_one_message_and_end_the_estimate(monkeypatch):
    monkeypatch.setattr("torchcaps.estimate.PATIENCE_SECONDS", 0.0)
    said = []
    estimate(module(), SPLITS, 1, say=said.append)
    assert said == ["measuring a few training steps to estimate the time takes more than ten seconds; please wait"]


def test_the_command_prints_the_estimate_before_the_first_epoch(finished):
    lines = finished[1].stdout.splitlines()
    assert re.fullmatch(r"[\d,]+ parameters; memory about .* MB for .* and \d+ MB for a training step", lines[1])
    assert re.fullmatch(r"about \d+ s per epoch; epochs left: 3; training ends at about (\S+ )?\d\d:\d\d", lines[2])
    assert lines[3].startswith("epoch 1/3")


def test_a_dry_run_writes_nothing(call, refused, images, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("train", "capsnet-mnist", "--data", images, *SMALL_CAPSNET, "--epochs", 3, "--batch-size", 2)
    code, out, error = call(*words, "--dry-run")
    assert (code, error) == (0, "")
    assert re.search(r"about \d+ s per epoch; epochs left: 3; training ends at about", out)
    assert "epoch 1/3" not in out
    assert not list(tmp_path.iterdir())
    before = {path: path.stat().st_mtime_ns for path in finished[0].rglob("*")}
    code, out, error = call(*words, "--dry-run", "--resume", "--epochs", 4, "--out", finished[0])
    assert (code, error) == (0, "")
    assert "; epochs left: 1; training ends at about" in out
    code, out, _ = call(*words, "--dry-run", "--resume", "--out", finished[0])
    assert (code, "; epochs left: 0" in out) == (0, True)
    other = refused(*words, "--dry-run", "--resume", "--out", finished[0], "--set", "shift=1")
    assert "was started with shift=2" in other
    nowhere = refused(*words, "--dry-run", "--resume", "--out", tmp_path / "nowhere")
    assert "contains no run to continue" in nowhere
    assert {path: path.stat().st_mtime_ns for path in finished[0].rglob("*")} == before


def test_a_capsnet_that_is_too_large_causes_a_warning_with_a_smaller_command(call, images, monkeypatch):
    """The limits are lowered below the size and the time of a small network."""
    words = (
        "train",
        "capsnet-mnist",
        "--data",
        images,
        *SMALL_CAPSNET,
        "--set",
        "data.image_size=[24,28]",
        "--dry-run",
    )
    assert call(*words)[2] == ""
    for name, limit, said in (
        ("MOST_PARAMETERS", 1000, "24×28 pixels, because"),
        ("MOST_SECONDS", 0.0, "pixels and trains for about "),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(f"torchcaps.estimate.{name}", limit)
            code, out, error = call(*words)
            assert (code, error.count("\n")) == (0, 1)
            assert said in error
            assert "epochs left: " in out
            assert "add --set model.stem=true or choose a smaller data.image_size" in error
            fits = re.search(
                r"shares weights between positions: `torchcaps (train residual-capsnet-images .*)`", error
            )[1]
            assert call(*shlex.split(fits), "--dry-run", "--precision", "float32")[0] == 0
            assert call("train", "cnn-baseline-mnist", *words[2:4], "--dry-run")[2] == ""
