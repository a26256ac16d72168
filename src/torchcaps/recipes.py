"""The recipes: every number of a training in one place, one function each."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torchcaps.data import DATASETS, FOLDER_OPTIONS, load_image_folder
from torchcaps.errors import BadInput, nearest
from torchcaps.losses import LOSSES
from torchcaps.models import MODELS, routing_of
from torchcaps.options import described, fits, kinds_of
from torchcaps.recipe import Recipe
from torchcaps.routing import ROUTINGS, routing_options

GROUPS = ("model.OPTION", "model.routing", "routing.OPTION", "data.OPTION", "loss.OPTION")


def capsnet_mnist() -> Recipe:
    """CapsNet on MNIST: Sabour, Frosst & Hinton 2017, section 5, with smaller batches and a faster decay.

    The paper's optimiser, shift and losses. It takes batches of 128 and decays by 0.96 every 2,000 steps over a
    training whose length it does not state; ten epochs want many steps, and the rate down at their end: batches of 64,
    0.96 every 160 steps. The paper's own: ``--batch-size 128 --set decay_steps=2000 --epochs 100``.
    """
    return Recipe(
        name="capsnet-mnist",
        model="capsnet",
        data="mnist",
        reconstruction_weight=0.0005,
        shift=2,
        decay_rate=0.96,
        decay_steps=160,
        batch_size=64,
    )


def capsnet_mnist_5k() -> Recipe:
    """A narrow CapsNet on the 5,000 embedded digits: the demo, made to end in minutes on two cores.

    Half the channels of the paper's net at both convolutions (a quarter of its arithmetic), smaller batches.
    """
    return replace(
        capsnet_mnist(),
        name="capsnet-mnist-5k",
        data="mnist-5k",
        model_options={"convolution_channels": 128, "primary_types": 16},
        batch_size=32,
        decay_steps=12,
        epochs=8,
    )


def capsnet_images() -> Recipe:
    """CapsNet on a folder of your own images: name it with ``--data``.

    Small batches and a rate of 2e-4: a parent sums the votes of thousands of children, all moved by every step, and
    with few classes the paper's 1e-3 overshoots into saturation within the first steps.
    """
    return replace(
        capsnet_mnist(),
        name="capsnet-images",
        data="images",
        batch_size=16,
        learning_rate=2e-4,
        decay_rate=1.0,
        epochs=30,
    )


def capsnet_fashion_mnist() -> Recipe:
    """CapsNet on Fashion-MNIST, with the settings of `capsnet_mnist`."""
    return replace(capsnet_mnist(), name="capsnet-fashion-mnist", data="fashion-mnist")


def efficient_capsnet_mnist() -> Recipe:
    """Efficient-CapsNet on MNIST: Mazzia, Salvetti & Chiaberge 2021, with larger batches and fewer epochs.

    The authors' losses and augmentation, but shifts of up to 2 pixels. They take batches of 16 and 150 epochs, in which
    a rate of 5e-4 falls by 0.97 an epoch; here it begins at 1e-3 and falls along a cosine. Theirs: ``--batch-size 16
    --epochs 150 --lr 5e-4 --set schedule=exponential --set decay_rate=0.97 --set decay_steps=3375``.
    """
    return Recipe(
        name="efficient-capsnet-mnist",
        model="efficient-capsnet",
        data="mnist",
        reconstruction_weight=0.0005,
        shift=2,
        rotation=30.0,
        squeeze=0.25,
        erase=4,
        learning_rate=1e-3,
        schedule="cosine",
        batch_size=64,
        epochs=20,
    )


def efficient_capsnet_fashion_mnist() -> Recipe:
    """Efficient-CapsNet on Fashion-MNIST, with the settings of `efficient_capsnet_mnist`."""
    return replace(efficient_capsnet_mnist(), name="efficient-capsnet-fashion-mnist", data="fashion-mnist")


def cnn_baseline_mnist() -> Recipe:
    """The convolutional baseline on MNIST: Sabour, Frosst & Hinton 2017, section 5; softmax cross-entropy."""
    return replace(
        capsnet_mnist(),
        name="cnn-baseline-mnist",
        model="baseline-cnn",
        loss="cross_entropy",
        reconstruction_weight=0.0,
    )


def pooled_cnn_mnist() -> Recipe:
    """Su's CNN with global pooling on MNIST: Su 2018; ten independent scores, no augmentation.

    The author takes 20 epochs of batches of 128 at a constant 1e-3; here 20 of 64, with a rate that falls to a tenth,
    so that the last epochs settle.
    """
    return Recipe(
        name="pooled-cnn-mnist",
        model="pooled-cnn",
        data="mnist",
        loss_options={"negative_weight": 0.25},
        decay_rate=0.96,
        decay_steps=300,
        batch_size=64,
        epochs=20,
    )


def pooled_capsnet_mnist() -> Recipe:
    """The same convolutions read by shared capsules: Su 2018; as `pooled_cnn_mnist`, in 12 epochs down to 3 %."""
    return replace(pooled_cnn_mnist(), name="pooled-capsnet-mnist", model="pooled-capsnet", decay_steps=120, epochs=12)


def matrix_capsnet_smallnorb() -> Recipe:
    """Matrix capsules on smallNORB: Hinton, Sabour & Frosst 2018, section 5; ``--set model.size=base`` for 32/32/32/32.

    The paper's optimiser, loss, batch, weight decay and augmentation. It does not state the length of its training, in
    which the rate falls by 0.96 every 20,000 steps; here 20 epochs, every 160.
    """
    return Recipe(
        name="matrix-capsnet-smallnorb",
        model="matrix-capsnet",
        data="smallnorb",
        loss="spread",
        margin_schedule="linear",
        standardise="first",
        crop=32,
        brightness=63 / 255,
        contrast=0.8,
        learning_rate=3e-3,
        decay_rate=0.96,
        decay_steps=160,
        weight_decay=2e-7,
        batch_size=64,
        epochs=20,
    )


def matrix_capsnet_toys() -> Recipe:
    """Matrix capsules on the rendered toys, three iterations, with what later papers have found to help.

    Two more convolutions, BatchNorm behind all three and on the primary capsules, standardisation last, cross-entropy
    on activation logits, a cosine schedule. With the paper's own settings a third iteration learns worse than two; here
    the couplings are tempered and the variance floor is as large as the votes' variance. Both were compared with two
    iterations and a floor of 0.01 on toys held out from training (``--set validation_attribute=instance``). This recipe
    trains on all toys of the training split and keeps the last epoch. The paper's settings:
    `matrix_capsnet_toys_paper`.
    """
    return replace(
        matrix_capsnet_smallnorb(),
        name="matrix-capsnet-toys",
        data="toys",
        model_options={"stem": 2, "normalise": True},
        routing_options={"iterations": 3, "variance_floor": 0.3, "initial_beta_a": 0.0, "tempering": 0.25},
        loss="activation_logit_cross_entropy",
        margin_schedule="none",
        standardise="last",
        schedule="cosine",
        validation_fraction=0.02,
        choose="last",
        epochs=6,
    )


def matrix_capsnet_toys_paper() -> Recipe:
    """Matrix capsules on the rendered toys, with the settings of `matrix_capsnet_smallnorb`."""
    return replace(matrix_capsnet_smallnorb(), name="matrix-capsnet-toys-paper", data="toys")


def matrix_capsnet_mnist() -> Recipe:
    """Matrix capsules on MNIST: two iterations, digits moved by up to 2 pixels, a short training.

    Blank margins vote alike: Gritzman's variance floor and a lower β_a, chosen on images of the training split.
    """
    return replace(
        matrix_capsnet_smallnorb(),
        name="matrix-capsnet-mnist",
        data="mnist",
        routing_options={"iterations": 2, "variance_floor": 1e-4, "initial_beta_a": -25.0},
        standardise="none",
        crop=0,
        brightness=0.0,
        contrast=0.0,
        shift=2,
        decay_steps=100,
        epochs=8,
    )


def cnn_baseline_smallnorb() -> Recipe:
    """The paper's convolutional baseline on smallNORB: Hinton, Sabour & Frosst 2018, section 5; 4.2M parameters."""
    return replace(
        matrix_capsnet_smallnorb(),
        name="cnn-baseline-smallnorb",
        model="matrix-baseline-cnn",
        loss="cross_entropy",
        margin_schedule="none",
        learning_rate=1e-3,
        decay_steps=500,
    )


