"""A CNN and a capsule network with the same convolutions: Su 2018.

Both networks compute one score in [0, 1] per class; the scores of an image need not sum to 1. Both accept images of
various sizes. The CNN combines the positions of the last feature map by global average pooling; the capsule network
combines them by routing.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import cast

from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction, lengths, wide
from torchcaps.checks import check_sizes
from torchcaps.decoder import prediction_of
from torchcaps.layers import SharedCaps
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.routing import Routing, Rule, with_defaults

SU = Routing("dynamic", logits="latest", squash_form="su", inner_squash_form="unit")
"""Default routing of `PooledCapsNet`. Each iteration computes the logits only from the parents of the iteration before.
These parents have unit length. The last iteration squashes a sum of votes s to the length ``|s|² / (0.5 + |s|²)``."""

SMALLEST = 14
"""Smallest height and width of an image, for which the last feature map has one position."""


def _trunk(channels: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3), nn.ReLU()),
    )


def _glorot(module: nn.Module) -> None:
    """Initialise a layer as in the author's code. With smaller initial weights, capsules learn far more slowly."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(cast(nn.Parameter, module.bias))


class PooledCNN(Pretrained):
    """Baseline CNN of Su 2018: four 3×3 convolutions, global average pooling, 128 ReLU units and a sigmoid per class.

    The convolutions are not padded and have 64, 64, 128 and 128 output channels; ReLU follows each of them. After the
    second, 2×2 average pooling halves the resolution. The network has 276,810 parameters on MNIST.

    Arguments:
        image_shape: (channels, height, width); at least 14×14 pixels. `forward` also accepts other sizes of at least
            14×14 pixels.
        num_classes: number of classes.

    Raises:
        BadInput: the image is too small for the kernels.
        ValueError: ``num_classes`` is below 1.

    Example:
        >>> import torch
        >>> PooledCNN()(torch.rand(2, 1, 28, 56)).scores.shape
        torch.Size([2, 10])
    """

    any_size = True

    def __init__(self, image_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes)
        channels, _, _ = self.image_shape = check_image_shape("PooledCNN", image_shape, SMALLEST)
        self.trunk = _trunk(channels)
        self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_classes), nn.Sigmoid())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial weights of all layers."""
        self.apply(_glorot)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1]. The labels are not used."""
        check_images(images, self.image_shape, smallest=SMALLEST)
        return Prediction(wide(self.head(self.trunk(images).mean(dim=(2, 3)))))


class PooledCapsNet(Pretrained):
    """Capsule network of Su 2018: the four convolutions of `PooledCNN`, and class capsules.

    The 128 channels at each position form one child capsule. All positions share the transforms of the class capsules.
    The score of a class is the activation of its capsule. The network has 279,488 parameters on MNIST. Routing runs on
    the reference implementation, because the fused kernels support poses of at most 64 numbers.

    Arguments:
        image_shape: (channels, height, width); at least 14×14 pixels. `forward` also accepts other sizes of at least
            14×14 pixels.
        num_classes: number of classes.
        class_pose_size: number of elements of a class capsule's pose.
        routing: routing rule of the class capsules: a name in `ROUTINGS`, a `Routing` (name and options), or a module,
            which is copied. For ``"dynamic"``, the defaults are as in the author's code: ``logits="latest"``,
            ``squash_form="su"`` and ``inner_squash_form="unit"``.

    Raises:
        BadInput: the image is too small for the kernels, or the routing or one of its options is unknown.
        ValueError: a size is below 1, an option of the rule is out of its range, or ``routing`` is a module made for
            other layer sizes.

    Example:
        >>> import torch
        >>> PooledCapsNet()(torch.rand(2, 1, 28, 56)).scores.shape
        torch.Size([2, 10])
    """

    any_size = True

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        class_pose_size: int = 16,
        routing: Rule | Routing | str = SU,
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, class_pose_size=class_pose_size)
        channels, _, _ = self.image_shape = check_image_shape("PooledCapsNet", image_shape, SMALLEST)
        self.trunk = _trunk(channels)
        self.reset_parameters()
        routing = deepcopy(with_defaults(routing, SU))
        self.class_capsules = SharedCaps(128, num_classes, class_pose_size, routing=routing)

    def reset_parameters(self) -> None:
        """Draw new initial weights of the convolutions."""
        self.trunk.apply(_glorot)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used."""
        check_images(images, self.image_shape, smallest=SMALLEST)
        pose = wide(self.trunk(images)).flatten(2).mT[:, :, None, None, :]
        capsules = self.class_capsules(Capsules(pose, lengths(pose)))
        return prediction_of(capsules)
