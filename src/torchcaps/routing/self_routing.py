"""Self-routing: Hahn, Pyeon & Kim 2019 (NeurIPS)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.checks import check_shape, check_sizes
from torchcaps.routing.rule import LayerShape, Rule, check_transform
from torchcaps.routing.votes import Competition, Votes
from torchcaps.routing_map import RoutingMap


class SelfRouting(Rule):
    """Self-routing: a learned function predicts the couplings of each child from its pose, in one iteration.

    Hahn, Pyeon & Kim 2019, equations 3 to 5::

        c_ij = softmax_j (W_ij · u_i + b_ij)        over the parent types j at a parent site
        p_j = Σ_i a_i c_ij û_ij / Σ_i a_i c_ij
        a_j = Σ_i a_i c_ij / Σ_i a_i

    u_i and a_i are the pose and the activation of child i, û_ij is its vote for parent j, and c_ij its coupling. p_j
    and a_j are the pose and the activation of the parent. W and b are learned. Child sites that share transforms also
    share W and b. Initially W and b are 0, which gives uniform couplings. With one parent type, all couplings are 1,
    and so is the activation of every parent that has an active child. The authors also use BatchNorm on poses
    between layers, and train on the log of the activations; neither is part of this rule.

    Arguments:
        transforms: number of transforms of the layer's map (K).
        child_types: number of capsule types per child site (C).
        parent_types: number of capsule types per parent site (J).
        child_pose_shape: rows and columns (R, Q) of a child's pose.

    Raises:
        ValueError: a size is below 1, or ``child_pose_shape`` is not (rows, columns). When the rule is called: the
            transform and the rule differ in K, C or J, or the poses of the children do not have ``child_pose_shape``.

    Example:
        >>> from torchcaps import RoutingMap
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> rule = SelfRouting(transforms=6, child_types=4, parent_types=10, child_pose_shape=(1, 8))
        >>> rule(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    competition: Competition = "types"
    activation_from_mass = True

    def __init__(self, transforms: int, child_types: int, parent_types: int, child_pose_shape: Sequence[int]) -> None:
        super().__init__()
        check_sizes(transforms=transforms, child_types=child_types, parent_types=parent_types)
        check_shape("child_pose_shape", child_pose_shape, "rows, columns")
        self.transforms, self.child_types, self.parent_types = transforms, child_types, parent_types
        self.child_pose_shape = rows, columns = (*child_pose_shape,)
        self.weight = nn.Parameter(torch.empty(transforms, child_types, parent_types, columns, rows))
        self.bias = nn.Parameter(torch.empty(transforms, child_types, parent_types))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W and b to 0."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "SelfRouting":
        """Create the rule for a layer, using the sizes of the layer's transforms and children."""
        return cls(layer.transforms, layer.child_types, layer.parent_types, layer.child_pose_shape, **options)

    def prepare(self, pose: Tensor, transform: Tensor, routing_map: RoutingMap) -> tuple[Tensor, Tensor]:
        """Check that the rule was created for these children and transforms."""
        check_transform(transform, self.bias, "b")
        if self.weight.shape[3:] != (pose.shape[4], pose.shape[3]):
            raise ValueError(
                f"the poses of the children are {pose.shape[3]}×{pose.shape[4]}, but this rule was created for "
                f"{self.weight.shape[4]}×{self.weight.shape[3]}: create the rule with "
                f"child_pose_shape={tuple(pose.shape[3:])}"
            )
        return pose, transform

    def logit_weights(self) -> Tensor:
        """Return W and b: the logit of a coupling is W_ij · u_i + b_ij."""
        return torch.cat([self.weight.mT.flatten(3), self.bias[..., None]], dim=3)

    def route(self, votes: Votes) -> Capsules:
        """Return the mean votes as poses, and Σ_i a_i c_ij / Σ_i a_i as activations."""
        found = votes.moments(variance=False)
        total = votes.activation_sums()[:, :, None]
        empty = total == 0  # not `total > 0`, which would turn NaN into an activation of 0
        activation = torch.where(empty, 0, found.mass / torch.where(empty, 1, total))
        return Capsules(found.mean, activation.clamp(max=1))  # rounding can exceed 1
