"""Recipes by name. Each recipe is a function that returns all settings of a training run."""

import inspect
import json
from collections.abc import Callable, Container, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, get_origin

from torchcaps.data import DATASETS, TABLE_OPTIONS, Preprocessing, load_image_table
from torchcaps.errors import BadInput, nearest
from torchcaps.losses import LOSSES, NOT_SETTINGS
from torchcaps.models import MODELS, routing_of
from torchcaps.options import described, fits, kinds_of, meanings
from torchcaps.recipe import Recipe
from torchcaps.recipes import matrix_capsules, other_routings, own_images, vector_capsules
from torchcaps.routing import ROUTINGS, routing_options

GROUPS = ("model.OPTION", "model.routing", "routing.OPTION", "data.OPTION", "loss.OPTION")

OWN_IMAGES = "images"
"""Value of `Recipe.data` in recipes for your own images. `torchcaps train` then requires ``--data`` with a folder."""

RECIPES: dict[str, Callable[[], Recipe]] = {
    "capsnet-mnist": vector_capsules.capsnet_mnist,
    "capsnet-mnist-5k": vector_capsules.capsnet_mnist_5k,
    "capsnet-stem-mnist": vector_capsules.capsnet_stem_mnist,
    "capsnet-images": own_images.capsnet_images,
    "matrix-capsnet-images": own_images.matrix_capsnet_images,
    "variational-capsnet-images": own_images.variational_capsnet_images,
    "cnn-images": own_images.cnn_images,
    "residual-capsnet-images": own_images.residual_capsnet_images,
    "timm-capsnet-images": own_images.timm_capsnet_images,
    "capsnet-fashion-mnist": vector_capsules.capsnet_fashion_mnist,
    "capsnet-cifar10": vector_capsules.capsnet_cifar10,
    "capsnet-smallnorb": vector_capsules.capsnet_smallnorb,
    "capsnet-svhn": vector_capsules.capsnet_svhn,
    "efficient-capsnet-mnist": vector_capsules.efficient_capsnet_mnist,
    "efficient-capsnet-fashion-mnist": vector_capsules.efficient_capsnet_fashion_mnist,
    "efficient-capsnet-smallnorb": vector_capsules.efficient_capsnet_smallnorb,
    "efficient-capsnet-toys": vector_capsules.efficient_capsnet_toys,
    "cnn-baseline-mnist": vector_capsules.cnn_baseline_mnist,
    "pooled-cnn-mnist": vector_capsules.pooled_cnn_mnist,
    "pooled-capsnet-mnist": vector_capsules.pooled_capsnet_mnist,
    "matrix-capsnet-smallnorb": matrix_capsules.matrix_capsnet_smallnorb,
    "matrix-capsnet-smallnorb-paper": matrix_capsules.matrix_capsnet_smallnorb_paper,
    "matrix-capsnet-toys": matrix_capsules.matrix_capsnet_toys,
    "matrix-capsnet-toys-variational": matrix_capsules.matrix_capsnet_toys_variational,
    "matrix-capsnet-toys-paper": matrix_capsules.matrix_capsnet_toys_paper,
    "matrix-capsnet-mnist": matrix_capsules.matrix_capsnet_mnist,
    "matrix-capsnet-mnist-paper": matrix_capsules.matrix_capsnet_mnist_paper,
    "variational-capsnet-smallnorb": matrix_capsules.variational_capsnet_smallnorb,
    "variational-capsnet-toys": matrix_capsules.variational_capsnet_toys,
    "variational-capsnet-svhn": matrix_capsules.variational_capsnet_svhn,
    "variational-capsnet-fashion-mnist": matrix_capsules.variational_capsnet_fashion_mnist,
    "self-routing-capsnet-smallnorb": other_routings.self_routing_capsnet_smallnorb,
    "self-routing-capsnet-toys": other_routings.self_routing_capsnet_toys,
    "self-routing-capsnet-cifar10": other_routings.self_routing_capsnet_cifar10,
    "self-routing-capsnet-svhn": other_routings.self_routing_capsnet_svhn,
    "self-routing-capsnet-fashion-mnist": other_routings.self_routing_capsnet_fashion_mnist,
    "attention-capsnet-cifar10": other_routings.attention_capsnet_cifar10,
    "attention-capsnet-cifar100": other_routings.attention_capsnet_cifar100,
    "generative-capsnet-smallnorb": other_routings.generative_capsnet_smallnorb,
    "generative-capsnet-toys": other_routings.generative_capsnet_toys,
    "cnn-baseline-smallnorb": matrix_capsules.cnn_baseline_smallnorb,
    "cnn-baseline-smallnorb-paper": matrix_capsules.cnn_baseline_smallnorb_paper,
    "cnn-baseline-toys": matrix_capsules.cnn_baseline_toys,
    "cnn-baseline-toys-paper": matrix_capsules.cnn_baseline_toys_paper,
}


