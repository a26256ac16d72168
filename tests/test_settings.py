"""Settings of `torchcaps train --set`: which are applied, and which are refused."""

import re
from dataclasses import replace

import pytest
import torch

from conftest import SMALL_CAPSNET
from torchcaps import ROUTINGS, BadInput, Routing, UniformRouting, create_model
from torchcaps.environment import environment
from torchcaps.recipe import resolve_precision
from torchcaps.recipes import create_recipe, discarded_options

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_settings_are_applied_to_the_recipe():
    recipe = create_recipe(
        "capsnet-mnist", {"routing.iterations": "1", "learning_rate": "1", "loss.negative_weight": "0.25"}
    )
    assert (recipe.model_options, recipe.routing_options) == ({}, {"iterations": 1})
    assert recipe.learning_rate == 1.0
    assert recipe.loss_options == {"negative_weight": 0.25}
    columns = create_recipe("capsnet-images", {"data.image_column": "null", "data.label_column": "kind"})
    assert columns.data_options["image_column"] is None
    assert columns.data_options["label_column"] == "kind"


def test_another_rule_starts_without_the_options_of_the_previous_rule():
    settings = {"routing.iterations": "4", "model.routing": "attention"}
    for order in (settings, dict(reversed(settings.items()))):
        recipe = create_recipe("matrix-capsnet-mnist-paper", order)
        assert (recipe.model_options, recipe.routing_options) == ({"routing": "attention"}, {"iterations": 4})
    assert create_recipe("matrix-capsnet-mnist-paper", {"model": "capsnet"}).routing_options == {}
    assert create_recipe("matrix-capsnet-mnist-paper", {"model": "baseline-cnn"}).routing_options == {}
    kept = create_recipe("matrix-capsnet-mnist-paper", {"model.routing": "em", "routing.iterations": "1"})
    assert kept.routing_options == {"iterations": 1, "variance_floor": 1e-4, "initial_beta_a": -25.0}
    with pytest.raises(BadInput, match="give the name of a rule, and its options in routing_options"):
        replace(create_recipe("capsnet-mnist"), model_options={"routing": Routing("em")})


