"""Self-attention routing: Mazzia, Salvetti & Chiaberge 2021, "Efficient-CapsNet" (arXiv 2101.12491)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, lengths, squash
from torchcaps.checks import check_sizes
from torchcaps.routing.rule import LayerShape, Rule
from torchcaps.routing.votes import Agreement, Competition, Votes


class SelfAttentionRouting(Rule):
    """A child prefers the parents on which the others' votes look like its own: one pass of self-attention.

    Mazzia, Salvetti & Chiaberge 2021, section 3.2::

        c_i = softmax over the types at a parent site (û_ij · Σ_k û_kj / √D)
        s_j = Σ_i (c_ij + b_ij) û_ij
        v_j = (1 - e^-|s_j|) s_j / |s_j|            a_j = |v_j|

    b is learned, begins at 0, and is shared as the layer's transforms are. The activations of the children are not
    used. The couplings that are returned are c alone.

    Arguments:
        transforms: K of the layer's map.
        child_types: C.
        parent_types: J.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> from torchcaps import RoutingMap
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> rule = SelfAttentionRouting(transforms=6, child_types=4, parent_types=10)
        >>> rule(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    weighs_activations = False
    competition: Competition = "types"

    def __init__(self, transforms: int, child_types: int, parent_types: int) -> None:
        super().__init__()
        check_sizes(transforms=transforms, child_types=child_types, parent_types=parent_types)
        self.bias = nn.Parameter(torch.zeros(transforms, child_types, parent_types))

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "SelfAttentionRouting":
        """The rule for the children of a layer."""
        return cls(layer.transforms, layer.child_types, layer.parent_types, **options)

    def prepare(self, pose: Tensor, transform: Tensor) -> tuple[Tensor, Tensor]:
        """Every vote, and beside it the same vote times its bias."""
        bias = self.bias.to(transform.dtype)[..., None, None]
        return pose, torch.cat([transform, bias * transform], dim=4)

    def route(self, votes: Votes) -> Capsules:
        """Sums of votes, squashed by an exponential."""
        rows, columns = votes.parent_shape[3], votes.parent_shape[4] // 2
        even = votes.moments(variance=False)
        types = votes.parent_shape[2]
        sums = types * even.mass[..., None, None] * even.mean
        plain, biased = sums[..., :columns], sums[..., columns:]
        linear = nn.functional.pad(plain / math.sqrt(rows * columns), (0, columns))
        found = votes.moments(Agreement(linear=linear), variance=False)
        total = found.mass[..., None, None] * found.mean[..., :columns] + biased
        pose = squash(total, "exponential")
        return Capsules(pose, lengths(pose))

    @property
    def saved_options(self) -> dict[str, Any]:
        """What the rule is made with."""
        return dict(zip(("transforms", "child_types", "parent_types"), self.bias.shape, strict=True))