def create_recipe(name: str, settings: Mapping[str, str] | None = None) -> Recipe:
    """Create a recipe by name and change some of its settings.

    Arguments:
        name: a key of `RECIPES`.
        settings: key → value as text, in any order. Keys are the fields of `Recipe`, ``model.OPTION``,
            ``routing.OPTION``, ``data.OPTION`` and ``loss.OPTION``; ``model.routing`` is the name of the routing rule.
            If the model changes, the recipe's model options and routing options are discarded. If the rule
            changes, the routing options are discarded. If the dataset changes, the data options are discarded. If the
            loss changes, the loss options are discarded.

    Raises:
        BadInput: the recipe or a key is unknown; a value has the wrong type or is out of range; or a given setting
            has no effect together with the other settings.

    Example:
        >>> create_recipe("capsnet-mnist", {"epochs": "3", "routing.iterations": "1"}).epochs
        3
    """
    if name not in RECIPES:
        raise BadInput(f"unknown recipe {name!r}{nearest(name, RECIPES)}")
    recipe = RECIPES[name]()
    settings = dict(settings or {})
    plain = {f.name for f in fields(recipe) if f.name != "name" and not f.name.endswith("_options")}
    changed: dict[str, Any] = {}
    of_routing = {key: settings.pop(key) for key in [*settings] if key.startswith("routing.")}
    for key in sorted(settings, key=lambda key: "." in key):
        group, _, option = key.partition(".")
        if option and group in ("model", "data", "loss"):
            chosen = changed.get(group, getattr(recipe, group))
            value = _value(key, settings[key], *_kind(group, chosen, option))
            own = getattr(recipe, f"{group}_options") if chosen == getattr(recipe, group) else {}
            changed[f"{group}_options"] = {**changed.get(f"{group}_options", own), option: value}
        elif key in plain:
            if key == "model" and settings[key] not in MODELS:
                raise BadInput(f"unknown model {settings[key]!r}{nearest(settings[key], MODELS)}")
            if key == "loss" and settings[key] not in LOSSES:
                raise BadInput(f"unknown loss {settings[key]!r}{nearest(settings[key], LOSSES)}")
            changed[key] = _value(key, settings[key], kinds_of(Recipe)[key], getattr(recipe, key))
            if key in ("model", "data", "loss") and changed[key] != getattr(recipe, key):
                changed.setdefault(f"{key}_options", {})
                if key == "loss":
                    changed.setdefault("margin_schedule", "none")
        else:
            meant = {"lr": "learning_rate", "from": "pretrained", "lr_decay": "decay_rate"}.get(key, key)
            grouped = [each for each, *_ in settings_of(recipe) if each.endswith(f".{key}")]
            known = [*sorted(plain), *GROUPS, *grouped]
            raise BadInput(f"unknown setting {key!r}{nearest(grouped[0] if grouped else meant, known)}")
    changed = {key: value for key, value in changed.items() if value != getattr(recipe, key)}
    created = replace(recipe, **changed, **_routing_options(recipe, changed, of_routing))
    _check_effects(created, settings)
    return created


