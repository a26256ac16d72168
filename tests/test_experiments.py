"""Experiments: their measurements, their recipes, their continuation after an interruption, and their reports."""

import json
import math
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from conftest import COMMAND, ENVIRONMENT
from torchcaps import CapsNet, Classifier, MatrixCapsNet, PooledCapsNet, Routing, squash
from torchcaps.attacks import bim, fgsm, gradient_health
from torchcaps.data import Images, Preprocessing, Splits
from torchcaps.errors import BadInput
from torchcaps.experiments import EXPERIMENTS, Row, Study, multimnist, run_experiment, time_to_accuracy, two_digits
from torchcaps.experiments.adversarial import LOSSES
from torchcaps.experiments.dimensions import swept
from torchcaps.experiments.health import layers_of
from torchcaps.experiments.multimnist import PairClassifier, overlaid
from torchcaps.experiments.novel_viewpoints import NETWORKS
from torchcaps.experiments.own_images import PRETRAINED
from torchcaps.experiments.recipe_ablation import CHANGES
from torchcaps.experiments.study import Outcome
from torchcaps.experiments.two_digits import named_alike, read_order, strips, traced
from torchcaps.experiments.vote_agreement import distances, drawn
from torchcaps.losses import margin_loss, spread_loss
from torchcaps.recipes import OWN_IMAGES, RECIPES, create_recipe
from torchcaps.run_folder import read_rows
from torchcaps.training import fit


def plain_images(count: int = 40, classes: int = 10) -> Images:
    """Images of constant brightness, which is proportional to the label."""
    labels = torch.arange(count) % classes
    pixels = (20 * labels[:, None, None, None]).expand(-1, 1, 28, 28).to(torch.uint8)
    return Images(pixels.contiguous(), labels, tuple(str(label) for label in range(classes)))


def test_the_list_names_the_experiments_with_a_standard_result():
    results = Path(__file__).parents[1] / "results"
    stored = {
        name
        for name in EXPERIMENTS
        if [*results.glob(f"{name}-standard.json"), *results.glob(f"{name}-standard-*-seeds.json")]
    }
    assert stored == {name for name, experiment in EXPERIMENTS.items() if experiment.standard}


def test_a_strip_consists_of_different_digits_side_by_side():
    strip = strips(plain_images(), 3, 50)
    pixels, labels = strip.pixels, strip.labels
    assert pixels.shape == (50, 1, 28, 84)
    assert all(len(set(row)) == 3 for row in labels.tolist())
    for place in range(3):
        assert (pixels[:, 0, :, 28 * place : 28 * place + 28] == 20 * labels[:, place, None, None]).all()
    assert (strips(plain_images(), 3, 50).labels == labels).all()
    assert not (strips(plain_images(), 3, 50, seed=1).labels == labels).all()


def test_a_strip_counts_as_recognised_only_if_the_set_of_digits_is_exact():
    scores = torch.tensor([[0.9, 0.1, 0.8], [0.9, 0.1, 0.8], [0.2, 0.7, 0.6]])
    assert named_alike(scores, torch.tensor([[2, 0], [0, 1], [0, 1]])).tolist() == [True, False, False]


def test_the_loss_of_a_strip_has_the_options_of_the_recipe():
    some = strips(plain_images(), 2, 4)
    recipe = create_recipe("pooled-capsnet-mnist", {"loss.negative_weight": "0.1", "loss.negative_margin": "0.3"})
    module = two_digits.StripClassifier(PooledCapsNet().eval(), recipe, 10)
    loss, scores = module.loss_and_scores(some.pixels.float() / 255, some.labels, train=False)
    present = torch.zeros(4, 10).scatter(1, some.labels, 1.0)
    torch.testing.assert_close(loss, margin_loss(scores, present, negative_weight=0.1, negative_margin=0.3))


def test_the_contributions_of_all_positions_add_up_to_the_class_capsules():
    model = PooledCapsNet().eval()
    with torch.no_grad():
        scores, couplings, parts = traced(model, torch.rand(2, 1, 28, 40))
        assert parts.shape == couplings.shape == (2, 10, 8, 14)
        torch.testing.assert_close(couplings.sum(dim=1), torch.ones(2, 8, 14))
        sums = parts.sum(dim=(2, 3))
        torch.testing.assert_close(squash(sums[..., None, None], "su").flatten(1), scores, rtol=1e-4, atol=1e-5)


