"""Efficient-CapsNet: Mazzia, Salvetti & Chiaberge 2021 (arXiv 2101.12491)."""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial

from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Prediction, squashed, wide
from torchcaps.checks import check_channels, check_sizes
from torchcaps.convolution import kaiming_
from torchcaps.decoder import Decoder, prediction_of
from torchcaps.layers import DenseCaps, truncated_normal_
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.routing import Routing, Rule


class EfficientCapsNet(Pretrained):
    """Efficient-CapsNet: four convolutions, 16 primary capsules, class capsules with self-attention routing, decoder.

    Mazzia, Salvetti & Chiaberge 2021, figure 2: convolutions 5×5×32 → 3×3×64 → 3×3×64 → 3×3×128 stride 2, each followed
    by ReLU and BatchNorm → depthwise convolution with a kernel as large as the feature map → 16 primary capsules with 8
    elements each, squashed with the form ``exponential`` → one 16-D capsule per class. The length of a class capsule is
    the score of the class. On MNIST the network has 161,824 parameters without the decoder. For smallNORB, the authors
    use a larger first kernel and another normalisation: ``first_kernel_size=7``, ``first_stride=2`` and
    ``instance_norm=True``.

    Arguments:
        image_shape: (channels, height, width); at least 11×11 pixels, or 23×23 with the options for smallNORB.
        num_classes: number of classes.
        channels: output channels of the four convolutions; the last number must be a multiple of ``primary_pose_size``.
        first_kernel_size: height and width of the first convolution's kernel.
        first_stride: stride of the first convolution.
        instance_norm: LeakyReLU (slope 0.3) and InstanceNorm after each convolution, instead of ReLU and BatchNorm.
        primary_pose_size: number of elements of a primary capsule's pose.
        class_pose_size: number of elements of a class capsule's pose.
        decoder: add a decoder that reconstructs the image from a class capsule.
        routing: routing rule of the class capsules: a name in `ROUTINGS`, a `Routing` (name and options), or a module,
            which is copied.

    Raises:
        BadInput: the image is too small for the kernels, or the routing or one of its options is unknown.
        ValueError: a size is below 1; an option of the rule is out of its range; the rule is a module that was created
            for a layer with other sizes; ``channels`` does not have four numbers; or the last number of ``channels`` is
            not a multiple of ``primary_pose_size``.

    Example:
        >>> import torch
        >>> EfficientCapsNet(image_shape=(3, 32, 32), num_classes=5)(torch.rand(2, 3, 32, 32)).scores.shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        channels: Sequence[int] = (32, 64, 64, 128),
        first_kernel_size: int = 5,
        first_stride: int = 1,
        instance_norm: bool = False,
        primary_pose_size: int = 8,
        class_pose_size: int = 16,
        decoder: bool = True,
        routing: Rule | Routing | str = "self_attention",
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, first_kernel_size=first_kernel_size, first_stride=first_stride)
        check_sizes(primary_pose_size=primary_pose_size, class_pose_size=class_pose_size)
        check_channels("channels", channels)
        below, height, width = shape = self.image_shape = check_image_shape(
            "EfficientCapsNet", image_shape, smallest=first_kernel_size + (8 if instance_norm else 6) * first_stride
        )
        if len(channels) != 4 or channels[3] % primary_pose_size:
            raise ValueError(
                f"channels must be four integers, the last one a multiple of primary_pose_size={primary_pose_size}, "
                f"such as [32, 64, 64, {16 * primary_pose_size}]; got {list(channels)}"
            )
        layers: list[nn.Module] = []
        kernels = (first_kernel_size, first_stride), (3, 1), (3, 1), (3, 2)
        for above, (kernel_size, stride) in zip(channels, kernels, strict=True):
            after = (
                (nn.LeakyReLU(0.3), nn.InstanceNorm2d(above, affine=True))
                if instance_norm
                else (nn.ReLU(), nn.BatchNorm2d(above))
            )
            layers += [kaiming_(nn.Conv2d(below, above, kernel_size, stride)), *after]
            below = above
            height, width = ((side - kernel_size) // stride + 1 for side in (height, width))
        self.features = nn.Sequential(*layers)
        self.primary_capsules = nn.Conv2d(below, below, (height, width), groups=below)
        self.pose_size, types = primary_pose_size, below // primary_pose_size
        self.class_capsules = DenseCaps(
            1, types, primary_pose_size, num_classes, class_pose_size, routing=deepcopy(routing)
        )
        std = math.sqrt(2 / (num_classes * types * primary_pose_size))
        self.class_capsules.initialise(partial(truncated_normal_, std=std))
        self.decoder = Decoder(num_classes, class_pose_size, shape) if decoder else None

    def reset_parameters(self) -> None:
        """Draw new initial weights of the convolutions before the capsules."""
        kaiming_(self.features)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores, class capsules and a reconstruction.

        The decoder reconstructs each image from the capsule of the class in ``labels``. Without ``labels``, it uses the
        most active class capsule.
        """
        check_images(images, self.image_shape)
        numbers = wide(self.primary_capsules(self.features(images)))
        capsules = squashed(numbers.flatten(1).unflatten(1, (1, -1, 1, self.pose_size)), "exponential")
        capsules = self.class_capsules(capsules)
        return prediction_of(capsules, self.decoder, labels)