def discarded_options(changed: Recipe) -> list[str]:
    """List the options that `create_recipe` has discarded, because another model, rule, loss or dataset was chosen.

    Example:
        >>> discarded_options(create_recipe("capsnet-cifar10", {"model.routing": "em"}))
        ['routing.leaky=True']
    """
    recipe, kept = RECIPES[changed.name](), changed.by_name()
    found = [f"{key}={value}" for key, value in recipe.by_name().items() if key not in kept]
    if changed.loss != recipe.loss and changed.margin_schedule == "none" != recipe.margin_schedule:
        found.append(f"margin_schedule={recipe.margin_schedule}")
    return found


def settings_of(recipe: Recipe) -> list[tuple[str, Any, str]]:
    """List all settings of a recipe.

    Returns:
        For each setting: its name as in `create_recipe`, its value, and its meaning in one sentence. The meanings are
        the descriptions in the docstrings of `Recipe`, `Preprocessing`, the model, the routing rule, the loss and the
        dataset's loader.
        A second sentence says if the setting has no effect in this recipe.

    Example:
        >>> next(setting for setting in settings_of(create_recipe("capsnet-mnist")) if setting[0] == "shift")
        ('shift', 2, 'training only; largest shift in each direction, in pixels, with zero padding; 0 is off.')
    """
    of_recipe = {**meanings(Recipe), **meanings(Preprocessing)}
    plain = [f.name for f in fields(recipe) if f.name != "name" and not f.name.endswith("_options")]
    found = [(name, getattr(recipe, name), of_recipe.get(name, "")) for name in plain]
    rule = routing_of(recipe.model, recipe.model_options, recipe.routing_options)
    groups: dict[str, tuple[str, Mapping[str, Any]]] = {"model": (recipe.model, recipe.model_options)}
    if rule is not None:
        groups["model"] = (recipe.model, {**recipe.model_options, "routing": rule.name})
        groups["routing"] = (rule.name, rule.options)
    groups |= {"data": (recipe.data, recipe.data_options), "loss": (recipe.loss, recipe.loss_options)}
    for group, (chosen, values) in groups.items():
        takes, names = _options_of(group, chosen)
        parameters, of_group = inspect.signature(takes).parameters, meanings(takes)
        for name in names:
            found.append((f"{group}.{name}", values.get(name, parameters[name].default), of_group.get(name, "")))
    idle = {key: f" No effect {reason}." for key, (reason, _) in _without_effect(recipe).items()}
    return [(name, value, f"{meaning}{idle.get(name, '')}") for name, value, meaning in found]


