"""A network of timm with a capsule head."""

import difflib
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Integer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.errors import BadInput, DataWarning, first_line
from torchcaps.models.head import CapsuleHead
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import WEIGHTS, Pretrained, local_folder, read_config
from torchcaps.routing import Routing, Rule


class TimmCapsNet(Pretrained):
    """Capsule network whose backbone is any network of timm (Wightman 2019).

    The capsules are a `CapsuleHead` on a feature map of the backbone. The pixels of input images are in [0, 1]; the
    network subtracts the mean and divides by the standard deviation with which timm trained the backbone. The class
    needs ``pip install 'torchcaps[timm]'``. The initial weights of the backbone are random; `load_backbone` loads
    trained weights.

    Arguments:
        image_shape: (channels, height, width). timm adapts the first convolution to the number of channels.
        num_classes: number of classes.
        backbone: name of a network of timm, such as ``resnet18`` or ``convnext_tiny.fb_in22k``.
        stride: distance between neighbouring positions of the feature map, in image pixels. The last feature map with
            this stride is used.
        freeze_backbone: train only the capsules. Training changes neither the weights nor the BatchNorm statistics of
            the backbone.
        types: number of primary capsule types per position.
        routing: routing rule of the class capsules: a name in `ROUTINGS`, a `Routing` (name and options), or a module,
            which is copied.

    Raises:
        BadInput: timm is not installed or has no such backbone; the backbone has no feature map with this stride
            or does not accept images of this size; ``image_shape`` is not (channels, height, width); or the routing or
            one of its options is unknown.
        ValueError: an option of the rule is out of its range, or ``routing`` is a module made for other layer sizes.

    Warns:
        DataWarning: the backbone ignores the last rows or columns of images of this size, such as a part of a patch.

    Example:
        >>> network = TimmCapsNet((3, 64, 64), num_classes=5, backbone="resnet18")  # doctest: +SKIP
        >>> network.load_backbone("timm")  # doctest: +SKIP
        'the backbone has the weights of timm/resnet18.a1_in1k'
    """

    backbone: Any
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        image_shape: Sequence[int] = (3, 64, 64),
        num_classes: int = 10,
        backbone: str = "resnet18",
        stride: int = 16,
        freeze_backbone: bool = False,
        types: int = 16,
        routing: Rule | Routing | str = "attention",
    ) -> None:
        super().__init__()
        channels, height, width = self.image_shape = check_image_shape("TimmCapsNet", image_shape, smallest=1)
        # While timm creates a network, it may read values of tensors. Tensors on the meta device have no values.
        with torch.device("cpu"), torch.inference_mode(False):
            self._name = backbone
            self._recreate = _features_of(backbone, stride, (channels, height, width))
            self.backbone = _created(backbone, self._recreate)
            for name in ("mean", "std"):
                self.register_buffer(name, torch.empty(channels, 1, 1))
            self._set_mean_and_std()
            self._channels_last = str(getattr(self.backbone, "output_fmt", "NCHW")).endswith("NHWC")
            features_shape = self._examined((channels, height, width), stride)
        self.freeze_backbone = freeze_backbone
        self.backbone.requires_grad_(not freeze_backbone)
        self.head = CapsuleHead(features_shape, num_classes, types, routing=routing)
        self.train()

    def train(self, mode: bool = True) -> "TimmCapsNet":
        """Set training or evaluation mode. A frozen backbone stays in evaluation mode."""
        super().train(mode)
        if self.freeze_backbone:
            self.backbone.eval()
        return self

    def load_backbone(self, source: str) -> str:
        """Load trained weights into the backbone, and return a sentence that says which weights were loaded.

        Arguments:
            source: ``timm`` for the weights that timm publishes for the backbone on the Hugging Face Hub, or the path
                of a .safetensors file with the weights of the whole timm network, for any number of classes.

        Raises:
            BadInput: timm publishes no weights for the backbone, the Hub cannot be reached, or the file cannot be read
                or belongs to another network.
        """
        name = self._name
        described, file = (source, Path(source)) if source != "timm" else _download(name)
        if not file.is_file() or file.suffix != ".safetensors":
            problem = "is not a .safetensors file" if file.suffix != ".safetensors" else "does not exist"
            raise BadInput(
                f"{file} {problem}: give a .safetensors file with the weights of {name}, or 'timm' to download them"
            )
        classes = _classes_in(file, name)
        overlay = {"file": str(file), "hf_hub_id": None, "url": "", **classes}
        options = {**self._recreate, "pretrained": True, "pretrained_cfg_overlay": overlay}
        whole = {key: value for key, value in options.items() if key not in ("features_only", "out_indices")} | classes
        _created(name, whole, str(file))  # timm checks the names of the weights only for a whole network
        self.backbone.load_state_dict(_created(name, options, str(file)).state_dict())
        return f"the backbone has the weights of {described}"

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used."""
        check_images(images, self.image_shape)
        return self.head(self._features(images))

    def _features(self, images: Tensor) -> Tensor:
        (features,) = self.backbone((images - self.mean) / self.std)
        return features.permute(0, 3, 1, 2) if self._channels_last else features

    def reset_parameters(self) -> None:
        """Draw new initial weights of the backbone. Call `load_backbone` again to replace them with trained weights."""
        with torch.device("cpu"):
            new = _created(self._name, self._recreate)
        with torch.no_grad():
            for part in ("parameters", "buffers"):
                for own, drawn in zip(getattr(self.backbone, part)(), getattr(new, part)(), strict=True):
                    own.copy_(drawn)
        self._set_mean_and_std()

    def _set_mean_and_std(self) -> None:
        for name in ("mean", "std"):
            value = torch.tensor(self.backbone.default_cfg[name])
            value = value if len(value) == len(self.mean) else value.mean()
            getattr(self, name).copy_(value.view(-1, 1, 1))

    def _examined(self, image_shape: tuple[int, int, int], stride: int) -> tuple[int, ...]:
        """Return the shape of the feature map.

        Raises:
            BadInput: the backbone does not accept the images.

        Warns:
            DataWarning: the backbone ignores rows at the bottom or columns at the right, such as a part of a patch.
        """
        self.backbone.eval().requires_grad_(False)
        random = torch.Generator().manual_seed(0)
        images = torch.rand(1, *image_shape, generator=random)
        # Zeros, such as the initial weights of the last BatchNorm in a residual block, would hide what is used.
        zeros = [weights for weights in self.backbone.parameters() if not weights.any()]
        try:
            for weights in zeros:
                nn.init.ones_(weights)
            with torch.no_grad():
                features = self._features(images)
        except (AssertionError, RuntimeError, ValueError) as error:
            *_, height, width = self.backbone.default_cfg["input_size"]
            raise BadInput(
                f"the backbone does not accept images of {image_shape[1]}×{image_shape[2]} ({first_line(error)}): use "
                f"{height}×{width}, the size with which timm trained the backbone (data.image_size={height})"
            ) from error
        size = image_shape[1:]
        ends = size if self._uses_the_last_pixels(images, features) else self._ends(images, random)
        for weights in zeros:
            nn.init.zeros_(weights)
        if ends != size:
            height, width = (math.ceil(side / stride) * stride for side in size)
            option = height if height == width else f"[{height},{width}]"
            cure = f": try images of {height}×{width} (data.image_size={option})"
            warnings.warn(
                f"the backbone uses only the first {ends[0]}×{ends[1]} pixels of images of {size[0]}×{size[1]}"
                f"{cure if (height, width) != size else ''}",
                DataWarning,
                stacklevel=3,
            )
        return tuple(features.shape[1:])

    def _uses_the_last_pixels(self, images: Tensor, features: Tensor) -> bool:
        """Return whether the features change with the last row and with the last column."""
        changes = []
        for axis in (-2, -1):
            changed = images.clone()
            changed.select(axis, -1).neg_()
            with torch.no_grad():
                changes.append(not torch.equal(self._features(changed), features))
        return all(changes)

    def _ends(self, images: Tensor, random: torch.Generator) -> tuple[int, ...]:
        """Return how many rows and columns the backbone uses. This takes much memory, because it needs gradients."""
        images = images.clone().requires_grad_()
        with torch.enable_grad():
            features = self._features(images)
        (gradient,) = torch.autograd.grad(features, images, torch.randn(features.shape, generator=random))
        used = gradient.ne(0).any(dim=1)[0]
        return tuple(
            int(used.any(dim=1 - axis).nonzero().max()) + 1 if used.any() else images.shape[2 + axis] for axis in (0, 1)
        )


def _timm() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision was built for another version of torch
        raise BadInput(
            f"timm cannot be imported ({first_line(error)}): run pip install 'torchcaps[timm]', with a version of "
            f"torchvision that matches torch {torch.__version__}"
        ) from error
    return timm


def _features_of(backbone: str, stride: int, image_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the arguments of `timm.create_model` for the feature map with the given stride."""
    timm = _timm()
    name = backbone.partition(".")[0]
    if not timm.is_model(name):
        similar = ", ".join(difflib.get_close_matches(name, timm.list_models())) or "none; see timm.list_models()"
        raise BadInput(f"timm has no network {backbone!r}; similar names: {similar}")
    try:
        config = timm.get_pretrained_cfg(backbone)
    except RuntimeError as error:
        known = ", ".join(timm.list_pretrained(f"{name}.*")) or "none"
        raise BadInput(
            f"timm publishes no weights named {backbone}: use {name}, or {name} with the tag of published weights "
            f"({known})"
        ) from error
    options: dict[str, Any] = {"in_chans": image_shape[0]}
    if config is not None and config.fixed_input_size:
        options["img_size"] = image_shape[1:]
    found = getattr(_created(backbone, options), "feature_info", None)
    strides = [level["reduction"] for level in found or []]
    if stride not in strides:
        known = ", ".join(map(str, sorted(set(strides))))
        cure = f"use one of the strides {known}" if known else "use another backbone"
        raise BadInput(f"backbone {backbone} has no feature map with stride {stride}: {cure}")
    last = max(index for index, other in enumerate(strides) if other == stride)
    return {**options, "features_only": True, "out_indices": (last,)}


