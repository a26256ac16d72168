"""Self-routing capsules on a convolutional network: Hahn, Pyeon & Kim 2019 (NeurIPS)."""

from collections.abc import Sequence
from copy import deepcopy

from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.checks import check_integer, check_sizes
from torchcaps.convolution import kaiming_
from torchcaps.decoder import prediction_of
from torchcaps.errors import BadInput
from torchcaps.layers import ConvCaps, DenseCaps
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.primary import PoseNorm, PrimaryCaps
from torchcaps.routing import Routing, Rule


class SelfRoutingCapsNet(Pretrained):
    """Capsule network with self-routing: six convolutions with BatchNorm, primary capsules and class capsules.

    Hahn, Pyeon & Kim 2019, the "7-layer CNN" of the authors' code: convolutions 3×3 with width · (1, 2, 2, 4, 4, 8)
    channels → primary capsules 3×3 with BatchNorm → ``capsule_layers`` ConvCaps 3×3, each with BatchNorm on its poses →
    one capsule per class, with separate transforms for each position. Every second convolution has stride 2. All 3×3
    kernels have padding 1, also those of ConvCaps. Convolutions have no bias; BatchNorm and ReLU follow the first six.
    The score of a class is the activation of its capsule. The loss `activation_cross_entropy` is the negative log of
    the activation of the right class, as in the paper. The network has 856,064 parameters on 32×32 stereo images with
    five classes.

    In the authors' code, class capsules have no poses. Here every capsule has a pose; by default, the pose of a class
    capsule has only one element. The transforms that compute the poses of the class capsules have 40,960 of the 856,064
    parameters. They do not affect the loss.

    Arguments:
        image_shape: (channels, height, width); at least 5×5 pixels.
        num_classes: number of classes.
        width: output channels of the first convolution.
        types: number of capsule types in every layer except the last.
        pose_size: number of elements of a pose, except in the class capsules.
        capsule_layers: number of ConvCaps layers between the primary and the class capsules, from 0 to 100.
        class_pose_size: number of elements of a class capsule's pose.
        routing: routing rule of every layer: a name in `ROUTINGS`, a `Routing` (name and options), or a module, which
            is copied for each layer.

    Raises:
        BadInput: the image is too small, the routing or one of its options is unknown, or ``capsule_layers`` is not in
            [0, 100].
        ValueError: a size is below 1, an option of the rule is out of its range, or ``routing`` is a module made for
            other layer sizes.

    Example:
        >>> import torch
        >>> model = SelfRoutingCapsNet(image_shape=(2, 32, 32), num_classes=5)
        >>> model(torch.rand(2, 2, 32, 32)).scores.sum(dim=1)
        tensor([1.0000, 1.0000], grad_fn=<SumBackward1>)
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        width: int = 16,
        types: int = 32,
        pose_size: int = 16,
        capsule_layers: int = 0,
        class_pose_size: int = 1,
        routing: Rule | Routing | str = "self_routing",
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, width=width, types=types, pose_size=pose_size)
        check_sizes(class_pose_size=class_pose_size)
        below, height, width_of_image = self.image_shape = check_image_shape(
            "SelfRoutingCapsNet", image_shape, smallest=5
        )
        check_integer("capsule_layers", capsule_layers, 0, 100, BadInput)
        layers: list[nn.Module] = []
        for factor, stride in ((1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2)):
            convolution = kaiming_(nn.Conv2d(below, factor * width, 3, stride, padding=1, bias=False))
            layers += [convolution, nn.BatchNorm2d(factor * width), nn.ReLU()]
            below = factor * width
        self.features = nn.Sequential(*layers)
        self.primary_capsules = PrimaryCaps(
            *(below, types, pose_size, 3),
            padding=1,
            bias=False,
            squash_form="none",
            activation="sigmoid",
            normalise="affine",
        )
        rows, columns = ((side - 1) // 8 + 1 for side in (height, width_of_image))
        middle: list[nn.Module] = []
        for _ in range(capsule_layers):
            layer = ConvCaps(
                *((rows, columns), types, types, 3),
                padding=1,
                pose_size=(1, pose_size),
                initial_std=pose_size**-0.5,
                around_identity=False,
                routing=deepcopy(routing),
            )
            middle += [layer, PoseNorm(types, pose_size, affine=True)]
        self.capsules = nn.Sequential(*middle)
        self.class_capsules = DenseCaps(
            rows * columns, types, pose_size, num_classes, class_pose_size, routing=deepcopy(routing)
        )

    def reset_parameters(self) -> None:
        """Draw new initial weights of the convolutions before the capsules."""
        kaiming_(self.features)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used."""
        check_images(images, self.image_shape)
        capsules = self.class_capsules(self.capsules(self.primary_capsules(self.features(images))))
        return prediction_of(capsules)