def test_the_order_of_settings_does_not_matter_and_another_loss_starts_with_its_own_options():
    settings = {"loss.positive_margin": "0.8", "loss": "margin", "data.stereo": "false", "model.pose": "vector"}
    for order in (settings, dict(reversed(settings.items()))):
        recipe = create_recipe("matrix-capsnet-toys-paper", order)
        assert recipe.loss_options == {"positive_margin": 0.8}
        assert recipe.margin_schedule == "none"
        assert recipe.data_options == {"stereo": False}
        assert recipe.model_options == {"pose": "vector"}
    assert create_recipe("pooled-cnn-mnist", {"loss": "cross_entropy"}).loss_options == {}
    assert create_recipe("matrix-capsnet-toys-paper", {"margin_schedule": "none", "loss.margin": "1"}).loss_options == {
        "margin": 1.0
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "toys", "data.stereo": "no"}, "data.stereo must be true or false"),
        ({"data": "toys", "data.size": "24.0"}, "data.size must be an integer"),
        ({"data": "toys", "data.sise": "24"}, "did you mean 'data.size'"),
        ({"loss": "spread", "margin_schedule": "linear", "loss.margin": "1"}, "set margin_schedule=none"),
        ({"margin_schedule": "linear"}, "works only with loss=spread and no loss.margin"),
        ({"loss": "spred"}, "did you mean 'spread'"),
        ({"standardise": "first"}, "set reconstruction_weight=0"),
        ({"test_crops": "3"}, "set crop too"),
        ({"epoch": "1"}, "did you mean 'epochs'"),
        ({"model.decode": "false"}, "did you mean 'model.decoder'"),
        ({"model.iterations": "1"}, "did you mean 'routing.iterations'"),
        ({"model.routing": "attenton"}, "unknown routing 'attenton'; did you mean 'attention'"),
        ({"model": "matrix-capsnet", "model.iterations": "1"}, "did you mean 'routing.iterations'"),
        ({"routing": "attention"}, "unknown setting 'routing'; did you mean 'model.routing'"),
        ({"routing.iteration": "1"}, "did you mean 'routing.iterations'"),
        ({"routing.iterations": "many"}, "must be an integer, such as 3; got 'many'"),
        ({"routing.logits": "old"}, "routing.logits must be one of cumulative, latest"),
        ({"routing.parent_types": "3", "model.routing": "em"}, "unknown setting 'routing.parent_types'"),
        ({"routing.logits": "latest", "model.routing": "em"}, "unknown setting 'routing.logits'"),
        ({"routing.iterations": "1", "model": "baseline-cnn"}, "model baseline-cnn has no routing rule"),
        ({"loss.weight": "1"}, "unknown setting 'loss.weight'"),
        ({"epochs": "1.5"}, "must be an integer, such as 10"),
        ({"epochs": "0"}, "epochs must be an integer of at least 1; got 0"),
        ({"learning_rate": "-1"}, "above 0"),
        ({"learning_rate": "NaN"}, "must be a number"),
        ({"learning_rate": "1e31"}, "learning_rate must be at most 1e\\+30; got 1e\\+31"),
        ({"precision": "half"}, "auto, bf16, float32"),
        ({"model": "capsnett"}, "did you mean 'capsnet'"),
        ({"lr": "1"}, "unknown setting 'lr'; did you mean 'learning_rate'"),
        ({"schedule": "cosine", "decay_rate": "0.5"}, "decay_rate is 0.5, which has no effect with schedule=cosine"),
        (
            {"model": "matrix-capsnet", "model.widths": "[4,2,3,3]", "model.size": "base"},
            "model.size is base, which has no effect because model.widths is set",
        ),
        ({"schedule": "cosine", "decay_steps": "50"}, "decay_steps is 50, which has no effect with schedule=cosine"),
        (
            {"standardise": "last", "reconstruction_weight": "0", "contrast": "0.5"},
            "contrast is 0.5, which has no effect with standardise",
        ),
        (
            {"standardise": "last", "reconstruction_weight": "0", "brightness": "0.5"},
            "brightness is 0.5, which has no effect with standardise=last",
        ),
        ({"decay_rate": "1", "decay_steps": "50"}, "no effect with decay_rate=1: leave it out, or set decay_rate"),
        (
            {"data": "toys", "validation_attribute": "instance", "validation_fraction": "0.2"},
            "validation_fraction is 0.2, which has no effect with validation_attribute=instance: leave it out, or set",
        ),
        ({"early_iterations": "2"}, "no effect with early_epochs=0: leave it out, or set early_epochs to at least 1"),
        ({"model.decoder": "false", "reconstruction_weight": "0.1"}, "because model capsnet has no decoder"),
        ({"model": "matrix-capsnet", "reconstruction_weight": "0.1"}, "because model matrix-capsnet has no decoder"),
        ({"model.decoder": "false", "reconstruction_weight": "0.0005"}, "because model capsnet has no decoder"),
        ({"warm_up_epochs": "11"}, "warm_up_epochs is 11.0, which is more than the 10 epochs of the training"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(BadInput, match=message):
        create_recipe("capsnet-mnist", settings)


def test_settings_of_a_recipe_that_lose_their_effect_are_accepted():
    assert create_recipe("capsnet-mnist", {"schedule": "cosine"}).decay_steps == 160
    assert create_recipe("capsnet-mnist", {"model": "pooled-cnn"}).reconstruction_weight == 0.0005
    assert create_recipe("capsnet-mnist", {"model": "pooled-cnn", "reconstruction_weight": "0"}).mixup == 0
    assert create_recipe("generative-capsnet-smallnorb", {"epochs": "2"}).warm_up_epochs == 5
    assert create_recipe("capsnet-mnist", {"early_epochs": "1", "early_iterations": "2"}).early_iterations == 2


@pytest.mark.parametrize(
    ("name", "settings", "discarded"),
    [
        ("matrix-capsnet-toys", {"routing.iterations": "2", "epochs": "1"}, []),
        ("matrix-capsnet-smallnorb-paper", {"loss": "cross_entropy"}, ["margin_schedule=linear"]),
        ("matrix-capsnet-mnist", {"loss": "spread", "margin_schedule": "linear"}, []),
        ("generative-capsnet-smallnorb", {"data": "toys"}, ["data.size=96"]),
        ("capsnet-cifar10", {"model": "pooled-capsnet", "routing.iterations": "3"}, ["routing.leaky=True"]),
    ],
)
def test_options_that_do_not_fit_a_change_are_listed(name, settings, discarded):
    found = discarded_options(create_recipe(name, settings))
    assert [option for option in found if not option.startswith("model.")] == discarded


def test_train_prints_which_options_of_the_recipe_are_not_used(call):
    words = ("--set", "model.routing=em", "--set", "model.convolution_channels=8", "--set", "model.primary_types=2")
    out = call("train", "capsnet-cifar10", "--data", "mnist-5k", *words, "--set", "crop=20", "--dry-run")[1]
    assert "options of capsnet-cifar10 that are not used with these settings: routing.leaky=True\n" in out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("matrix-capsnet", {"routing": Routing("em", iterations=0)}),
        ("matrix-capsnet", {"routing": Routing("em", variance_floor=-1.0)}),
        ("matrix-capsnet", {"routing": "x"}),
        ("matrix-capsnet", {"routing": 3}),
        ("matrix-capsnet", {"class_temperature_factor": 0.25, "routing": "attention"}),
        ("matrix-capsnet", {"deviation": 0.0}),
        ("matrix-capsnet", {"widths": [1, 2]}),
        ("matrix-capsnet", {"size": "huge"}),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_model_options_out_of_range_are_refused(name, options):
    with pytest.raises(BadInput, match=rf"{next(iter(options))}|cannot be created"):
        create_model(name, **options)


def test_settings_that_no_machine_can_run_are_refused(refused, images, tmp_path):
    for setting in (
        *("model.convolution_channels=0", "model.convolution_channels=-4", "model.convolution_channels=1000000000"),
        *("model.class_pose_size=1000000000", "shift=100000000000000000000000", "weight_decay=1e300"),
        *("data.image_size=10000000000", "data.test_fraction=0.999", "routing.iterations=1000000000"),
        *("batch_size=0", "crop=100000", "loss.positive_margin=true"),
    ):
        line = refused(
            *("train", "capsnet-mnist", "--data", images, "--out", tmp_path / "run", "--epochs", 1), "--set", setting
        )
        assert setting.partition("=")[0].rpartition(".")[2] in line or "capsnet" in line or "images" in line
    assert "seed" in refused("train", "capsnet-mnist", "--data", images, "--seed", "9" * 25)
    channels = ("--set", "model.channels=[]")
    assert "channels" in refused("train", "cnn-baseline-mnist", "--data", images, "--out", tmp_path / "run", *channels)
    wide = ("--set", "routing.backend=fused", "--set", "model.class_pose_size=65")
    line = refused("train", "capsnet-mnist", "--data", images, "--out", tmp_path / "run", *SMALL_CAPSNET, *wide)
    assert "fused" in line
    smoothing = ("--set", "loss.label_smoothing=2")
    line = refused("train", "cnn-images", "--data", images, "--out", tmp_path / "run", *smoothing)
    assert "loss cross_entropy cannot run with these options: loss.label_smoothing must be in [0, 1]" in line
    for recipe, setting, message in (
        ("capsnet-images", "loss.positive_margin=9", "positive_margin must be in (0, 1]; got 9"),
        ("capsnet-images", "loss.negative_margin=-1", "negative_margin must be in [0, 1); got -1"),
        ("cnn-images", "loss=margin", "loss margin needs activations in [0, 1], but the scores of model"),
        ("matrix-capsnet-images", "model=matrix-baseline-cnn", "are logits: set loss=cross_entropy"),
    ):
        line = refused("train", recipe, "--data", images, "--out", tmp_path / "run", "--set", setting)
        assert message in line, line
    assert not (tmp_path / "run").exists()


def test_options_of_a_rule_without_annotations_have_the_types_of_their_defaults(monkeypatch):
    class Own(UniformRouting):
        def __init__(self, iterations=3, scale=None):
            super().__init__()

    monkeypatch.setitem(ROUTINGS, "own", Own)
    own = {"model.routing": "own", "routing.iterations": "2", "routing.scale": "0.5"}
    assert create_recipe("capsnet-mnist", own).routing_options == {"iterations": 2, "scale": 0.5}
    with pytest.raises(BadInput, match=r"routing\.iterations must be an integer, such as 3; got 'two'"):
        create_recipe("capsnet-mnist", {**own, "routing.iterations": "two"})


def test_a_list_without_brackets_is_refused_with_the_right_notation(refused, images):
    line = refused("train", "capsnet-mnist", "--data", images, "--set", "data.image_size=48,24")
    assert "write data.image_size=[48,24]" in line
    line = refused("train", "capsnet-mnist", "--data", images, "--set", "data.channels=RGB")
    assert line == "error: data.channels must be an integer or null; got 'RGB'"
    assert create_recipe("capsnet-mnist", {"mixup": ".5", "reconstruction_weight": "0"}).mixup == 0.5
    assert "--data is empty" in refused("train", "capsnet-mnist", "--data", "")
    line = refused("train", "capsnet-mnist", "--set", "data.size=3")
    assert line == "error: unknown setting 'data.size', because 'mnist' has no options: leave out this setting"


def test_training_is_refused_if_pytorch_creates_parameters_in_another_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(BadInput, match=r"default dtype is torch.float64, .*set_default_dtype\(torch.float32\)"):
            resolve_precision("auto")
    finally:
        torch.set_default_dtype(torch.float32)


def test_settings_far_out_of_range_are_refused_with_their_own_range():
    for setting, said in (
        ({"contrast": "1e31"}, "contrast must be in [0, 1]; got 1e+31"),
        ({"test_crops": "1" + 20 * "0"}, "test_crops must be an integer from 1 to 32"),
        ({"mixup": "1e31"}, "mixup must be at most 1e+30; got 1e+31"),
        ({"patience": "1" + 20 * "0"}, "patience must be at most 9,007,199,254,740,992; got 1"),
    ):
        with pytest.raises(BadInput, match=re.escape(said)):
            create_recipe("capsnet-mnist", setting)
    assert create_recipe("capsnet-mnist", {"gradient_clip": "1" + 17 * "0"}).gradient_clip == 1e17


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU decides")
@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("avx512_bf16", [False, True])
def test_auto_precision_is_bf16_where_the_processor_computes_faster_in_bf16(monkeypatch, amx, avx512_bf16):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: avx512_bf16)
    faster = amx or (avx512_bf16 and "Intel" not in environment()["processor"])
    assert resolve_precision("auto") == ("bf16" if faster else "float32")
    assert resolve_precision("bf16") == "bf16"
