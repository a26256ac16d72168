"""Capsule layers: a routing map, a transform and a routing rule put together."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules, SquashForm, lengths, squash
from torchcaps.routing import DynamicRouting
from torchcaps.routing_map import RoutingMap


class PrimaryCaps(nn.Module):
    """The lowest capsules: a convolution whose channels at one position are read as poses.

    Sabour, Frosst & Hinton 2017, section 4. A capsule is ``pose_size`` *channels at one position*, squashed.

    Arguments:
        in_channels: channels of the feature map below.
        types: C, capsule types at each position.
        pose_size: Q, length of a pose.
        kernel_size, stride, padding: of the convolution.
        squash_form: see `squash`.

    Example:
        >>> PrimaryCaps(256, types=32, pose_size=8, kernel_size=9, stride=2)(torch.randn(1, 256, 20, 20)).pose.shape
        torch.Size([1, 36, 32, 1, 8])
    """

    def __init__(
        self,
        in_channels: int,
        types: int,
        pose_size: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        squash_form: SquashForm = "sabour",
    ) -> None:
        super().__init__()
        self.types = types
        self.pose_size = pose_size
        self.squash_form: SquashForm = squash_form
        self.convolution = nn.Conv2d(in_channels, types * pose_size, kernel_size, stride, padding)

    def forward(self, features: Float[Tensor, "B channels height width"]) -> Capsules:
        """Capsules at every position of the convolved map, sites row by row."""
        channels_last = self.convolution(features).permute(0, 2, 3, 1)
        batch, height, width, _ = channels_last.shape
        pose = channels_last.reshape(batch, height * width, self.types, 1, self.pose_size).float()
        pose = squash(pose, self.squash_form)
        return Capsules(pose, lengths(pose))


class DenseCaps(nn.Module):
    """Every child votes for every parent through a transform of its own: the DigitCaps of the paper.

    Sabour, Frosst & Hinton 2017, section 4. The initial transforms have standard deviation 1.36 J / √(S·C·N), which is
    the authors' 0.1 on MNIST and gives parents of the same length for any number of children and of classes: a fixed
    0.1 saturates the squash, and stops all learning, where the children are many and the classes few.

    Arguments:
        child_sites: S.
        child_types: C.
        child_pose_size: Q.
        parent_types: J.
        parent_pose_size: N.
        routing: the rule; dynamic routing with three iterations by default.

    Example:
        >>> children = PrimaryCaps(1, types=4, pose_size=8, kernel_size=9)(torch.randn(2, 1, 10, 10))
        >>> DenseCaps(4, 4, 8, parent_types=10, parent_pose_size=16)(children).activation.shape
        torch.Size([2, 1, 10])
    """

    edges: Tensor

    def __init__(
        self,
        child_sites: int,
        child_types: int,
        child_pose_size: int,
        parent_types: int,
        parent_pose_size: int,
        routing: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self._map = RoutingMap.dense(child_sites)
        self.register_buffer("edges", self._map.edges, persistent=False)
        self.transform = nn.Parameter(
            torch.empty(child_sites, child_types, parent_types, child_pose_size, parent_pose_size)
        )
        spread = 1.36 * parent_types / (child_sites * child_types * parent_pose_size) ** 0.5
        nn.init.trunc_normal_(self.transform, std=spread, a=-2 * spread, b=2 * spread)
        self.routing = routing if routing is not None else DynamicRouting()

    @property
    def routing_map(self) -> RoutingMap:
        """The layer's map, on the layer's device."""
        return replace(self._map, edges=self.edges)

    def forward(self, children: Capsules, return_couplings: bool = False) -> Capsules | tuple[Capsules, Tensor]:
        """Parents ``[B, 1, J, 1, N]``, and the couplings ``[B, J, E, C]`` where asked for."""
        return self.routing(children.pose, self.transform, self.routing_map, return_couplings=return_couplings)


class SharedCaps(nn.Module):
    """All children vote through one transform per parent, so their number may vary: images of any size.

    Su 2018, "shared" capsule layer.

    Arguments:
        child_pose_size: Q.
        parent_types: J.
        parent_pose_size: N.
        routing: the rule; dynamic routing with three iterations by default.

    Example:
        >>> layer = SharedCaps(8, parent_types=10, parent_pose_size=16)
        >>> children = PrimaryCaps(1, types=4, pose_size=8, kernel_size=9)(torch.randn(2, 1, 10, 30))
        >>> layer(children).activation.shape
        torch.Size([2, 1, 10])
    """

    def __init__(
        self, child_pose_size: int, parent_types: int, parent_pose_size: int, routing: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.transform = nn.Parameter(torch.empty(1, 1, parent_types, child_pose_size, parent_pose_size))
        bound = (6 / (child_pose_size + parent_types * parent_pose_size)) ** 0.5
        nn.init.uniform_(self.transform, -bound, bound)
        self.routing = routing if routing is not None else DynamicRouting()

    def forward(self, children: Capsules, return_couplings: bool = False) -> Capsules | tuple[Capsules, Tensor]:
        """Parents ``[B, 1, J, R, N]``, and the couplings ``[B, J, S·C, 1]`` where asked for."""
        pose = children.pose.flatten(1, 2).unsqueeze(2)
        routing_map = RoutingMap.shared(pose.shape[1], pose.device)
        return self.routing(pose, self.transform, routing_map, return_couplings=return_couplings)


class Decoder(nn.Module):
    """Draws an image from the pose of one class capsule; all others are masked to zero.

    Sabour, Frosst & Hinton 2017, section 4.1: linear layers of 512 and 1024 with ReLU, then a sigmoid per pixel.

    Arguments:
        classes: J.
        pose_size: N.
        image_shape: (channels, height, width) of the image.
        hidden_sizes: widths of the hidden layers.

    Example:
        >>> decoder = Decoder(10, 16, (3, 32, 20))
        >>> decoder(torch.randn(2, 1, 10, 1, 16), torch.tensor([3, 5])).shape
        torch.Size([2, 3, 32, 20])
    """

    def __init__(
        self,
        classes: int,
        pose_size: int,
        image_shape: tuple[int, int, int],
        hidden_sizes: Sequence[int] = (512, 1024),
    ) -> None:
        super().__init__()
        self.classes = classes
        self.image_shape = tuple(image_shape)
        pixels = image_shape[0] * image_shape[1] * image_shape[2]
        sizes = [classes * pose_size, *hidden_sizes]
        hidden = [module for pair in pairwise(sizes) for module in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], pixels), nn.Sigmoid())

    def forward(
        self, pose: Float[Tensor, "B 1 J R N"], of_class: Int64[Tensor, "B"]
    ) -> Float[Tensor, "B channels height width"]:
        """Images ``[B, channels, height, width]`` in [0, 1], each drawn from the capsule of its class."""
        mask = functional.one_hot(of_class, self.classes).to(pose)
        visible = pose * mask[:, None, :, None, None]
        return self.layers(visible.flatten(1)).unflatten(1, self.image_shape)