def cnn_baseline_toys() -> Recipe:
    """The same baseline on the rendered toys."""
    return replace(cnn_baseline_smallnorb(), name="cnn-baseline-toys", data="toys")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "capsnet-mnist": capsnet_mnist,
    "capsnet-mnist-5k": capsnet_mnist_5k,
    "capsnet-images": capsnet_images,
    "capsnet-fashion-mnist": capsnet_fashion_mnist,
    "efficient-capsnet-mnist": efficient_capsnet_mnist,
    "efficient-capsnet-fashion-mnist": efficient_capsnet_fashion_mnist,
    "cnn-baseline-mnist": cnn_baseline_mnist,
    "pooled-cnn-mnist": pooled_cnn_mnist,
    "pooled-capsnet-mnist": pooled_capsnet_mnist,
    "matrix-capsnet-smallnorb": matrix_capsnet_smallnorb,
    "matrix-capsnet-toys": matrix_capsnet_toys,
    "matrix-capsnet-toys-paper": matrix_capsnet_toys_paper,
    "matrix-capsnet-mnist": matrix_capsnet_mnist,
    "cnn-baseline-smallnorb": cnn_baseline_smallnorb,
    "cnn-baseline-toys": cnn_baseline_toys,
}


def create_recipe(name: str, settings: Mapping[str, str] | None = None) -> Recipe:
    """A recipe of the table, with some of its settings changed.

    Arguments:
        name: a key of `RECIPES`.
        settings: key → value as text: a field of `Recipe`, ``model.OPTION``, ``routing.OPTION``, ``data.OPTION`` or
            ``loss.OPTION``, in any order. ``model.routing`` names the routing rule. Another model, rule, data or loss
            begins with that one's own options.

    Raises:
        BadInput: unknown recipe or key, or a value of the wrong kind; the nearest name is suggested.

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
            raise BadInput(f"unknown setting {key!r}{nearest(key, [*sorted(plain), *GROUPS])}")
    return replace(recipe, **changed, **_routing_options(recipe, changed, of_routing))


def _routing_options(recipe: Recipe, changed: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, Any]:
    """The routing options of a changed recipe: another model or another rule begins with its own."""
    model = changed.get("model", recipe.model)
    rule = routing_of(model, changed.get("model_options", recipe.model_options))
    if rule is None:
        if settings:
            raise BadInput(f"unknown setting {min(settings)!r}: model {model} has no routing rule")
        return {"routing_options": {}}
    before = routing_of(recipe.model, recipe.model_options)
    same = model == recipe.model and before is not None and before.name == rule.name
    changes = {
        key.partition(".")[2]: _value(key, text, *_kind("routing", rule.name, key.partition(".")[2]))
        for key, text in settings.items()
    }
    return {"routing_options": {**(recipe.routing_options if same else {}), **changes}}


def _kind(group: str, chosen: str, option: str) -> tuple[Any, Any]:
    """Annotated type and default of an option of the chosen model, data, loss or routing rule."""
    takes: Callable[..., Any]
    names: Sequence[str] | None = None
    if group == "data" and chosen in DATASETS:
        takes, names = DATASETS[chosen].load, DATASETS[chosen].options
    elif group == "data":
        takes, names = load_image_folder, FOLDER_OPTIONS
    elif group == "routing":
        takes, names = ROUTINGS[chosen], list(routing_options(chosen))
    else:
        takes = (MODELS if group == "model" else LOSSES)[chosen]
    kinds = kinds_of(takes)
    if names is None:
        names = [name for name in kinds if name not in ("image_shape", "classes", "scores", "target")]
    own = [f"{group}.{name}" for name in names]
    if f"{group}.{option}" not in own:
        if group == "model" and (routing := routing_of(chosen, {})):
            own += [f"routing.{name}" for name in routing_options(routing.name)]
        meant = f"routing.{option}" if f"routing.{option}" in own else f"{group}.{option}"
        raise BadInput(f"unknown setting '{group}.{option}'{nearest(meant, own)}")
    default = inspect.signature(takes).parameters[option].default
    return kinds[option], None if default is inspect.Parameter.empty else default


def _value(key: str, text: str, kind: Any, default: Any) -> Any:
    """A setting's value from its text: JSON, or a word as it stands."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        value = text
    for each in (text, value):
        if fits(each, kind):
            return float(each) if isinstance(default, float) else each
    if fits(_listed(text), kind):
        raise BadInput(f"{key} takes {described(kind)}; write {key}=[{text}]")
    example = "" if default is None else f", such as {json.dumps(default)}"
    raise BadInput(f"{key} takes {described(kind)}{example}; got {text}")


def _listed(text: str) -> Any:
    try:
        return json.loads(f"[{text}]")
    except json.JSONDecodeError:
        return None
