"""Uniform couplings: a baseline with which routing rules are compared."""

from typing import get_args

from torchcaps.capsules import Capsules, SquashForm, squashed
from torchcaps.checks import check_choice
from torchcaps.routing.rule import Rule
from torchcaps.routing.votes import Votes


class UniformRouting(Rule):
    """Uniform routing: each child has the same coupling to all of its parents.

    ::

        v_j = squash(Σ_i û_ij / number of parents of child i)        a_j = |v_j|

    û_ij is the vote of child i for parent j. This is dynamic routing (Sabour, Frosst & Hinton 2017) with one iteration.
    To measure how much the routing rule of a network contributes, also train the network with this rule, and compare
    the results.

    Arguments:
        squash_form: squash of the parents: ``sabour``, ``su``, ``exponential``, ``unit`` or ``none``; see
            `torchcaps.squash` for the formulas.

    Raises:
        ValueError: ``squash_form`` is not one of the known forms.

    Example:
        >>> import torch
        >>> from torchcaps import RoutingMap
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> UniformRouting()(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).activation.shape
        torch.Size([2, 1, 10])
    """

    weighs_activations = False

    def __init__(self, squash_form: SquashForm = "sabour") -> None:
        super().__init__()
        check_choice("squash_form", squash_form, get_args(SquashForm))
        self.squash_form: SquashForm = squash_form

    def route(self, votes: Votes) -> Capsules:
        """Return the squashed sums of evenly weighted votes as poses, and the lengths of these poses as activations."""
        found = votes.moments(variance=False)
        return squashed(found.mass[..., None, None] * found.mean, self.squash_form)
