"""Training of a compiled network, and the check of its gradients."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from conftest import train
from test_run_folder import SPLITS, tiny
from torchcaps import BadInput, Prediction
from torchcaps.compilation import check_compiled
from torchcaps.devices import check_devices
from torchcaps.run_folder import read_rows
from torchcaps.training import fit, new_module
from torchcaps.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("blank_pictures")


def compiling(batch_size=20, **settings):
    return replace(tiny(2, **settings), compile=True, batch_size=batch_size)


class Compiler(TrainingModule):
    """Instead of compiling the model, calls it and multiplies the gradients of batches of one size by a factor."""

    factor, wrong_size = 1.0, 20
    sizes: list[tuple[int, bool]]

    def compiled_model(self):
        def run(images, labels):
            self.sizes.append((len(images), self.training))
            prediction = self.model(images, labels)
            factor = self.factor if len(images) == self.wrong_size else 1.0
            scores = factor * prediction.scores + (1 - factor) * prediction.scores.detach()
            return prediction._replace(scores=scores)

        return run


def checked(recipe, factor, wrong_size=20):
    Compiler.sizes, Compiler.factor, Compiler.wrong_size = [], factor, wrong_size
    module = new_module(recipe, SPLITS, Compiler)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    check_compiled(module, SPLITS)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_gradients_without_error_pass_the_check(precision):
    checked(compiling(16, precision=precision), 1.0)
    assert Compiler.sizes == 3 * [(16, True)] + 3 * [(12, True)]  # the sizes of the batches of 60 images


@pytest.mark.parametrize(("batch_size", "wrong_size"), [(20, 20), (16, 16), (16, 12)])
def test_a_wrong_gradient_in_a_batch_of_any_size_is_refused(batch_size, wrong_size):
    says = r"compile is true, but .* wrong gradient of the weights \S+ \(the difference is 0.50%.* compilation\): start"
    with pytest.raises(BadInput, match=says):
        checked(compiling(batch_size), 1.005, wrong_size)


def test_a_wrong_gradient_is_refused_before_the_run_begins(tmp_path):
    Compiler.sizes, Compiler.factor, Compiler.wrong_size = [], float("nan"), 20
    with pytest.raises(BadInput, match="wrong gradient"):
        fit(compiling(), SPLITS, tmp_path / "run", logger="none", module_class=Compiler)
    assert not (tmp_path / "run" / "recipe.json").exists()


@pytest.mark.filterwarnings("ignore")
def test_only_training_steps_run_the_compiled_network(tmp_path):
    """The check runs three steps, and both epochs have three batches."""
    Compiler.sizes, Compiler.factor, Compiler.wrong_size = [], 1.0, 20
    fit(compiling(), SPLITS, tmp_path / "run", logger="none", module_class=Compiler)
    assert Compiler.sizes == 9 * [(20, True)]


class Failing(TrainingModule):
    def compiled_model(self):
        raise RuntimeError("Graph break\nmore")


class Network(nn.Linear):
    """Has no run-time type checks, which PyTorch cannot compile."""

    def forward(self, images, labels):
        return Prediction(super().forward(images.flatten(1)).sigmoid(), None)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_has_the_same_scores_and_gradients_and_no_second_weights():
    module, images = TrainingModule(Network(8, 3), compiling(), 3), torch.rand(5, 1, 2, 4)
    names = [*module.state_dict()]
    gradients = []
    for network in (module.model, module.compiled_model(), deepcopy(module).compiled_model()):
        scores = network(images, torch.zeros(5, dtype=torch.int64)).scores
        gradients.append([scores, *torch.autograd.grad(scores.square().sum(), [*network.parameters()])])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])
    assert [*module.state_dict()] == names


class OwnLoss(TrainingModule):
    def loss_and_scores(self, images, labels, train):
        return super().loss_and_scores(images, labels, train)


def test_a_network_that_cannot_be_compiled_is_refused():
    with pytest.raises(BadInput, match=r"cannot compile this network \(Graph break\): start a new run with"):
        check_compiled(new_module(compiling(), SPLITS, Failing), SPLITS)
    with pytest.raises(BadInput, match="compile is true, but OwnLoss has its own loss: set compile=false"):
        new_module(compiling(), SPLITS, OwnLoss)


def test_several_devices_do_not_compile():
    with pytest.raises(
        BadInput, match="devices must be 1 with compile=true; got 2: use one device, or set compile=false"
    ):
        check_devices(2, compiling())


@pytest.mark.slow
def test_a_compiled_network_trains_like_the_network_itself_and_can_be_resumed(command, images, tmp_path):
    settings = ("--batch-size", 16, "--seed", 1)
    whole, plain, resumed = (tmp_path / name for name in ("whole", "plain", "resumed"))
    for folder, epochs, more in (
        (whole, 2, ["--set", "compile=true"]),
        (plain, 2, []),
        (resumed, 1, ["--set", "compile=true"]),
        (resumed, 2, ["--set", "compile=true", "--resume"]),
    ):
        done = train(command, images, folder, "--epochs", epochs, *settings, *more)
        assert done.returncode == 0, done.stderr
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    for row, other in zip(*(read_rows(folder / "metrics.csv") for folder in (whole, plain)), strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-3)
