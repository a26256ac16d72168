"""`Recipe`: the settings of a training run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from torchcaps.checks import MOST_ITERATIONS, check_choice, check_integer, check_number
from torchcaps.data import Preprocessing
from torchcaps.data.preprocessing import Standardise
from torchcaps.environment import made_by_intel
from torchcaps.errors import BadInput
from torchcaps.losses import LOSSES, NOT_SETTINGS
from torchcaps.options import check_kind, check_options, kinds_of, plain_options

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "radam": torch.optim.RAdam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
"""Name → optimiser. ``sgd`` has momentum 0.9."""
FUSED = ("adam", "adamw", "sgd")
"""Optimisers with a fused kernel, which updates all weights at once.

Training with gradient clipping does not use the fused kernel, because Lightning does not support both together.
"""
LARGEST = 2**53
"""Largest integer in a recipe. Every JSON reader represents integers up to this value exactly."""
Schedule = Literal["exponential", "cosine"]
Choose = Literal["best", "last"]
ClassWeights = Literal["none", "balanced"]
MarginSchedule = Literal["none", "linear", "official"]
Precision = Literal["auto", "bf16", "float32"]
PRECISIONS = {"bf16": "bf16-mixed", "float32": "32-true"}


@dataclass(frozen=True)
class Recipe:
    """All settings of a training run: model, data, loss, augmentation, optimiser and schedule. Immutable.

    Arguments:
        name: name of the recipe.
        model: name of the network, a key of `MODELS`.
        data: name of a dataset, a key of `DATASETS`, or the path of a folder or table of images.
        model_options: arguments of the model. Image shape and number of classes come from the data and are not given
            here. The entry ``routing`` is the name of a routing rule; without this entry, the model uses its default
            rule.
        routing_options: arguments of the routing rule.
        data_options: arguments of the dataset's loader.
        pretrained: folder of weights with which the training starts; if empty, the initial weights are random. A
            tensor is loaded if its name and shape match a tensor of the model. There is one exception: tensors whose
            shape depends on the number of classes are loaded only if the weights were trained on the same classes. The
            same number of classes is not enough.
        loss: name of the loss, a key of `LOSSES`.
        loss_options: arguments of the loss.
        class_weights: ``none``, or ``balanced`` to multiply each image's loss by a weight that is inversely
            proportional to the number of training images of its class. The reconstruction loss is not weighted. With
            ``balanced``, the best epoch is the one with the highest mean recall of the classes.
        margin_schedule: schedule of the margin of the spread loss: ``none``, ``linear`` or ``official``. ``none`` keeps
            the margin constant. ``linear`` raises the margin from 0.2 to 0.9 over the training. ``official`` is the
            schedule in the code of Hinton, Sabour & Frosst 2018: 0.2 + 0.79 σ(min(10, step / 50,000 - 4)) with the
            logistic function σ.
        reconstruction_weight: factor of the summed squared reconstruction error, at least 0; 0 is off.
        shift, standardise, crop, flip, brightness, contrast, rotation, squeeze, erase, elastic, test_crops:
            arguments of `torchcaps.Preprocessing`, which describes them.
        early_iterations: number of routing iterations in the first `early_epochs` epochs of training, in every layer
            whose rule has iterations. Validation and test always use the rule's own number.
        early_epochs: number of epochs at the start of training that use `early_iterations`. It must be less than
            ``epochs``; 0 is off.
        optimizer: name of the optimiser: ``adam``, ``adamw``, ``radam`` or ``sgd`` (with momentum 0.9).
        learning_rate: initial learning rate, above 0.
        weight_decay: weight decay of the optimiser, at least 0.
        schedule: schedule of the learning rate, ``exponential`` or ``cosine``. ``exponential`` multiplies the initial
            learning rate by decay_rate^(step / decay_steps); ``cosine`` lowers it along half a cosine, so that it would
            be 0 after the last step.
        decay_rate: factor by which the exponential schedule multiplies the learning rate every ``decay_steps`` steps,
            above 0.
        decay_steps: number of steps over which the exponential schedule multiplies the learning rate by ``decay_rate``,
            at least 1. The learning rate changes a little in every step. One epoch has as many steps as batches.
        warm_up_epochs: number of epochs at the start of training, at least 0, in which the scheduled learning rate is
            multiplied by a factor that rises linearly to 1. The factor is (step + 1) / W, where W is the number of
            steps in these epochs and the first step is 0.
        mixup: α of mixup (Zhang et al. 2018, arXiv 1710.09412); 0 is off. Each image is mixed with a random image of
            the batch, and the losses for the two images' classes are mixed in the same proportion. The proportion is
            drawn from Beta(α, α) once per batch.
        gradient_clip: largest norm of the gradient; gradients with a larger norm are scaled down to it; 0 is off.
        batch_size: images per step, over all devices together.
        epochs: number of epochs. Each epoch is one pass over all training images.
        batch_norm_images: number of training images, with augmentation, on which the BatchNorm statistics are computed
            before each validation; at most the number of training images. Validation, test and saved weights use these
            statistics instead of the running averages of the training. 0 keeps the running averages. Networks without
            BatchNorm do not change.
        patience: training stops after this number of epochs without a better validation accuracy; 0 is off. With
            ``class_weights="balanced"``, the mean recall of the classes is used instead of the accuracy. If a
            training that stopped early is resumed with more epochs, the count of epochs without improvement starts at 0
            again.
        validation_fraction: share of the training data that is held out for validation, in (0, 0.5]. It has no effect
            if the data has a validation split, or if ``validation_attribute`` is given.
        validation_attribute: attribute that decides which images are held out for validation. For example, the
            attribute ``instance`` of smallNORB is the number of a toy in its class. If empty, images are held out at
            random. Otherwise the seed chooses one value of the attribute per class, and all images of the class with
            this value are held out. With ``instance``, the training split contains none of the toys in the validation
            split and none of the toys in the test split.
        choose: epoch whose weights are kept: ``best`` (the one with the best validation accuracy; of several, the one
            with the lowest validation loss) or ``last``.
        seed: random seed of the validation split, the initial weights, the image order and the augmentation.
        precision: precision of the training: ``bf16``, ``float32`` or ``auto``. ``auto`` uses bf16 on hardware
            that computes convolutions faster in bf16, else float32. On NVIDIA GPUs, PyTorch's default for float32
            convolutions is TF32, which rounds their inputs to about three decimal digits.
        compile: whether to compile the network with `torch.compile` for the training steps. Validation and test do not
            use the compiled network. On a GPU, the network is recorded as CUDA graphs. See
            `torchcaps.compilation.check_compiled`.

    Raises:
        BadInput: a setting has the wrong type or is out of range, or two settings exclude each other.

    Example:
        >>> Recipe("short", "capsnet", "mnist", epochs=2).batch_size
        128
    """

    name: str
    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    routing_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    pretrained: str = ""
    loss: str = "margin"
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    class_weights: ClassWeights = "none"
    margin_schedule: MarginSchedule = "none"
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
    elastic: float = 0.0
    test_crops: int = 1
    early_iterations: int = 1
    early_epochs: int = 0
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
    batch_norm_images: int = 0
    patience: int = 0
    validation_fraction: float = 0.1
    validation_attribute: str = ""
    choose: Choose = "best"
    seed: int = 0
    precision: Precision = "auto"
    compile: bool = False

    def __post_init__(self) -> None:
        for key, kind in kinds_of(type(self)).items():
            object.__setattr__(self, key, _without_numpy(getattr(self, key)))
            check_kind(key, getattr(self, key), kind)
        if not isinstance(rule := self.model_options.get("routing", ""), str):
            raise BadInput(
                f"routing in model_options is {rule!r}: give the name of a rule, and its options in routing_options"
            )
        check_choice("loss", self.loss, LOSSES, BadInput)
        check_choice("optimizer", self.optimizer, OPTIMIZERS, BadInput)
        least_of = {"batch_size": 1, "epochs": 1, "decay_steps": 1, "patience": 0, "seed": 0, "early_epochs": 0}
        for key, least in least_of.items():
            check_integer(key, getattr(self, key), least, error=BadInput)
            self._check_cap(key, LARGEST)
        for key in ("gradient_clip", "reconstruction_weight", "weight_decay", "warm_up_epochs", "mixup"):
            check_number(key, getattr(self, key), "[0, inf)", BadInput)
            self._check_cap(key, 1e30)
        for key in ("learning_rate", "decay_rate"):
            check_number(key, getattr(self, key), "(0, inf)", BadInput)
            self._check_cap(key, 1e30)
        if (images := self.batch_norm_images) < 0 or images == 1:
            raise BadInput(f"batch_norm_images must be 0 or an integer of at least 2; got {images}")
        self._check_cap("batch_norm_images", LARGEST)
        check_integer("early_iterations", self.early_iterations, 1, MOST_ITERATIONS, BadInput)
        if self.early_epochs and self.early_epochs >= self.epochs:
            raise BadInput(f"early_epochs must be smaller than epochs={self.epochs}; got {self.early_epochs}")
        if self.mixup and self.reconstruction_weight:
            raise BadInput(
                "mixup and reconstruction_weight are both above 0, but the decoder reconstructs a single class: "
                "set one of them to 0"
            )
        if self.margin_schedule != "none" and (self.loss != "spread" or "margin" in self.loss_options):
            raise BadInput(
                f"margin_schedule is {self.margin_schedule!r}, which works only with loss=spread and no loss.margin: "
                "set loss=spread and remove loss.margin, or set margin_schedule=none"
            )
        kinds = {name: kind for name, kind in kinds_of(LOSSES[self.loss]).items() if name not in NOT_SETTINGS}
        check_options(f"loss {self.loss}", self.loss_options, kinds)
        if self.class_weights != "none" and "sample_weights" not in kinds_of(LOSSES[self.loss]):
            raise BadInput(
                f"class_weights is {self.class_weights!r}, but loss {self.loss} has no argument sample_weights: set "
                "class_weights=none"
            )
        preprocessing = self.preprocessing()
        changed = preprocessing.standardise != "none" or preprocessing.brightness or preprocessing.contrast
        if self.reconstruction_weight and changed:
            raise BadInput(
                "reconstruction_weight is above 0, but standardise, brightness or contrast move pixels out of the "
                "decoder's range [0, 1]: set reconstruction_weight=0, or standardise=none, brightness=0 and contrast=0"
            )

    def _check_cap(self, key: str, most: int | float) -> None:
        if (value := getattr(self, key)) > most:
            raise BadInput(f"{key} must be at most {most:,}; got {value}")

    def plain(self) -> dict[str, Any]:
        """Return the settings as a dict of JSON values, in which tuples have become lists."""
        return plain_options(f"recipe {self.name}", asdict(self))

    def by_name(self) -> dict[str, Any]:
        """Return the settings by their names in `create_recipe`, such as ``routing.iterations``."""
        found: dict[str, Any] = {}
        for key, value in self.plain().items():
            group, options, _ = key.partition("_options")
            found |= {f"{group}.{name}": one for name, one in value.items()} if options else {key: value}
        return found

    def preprocessing(self) -> Preprocessing:
        """Return the image preprocessing that the settings describe."""
        return Preprocessing.of(vars(self))


def _without_numpy(value: Any) -> Any:
    """Convert NumPy scalars, also inside dicts and lists, to Python numbers."""
    if isinstance(value, Mapping):
        return {key: _without_numpy(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    return value.item() if isinstance(value, np.generic) else value


def create_optimizer(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Create the optimiser of a recipe, with a fused kernel if there is one."""
    fused = {"fused": True} if recipe.optimizer in FUSED and not recipe.gradient_clip else {}
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, **fused}
    return OPTIMIZERS[recipe.optimizer](parameters, **options)


