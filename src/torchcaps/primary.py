"""Primary capsules, and BatchNorm of poses."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.capsules import Capsules, SquashForm, check_sites, squash, squashed, wide
from torchcaps.checks import check_choice, check_shape, check_sizes, pair
from torchcaps.convolution import Im2colConv2d


class PrimaryCaps(nn.Module):
    """Primary capsules: a convolution whose output channels at each position form the poses.

    In Sabour, Frosst & Hinton 2017, section 4, a pose is a squashed vector of ``pose_size`` *channels at one position*;
    its length is the activation. In Hinton, Sabour & Frosst 2018, section 4, a pose is a matrix, computed by a linear
    function from the features, and the activation is a sigmoid. For matrix capsules, use ``pose_size=(4, 4),
    kernel_size=1, activation="sigmoid", bias=False``.

    Arguments:
        in_channels: channels of the input feature map.
        types: number of capsule types per position (C).
        pose_size: length of a pose (Q), or its rows and columns (R, Q). Output channel (c·R + r)·Q + q of the
            convolution is element (r, q) of the pose of type c.
        kernel_size, stride, padding: of the convolution: an integer or (height, width). `Im2colConv2d` accepts integers
            only.
        bias: whether the convolution has a bias.
        squash_form: how poses are squashed: ``sabour``, ``su``, ``exponential``, ``unit`` or ``none``. None is
            ``sabour`` if the activation is the length of the pose, and ``none`` if it is a sigmoid.
        activation: ``length`` of the pose, or ``sigmoid`` of the output of a second convolution.
        im2col: use `Im2colConv2d`, which computes the convolution as one matrix product and needs more memory.
        normalise: BatchNorm of the poses, and of the logits of a sigmoid activation: ``none`` (no BatchNorm), ``plain``
            (without learned parameters) or ``affine`` (with a learned scale and offset).

    Raises:
        ValueError: ``squash_form``, ``activation`` or ``normalise`` is not one of the known values, a size is not an
            integer of at least 1, or ``padding`` is not an integer of at least 0.

    Example:
        >>> import torch
        >>> PrimaryCaps(256, types=32, pose_size=8, kernel_size=9, stride=2)(torch.randn(1, 256, 20, 20)).pose.shape
        torch.Size([1, 36, 32, 1, 8])
    """

    def __init__(
        self,
        in_channels: int,
        types: int,
        pose_size: int | Sequence[int],
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        squash_form: SquashForm | None = None,
        activation: Literal["length", "sigmoid"] = "length",
        im2col: bool = False,
        normalise: Literal["none", "plain", "affine"] = "none",
    ) -> None:
        super().__init__()
        check_choice("activation", activation, ("length", "sigmoid"))
        if squash_form is None:
            squash_form = "sabour" if activation == "length" else "none"
        check_choice("squash_form", squash_form, get_args(SquashForm))
        check_choice("normalise", normalise, ("none", "plain", "affine"))
        check_sizes(in_channels=in_channels, types=types)
        for name, size, least in (("kernel_size", kernel_size, 1), ("stride", stride, 1), ("padding", padding, 0)):
            pair(name, size, least)
        self.types = types
        self.pose_shape = _pose_shape(pose_size)
        self.squash_form: SquashForm = squash_form
        below = (in_channels, types * math.prod(self.pose_shape))
        convolution: Any = Im2colConv2d if im2col else nn.Conv2d
        self.convolution = convolution(*below, kernel_size, stride, padding, bias=bias)
        self.activation = None
        if activation == "sigmoid":
            self.activation = convolution(in_channels, types, kernel_size, stride, padding, bias=bias)
        self.pose_norm, self.activation_norm = (
            nn.BatchNorm2d(channels, affine=normalise == "affine") if used and normalise != "none" else nn.Identity()
            for channels, used in ((below[1], True), (types, activation == "sigmoid"))
        )

    def forward(self, features: Float[Tensor, "B channels height width"]) -> Capsules:
        """Compute the capsules at every position of the convolution's output; sites are numbered row by row."""
        pose = _at_sites(wide(_normalised(self.pose_norm, self.convolution(features))))
        pose = pose.unflatten(2, (self.types, *self.pose_shape)).contiguous()
        if self.activation is None:
            return squashed(pose, self.squash_form)
        logits = wide(_normalised(self.activation_norm, self.activation(features)))
        return Capsules(squash(pose, self.squash_form), _at_sites(logits).sigmoid())

    if TYPE_CHECKING:
        __call__ = forward


def _pose_shape(pose_size: int | Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a pose."""
    if isinstance(pose_size, Sequence):
        check_shape("pose_size", pose_size, "rows, columns")
        return pose_size[0], pose_size[1]
    check_sizes(pose_size=pose_size)
    return 1, pose_size


def _at_sites(maps: Float[Tensor, "B C H W"]) -> Float[Tensor, "B S C"]:
    """Number the positions row by row."""
    # Not maps.flatten(2).mT: in torch 2.13 on CPUs, BatchNorm of a tensor with such strides computes wrong gradients if
    # the batch has one image.
    return maps.permute(0, 2, 3, 1).flatten(1, 2)


def _normalised(norm: nn.Module, values: Tensor) -> Tensor:
    """Convert values to the dtype of the norm's statistics or weights, if it has any, and normalise them."""
    own = [x for x in (getattr(norm, "running_mean", None), getattr(norm, "weight", None)) if x is not None]
    return norm(values.to(own[0].dtype) if own else values)


class PoseNorm(nn.Module):
    """BatchNorm of every pose element over samples and sites, for use between two capsule layers: Hahn et al. 2019.

    Masked capsules count in the statistics, and their poses are not 0 after the norm: mask the capsules again.

    Arguments:
        types: number of capsule types (C).
        pose_size: length of a pose (Q), or its rows and columns (R, Q).
        affine: learn a scale and an offset for every pose element.

    Raises:
        ValueError: a size is not an integer of at least 1. When the module is called: the argument is not a
            `Capsules` with ``types`` types and as many elements per pose as ``pose_size``, or pose and activation do
            not have the documented dimensions.

    Example:
        >>> import torch
        >>> PoseNorm(4, (2, 3))(Capsules(torch.randn(2, 9, 4, 2, 3), torch.rand(2, 9, 4))).pose.shape
        torch.Size([2, 9, 4, 2, 3])
    """

    def __init__(self, types: int, pose_size: int | Sequence[int], affine: bool = False) -> None:
        super().__init__()
        check_sizes(types=types)
        self.types = types
        self.norm = nn.BatchNorm1d(types * math.prod(_pose_shape(pose_size)), affine=affine)

    def forward(self, capsules: Capsules) -> Capsules:
        """Normalise the poses; the activations stay the same."""
        check_sites(capsules, "capsules")
        pose = capsules.pose
        _, _, types, rows, columns = pose.shape
        size = self.norm.num_features // self.types
        if (types, rows * columns) != (self.types, size):
            raise ValueError(
                f"the capsules have {types} types and poses of {rows}×{columns}, but this PoseNorm was created for "
                f"{self.types} types and poses of {size} elements: create PoseNorm({types}, ({rows}, {columns}))"
            )
        numbers = _normalised(self.norm, pose.flatten(2).flatten(0, 1))
        return Capsules(numbers.to(pose.dtype).view(pose.shape), capsules.activation)

    if TYPE_CHECKING:
        __call__ = forward
