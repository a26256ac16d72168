"""`Classifier`: a trained network with its image preprocessing, which predicts class names for image files."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from io import IOBase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from torchcaps.checks import check_choice, check_integer, check_shape, described
from torchcaps.data import Preprocessing
from torchcaps.data.image_file import Resize, read_for_network
from torchcaps.data.images import checked_names
from torchcaps.devices import clear_memory_errors
from torchcaps.errors import BadInput, Diverged
from torchcaps.models import MODELS
from torchcaps.models.pretrained import CONFIG, Pretrained, local_folder, read_config, upload
from torchcaps.options import NEWER, absent, check_kind, check_options, kinds_of
from torchcaps.threads import evaluating

OwnClassifier = TypeVar("OwnClassifier", bound="Classifier")


def check_finite(scores: Tensor, model: nn.Module, cure: str = "train the network again") -> None:
    """Raise `Diverged` if the scores of a model contain NaN or Inf."""
    if not torch.isfinite(scores).all():
        wrong = (name for name, weights in model.named_parameters() if not torch.isfinite(weights).all())
        raise Diverged(
            "the network returned scores that are not finite (first weights that are not finite: "
            f"{next(wrong, 'none')})",
            cure=cure,
        )


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the network that ``torch.compile`` has wrapped, or the network itself if it is not compiled."""
    return getattr(model, "_orig_mod", model)


class Answer(NamedTuple):
    """Predicted class names and scores of images, as `Classifier.predict` returns them.

    Arguments:
        predicted_classes: for each image, the name of the class with the highest score.
        scores: ``[images, classes]``: activations in [0, 1], or logits if ``model.logits`` is True.
    """

    predicted_classes: list[str]
    scores: Float[Tensor, "images classes"]


