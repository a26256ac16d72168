"""Networks that `from_pretrained` could not create again are refused, and others are uploaded."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from test_unusual_use import TINY
from torchcaps import (
    MODELS,
    ROUTINGS,
    BadInput,
    CapsNet,
    Classifier,
    MatrixCapsNet,
    PooledCNN,
    Preprocessing,
    ResidualCapsNet,
    Routing,
    UniformRouting,
    create_model,
)
from torchcaps.models.pretrained import model_name


class Subclass(CapsNet):
    def __init__(self, **named):
        super().__init__(**{**TINY, **named})


class Positional(CapsNet):
    def __init__(self, *sizes):
        super().__init__(**TINY)


def pruned():
    model = CapsNet(**TINY)
    prune.random_unstructured(model.class_capsules, "transform", 0.5)
    return model


def wider():
    model = CapsNet(**TINY)
    model.convolution[0] = nn.Conv2d(1, 9, 9)
    return model


def other_function():
    model = CapsNet(**TINY)
    model.convolution[1] = nn.GELU()
    return model


def with_dropout():
    model = CapsNet(**TINY)
    model.convolution.append(nn.Dropout())
    return model


def other_squash():
    model = CapsNet(**TINY)
    model.primary_capsules.squash_form = "su"
    return model


def replaced():
    model = CapsNet(**TINY)
    model.class_capsules = nn.Conv2d(4, 10, 9)
    return model


def tied():
    model = MatrixCapsNet((1, 19, 21), 3, widths=(4, 3, 3, 3))
    model.second_capsules.transform = model.first_capsules.transform
    return model


def parametrised():
    model = CapsNet(**TINY)
    nn.utils.parametrizations.weight_norm(model.class_capsules, "transform")
    return model


def quantised():
    with warnings.catch_warnings(action="ignore"):  # torch.ao.quantization is deprecated
        return torch.ao.quantization.quantize_dynamic(CapsNet(**{**TINY, "decoder": True}), {nn.Linear})


def compiled_layer():
    model = CapsNet(**TINY)
    model.class_capsules = torch.compile(model.class_capsules, backend="eager")
    return model


@pytest.mark.parametrize("rule", ROUTINGS)
def test_a_network_in_another_mode_and_with_another_backend_is_saved(rule, tmp_path):
    model = CapsNet(**TINY, routing=rule).eval()
    model.class_capsules.routing.backend = "reference"
    model.save_pretrained(tmp_path)
    images = torch.rand(2, 1, 20, 20)
    found = CapsNet.from_pretrained(tmp_path).eval()(images).scores
    torch.testing.assert_close(found, model(images).scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ROUTINGS)
def test_a_network_whose_layers_depend_on_the_rule_is_saved(rule, tmp_path):
    model = ResidualCapsNet((3, 16, 16), 3, (4, 8), routing=rule).eval()
    model.save_pretrained(tmp_path)
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(ResidualCapsNet.from_pretrained(tmp_path).eval()(images).scores, model(images).scores)


@pytest.mark.usefixtures("untyped")
def test_a_network_whose_option_was_changed_to_another_type_is_not_saved(tmp_path):
    network = CapsNet(**TINY)
    network.options["stem"] = 0
    with pytest.raises(BadInput, match=r"CapsNet cannot be saved.* stem must be true or false; got 0"):
        network.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Sharp(UniformRouting):
    def __init__(self, sharpness):
        super().__init__()
        self.sharpness = sharpness

    @property
    def saved_options(self):
        return {"sharpness": self.sharpness}


def test_networks_with_replaced_rules_and_rules_with_required_arguments_are_saved(tmp_path, monkeypatch):
    monkeypatch.setitem(ROUTINGS, "sharp", Sharp)
    CapsNet(**TINY, routing=Sharp(2.0)).save_pretrained(tmp_path)
    assert CapsNet.from_pretrained(tmp_path).class_capsules.routing.sharpness == 2.0
    model = ResidualCapsNet((3, 16, 16), 3, (4, 8))
    model.head.class_capsules.routing = UniformRouting()
    model.save_pretrained(tmp_path)
    assert isinstance(ResidualCapsNet.from_pretrained(tmp_path).head.class_capsules.routing, UniformRouting)


def test_a_changed_temperature_of_the_classes_is_set_when_a_network_is_loaded(tmp_path):
    small = {"image_shape": (1, 21, 21), "num_classes": 3, "widths": (4, 2, 2, 2)}
    for saved, changes, expected in (
        (1.0, {"class_temperature_factor": 0.25}, 0.25),
        (0.25, {"class_temperature_factor": 1.0}, 1.0),
        (0.25, {"routing": Routing("em", inverse_temperature=2.0)}, 0.5),
        (0.25, {"routing": Routing("em", iterations=1)}, 0.25),
    ):
        MatrixCapsNet(**small, class_temperature_factor=saved).save_pretrained(tmp_path)
        found = MatrixCapsNet.from_pretrained(tmp_path, **changes).class_capsules.routing.inverse_temperature
        assert (
            found
            == MatrixCapsNet(
                **small, **{"class_temperature_factor": saved, **changes}
            ).class_capsules.routing.inverse_temperature
        )
        assert found == expected


def test_parameters_that_are_not_trained_stay_so_after_loading(tmp_path):
    CapsNet(**TINY, routing=Routing("em", parent_activation="mixing")).save_pretrained(tmp_path)
    rule = CapsNet.from_pretrained(tmp_path).class_capsules.routing
    assert not rule.beta_u.requires_grad
    assert not rule.beta_a.requires_grad


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (tied, "share memory .*second_capsules.transform.*: give each layer its own weights"),
        (parametrised, "compiled, parametrized or quantized: use the original layer, or remove the parametr"),
        (quantised, "_packed_params.dtype belongs to a layer that is compiled, parametrized or quantized: use the"),
        (compiled_layer, "compiled, parametrized or quantized: use the original layer, or remove the parametr"),
        (pruned, r"other weights \(class_capsules.transform is absent here, but would be \["),
        (
            other_function,
            r"another layer convolution.1 \(type is 'GELU' here, but would be 'ReLU'\): undo the change",
        ),
        (with_dropout, r"another layer convolution.2 \(type is 'Dropout' here, but would be None\): undo the change"),
        (other_squash, r"another layer primary_capsules \(squash_form is 'su' here, but would be 'sabour'\): undo the"),
        (replaced, "would create a network with another layer class_capsules: undo the change"),
        (wider, r"other weights \(.*convolution.*bias is \[9\] here, but would be \[8\]\): undo the change"),
        (Subclass, r"takes \* or \*\* arguments: use only named arguments"),
        (Positional, r"takes \* or \*\* arguments: use only named arguments"),
    ],
)
def test_a_network_that_could_not_be_loaded_again_is_not_saved(build, problem, tmp_path):
    with pytest.raises(BadInput, match=problem):
        build().save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "entry", [torch.relu, CapsNet((1, 20, 20), 3, convolution_channels=8, primary_types=2), nn.Linear]
)
def test_an_entry_of_the_models_that_is_no_class_of_networks_is_refused_by_name(entry, monkeypatch):
    monkeypatch.setitem(MODELS, "plain", entry)
    with pytest.raises(
        BadInput, match=r"MODELS\['plain'\] must be a class derived from torchcaps.models.Pretrained; got "
    ):
        create_model("plain", image_shape=(1, 20, 20))
    assert model_name(CapsNet) == "capsnet"


def test_a_network_that_lacks_a_layer_is_refused_with_the_cure(tmp_path):
    network = PooledCNN((1, 28, 28), 3)
    del network.trunk[8]
    with pytest.raises(BadInput, match=r"another layer trunk\.8 .*would be 'ReLU'\): undo the change of this layer"):
        network.save_pretrained(tmp_path)


def test_networks_and_classifiers_are_uploaded_after_they_were_saved(monkeypatch):
    uploaded = {}

    class Api:
        def __init__(self, token):
            assert token == "secret"

        def create_repo(self, repository, private, exist_ok):
            uploaded[repository] = None
            return f"https://hub/{repository}"

        def upload_folder(self, repo_id, folder_path):
            files = sorted(path.name for path in Path(folder_path).iterdir())
            uploaded[repo_id] = Classifier.from_pretrained(folder_path) if "full" in repo_id else files

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    network = CapsNet(**TINY)
    assert network.push_to_hub("me/network", token="secret") == "https://hub/me/network"
    assert uploaded["me/network"] == ["config.json", "model.safetensors"]
    classifier = Classifier(network, ("a", "b", "c"), (1, 20, 20), Preprocessing())
    assert classifier.push_to_hub("me/full", private=True, token="secret") == "https://hub/me/full"
    assert uploaded["me/full"].class_names == ("a", "b", "c")
    network.options["stem"] = 0
    with pytest.raises(BadInput, match="cannot be saved"):
        network.push_to_hub("me/broken", token="secret")
    assert "me/broken" not in uploaded


@pytest.mark.parametrize(("rule", "network"), [("dynamic", CapsNet), ("em", MatrixCapsNet)])
def test_the_backend_of_one_machine_is_not_saved(rule, network, tmp_path):
    options = TINY if network is CapsNet else {"image_shape": (1, 20, 20), "widths": (4, 2, 3, 3)}
    network(**options, routing=Routing(rule, backend="reference", iterations=1)).save_pretrained(tmp_path)
    routing = network.from_pretrained(tmp_path).class_capsules.routing
    assert (routing.backend, routing.iterations) == ("auto", 1)
