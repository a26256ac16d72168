"""`CapsuleClassifier`: a capsule network as a scikit-learn classifier of image arrays."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.devices import clear_memory_errors
from torchcaps.errors import BadInput, Diverged, first_line
from torchcaps.losses import LOSSES, check_loss
from torchcaps.models import create_model, model_class
from torchcaps.options import kinds_of
from torchcaps.recipe import Recipe, batch_starts, create_optimizer
from torchcaps.routing import Routing
from torchcaps.threads import Lock

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state, compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("torchcaps.sklearn needs scikit-learn: pip install 'torchcaps[sklearn]'") from error

Estimator = TypeVar("Estimator", bound="CapsuleClassifier")
SMALL = {"channels": (16, 32, 32, 64)}
"""Options of the default network. It suits small images and has less than a third of the parameters of
Efficient-CapsNet (48,656 instead of 161,824 for ten classes of 28×28 images)."""
_RANDOM_NUMBERS = Lock()
SMALLEST = 11
"""Height and width to which smaller images are padded: the smallest size that the default network accepts."""


class CapsuleClassifier(ClassifierMixin, BaseEstimator):
    """Capsule network with the interface of scikit-learn, for arrays of images.

    The default network is a small Efficient-CapsNet (Mazzia, Salvetti & Chiaberge 2021). Training uses Adam with a
    cosine schedule of the learning rate, and no augmentation. Pixels are converted to float32. They may have any scale:
    the mean of all training pixels is subtracted, and the result is divided by their standard deviation. Images smaller
    than 11×11 are padded with this mean.

    The activations of class capsules are not calibrated probabilities, so there is no ``predict_proba``. For
    probabilities, use ``sklearn.calibration.CalibratedClassifierCV``.

    Arguments:
        routing: rule of the capsule layers: a name in `ROUTINGS`, or a `Routing` (name and options). None for the
            default rule of the model.
        model: a key of `MODELS`.
        model_options: arguments of the model, except image shape, number of classes and routing. If None, the
            default model gets ``channels=(16, 32, 32, 64)``, and any other model gets its default arguments. A model
            gets a decoder only if the options contain ``decoder=True``.
        loss: a key of `LOSSES`. The default suits every routing rule. For networks whose scores are logits, such as
            ``baseline-cnn``, use ``cross_entropy``.
        epochs: number of passes over the training images, at least 1.
        batch_size: images per step, at least 2.
        learning_rate: initial learning rate, above 0.
        class_weight: weight of each class: None (1 for every class), ``"balanced"`` (inversely proportional to the
            number of images of the class), or a mapping from class to weight. The loss of an image is multiplied by the
            weight of its class.
        image_shape: (height, width) or (height, width, channels) of the images. Needed only if X is flat,
            ``[N, features]``, or if images of height 1, 3 or 4 have more than four channels. One of the sizes may be
            -1; it is then computed from the number of features. For example, ``(1, -1)`` makes each row of X an image
            of height 1.
        device: device on which `fit` trains the network, such as ``"cpu"`` or ``"cuda"``. In a pickle, the network is
            on the CPU, and so is the network in a copy of the estimator.
        random_state: seed of the initial weights and the order of the images: None, an integer or a ``RandomState``.
        verbose: print the loss of each epoch.

    Attributes:
        classes_: the classes, sorted.
        model_: the trained network, in evaluation mode.
        image_shape_: (height, width, channels) of the training images.
        mean_, scale_: mean and standard deviation of the training pixels.
        loss_curve_: mean training loss of each epoch.
        n_features_in_: number of columns, if X is flat.

    Raises:
        BadInput: `fit` or a prediction finds that a setting is invalid, or that X or y has a wrong shape or type.
        Diverged: the loss is not finite in `fit`.

    Example:
        >>> X = np.zeros((20, 12, 12))
        >>> X[:10, :, :6] = X[10:, :, 6:] = 1  # ten images bright on the left, ten bright on the right
        >>> y = ["left"] * 10 + ["right"] * 10
        >>> CapsuleClassifier(routing="uniform", epochs=5, random_state=0).fit(X, y).predict(X[8:12])
        array(['left', 'left', 'right', 'right'], dtype='<U5')
    """

    def __init__(
        self,
        routing: Routing | str | None = None,
        *,
        model: str = "efficient-capsnet",
        model_options: Mapping[str, Any] | None = None,
        loss: str = "activation_logit_cross_entropy",
        epochs: int = 20,
        batch_size: int = 32,
        learning_rate: float = 3e-3,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        image_shape: Sequence[int] | None = None,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.routing = routing
        self.model = model
        self.model_options = model_options
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.class_weight = class_weight
        self.image_shape = image_shape
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    @clear_memory_errors("use a smaller batch_size, or free memory")
    def fit(self: Estimator, X: Any, y: Any) -> Estimator:
        """Train a new network.

        Arguments:
            X: images ``[N, height, width]``, ``[N, height, width, channels]``, or flat ``[N, features]`` with
                ``image_shape``; numbers of any scale.
            y: classes ``[N]``: numbers, strings or booleans.
        """
        self.__dict__.pop("model_", None)  # after an error, the estimator is not fitted
        recipe = self._recipe()
        if y is None:
            raise BadInput("fit requires y to be passed, but the target y is None: give the class of each image")
        X, y = self._validated(X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise BadInput(f"y has only one class, {self.classes_.tolist()[0]!r}: give images of at least two classes")
        weight = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        if not (np.isfinite(weight).all() and weight.min() >= 0 < weight.max()):
            raise BadInput(f"class_weight must be finite numbers of at least 0, not all 0; got {self.class_weight!r}")
        weights = None if self.class_weight is None else torch.from_numpy(weight[labels]).float()
        X = self._images(X)
        self.image_shape_ = X.shape[1:]
        self.mean_, self.scale_ = float(X.mean(dtype=np.float64)), float(X.std(dtype=np.float64)) or 1.0
        images = self._preprocessed(X)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        try:
            device = torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:
            raise BadInput(f"device is {self.device!r}, which cannot be used: {first_line(error)}") from error
        with _seeded(seed, device):
            with torch.device("cpu"):  # the initial weights do not depend on the device
                network = self._network(images.shape[1:], recipe)
            network = network.to(device, torch.float32)
            self.loss_curve_ = _train(network, images, torch.from_numpy(labels), weights, recipe, self.verbose)
        self.model_ = network.eval()
        return self

    @clear_memory_errors("free memory, or move the network from the GPU to the CPU: model_.cpu()")
    def decision_function(self, X: Any) -> np.ndarray:
        """Compute the score of each class: an activation in [0, 1], or a logit if ``model_.logits`` is True.

        The scores rank the classes; they are not calibrated probabilities.

        Arguments:
            X: images of the shape of the training images.

        Returns:
            ``[N, K]``, in the order of ``classes_``. With two classes, the result is ``[N]``: the score of the second
            class minus the score of the first.
        """
        check_is_fitted(self)
        X = self._images(self._validated(X))
        if X.shape[1:] != self.image_shape_:
            raise BadInput(f"X has images of shape {X.shape[1:]}: give images of shape {self.image_shape_}, as in fit")
        images = self._preprocessed(X)
        device = next(self.model_.parameters()).device
        with torch.inference_mode():
            parts = [self.model_(part.to(device)).scores.cpu().double() for part in images.split(64)]
        scores = torch.cat(parts).numpy()
        finite = np.isfinite(scores).all(axis=1)
        if not finite.any():
            raise Diverged(
                f"the scores of all {len(X)} images are not finite",
                "scale X as in fit; if X is the training data, fit again with a lower learning_rate",
            )
        if not finite.all():
            raise BadInput(
                f"the scores of image {finite.argmin()} of X are not finite (its values range from "
                f"{X[finite.argmin()].min():g} to {X[finite.argmin()].max():g}, and the training images have mean "
                f"{self.mean_:g} and standard deviation {self.scale_:g}): leave the image out, or scale it as in fit"
            )
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> np.ndarray:
        """Return the class with the highest score for each image.

        Arguments:
            X: images of the shape of the training images.
        """
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the network on the CPU, so that a computer without a GPU can load a pickle."""
        state = {**super().__getstate__()}  # without a copy, this is the dictionary of the estimator itself
        if "model_" in state and next(self.model_.parameters()).device.type != "cpu":
            state["model_"] = deepcopy(self.model_).cpu()
        return state

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = self.image_shape is not None
        tags.input_tags.three_d_array = True
        return tags

    def _recipe(self) -> Recipe:
        """Check the settings by building a `Recipe`, which raises `BadInput` for an invalid setting."""
        names = ("model", "loss", "epochs", "batch_size", "learning_rate")
        settings = {name: getattr(self, name) for name in names}
        settings = {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}
        recipe = Recipe("estimator", data="", schedule="cosine", **settings)
        if recipe.batch_size < 2:
            raise BadInput("batch_size must be at least 2; got 1: BatchNorm needs several images")
        return recipe

    def _validated(self, X: Any, y: Any = None) -> Any:
        """Check X (and in `fit` also y) with scikit-learn, and convert X to float32."""
        several = (getattr(X, "ndim", None) or np.asarray(X).ndim) > 2
        given = {"X": X} if y is None else {"X": X, "y": y}
        return validate_data(
            self, **given, reset=y is not None, dtype=np.float32, order="C", ensure_2d=not several, allow_nd=several
        )

    def _images(self, X: np.ndarray) -> np.ndarray:
        """Return X as ``[N, height, width, channels]``."""
        flat = X.ndim == 2
        if flat:
            if self.image_shape is None:
                raise BadInput(f"X is flat, {list(X.shape)}: give image_shape=(height, width), or X [N, height, width]")
            try:
                X = X.reshape(len(X), *self.image_shape)
            except (TypeError, ValueError) as error:
                raise BadInput(
                    f"image_shape is {self.image_shape!r}, but X has {X.shape[1]} columns: give (height, width) or "
                    "(height, width, channels) whose product is the number of columns"
                ) from error
        if X.ndim == 3:
            X = X[..., None]
        if X.ndim != 4:
            raise BadInput(f"X has shape {list(X.shape)}: give [N, height, width] or [N, height, width, channels]")
        height, width, channels = X.shape[1:]
        shape = (height, width, channels)
        given = None if flat or self.image_shape is None else tuple(np.ravel(self.image_shape))
        stated = flat or given == shape
        if height in (1, 3, 4) and channels > 4 and not stated:
            raise BadInput(
                f"the images have shape {shape}, which looks like channels first: give (height, width, channels), "
                f"such as X.transpose(0, 2, 3, 1); if the shape is right, set image_shape={shape}"
            )
        if given not in (None, shape, shape[:2]):
            raise BadInput(
                f"image_shape is {self.image_shape!r}, but the images of X have shape {shape}: give images of shape "
                "image_shape, or fit without image_shape"
            )
        return X

    def _preprocessed(self, X: np.ndarray) -> Tensor:
        """Scale the images, and pad small images on all sides; returns ``[N, channels, height, width]``."""
        images = torch.from_numpy((X - self.mean_) / self.scale_).float().movedim(3, 1)
        missing = [max(0, SMALLEST - side) for side in images.shape[2:]]
        sides = [part for more in reversed(missing) for part in (more // 2, more - more // 2)]
        return functional.pad(images, sides).contiguous(memory_format=torch.channels_last)

    def _network(self, image_shape: Sequence[int], recipe: Recipe) -> nn.Module:
        kind = model_class(recipe.model)
        small = SMALL if recipe.model == "efficient-capsnet" else {}
        options = dict(small if self.model_options is None else self.model_options)
        for name in ("image_shape", "num_classes"):
            if name in options:
                raise BadInput(f"model_options contains {name}, which comes from X and y: leave it out")
        if "decoder" in kinds_of(kind):
            options.setdefault("decoder", False)
        if self.routing is not None:
            options["routing"] = self.routing
        network: Any = create_model(recipe.model, image_shape=image_shape, num_classes=len(self.classes_), **options)
        check_loss(recipe.loss, recipe.model, network.logits)
        return network


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of the CPU and of one device. At the end, set back those of the CPU and of an NVIDIA GPU.

    Other GPUs keep their random numbers. All threads share the random numbers, so only one thread at a time can run the
    block.
    """
    gpus = [device.index] if device.type == "cuda" else []
    with _RANDOM_NUMBERS, torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        if device.type == "mps":
            torch.mps.manual_seed(seed)
        yield


def _train(
    network: nn.Module, images: Tensor, labels: Tensor, weights: Tensor | None, recipe: Recipe, verbose: bool
) -> list[float]:
    """Train a network in place, and return the mean loss of each epoch."""
    device = next(network.parameters()).device
    starts = batch_starts(len(images), recipe.batch_size)
    optimizer = create_optimizer(recipe, network.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * len(starts))
    curve: list[float] = []
    for epoch in range(recipe.epochs):
        total = 0.0
        for batch in torch.randperm(len(images), device="cpu").tensor_split([*starts][1:]):
            scores = network(images[batch].to(device)).scores
            options = {} if weights is None else {"sample_weights": weights[batch].to(device)}
            loss = LOSSES[recipe.loss](scores, labels[batch].to(device), **options)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
            if not math.isfinite(total):
                raise Diverged(f"the loss is not finite in epoch {epoch + 1}", cure="use a lower learning_rate")
        curve.append(total / len(images))
        if verbose:
            print(f"epoch {epoch + 1}/{recipe.epochs}  loss {curve[-1]:.6f}", flush=True)
    return curve
