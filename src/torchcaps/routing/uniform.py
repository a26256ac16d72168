"""Even couplings: the control beside every routing rule."""

from typing import Any, get_args

from torchcaps.capsules import Capsules, SquashForm, lengths, squash
from torchcaps.checks import check_choice
from torchcaps.routing.rule import Rule
from torchcaps.routing.votes import Votes


class UniformRouting(Rule):
    """Every child divides itself evenly among all the parents that it reaches; nothing is routed.

    ::

        v_j = squash(Σ_i û_ij / number of parents that child i reaches)        a_j = |v_j|

    The first pass of dynamic routing (Sabour, Frosst & Hinton 2017), and all of it for one iteration. What a network
    gains over this rule is routing's own share.

    Arguments:
        squash_form: applied to the parents; see `squash`.

    Raises:
        ValueError: an unknown form.

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
        check_choice("squash form", squash_form, get_args(SquashForm))
        self.squash_form: SquashForm = squash_form

    def route(self, votes: Votes) -> Capsules:
        """Squashed sums of evenly shared votes."""
        found = votes.moments(variance=False)
        pose = squash(found.mass[..., None, None] * found.mean, self.squash_form)
        return Capsules(pose, lengths(pose))

    @property
    def saved_options(self) -> dict[str, Any]:
        """What the rule is made with."""
        return {"squash_form": self.squash_form}
