"""Capsule networks for PyTorch: a capsule layer is a routing map and a routing rule."""

from typing import TYPE_CHECKING, Any

from torchcaps.capsules import Capsules, Prediction, coordinate_addition, lengths, squash
from torchcaps.errors import BadInput
from torchcaps.layers import CapsuleLayer, ClassCaps, ConvCaps, Decoder, DenseCaps, PrimaryCaps, SharedCaps
from torchcaps.losses import margin_loss, reconstruction_loss, spread_loss
from torchcaps.routing import ROUTINGS, DynamicRouting, EMPass, EMRouting, dynamic_routing, em_routing
from torchcaps.routing_map import RoutingMap

if TYPE_CHECKING:
    from torchcaps.models import (
        MODELS,
        BaselineCNN,
        CapsNet,
        MatrixBaselineCNN,
        MatrixCapsNet,
        PooledCapsNet,
        PooledCNN,
        create_model,
    )

__version__ = "0.1.0"

__all__ = [
    "MODELS",
    "ROUTINGS",
    "BadInput",
    "BaselineCNN",
    "CapsNet",
    "CapsuleLayer",
    "Capsules",
    "ClassCaps",
    "ConvCaps",
    "Decoder",
    "DenseCaps",
    "DynamicRouting",
    "EMPass",
    "EMRouting",
    "MatrixBaselineCNN",
    "MatrixCapsNet",
    "PooledCNN",
    "PooledCapsNet",
    "Prediction",
    "PrimaryCaps",
    "RoutingMap",
    "SharedCaps",
    "coordinate_addition",
    "create_model",
    "dynamic_routing",
    "em_routing",
    "lengths",
    "margin_loss",
    "reconstruction_loss",
    "spread_loss",
    "squash",
]


def __getattr__(name: str) -> Any:
    """The models come in when one is asked for: what saves and loads them costs as much as a tenth of torch itself."""
    if name in __all__:
        from torchcaps import models

        return getattr(models, name)
    raise AttributeError(f"module 'torchcaps' has no attribute {name!r}")
