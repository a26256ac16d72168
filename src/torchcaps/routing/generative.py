"""EM routing whose parent activations come from learned benefits and costs: Heinsen 2019 (arXiv 1911.00792)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchcaps.capsules import Capsules
from torchcaps.checks import check_iterations, check_number, check_sizes
from torchcaps.routing.rule import LayerShape, Rule, check_transform
from torchcaps.routing.votes import Agreement, Recomputed, Votes
from torchcaps.routing_map import RoutingMap, added_at


class GenerativeRouting(Rule):
    """EM routing in which a parent has a learned benefit for using a child and a learned cost for ignoring it.

    Heinsen 2019, with the variance floor and the mass floor of the author's 2019 code::

        R_ij = 1 / (number of parents of child i)
        repeat `iterations` times:
            D-step:  D_use_ij = a_i R_ij          D_ign_ij = a_i - D_use_ij
            M-step:  logit_j = Σ_i β_use_ij D_use_ij - Σ_i β_ignore_ij D_ign_ij
                     μ_j = Σ_i D_use_ij V_ij / (Σ_i D_use_ij + mass_floor)
                     σ_j² = Σ_i D_use_ij (V_ij - μ_j)² / (Σ_i D_use_ij + mass_floor) + variance_floor
            E-step (not in the last iteration):  log p_ij = -Σ_h [ (V_ij^h - μ_j^h)² / 2(σ_j^h)² + log σ_j^h ]
                     R_ij = softmax over the parents of child i (log f(logit_j) + log p_ij)

    V_ij is the vote of child i for parent j, R_ij the coupling of the two, and a_i the activation of the child. h runs
    over the elements of a vote. D_use_ij is the part of a_i that parent j uses, and D_ign_ij the part that parent j
    ignores. μ_j is the pose of the parent. f is the logistic function. In the paper, layers exchange logits, and each
    layer applies f to its input logits before routing. Here layers exchange activations in [0, 1]: the activation of
    parent j is f(logit_j), and a_i is used without applying f. β_use and β_ignore are learned, start at 0, and have one
    value per transform, child type and parent type. A parent whose children all have activation 0 has pose 0, and
    these activations have gradient 0. The author's code also adds a learned bias to every vote; this rule does not.

    Arguments:
        transforms: number of transforms of the map (K): the number of child sites for a dense layer, 1 for a shared
            layer, kernel_size² for a convolutional layer.
        child_types: number of capsule types per child site (C).
        parent_types: number of capsule types per parent site (J).
        iterations: number of routing iterations, including the first, whose couplings are uniform; from 1 to 1,000.
        variance_floor: constant added to the variances σ_j² of the votes, above 0.
        mass_floor: constant added to the mass Σ_i D_use_ij in the denominators of μ_j and σ_j², above 0. It pulls the
            pose of a parent with little mass towards 0.

    Raises:
        ValueError: a size is below 1, ``iterations`` is not in [1, 1000], or a floor is not above 0. When the rule is
            called: the transform and the rule differ in K, C or J.

    Example:
        >>> from torchcaps import RoutingMap
        >>> children = Capsules(torch.randn(2, 9, 4, 4, 4), torch.rand(2, 9, 4))
        >>> rule = GenerativeRouting(transforms=4, child_types=4, parent_types=6)
        >>> parents = rule(children, torch.randn(4, 4, 6, 4, 4), RoutingMap.conv((3, 3), kernel_size=2))
        >>> parents.pose.shape, parents.activation.shape
        (torch.Size([2, 4, 6, 4, 4]), torch.Size([2, 4, 6]))
    """

    def __init__(
        self,
        transforms: int,
        child_types: int,
        parent_types: int,
        iterations: int = 3,
        variance_floor: float = 1e-5,
        mass_floor: float = 1e-5,
    ) -> None:
        super().__init__()
        check_sizes(transforms=transforms, child_types=child_types, parent_types=parent_types)
        self.transforms, self.child_types, self.parent_types = transforms, child_types, parent_types
        check_iterations(iterations)
        check_number("variance_floor", variance_floor, "(0, inf)")
        check_number("mass_floor", mass_floor, "(0, inf)")
        self.iterations, self.variance_floor, self.mass_floor = iterations, variance_floor, mass_floor
        self.beta_use = nn.Parameter(torch.empty(transforms, child_types, parent_types))
        self.beta_ignore = nn.Parameter(torch.empty(transforms, child_types, parent_types))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set β to 0."""
        nn.init.zeros_(self.beta_use)
        nn.init.zeros_(self.beta_ignore)

    @classmethod
    def for_layer(cls, layer: LayerShape, **options: Any) -> "GenerativeRouting":
        """Create the rule for a layer, using the sizes of the layer's transforms."""
        return cls(layer.transforms, layer.child_types, layer.parent_types, **options)

    def prepare(self, pose: Tensor, transform: Tensor, routing_map: RoutingMap) -> tuple[Tensor, Tensor]:
        """Append columns with the values of β to every vote."""
        check_transform(transform, self.beta_use, "β")
        use, ignore = self.beta_use.to(transform.dtype), self.beta_ignore.to(transform.dtype)
        betas = torch.diag_embed(torch.stack([use + ignore, ignore], dim=3))
        if pose.shape[3] > 1:  # with several rows, one column of the vote contains both values of β
            betas = betas.sum(dim=4, keepdim=True)
        child = routing_map.edges_on(pose.device)[:, 0]
        sites, rows = pose.shape[1], pose.shape[3]
        ones = pose.new_ones(sites)
        # ``inverse`` is the inverse of the uniform couplings of the first iteration. In this iteration, mass · mean of
        # the last element of the votes is therefore Σ a_i β_ignore.
        reached = added_at(torch.zeros_like(ones), 0, child, ones.new_ones(len(child)))
        inverse = transform.shape[2] * (reached if self.competition == "parents" else ones)
        columns = (ones, (0, 0, 0, rows - 1)), (inverse, (0, 0, rows - 1, 0))
        factors = torch.cat([functional.pad(x[:, None, None, None], padding) for x, padding in columns], dim=3)
        betas = functional.pad(betas, (transform.shape[4], 0))
        transform = functional.pad(transform, (0, betas.shape[4] - transform.shape[4]))
        return torch.cat([pose, factors.expand(*pose.shape[:4], 2)], dim=4), torch.cat([transform, betas], dim=3)

    def route(self, votes: Votes) -> Capsules:
        """Compute the poses μ_j and the activations f(logit_j) of the last iteration."""
        check_iterations(self.iterations)
        found = votes.moments(variance=self.iterations > 1)
        ignore_all = found.mass * found.mean[..., -1, -1]
        for later in reversed(range(self.iterations - 1)):  # number of later iterations
            found = votes.moments(Recomputed(self._agreement, ignore_all, *found), variance=later > 0)
        logit, centre, _, _ = self._parents(ignore_all, found.mass, found.mean)
        return Capsules(centre[..., : -self._beta_columns(centre)], logit.sigmoid())

    def _parents(self, ignore_all: Tensor, mass: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits, kept · mean, and the factors kept = mass / (mass + floor) and lost = 1 - kept."""
        total = mass + self.mass_floor
        kept, lost = (mass / total)[..., None, None], (self.mass_floor / total)[..., None, None]
        kept = torch.where(kept > 0.5, 1 - lost, kept)  # 1 - lost preserves the digits of the gradient near 1
        return mass * mean[..., 0, -self._beta_columns(mean)] - ignore_all, kept * mean, kept, lost

    @staticmethod
    def _beta_columns(mean: Tensor) -> int:
        """Return the number of columns with β in a mean vote."""
        return 2 if mean.shape[3] == 1 else 1

    def _agreement(self, ignore_all: Tensor, mass: Tensor, mean: Tensor, variance: Tensor) -> Agreement:
        """Compute the agreement of the next iteration from the moments of the votes."""
        logit, centre, kept, lost = self._parents(ignore_all, mass, mean)
        rows, columns, betas = *mean.shape[3:], self._beta_columns(mean)
        moved = lost * mean
        floor = mean.new_full((rows, columns - betas), self.variance_floor)
        floor = functional.pad(floor, (0, betas), value=torch.inf)  # the columns with β do not count in the logits
        variance = kept * torch.addcmul(variance, moved, moved) + floor
        log_volume = 0.5 * variance[..., :-betas].log().sum(dim=(3, 4))
        return Agreement(functional.logsigmoid(logit) - log_volume, centre=centre, variance=variance)
