"""What a training depends on."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from torchcaps.data import Preparation
from torchcaps.data.preparation import Standardise
from torchcaps.errors import BadInput
from torchcaps.losses import LOSSES
from torchcaps.options import check_kind, check_options, kinds_of

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "radam": torch.optim.RAdam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
"""Name → optimiser; the momentum of ``sgd`` is 0.9."""
FUSED = ("adam", "adamw", "sgd")
"""Optimisers that can update all weights in one kernel. Lightning cannot clip gradients for that kernel."""
LARGEST = 2**53
"""Whole number in a recipe: the largest that every reader of JSON keeps exact."""
Schedule = Literal["exponential", "cosine"]
Choose = Literal["best", "last"]
PRECISIONS = {"bf16": "bf16-mixed", "float32": "32-true"}


@dataclass(frozen=True)
class Recipe:
    """All that a training depends on, frozen.

    Arguments:
        name: of the recipe.
        model, model_options: a key of `MODELS` and arguments of that model; shape and classes come from the data.
        routing_options: options of the model's routing rule; another rule is ``model_options["routing"]``, its name.
        data, data_options: a key of `DATASETS` or a folder of images, and options of its loader.
        loss, loss_options: a key of `LOSSES` and its arguments.
        margin_schedule: of the spread loss's margin: none, or as `spread_margin` has it, linear or official.
        reconstruction_weight: of the summed squared error of a model that reconstructs.
        shift, standardise, crop, flip, brightness, contrast, rotation, squeeze, erase, test_crops: see `Preparation`.
        optimizer, learning_rate, weight_decay: a key of `OPTIMIZERS` and its settings.
        schedule: of the learning rate. ``exponential``: times decay_rate^(step / decay_steps). ``cosine``: down to 0 at
            the last step along half a cosine.
        decay_rate, decay_steps: of the exponential schedule.
        warm_up_epochs: over which the rate rises from 0, in a line, to what the schedule says.
        mixup: α of Zhang et al. 2018 (arXiv 1710.09412): every image is mixed with another, and so are their losses, by
            a share from Beta(α, α) a batch; 0 is off.
        gradient_clip: largest norm of the gradient; 0 is off.
        batch_size: images a step, over all devices together.
        epochs: passes over the training split.
        patience: stop after this many epochs without a better validation accuracy; 0 is off.
        validation_fraction: share of the training data held out to choose the epoch, in (0, 0.5].
        validation_attribute: hold out by this attribute instead, such as ``instance`` of toys and smallNORB: of every
            class all images of one value, which the seed chooses. So validation sees what tests see: other objects.
        choose: the epoch that is kept: the ``best`` in validation, or the ``last``.
        seed: of the split, the weights, the order and the shifts.
        precision: bf16, float32, or auto: bf16 where the hardware multiplies it.
    """

    name: str
    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    routing_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "margin"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    margin_schedule: str = "none"
    reconstruction_weight: float = 0.0
    shift: int = 0
    standardise: Standardise = "none"
    crop: int = 0
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    rotation: float = 0.0
    squeeze: float = 0.0
    erase: int = 0
    test_crops: int = 1
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: Schedule = "exponential"
    decay_rate: float = 1.0
    decay_steps: int = 1000
    warm_up_epochs: float = 0.0
    mixup: float = 0.0
    gradient_clip: float = 0.0
    batch_size: int = 128
    epochs: int = 10
    patience: int = 0
    validation_fraction: float = 0.1
    validation_attribute: str = ""
    choose: Choose = "best"
    seed: int = 0
    precision: str = "auto"

    def __post_init__(self) -> None:
        for key, kind in kinds_of(type(self)).items():
            check_kind(key, getattr(self, key), kind)
        if not isinstance(rule := self.model_options.get("routing", ""), str):
            raise BadInput(
                f"routing in model_options is {rule!r}: name a rule, and give its options in routing_options"
            )
        choices = {"loss": [*LOSSES], "optimizer": [*OPTIMIZERS], "precision": ["auto", *PRECISIONS]}
        choices["margin_schedule"] = ["none", "linear", "official"]
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise BadInput(f"{key} is {getattr(self, key)!r}: use one of {', '.join(allowed)}")
        for key, least in {"batch_size": 1, "epochs": 1, "decay_steps": 1, "patience": 0, "seed": 0}.items():
            if not least <= getattr(self, key) <= LARGEST:
                raise BadInput(f"{key} is {getattr(self, key)}: use {least} or more, at most {LARGEST}")
        for key in ("gradient_clip", "reconstruction_weight", "weight_decay", "warm_up_epochs", "mixup"):
            if not 0 <= getattr(self, key) <= 1e30:
                raise BadInput(f"{key} is {getattr(self, key)}: use 0 or more, at most 1e30")
        for key in ("learning_rate", "decay_rate"):
            if not 0 < getattr(self, key) <= 1e30:
                raise BadInput(f"{key} is {getattr(self, key)}: use a number above 0, at most 1e30")
        if self.mixup and self.reconstruction_weight:
            raise BadInput(
                "mixup and reconstruction_weight are above 0: a mixed image has no one class to be drawn from"
            )
        if self.margin_schedule != "none" and (self.loss != "spread" or "margin" in self.loss_options):
            raise BadInput(
                f"margin_schedule is {self.margin_schedule!r}: it needs loss=spread without a loss.margin; set them, "
                "or set margin_schedule=none"
            )
        kinds = {name: kind for name, kind in kinds_of(LOSSES[self.loss]).items() if name not in ("scores", "target")}
        check_options(f"loss {self.loss}", self.loss_options, kinds)
        preparation = self.preparation()
        changed = preparation.standardise != "none" or preparation.brightness or preparation.contrast
        if self.reconstruction_weight and changed:
            raise BadInput(
                "reconstruction_weight is above 0, but standardise, brightness or contrast take the images out of the "
                "decoder's range [0, 1]: set reconstruction_weight=0, or those to none and 0"
            )

    def plain(self) -> dict[str, Any]:
        """Its settings as JSON gives them back."""
        return json.loads(json.dumps(asdict(self)))

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
