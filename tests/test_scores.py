"""The calibration error, compared with plain loops, and the table of scores of a real run."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassConfusionMatrix

from image_trees import tree
from problems import LargestResult
from torchcaps import BadInput, Classifier, create_model
from torchcaps.confusion import ConfusionMatrix, save_confusion
from torchcaps.data import Images, Preprocessing
from torchcaps.data.image_files import ImageFiles, Paths
from torchcaps.devices import reproducible
from torchcaps.evaluation import evaluate
from torchcaps.model_card import _escaped
from torchcaps.scores import (
    BINS,
    MeanScores,
    calibration_error_percent,
    probabilities,
    scores_apart,
    top_5_percent,
    write_scores,
)


def test_scores_are_written_with_as_many_decimals_as_tell_them_apart():
    assert scores_apart([0.9, 0.25]) == ["0.90", "0.25"]
    assert scores_apart([0.99999, 0.9999, 0.9]) == ["1.0000", "0.9999", "0.9000"]
    assert scores_apart([0.5, 0.5], digits=3) == ["0.500", "0.500"]
    assert scores_apart([0.9999999, 3e-9, 1e-9]) == ["1.00", "0.00", "0.00"]


def test_class_names_are_shown_literally_in_markdown():
    assert _escaped("__init__ $x$ ~~a~~ a&amp;b #1") == r"\_\_init\_\_ \$x\$ \~\~a\~\~ a\&amp;b \#1"


def calibration_error_in_plain_loops(scores, labels):
    scores, total = scores.tolist(), 0.0
    bins = [[] for _ in range(BINS)]
    for values, label in zip(scores, labels.tolist(), strict=True):
        if all(0 <= value <= 1 for row in scores for value in row):
            shares = [value / sum(values) for value in values]
        else:
            shares = [math.exp(value) / sum(map(math.exp, values)) for value in values]
        best = max(range(len(shares)), key=shares.__getitem__)
        bins[min(BINS - 1, math.ceil(shares[best] * BINS) - 1)].append((shares[best], best == label))
    for each in bins:
        if each:
            sure, right = (sum(part) / len(each) for part in zip(*each, strict=True))
            total += len(each) / len(scores) * abs(sure - right)
    return 100 * total


@pytest.mark.parametrize("kind", ["activations", "logits"])
def test_the_calibration_error_equals_its_definition(kind):
    scores, labels = torch.rand(200, 4), torch.randint(0, 4, (200,))
    scores = scores if kind == "activations" else 6 * scores - 2
    torch.testing.assert_close(probabilities(scores).sum(dim=1), torch.ones(200))
    found = calibration_error_percent(scores, labels)
    assert found == pytest.approx(calibration_error_in_plain_loops(scores, labels), abs=1e-3)
    assert found > 1


@pytest.mark.filterwarnings("ignore")
def test_logits_between_0_and_1_are_converted_by_a_softmax_and_long_poses_are_not():
    logits, lengths = torch.tensor([[0.1, 0.7], [0.4, 0.2]]), torch.tensor([[3.0, 1.0], [0.5, 0.5]])
    torch.testing.assert_close(probabilities(logits, logits=True), logits.softmax(dim=1))
    torch.testing.assert_close(probabilities(lengths, logits=False), torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    model = create_model("baseline-cnn", image_shape=(1, 20, 20), num_classes=2).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        list(model.parameters())[-1].copy_(torch.tensor([0.1, 0.7]))
    images = Images(torch.zeros(2, 1, 20, 20, dtype=torch.uint8), torch.tensor([1, 1]), ("left", "right"))
    for evaluated in (model, MeanScores([model, model])):
        found = evaluate(evaluated, images, precision="float32")
        torch.testing.assert_close(found.scores, torch.tensor([[0.1, 0.7]] * 2))
        expected = 100 * (1 - torch.tensor([0.1, 0.7]).softmax(dim=0)[1].item())
        assert found.calibration_error_percent == pytest.approx(expected, abs=1e-3)


def test_confident_right_predictions_are_calibrated_and_confident_wrong_ones_are_not():
    scores, labels = torch.eye(3), torch.arange(3)
    assert calibration_error_percent(scores, labels) == 0
    assert calibration_error_percent(scores, (labels + 1) % 3) == 100
    assert calibration_error_percent(torch.zeros(3, 3), labels) == pytest.approx(
        100 / 3, abs=0.1
    )  # all capsules are inactive
    saturated = torch.tensor([[30.0, 0.0]] * 50 + [[4.0, 0.0]] * 50)
    labels = (torch.arange(100) < 5).long()
    assert calibration_error_percent(saturated, labels) == pytest.approx(
        calibration_error_in_plain_loops(saturated, labels), abs=1e-3
    )


def test_the_bins_of_the_calibration_error_are_fifteenths():
    """The two confidences are in one bin of ten, but in different bins of fifteen."""
    scores, labels = torch.tensor([[0.64, 0.36], [0.69, 0.31]]), torch.tensor([0, 1])
    assert calibration_error_percent(scores, labels) == pytest.approx(100 * (0.36 + 0.69) / 2, abs=1e-3)


def test_activations_trained_by_their_logits_are_converted_by_the_softmax_of_the_logits():
    almost_certain = torch.tensor([[0.9999, 0.999, 0.0]])
    found = probabilities(almost_certain, loss="activation_logit_cross_entropy")
    torch.testing.assert_close(found, torch.tensor([[9999.0, 999.0, 0.0]]) / 10998, atol=1e-4, rtol=1e-3)
    certain = probabilities(torch.tensor([[1.0, 1.0, 0.0]]), loss="activation_logit_cross_entropy")
    torch.testing.assert_close(certain, torch.tensor([[0.5, 0.5, 0.0]]))
    scores = torch.tensor([[0.99, 0.9, 0.5]])
    expected = (scores / (1 - scores)) / (scores / (1 - scores)).sum()
    found = probabilities(scores, loss="activation_logit_cross_entropy")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    error = calibration_error_percent(scores, torch.tensor([0]), loss="activation_logit_cross_entropy")
    assert error == pytest.approx(100 * (1 - expected[0, 0].item()), abs=0.01)


@pytest.mark.filterwarnings("ignore")
def test_the_calibration_error_of_evaluate_depends_on_the_loss_of_the_training():
    model = create_model("capsnet", image_shape=(1, 20, 20), num_classes=3, convolution_channels=4, primary_types=2)
    pixels, labels = torch.randint(0, 256, (6, 1, 20, 20), dtype=torch.uint8), torch.arange(6) % 3
    images, errors = Images(pixels, labels, ("a", "b", "c")), []
    for loss in ("margin", "activation_logit_cross_entropy"):
        found = evaluate(model.eval(), images, precision="float32", loss=loss)
        errors.append(found.calibration_error_percent)
        assert errors[-1] == pytest.approx(calibration_error_percent(found.scores, labels, logits=False, loss=loss))
    assert errors[0] != errors[1]


@pytest.mark.filterwarnings("ignore")
def test_evaluate_computes_in_the_given_precision():
    model = create_model("capsnet", image_shape=(1, 20, 20), num_classes=3, convolution_channels=4, primary_types=2)
    images = Images(torch.randint(0, 256, (6, 1, 20, 20), dtype=torch.uint8), torch.arange(6) % 3, ("a", "b", "c"))
    exact, rounded = (evaluate(model.eval(), images, precision=each).scores for each in ("float32", "bf16"))
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.02, rtol=0)
    torch.testing.assert_close(exact, model(images.pixels / 255).scores, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_the_top_5_accuracy_is_reported_for_more_than_ten_classes(call, tmp_path):
    model = create_model("baseline-cnn", image_shape=(1, 20, 20), num_classes=11).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        list(model.parameters())[-1].copy_(-torch.arange(11.0))  # class 0 has the highest score
    names = [f"class {number:02}" for number in range(11)]
    Classifier(model, names, (1, 20, 20), Preprocessing()).save_pretrained(tmp_path / "weights")
    tree(tmp_path / "photos", names, count=2, size=(20, 20))
    code, out, error = call("evaluate", tmp_path / "weights", "--data", tmp_path / "photos")
    assert code == 0, error
    assert "top-5" in out
    assert re.search(r"│ 9\.09 +│ 90\.91 +│ 45\.45 +│", out)
    pixels = torch.zeros(4, 1, 20, 20, dtype=torch.uint8)
    images = Images(pixels, torch.tensor([0, 4, 5, 10]), tuple(names))
    assert evaluate(model, images, precision="float32").top_5_percent == 50
    assert top_5_percent(torch.zeros(11, 11), torch.arange(11)) == pytest.approx(500 / 11)  # class 0 to 4
    ten = create_model("baseline-cnn", image_shape=(1, 20, 20), num_classes=10)
    assert evaluate(ten, Images(pixels, torch.arange(4), tuple(names[:10]))).top_5_percent is None


@pytest.mark.filterwarnings("ignore")
def test_scores_that_are_not_finite_are_refused():
    model = create_model("baseline-cnn", image_shape=(1, 20, 20), num_classes=2).eval()
    images = Images(torch.zeros(2, 1, 20, 20, dtype=torch.uint8), torch.tensor([0, 1]), ("left", "right"))
    with torch.no_grad():
        list(model.parameters())[-1].fill_(math.nan)
    name = [name for name, _ in model.named_parameters()][-1]
    with pytest.raises(BadInput, match=rf"scores that are not finite \(first weights that are not finite: {name}"):
        evaluate(model, images, precision="float32")


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_evaluate_writes_the_scores_of_each_image(call, refused, finished, tmp_path):
    run, file = finished[0], tmp_path / "new" / "scores.csv"
    metrics = json.loads((run / "metrics.json").read_text())
    code, printed, error = call("evaluate", run, "--precision", "float32", "--csv", file)
    assert code == 0, error
    assert f"{metrics['calibration_error_percent']:.2f}" in printed
    rows = rows_of(file)
    assert [row["index"] for row in rows] == [str(index) for index in range(metrics["test_images"])]
    assert list(rows[0]) == ["index", "file", "true_class", "predicted_class", "score left", "score right"]
    right = [row["true_class"] == row["predicted_class"] for row in rows]
    assert 100 * sum(right) / len(rows) == pytest.approx(metrics["test_accuracy_percent"])
    scores = torch.tensor([[float(row["score left"]), float(row["score right"])] for row in rows])
    labels = torch.tensor([["left", "right"].index(row["true_class"]) for row in rows])
    assert calibration_error_percent(scores, labels) == pytest.approx(metrics["calibration_error_percent"], abs=0.01)
    assert [["left", "right"][best] for best in scores.argmax(dim=1)] == [row["predicted_class"] for row in rows]
    assert [path.name for path in file.parent.iterdir()] == ["scores.csv"]
    (tmp_path / "file").write_text("")
    assert "--csv" in refused("evaluate", run, "--csv", tmp_path / "file" / "scores.csv")


def test_the_table_contains_file_names_and_class_names_with_special_characters(tmp_path):
    files = ImageFiles(Paths([Path("x,1.png"), Path("y.png")]), np.zeros(2, np.uint64), torch.arange(2))
    images = Images(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1]), ('a,"b', "é\nü"), files=files)
    write_scores(tmp_path / "scores.csv", images, torch.tensor([[0.25, 1.0], [0.5, 1e-9]]))
    first, second = rows_of(tmp_path / "scores.csv")
    assert (first["file"], first["true_class"], first["predicted_class"]) == ("x,1.png", 'a,"b', "é\nü")
    assert (second["predicted_class"], second["score é\nü"]) == ('a,"b', "1e-09")
    with pytest.raises(BadInput, match="could not be written"):
        write_scores(tmp_path / "none" / "scores.csv", images, torch.rand(2, 2))


def test_the_written_scores_equal_those_of_the_classifier(call, finished, tmp_path, images):
    words = ("--data", images, "--precision", "float32", "--csv", tmp_path / "scores.csv")
    code, _, error = call("evaluate", finished[0], *words)
    assert code == 0, error
    known = Classifier.from_pretrained(finished[0]).predict(sorted((images / "left").iterdir())).scores
    of_left = [row for row in rows_of(tmp_path / "scores.csv") if row["true_class"] == "left"]
    written = torch.tensor([[float(row[f"score {name}"]) for name in ("left", "right")] for row in of_left])
    assert len(written) == 8
    assert (written[:, None] - known).abs().amax(dim=2).amin(dim=1).max() < 1e-4


@pytest.mark.parametrize("shape", [(50,), (50, 2)])
def test_counting_predictions_needs_no_more_memory_than_the_confusion_matrix(shape):
    predicted, labels = torch.randint(12, shape), torch.randint(12, shape)
    expected = MulticlassConfusionMatrix(12)
    expected.update(predicted, labels)
    found = ConfusionMatrix(12)
    with reproducible(), LargestResult() as results:
        assert torch.are_deterministic_algorithms_enabled()
        found.update(predicted, labels)
    assert results.largest <= 144
    assert torch.equal(found.compute(), expected.compute())


def test_predictions_that_do_not_fit_the_labels_are_not_counted():
    matrix = ConfusionMatrix(20)
    matrix.update(torch.rand(3, 20, 2), torch.randint(20, (3, 2)))
    matrix.update(torch.full((2,), 19), torch.full((2,), 19, dtype=torch.uint8))
    assert (matrix.compute().sum(), matrix.compute()[19, 19] >= 2) == (8, True)
    for predicted, labels, message in (
        (torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 2, dtype=torch.long), r"shape of the labels, \[2, 2\]"),
        (torch.tensor([20]), torch.tensor([0]), "predictions must be from 0 to 19; got 20 to 20"),
        (torch.tensor([0]), torch.tensor([-1]), "labels must be from 0 to 19; got -1 to -1"),
    ):
        with pytest.raises(ValueError, match=message):
            matrix.update(predicted, labels)


def test_the_picture_of_a_confusion_matrix_shows_the_numbers_of_images(tmp_path):
    pictures = []
    for times in (1, 2):
        save_confusion(times * torch.tensor([[3, 1], [0, 4]]), ("a", "b"), tmp_path / "confusion.png")
        pictures.append((tmp_path / "confusion.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_class_names_are_drawn_as_they_are(tmp_path):
    names = ("$\\nothing$", "b")  # not a formula of matplotlib
    save_confusion(torch.tensor([[3, 1], [0, 4]]), names, tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size
