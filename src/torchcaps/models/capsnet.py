"""CapsNet and the paper's baseline CNN: Sabour, Frosst & Hinton 2017 (arXiv 1710.09829)."""

from collections.abc import Sequence
from copy import deepcopy

from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Prediction, wide
from torchcaps.checks import check_channels, check_number, check_sizes
from torchcaps.convolution import Im2colConv2d, kaiming_
from torchcaps.decoder import Decoder, prediction_of
from torchcaps.layers import DenseCaps
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.primary import PrimaryCaps
from torchcaps.routing import Routing, Rule


class CapsNet(Pretrained):
    """CapsNet: convolution, primary capsules, class capsules and decoder.

    Sabour, Frosst & Hinton 2017, figures 1 and 2: convolution 9×9×256 with ReLU → PrimaryCaps 9×9 stride 2 with 32
    types of 8-D capsules → DenseCaps with one 16-D capsule per class. The length of a class capsule is the score of the
    class. On MNIST the network has 6.8M parameters without the decoder, and 8.2M with the decoder. With two or three
    classes, use a learning rate such as 2e-4. The first couplings are 1 / classes, so with few classes each vote has
    more weight, and the paper's learning rate of 1e-3 can saturate the squash: all scores are then near 1, and the
    network stops learning.

    Arguments:
        image_shape: (channels, height, width); at least 17×17 pixels.
        num_classes: number of classes.
        convolution_channels: output channels of the convolution. If ``stem`` is set, this is the number of output
            channels of the last convolution of the stem.
        primary_types: number of primary capsule types per position.
        primary_pose_size: number of elements of a primary capsule's pose.
        class_pose_size: number of elements of a class capsule's pose.
        decoder: add a decoder that reconstructs the image from a class capsule.
        routing: routing rule of the class capsules: a name in `ROUTINGS`, a `Routing` (name and options), or a module,
            which is copied.
        im2col: compute convolutions as matrix products (`Im2colConv2d`). This is faster in float32 on some CPUs, and
            slower on others. It needs 3 MB more memory per 28×28 image. It cannot be combined with ``stem``.
        stem: replace the convolution with four convolutions (one 5×5, then three 3×3), each followed by BatchNorm and
            ReLU. The numbers of output channels are 1/4, 1/2, 1/2 and 1 times ``convolution_channels``. The second and
            the fourth convolution have stride 2. With the stem, the primary capsules have 3×3 kernels with stride 1,
            and the receptive field of a primary capsule is 23×23 pixels instead of 17×17. The convolutions and the
            primary capsules together have a fifth as many weights as without the stem.

    Raises:
        BadInput: the image is too small for the kernels, or the routing or one of its options is unknown.
        ValueError: a size is below 1; an option of the rule is out of its range; the rule is a module that was created
            for a layer with other sizes; ``stem`` and ``im2col`` are both set; or ``stem`` is set, but
            ``convolution_channels`` is not a multiple of 4.

    Example:
        >>> import torch
        >>> model = CapsNet(image_shape=(3, 32, 32), num_classes=5, routing=Routing("dynamic", iterations=2))
        >>> model(torch.rand(2, 3, 32, 32)).scores.shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        convolution_channels: int = 256,
        primary_types: int = 32,
        primary_pose_size: int = 8,
        class_pose_size: int = 16,
        decoder: bool = True,
        routing: Rule | Routing | str = "dynamic",
        im2col: bool = False,
        stem: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, convolution_channels=convolution_channels, primary_types=primary_types)
        check_sizes(primary_pose_size=primary_pose_size, class_pose_size=class_pose_size)
        channels, height, width = shape = self.image_shape = check_image_shape("CapsNet", image_shape, smallest=17)
        self._has_stem = stem
        if stem:
            if convolution_channels % 4 or im2col:
                raise ValueError(
                    f"convolution_channels is {convolution_channels} and im2col is {im2col}: with stem=True, use a "
                    "multiple of 4 as convolution_channels, and im2col=False"
                )
            self.convolution = _stem(channels, convolution_channels)
            self.primary_capsules = PrimaryCaps(convolution_channels, primary_types, primary_pose_size, 3)
            rows, columns = ((side - 1) // 4 - 1 for side in (height, width))
        else:
            convolution = Im2colConv2d if im2col else nn.Conv2d
            self.convolution = nn.Sequential(convolution(channels, convolution_channels, 9), nn.ReLU())
            self.primary_capsules = PrimaryCaps(
                convolution_channels, primary_types, primary_pose_size, 9, stride=2, im2col=im2col
            )
            rows, columns = ((side - 8 - 9) // 2 + 1 for side in (height, width))
        self.class_capsules = DenseCaps(
            rows * columns, primary_types, primary_pose_size, num_classes, class_pose_size, routing=deepcopy(routing)
        )
        self.decoder = Decoder(num_classes, class_pose_size, shape) if decoder else None

    def reset_parameters(self) -> None:
        """Draw new initial weights of the convolutions of the stem, if the network has one."""
        if self._has_stem:
            kaiming_(self.convolution)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores, class capsules and a reconstruction.

        The decoder reconstructs each image from the capsule of the class in ``labels``. Without ``labels``, it uses the
        most active class capsule.
        """
        check_images(images, self.image_shape)
        capsules = self.class_capsules(self.primary_capsules(self.convolution(images)))
        return prediction_of(capsules, self.decoder, labels)