def test_read_order_lists_digits_from_left_to_right():
    model = PooledCapsNet().eval()
    pixels = torch.randint(0, 256, (3, 1, 28, 84), dtype=torch.uint8)
    with torch.no_grad():
        scores, couplings, parts = traced(model, Preprocessing().plain(pixels))
    orders = read_order(model, pixels, 3)
    for by, maps in (("couplings", couplings), ("contributions", parts.clamp_min(0))):
        weight = maps.sum(dim=2)
        centre = (weight * torch.arange(maps.shape[3])).sum(dim=2) / weight.sum(dim=2)
        for row, classes in enumerate(orders[by].tolist()):
            assert sorted(classes) == sorted(scores[row].topk(3).indices.tolist())
            assert sorted(centre[row, classes].tolist()) == centre[row, classes].tolist()


def test_only_the_recent_recipes_augment_the_digits_of_strips(tmp_path):
    study = Study("quick", None, 1, tmp_path, tmp_path)
    for network in two_digits.NETWORKS:
        old, new = (
            recipe_of(study, network, 1, "mnist") for recipe_of in (two_digits.paper_recipe, two_digits.recent_recipe)
        )
        assert (old.model, old.routing_options, old.seed) == (new.model, new.routing_options, new.seed)
        assert (old.shift, old.rotation, old.squeeze) == (0, 0, 0)
        assert (new.shift, new.rotation, new.squeeze, new.schedule) == (2, 30, 0.25, "cosine")
    assert new.routing_options == {"iterations": 1}


def test_a_pair_is_the_clipped_sum_of_two_digits_of_different_classes():
    images = overlaid(plain_images(), 200, seed=0)
    assert images.image_shape == (3, 36, 36)
    assert (images.labels[:, 0] != images.labels[:, 1]).all()
    both = images.pixels[:, 1].int() + images.pixels[:, 2].int()
    assert (images.pixels[:, 0] == both.clamp_max(255)).all()
    for place in range(2):
        assert (images.pixels[:, 1 + place].amax(dim=(1, 2)) == 20 * images.labels[:, place]).all()


def test_the_loss_of_a_pair_contains_the_reconstruction_of_each_digit_from_its_own_capsule():
    pairs = overlaid(plain_images(), 4, seed=0)
    images, labels = pairs.pixels.float() / 255, pairs.labels
    model = CapsNet(multimnist.SHAPE, convolution_channels=4, primary_types=2).eval()
    for layer in model.decoder.layers[::2]:
        torch.nn.init.normal_(layer.weight)  # otherwise the capsules of both digits give nearly the same image
    module = PairClassifier(model, replace(create_recipe("capsnet-mnist"), reconstruction_weight=0.01), 10)
    with torch.no_grad():
        loss, scores = module.loss_and_scores(images, labels, train=True)
        pose = model(images[:, :1]).capsules.pose
        errors = [(model.decoder(pose, labels[:, k])[:, 0] - images[:, 1 + k]).square().sum() / 4 for k in (0, 1)]
    present = torch.zeros(4, 10).scatter(1, labels, 1.0)
    torch.testing.assert_close(loss, margin_loss(scores, present) + 0.01 * sum(errors))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe_of", [Study.digit_recipe, Study.recent_digit_recipe])
def test_pairs_of_digits_are_trained_with_a_reconstruction_of_each_digit(tmp_path, recipe_of):
    digits = plain_images()
    splits = Splits(*(overlaid(digits, count, seed) for seed, count in enumerate((60, 20, 20))))
    study = Study("quick", None, 1, tmp_path, tmp_path)
    options = {"data": "mnist", "shift": 0, "images": 60, "epochs": 2, "image_shape": multimnist.SHAPE}
    recipe = replace(recipe_of(study, "capsules", 0, **options), batch_size=20, precision="float32")
    smaller = {"convolution_channels": 4, "primary_types": 2}
    recipe = replace(recipe, model_options={**recipe.model_options, **smaller})
    seen = []

    def watch(model):
        assert not model.training
        seen.append(0)
        return {"epochs_seen": len(seen)}

    metrics = fit(recipe, splits, tmp_path / "run", on_epoch_end=watch, module_class=PairClassifier)
    model = CapsNet.from_pretrained(tmp_path / "run").eval()
    with torch.no_grad():
        scores = model(splits.test.pixels[:, :1].float() / 255).scores
    right = named_alike(scores, splits.test.labels).double().mean().item()
    assert metrics["test_accuracy_percent"] == pytest.approx(100 * right, abs=1e-3)
    assert [row["epochs_seen"] for row in read_rows(tmp_path / "run" / "metrics.csv")] == ["1.0000", "2.0000"]


