"""Su's pair: one small convolutional trunk, read by global pooling or by shared capsules (Su 2018).

Both give ten independent scores, take images of any size, and differ only in how positions are put together.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import cast

from jaxtyping import Float, Int64
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction, lengths
from torchcaps.decoder import prediction_of
from torchcaps.layers import SharedCaps
from torchcaps.models.image_shape import check_image_shape
from torchcaps.models.pretrained import Pretrained
from torchcaps.routing import Routing, with_defaults

SU = Routing("dynamic", logits="latest", squash_form="su", inner_squash_form="unit")
"""`PooledCapsNet`'s own defaults: latest-pass logits against parents of unit length, the last pass squashed with
``|s|² / (0.5 + |s|²)``."""


def _trunk(channels: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3), nn.ReLU()),
    )


def _glorot(module: nn.Module) -> None:
    """The author's initial weights: Glorot-uniform, zero biases. With smaller ones the capsules learn far slower."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(cast(nn.Parameter, module.bias))


class PooledCNN(nn.Module, Pretrained):
    """Four 3×3 convolutions, global average pooling, 128 ReLU, a sigmoid per class: 276,810 parameters on MNIST.

    Su 2018.

    Arguments:
        image_shape: (channels, height, width); at least 14×14. Other sizes may be given to `forward`.
        num_classes: number of classes.

    Raises:
        BadInput: the image is too small for the kernels.

    Example:
        >>> import torch
        >>> PooledCNN()(torch.rand(2, 1, 28, 56)).scores.shape
        torch.Size([2, 10])
    """

    def __init__(self, image_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10) -> None:
        super().__init__()
        channels, _, _ = check_image_shape("PooledCNN", image_shape, smallest=14)
        self.trunk = _trunk(channels)
        self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_classes), nn.Sigmoid())
        self.apply(_glorot)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Int64[Tensor, "B"] | None = None
    ) -> Prediction:
        """Scores in [0, 1]. Labels are accepted, as by every model, and not used."""
        return Prediction(self.head(self.trunk(images).mean(dim=(2, 3))).float())


class PooledCapsNet(nn.Module, Pretrained):
    """The same trunk; each position's 128 channels are one child of shared capsules: 279,488 parameters on MNIST.

    Su 2018; `SU` is the routing of the author's code. The score of a class is the activation of its capsule.

    Arguments:
        image_shape: (channels, height, width); at least 14×14. Other sizes may be given to `forward`.
        num_classes: number of classes.
        class_pose_size: length of a class capsule's pose.
        routing: of the class capsules: a rule, which is copied, its name in `ROUTINGS`, or a `Routing`: name and
            options. Options of ``"dynamic"`` that are left out are those of `SU`.

    Raises:
        BadInput: the image is too small for the kernels, or an unknown routing or option of it.
        ValueError: a rule that does not fit the class capsules.

    Example:
        >>> import torch
        >>> PooledCapsNet()(torch.rand(2, 1, 28, 56)).scores.shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        class_pose_size: int = 16,
        routing: nn.Module | Routing | str = SU,
    ) -> None:
        super().__init__()
        channels, _, _ = check_image_shape("PooledCapsNet", image_shape, smallest=14)
        self.trunk = _trunk(channels)
        self.apply(_glorot)
        routing = deepcopy(with_defaults(routing, SU))
        self.class_capsules = SharedCaps(128, num_classes, class_pose_size, routing=routing)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Int64[Tensor, "B"] | None = None
    ) -> Prediction:
        """Scores in [0, 1] and class capsules. Labels are accepted, as by every model, and not used."""
        pose = self.trunk(images).float().flatten(2).mT[:, :, None, None, :]
        capsules = self.class_capsules(Capsules(pose, lengths(pose)))
        return prediction_of(capsules)