@dataclass(frozen=True)
class Classifier:
    """A network with its class names and image preprocessing.

    `torchcaps train` saves a classifier in the run folder, and `from_pretrained` loads that classifier. The method
    `predict` and the command `torchcaps predict` compute bit-identical scores.

    Arguments:
        model: a network of `MODELS`.
        class_names: class names, in the order of the model's scores.
        image_shape: (channels, height, width) of the images before the preprocessing, which may crop them.
        preprocessing: converts the images to the model's input.
        resize: how image files of another aspect ratio are resized to ``image_shape``, as for
            `torchcaps.data.read_image`: "stretch", "crop" or "pad".

    Raises:
        BadInput: an argument has the wrong type; a class name is not a string; the number of class names is not the
            model's number of classes; or ``resize`` is unknown.

    Example:
        >>> import tempfile
        >>> from torchcaps import CapsNet
        >>> network = CapsNet((1, 20, 20), 2, convolution_channels=8, primary_types=2)
        >>> classifier = Classifier(network, ("cat", "dog"), (1, 20, 20), Preprocessing())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     classifier.save_pretrained(folder)
        ...     again = Classifier.from_pretrained(folder)
        >>> again.predict(torch.zeros(3, 1, 20, 20, dtype=torch.uint8)).scores.shape
        torch.Size([3, 2])
    """

    model: nn.Module
    class_names: Sequence[str]
    image_shape: tuple[int, int, int]
    preprocessing: Preprocessing
    resize: Resize = "stretch"

    def __post_init__(self) -> None:
        for name, kind in (("model", nn.Module), ("preprocessing", Preprocessing)):
            if not isinstance(getattr(self, name), kind):
                raise BadInput(f"{name} must be an instance of {kind.__name__}; got {described(getattr(self, name))}")
        check_shape("image_shape", self.image_shape, "channels, height, width", BadInput)
        object.__setattr__(self, "image_shape", tuple(self.image_shape))
        object.__setattr__(self, "class_names", checked_names(self.class_names))
        check_choice("resize", self.resize, get_args(Resize), BadInput)
        classes = getattr(self.model, "options", {}).get("num_classes", len(self.class_names))
        if len(self.class_names) != classes:
            raise BadInput(
                f"class_names has {len(self.class_names)} names, but the model has {classes} classes: give one name "
                "per class"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json. Other files in the folder are left alone.

        Arguments:
            folder: folder to write to; created if absent.

        Raises:
            BadInput: the model is not a network of torchcaps, one of its routing rules is not in `ROUTINGS`, the
                network was created for images of another shape, an option cannot be written as JSON, or a file cannot
                be written.
        """
        model = uncompiled(self.model)
        if not isinstance(model, Pretrained):
            raise BadInput(
                f"{type(model).__name__} cannot be saved: use a network of torchcaps, or save its state_dict()"
            )
        preprocessed = self.preprocessing.image_shape(self.image_shape)
        expected = tuple(model.options.get("image_shape", preprocessed))
        if preprocessed != expected:
            raise BadInput(
                f"images of shape {self.image_shape} have the shape {preprocessed} after preprocessing, but the "
                f"network was created for {expected}: create it with image_shape={preprocessed}"
            )
        images = {
            "shape": list(self.image_shape),
            "class_names": list(self.class_names),
            "preprocessing": asdict(self.preprocessing),
            "resize": self.resize,
        }
        model.save_pretrained(folder, images=images)

    def push_to_hub(self, repository: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the classifier to the Hugging Face Hub and return the URL. `from_pretrained` loads it from there.

        Arguments:
            repository: ``"owner/name"``; created if it does not exist.
            private: whether a new repository is private.
            token: access token; the token of ``hf auth login`` by default.

        Raises:
            BadInput: the classifier cannot be saved, as for `save_pretrained`.
        """
        return upload(self.save_pretrained, repository, private, token)

    @classmethod
    def from_pretrained(
        cls: type[OwnClassifier],
        source: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        **changes: Any,
    ) -> OwnClassifier:
        """Load a saved classifier in evaluation mode.

        Arguments:
            source: a folder made by `torchcaps train` or `save_pretrained`, or a repository on the Hugging Face Hub,
                as ``"owner/name"``.
            revision: branch, tag or commit of the repository.
            token: access token for the repository.
            changes: model options that replace the saved options, such as ``im2col=True``.

        Raises:
            BadInput: the folder or repository does not exist; a file is missing or damaged; an option is unknown; or
                the network was saved alone, that is, without class names and image preprocessing.
        """
        folder = local_folder(source, revision, token)
        config = read_config(folder)
        path = folder / CONFIG
        if config.model not in MODELS:
            raise BadInput(
                f"{path} names the unknown model {config.model!r}: import the module that adds this model to "
                f"torchcaps.MODELS, or, {NEWER}; known models are {', '.join(MODELS)}"
            )
        saved = config.images
        if saved is None:
            raise BadInput(
                f"{folder} contains only a network, without class names and image preprocessing: save the network with "
                "Classifier.save_pretrained"
            )
        try:
            saved = {"resize": "stretch", **saved}  # earlier versions did not save this entry
            if set(saved) != {"shape", "class_names", "preprocessing", "resize"}:
                raise BadInput("the entry 'images' must contain exactly shape, class_names, preprocessing and resize")
            check_kind("shape", saved["shape"], tuple[int, int, int])
            check_kind("class_names", saved["class_names"], Sequence[str])
            check_kind("preprocessing", saved["preprocessing"], dict[str, Any])
            check_kind("resize", saved["resize"], Resize)
            kinds = kinds_of(Preprocessing)
            check_options("preprocessing", saved["preprocessing"], kinds, saved=True)
            if missing := absent("preprocessing", kinds, saved["preprocessing"]):
                raise BadInput(f"preprocessing lacks {missing[0]!r}")
            preprocessing = Preprocessing(**saved["preprocessing"])
            shape = preprocessing.image_shape(tuple(saved["shape"]))
        except BadInput as error:
            raise BadInput(f"{path} is damaged ({error}): save the classifier again") from error
        model = MODELS[config.model].from_pretrained(folder, **changes)
        classes, options = len(saved["class_names"]), model.options
        if shape != tuple(options.get("image_shape", shape)) or classes != options.get("num_classes", classes):
            raise BadInput(
                f"{path} does not match the network in image shape or class names: save the classifier again"
            )
        return cls(model.eval(), tuple(saved["class_names"]), tuple(saved["shape"]), preprocessing, saved["resize"])

    @clear_memory_errors("free memory, or move the network from the GPU to the CPU: classifier.model.cpu()")
    def predict(
        self,
        images: str | Path | Sequence[str | Path] | UInt8[Tensor, "N C H W"] | UInt8[np.ndarray, "N C H W"],
        batch_size: int = 1,
    ) -> Answer:
        """Predict the class of each image.

        With ``batch_size=1``, the scores of an image do not depend on the other images. Larger batches are several
        times as fast, but can change the scores by rounding errors. Several threads can call this method at the same
        time, but not while another thread trains the network. A process that is forked after a prediction hangs in
        PyTorch if the prediction used several CPU threads: call `predict` only after the fork, or use
        torch.set_num_threads(1).

        Arguments:
            images: the path of an image file; a list of paths; or a uint8 tensor or array ``[N, C, H, W]`` with pixels
                from 0 to 255. Image files are resized to the classifier's ``image_shape``. Images in a tensor or array
                must have this shape.
            batch_size: number of images that the network processes at a time, at least 1.

        Raises:
            BadInput: a file cannot be read as an image; `images` is empty, or neither paths nor pixels; `batch_size` is
                below 1; the pixels have the wrong dtype or shape; another thread trains the network with `fit`; or the
                memory runs out.
            Diverged: a score is not finite.
        """
        if isinstance(images, str | Path):
            images = [images]
        if isinstance(images, np.ndarray):
            images = torch.from_numpy(np.ascontiguousarray(images))
        if not isinstance(images, Tensor):
            given: Any = images
            images = list(given) if isinstance(given, Iterable) and not isinstance(given, bytes | IOBase) else [given]
            if wrong := [one for one in images if not isinstance(one, str | Path)]:
                raise BadInput(f"images must be paths, or uint8 pixels [N, C, H, W]; got {described(wrong[0])}")
        check_integer("batch_size", batch_size, 1, error=BadInput)
        pixels = self._checked(images) if isinstance(images, Tensor) else None
        paths = [Path(path) for path in images] if pixels is None else []
        if not len(images):
            raise BadInput("images is empty: give at least one image")
        weights, scores = next(self.model.parameters()), []
        with evaluating(self.model), torch.inference_mode():
            for first in range(0, len(images), batch_size):
                several = slice(first, first + batch_size)
                part = self._read_all(paths[several]) if pixels is None else pixels[several]
                views = self.preprocessing.views(part).to(weights)
                of_views = self.model(views.flatten(0, 1)).scores.float().unflatten(0, views.shape[:2])
                scores.append(of_views.mean(dim=0).cpu())
        answers = torch.cat(scores)
        if answers.ndim != 2:
            raise BadInput(
                f"the scores of {type(self.model).__name__} must be [B, classes]; got {list(answers.shape)}: call the "
                "network itself, and export it with torch.export or torch.onnx.export"
            )
        check_finite(answers, self.model)
        return Answer([self.class_names[index] for index in answers.argmax(dim=1).tolist()], answers)

    def preprocessed(self, image: str | Path | Tensor | np.ndarray) -> Float[Tensor, "1 C h w"]:
        """Preprocess one image as input of the model.

        Arguments:
            image: the path of an image file; uint8 pixels ``[C, H, W]`` of the classifier's ``image_shape``, as a
                tensor or an array (without crop and with ``model.any_size``, of any height and width); or
                floating-point numbers ``[C, H, W]``, which are used without further preprocessing.

        Raises:
            BadInput: the file cannot be read as an image, or the pixels have the wrong dtype or shape.
        """
        weights = next(self.model.parameters())
        if isinstance(image, np.ndarray):
            image = torch.from_numpy(np.ascontiguousarray(image))
        if isinstance(image, Tensor):
            any_size = getattr(uncompiled(self.model), "any_size", True) and not self.preprocessing.crop
            fixed = image.dtype == torch.uint8 and not any_size
            channels, *size = self.image_shape
            if image.ndim != 3 or image.shape[0] != channels or (fixed and [*image.shape[1:]] != size):
                height, width = size if fixed else ("height", "width")
                expected = f"[{channels}, {height}, {width}]"
                cure = ": remove the batch dimension, as in image[0]" if image.ndim == 4 else ""
                raise BadInput(f"image must have shape {expected}; got {list(image.shape)}{cure}")
            if image.is_floating_point():
                return image[None].detach().to(weights)
            if image.dtype != torch.uint8:
                raise BadInput(f"image must be uint8 or floating-point; got {described(image)}")
            return self.preprocessing.plain(image[None]).to(weights)
        if not isinstance(image, str | Path):
            raise BadInput(f"image must be a path, or pixels [C, H, W]; got {described(image)}")
        return self.preprocessing.plain(self._read_all([Path(image)])).to(weights)

    def _checked(self, pixels: Tensor) -> Tensor:
        if pixels.dtype != torch.uint8 or pixels.shape[1:] != self.image_shape:
            kind = str(pixels.dtype).removeprefix("torch.")
            raise BadInput(
                f"images must be uint8 [N, {', '.join(map(str, self.image_shape))}] with pixels from 0 to 255, or "
                f"paths of image files; got {kind} {list(pixels.shape)}"
            )
        return pixels

    def _read_all(self, paths: Sequence[Path]) -> Tensor:
        return torch.stack([read_for_network(path, self.image_shape, self.resize) for path in paths])
