"""Experiments: what they measure, that they go on where they were, and what they write."""

import json
import signal
import subprocess
import time

import pytest
import torch

from conftest import COMMAND, ENVIRONMENT
from torchcaps import PooledCapsNet, squash
from torchcaps.data import Images, Preparation
from torchcaps.experiments import EXPERIMENTS, Row
from torchcaps.experiments.two_digits import contributions, named_alike, read_order, strips


def plain_images(count: int = 40, classes: int = 10) -> Images:
    """Images that are as bright as their label."""
    labels = torch.arange(count) % classes
    pixels = (20 * labels[:, None, None, None]).expand(-1, 1, 28, 28).to(torch.uint8)
    return Images(pixels.contiguous(), labels, tuple(str(label) for label in range(classes)))


def test_a_strip_is_different_digits_side_by_side():
    pixels, labels = strips(plain_images(), 3, 50)
    assert pixels.shape == (50, 1, 28, 84)
    assert all(len(set(row)) == 3 for row in labels.tolist())
    for place in range(3):
        assert (pixels[:, 0, :, 28 * place : 28 * place + 28] == 20 * labels[:, place, None, None]).all()
    assert (strips(plain_images(), 3, 50)[1] == labels).all()
    assert not (strips(plain_images(), 3, 50, seed=1)[1] == labels).all()


def test_named_alike_wants_the_exact_set():
    scores = torch.tensor([[0.9, 0.1, 0.8], [0.9, 0.1, 0.8], [0.2, 0.7, 0.6]])
    assert named_alike(scores, torch.tensor([[2, 0], [0, 1], [0, 1]])).tolist() == [True, False, False]


def test_what_positions_contribute_adds_up_to_the_capsules():
    model = PooledCapsNet().eval()
    with torch.no_grad():
        scores, parts = contributions(model, torch.rand(2, 1, 28, 40))
        assert parts.shape == (2, 10, 8, 14)
        sums = parts.sum(dim=(2, 3))
        torch.testing.assert_close(squash(sums[..., None, None], "su").flatten(1), scores, rtol=1e-4, atol=1e-5)


def test_the_order_is_read_from_left_to_right():
    model = PooledCapsNet().eval()
    pixels = torch.randint(0, 256, (3, 1, 28, 84), dtype=torch.uint8)
    best = read_order(model, pixels, 3)
    with torch.no_grad():
        scores, parts = contributions(model, Preparation().plain(pixels))
    weight = parts.clamp_min(0).sum(dim=2)
    centre = (weight * torch.arange(parts.shape[3])).sum(dim=2) / weight.sum(dim=2)
    for row, classes in enumerate(best.tolist()):
        assert sorted(classes) == sorted(scores[row].topk(3).indices.tolist())
        assert sorted(centre[row, classes].tolist()) == centre[row, classes].tolist()


def test_a_row_tells_the_spread_over_seeds():
    assert Row("x", [1.0]).measured() == "1.00 %"
    assert Row("x", [1.0, 2.0], unit="").measured() == "1.50 ± 0.71"


def test_experiments_refuse_what_they_do_not_know(call, refused, tmp_path):
    assert all(name in call("experiment", "list")[1] for name in EXPERIMENTS)
    assert "did you mean 'two-digits'" in refused("experiment", "two-digit")
    assert "Known: quick, standard, paper" in refused(
        "experiment", "two-digits", "--budget", "huge", "--out", tmp_path / "runs", "--results", tmp_path / "results"
    )
    assert "run `torchcaps experiment NAME` first" in refused("experiment", "report", "--results", tmp_path)


@pytest.mark.slow
def test_a_killed_experiment_goes_on_to_the_same_result(call, tmp_path):
    def words(name: str) -> list[object]:
        folders = ["--out", tmp_path / name, "--results", tmp_path / name]
        return ["experiment", "two-digits", "--data", "mnist-5k", *folders]

    for name, end in (("killed", signal.SIGKILL), ("interrupted", signal.SIGINT)):
        process = subprocess.Popen([*COMMAND, *map(str, words(name))], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        while not (tmp_path / name / "two-digits-quick/capsules-seed0/last.ckpt").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(end)
        process.wait()
    results = []
    for name in ("killed", "interrupted", "whole"):
        assert call(*words(name))[0] == 0
        results.append(json.loads((tmp_path / name / "two-digits-quick.json").read_text())["rows"])
    assert results[0] == results[1] == results[2]
    assert call("experiment", "report", "--results", tmp_path / "whole", "--report", tmp_path / "report.md")[0] == 0
    report = (tmp_path / "report.md").read_text()
    assert "| about 40 |" in report
    assert "](whole/two-digits-quick.png)" in report
