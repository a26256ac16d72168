"""One file per paper's networks, and the table of them by name."""

import inspect
from typing import Any

from torch import nn

from torchcaps.errors import BadInput, nearest
from torchcaps.models.capsnet import BaselineCNN, CapsNet
from torchcaps.models.matrix import MatrixBaselineCNN, MatrixCapsNet
from torchcaps.models.pooled import PooledCapsNet, PooledCNN
from torchcaps.models.prediction import Prediction

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
    known = list(inspect.signature(MODELS[name]).parameters)
    for option in options:
        if option not in known:
            raise BadInput(f"model {name} has no option {option!r}{nearest(option, known)}")
    try:
        return MODELS[name](**options)
    except BadInput:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:
        raise BadInput(f"model {name} cannot be made with these options: {error}") from error


__all__ = [
    "MODELS",
    "BaselineCNN",
    "CapsNet",
    "MatrixBaselineCNN",
    "MatrixCapsNet",
    "PooledCNN",
    "PooledCapsNet",
    "Prediction",
    "create_model",
]
