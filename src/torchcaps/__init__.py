"""Capsule networks for PyTorch: a capsule layer is a routing map and a routing rule."""

from torchcaps.capsules import Capsules, lengths, squash
from torchcaps.errors import BadInput
from torchcaps.layers import Decoder, DenseCaps, PrimaryCaps, SharedCaps
from torchcaps.losses import margin_loss, reconstruction_loss
from torchcaps.models import MODELS, BaselineCNN, CapsNet, PooledCapsNet, PooledCNN, Prediction, create_model
from torchcaps.routing import ROUTINGS, DynamicRouting, dynamic_routing
from torchcaps.routing_map import RoutingMap

__version__ = "0.1.0"

__all__ = [
    "MODELS",
    "ROUTINGS",
    "BadInput",
    "BaselineCNN",
    "CapsNet",
    "Capsules",
    "Decoder",
    "DenseCaps",
    "DynamicRouting",
    "PooledCNN",
    "PooledCapsNet",
    "Prediction",
    "PrimaryCaps",
    "RoutingMap",
    "SharedCaps",
    "create_model",
    "dynamic_routing",
    "lengths",
    "margin_loss",
    "reconstruction_loss",
    "squash",
]
