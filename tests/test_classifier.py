"""A saved network is loaded with its weights, options, routing rule, class names and preprocessing of images."""

import inspect
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchcaps import (
    MODELS,
    ROUTINGS,
    BadInput,
    CapsNet,
    Classifier,
    DynamicRouting,
    EMRouting,
    MatrixCapsNet,
    PooledCapsNet,
    Preprocessing,
    Routing,
)
from torchcaps.data import load_splits, read_image
from torchcaps.errors import Diverged
from torchcaps.inspection import inspect as inspect_image
from torchcaps.models.pretrained import _set_weights
from torchcaps.options import LATER
from torchcaps.recipe import Recipe
from torchcaps.run_folder import read_run
from torchcaps.threads import evaluating

TINY = {"image_shape": (1, 20, 20), "num_classes": 3, "convolution_channels": 8, "primary_types": 2}


def scores_printed(text):
    return [float(number) for number in re.findall(r"\d\.\d{3}", text)]


def test_a_run_gives_the_same_prediction_in_python_as_on_the_command_line(call, finished, images):
    classifier = Classifier.from_pretrained(finished[0])
    paths = [images / "left" / "000.png", images / "right" / "001.png", images / "left" / "002.png"]
    answer = classifier.predict(paths)
    assert answer.predicted_classes == ["left", "right", "left"]
    code, out, error = call("predict", finished[0], *paths)
    assert code == 0, error
    assert scores_printed(out) == [float(f"{x:.3f}") for row in answer.scores.sort(descending=True).values for x in row]
    torch.testing.assert_close(classifier.predict(paths, batch_size=2).scores, answer.scores)
    for path, scores in zip(paths, answer.scores, strict=True):
        assert torch.equal(classifier.predict(str(path)).scores[0], scores)
        assert torch.equal(classifier.predict(read_image(path)[None]).scores[0], scores)
        assert torch.equal(classifier.predict(read_image(path)[None].numpy()).scores[0], scores)


def test_the_accuracy_of_a_run_equals_that_of_its_classifier(finished, images):
    metrics = json.loads((finished[0] / "metrics.json").read_text())
    test = load_splits(str(images), images).test
    named = Classifier.from_pretrained(finished[0]).predict(test.pixels).predicted_classes
    right = [name == test.class_names[label] for name, label in zip(named, test.labels, strict=True)]
    assert 100 * sum(right) / len(right) == pytest.approx(metrics["test_accuracy_percent"])


def test_a_loaded_classifier_has_the_saved_preprocessing_and_class_names(tmp_path):
    preprocessing = Preprocessing(standardise="first", crop=20, test_crops=2)
    network = CapsNet(**TINY).eval()
    Classifier(network, ("cat", "dog", "été"), (1, 24, 22), preprocessing).save_pretrained(tmp_path)
    again = Classifier.from_pretrained(tmp_path)
    assert again.preprocessing == preprocessing
    assert (again.class_names, again.image_shape) == (("cat", "dog", "été"), (1, 24, 22))
    pixels = torch.randint(0, 256, (2, 1, 24, 22), dtype=torch.uint8)
    right = torch.stack([network(view).scores for view in preprocessing.views(pixels[:1])]).mean(dim=0)
    torch.testing.assert_close(again.predict(pixels).scores[:1], right)
    torch.testing.assert_close(again.predict(pixels, batch_size=2).scores, again.predict(pixels).scores)
    assert torch.equal(CapsNet.from_pretrained(tmp_path).eval()(pixels[:, :, :20, :20] / 255).scores,
                       network(pixels[:, :, :20, :20] / 255).scores)  # fmt: skip


@pytest.mark.usefixtures("untyped")
def test_images_of_another_shape_or_type_are_refused(finished):
    classifier = Classifier.from_pretrained(finished[0])
    for wrong in (
        torch.rand(1, 3, 20, 24),
        torch.zeros(1, 1, 20, 24, dtype=torch.uint8),
        np.zeros((3, 20, 24), np.uint8),
    ):
        with pytest.raises(BadInput, match=r"images must be uint8 \[N, 3, 20, 24\] .*; got"):
            classifier.predict(wrong)
    for wrong, says in ((5, "5"), ([torch.zeros(3, 20, 24)], r"a float32 tensor \[3, 20, 24\]")):
        with pytest.raises(BadInput, match=f"images must be paths, or uint8 pixels .*; got {says}"):
            classifier.predict(wrong)
    with pytest.raises(BadInput, match="images is empty"):
        classifier.predict([])
    with pytest.raises(BadInput, match="batch_size must be an integer of at least 1; got 0"):
        classifier.predict(torch.zeros(1, 3, 20, 24, dtype=torch.uint8), batch_size=0)
    with pytest.raises(BadInput, match=r"nowhere\.png does not exist"):
        classifier.predict("nowhere.png")


