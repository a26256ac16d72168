"""Self-attention routing: Mazzia, Salvetti & Chiaberge 2021, "Efficient-CapsNet" (arXiv 2101.12491)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, squashed
from torchcaps.checks import check_sizes
from torchcaps.routing.rule import LayerShape, Rule, check_transform
from torchcaps.routing.votes import Agreement, Competition, Votes
from torchcaps.routing_map import RoutingMap


class SelfAttentionRouting(Rule):
    """Self-attention routing: one iteration; couplings from dot products of votes with the sum of a parent's votes.

    Mazzia, Salvetti & Chiaberge 2021, section 3.2::

        c_i = softmax over the types at a parent site (û_ij · Σ_k û_kj / √D)
        s_j = Σ_i (c_ij + b_ij) û_ij
        v_j = (1 - e^-|s_j|) s_j / |s_j|            a_j = |v_j|

    û_ij is the vote of child i for parent j, c_ij its coupling, b_ij its learned bias, and D the number of elements of
    a pose. b starts at 0, and has one value per transform, child type and parent type. The activations of the children
    are not used. The returned couplings are c, without b.

    s_j is a sum over all children of a parent, of which Efficient-CapsNet has 16. With hundreds of children, its length
    can become so large that all activations are almost 1 and the gradients vanish. Such layers need small transforms.

    Arguments:
        transforms: number of transforms of the layer's map (K).
        child_types: number of capsule types per child site (C).
        parent_types: number of capsule types per parent site (J).

    Raises:
        ValueError: a size is below 1. When the rule is called: the transform and the rule differ in K, C or J.

    Example:
        >>> from torchcaps import RoutingMap
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> rule = SelfAttentionRouting(transforms=6, child_types=4, parent_types=10)
        >>> rule(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    weighs_activations = False
    competition: Competition = "types"
    passes = 2

    def __init__(self, transforms: int, child_types: int, parent_types: int) -> None:
        super().__init__()
        check_sizes(transforms=transforms, child_types=child_types, parent_types=parent_types)
        self.transforms, self.child_types, self.parent_types = transforms, child_types, parent_types
        self.bias = nn.Parameter(torch.empty(transforms, child_types, parent_types))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set b to 0."""
        nn.init.zeros_(self.bias)

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "SelfAttentionRouting":
        """Create the rule for a layer, using the sizes of the layer's transforms."""
        return cls(layer.transforms, layer.child_types, layer.parent_types, **options)

    def prepare(self, pose: Tensor, transform: Tensor, routing_map: RoutingMap) -> tuple[Tensor, Tensor]:
        """Double the columns of the transforms: each vote û_ij becomes [û_ij, b_ij û_ij]."""
        check_transform(transform, self.bias, "b")
        bias = self.bias.to(transform.dtype)[..., None, None]
        return pose, torch.cat([transform, bias * transform], dim=4)

    def contributions(self, votes: Tensor, weights: Tensor, columns: int) -> Tensor:
        """Return (c_ij + b_ij) û_ij."""
        return super().contributions(votes, weights, columns) + votes[..., columns:]

    def route(self, votes: Votes) -> Capsules:
        """Return the squashed sums of votes as poses, and the lengths of these poses as activations."""
        rows, columns = votes.parent_shape[3], votes.parent_shape[4] // 2
        even = votes.moments(variance=False)
        types = votes.parent_shape[2]
        sums = types * even.mass[..., None, None] * even.mean
        plain, biased = sums[..., :columns], sums[..., columns:]
        linear = nn.functional.pad(plain / math.sqrt(rows * columns), (0, columns))
        found = votes.moments(Agreement(linear=linear), variance=False)
        total = found.mass[..., None, None] * found.mean[..., :columns] + biased
        return squashed(total, "exponential")
