"""How every model is saved and loaded."""

import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, PyTorchModelHubMixin
from safetensors import SafetensorError

from torchcaps.capsules import Prediction as Prediction
from torchcaps.errors import BadInput


class Pretrained(PyTorchModelHubMixin):
    """`save_pretrained` and `from_pretrained`: weights as safetensors, options as config.json; loading is strict."""

    def _save_pretrained(self, save_directory: Path) -> None:
        super()._save_pretrained(save_directory)
        mask = os.umask(0)
        os.umask(mask)
        (save_directory / "model.safetensors").chmod(0o666 & ~mask)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, strict: bool = True, **options: Any) -> "Pretrained":
        folder = Path(model_id)
        if folder.is_dir() and not (folder / "model.safetensors").is_file():
            raise BadInput(f"{folder} holds no model.safetensors: name a folder made by save_pretrained or `train`")
        try:
            with redirect_stdout(StringIO()):
                return super()._from_pretrained(model_id=model_id, strict=strict, **options)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInput(f"the weights in {model_id} are not those of this {cls.__name__}: {reason}") from error
        except SafetensorError as error:
            raise BadInput(f"{folder / 'model.safetensors'} is damaged ({error}): save it again") from error

    def generate_model_card(self, *arguments: Any, **options: Any) -> ModelCard:
        name = type(self).__name__
        return ModelCard(
            f"---\nlibrary_name: torchcaps\n---\n# {name}\n\n`torchcaps.{name}.from_pretrained` loads it.\n"
        )

    @classmethod
    def _load_as_pickle(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        raise BadInput(f"{model_file} is a pickle, which can run code: only model.safetensors is loaded")


def check_image_shape(network: str, image_shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """The shape (channels, height, width) as given, unless the network's kernels do not fit into it.

    Raises:
        BadInput: not (channels, height, width), or height or width below ``smallest``.
    """
    if len(image_shape) != 3 or image_shape[0] < 1:
        raise BadInput(f"image_shape must be (channels, height, width); got {tuple(image_shape)}")
    channels, height, width = image_shape
    if min(height, width) < smallest:
        raise BadInput(
            f"images of {height}×{width} are too small for {network}: its kernels need at least "
            f"{smallest}×{smallest}; resize them (data.image_size={smallest} or more)"
        )
    return channels, height, width
