"""BatchNorm statistics that are computed anew before each validation."""

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from test_training import even_digits, train_whole_and_stopped, weights_equal
from torchcaps import BadInput
from torchcaps.classifier import Classifier
from torchcaps.convolution import use_channels_last
from torchcaps.recipes import create_recipe
from torchcaps.split_batches import SplitBatches
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule, average_batch_norms

pytestmark = pytest.mark.usefixtures("blank_pictures")
SMALL = {"model.widths": "[8,2,2,2]", "epochs": "2", "batch_size": "20", "precision": "float32", "choose": "last"}


def recipe_of(**changes):
    return create_recipe("variational-capsnet-images", {"data": "images", **SMALL, **changes})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("images", "batches"), [(1000, [20, 20, 20]), (25, [20, 5]), (21, [21])])
def test_saved_statistics_are_averages_over_batches_of_training_images_with_the_saved_weights(
    images, batches, tmp_path
):
    recipe, splits = recipe_of(batch_norm_images=str(images)), even_digits()
    fit(recipe, splits, tmp_path)
    model = Classifier.from_pretrained(tmp_path).model
    use_channels_last(model)  # as in training: in another memory order, convolutions round otherwise
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    assert len(norms) == 12
    seen = {name: [] for name in norms}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0].double()))
    saved = {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in norms.items()}
    loader, order = SplitBatches(splits, recipe).epoch(1)
    start = 0
    with torch.no_grad():
        for size in batches:
            model.train()(loader.load(order[start : start + size], torch.device("cpu"))[0])
            start += size
    for name, values in seen.items():
        dims = [d for d in range(values[0].ndim) if d != 1]
        mean = sum(len(x) * x.mean(dims) for x in values) / sum(batches)
        variance = sum(len(x) * x.var(dims) for x in values) / sum(batches)
        torch.testing.assert_close(saved[name][0].double(), mean, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(saved[name][1].double(), variance, rtol=1e-4, atol=1e-8)


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_gives_bit_identical_weights_and_statistics(tmp_path):
    train_whole_and_stopped(recipe_of(batch_norm_images="40", epochs="3"), tmp_path, stop_after=2)
    assert weights_equal(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.filterwarnings("ignore")
def test_the_trained_weights_do_not_depend_on_the_statistics(tmp_path):
    for images in ("0", "40"):
        fit(recipe_of(batch_norm_images=images), even_digits(), tmp_path / images)
    one, other = (dict(Classifier.from_pretrained(tmp_path / x).model.named_parameters()) for x in ("0", "40"))
    assert all(torch.equal(one[name], other[name]) for name in one)


class Watched(TrainingModule):
    """Records how the network runs while the statistics are computed."""

    seen: list[tuple[int, bool, int]]

    def scores(self, images):
        self.seen.append((self.model.first_capsules.routing.iterations, torch.is_autocast_enabled("cpu"), len(images)))
        return super().scores(images)


@pytest.mark.filterwarnings("ignore")
def test_statistics_are_computed_with_the_iterations_the_precision_and_the_batches_of_the_run(tmp_path):
    Watched.seen = []
    schedule = {"early_epochs": "1", "early_iterations": "1", "precision": "bf16"}
    fit(recipe_of(batch_norm_images="50", **schedule), even_digits(), tmp_path, module_class=Watched)
    of_statistics = Watched.seen[:3], Watched.seen[3:6]
    assert of_statistics == 2 * ([(3, True, 20), (3, True, 20), (3, True, 10)],)


class Frozen(nn.BatchNorm1d):
    """BatchNorm that stays in evaluation mode during training."""

    def train(self, mode=True):
        return super().train(False)


def test_dropout_is_off_frozen_statistics_stay_and_the_model_is_in_evaluation_mode_afterwards():
    model = nn.Sequential(nn.Dropout(0.9), Frozen(3), nn.BatchNorm1d(3, momentum=0.2), nn.Linear(3, 2)).train()
    batches = [3 * torch.randn(8, 3) + 5, torch.randn(4, 3) - 1]
    average_batch_norms(model, model, batches)
    assert torch.equal(model[1].running_mean, torch.zeros(3))
    assert torch.equal(model[1].running_var, torch.ones(3))
    torch.testing.assert_close(model[2].running_mean, model[1](torch.cat(batches)).mean(dim=0))
    assert model[2].momentum == 0.2
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("images", ["1", "-1"])
def test_numbers_of_images_out_of_range_are_refused(images):
    with pytest.raises(BadInput, match=f"batch_norm_images must be 0 or an integer of at least 2; got {images}"):
        recipe_of(batch_norm_images=images)


def test_a_model_without_batch_norm_loads_no_images():
    def batches():
        raise AssertionError("images were loaded")
        yield

    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)).train()
    average_batch_norms(model, model, batches())
    assert not model.training
