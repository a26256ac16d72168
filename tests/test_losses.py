"""Losses: the scores that each accepts, and class weights in every loss, with mixup and in unbalanced training."""

import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.utils import compute_class_weight
from torch import nn

from torchcaps import MODELS, BadInput, Prediction
from torchcaps.checks import INTEGERS
from torchcaps.chosen_epoch import best_epoch
from torchcaps.data import Images, Splits
from torchcaps.losses import (
    LOSSES,
    activation_cross_entropy,
    activation_logit_cross_entropy,
    balanced_class_weights,
    check_loss,
    cross_entropy,
    margin_loss,
    reconstruction_loss,
    spread_loss,
)
from torchcaps.recipes import RECIPES, create_recipe
from torchcaps.run_folder import read_metrics, read_rows, read_run
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule, mean_recall_percent, validation_rank

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("loss", [cross_entropy, activation_cross_entropy])
def test_compiled_losses_do_not_ignore_the_class_that_pytorch_ignores_by_default(loss):
    """Compiled losses do not check the classes themselves."""
    with pytest.raises(IndexError, match="-100"):
        torch.compile(loss, backend="eager")(torch.rand(1, 3), torch.tensor([-100]))


@pytest.mark.parametrize(("factor", "offset"), [(255, 0), (3, -1), (2, -1)])
def test_images_that_a_decoder_cannot_reconstruct_are_refused(factor, offset):
    pixels, decoded = torch.linspace(0, 1, 16).view(1, 1, 4, 4), torch.rand(1, 1, 4, 4)
    images = factor * pixels + offset
    with pytest.raises(ValueError, match=rf"images must be in \[0, 1\] .*; got {offset} to {factor + offset}: scale"):
        reconstruction_loss(decoded, images)
    assert reconstruction_loss(images.clone(), images) == 0  # a decoder of another range
    assert reconstruction_loss(torch.zeros_like(images), images) > 0
    assert reconstruction_loss(decoded, 2 * pixels - 0.5).isfinite()  # an interpolation that overshoots
    assert reconstruction_loss(decoded, images * math.nan).isnan()
    assert reconstruction_loss(decoded * math.nan, images).isnan()
    several = torch.func.vmap(lambda one: reconstruction_loss(one, images))(decoded.expand(3, 1, 1, 4, 4))
    assert (several > 0).all()


def test_a_loss_of_activations_is_refused_for_logits():
    for model, kind in MODELS.items():
        for loss in LOSSES:
            if not kind.logits or loss == "cross_entropy":
                check_loss(loss, model, kind.logits)
            else:
                with pytest.raises(BadInput, match=f"loss {loss} needs .* model {model} are logits: set loss=cross_"):
                    check_loss(loss, model, kind.logits)


def test_the_loss_of_every_recipe_accepts_the_scores_of_its_model():
    for name in RECIPES:
        recipe = create_recipe(name)
        check_loss(recipe.loss, recipe.model, MODELS[recipe.model].logits)


@pytest.mark.parametrize("name", LOSSES)
def test_an_integer_weight_equals_that_many_copies_of_the_image(name):
    loss, scores, labels = LOSSES[name], torch.rand(4, 3, requires_grad=True), torch.tensor([0, 2, 1, 1])
    times = torch.tensor([3, 1, 0, 2])
    weighted = loss(scores, labels, sample_weights=times.float()) * 4
    repeated = loss(scores.repeat_interleave(times, dim=0), labels.repeat_interleave(times)) * 6
    torch.testing.assert_close(weighted, repeated)
    gradients = [torch.autograd.grad(each, scores)[0] for each in (weighted, repeated)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(loss(scores, labels, sample_weights=torch.ones(4)), loss(scores, labels))


@pytest.mark.usefixtures("untyped")
def test_balanced_class_weights_equal_those_of_scikit_learn():
    labels = torch.tensor([2] * 5 + [0] * 20 + [1])
    found = balanced_class_weights(labels, 3)
    right = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    np.testing.assert_allclose(found, right, rtol=1e-6)
    assert found[labels].mean() == pytest.approx(1)
    assert torch.isfinite(balanced_class_weights(labels, 4)).all()
    for wrong in (labels, labels - 1, labels.float(), labels == 1):
        with pytest.raises(ValueError, match="labels must be"):
            balanced_class_weights(wrong, 2)


@pytest.mark.usefixtures("untyped")
def test_targets_and_weights_that_would_make_a_loss_negative_are_refused():
    scores, both = torch.full((2, 4), 0.95), torch.tensor([[0, 2, 0, 0], [0, 1, 0, 1]])
    with pytest.raises(ValueError, match=r"target must be in \[0, 1\]; got 0 to 2"):
        margin_loss(scores, both)
    assert margin_loss(scores, both.clamp_max(1)) > 0
    with pytest.raises(ValueError, match="weights must be at least 0; got -1 to 1"):
        margin_loss(scores, torch.tensor([0, 1]), sample_weights=torch.tensor([1.0, -1.0]))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("shape", [(4, 1), (1,)])
def test_weights_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="weights must fit the shape"):
        margin_loss(torch.rand(4, 3), torch.tensor([0, 1, 2, 0]), sample_weights=torch.ones(shape))


