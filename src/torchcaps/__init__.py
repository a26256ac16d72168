"""Capsule networks for PyTorch: capsule layers, routing rules, losses and models."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchcaps.capsules import Capsules, Prediction, coordinate_addition, lengths, squash, squashed
    from torchcaps.classifier import Answer, Classifier
    from torchcaps.data import Preprocessing
    from torchcaps.decoder import Decoder
    from torchcaps.errors import BadInput, DataWarning, Diverged
    from torchcaps.inspection import Inspection, inspect
    from torchcaps.layers import CapsuleLayer, ClassCaps, ConvCaps, DenseCaps, SharedCaps
    from torchcaps.losses import margin_loss, reconstruction_loss, spread_loss
    from torchcaps.models import (
        MODELS,
        AttentionCapsNet,
        BaselineCNN,
        CapsNet,
        CapsuleHead,
        EfficientCapsNet,
        GenerativeCapsNet,
        MatrixBaselineCNN,
        MatrixCapsNet,
        PooledCapsNet,
        PooledCNN,
        ResidualCapsNet,
        SelfRoutingCapsNet,
        TimmCapsNet,
        create_model,
    )
    from torchcaps.primary import PoseNorm, PrimaryCaps
    from torchcaps.routing import (
        ROUTINGS,
        Agreement,
        AttentionRouting,
        DynamicRouting,
        EMPass,
        EMRouting,
        Gaussians,
        GenerativeRouting,
        Means,
        Moments,
        Recomputed,
        Routing,
        Rule,
        SelfAttentionRouting,
        SelfRouting,
        UniformRouting,
        VariationalBayesRouting,
        Votes,
        dynamic_routing,
        em_routing,
    )
    from torchcaps.routing_map import RoutingMap

__version__ = "0.1.0"

_MODULES = {
    "capsules": ("Capsules", "Prediction", "coordinate_addition", "lengths", "squash", "squashed"),
    "classifier": ("Answer", "Classifier"),
    "data": ("Preprocessing",),
    "errors": ("BadInput", "DataWarning", "Diverged"),
    "decoder": ("Decoder",),
    "inspection": ("Inspection", "inspect"),
    "layers": ("CapsuleLayer", "ClassCaps", "ConvCaps", "DenseCaps", "SharedCaps"),
    "losses": ("margin_loss", "reconstruction_loss", "spread_loss"),
    "models": (
        *("MODELS", "BaselineCNN", "CapsNet", "EfficientCapsNet", "MatrixBaselineCNN", "MatrixCapsNet"),
        *("AttentionCapsNet", "GenerativeCapsNet", "PooledCNN", "PooledCapsNet", "SelfRoutingCapsNet"),
        *("CapsuleHead", "ResidualCapsNet", "TimmCapsNet", "create_model"),
    ),
    "primary": ("PoseNorm", "PrimaryCaps"),
    "routing": (
        *("ROUTINGS", "Agreement", "AttentionRouting", "DynamicRouting", "EMPass", "EMRouting", "Means", "Rule"),
        *("Gaussians", "GenerativeRouting", "SelfAttentionRouting", "SelfRouting", "VariationalBayesRouting"),
        *("Moments", "Recomputed", "Routing", "UniformRouting", "Votes", "dynamic_routing", "em_routing"),
    ),
    "routing_map": ("RoutingMap",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "MODELS",
    "ROUTINGS",
    "Agreement",
    "Answer",
    "AttentionCapsNet",
    "AttentionRouting",
    "BadInput",
    "BaselineCNN",
    "CapsNet",
    "CapsuleHead",
    "CapsuleLayer",
    "Capsules",
    "ClassCaps",
    "Classifier",
    "ConvCaps",
    "DataWarning",
    "Decoder",
    "DenseCaps",
    "Diverged",
    "DynamicRouting",
    "EMPass",
    "EMRouting",
    "EfficientCapsNet",
    "Gaussians",
    "GenerativeCapsNet",
    "GenerativeRouting",
    "Inspection",
    "MatrixBaselineCNN",
    "MatrixCapsNet",
    "Means",
    "Moments",
    "PooledCNN",
    "PooledCapsNet",
    "PoseNorm",
    "Prediction",
    "Preprocessing",
    "PrimaryCaps",
    "Recomputed",
    "ResidualCapsNet",
    "Routing",
    "RoutingMap",
    "Rule",
    "SelfAttentionRouting",
    "SelfRouting",
    "SelfRoutingCapsNet",
    "SharedCaps",
    "TimmCapsNet",
    "UniformRouting",
    "VariationalBayesRouting",
    "Votes",
    "coordinate_addition",
    "create_model",
    "dynamic_routing",
    "em_routing",
    "inspect",
    "lengths",
    "margin_loss",
    "reconstruction_loss",
    "spread_loss",
    "squash",
    "squashed",
]


if not TYPE_CHECKING:  # otherwise type checkers would accept every misspelled name

    def __getattr__(name: str) -> Any:
        """Import each public name and module on first use, so that the command line starts without loading torch."""
        if name not in _MODULE_OF:
            if not name.isidentifier() or name.startswith("_") or find_spec(f"torchcaps.{name}") is None:
                raise AttributeError(f"module 'torchcaps' has no attribute {name!r}")
            return import_module(f"torchcaps.{name}")
        value = getattr(import_module(f"torchcaps.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted((globals().keys() | set(__all__)) - {"TYPE_CHECKING", "Any", "find_spec", "import_module"})
