"""Capsule network with two layers of generative routing: Heinsen 2019 (arXiv 1911.00792)."""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.checks import check_choice, check_sizes
from torchcaps.convolution import kaiming_
from torchcaps.decoder import prediction_of
from torchcaps.layers import CapsuleLayer
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.primary import PrimaryCaps
from torchcaps.routing import Routing, Rule
from torchcaps.routing_map import RoutingMap


class GenerativeCapsNet(Pretrained):
    """Capsule network with generative routing: six convolutions, primary capsules, part capsules and class capsules.

    Heinsen 2019: image and two channels with the row and column of each pixel, from -1 to 1 → six blocks (BatchNorm,
    unpadded convolution 3×3, SiLU) → BatchNorm, primary capsules 1×1 → part capsules → one capsule per class. Every
    second block has stride 2. Each part capsule has one transform, which all primary capsules share. All poses are 4×4.
    The score of a class is the activation of its capsule. The loss `activation_logit_cross_entropy` computes logits
    from the scores; it is the paper's softmax cross-entropy, as long as all logits are between -13.8 and 13.8. On
    stereo images with five classes the network has 265,416 parameters. The author's network has 271,688: 6,144 more are
    biases added to votes, and 128 are a second BatchNorm, because poses and activations of the primary capsules have
    one each. The second BatchNorm makes no difference to what the network can compute.

    Arguments:
        image_shape: (channels, height, width); at least 29×29 pixels, or 1×1 with ``padding=1``.
        num_classes: number of classes.
        channels: output channels of every convolution.
        padding: zero padding of every convolution in pixels: 0, as in the author's code, or 1.
        parts: number of part capsules, and also number of primary capsule types per position.
        pose_side: rows and columns of a pose.
        routing: routing rule of both layers: a name in `ROUTINGS`, a `Routing` (name and options), or a module, which
            is copied for each layer.

    Raises:
        BadInput: the image is too small, or the routing or one of its options is unknown.
        ValueError: a size is below 1; ``padding`` is not 0 or 1; an option of the rule is out of its range; or the rule
            is a module that was created for a layer with other sizes.

    Example:
        >>> import torch
        >>> GenerativeCapsNet(image_shape=(2, 48, 48), num_classes=5, parts=4)(torch.rand(2, 2, 48, 48)).scores.shape
        torch.Size([2, 5])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (2, 96, 96),
        num_classes: int = 5,
        channels: int = 64,
        padding: int = 0,
        parts: int = 64,
        pose_side: int = 4,
        routing: Rule | Routing | str = "generative",
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, channels=channels, parts=parts, pose_side=pose_side)
        check_choice("padding", padding, (0, 1))
        smallest = 1 if padding else 29
        image_channels, height, width = self.image_shape = check_image_shape("GenerativeCapsNet", image_shape, smallest)
        layers: list[nn.Module] = []
        below = image_channels + 2
        for stride in (1, 2) * 3:
            convolution = kaiming_(nn.Conv2d(below, channels, 3, stride, padding), zero_bias=True)
            layers += [nn.BatchNorm2d(below), convolution, nn.SiLU()]
            below = channels
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels))
        pose_size = (pose_side, pose_side)
        self.primary_capsules = PrimaryCaps(channels, parts, pose_size, 1, squash_form="none", activation="sigmoid")
        children = parts * math.prod(_grid(side, padding) for side in (height, width))
        self.parts, self.class_capsules = (
            CapsuleLayer(
                routing_map,
                torch.empty(1, child_types, parent_types, *pose_size),
                deepcopy(routing),
                pose_size,
                partial(nn.init.normal_, std=1 / pose_side),
            )
            for routing_map, child_types, parent_types in (
                (RoutingMap.shared(children), 1, parts),
                (RoutingMap.dense(1), parts, num_classes),
            )
        )

    def reset_parameters(self) -> None:
        """Draw new initial weights of the convolutions before the capsules."""
        kaiming_(self.features, zero_bias=True)

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used."""
        check_images(images, self.image_shape)
        rows, columns = (torch.linspace(-1, 1, side, device=images.device) for side in images.shape[2:])
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).to(images.dtype)
        features = self.features(torch.cat([images, places.expand(images.shape[0], -1, -1, -1)], dim=1))
        pose, activation = (part.flatten(1, 2).unsqueeze(2) for part in self.primary_capsules(features))
        capsules = self.class_capsules(self.parts(Capsules(pose, activation)))
        return prediction_of(capsules)


def _grid(side: int, padding: int) -> int:
    """Compute the size of one side of the feature map after all convolutions."""
    for stride in (1, 2) * 3:
        side = (side + 2 * padding - 3) // stride + 1
    return side
