"""With `torch.set_default_device`, data, training and pictures still work on the CPU, and networks move as usual."""

import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import torchcaps
from test_run_folder import SPLITS, tiny
from torchcaps.data import load_splits
from torchcaps.evaluation import evaluate
from torchcaps.inspection import inspect
from torchcaps.training import fit

ROOT = Path(torchcaps.__file__).parent
NETWORKS = [str(ROOT / name) for name in ("capsules.py", "layers.py", "models/", "routing/")]
"""Modules whose tensors may be on the default device, like those of `torch.nn`."""
CREATING = {
    getattr(torch, name)
    for name in (
        "arange",
        "as_tensor",
        "empty",
        "eye",
        "full",
        "ones",
        "rand",
        "randint",
        "randperm",
        "tensor",
        "zeros",
    )
}


class DefaultDevice(TorchFunctionMode):
    """Has the effect of ``torch.set_default_device("meta")`` on torchcaps, except on its networks.

    The meta device plays a GPU. torch cannot train on it, so torch itself and networks still create tensors on the CPU.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in CREATING and "device" not in kwargs:
            file = sys._getframe(1).f_code.co_filename
            if file.startswith(str(ROOT)) and not file.startswith(tuple(NETWORKS)):
                kwargs["device"] = "meta"
        return function(*args, **kwargs)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_images_are_loaded_with_another_default_device(cache, images, tmp_path):
    right = load_splits(str(images), tmp_path, cache=cache)
    torch.set_default_device("meta")
    try:
        found = load_splits(str(images), tmp_path, cache=cache)
        pixels = found.validation.subset([0, 2]).batch(torch.arange(2, device="cpu"))
    finally:
        torch.set_default_device(None)
    assert torch.equal(pixels, right.validation.batch(torch.tensor([0, 2])))
    assert torch.equal(found.train.labels, right.train.labels)


@pytest.mark.filterwarnings("ignore")
def test_training_with_another_default_device_gives_the_same_weights(tmp_path):
    right, found = [], []
    recipe = tiny(1, mixup="0.2")
    fit(recipe, SPLITS, tmp_path / "right", on_epoch_end=lambda model: right.append(model.state_dict()))
    with DefaultDevice():
        fit(recipe, SPLITS, tmp_path / "run", on_epoch_end=lambda model: found.append(model.state_dict()))
        classifier = torchcaps.Classifier.from_pretrained(tmp_path / "run")
        scores = evaluate(classifier.model, SPLITS.test, precision="float32").scores
        assert classifier.predict(SPLITS.test.pixels[:3]).scores.shape == (3, 10)
    assert all(torch.equal(found[0][name], weights) for name, weights in right[0].items())
    assert torch.equal(scores, evaluate(classifier.model, SPLITS.test, precision="float32").scores)


@pytest.mark.filterwarnings("ignore")
def test_a_capsule_network_is_inspected_with_another_default_device():
    network = torchcaps.CapsNet((1, 28, 28), 10, convolution_channels=8, primary_types=2).eval()
    classifier = torchcaps.Classifier(network, SPLITS.test.class_names, (1, 28, 28), torchcaps.Preprocessing())
    right = inspect(classifier, SPLITS.test.pixels[0]).support
    with DefaultDevice():
        assert torch.equal(inspect(classifier, SPLITS.test.pixels[0]).support, right)