def test_a_network_saved_without_class_names_is_refused_as_a_classifier(tmp_path):
    CapsNet(**TINY).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="contains only a network, without class names and image preprocessing"):
        Classifier.from_pretrained(tmp_path)


def test_the_routing_rule_is_saved_with_the_weights(tmp_path):
    images = torch.rand(2, 1, 20, 20)
    for rule in (DynamicRouting(5, logits="latest", squash_form="su"), EMRouting(3, 2, variance_floor=0.1)):
        network = CapsNet(**TINY).eval()
        network.class_capsules.routing = rule
        network.save_pretrained(tmp_path)
        again = CapsNet.from_pretrained(tmp_path).eval()
        assert type(again.class_capsules.routing) is type(rule)
        assert torch.equal(again(images).scores, network(images).scores)
    network.class_capsules.routing = ROUTINGS["dynamic"](3)
    network.class_capsules.routing.iterations = 1
    network.save_pretrained(tmp_path)
    assert CapsNet.from_pretrained(tmp_path).class_capsules.routing.iterations == 1


def test_a_network_whose_rule_is_not_in_routings_cannot_be_saved(tmp_path):
    class OwnRule(DynamicRouting):
        pass

    network = CapsNet(**TINY)
    network.class_capsules.routing = OwnRule()
    with pytest.raises(BadInput, match=r"class_capsules has the routing rule OwnRule.*add it to torchcaps\.ROUTINGS"):
        network.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("untyped")
def test_options_given_as_numpy_numbers_are_saved(tmp_path):
    CapsNet(**{**TINY, "num_classes": np.int64(3), "image_shape": torch.Size((1, 20, 20))}).save_pretrained(tmp_path)
    assert CapsNet.from_pretrained(tmp_path).options["num_classes"] == 3


def test_options_can_be_changed_when_loading(tmp_path):
    routing = Routing("em", variance_floor=0.05)
    MatrixCapsNet((1, 20, 20), 3, widths=(4, 2, 3, 3), routing=routing).save_pretrained(tmp_path)
    changed = MatrixCapsNet.from_pretrained(tmp_path, routing=Routing("em", iterations=1)).class_capsules.routing
    assert changed.saved_options["iterations"] == 1
    assert changed.saved_options["variance_floor"] == 0.05
    with pytest.raises(BadInput, match="did you mean 'routing'"):
        MatrixCapsNet.from_pretrained(tmp_path, routin="em")
    with pytest.raises(BadInput, match="routing must be a Rule, a Routing or a string; got 3"):
        MatrixCapsNet.from_pretrained(tmp_path, routing=3)
    with pytest.raises(BadInput, match="do not fit this MatrixCapsNet"):
        MatrixCapsNet.from_pretrained(tmp_path, routing="attention")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_of_another_kind_of_number_are_refused(dtype, tmp_path):
    model = CapsNet(**TINY)
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    says = f" in {tmp_path} has dtype {str(dtype).removeprefix('torch.')}, but float32 in the network"
    with pytest.raises(BadInput, match=says):
        _set_weights(model, weights, tmp_path)


