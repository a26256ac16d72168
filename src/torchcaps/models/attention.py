"""Capsules with inverted dot-product attention: Tsai, Srivastava, Goh & Salakhutdinov 2020 (arXiv 2002.04764)."""

import math
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction, wide
from torchcaps.checks import check_iterations, check_sizes
from torchcaps.decoder import prediction_of
from torchcaps.errors import BadInput
from torchcaps.layers import CapsuleLayer, ConvCaps
from torchcaps.models.image_shape import check_image_shape, check_images
from torchcaps.models.pretrained import Pretrained
from torchcaps.primary import PrimaryCaps
from torchcaps.routing import AttentionRouting, Routing, Rule, with_defaults
from torchcaps.routing_map import RoutingMap

ATTENTION = Routing("attention", competition="types")
"""Default routing of `AttentionCapsNet`, as in the authors' code."""


class AttentionCapsNet(Pretrained):
    """Capsule network with inverted dot-product attention: one convolution and four capsule layers.

    Tsai, Srivastava, Goh & Salakhutdinov 2020, simple backbone: convolution 3×3 stride 2, padding 1, with ReLU →
    primary capsules 1×1, LayerNorm on each 4×4 pose → ConvCaps 3×3 stride 2 and 3×3 stride 1 → class capsules, with
    separate transforms for each position. A linear layer, shared by the classes, maps the pose of a class capsule to a
    logit. In this implementation, the sigmoid of this logit is the activation of the class capsule and the score of the
    class. The loss `activation_logit_cross_entropy` computes the logits from the scores; it is the paper's softmax
    cross-entropy of the logits, as long as all logits are between -13.8 and 13.8.

    With sequential routing, each layer runs all of its routing iterations before the next layer starts. Concurrent
    routing, the paper's algorithm 2, routes all layers at the same time. Its first iteration computes the layers one
    after the other, with uniform couplings. In every later iteration, each layer computes its parents from the
    children and the parents of the previous iteration::

        p^(l+1) = LayerNorm(Σ_i V_ij(p^l) / number of parents of child i)      for l = 1, 2, 3, one after the other
        repeat `iterations` - 1 times, with all p on the right from the previous iteration:
            c_ij = softmax over the parents of child i (V_ij(p^l) · p_j^(l+1) / √D)
            p^(l+1) = LayerNorm(Σ_i c_ij V_ij(p^l))                            for l = 1, 2, 3

    By default, ``competition`` is ``"types"``: each softmax runs over the parent types at one parent site, and the
    number of parents in the first formula is the number of parent types. A change of a layer reaches the next layer one
    iteration later, so layers that cannot change the scores any more are left out. With two iterations, only the last
    layer is therefore computed twice.

    The network has 561,331 parameters on 3×32×32 images with ten classes; the paper reports 0.56 million. The 34
    parameters that compute the activations of the two ConvCaps layers are not trained, because no later layer uses
    these activations.

    Arguments:
        image_shape: (channels, height, width); at least 13×13 pixels.
        num_classes: number of classes.
        channels: output channels of the convolution.
        types: number of capsule types in every layer except the last.
        pose_side: rows and columns of a pose. Poses with a single element are not normalised.
        routing: routing rule of every layer: a name in `ROUTINGS`, a `Routing` (name and options), or a module, which
            is copied for each layer. For ``"attention"``, the default of ``competition`` is ``"types"``, as in the
            authors' code: the couplings of a child sum to 1 over the parent types at each parent site.
        concurrent: route all layers at the same time, as in the authors' code, instead of one after the other. The
            number of iterations is that of the last layer. Only `AttentionRouting` supports this.

    Raises:
        BadInput: the image is too small, the routing or one of its options is unknown, or ``concurrent`` is True and a
            rule is not `AttentionRouting`.
        ValueError: a size is below 1, an option of the rule is out of its range, or the rule is a module that was
            created for a layer with other sizes.

    Example:
        >>> import torch
        >>> AttentionCapsNet(image_shape=(3, 32, 32))(torch.rand(2, 3, 32, 32)).scores.shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        image_shape: Sequence[int] = (1, 28, 28),
        num_classes: int = 10,
        channels: int = 256,
        types: int = 32,
        pose_side: int = 4,
        routing: Rule | Routing | str = ATTENTION,
        concurrent: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(num_classes=num_classes, channels=channels, types=types, pose_side=pose_side)
        image_channels, height, width = self.image_shape = check_image_shape(
            "AttentionCapsNet", image_shape, smallest=13
        )
        routing = with_defaults(routing, ATTENTION)
        pose_size = (pose_side, pose_side)
        self.features = nn.Sequential(nn.Conv2d(image_channels, channels, 3, 2, padding=1), nn.ReLU())
        self.primary_capsules = PrimaryCaps(
            channels, types, pose_size, 1, bias=False, squash_form="none", activation="length"
        )
        self.primary_norm = nn.LayerNorm(pose_side**2) if pose_side > 1 else nn.Identity()
        grid = ((height - 1) // 2 + 1, (width - 1) // 2 + 1)
        self.first_capsules = ConvCaps(grid, types, types, 3, stride=2, pose_size=pose_size, routing=deepcopy(routing))
        self.second_capsules = ConvCaps(
            self.first_capsules.parent_grid, types, types, 3, pose_size=pose_size, routing=deepcopy(routing)
        )
        sites = math.prod(self.second_capsules.parent_grid)
        transform = torch.empty(sites, types, num_classes, pose_side, pose_side)
        self.class_capsules = CapsuleLayer(RoutingMap.dense(sites), transform, deepcopy(routing), pose_size)
        self.concurrent = concurrent
        if concurrent and not isinstance(self.class_capsules.routing, AttentionRouting):
            raise BadInput(
                f"concurrent is true, but the routing is {type(self.class_capsules.routing).__name__}: use the routing "
                "'attention', or concurrent=False"
            )
        for lower in (self.first_capsules, self.second_capsules):
            if isinstance(lower.routing, AttentionRouting):
                lower.routing.score.requires_grad_(False)  # the next layer does not use the activations
        for layer, children in ((self.first_capsules, 9), (self.second_capsules, 9), (self.class_capsules, sites)):
            parents = layer.transform.shape[2]
            std = math.sqrt(parents / (pose_side * types * children))
            layer.initialise(partial(nn.init.normal_, std=std))

    def forward(
        self, images: Float[Tensor, "B channels height width"], labels: Integer[Tensor, "B"] | None = None
    ) -> Prediction:
        """Predict scores in [0, 1] and class capsules. The labels are not used."""
        check_images(images, self.image_shape)
        capsules = self.primary_capsules(self.features(images))
        pose = capsules.pose.to(self.class_capsules.transform.dtype).flatten(3)
        pose = wide(self.primary_norm(pose)).view(capsules.pose.shape)
        layers = self.first_capsules, self.second_capsules, self.class_capsules
        once: dict[str, Any] = {"iterations": 1} if self.concurrent else {}
        found = [Capsules(pose, capsules.activation)]
        for layer in layers:
            found.append(layer(found[-1], **once))
        if self.concurrent:
            check_iterations(iterations := cast(int, self.class_capsules.routing.iterations))
            for later in reversed(range(iterations - 1)):  # number of later iterations
                lowest = max(0, 2 - later)  # layers below it cannot change the scores any more
                each = zip(layers[lowest:], found[lowest:], found[lowest + 1 :], strict=False)
                found[lowest + 1 :] = [layer(children, parents=parents, **once) for layer, children, parents in each]
        return prediction_of(found[-1])