def batch_starts(images: int, batch_size: int) -> range:
    """Return the index of the first image of each batch of an epoch.

    If the last batch would contain only one image, this image is added to the previous batch, because BatchNorm can
    fail on a single image.

    Arguments:
        images: number of images in the split.
        batch_size: images per batch.

    Example:
        >>> [*batch_starts(9, 4)], [*batch_starts(10, 4)], [*batch_starts(1, 4)]
        ([0, 4], [0, 4, 8], [0])
    """
    return range(0, max(1, images - 1) if batch_size > 1 else images, batch_size)


def resolve_precision(precision: Precision) -> Literal["bf16", "float32"]:
    """Resolve ``auto`` to bf16 on hardware that computes convolutions faster in bf16, else to float32.

    Convolutions are faster in bf16 on NVIDIA GPUs with native bf16, on CPUs with AMX, and on AMD CPUs with AVX512-BF16.
    On Intel CPUs with AVX512-BF16 but without AMX, they are slower in bf16, so ``auto`` is float32. The default dtype
    of PyTorch is checked too.

    Arguments:
        precision: auto, bf16 or float32. Both bf16 and float32 are returned unchanged.

    Raises:
        BadInput: `precision` is not auto, bf16 or float32, or PyTorch creates parameters in another dtype than float32.
    """
    if torch.get_default_dtype() != torch.float32:
        raise BadInput(
            f"PyTorch's default dtype is {torch.get_default_dtype()}, but networks are trained with parameters in "
            "float32: call torch.set_default_dtype(torch.float32)"
        )
    check_choice("precision", precision, get_args(Precision), BadInput)
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        avx512_bf16 = torch.cpu._is_avx512_bf16_supported() and not made_by_intel()
        faster = avx512_bf16 or torch.cpu._is_amx_tile_supported()
    return "bf16" if faster else "float32"