def modes(model):
    return {module.training for module in model.modules()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_a_network_keeps_its_mode_until_the_last_thread_has_evaluated_it():
    model = CapsNet(**TINY)
    frozen = model.class_capsules.eval()
    inside, leave = Event(), Event()

    def evaluate():
        with evaluating(model):
            inside.set()
            leave.wait(60)
            return modes(model)

    with ThreadPoolExecutor(1) as thread:
        with evaluating(torch.compile(model)):
            other = thread.submit(evaluate)
            assert inside.wait(60)
        assert modes(model) == {False}
        with evaluating(model):
            assert modes(model) == {False}
        leave.set()
        assert other.result() == {False}
    assert model.training
    assert not frozen.training


def test_a_network_is_evaluated_in_evaluation_mode_even_if_a_caller_has_set_another_mode():
    model = CapsNet(**TINY)
    with evaluating(model):
        model.train()
        with evaluating(model):
            assert modes(model) == {False}
        assert modes(model) == {True}
    assert modes(model) == {True}


def test_scores_that_are_not_finite_are_refused():
    model = CapsNet(**TINY)
    weights = next(model.parameters())
    weights.detach().fill_(torch.inf)
    classifier = Classifier(model, ("ant", "bee", "cat"), (1, 20, 20), Preprocessing())
    pixels = torch.zeros(1, 1, 20, 20, dtype=torch.uint8)
    for use in (lambda: classifier.predict(pixels), lambda: inspect_image(classifier, pixels[0])):
        with pytest.raises(Diverged, match=r"scores that are not finite \(first weights that are not finite: conv"):
            use()


def test_loading_leaves_the_random_state_alone(tmp_path):
    CapsNet(**TINY).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    CapsNet.from_pretrained(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def rule_of(content):
    return content["routing"]["class_capsules"]


def edited(run, change):
    path = run / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


WRONG = {
    "iterations": [0, -1, "3", 2.5, None, [3], 10**9, 2**63, True],
    "num_classes": [0, "3", 2.0, None, 3, 10**12],
    "image_shape": ["abc", None, 20, [1.0, 20, 20], [3, 20], []],
    "logits": ["x", 1, None],
    "backend": ["gpu", 0],
    "leaky": [0, "no"],
    "convolution_channels": [0, -4, 10**9, "8"],
}


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, values in WRONG.items() for value in values])
def test_options_of_a_wrong_kind_or_value_are_refused_in_one_line(option, value, refused, run, images):
    def change(content):
        of_rule = rule_of(content)["options"]
        (of_rule if option in of_rule else content["options"]).update({option: value})

    edited(run, change)
    assert re.search(rf"{option}|capsnet|CapsNet", refused("predict", run, images / "left" / "000.png"))


def test_missing_and_unknown_entries_are_refused(refused, run, images):
    whole = (run / "config.json").read_text()
    again = ("predict", run, images / "left" / "000.png")
    for change, message in (
        (lambda content: content["options"].pop("decoder"), "lacks the option 'decoder'"),
        (lambda content: rule_of(content)["options"].pop("iterations"), "lacks the option 'iterations'"),
        (lambda content: rule_of(content)["options"].update(iteration=1), "did you mean 'iterations'"),
        (lambda content: content["routing"].pop("class_capsules"), "lacks the layer 'class_capsules'"),
        (lambda content: content["options"].update(surprise=1), "wrote the file, update torchcaps"),
        (lambda content: content["options"].update(routing="em"), "no option 'routing'"),
        (lambda content: content.pop("images"), "lacks 'images'"),
        (lambda content: content.update(more=1), "no option 'more'"),
        (lambda content: content.update(format=1), "is not a torchcaps configuration of format 5"),
        (lambda content: content.update(format=6), "has format 6, which a newer version of torchcaps wrote: update"),
        (lambda content: content.update(format=5.0), "format must be an integer"),
        (lambda content: content.update(options=5), "options must be a mapping"),
        (lambda content: content.update(options=None), "options must be a mapping"),
        (lambda content: content.update(routing=[]), "routing must be a mapping"),
        (lambda content: content.update(routing="x"), "routing must be a mapping"),
        (lambda content: content.update(images=5), "images must be a mapping"),
        (lambda content: content.update(model=["capsnet"]), "model must be a string"),
        (lambda content: content.update(weights_sha256=None), "weights_sha256 must be a string"),
        (lambda content: content.update(model="capsnett"), "unknown model 'capsnett': import the module"),
        (lambda content: content.update(model="matrix-capsnet"), "matrix-capsnet"),
        (lambda content: content["images"].pop("preprocessing"), "damaged"),
        (lambda content: content["images"].update(class_names=["left"]), "does not match the network"),
        (lambda content: content["images"].update(class_names=[1, 2]), "class_names must be a list"),
        (lambda content: content["images"].update(resize="fit"), "resize must be one of stretch, crop, pad"),
        (lambda content: content["images"].update(shape=[3, 20]), "shape must be a list"),
        (lambda content: content["images"]["preprocessing"].update(shift="a"), "shift must be an integer"),
        (
            lambda content: content["images"]["preprocessing"].update(crop=18, test_crops=10**6),
            "from 1 to 32; got",
        ),
        (lambda content: content["images"]["preprocessing"].pop("shift"), "preprocessing lacks 'shift'"),
        (
            lambda content: content["routing"].update(nowhere={}),
            "a layer that the network does not have, namely 'nowhere'",
        ),
        (lambda content: content.update(routing={"class_capsules": 3}), "must be a mapping"),
        (lambda content: rule_of(content).update(options=["leaky"]), "options must be a mapping"),
        (lambda content: content.update(routing={"class_capsules": {"rule": "x", "options": {}}}), "is 'x', which is"),
        (
            lambda content: content.update(routing={"class_capsules": {"rule": "dynamic", "options": {"leaky": 3}}}),
            "leaky must be true or false",
        ),
    ):
        edited(run, change)
        assert message in refused(*again)
        (run / "config.json").write_text(whole)
    for content in (b"", b"[]", b"null", whole[:100].encode(), b"\xff\xfe", b"[" * 100_000):
        (run / "config.json").write_bytes(content)
        assert "config.json" in refused(*again)