def _without_effect(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Return the settings of a recipe that have no effect, with the reason and with the change that gives an effect."""
    model = MODELS[recipe.model]
    decoder = "decoder" in kinds_of(model) and inspect.signature(model).parameters["decoder"].default
    no_decoder = recipe.reconstruction_weight and not recipe.model_options.get("decoder", decoder)
    schedule, rate, early = recipe.schedule, recipe.decay_rate, recipe.early_epochs
    attribute = recipe.validation_attribute
    undone = recipe.standardise == "last" and not (recipe.rotation or recipe.squeeze or recipe.elastic or recipe.erase)
    widths = recipe.model == "matrix-capsnet" and recipe.model_options.get("widths") is not None
    found: dict[str, tuple[str, str]] = {}
    for key, without_effect, reason, cure in (
        ("model.size", widths, "because model.widths is set", "set model.widths=null too"),
        ("decay_rate", schedule == "cosine", "with schedule=cosine", "set schedule=exponential"),
        ("decay_steps", schedule == "cosine", "with schedule=cosine", "set schedule=exponential"),
        ("decay_steps", rate == 1, "with decay_rate=1", "set decay_rate below 1"),
        ("brightness", undone and recipe.brightness, "with standardise=last", "set standardise=first"),
        ("contrast", undone and recipe.contrast, "with standardise=last", "set standardise=first"),
        ("validation_fraction", bool(attribute), f"with validation_attribute={attribute}", "set validation_attribute="),
        ("early_iterations", not early, "with early_epochs=0", "set early_epochs to at least 1"),
        ("reconstruction_weight", no_decoder, f"because model {recipe.model} has no decoder", "set it to 0"),
    ):
        if without_effect:
            found.setdefault(key, (reason, cure))
    return found


def _check_effects(recipe: Recipe, given: Container[str]) -> None:
    """Refuse a given setting that has no effect. Settings that were not given are accepted without an effect.

    Raises:
        BadInput: a given setting has no effect, or ``warm_up_epochs`` is given and exceeds the epochs of the training.
    """
    for key, (reason, cure) in _without_effect(recipe).items():
        if key in given:
            raise BadInput(f"{key} is {recipe.by_name()[key]}, which has no effect {reason}: leave it out, or {cure}")
    if "warm_up_epochs" in given and recipe.warm_up_epochs > recipe.epochs:
        raise BadInput(
            f"warm_up_epochs is {recipe.warm_up_epochs}, which is more than the {recipe.epochs} epochs of the "
            "training: lower warm_up_epochs or raise epochs"
        )


def _routing_options(recipe: Recipe, changed: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the routing options of a changed recipe. A new model or rule discards the recipe's own routing options."""
    model = changed.get("model", recipe.model)
    rule = routing_of(model, changed.get("model_options", recipe.model_options))
    if rule is None:
        if settings:
            raise BadInput(f"model {model} has no routing rule: leave out the setting {min(settings)!r}")
        return {"routing_options": {}}
    before = routing_of(recipe.model, recipe.model_options)
    same = model == recipe.model and before is not None and before.name == rule.name
    changes = {
        key.partition(".")[2]: _value(key, text, *_kind("routing", rule.name, key.partition(".")[2]))
        for key, text in settings.items()
    }
    return {"routing_options": {**(recipe.routing_options if same else {}), **changes}}


def _options_of(group: str, chosen: str) -> tuple[Callable[..., Any], list[str]]:
    """Return the function or class that takes the options of the model, data, loss or rule, and the options' names."""
    if group == "data" and chosen in DATASETS:
        return DATASETS[chosen].load, [*DATASETS[chosen].options]
    if group == "data":
        return load_image_table, [*TABLE_OPTIONS]
    if group == "routing":
        return ROUTINGS[chosen], [*routing_options(chosen)]
    takes: Callable[..., Any] = (MODELS if group == "model" else LOSSES)[chosen]
    given = ("image_shape", "num_classes", *NOT_SETTINGS)
    return takes, [name for name in kinds_of(takes) if name not in given]


def _kind(group: str, chosen: str, option: str) -> tuple[Any, Any]:
    """Return the annotated type and the default of an option of the chosen model, data, loss or routing rule."""
    takes, names = _options_of(group, chosen)
    own = [f"{group}.{name}" for name in names]
    if f"{group}.{option}" not in own:
        if group == "model" and (routing := routing_of(chosen, {})):
            own += [f"routing.{name}" for name in routing_options(routing.name)]
        if not own:
            raise BadInput(
                f"unknown setting '{group}.{option}', because {chosen!r} has no options: leave out this setting"
            )
        meant = f"routing.{option}" if f"routing.{option}" in own else f"{group}.{option}"
        raise BadInput(f"unknown setting '{group}.{option}'{nearest(meant, own)}")
    default = inspect.signature(takes).parameters[option].default
    return kinds_of(takes)[option], None if default is inspect.Parameter.empty else default


def _value(key: str, text: str, kind: Any, default: Any) -> Any:
    """Parse the text of a setting as a plain word or as JSON, whichever has the right type."""
    value = _parsed(text)
    for each in (value, text) if kind is Any or value is None else (text, value):
        if fits(each, kind):
            return float(each) if isinstance(default, float) else each
    if isinstance(listed := _parsed(f"[{text}]"), list) and fits(listed, kind):
        raise BadInput(f"{key} must be {described(kind)}: write {key}=[{text}]")
    example = "" if default is None or get_origin(kind) is Literal else f", such as {json.dumps(default)}"
    raise BadInput(f"{key} must be {described(kind)}{example}; got {repr(text) if value == text else text}")


def _parsed(text: str) -> Any:
    """Parse JSON, or a number such as ``.5``; return any other text unchanged."""
    for parse in (json.loads, float):
        try:
            return parse(text)
        except (ValueError, RecursionError):
            pass
    return text
