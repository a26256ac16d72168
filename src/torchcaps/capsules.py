"""Capsules, and the two things done to a pose on its own: squashing it and measuring its length.

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

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

SquashForm = Literal["sabour", "su", "unit", "none"]


class Capsules(NamedTuple):
    """One layer of capsules: what each has found (pose) and how sure it is (activation).

    Arguments:
        pose: ``[B, S, C, R, Q]``.
        activation: ``[B, S, C]``, in [0, 1] where the layer squashes its poses.
    """

    pose: Float[Tensor, "B S C R Q"]
    activation: Float[Tensor, "B S C"]


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

    ``unit`` is ``s / |s|`` and ``none`` is ``s``. Value and gradient are finite everywhere, at zero too.

    Arguments:
        pose: ``[..., R, Q]``, any real values with |s|² inside the dtype's range.
        form: ``sabour``, ``su``, ``unit`` or ``none``.

    Raises:
        ValueError: the form is not one of the four.

    Example:
        >>> squash(torch.tensor([[3.0, 4.0]]))
        tensor([[0.5769, 0.7692]])
    """
    if form == "none":
        return pose
    if form == "unit":
        return pose / lengths(pose)[..., None, None].clamp_min(1e-12)
    if form not in ("sabour", "su"):
        raise ValueError(f"unknown squash form {form!r}: use one of {', '.join(get_args(SquashForm))}")
    length = lengths(pose)[..., None, None]
    return pose * (length / ((1.0 if form == "sabour" else 0.5) + length.square()))