def _stem(below: int, channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for above, kernel_size, stride in zip(
        (channels // 4, channels // 2, channels // 2, channels), (5, 3, 3, 3), (1, 2, 1, 2), strict=True
    ):
        convolution = kaiming_(nn.Conv2d(below, above, kernel_size, stride, padding=kernel_size // 2, bias=False))
        layers += [convolution, nn.BatchNorm2d(above), nn.ReLU()]
        below = above
    return nn.Sequential(*layers)


class BaselineCNN(Pretrained):
    """Baseline CNN of the CapsNet paper: three 5×5 convolutions and two hidden linear layers.

    Sabour, Frosst & Hinton 2017, section 5: convolutions with 256, 256 and 128 channels, linear layers with 328 and
    192 units, dropout, and softmax cross-entropy. The convolutions have padding 2, which keeps the image size. With
    this padding, the network has 35,445,522 parameters on MNIST; the paper reports 35.4M.

    Arguments:
        image_shape: (channels, height, width).
        num_classes: number of classes.
        channels: output channels of the convolutions.
        hidden_sizes: units of the hidden linear layers.
        dropout: dropout probability after the last hidden layer, in [0, 1).

    Raises:
        BadInput: ``image_shape`` is not (channels, height, width).
        ValueError: a size is below 1, ``channels`` or ``hidden_sizes`` is empty, or ``dropout`` is not in [0, 1).

    Example:
        >>> import torch
        >>> BaselineCNN(channels=(8, 8, 8))(torch.rand(2, 1, 28, 28)).scores.shape
        torch.Size([2, 10])
    """

    logits = True

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        channels: Sequence[int] = (256, 256, 128),
        hidden_sizes: Sequence[int] = (328, 192),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes)
        check_channels("channels", channels)
        check_channels("hidden_sizes", hidden_sizes)
        check_number("dropout", dropout, "[0, 1)")
        image_channels, height, width = self.image_shape = check_image_shape("BaselineCNN", image_shape, smallest=1)
        layers: list[nn.Module] = []
        for below, above in zip([image_channels, *channels], channels, strict=False):
            layers += [nn.Conv2d(below, above, 5, padding=2), nn.ReLU()]
        layers.append(nn.Flatten())
        for below, above in zip([channels[-1] * height * width, *hidden_sizes], hidden_sizes, strict=False):
            layers += [nn.Linear(below, above), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(hidden_sizes[-1], num_classes))

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores, which are logits. The labels are not used."""
        check_images(images, self.image_shape)
        return Prediction(wide(self.layers(images)))