def test_every_flipped_bit_of_the_weights_is_detected(run):
    content = (run / "model.safetensors").read_bytes()
    for place in np.random.default_rng(0).integers(0, 8 * len(content), 50):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << (place % 8)
        (run / "model.safetensors").write_bytes(damaged)
        with pytest.raises(BadInput, match=r"model\.safetensors is damaged"):
            Classifier.from_pretrained(run)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = [name for name in vars(Recipe("", "", "")) if name not in ("name", "data", "model")]


@pytest.mark.usefixtures("untyped")
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NAMES), values)
def test_a_recipe_stores_a_value_unchanged_or_raises_bad_input(name, value):
    try:
        recipe = Recipe("a", "capsnet", "mnist", **{name: value})
    except BadInput:
        return
    assert repr(recipe.plain()[name]) == repr(value)


WEIGHTS = sorted((Path(__file__).parents[1] / "weights").iterdir())


@pytest.mark.parametrize("folder", WEIGHTS, ids=[folder.name for folder in WEIGHTS])
def test_the_weights_in_the_repository_can_be_used(folder):
    classifier = Classifier.from_pretrained(folder)
    answer = classifier.predict(torch.randint(0, 256, (2, *classifier.image_shape), dtype=torch.uint8))
    assert answer.scores.shape == (2, len(classifier.class_names))
    assert (folder / "model.safetensors").stat().st_size < 2_000_000
    assert f"# {folder.name}\n" in (folder / "README.md").read_text()


def test_the_weights_for_mnist_classify_the_digits_of_mnist_5k():
    digits = load_splits("mnist-5k", Path("data")).test
    classifier = Classifier.from_pretrained(WEIGHTS[0].parent / "efficient-capsnet-mnist")
    names = classifier.predict(digits.pixels[::5]).predicted_classes
    assert np.mean([int(name) == label for name, label in zip(names, digits.labels[::5].tolist(), strict=True)]) > 0.98


def test_files_without_the_options_of_later_versions_load_with_their_defaults(run, tmp_path):
    before = Classifier.from_pretrained(run)
    kinds = {"preprocessing": Preprocessing, "recipe": Recipe, **MODELS, **ROUTINGS}
    of_rules = {name: getattr(rule, "later_options", ()) for name, rule in ROUTINGS.items()}
    for owner, names in {**LATER, **of_rules}.items():
        parameters = inspect.signature(kinds[owner]).parameters
        assert all(parameters[name].default in (False, 0, 1, 5, 0.0, "none", "", "parents") for name in names)
    config, recipe = (json.loads((run / name).read_text()) for name in ("config.json", "recipe.json"))
    for name in LATER["preprocessing"]:
        del config["images"]["preprocessing"][name]
    for name in LATER["recipe"]:
        del recipe["recipe"][name]
    for name in LATER[recipe["recipe"]["model"]]:
        del config["options"][name]
    (run / "config.json").write_text(json.dumps(config))
    (run / "recipe.json").write_text(json.dumps(recipe))
    assert Classifier.from_pretrained(run).preprocessing == before.preprocessing
    assert read_run(run).recipe.name == recipe["recipe"]["name"]


def test_a_classifier_that_could_not_be_loaded_is_not_saved(tmp_path):
    for shape, preprocessing in (((1, 20, 24), Preprocessing()), ((1, 20, 20), Preprocessing(crop=16))):
        classifier = Classifier(CapsNet(**TINY), ("a", "b", "c"), shape, preprocessing)
        with pytest.raises(
            BadInput, match=r"the network was created for \(1, 20, 20\): create it with image_shape=\(1"
        ):
            classifier.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.usefixtures("untyped")
def test_pixels_of_another_size_are_refused_except_by_pooled_networks():
    pixels = torch.zeros(1, 30, 40, dtype=torch.uint8)
    classifier = Classifier(CapsNet(**TINY), ("a", "b", "c"), (1, 24, 24), Preprocessing(crop=20))
    with pytest.raises(BadInput, match=r"image must have shape \[1, 24, 24\]; got \[1, 30, 40\]"):
        classifier.preprocessed(pixels)
    pooled = Classifier(PooledCapsNet((1, 28, 28), 3), ("a", "b", "c"), (1, 28, 28), Preprocessing())
    assert pooled.preprocessed(pixels).shape == (1, 1, 30, 40)
