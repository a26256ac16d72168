"""Capsules, predictions, and what is done to a pose on its own: squashing, measuring its length, adding coordinates.

Shape legend, used in every docstring, annotation and einsum of this library:

====== ==========================================================================
letter meaning
====== ==========================================================================
``B``  batch
``S``  child sites (positions of the layer below)
``C``  child types (capsules at one child site)
``P``  parent sites
``J``  parent types
``E``  edges between sites
``K``  transforms
``R``  rows of a pose: 1 for vector capsules, 4 for matrix capsules
``Q``  columns of a child's pose
``N``  columns of a vote and of a parent's pose
====== ==========================================================================

A pose is ``R×Q``, a transform ``Q×N``, a vote ``R×N``.
"""

import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import _register_namedtuple

from torchcaps.checks import INTEGERS, described, has_values

SquashForm = Literal["sabour", "su", "exponential", "unit", "none"]


class Capsules(NamedTuple):
    """One layer of capsules: what each has found (pose) and how sure it is (activation).

    Arguments:
        pose: ``[B, S, C, R, Q]``.
        activation: ``[B, S, C]``, in [0, 1] where the layer squashes its poses.
    """

    pose: Float[Tensor, "B S C R Q"]
    activation: Float[Tensor, "B S C"]


class Prediction(NamedTuple):
    """A model's answer to a batch of images.

    Arguments:
        scores: ``[B, classes]``, activations of the class capsules in [0, 1], or logits; the largest is the prediction.
        capsules: the class capsules, or None for a network without any.
        reconstruction: ``[B, channels, height, width]`` in [0, 1], or None for a network without a decoder.
    """

    scores: Float[Tensor, "B classes"]
    capsules: Capsules | None = None
    reconstruction: Float[Tensor, "B channels height width"] | None = None


for _kind in (Capsules, Prediction):  # torch.export.save writes them into a program, torch.export.load finds them there
    _register_namedtuple(_kind, serialized_type_name=f"torchcaps.{_kind.__name__}")


def check_capsules(children: Capsules) -> None:
    """That children are `Capsules`, not a tensor.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(children, Capsules):
        raise ValueError(f"children must be Capsules(pose, activation); got {described(children)}")


def lengths(pose: Float[Tensor, "*capsules R Q"]) -> Float[Tensor, "*capsules"]:
    """Euclidean length of each pose; its gradient at a zero pose is zero.

    Example:
        >>> lengths(torch.tensor([[3.0, 4.0]]))
        tensor(5.)
    """
    return torch.linalg.vector_norm(pose, dim=(-2, -1))


def squash(pose: Float[Tensor, "*capsules R Q"], form: SquashForm = "sabour") -> Float[Tensor, "*capsules R Q"]:
    """Shrink a pose to a length below 1 and keep its direction.

    Sabour, Frosst & Hinton 2017, equation 1 (``sabour``, c = 1); Su 2018 (``su``, c = 1/2, which magnifies near zero)::

        v = |s|² / (c + |s|²) · s / |s|

    Mazzia, Salvetti & Chiaberge 2021 have ``exponential``, ``v = (1 - e^-|s|) s / |s|``. ``unit`` is ``s / |s|`` and
    ``none`` is ``s``. Value and gradient are finite everywhere, at zero too.

    Arguments:
        pose: ``[..., R, Q]``, any real values whose squared length fits the dtype.
        form: ``sabour``, ``su``, ``exponential``, ``unit`` or ``none``.

    Raises:
        ValueError: the form is not one of these.

    Example:
        >>> squash(torch.tensor([[3.0, 4.0]]))
        tensor([[0.5769, 0.7692]])
    """
    if form == "none":
        return pose
    if form not in get_args(SquashForm):
        raise ValueError(f"unknown squash form {form!r}: use one of {', '.join(get_args(SquashForm))}")
    length = lengths(pose)[..., None, None]
    if form == "unit":
        return pose / length.clamp_min(1e-12)
    if form == "exponential":
        return pose * torch.where(length > 0, -torch.expm1(-length) / torch.where(length > 0, length, 1), 1)
    return pose * (length / ((1.0 if form == "sabour" else 0.5) + length.square()))


def one_hot(labels: Int[Tensor, "B"], num_classes: int) -> Int[Tensor, "B classes"]:
    """1 at each label's class and 0 elsewhere; `torch.func` goes through it, as it does not through PyTorch's own.

    Arguments:
        labels: ``[B]``, integers in [0, classes).
        num_classes: how many there are.

    Raises:
        ValueError: labels are not integers ``[B]``, or out of range (not checked while a graph is traced).

    Example:
        >>> one_hot(torch.tensor([1, 0]), 3)
        tensor([[0, 1, 0],
                [1, 0, 0]])
    """
    if labels.ndim != 1 or labels.dtype not in INTEGERS:
        raise ValueError(f"labels must be integers [B], the class of each sample; got {described(labels)}")
    if has_values(labels) and len(labels):
        low, high = (bound.item() for bound in labels.aminmax())
        if low < 0 or high >= num_classes:
            raise ValueError(f"labels must lie in [0, {classes}), as there are {classes} classes; got {low} to {high}")
    return (labels[:, None] == torch.arange(num_classes, device=labels.device)).long()


def coordinate_addition(
    pose: Float[Tensor, "B S C R Q"], transform: Float[Tensor, "K C J Q N"], coordinates: Float[Tensor, "S 2"]
) -> tuple[Float[Tensor, "B S C R Q2"], Float[Tensor, "K C J Q2 N"]]:
    """Add where a child stands to its votes: Coordinate Addition, Hinton, Sabour & Frosst 2018, section 4.

    Row and column are added to the first two elements of the right-hand column of each vote. A vote stays a product of
    pose and transform, so that every rule and every kernel takes it: the pose gains columns that hold the coordinates,
    the transform gains rows that put them in place::

        [M | d] · [W; 0 … 0 1] = M W + d · (0 … 0 1)          d = (row, column, 0, …)

    A vector pose (R = 1) is read as a square matrix, row by row.

    Arguments:
        pose: ``[B, S, C, R, Q]``.
        transform: ``[K, C, J, Q, N]``.
        coordinates: ``[S, 2]``, row and column of each child site, in [0, 1].

    Returns:
        pose and transform with one more Q (two more where R = 1).

    Raises:
        ValueError: a vector pose whose N is no square of 2 or more.

    Example:
        >>> pose, transform = coordinate_addition(torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 1, 1, 2, 2),
        ...                                       torch.tensor([[0.25, 0.75]]))
        >>> pose[0, 0, 0] @ transform[0, 0, 0]
        tensor([[0.0000, 0.2500],
                [0.0000, 0.7500]])
    """
    batch, _, types, rows, _ = pose.shape
    transforms, _, parents, _, columns = transform.shape
    if rows == 1:
        side = math.isqrt(columns)
        if side < 2 or side * side != columns:
            raise ValueError(f"a vector vote of length {columns} is no square matrix: use a square of 2 or more")
        place = [side - 1, 2 * side - 1]
        placed = coordinates[:, None, :]
    else:
        place = [columns - 1]
        placed = functional.pad(coordinates, (0, rows - 2))[:, :, None]
    fixed = one_hot(torch.tensor(place, device=transform.device), columns).to(transform)
    return (
        torch.cat([pose, placed.to(pose)[None, :, None].expand(batch, -1, types, -1, -1)], dim=-1),
        torch.cat([transform, fixed.expand(transforms, types, parents, -1, -1)], dim=-2),
    )