@pytest.mark.usefixtures("untyped")
def test_a_prediction_instead_of_its_scores_and_a_missing_reconstruction_are_refused():
    for loss in LOSSES.values():
        with pytest.raises(ValueError, match=r"scores must be a tensor .*: pass prediction\.scores"):
            loss(Prediction(torch.rand(2, 3)), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="create the network with a decoder"):
        reconstruction_loss(None, torch.rand(2, 1, 4, 4))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("dtype", INTEGERS)
def test_labels_of_every_integer_type_give_the_same_loss(dtype):
    scores, labels = torch.rand(3, 4), torch.tensor([0, 3, 1])
    for loss in (margin_loss, spread_loss):
        assert loss(scores, labels.to(dtype)) == loss(scores, labels)
    assert torch.equal(balanced_class_weights(labels.to(dtype), 4), balanced_class_weights(labels, 4))


def test_the_cross_entropy_of_activations_is_minus_the_log_of_the_share_of_the_target_class():
    scores, labels = torch.tensor([[0.2, 0.7, 0.3], [0.5, 2e-6, 0.5]]), torch.tensor([1, 1])
    expected = -(math.log(0.7 / 1.2) + math.log(2e-6 / 1.000002)) / 2
    assert activation_cross_entropy(scores, labels).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_cross_entropy_of_an_inactive_capsule_is_exact_in_half_precision(dtype):
    loss = activation_cross_entropy(torch.tensor([[0.0, 1.0]], dtype=dtype), torch.tensor([0]))
    assert loss.item() == pytest.approx(12 * math.log(10), abs=1e-3)


def test_label_smoothing_spreads_a_share_of_the_target_probability_over_all_classes():
    scores, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    target = 0.7 * torch.eye(3)[labels] + 0.3 / 3
    expected = -(target * scores.log_softmax(dim=1)).sum(dim=1)
    torch.testing.assert_close(cross_entropy(scores, labels, label_smoothing=0.3), expected.mean())
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5])
    weighted = cross_entropy(scores, labels, label_smoothing=0.3, sample_weights=weights)
    torch.testing.assert_close(weighted, (expected * weights).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_activations_are_clamped_at_one_millionth(dtype):
    loss = activation_logit_cross_entropy(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1]))
    assert loss.item() == pytest.approx(2 * math.log(1e6), abs=0.1)


def test_the_default_margin_of_the_spread_loss_is_the_last_of_the_paper():
    scores, labels = torch.rand(4, 3), torch.tensor([0, 2, 1, 1])
    assert spread_loss(scores, labels) == spread_loss(scores, labels, margin=0.9)


class Fixed(nn.Module):
    def forward(self, images, labels):
        return Prediction(images.flatten(1))


def test_mixup_multiplies_the_loss_of_each_of_the_two_classes_by_its_weight():
    recipe = replace(create_recipe("cnn-baseline-mnist"), mixup=1.0, class_weights="balanced")
    images, labels, weights = torch.randn(8, 1, 1, 2), torch.arange(8) % 2, torch.tensor([0.5, 4.0])
    module = TrainingModule(Fixed(), recipe, 2, class_weights=weights)
    torch.manual_seed(3)
    found, scores = module.loss_and_scores(images, labels, train=True)
    torch.manual_seed(3)
    share = float(torch.distributions.Beta(1.0, 1.0).sample())
    others = labels[torch.randperm(8)]
    assert (others != labels).any()
    each = [nn.functional.cross_entropy(scores, of, reduction="none") * weights[of] for of in (labels, others)]
    torch.testing.assert_close(found, (share * each[0] + (1 - share) * each[1]).mean())
    assert "class_weights" not in module.state_dict()


