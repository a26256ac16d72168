"""Batches of each split, and what the training computes from them: losses, margins, gradients and weights."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from test_run_folder import SPLITS, tiny
from torchcaps import BadInput, Classifier, Prediction
from torchcaps.batches import ImageBatches
from torchcaps.data import Images, Preprocessing
from torchcaps.evaluation import evaluate
from torchcaps.losses import LOSSES, margin_loss, reconstruction_loss, spread_loss, spread_margin
from torchcaps.recipes import create_recipe
from torchcaps.run_folder import read_rows
from torchcaps.split_batches import SplitBatches
from torchcaps.training import fit, new_module
from torchcaps.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("blank_pictures")
CPU = torch.device("cpu")


def batches_of(recipe, splits=SPLITS, processes=1, rank=0, epoch=0):
    data = SplitBatches(splits, recipe)
    data.trainer = SimpleNamespace(
        world_size=processes, global_rank=rank, current_epoch=epoch, strategy=SimpleNamespace(root_device=CPU)
    )
    return data


def test_the_order_and_the_augmentation_depend_on_the_seed():
    (one, order), (other, another) = (batches_of(replace(tiny(1, shift="2"), seed=seed)).epoch(0) for seed in (0, 1))
    assert sorted(order) == sorted(another) == [*range(60)]
    assert (order != another).any()
    assert not torch.equal(one.variation.offsets, other.variation.offsets)


def test_the_augmentation_of_an_image_depends_on_its_index_and_not_on_its_place_in_the_batch():
    preprocessing = Preprocessing(shift=5)
    variation, indices = preprocessing.variation(0, 0, 60), np.array([7, 3])
    found, labels = ImageBatches(SPLITS.train, preprocessing, variation).load(indices, CPU)
    assert torch.equal(found, preprocessing.varied(SPLITS.train.pixels[indices], variation.of(torch.tensor([7, 3]))))
    assert labels.tolist() == SPLITS.train.labels[indices].tolist()


def test_the_augmentation_has_full_precision_in_autocast():
    preprocessing = Preprocessing(rotation=30.0, squeeze=0.2)
    dataset = ImageBatches(SPLITS.train, preprocessing, preprocessing.variation(0, 0, 60))
    expected, _ = dataset.load(np.arange(60), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = dataset.load(np.arange(60), CPU)
    assert torch.equal(found, expected)


def test_processes_share_the_batch_size_and_train_on_equally_many_images():
    splits = replace(SPLITS, train=SPLITS.train.subset(range(59)))
    shares = [list(batches_of(tiny(1), splits, 2, rank).train_dataloader()) for rank in (0, 1)]
    assert [[len(labels) for _, labels in share] for share in shares] == [[10, 10, 9]] * 2
    places = [batches_of(tiny(1), splits, 2, rank).train_dataloader().sampler for rank in (0, 1)]
    assert len({index for share in places for part in share for index in part.tolist()}) == 58


def test_validation_in_training_uses_the_central_crop_and_the_evaluation_uses_all_crops():
    recipe = tiny(1, crop="20", test_crops="2")
    data, preprocessing = batches_of(recipe), Preprocessing(crop=20, test_crops=2)
    views, _ = next(iter(data.val_dataloader()))
    assert torch.equal(views, preprocessing.plain(SPLITS.validation.pixels)[None])
    batches = [views for views, _ in data.evaluation_dataloader(SPLITS.test)]
    assert torch.equal(torch.cat(batches, dim=1), preprocessing.views(SPLITS.test.pixels))
    assert max(views.shape[0] * views.shape[1] for views in batches) <= recipe.batch_size


def test_one_image_of_many_crops_is_evaluated_in_batches_of_crops():
    recipe, sizes = tiny(1, crop="20", test_crops="8", batch_size="10"), []
    module = new_module(recipe, SPLITS).eval()
    right = torch.stack([module.scores(view) for view in recipe.preprocessing().views(SPLITS.test.pixels)]).mean(dim=0)
    module.model.register_forward_pre_hook(lambda _, images: sizes.append(len(images[0])))
    for batch in batches_of(recipe).evaluation_dataloader(SPLITS.test):
        module.test_step(batch, 0)
    torch.testing.assert_close(torch.cat(module.gathered.value)[:, :-1], right)
    assert max(sizes) == 10


@pytest.mark.filterwarnings("ignore")
def test_the_validation_loss_is_the_mean_over_all_images_without_mixup(tmp_path):
    """The last validation batch is smaller than the others."""
    splits = replace(SPLITS, validation=SPLITS.train.subset(range(26)))
    recipe = replace(tiny(1, mixup="1"), choose="last")
    fit(recipe, splits, tmp_path / "run", logger="none")
    network = Classifier.from_pretrained(tmp_path / "run").model
    with torch.inference_mode():
        scores = network(splits.validation.pixels.float() / 255).scores
        loss = LOSSES[recipe.loss](scores, splits.validation.labels, **recipe.loss_options)
    (row,) = read_rows(tmp_path / "run" / "metrics.csv")
    assert float(row["validation_loss"]) == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_does_not_update_the_validation_loss_is_refused(tmp_path):
    class Silent(TrainingModule):
        def validation_step(self, batch, batch_index):
            self.count(self.loss_and_scores(batch[0][0], batch[1], train=False)[1], batch[1])

    with pytest.raises(NotImplementedError, match=r"Silent\.validation_step must call self\.validation_loss\.update"):
        fit(tiny(1), SPLITS, tmp_path / "run", logger="none", module_class=Silent)


class RightInTheFirstEpoch(TrainingModule):
    """Every prediction is right in the first epoch, and wrong afterwards."""

    def loss_and_scores(self, images, labels, train):
        loss, scores = super().loss_and_scores(images, labels, train)
        right = nn.functional.one_hot(labels, scores.shape[1])
        return loss, right if self.current_epoch == 0 else 1 - right


@pytest.mark.filterwarnings("ignore")
def test_the_validation_accuracy_of_an_epoch_does_not_depend_on_earlier_epochs(tmp_path):
    weights = []

    def copy(model):
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    options = {"logger": "none", "module_class": RightInTheFirstEpoch, "on_epoch_end": copy}
    metrics, rows = fit(tiny(2), SPLITS, tmp_path / "run", **options), read_rows(tmp_path / "run" / "metrics.csv")
    assert [row["validation_accuracy_percent"] for row in rows] == ["100.0000", "0.0000"]
    assert metrics["wall_seconds"] == pytest.approx(sum(float(row["seconds"]) for row in rows))
    assert metrics["best_epoch"] == 1
    saved = Classifier.from_pretrained(tmp_path / "run").model.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights[0].items())
    assert not all(torch.equal(saved[name], tensor) for name, tensor in weights[1].items())


class Watched(TrainingModule):
    """Records whether the trainer trains, and whether the loss is computed for training."""

    seen: set[tuple[bool, bool]]

    def loss_and_scores(self, images, labels, train):
        self.seen.add((self.trainer.training, train))
        return super().loss_and_scores(images, labels, train)


@pytest.mark.filterwarnings("ignore")
def test_only_training_steps_compute_the_loss_for_training(tmp_path):
    Watched.seen = set()
    fit(tiny(1), SPLITS, tmp_path / "run", logger="none", module_class=Watched)
    assert Watched.seen == {(True, True), (False, False)}


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_scaled_down_to_the_norm_of_gradient_clip(tmp_path):
    splits = replace(SPLITS, train=SPLITS.train.subset(range(20)))
    recipe = replace(tiny(1), optimizer="sgd", learning_rate=1.0, gradient_clip=0.01, weight_decay=0.0, choose="last")
    recipe = replace(recipe, schedule="exponential", decay_rate=1.0)
    fit(recipe, splits, tmp_path / "run", logger="none")
    before = dict(new_module(recipe, splits).model.named_parameters())
    after = dict(Classifier.from_pretrained(tmp_path / "run").model.named_parameters())
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_the_seed_of_the_recipe_determines_the_initial_weights():
    one, same, other = (new_module(replace(tiny(1), seed=seed), SPLITS).model.state_dict() for seed in (1, 1, 2))
    weights = [name for name in one if name.endswith("weight") and one[name].ndim > 1]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in weights)


def test_the_optimiser_has_the_settings_of_the_recipe():
    recipe = replace(tiny(1), optimizer="adamw", learning_rate=0.02, weight_decay=0.3, warm_up_epochs=0.0)
    optimizer = new_module(recipe, SPLITS).configure_optimizers()["optimizer"]
    assert type(optimizer) is torch.optim.AdamW
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.3)]


class Fixed(nn.Module):
    """The scores are the first pixels, and the reconstruction is black."""

    def forward(self, images, labels):
        return Prediction(images.flatten(1)[:, :3], None, torch.zeros_like(images))


@pytest.mark.parametrize("schedule", ["linear", "official"])
def test_the_margin_rises_in_training_and_is_that_of_the_end_in_validation(schedule):
    recipe = replace(create_recipe("matrix-capsnet-toys-paper"), margin_schedule=schedule, loss="spread")
    module = TrainingModule(Fixed(), replace(recipe, loss_options={}), 3, steps=1000)
    images, labels = torch.rand(4, 1, 2, 2), torch.tensor([0, 2, 1, 1])
    for train, step in ((True, 0), (False, 1000)):
        loss, scores = module.loss_and_scores(images, labels, train=train)
        assert loss == spread_loss(scores, labels, margin=spread_margin(schedule, step, 1000))


@pytest.mark.parametrize("train", [True, False])
def test_the_reconstruction_loss_is_added_with_its_weight(train):
    recipe = replace(create_recipe("capsnet-mnist"), reconstruction_weight=0.01)
    images, labels = torch.rand(4, 1, 2, 2), torch.tensor([0, 2, 1, 1])
    loss, scores = TrainingModule(Fixed(), recipe, 3).loss_and_scores(images, labels, train=train)
    added = 0.01 * reconstruction_loss(torch.zeros_like(images), images)
    torch.testing.assert_close(loss, margin_loss(scores, labels) + added)


@pytest.mark.filterwarnings("ignore")
def test_the_scores_of_the_test_are_the_means_over_all_preprocessed_crops():
    model = new_module(tiny(1, crop="20", test_crops="2"), SPLITS).model.eval()
    preprocessing = Preprocessing(crop=20, test_crops=2, standardise="first")
    images = Images(torch.randint(0, 256, (8, 1, 28, 28), dtype=torch.uint8), torch.arange(8), tuple("0123456789"))
    found = evaluate(model, images, preprocessing, precision="float32")
    with torch.inference_mode():
        expected = torch.stack([model(view).scores for view in preprocessing.views(images.pixels)]).mean(dim=0)
    torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("images", "steps"), [(60, 3), (44, 3), (43, 2), (42, 2), (40, 2)])
def test_the_schedule_counts_the_steps_of_each_process(images, steps):
    splits = replace(SPLITS, train=SPLITS.train.subset(range(images)))
    assert new_module(tiny(2), splits, devices=2).steps == 2 * steps
    assert len(batches_of(tiny(2), splits, 2).train_dataloader()) == steps


def test_a_network_that_cannot_be_trained_on_one_image_at_a_time_is_refused():
    options = {"model": "residual-capsnet", "model_options": {}, "routing_options": {}, "batch_size": 1}
    recipe = replace(create_recipe("residual-capsnet-images", {}), **options)
    small = replace(SPLITS, **{name: with_size(images, 8) for name, images in vars(SPLITS).items()})
    with pytest.raises(BadInput, match=r"Expected more than 1 value per channel .*use a larger --batch-size"):
        new_module(recipe, small)
    new_module(replace(recipe, batch_size=2), small)


def test_splits_of_different_sizes_are_refused_except_by_pooled_networks():
    splits = replace(SPLITS, test=with_size(SPLITS.test, 18))
    new_module(tiny(1), splits)
    with pytest.raises(BadInput, match=r"the test images have the shape .*18, 18\), but the training images"):
        new_module(replace(tiny(1), model="efficient-capsnet"), splits)


def with_size(images, side):
    return Images(images.pixels[:, :, :side, :side], images.labels, images.class_names)