@pytest.mark.filterwarnings("ignore")
def test_a_network_for_strips_is_trained_on_digits_and_validated_on_strips(tmp_path):
    digits = plain_images()
    splits = Splits(digits, strips(digits, 2, 20), digits)
    study = Study("quick", None, 1, tmp_path, tmp_path)
    recipe = replace(two_digits.paper_recipe(study, "capsules", 0, "mnist"), epochs=1, precision="float32")
    fit(recipe, splits, tmp_path / "run", module_class=two_digits.StripClassifier)
    assert Classifier.from_pretrained(tmp_path / "run").image_shape == (1, 28, 28)


def test_attacks_stay_within_epsilon_and_change_the_loss_as_intended():
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    images, labels = torch.rand(8, 1, 3, 4), torch.randint(0, 3, (8,))

    def loss(attacked):
        return torch.nn.functional.cross_entropy(classifier(attacked), labels, reduction="none").detach()

    for attack in (fgsm, bim):
        away = attack(classifier, images, labels, 0.1)
        towards = attack(classifier, images, labels, 0.1, targeted=True)
        for attacked in (away, towards):
            assert (attacked - images).abs().max() <= 0.1 + 1e-6
            assert attacked.min() >= 0
            assert attacked.max() <= 1
        assert (loss(away) > loss(images)).all()
        assert (loss(towards) < loss(images)).all()
    each = [gradient_health(classifier, images[i : i + 1], labels[i : i + 1]).norm for i in range(8)]
    assert gradient_health(classifier, images, labels).norm == pytest.approx(sum(each) / 8, rel=1e-4)


def test_a_sweep_contains_the_reconstruction_of_the_unchanged_pose():
    model = CapsNet(convolution_channels=4, primary_types=2).eval()
    images = torch.rand(2, 1, 28, 28)
    drawings = swept(model, images)
    assert drawings.shape == (2, 16, 11, 1, 28, 28)
    with torch.no_grad():
        plain = model(images).reconstruction
    torch.testing.assert_close(drawings[:, :, 5], plain[:, None].expand(-1, 16, -1, -1, -1))
    assert (drawings[:, :, 0] != drawings[:, :, -1]).flatten(2).any(dim=2).all()


