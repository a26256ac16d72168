"""What a training depends on."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchcaps.data import Preparation
from torchcaps.errors import BadInput, nearest
from torchcaps.losses import LOSSES

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
PRECISIONS = {"bf16": "bf16-mixed", "float32": "32-true"}


@dataclass(frozen=True)
class Recipe:
    """All that a training depends on, frozen.

    Arguments:
        name: of the recipe.
        model, model_options: a key of `MODELS` and arguments of that model; shape and classes come from the data.
        data, data_options: a key of `DATASETS` or a folder of images, and options of its loader.
        loss, loss_options: a key of `LOSSES` and its arguments.
        margin_schedule: of the spread loss's margin: none, or as `spread_margin` has it, linear or official.
        reconstruction_weight: of the summed squared error of a model that reconstructs.
        shift, standardise, crop, brightness, contrast, test_crops: see `Preparation`.
        optimizer, learning_rate, weight_decay: a key of `OPTIMIZERS` and its settings.
        decay_rate, decay_steps: the learning rate is multiplied by rate^(step / steps), at every step.
        gradient_clip: largest norm of the gradient; 0 is off.
        batch_size: images a step, over all devices together.
        epochs: passes over the training split.
        patience: stop after so many epochs without a better validation accuracy; 0 is off.
        validation_fraction: share of the training data held out to choose the epoch, in (0, 0.5].
        seed: of the split, the weights, the order and the shifts.
        precision: bf16, float32, or auto: bf16 where the hardware multiplies it.
    """

    name: str
    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "margin"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    margin_schedule: str = "none"
    reconstruction_weight: float = 0.0
    shift: int = 0
    standardise: bool = False
    crop: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    test_crops: int = 1
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    decay_rate: float = 1.0
    decay_steps: int = 1000
    gradient_clip: float = 0.0
    batch_size: int = 128
    epochs: int = 10
    patience: int = 0
    validation_fraction: float = 0.1
    seed: int = 0
    precision: str = "auto"

    def __post_init__(self) -> None:
        choices = {"loss": [*LOSSES], "optimizer": [*OPTIMIZERS], "precision": ["auto", *PRECISIONS]}
        choices["margin_schedule"] = ["none", "linear", "official"]
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise BadInput(f"{key} is {getattr(self, key)!r}: use one of {', '.join(allowed)}")
        lowest = {"batch_size": 1, "epochs": 1, "decay_steps": 1, "patience": 0, "seed": 0}
        lowest |= {"gradient_clip": 0, "reconstruction_weight": 0, "weight_decay": 0}
        for key, least in lowest.items():
            if not getattr(self, key) >= least:
                raise BadInput(f"{key} is {getattr(self, key)}: use {least} or more")
        for key in ("learning_rate", "decay_rate"):
            if not 0 < getattr(self, key) < math.inf:
                raise BadInput(f"{key} is {getattr(self, key)}: use a number above 0")
        if self.margin_schedule != "none" and (self.loss != "spread" or "margin" in self.loss_options):
            raise BadInput(
                f"margin_schedule is {self.margin_schedule!r}: it wants loss=spread without a loss.margin; "
                "or set margin_schedule=none"
            )
        for option in self.loss_options:
            known = [
                name for name in inspect.signature(LOSSES[self.loss]).parameters if name not in ("scores", "target")
            ]
            if option not in known:
                raise BadInput(f"loss {self.loss} takes no {option!r}{nearest(option, known)}")
        preparation = self.preparation()
        if self.reconstruction_weight and (preparation.standardise or preparation.brightness or preparation.contrast):
            raise BadInput(
                "reconstruction_weight is above 0, but standardise, brightness or contrast take the images out of the "
                "decoder's range [0, 1]: set reconstruction_weight=0, or those to false and 0"
            )

    def preparation(self) -> Preparation:
        """How its images become the model's input."""
        return Preparation.of(vars(self))


def resolve_precision(precision: str) -> str:
    """bf16 where ``auto`` finds hardware that multiplies it, else float32; anything else as it is."""
    if precision != "auto":
        if precision not in PRECISIONS:
            raise BadInput(f"precision is {precision!r}: use one of auto, {', '.join(PRECISIONS)}")
        return precision
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "float32"
