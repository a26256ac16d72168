"""Start training from saved weights."""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from torchcaps.data import DATASETS
from torchcaps.errors import BadInput, DataWarning
from torchcaps.models import Pretrained, TimmCapsNet, create_model, routing_of
from torchcaps.models.foreign import keeping_random_state
from torchcaps.models.pretrained import CONFIG, WEIGHTS, local_folder, read_config, read_weights
from torchcaps.recipe import Recipe

OF_DATA = ("image_shape", "num_classes")
MOST_NAMES = 4
"""Largest number of tensors that `load_matching` names in its message."""


def load_matching(model: nn.Module, recipe: Recipe, class_names: Sequence[str]) -> str:
    """Copy matching weights from ``recipe.pretrained`` to a new model, and return one line that says what was copied.

    A tensor is copied if the saved tensor of the same name has the same shape. There is one exception: if the saved
    network was trained on other classes, tensors whose shape depends on the number of classes are not copied, for
    example the transforms of the class capsules. Tensors that are not copied keep their random initial values.

    Arguments:
        model: network of the recipe; its weights are changed.
        recipe: recipe whose ``pretrained`` is a folder with weights or a repository on the Hugging Face Hub. For a
            `TimmCapsNet`, it can also be a source that `TimmCapsNet.load_backbone` accepts.
        class_names: class names of the new model.

    Raises:
        BadInput: the folder cannot be read, contains another kind of network, or contains no tensor to copy.

    Warns:
        DataWarning: the saved network was trained with another value of ``standardise`` or another routing rule than
            the recipe has.
    """
    source = recipe.pretrained
    if isinstance(model, TimmCapsNet) and (source == "timm" or source.endswith(".safetensors")):
        return model.load_backbone(source)
    folder = local_folder(source)
    saved = read_config(folder)
    if saved.model != recipe.model:
        raise BadInput(
            f"{source} contains weights of the model {saved.model}, but the recipe {recipe.name} trains the model "
            f"{recipe.model}: use weights of {recipe.model}"
        )
    weights = read_weights(folder / WEIGHTS, saved.weights_sha256)
    own = model.state_dict()
    same_classes = saved.images is not None and list(saved.images.get("class_names") or ()) == list(class_names)
    of_classes = set() if same_classes else _depending_on_classes(model, recipe)
    fits = [name for name in own if name in weights and weights[name].shape == own[name].shape]
    fits = [name for name in fits if name not in of_classes]
    numbers = sum(own[name].numel() for name in fits)
    if not any(own[name].is_floating_point() for name in fits):
        options = {key: value for key, value in cast(Pretrained, model).options.items() if key not in OF_DATA}
        other = [key for key, value in options.items() if json.dumps(value) != json.dumps(saved.options.get(key))]
        cure = f", or set the model options {', '.join(other)} as in {folder / CONFIG}" if other else ""
        raise BadInput(f"{source} has no weights that fit the model of {recipe.name}: use other weights{cure}")
    images = saved.images or {}
    preprocessed = images.get("preprocessing")
    standardised = preprocessed.get("standardise") if isinstance(preprocessed, Mapping) else None
    resized = images.get("resize") if recipe.data not in DATASETS else None
    for key, before, now in (
        ("standardise", standardised, recipe.standardise),
        # Images that were not resized are saved with "stretch" too.
        ("data.resize", None if resized == "stretch" else resized, recipe.data_options.get("resize", "stretch")),
    ):
        if before not in (None, now):
            warnings.warn(
                f"{source} was trained with {key}={before}, but {recipe.name} has {key}={now}, so the network receives "
                f"other pixel values than before: add --set {key}={before} to avoid this",
                DataWarning,
                stacklevel=2,
            )
    rule = routing_of(recipe.model, recipe.model_options, recipe.routing_options)
    layers = [layer for layer in saved.routing.values() if isinstance(layer, Mapping)]
    rules = sorted({str(layer["rule"]) for layer in layers if "rule" in layer})
    if rule is not None and rules and rule.name not in rules:
        warnings.warn(
            f"{source} was trained with the routing rule {', '.join(rules)}, but {recipe.name} has {rule.name}, so the "
            f"capsules compute other poses than before: add --set model.routing={rules[0]} to avoid this",
            DataWarning,
            stacklevel=2,
        )
    model.load_state_dict({**own, **{name: weights[name] for name in fits}})
    rest = [name for name in own if name not in fits]
    more = f" and {len(rest) - MOST_NAMES} more" if len(rest) > MOST_NAMES else ""
    share = 100 * numbers / sum(value.numel() for value in own.values())
    return (
        f"{source}: {len(fits)} of {len(own)} tensors loaded ({share:.1f} % of the weights); random initial values: "
        f"{', '.join(rest[:MOST_NAMES]) or 'none'}{more}"
    )


def _depending_on_classes(model: nn.Module, recipe: Recipe) -> set[str]:
    """Return the names of the tensors whose shape depends on the number of classes."""
    options = dict(cast(Pretrained, model).options)
    options["num_classes"] += 1
    if routing := routing_of(recipe.model, recipe.model_options, recipe.routing_options):
        options["routing"] = routing
    with torch.device("meta"), keeping_random_state(type(model)):
        wider = create_model(recipe.model, **options).state_dict()
    return {name for name, value in model.state_dict().items() if wider[name].shape != value.shape}
