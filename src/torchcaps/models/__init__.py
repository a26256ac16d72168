"""Capsule networks and baseline CNNs, most of them from papers, and `MODELS`, the table of all networks by name."""

import inspect
from collections.abc import Mapping
from typing import Any

from torchcaps.capsules import Prediction
from torchcaps.checks import described
from torchcaps.errors import BadInput, first_line, nearest
from torchcaps.models.attention import AttentionCapsNet
from torchcaps.models.capsnet import BaselineCNN, CapsNet
from torchcaps.models.efficient import EfficientCapsNet
from torchcaps.models.foreign import is_foreign
from torchcaps.models.generative import GenerativeCapsNet
from torchcaps.models.head import CapsuleHead
from torchcaps.models.matrix import MatrixBaselineCNN, MatrixCapsNet
from torchcaps.models.pooled import PooledCapsNet, PooledCNN
from torchcaps.models.pretrained import Pretrained
from torchcaps.models.residual import ResidualCapsNet
from torchcaps.models.self_routing import SelfRoutingCapsNet
from torchcaps.models.timm_backbone import TimmCapsNet
from torchcaps.options import check_options, kinds_of
from torchcaps.routing import Routing

MODELS: dict[str, type[Pretrained]] = {
    "capsnet": CapsNet,
    "efficient-capsnet": EfficientCapsNet,
    "baseline-cnn": BaselineCNN,
    "pooled-cnn": PooledCNN,
    "pooled-capsnet": PooledCapsNet,
    "matrix-capsnet": MatrixCapsNet,
    "matrix-baseline-cnn": MatrixBaselineCNN,
    "self-routing-capsnet": SelfRoutingCapsNet,
    "attention-capsnet": AttentionCapsNet,
    "generative-capsnet": GenerativeCapsNet,
    "residual-capsnet": ResidualCapsNet,
    "timm-capsnet": TimmCapsNet,
}
"""All networks by name. To train your own network, derive its class from `Pretrained`, which is a
`torch.nn.Module`, and add it.

Its constructor takes ``image_shape`` and ``num_classes``, and ``forward(images, labels=None)`` returns a `Prediction`.
"""


def create_model(name: str, **options: Any) -> Pretrained:
    """Create a model by name.

    Arguments:
        name: a key of `MODELS`.
        options: keyword arguments of the model's class.

    Raises:
        BadInput: ``name`` is not in `MODELS`, or an option is unknown or has an invalid value.

    Example:
        >>> create_model("capsnet", image_shape=(1, 28, 28), decoder=False).decoder is None
        True
    """
    check_options(f"model {name}", options, kinds_of(model_class(name)))
    return built(name, MODELS[name], options)


def routing_of(
    model: str, options: Mapping[str, Any], routing_options: Mapping[str, Any] | None = None
) -> Routing | None:
    """Return the `Routing` of a model created with these options, or None for a model without capsules.

    Arguments:
        model: a key of `MODELS`.
        options: keyword arguments of the model's class.
        routing_options: options to change in the returned `Routing`; its other options stay as they are.

    Raises:
        BadInput: the model, the rule or an option of the rule is unknown; or ``routing_options`` are given for a model
            without a routing rule.

    Example:
        >>> routing_of("matrix-capsnet", {"routing": "attention"}, {"iterations": 3})
        Routing('attention', iterations=3)
    """
    arguments = inspect.signature(model_class(model)).parameters
    if "routing" in arguments:
        routing = options.get("routing", arguments["routing"].default)
        routing = routing if isinstance(routing, Routing) else Routing(routing)
        return routing.replace(**routing_options or {})
    if routing_options:
        raise BadInput(f"model {model} has no routing rule: leave out the routing option {min(routing_options)!r}")
    return None


def model_class(name: str) -> type[Pretrained]:
    """Return the class of a model by its name in `MODELS`.

    Raises:
        BadInput: ``name`` is not in `MODELS`, or the entry is not a class derived from `Pretrained`.
    """
    if name not in MODELS:
        raise BadInput(f"unknown model {name!r}{nearest(name, MODELS)}")
    if not isinstance(MODELS[name], type) or not issubclass(MODELS[name], Pretrained):
        raise BadInput(
            f"torchcaps.MODELS[{name!r}] must be a class derived from torchcaps.models.Pretrained; "
            f"got {described(MODELS[name])}"
        )
    return MODELS[name]


def built(name: str, kind: type[Pretrained], options: Mapping[str, Any]) -> Pretrained:
    """Create a model, or raise an error with a one-line message that names the model.

    Arguments:
        name: name of the model in error messages.
        kind: class of the model.
        options: keyword arguments of the class.

    Raises:
        BadInput: a value of an option is invalid, or there is not enough memory.
    """
    counts = {
        key: [value] if isinstance(value, int) else value
        for key, value in options.items()
        if isinstance(value, int | list | tuple) and not isinstance(value, bool)
        # Other options of your own networks can have any meaning.
        if key in ("image_shape", "num_classes") or not is_foreign(kind)
    }
    parameters = inspect.signature(kind).parameters
    for key, values in counts.items():
        least = 0 if key in parameters and parameters[key].default == 0 else 1
        if not values or min(values) < least:
            subject = key if isinstance(options[key], int) else f"every number of {key}"
            raise BadInput(f"model {name}: {subject} must be at least {least}; got {options[key]}")
    try:
        return kind(**options)
    except BadInput:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, MemoryError) as error:
        reason = first_line(error)
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            reason = "there is not enough memory for the weights, so make the model smaller"
        raise BadInput(f"model {name} cannot be created with these options: {reason}") from error


__all__ = [
    "MODELS",
    "AttentionCapsNet",
    "BaselineCNN",
    "CapsNet",
    "CapsuleHead",
    "EfficientCapsNet",
    "GenerativeCapsNet",
    "MatrixBaselineCNN",
    "MatrixCapsNet",
    "PooledCNN",
    "PooledCapsNet",
    "Prediction",
    "Pretrained",
    "ResidualCapsNet",
    "SelfRoutingCapsNet",
    "TimmCapsNet",
    "built",
    "create_model",
    "routing_of",
]
