"""`CapsuleHead`: capsules on the feature maps of any network."""

from collections.abc import Sequence, Sized
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Prediction
from torchcaps.checks import check_sizes, described
from torchcaps.decoder import prediction_of
from torchcaps.layers import ClassCaps, truncated_normal_
from torchcaps.primary import PrimaryCaps
from torchcaps.routing import AttentionRouting, DynamicRouting, Routing, Rule, SelfAttentionRouting, UniformRouting

SUMMING = (DynamicRouting, SelfAttentionRouting, UniformRouting)
"""Rules in which the pose of a parent is a squashed sum of votes. Initially, the length of these sums must be small for
any number of children: at a large length, the squash saturates, and the network does not learn."""


class CapsuleHead(nn.Module):
    """Primary capsules and class capsules on the feature maps of any network.

    The layers are as in Hinton, Sabour & Frosst 2018. At each position, a linear layer with BatchNorm computes the
    poses of the primary capsules from the features. If the routing rule uses activations, a second linear layer with
    BatchNorm computes the activations. All positions share the transforms of the class capsules, so the number of
    parameters does not depend on the size of the feature map. The linear layers have no bias, and poses are not
    squashed. BatchNorm has no learned parameters, and the transforms start around the identity with standard deviation
    0.1. In dynamic, uniform and self-attention routing, BatchNorm has learned parameters, and the transforms start
    around 0 with standard deviation 1 / √(S·C·N), as do those of attention with poses of one element. Both
    distributions are truncated at two standard deviations. Coordinate Addition adds the position of each child to its
    votes, in coordinates from -1/2 to 1/2. The fused kernels compute each vote when it is needed and do not store it,
    so large feature maps need little memory. The score of a class is the activation of its capsule. With the default
    rule, train with the loss `torchcaps.losses.activation_logit_cross_entropy`.

    Arguments:
        features_shape: (channels, height, width) of the feature maps, or (channels,) for feature vectors.
        num_classes: number of classes.
        types: number of primary capsule types per position.
        pose_size: rows and columns of every pose, for example (4, 4) or (1, 16).
        coordinates: use Coordinate Addition in the class capsules.
        routing: routing rule of the class capsules: a name in `ROUTINGS`, a `Routing` (name and options), or a module,
            which is copied.

    Raises:
        ValueError: ``features_shape`` is neither (channels, height, width) nor (channels,); a size is below 1;
            coordinates are added to poses with one row whose number of columns is not a square; or ``routing`` is not a
            known rule or does not fit the class capsules.

    Example:
        >>> backbone = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2), nn.ReLU())
        >>> head = CapsuleHead(features_shape=(32, 15, 15), num_classes=5)
        >>> prediction = head(backbone(torch.rand(2, 3, 32, 32)))
        >>> prediction.scores.shape, prediction.capsules.pose.shape
        (torch.Size([2, 5]), torch.Size([2, 1, 5, 4, 4]))
    """

    def __init__(
        self,
        features_shape: Sequence[int],
        num_classes: int,
        types: int = 16,
        pose_size: Sequence[int] = (4, 4),
        coordinates: bool = True,
        routing: Rule | Routing | str = "attention",
    ) -> None:
        super().__init__()
        if not isinstance(features_shape, Sized) or len(features_shape) not in (1, 3):
            volume = isinstance(features_shape, Sized) and len(features_shape) == 4
            cure = ": join two dimensions of a volume with features.flatten(2, 3)" if volume else ""
            raise ValueError(
                "features_shape must be (channels, height, width), or (channels,) for vectors; got "
                f"{described(features_shape)}{cure}"
            )
        channels, height, width = features_shape if len(features_shape) == 3 else (*features_shape, 1, 1)
        check_sizes(channels=channels, height=height, width=width, num_classes=num_classes, types=types)
        self.features_shape = tuple(features_shape)
        rows, columns = ((torch.arange(sites, device="cpu") + 0.5) / sites - 0.5 for sites in (height, width))
        self.class_capsules = ClassCaps(
            torch.cartesian_prod(rows, columns),
            types,
            num_classes,
            pose_size=pose_size,
            add_coordinates=coordinates,
            routing=deepcopy(routing),
        )
        rule = self.class_capsules.routing
        if isinstance(rule, SUMMING) or (isinstance(rule, AttentionRouting) and rule.norm is None):
            std = 1 / (height * width * types * pose_size[1]) ** 0.5
            self.class_capsules.initialise(partial(truncated_normal_, std=std))
        self.primary_capsules = PrimaryCaps(
            *(channels, types, pose_size, 1),
            bias=False,
            squash_form="none",
            # If the rule ignores activations, weights that compute them get no gradients, and DistributedDataParallel
            # would wait for these gradients.
            activation="sigmoid" if rule.weighs_activations else "length",
            # In rules that sum votes, reversing the sign of all poses leaves the scores unchanged, unless a learned
            # offset is added to the poses.
            normalise="affine" if isinstance(rule, SUMMING) else "plain",
        )

    def forward(
        self,
        features: Float[Tensor, "B channels height width"] | Float[Tensor, "B channels"],
        labels: Integer[Tensor, "B"] | None = None,
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used.

        Raises:
            ValueError: the shape of ``features`` without its first dimension is not ``features_shape``.
        """
        if tuple(features.shape[1:]) != self.features_shape:
            expected = ", ".join(map(str, self.features_shape))
            raise ValueError(
                f"features must be [B, {expected}]; got {described(features)}: create the head with another "
                "features_shape, or change the features"
            )
        if len(self.features_shape) == 1:
            features = features[:, :, None, None]
        return prediction_of(self.class_capsules(self.primary_capsules(features)))

    if TYPE_CHECKING:
        __call__ = forward