def rare(count, seed):
    """Grey images of two classes: one image in 21 is of the class rare, whose images are brighter on average."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(count) % 21 == 0).long()
    brightness = 100 + 60 * labels + 25 * torch.randn(count, generator=generator)
    pixels = brightness.clamp(0, 255).to(torch.uint8)[:, None, None, None].expand(-1, 1, 14, 14).contiguous()
    return Images(pixels, labels, ("frequent", "rare"))


SPLITS = Splits(rare(420, 0), rare(84, 1), rare(210, 2))


@pytest.mark.filterwarnings("ignore")
def test_balanced_class_weights_raise_the_recall_of_a_rare_class(tmp_path, capsys):
    plain = {"reconstruction_weight": "0", "erase": "0", "shift": "0", "rotation": "0", "squeeze": "0"}
    plain |= {"epochs": "4", "batch_size": "20", "precision": "float32", "choose": "best"}
    recalls = {}
    for weights in ("none", "balanced"):
        recipe = create_recipe("efficient-capsnet-mnist", {**plain, "class_weights": weights})
        recipe = replace(recipe, model_options={"channels": (8, 8, 8, 16), "decoder": False})
        classes = fit(recipe, SPLITS, tmp_path / weights)["classes"]
        assert ("%  mean recall " in capsys.readouterr().out) == (weights == "balanced")
        recalls[weights] = [classes[name]["recall_percent"] for name in ("frequent", "rare")]
        assert json.loads((tmp_path / weights / "recipe.json").read_text())["recipe"]["class_weights"] == weights
    assert recalls["none"] == [100.0, 0.0]
    assert sum(recalls["balanced"]) / 2 > 75
    run, rows = tmp_path / "balanced", read_rows(tmp_path / "balanced" / "metrics.csv")
    kept, recipe = read_metrics(run)["best_epoch"], read_run(run).recipe
    assert float(rows[kept - 1]["validation_recall_percent"]) == max(
        float(row["validation_recall_percent"]) for row in rows
    )
    assert float(rows[kept - 1]["validation_accuracy_percent"]) < 100 * 20 / 21
    (run / "metrics.json").unlink()
    assert best_epoch(run, recipe) == kept
    text = (run / "metrics.csv").read_text().replace("validation_recall_percent", "other")
    (run / "metrics.csv").write_text(text)  # as before the column existed
    accuracies = [float(row["validation_accuracy_percent"]) for row in rows]
    assert accuracies[best_epoch(run, recipe) - 1] == max(accuracies)
    path = tmp_path / "none" / "recipe.json"
    content = json.loads(path.read_text())
    del content["recipe"]["class_weights"]  # as before the option existed
    path.write_text(json.dumps(content))
    assert read_run(path.parent).recipe.class_weights == "none"


def test_the_mean_recall_weights_all_classes_with_images_equally():
    assert mean_recall_percent(torch.tensor([[90, 0, 10], [1, 1, 0], [0, 0, 0]])) == pytest.approx(70)


@pytest.mark.filterwarnings("ignore")
def test_class_weights_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"class_weights must be one of none, balanced.*; got 'balance'"):
        create_recipe("capsnet-mnist", {"class_weights": "balance"})
    with pytest.raises(BadInput, match=r"unknown setting 'loss\.sample_weights'"):
        create_recipe("capsnet-mnist", {"loss.sample_weights": "[1, 2]"})
    monkeypatch.setitem(LOSSES, "own", lambda scores, target: scores.sum())
    with pytest.raises(BadInput, match="class_weights is 'balanced', but loss own has no argument sample_weights"):
        create_recipe("capsnet-mnist", {"loss": "own", "class_weights": "balanced"})
    several = Images(SPLITS.train.pixels, SPLITS.train.labels[:, None].expand(-1, 2), SPLITS.train.class_names)
    recipe = create_recipe("pooled-cnn-mnist", {"class_weights": "balanced"})
    with pytest.raises(BadInput, match="each image shows several classes: set class_weights=none"):
        fit(recipe, Splits(several, several, several), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert all("sample_weights" in inspect.signature(loss).parameters for name, loss in LOSSES.items() if name != "own")


def test_the_loss_ranks_epochs_only_if_their_accuracies_are_equal():
    assert validation_rank(95.0025, 0.6) > validation_rank(95.0024, 0.3)
    assert validation_rank(95.0025, 1e9) > validation_rank(95.0024, 0.0)
    assert validation_rank(95.0025, 0.3) > validation_rank(95.0025, 0.300001)