def _created(backbone: str, options: dict[str, Any], source: str = "") -> nn.Module:
    try:
        return _timm().create_model(backbone, **options)
    except (AssertionError, RuntimeError, ValueError, TypeError, LookupError, OSError, SafetensorError) as error:
        if source:
            cure = "give a file with the weights of this network for images of this size"
            with suppress(BadInput):
                read_config(Path(source).parent)
                cure = f"give the folder {Path(source).parent} to start from a network of torchcaps"
            raise BadInput(f"{source} has no weights for {backbone} ({first_line(error)}): {cure}") from error
        cure = "use another backbone or image size"
        raise BadInput(f"timm cannot create {backbone} with {options} ({first_line(error)}): {cure}") from error


def _classes_in(file: Path, backbone: str) -> dict[str, int]:
    """Return the number of classes of a network of timm in a file, for `timm.create_model`; empty if it is unknown."""
    classifiers = getattr(_timm().get_pretrained_cfg(backbone), "classifier", None) or ()
    names = (classifiers,) if isinstance(classifiers, str) else classifiers
    with suppress(SafetensorError, OSError, IndexError), safe_open(file, "pt") as opened:
        for name in (f"{name}.weight" for name in names):
            if name in opened.keys():  # noqa: SIM118 (it is no mapping)
                return {"num_classes": opened.get_slice(name).get_shape()[0]}
    return {}


def _download(backbone: str) -> tuple[str, Path]:
    """Download the weights that timm publishes, as a .safetensors file."""
    config = _timm().get_pretrained_cfg(backbone)
    if config is None or not config.hf_hub_id:
        raise BadInput(
            f"timm publishes no weights for {backbone}: give a .safetensors file, or start from "
            "random weights (without --from)"
        )
    return config.hf_hub_id, local_folder(config.hf_hub_id) / WEIGHTS
