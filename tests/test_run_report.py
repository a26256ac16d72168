"""The pictures in a run folder, and the HTML page that describes a run."""

import base64
import json
import re
import shutil

import pytest
import torch
from matplotlib.image import imread

from torchcaps import Prediction, Preprocessing
from torchcaps.data import Images
from torchcaps.pictures import as_picture, save_curves, save_worst
from torchcaps.recipes import create_recipe
from torchcaps.training_module import TrainingModule


class Brightness(torch.nn.Module):
    """A network without decoder, whose three scores depend on the brightness of an image."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, images, labels=None):
        level = self.scale * images.mean(dim=(1, 2, 3))
        return Prediction(torch.stack([1 - level, level, 0.5 * level], dim=1))


def grey(levels, labels) -> Images:
    pixels = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4).contiguous()
    return Images(pixels, torch.tensor(labels), ("dark", "bright", "<b>"))


def test_the_report_of_a_finished_run_is_one_page(finished, call, tmp_path):
    folder, _ = finished
    code, out, _ = call("report", folder, "--out", tmp_path / "run.html")
    assert code == 0
    assert "run.html" in out
    page = (tmp_path / "run.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 4
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert not re.search(r'(src|href)="(?!data:)', page)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert f"Test accuracy {metrics['test_accuracy_percent']} %" in page
    assert page.count("<tr>") > 20
    rows = re.findall(r"<tr><t[hd]>(\d+)</t[hd]><t[hd]>(\w+)</t[hd]>", page)
    assert rows == [("0", "left"), ("1", "right")]


def test_the_report_of_an_unfinished_run(finished, call, refused, tmp_path):
    run = shutil.copytree(finished[0], tmp_path / "run<script>", ignore=shutil.ignore_patterns("*.png", "metrics.json"))
    assert call("report", run)[0] == 0
    page = (run / "report.html").read_text()
    assert "Not finished: 3 of 3 epochs" in page
    assert page.count("<figure ") == 1
    assert "<script>" not in page
    assert "run&lt;script&gt;" in page
    older = shutil.copytree(finished[0], tmp_path / "older")
    (older / "metrics.json").write_text('{"test_accuracy_percent": 50, "epochs_planned": 3, "test_evaluations": 1}')
    assert "metrics.json is damaged (no entry 'test_images')" in refused("report", older)
    longer = shutil.copytree(finished[0], tmp_path / "longer")
    recipe = json.loads((longer / "recipe.json").read_text())
    recipe["recipe"]["epochs"] = 5
    (longer / "recipe.json").write_text(json.dumps(recipe))
    assert call("report", longer)[0] == 0
    page = (longer / "report.html").read_text()
    assert "Not finished: 3 of 5 epochs" in page
    assert page.count("<figure ") == 1
    (run / "metrics.csv").unlink()
    assert "no run" in refused("report", run)
    assert "has no recipe.json: give a run folder" in refused("report", tmp_path)
    assert "does not exist: give a run folder" in refused("report", tmp_path / "nowhere")
    assert "ends in .html" in refused("report", finished[0], "--out", tmp_path / "page.pdf")


def test_the_worst_images_come_first(tmp_path):
    images = grey([255, 0, 128, 200], [0, 0, 1, 1])
    scores = Brightness()(Preprocessing().plain(images.pixels)).scores.detach()
    assert scores.argmax(dim=1).tolist() == [1, 0, 1, 1]
    save_worst(Brightness(), Preprocessing(), images, scores, tmp_path / "two.png", count=2)
    two = torch.tensor([0, 2])
    save_worst(Brightness(), Preprocessing(), images.subset(two), scores[two], tmp_path / "same.png")
    assert (imread(tmp_path / "two.png") == imread(tmp_path / "same.png")).all()


def test_a_rising_margin_is_drawn_with_the_loss(tmp_path):
    recipe = create_recipe("matrix-capsnet-toys-paper", {"epochs": "4"})
    module = TrainingModule(Brightness(), recipe, 3, steps=400)
    margins = module.margins_per_epoch()
    assert margins == pytest.approx([0.375, 0.55, 0.725, 0.9])
    names = ("train_loss", "validation_loss", "validation_accuracy_percent", "train_images_per_second")
    rows = [{"epoch": epoch, **dict.fromkeys(names, epoch)} for epoch in (1, 2, 3, 4)]
    save_curves(rows, tmp_path / "with.png", margins)
    save_curves(rows, tmp_path / "without.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()
    assert TrainingModule(Brightness(), create_recipe("capsnet-mnist"), 3).margins_per_epoch() == []


def test_pictures_accept_any_range_and_number_of_channels():
    assert as_picture(torch.rand(3, 4, 5)).shape == (4, 5, 3)
    assert as_picture(torch.rand(2, 4, 5)).shape == (4, 5)
    standardised = as_picture(torch.tensor([[[-2.0, 0.0, 2.0]]]))
    assert standardised.tolist() == [[0.0, 0.5, 1.0]]


@pytest.mark.parametrize(("name", "value"), [("classes", [1]), ("classes", {"a": 3}), ("wall_seconds", "x")])
def test_damaged_metrics_are_refused_and_nothing_is_written(name, value, run, refused, tmp_path):
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, name: value}))
    assert "metrics.json is damaged" in refused("publish", run, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    if name == "classes":
        assert "metrics.json is damaged" in refused("report", run, "--out", tmp_path / "run.html")
