"""One file per paper's networks, and the table of them by name."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchcaps.capsules import Prediction
from torchcaps.errors import BadInput, nearest
from torchcaps.models.capsnet import BaselineCNN, CapsNet
from torchcaps.models.matrix import MatrixBaselineCNN, MatrixCapsNet
from torchcaps.models.pooled import PooledCapsNet, PooledCNN
from torchcaps.models.pretrained import Pretrained
from torchcaps.options import check_options, kinds_of

MODELS: dict[str, type[nn.Module]] = {
    "capsnet": CapsNet,
    "baseline-cnn": BaselineCNN,
    "pooled-cnn": PooledCNN,
    "pooled-capsnet": PooledCapsNet,
    "matrix-capsnet": MatrixCapsNet,
    "matrix-baseline-cnn": MatrixBaselineCNN,
}


def create_model(name: str, **options: Any) -> nn.Module:
    """A model of the table by its name.

    Arguments:
        name: a key of `MODELS`.
        options: arguments of that model's class.

    Raises:
        BadInput: no such model, the model has no such option, or the option no such value.

    Example:
        >>> create_model("capsnet", image_shape=(1, 28, 28), decoder=False).decoder is None
        True
    """
    if name not in MODELS:
        raise BadInput(f"unknown model {name!r}{nearest(name, MODELS)}")
    check_options(f"model {name}", options, kinds_of(MODELS[name]))
    return built(name, MODELS[name], options)


def built(name: str, kind: type[nn.Module], options: Mapping[str, Any]) -> nn.Module:
    """A model made with its options; whatever it raises is one line that names the model.

    Raises:
        BadInput: an option has no such value, or the machine lacks the memory.
    """
    counts = {
        key: [value] if isinstance(value, int) else value
        for key, value in options.items()
        if isinstance(value, int | list | tuple) and not isinstance(value, bool)
    }
    for key, values in counts.items():
        if not values or min(values) < 1:
            raise BadInput(f"model {name}: {key} is {options[key]}; give numbers of at least 1")
    try:
        return kind(**options)
    except BadInput:
        raise
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, MemoryError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            reason = "there is not enough memory for so many weights"
        raise BadInput(f"model {name} cannot be made with these options: {reason}") from error


__all__ = [
    "MODELS",
    "BaselineCNN",
    "CapsNet",
    "MatrixBaselineCNN",
    "MatrixCapsNet",
    "PooledCNN",
    "PooledCapsNet",
    "Prediction",
    "Pretrained",
    "built",
    "create_model",
]
