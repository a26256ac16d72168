"""Inverted dot-product attention: Tsai, Srivastava, Goh & Salakhutdinov 2020 (arXiv 2002.04764)."""

import math
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules, check_capsules
from torchcaps.checks import check_choice, check_iterations, check_sizes
from torchcaps.routing.agreement import COMPETITIONS
from torchcaps.routing.rule import LayerShape, Rule
from torchcaps.routing.votes import Agreement, Competition, Votes


class AttentionRouting(Rule):
    """Inverted dot-product attention: couplings come from dot products of votes and parent poses.

    Tsai, Srivastava, Goh & Salakhutdinov 2020, algorithm 1::

        p_j = LayerNorm(Σ_i V_ij / number of parents of child i)
        repeat `iterations` - 1 times:
            c_i = softmax over the parents of child i (V_ij · p_j / √D)
            p_j = LayerNorm(Σ_i c_ij V_ij)
        a_j = σ(w · p_j + b)

    V_ij is the vote of child i for parent j, c_ij its coupling, p_j the pose of the parent, and D the number of
    elements of a pose. In the paper, capsules have no activations, and one linear layer computes the score of each
    class from the pose of its capsule. Here this linear layer, followed by a sigmoid, computes the activation of every
    parent. The activations of the children are not used. All parents share w, b, and the scale and offset that
    LayerNorm learns for each element. As in the authors' code, poses with a single element are not normalised:
    LayerNorm of one number does not depend on the number. Such a pose is a sum of votes and grows with the number of
    children; with many children, use small initial transforms.

    Arguments:
        pose_size: number of elements of a parent's pose (D), rows times columns; not 2, because LayerNorm keeps only
            the order of two numbers, so almost no gradient reaches the votes.
        iterations: number of routing iterations, including the first, whose couplings are uniform; from 1 to 1,000.
        competition: ``parents``: softmax over all parents of a child; ``types``: softmax over the parent types at
            each parent site, as in the code of Tsai et al. 2020. With ``types``, the first couplings are 1 / J, where J
            is the number of parent types.

    Raises:
        ValueError: ``pose_size`` is below 1 or equal to 2, ``iterations`` is not in [1, 1000], or ``competition`` is
            unknown. When the rule is called: the parents' poses do not have ``pose_size`` elements, or ``parents`` does
            not fit the layer and the batch.

    Example:
        >>> import torch
        >>> from torchcaps import RoutingMap
        >>> children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
        >>> AttentionRouting(pose_size=16)(children, torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)).pose.shape
        torch.Size([2, 1, 10, 1, 16])
    """

    weighs_activations = False

    def __init__(self, pose_size: int, iterations: int = 2, competition: Competition = "parents") -> None:
        super().__init__()
        check_sizes(pose_size=pose_size)
        if pose_size == 2:
            raise ValueError("pose_size is 2, but LayerNorm keeps only the order of two numbers: use a larger pose")
        check_iterations(iterations)
        check_choice("competition", competition, COMPETITIONS)
        self.competition = competition
        self.pose_size = pose_size
        self.iterations = iterations
        self.norm = nn.LayerNorm(pose_size) if pose_size > 1 else None
        self.score = nn.Linear(pose_size, 1)

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "AttentionRouting":
        """Create the rule for a layer, using the pose size of the layer's parents."""
        return cls(math.prod(layer.parent_pose_shape), **options)

    def route(self, votes: Votes, parents: Capsules | None = None, iterations: int | None = None) -> Capsules:
        """Compute the parents: poses normalised by LayerNorm, and activations in (0, 1).

        Arguments:
            votes: the votes of the children.
            parents: parents of an earlier call, from whose poses the first iteration computes its couplings; None for
                uniform couplings.
            iterations: number of iterations of this call; None for ``self.iterations``.
        """
        iterations = self.iterations if iterations is None else iterations
        check_iterations(iterations)
        rows, columns = votes.parent_shape[3:]
        if rows * columns != self.pose_size:
            raise ValueError(
                f"the poses of the parents are {rows}×{columns}, but this rule was created for poses of "
                f"{self.pose_size} elements: create AttentionRouting({rows * columns}), or give the layer the right "
                "child_pose_shape"
            )
        agreement = None
        if parents is not None:
            check_capsules(parents, "parents")
            if parents.pose.shape != votes.parent_shape:
                raise ValueError(
                    f"the poses of parents must have shape {[*votes.parent_shape]} to fit the votes; got "
                    f"{[*parents.pose.shape]}: give parents that this rule has computed for the same layer and batch"
                )
            agreement = Agreement(linear=parents.pose / math.sqrt(self.pose_size))
        for _ in range(iterations):
            found = votes.moments(agreement, variance=False)
            pose = found.mass[..., None, None] * found.mean
            if self.norm is not None:
                pose = pose - pose.mean(dim=(3, 4), keepdim=True)  # LayerNorm would lose the digits of a large mean
                pose = _called(self.norm, pose.flatten(3)).view_as(pose)
            agreement = Agreement(linear=pose / math.sqrt(self.pose_size))
        return Capsules(pose, _called(self.score, pose.flatten(3)).squeeze(3).sigmoid())


def _called(module: Any, values: Tensor) -> Tensor:
    """Call a linear layer or a LayerNorm, whose dtype can differ from the dtype of the values.

    The computation has the dtype of the values. A module of another class and a module with hooks, such as a pruned
    module, is called in its own dtype.
    """
    own = [x for x in (*module.parameters(), getattr(module, "weight", None)) if isinstance(x, Tensor)]
    if not own or own[0].dtype == values.dtype:
        return module(values)
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    if type(module) not in (nn.Linear, nn.LayerNorm) or any(hooks):
        return module(values.to(own[0].dtype)).to(values.dtype)
    weight, bias = (None if x is None else x.to(values.dtype) for x in (module.weight, module.bias))
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(values, module.normalized_shape, weight, bias, module.eps)
    return functional.linear(values, cast(Tensor, weight), bias)
