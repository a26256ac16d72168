"""Decoder, which reconstructs images from class capsules."""

from collections.abc import Sequence, Sized
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction, one_hot
from torchcaps.checks import check_channels, check_shape, check_sizes, described


class Decoder(nn.Module):
    """Decoder that reconstructs an image from the pose of one class capsule. All other poses are set to zero.

    Sabour, Frosst & Hinton 2017, section 4.1: two linear layers with 512 and 1024 units, each with ReLU, then a
    linear layer with a sigmoid per pixel.

    Arguments:
        num_classes: number of classes (J).
        pose_size: number of elements of a class capsule's pose (R·N).
        image_shape: (channels, height, width) of the image.
        hidden_sizes: number of units of each hidden layer.

    Raises:
        ValueError: a size is not an integer of at least 1, or ``image_shape`` does not have three numbers.

    Example:
        >>> import torch
        >>> decoder = Decoder(10, 16, (3, 32, 20))
        >>> decoder(torch.randn(2, 1, 10, 1, 16), torch.tensor([3, 5])).shape
        torch.Size([2, 3, 32, 20])
    """

    def __init__(
        self,
        num_classes: int,
        pose_size: int,
        image_shape: Sequence[int],
        hidden_sizes: Sequence[int] = (512, 1024),
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, pose_size=pose_size)
        if not isinstance(hidden_sizes, Sized) or len(hidden_sizes):
            check_channels("hidden_sizes", hidden_sizes)
        self.num_classes, self.pose_size = num_classes, pose_size
        check_shape("image_shape", image_shape, "channels, height, width")
        channels, height, width = map(int, image_shape)
        self.image_shape = channels, height, width
        sizes = [num_classes * pose_size, *hidden_sizes]
        hidden = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], channels * height * width), nn.Sigmoid())

    def forward(
        self, pose: Float[Tensor, "B 1 J R N"], labels: Integer[Tensor, "B"]
    ) -> Float[Tensor, "B channels height width"]:
        """Reconstruct images ``[B, channels, height, width]`` in [0, 1], each from the capsule of one class.

        Arguments:
            pose: ``[B, 1, J, R, N]``, poses of the class capsules.
            labels: ``[B]``, for each sample the class whose capsule is used.

        Raises:
            ValueError: ``pose`` does not have one site, ``num_classes`` types and ``pose_size`` elements per pose; or
                ``labels`` is not an integer tensor ``[B]`` with values in [0, num_classes).
        """
        expected = 1, self.num_classes, self.pose_size
        if pose.ndim != 5 or (*pose.shape[1:3], pose.shape[3] * pose.shape[4]) != expected:
            raise ValueError(
                f"pose must be [B, 1, {self.num_classes}, R, N] with R·N = {self.pose_size}; got {described(pose)}"
            )
        if not isinstance(labels, Tensor) or labels.shape != pose.shape[:1]:
            cure = ""
            if isinstance(labels, Tensor) and labels.ndim == 2:
                cure = ": convert one-hot labels with labels.argmax(dim=1); for several classes per image, call the "
                cure += "network without labels, and the decoder once for each class"
            raise ValueError(
                f"labels must be integers [{pose.shape[0]}], one class per pose; got {described(labels)}{cure}"
            )
        visible = pose * one_hot(labels, self.num_classes, "labels").to(pose)[:, None, :, None, None]
        weight = self.layers[0].weight  # a method, if the layer is quantized
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
        return self.layers(visible.flatten(1).to(dtype)).unflatten(1, self.image_shape)

    if TYPE_CHECKING:
        __call__ = forward


def has_optional_decoder(model: nn.Module) -> bool:
    """Return whether a network has a decoder that it would not have with the option ``decoder=False``."""
    option = getattr(model, "options", {}).get("decoder")
    return option is True and getattr(model, "decoder", None) is not None


def prediction_of(
    capsules: Capsules, decoder: Decoder | None = None, labels: Integer[Tensor, "B"] | None = None
) -> Prediction:
    """Create a prediction from class capsules. The scores are the activations of the capsules.

    Arguments:
        capsules: class capsules ``[B, 1, J, ...]``.
        decoder: decoder that reconstructs the image, or None for no reconstruction.
        labels: ``[B]``, class of each sample. The image is reconstructed from the capsule of this class, or from the
            most active class capsule if ``labels`` is None.
    """
    scores = capsules.activation.squeeze(1)
    if decoder is None:
        return Prediction(scores, capsules)
    labels = scores.argmax(dim=1) if labels is None else labels
    return Prediction(scores, capsules, decoder(capsules.pose, labels))
