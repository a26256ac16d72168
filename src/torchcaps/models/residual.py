"""A small residual network with a capsule head. It also shows how to put capsules on a backbone of your own."""

from collections.abc import Sequence
from itertools import pairwise

from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Prediction
from torchcaps.checks import check_channels
from torchcaps.models.head import CapsuleHead
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.routing import Routing, Rule


class ResidualCapsNet(Pretrained):
    """Residual network with capsules on its feature maps: convolutional stem, residual blocks and a `CapsuleHead`.

    The blocks are as in He et al. 2016 (arXiv 1512.03385): two 3×3 convolutions with BatchNorm, and a shortcut. The
    stem keeps the height and width of the image; each block halves them. The number of parameters does not depend on
    the size of the images.

    Arguments:
        image_shape: (channels, height, width) of any size.
        num_classes: number of classes.
        widths: output channels of the stem, followed by the output channels of each block.
        types: number of primary capsule types per position.
        routing: routing rule of the class capsules: a name in `ROUTINGS`, a `Routing` (name and options), or a module,
            which is copied.

    Raises:
        BadInput: ``image_shape`` is not (channels, height, width), or the routing or one of its options is unknown.
        ValueError: ``widths`` is empty or contains a number below 1, an option of the rule is out of its range, or
            ``routing`` is a module made for other layer sizes.

    Example:
        >>> import torch
        >>> ResidualCapsNet(image_shape=(3, 32, 32), num_classes=5)(torch.rand(2, 3, 32, 32)).scores.shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (3, 64, 64),
        num_classes: int = 10,
        widths: Sequence[int] = (32, 64, 128, 128),
        types: int = 16,
        routing: Rule | Routing | str = "attention",
    ) -> None:
        super().__init__()
        check_channels("widths", widths)
        channels, height, width = self.image_shape = check_image_shape("ResidualCapsNet", image_shape, smallest=1)
        stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        blocks = [_Block(below, above) for below, above in pairwise(widths)]
        self.backbone = nn.Sequential(stem, nn.BatchNorm2d(widths[0]), nn.ReLU(), *blocks)
        for _ in blocks:
            height, width = (height + 1) // 2, (width + 1) // 2
        self.head = CapsuleHead((widths[-1], height, width), num_classes, types, routing=routing)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used."""
        check_images(images, self.image_shape)
        return self.head(self.backbone(images))


class _Block(nn.Module):
    """Residual block of two convolutions and a shortcut. Its output has half the height and width of its input."""

    def __init__(self, below: int, above: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(below, above, 3, 2, padding=1, bias=False), nn.BatchNorm2d(above), nn.ReLU()),
            *(nn.Conv2d(above, above, 3, padding=1, bias=False), nn.BatchNorm2d(above)),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(below, above, 1, bias=False), nn.BatchNorm2d(above))

    def forward(self, features: Tensor) -> Tensor:
        # This pooling selects every second row and column. A 1×1 convolution with stride 2 would do the same, but for
        # few channels in channels_last, its backward in oneDNN 3.12 writes outside the tensors.
        return functional.relu(self.layers(features) + self.shortcut(functional.avg_pool2d(features, 1, 2)))