def test_votes_are_measured_on_images_from_the_whole_split():
    mask = torch.arange(10_000) % 2 == 0
    chosen = drawn(mask)
    assert len(chosen.unique()) == 500
    assert mask[chosen].all()
    assert all(25 < (part == chosen // 1000).sum() < 75 for part in range(10))


def test_distances_returns_vote_distances_and_couplings_of_every_pass():
    model = MatrixCapsNet((2, 32, 32), 5, widths=(4, 2, 3, 3), routing=Routing("em", iterations=2)).eval()
    images = torch.rand(2, 2, 32, 32)
    (first, uniform), (second, couplings) = distances(model, images)
    assert first.shape == second.shape == uniform.shape == (2, 5, 16 * 3)
    torch.testing.assert_close(uniform, torch.full_like(uniform, 1 / 5))
    torch.testing.assert_close(couplings.sum(dim=1), torch.ones(2, 48))


def test_uniform_couplings_have_an_entropy_of_one():
    recipe = create_recipe("matrix-capsnet-toys-paper", {})
    images = Images(torch.randint(0, 256, (6, 2, 36, 36), dtype=torch.uint8), torch.arange(6) % 5, tuple("abcde"))
    for iterations, competition in ((1, "parents"), (1, "types"), (3, "parents")):
        routing = Routing("em", iterations=iterations, competition=competition)
        model = MatrixCapsNet((2, 32, 32), 5, widths=(4, 2, 3, 3), routing=routing)
        found = layers_of(model, images, recipe)
        assert [*found] == ["first_capsules", "second_capsules", "class_capsules"]
        for layer in found.values():
            assert 0 <= layer["dead"] <= 100
            assert layer["gradient"] > 0
            assert layer["entropy"] == pytest.approx(1, abs=1e-5) if iterations == 1 else layer["entropy"] < 0.999


def test_the_figure_of_time_to_accuracy_contains_the_target_and_the_last_epochs():
    for target, first, second in (
        (95.0, [95.0, 97.25, 98.0], [90.0, 93.0, 92.0]),
        (99.5, [98.0, 99.6], [97.0, 99.55]),
        (99.5, [90.0, 100.0], [80.0, 85.0]),
    ):
        curves = {name: [*zip((1.0, 2.0, 4.0), one, strict=False)] for name, one in (("a", first), ("b", second))}
        low, high = time_to_accuracy.draw(curves, target).axes[0].get_ylim()
        assert low < min(target, first[-1], second[-1])
        assert high >= max(target, *first, *second)


def test_a_row_shows_the_standard_deviation_over_seeds():
    assert Row("x", [1.0]).measured() == "1.00 %"
    assert Row("x", [1.0, 2.0], unit="").measured() == "1.50 ± 0.71"
    assert Row("x", [99.58, 99.63]).measured().startswith("99.61 ")
    for values in ([math.nan], [math.nan, 1.0], [math.inf, -math.inf]):
        assert Row("x", values).measured() == "nan %"
    assert Row("x", [math.inf, 1.0]).measured() == "inf %"


@pytest.mark.filterwarnings("ignore")
def test_an_experiment_counts_only_its_own_runs_and_accepts_the_path_of_a_folder(tmp_path, monkeypatch):
    splits = Splits(*[plain_images()] * 3)

    def run(study):
        recipe = replace(create_recipe("pooled-cnn-mnist", {"precision": "float32", "epochs": "1"}), batch_size=20)
        for seed in range(study.seeds):
            study.trained(f"net-seed{seed}", replace(recipe, seed=seed), splits)
        return Outcome([Row("net", [1.0])], Figure())

    monkeypatch.setitem(EXPERIMENTS, "short", replace(EXPERIMENTS["pitfalls"], run=run))
    kept = {}
    for seeds in (2, 1):
        folders = {"data_dir": tmp_path, "out": tmp_path / "runs", "results": tmp_path / "results"}
        run_experiment("short", data="some/photos", seeds=seeds, **folders)
        name = "short-quick-photos" + ("-2-seeds" if seeds == 2 else "")
        kept[seeds] = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    assert kept[2]["training_minutes"] >= kept[1]["training_minutes"]
    assert len(list((tmp_path / "runs/short-quick-photos").iterdir())) == 2


def test_stored_measurements_of_a_run_are_deleted_with_its_folder(tmp_path):
    study = Study("quick", None, 1, tmp_path, tmp_path)
    for value in (1, 2):
        (tmp_path / "net-seed0").mkdir()
        assert study.cached("net-seed0", "strips", lambda value=value: value) == value
        assert study.cached("net-seed0", "strips", lambda: 3) == value
        shutil.rmtree(tmp_path / "net-seed0")


def test_measurements_of_another_commit_are_announced_and_listed(tmp_path, capsys):
    study = Study("quick", None, 1, tmp_path, tmp_path)
    (tmp_path / "net-seed0").mkdir()
    file = tmp_path / "net-seed0" / "strips.json"
    file.write_text('{"commit": "0123abc", "result": [1.5]}')
    assert study.cached("net-seed0", "strips", lambda: 3) == [1.5]
    assert f"{file} was computed with another commit (0123abc): remove the file to" in capsys.readouterr().out
    file.write_text('{"commit": ')
    with pytest.raises(BadInput, match=r"strips\.json is damaged .*: remove the file to compute it again"):
        study.cached("net-seed0", "strips", lambda: 3)
    file.write_text("[2.5]")  # as before the commit was saved
    assert study.cached("net-seed0", "strips", lambda: 3) == [2.5]
    assert f"{file} was computed with another commit (unknown): remove the file to" in capsys.readouterr().out
    assert study.commits == ["0123abc"]


@pytest.mark.parametrize("name", ["matrix-capsnet", "cnn-baseline"])
def test_repeated_tables_use_the_settings_of_the_papers(name, tmp_path):
    on_toys, on_smallnorb = (
        RECIPES[Study("quick", data, 1, tmp_path, tmp_path).toys(name)]() for data in (None, "smallnorb")
    )
    assert replace(on_toys, name=on_smallnorb.name, data="smallnorb") == on_smallnorb


def test_recent_recipes_for_toys_differ_only_in_the_network(tmp_path):
    study = Study("quick", "smallnorb", 1, tmp_path, tmp_path)
    cnn, capsules, uniform = (study.recent_toy_recipe(name, 1, images=1_000, epochs=3) for name in NETWORKS)
    assert uniform == replace(capsules, routing_options={**capsules.routing_options, "iterations": 1})
    assert {recipe.data for recipe in (cnn, capsules)} == {"smallnorb"}
    assert cnn.preprocessing() == capsules.preprocessing()
    assert (cnn.epochs, cnn.batch_size, cnn.mixup, cnn.schedule) == (3, 64, 0.4, "cosine")


def test_recent_recipes_for_digits_differ_only_in_the_network(tmp_path):
    study = Study("quick", None, 1, tmp_path, tmp_path)
    cnn, capsules, uniform = (
        study.recent_digit_recipe(name, 1, data="mnist-5k", shift=6, images=60, epochs=3) for name in NETWORKS
    )
    assert uniform == replace(capsules, routing_options={"iterations": 1})
    assert cnn.preprocessing() == capsules.preprocessing()
    assert cnn.preprocessing().shift == 6
    for recipe in (cnn, capsules):
        assert (recipe.epochs, recipe.batch_size, recipe.schedule, recipe.seed) == (3, 64, "cosine", 1)


def test_every_row_of_the_ablation_has_a_different_recipe():
    recipes = [create_recipe("matrix-capsnet-toys", changes) for changes in CHANGES.values()]
    assert recipes[0] == create_recipe("matrix-capsnet-toys")
    assert all(one != other for one, other in combinations(recipes, 2))


def test_strips_longer_than_the_number_of_classes_are_refused():
    with pytest.raises(BadInput, match=r"length is 5, but .* there are only 3 classes"):
        strips(plain_images(classes=3), 5, 10)


def test_the_attack_loss_has_a_gradient_for_confident_predictions():
    scores, label = torch.tensor([0.97, 0.02, 0.03]).view(1, 1, 1, 3), torch.tensor([0])
    for loss, zero in ((partial(spread_loss, margin=0.9), 100.0), (LOSSES["capsules"], 0.0)):
        assert gradient_health(lambda x: x.flatten(1), scores, label, loss).zero == zero


def test_unknown_experiments_and_budgets_and_a_report_without_results_are_refused(call, refused, tmp_path):
    assert all(name in call("experiment", "list")[1] for name in EXPERIMENTS)
    assert "did you mean 'two-digits'" in refused("experiment", "two-digit")
    assert "must be one of quick, standard, paper" in refused(
        "experiment", "two-digits", "--budget", "huge", "--out", tmp_path / "runs", "--results", tmp_path / "results"
    )
    assert "first run `torchcaps experiment NAME`" in refused("experiment", "report", "--results", tmp_path)


@pytest.mark.slow
def test_own_images_trains_every_recipe_on_a_folder_of_images(succeeds, images, tmp_path):
    said = succeeds("experiment", "own-images", "--data", images, "--out", tmp_path)
    assert "Trained on 44 images of" in said
    rows = json.loads((tmp_path / "results" / "own-images-quick-images.json").read_text())["rows"]
    names = {name for name, make in RECIPES.items() if make().data == OWN_IMAGES and name != PRETRAINED}
    assert {row["what"] for row in rows} == {f"{x}: {y} accuracy" for x in names for y in ("validation", "test")}
    assert all(row["ours"][0] > 90 for row in rows)


@pytest.mark.slow
def test_a_killed_experiment_that_is_continued_gives_the_same_result(call, tmp_path):
    def words(name: str) -> list[object]:
        folders = ["--out", tmp_path / name, "--results", tmp_path / name]
        return ["experiment", "two-digits", "--data", "mnist-5k", *folders]

    for name, end in (("killed", signal.SIGKILL), ("interrupted", signal.SIGINT)):
        process = subprocess.Popen([*COMMAND, *map(str, words(name))], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        while not (tmp_path / name / "two-digits-quick-mnist-5k/capsules-seed0/last.ckpt").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(end)
        process.wait()
    results = []
    for name in ("killed", "interrupted", "whole"):
        assert call(*words(name))[0] == 0
        results.append(json.loads((tmp_path / name / "two-digits-quick-mnist-5k.json").read_text())["rows"])
    assert results[0] == results[1] == results[2]
    assert call("experiment", "report", "--results", tmp_path / "whole", "--report", tmp_path / "report.md")[0] == 0
    report = (tmp_path / "report.md").read_text()
    assert "| about 40 |" in report
    assert "](whole/two-digits-quick-mnist-5k.png)" in report
