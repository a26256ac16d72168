"""Capsules, predictions and operations on poses: squash, length and Coordinate Addition.

In this library, docstrings, annotations and einsums name the dimensions of tensors with these letters:

====== ==========================================================================
letter meaning
====== ==========================================================================
``B``  batch size
``S``  number of child sites (positions in the layer below)
``C``  number of child types (capsules per child site)
``P``  number of parent sites
``J``  number of parent types
``E``  number of edges between child and parent sites
``K``  number of transforms
``R``  rows of a pose: 1 for vector capsules, 4 for matrix capsules
``Q``  columns of a child's pose
``N``  columns of a vote and of a parent's pose
====== ==========================================================================

A child's pose has shape ``R×Q``, a transform ``Q×N``, and a vote or a parent's pose ``R×N``.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import _register_namedtuple

from torchcaps.checks import INTEGERS, bounds, check_activation, check_choice, check_floating, described, has_values

SquashForm = Literal["sabour", "su", "exponential", "unit", "none"]
SQUASH_CONSTANT = {"sabour": 1.0, "su": 0.5}
"""The constant c in ``|s|² / (c + |s|²)``, the length of a squashed pose."""


class Capsules(NamedTuple):
    """Poses and activations of one layer of capsules.

    Arguments:
        pose: ``[B, S, C, R, Q]``: batch, sites, capsule types per site, rows and columns of a pose.
        activation: ``[B, S, C]``, in [0, 1], except if the activations are the lengths of poses that are not squashed.
            Such activations can exceed 1.

    Example:
        >>> Capsules(torch.zeros(2, 36, 32, 1, 8), torch.zeros(2, 36, 32)).pose.shape
        torch.Size([2, 36, 32, 1, 8])
    """

    pose: Float[Tensor, "B S C R Q"]
    activation: Float[Tensor, "B S C"]

    def masked(self, keep: Bool[Tensor, "B S"] | Bool[Tensor, "B S C"]) -> "Capsules":
        """Set the poses and the activations of some capsules to 0, for example of padding.

        Such capsules have no effect on the parents, with three exceptions. In `ClassCaps`, the coordinates of a capsule
        still vote, unless the rule uses the activations of the children. EM routing counts all children in the cost of
        a parent; with its option ``normalise_data=False``, it does not. The statistics of a BatchNorm, as in
        `PoseNorm` and in variational Bayes routing in training mode, include masked capsules and their parents. Parents
        without any other children can have an activation above 0: mask them too.

        Arguments:
            keep: ``[B, S]`` or ``[B, S, C]``, True for the capsules that keep their pose and activation.

        Raises:
            ValueError: ``keep`` is not a boolean tensor of such a shape.

        Example:
            >>> capsules = Capsules(torch.ones(1, 3, 2, 1, 8), torch.ones(1, 3, 2))
            >>> capsules.masked(torch.tensor([[True, True, False]])).activation.sum(dim=2)
            tensor([[2., 2., 0.]])
        """
        batch, sites, types = self.activation.shape
        fits = isinstance(keep, Tensor) and keep.dtype == torch.bool and keep.shape[:2] == (batch, sites)
        if not fits or keep.shape[2:] not in ((), (types,)):
            raise ValueError(
                f"keep must be a boolean tensor [B, S] or [B, S, C], with B, S, C = {batch}, {sites}, {types}; got "
                f"{described(keep)}"
            )
        removed = ~keep if keep.ndim == 3 else ~keep[..., None]
        return Capsules(self.pose.masked_fill(removed[..., None, None], 0), self.activation.masked_fill(removed, 0))


class Prediction(NamedTuple):
    """Output of a model for a batch of images.

    Arguments:
        scores: ``[B, classes]``: one score per class, either an activation in [0, 1] or a logit. The class with the
            largest score is the predicted class.
        capsules: the class capsules; None for a network without capsules.
        reconstruction: ``[B, channels, height, width]`` in [0, 1]; None for a network without a decoder.

    Example:
        >>> Prediction(torch.tensor([[0.1, 0.9]])).scores.argmax(dim=1)
        tensor([1])
    """

    scores: Float[Tensor, "B classes"]
    capsules: Capsules | None = None
    reconstruction: Float[Tensor, "B channels height width"] | None = None


for _kind in (Capsules, Prediction):  # torch.export.save and torch.export.load find the types by these names
    _register_namedtuple(_kind, serialized_type_name=f"torchcaps.{_kind.__name__}")


def check_capsules(capsules: Capsules, name: str = "children") -> None:
    """Check that an argument is a `Capsules`, not a tensor.

    Raises:
        ValueError: ``capsules`` is not a `Capsules`.
    """
    if not isinstance(capsules, Capsules):
        raise ValueError(f"{name} must be Capsules(pose, activation); got {described(capsules)}")


def check_sites(capsules: Capsules, name: str = "children") -> None:
    """Check that an argument is a `Capsules`, and has the dimensions of sites and types.

    Raises:
        ValueError: ``capsules`` is not a `Capsules`, or a tensor has other dimensions than documented there.
    """
    check_capsules(capsules, name)
    pose, activation = capsules
    if not isinstance(pose, Tensor) or pose.ndim != 5:
        vectors = isinstance(pose, Tensor) and pose.ndim == 4
        cure = ": use pose[..., None, :] for vector poses" if vectors else ""
        raise ValueError(f"pose must be [B, S, C, R, Q]; got {described(pose)}{cure}")
    check_floating("pose", pose)
    check_activation(activation, pose)


def wide(tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Convert float16 and bfloat16 to float32, because routing needs at least float32; leave wider dtypes unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def lengths(pose: Float[Tensor, "*capsules R Q"]) -> Float[Tensor, "*capsules"]:
    """Compute the Euclidean length of each pose. The gradient at a zero pose is zero.

    Arguments:
        pose: ``[..., R, Q]``: rows and columns of each pose in the last two dimensions.

    Raises:
        ValueError: ``pose`` is not a floating-point tensor with at least two dimensions.

    Example:
        >>> lengths(torch.tensor([[3.0, 4.0]]))
        tensor(5.)
    """
    _check_pose(pose)
    return torch.linalg.vector_norm(pose, dim=(-2, -1))


def _check_pose(pose: Tensor) -> None:
    check_floating("pose", pose)
    if pose.ndim < 2:
        raise ValueError(f"pose must be [..., R, Q], with rows and columns; got {list(pose.shape)}: use pose[None]")


def squash(pose: Float[Tensor, "*capsules R Q"], form: SquashForm = "sabour") -> Float[Tensor, "*capsules R Q"]:
    """Squash each pose: limit its length and keep its direction.

    ::

        sabour         v = |s|² / (1 + |s|²) · s / |s|       Sabour, Frosst & Hinton 2017, equation 1
        su             v = |s|² / (1/2 + |s|²) · s / |s|     Su 2018
        exponential    v = (1 - e^-|s|) · s / |s|            Mazzia, Salvetti & Chiaberge 2021
        unit           v = s / |s|
        none           v = s

    s is the pose before squashing, and v is the pose after it. The length of v in ``su`` is up to twice its length in
    ``sabour``. The last two dimensions of ``pose`` are one pose: give vectors ``[..., Q]`` as ``pose[..., None, :]``.
    Values and first-order gradients are finite everywhere, including at zero, except that gradients of ``unit``
    overflow in float16 for poses shorter than 2e-5. The computation uses at least float32.

    Arguments:
        pose: ``[..., R, Q]``: rows and columns of each pose in the last two dimensions. The squared length of a pose
            must not overflow float32, or the dtype if it is wider.
        form: ``sabour``, ``su``, ``exponential``, ``unit`` or ``none``.

    Raises:
        ValueError: ``pose`` is not a floating-point tensor with at least two dimensions, or ``form`` is not one of the
            known forms.

    Example:
        >>> squash(torch.tensor([[3.0, 4.0]]))
        tensor([[0.5769, 0.7692]])
    """
    _check_pose(pose)
    if form == "none":
        return pose
    widened = wide(pose)
    return _scaled(widened, lengths(widened), form).to(pose.dtype)


def squashed(pose: Float[Tensor, "*capsules R Q"], form: SquashForm = "sabour") -> Capsules:
    """Create capsules from poses: squash each pose, and use its length as the activation.

    This function computes the length from the length of s, the pose before squashing. For long poses, the float32
    gradient of ``lengths(squash(s))`` would consist of rounding errors only.

    Arguments:
        pose: ``[..., R, Q]``: rows and columns of each pose in the last two dimensions. If the squared length of a pose
            overflows float32, its activation is NaN; with ``none`` it is ∞, and with ``unit`` 0.
        form: ``sabour``, ``su``, ``exponential``, ``unit`` or ``none``; see `squash` for the formulas.

    Raises:
        ValueError: ``pose`` is not a floating-point tensor with at least two dimensions, or ``form`` is not one of the
            known forms.

    Example:
        >>> squashed(torch.tensor([[3.0, 4.0]])).activation
        tensor(0.9615)
    """
    if form in ("none", "unit"):
        short = squash(pose, form)
        return Capsules(short, lengths(short))
    _check_pose(pose)
    widened = wide(pose)
    length = lengths(widened)
    short, activation = _scaled(widened, length, form), _squashed_length(length, form)
    return Capsules(short.to(pose.dtype), activation.to(pose.dtype))


def _scaled(pose: Tensor, length: Tensor, form: SquashForm) -> Tensor:
    """Squash each pose, given its length. The form is not ``none``."""
    check_choice("form", form, get_args(SquashForm))
    length = length[..., None, None]
    if form == "unit":
        return pose / length.clamp_min(1e-12)
    if form == "exponential":
        return pose * torch.where(length > 0, _squashed_length(length, form) / torch.where(length > 0, length, 1), 1)
    return pose * (length / (SQUASH_CONSTANT[form] + length.square()))


def _squashed_length(length: Tensor, form: SquashForm) -> Tensor:
    """Return the length of a squashed pose, given its length before squashing."""
    is_long, info = length > 1, torch.finfo(length.dtype)
    far, near = torch.where(is_long, length, 1), torch.where(is_long, 1, length)
    if form == "exponential":
        # The limit is below 1, so that rounding makes no length larger than 1.
        found = torch.where(is_long, 1 - torch.exp(-far), -torch.expm1(-near)).clamp_max(1 - 4 * info.eps)
        return torch.where(length <= info.max, found, math.nan)
    constant, far, near = SQUASH_CONSTANT[form], far.square(), near.square()
    found = torch.where(is_long, 1 / (1 + constant / far), near / (constant + near))
    return torch.where(far <= info.max, found, math.nan)


def one_hot(labels: Int[Tensor, "B"], num_classes: int, name: str = "labels") -> Int[Tensor, "B classes"]:
    """Encode labels as one-hot vectors. Unlike `torch.nn.functional.one_hot`, this works under `torch.func`.

    Arguments:
        labels: ``[B]``, integers in [0, num_classes).
        num_classes: number of classes.
        name: name of the labels in error messages.

    Raises:
        ValueError: ``labels`` is not an integer tensor ``[B]``, or a label is not in [0, num_classes). The range is
            not checked while a graph is traced.

    Example:
        >>> one_hot(torch.tensor([1, 0]), 3)
        tensor([[0, 1, 0],
                [1, 0, 0]])
    """
    check_labels(labels, num_classes, name)
    return (labels.long()[:, None] == torch.arange(num_classes, device=labels.device)).long()


def check_labels(labels: Tensor, num_classes: int, name: str = "labels") -> None:
    """Check that labels are integers [B] from 0 to num_classes - 1. Values are not checked while a graph is traced.

    Raises:
        ValueError: ``labels`` is not such a tensor.
    """
    if not isinstance(labels, Tensor) or labels.ndim != 1 or labels.dtype not in INTEGERS:
        raise ValueError(f"{name} must be integers [B], one class index per sample; got {described(labels)}")
    if has_values(labels) and len(labels):
        low, high = bounds(labels.long())
        if low < 0 or high >= num_classes:
            allowed = f"from 0 to {num_classes - 1} for {num_classes} classes"
            raise ValueError(f"{name} must be {allowed}; got {low} to {high}")


def vector_side(columns: int) -> int:
    """Return the number of columns of the square matrix in which `coordinate_addition` reads a vector.

    Raises:
        ValueError: ``columns`` is not the square of a number of at least 2.
    """
    side = math.isqrt(columns)
    if side < 2 or side * side != columns:
        raise ValueError(
            f"adding coordinates to vector votes needs a pose size of 4, 9, 16, … (a square); got {columns}: "
            "change the pose size or leave the coordinates out"
        )
    return side


def coordinate_addition(
    pose: Float[Tensor, "B S C R Q"], transform: Float[Tensor, "K C J Q N"], coordinates: Float[Tensor, "S 2"]
) -> tuple[Float[Tensor, "B S C R Q2"], Float[Tensor, "K C J Q2 N"]]:
    """Add the position of each child to its votes (Coordinate Addition).

    Hinton, Sabour & Frosst 2018, section 4. The coordinates (y, x) of the child's site are added to the first two
    elements of the right-hand column of each vote. To do this, the function appends d = (y, x, 0, …) to the pose M as
    a column, and (0 … 0 1) to the transform W as a row. Each vote is still the product of a pose and a transform, so
    every rule and kernel can compute it::

        [M | d] · [W; 0 … 0 1] = M W + d · (0 … 0 1)

    With vector poses (R = 1), each vote is treated as a square matrix stored row by row. The function then appends y
    and x to the pose, as two more elements, and two one-hot rows to the transform. These rows add y and x to the first
    two elements of the right-hand column of the vote.

    Arguments:
        pose: ``[B, S, C, R, Q]``, poses of the children.
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        coordinates: ``[S, 2]``, vertical and horizontal position (y, x) of each child site, for example in
            [0, 1].

    Returns:
        The extended pose and the extended transform. In both, the size of dimension Q grows by 1, or by 2 if R = 1.

    Raises:
        ValueError: an argument is not a floating-point tensor of the documented shape, or R = 1 and N is not a perfect
            square (4, 9, 16, …).

    Example:
        >>> pose, transform = coordinate_addition(torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 1, 2, 2),
        ...                                       torch.tensor([[0.25, 0.75]]))
        >>> pose[0, 0, 0] @ transform[0, 0, 0]
        tensor([[0.0000, 0.2500],
                [0.0000, 0.7500]])
    """
    given = {"pose": (pose, 5), "transform": (transform, 5), "coordinates": (coordinates, 2)}
    for name, (tensor, dimensions) in given.items():
        check_floating(name, tensor)
        if tensor.ndim != dimensions:
            raise ValueError(f"{name} must have {dimensions} dimensions; got {described(tensor)}")
    if coordinates.shape != (pose.shape[1], 2):
        raise ValueError(f"coordinates must be [S, 2] = [{pose.shape[1]}, 2]; got {list(coordinates.shape)}")
    batch, _, types, rows, _ = pose.shape
    transforms, _, parents, _, columns = transform.shape
    if rows == 1:
        side = vector_side(columns)
        place = slice(side - 1, 2 * side, side)
        placed = coordinates[:, None, :]
    else:
        place = slice(columns - 1, columns)
        placed = functional.pad(coordinates, (0, rows - 2))[:, :, None]
    fixed = torch.eye(columns, dtype=transform.dtype, device=transform.device)[place]
    return (
        torch.cat([pose, placed.to(pose)[None, :, None].expand(batch, -1, types, -1, -1)], dim=-1),
        torch.cat([transform, fixed.expand(transforms, types, parents, -1, -1)], dim=-2),
    )
