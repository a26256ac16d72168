"""A trained network that is asked in words: image files in, names of classes out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from torchcaps.data import Preparation, read_image
from torchcaps.errors import BadInput
from torchcaps.models import MODELS
from torchcaps.models.pretrained import CONFIG, Pretrained, local_folder, read_config
from torchcaps.options import absent, check_kind, check_options, kinds_of


class Answer(NamedTuple):
    """What a `Classifier` says of some images.

    Arguments:
        class_names: of each image, the name of the class with the highest score.
        scores: ``[N, K]``, activations of the class capsules in [0, 1], or logits of a network without capsules.
    """

    class_names: list[str]
    scores: Float[Tensor, "N K"]


@dataclass(frozen=True)
class Classifier:
    """A network, the names of its classes, and how images are prepared for it.

    `torchcaps train` leaves one in its run folder; `from_pretrained` loads it, and `predict` then gives the scores of
    the command `torchcaps predict`, bit for bit.

    Arguments:
        model: a network of `MODELS`.
        class_names: in the order of its scores.
        image_shape: (channels, height, width) of the stored images, before the preparation crops them.
        preparation: how stored images become the network's input.

    Example:
        >>> import tempfile
        >>> from torchcaps import CapsNet
        >>> network = CapsNet((1, 20, 20), 2, convolution_channels=8, primary_types=2)
        >>> classifier = Classifier(network, ("cat", "dog"), (1, 20, 20), Preparation())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     classifier.save_pretrained(folder)
        ...     again = Classifier.from_pretrained(folder)
        >>> again.predict(torch.zeros(3, 1, 20, 20, dtype=torch.uint8)).scores.shape
        torch.Size([3, 2])
    """

    model: nn.Module
    class_names: Sequence[str]
    image_shape: tuple[int, int, int]
    preparation: Preparation

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model.safetensors and config.json; other files in the folder are left alone.

        Raises:
            BadInput: see `Pretrained.save_pretrained`.
        """
        assert isinstance(self.model, Pretrained)
        images = {
            "shape": list(self.image_shape),
            "class_names": list(self.class_names),
            "preparation": asdict(self.preparation),
        }
        self.model.save_pretrained(folder, images=images)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None, **changes: Any
    ) -> "Classifier":
        """Load a classifier as it was saved.

        Arguments:
            source: a folder made by `torchcaps train` or `save_pretrained`, or a repository on the Hugging Face Hub.
            revision, token, changes: see `Pretrained.from_pretrained`.

        Raises:
            BadInput: see `Pretrained.from_pretrained`; or the network was saved without class names and preparation.
        """
        folder = local_folder(source, revision, token)
        config = read_config(folder)
        path = folder / CONFIG
        if config.model not in MODELS:
            raise BadInput(f"{path} names the unknown model {config.model!r}: one of {', '.join(MODELS)} is known")
        said = config.images
        if said is None:
            raise BadInput(f"{folder} holds a network without class names and preparation: save a Classifier there")
        try:
            if set(said) != {"shape", "class_names", "preparation"}:
                raise BadInput("images must hold shape, class_names and preparation")
            check_kind("shape", said["shape"], tuple[int, int, int])
            check_kind("class_names", said["class_names"], Sequence[str])
            check_kind("preparation", said["preparation"], dict[str, Any])
            kinds = kinds_of(Preparation)
            check_options("preparation", said["preparation"], kinds)
            if missing := absent("preparation", kinds, said["preparation"]):
                raise BadInput(f"preparation lacks {missing[0]!r}")
            preparation = Preparation(**said["preparation"])
            shape = preparation.image_shape(tuple(said["shape"]))
        except BadInput as error:
            raise BadInput(f"{path} is damaged ({error}): save the classifier again") from error
        model = MODELS[config.model].from_pretrained(folder, **changes)  # type: ignore[attr-defined]
        if shape != tuple(model.options["image_shape"]) or len(said["class_names"]) != model.options["num_classes"]:
            raise BadInput(f"{path}: its images and classes are not those of its network; save the classifier again")
        return cls(model.eval(), tuple(said["class_names"]), tuple(said["shape"]), preparation)

    def predict(
        self, images: str | Path | Sequence[str | Path] | UInt8[Tensor, "N C H W"] | UInt8[np.ndarray, "N C H W"]
    ) -> Answer:
        """Name the class of each image. Images are taken one by one: an answer does not depend on its neighbours.

        Arguments:
            images: paths of image files, read and resized as `torchcaps predict` does; or pixels of 0 to 255 as uint8,
                of the classifier's ``image_shape``.

        Raises:
            BadInput: a file cannot be read as an image, pixels are not uint8 or of another shape, or there are none.
        """
        if isinstance(images, str | Path):
            images = [images]
        if isinstance(images, np.ndarray):
            images = torch.from_numpy(np.ascontiguousarray(images))
        pixels = self._checked(images) if isinstance(images, Tensor) else (self._read(Path(path)) for path in images)
        device = next(self.model.parameters()).device
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                views = (self.preparation.views(one[None])[:, 0].to(device) for one in pixels)
                scores = [self.model(several).scores.float().mean(dim=0).cpu() for several in views]
        finally:
            self.model.train(was_training)
        if not scores:
            raise BadInput("there are no images: give at least one")
        best = torch.stack(scores).argmax(dim=1).tolist()
        return Answer([self.class_names[index] for index in best], torch.stack(scores))

    def _checked(self, pixels: Tensor) -> Tensor:
        if pixels.dtype != torch.uint8 or pixels.shape[1:] != self.image_shape:
            kind = str(pixels.dtype).removeprefix("torch.")
            raise BadInput(
                f"images are {kind} of shape {list(pixels.shape)}: give uint8 of shape [N, "
                f"{', '.join(map(str, self.image_shape))}], pixels of 0 to 255, or paths of files"
            )
        return pixels

    def _read(self, path: Path) -> Tensor:
        """A file as the classifier's training read it; a network of stereo pairs sees it with both eyes."""
        channels, height, width = self.image_shape
        return read_image(path, 3 if channels == 3 else 1, (height, width)).expand(channels, -1, -1)
