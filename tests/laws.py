"""Laws that every routing rule keeps on every routing map.

A rule is a function (pose, transform, routing_map) → (Capsules, couplings). A case is such a triple of arguments.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps import Capsules, RoutingMap

Rule = Callable[[Tensor, Tensor, RoutingMap], tuple[Capsules, Tensor]]


class Case(NamedTuple):
    pose: Tensor
    transform: Tensor
    routing_map: RoutingMap


def tolerance(case: Case) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-5} if case.pose.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}


def couplings_of_children(rule: Rule, case: Case) -> Tensor:
    """Per child, the sum of its couplings over all the parents that it reaches: ``[B, S, C]``."""
    _, couplings = rule(*case)
    per_edge = couplings.sum(dim=1)
    per_child = per_edge.new_zeros(per_edge.shape[0], case.routing_map.child_sites, per_edge.shape[2])
    return per_child.index_add(1, case.routing_map.edges[:, 0], per_edge)


def couplings_sum_to_one(rule: Rule, case: Case, leaky: bool = False) -> None:
    total = couplings_of_children(rule, case)
    reached = torch.zeros(case.routing_map.child_sites, dtype=torch.bool)
    reached[case.routing_map.edges[:, 0]] = True
    if leaky:
        assert (total[:, reached] > 0).all()
        assert (total[:, reached] <= 1 + tolerance(case)["atol"]).all()
    else:
        torch.testing.assert_close(total[:, reached], torch.ones_like(total[:, reached]), **tolerance(case))


def invariant_to_order_of_children(rule: Rule, case: Case) -> None:
    pose, transform, routing_map = case
    sites, types = torch.randperm(pose.shape[1]), torch.randperm(pose.shape[2])
    edges = routing_map.edges.clone()
    edges[:, 0] = torch.argsort(sites)[edges[:, 0]]
    edges = edges[torch.randperm(len(edges))]
    moved = rule(pose[:, sites][:, :, types], transform[:, types], replace(routing_map, edges=edges))[0]
    for found, expected in zip(moved, rule(*case)[0], strict=True):
        torch.testing.assert_close(found, expected, **tolerance(case))


def equivariant_to_order_of_parent_types(rule: Rule, case: Case) -> None:
    order = torch.randperm(case.transform.shape[2])
    moved, moved_couplings = rule(case.pose, case.transform[:, :, order], case.routing_map)
    parents, couplings = rule(*case)
    torch.testing.assert_close(moved.pose, parents.pose[:, :, order], **tolerance(case))
    torch.testing.assert_close(moved.activation, parents.activation[:, :, order], **tolerance(case))
    torch.testing.assert_close(moved_couplings, couplings[:, order], **tolerance(case))


def samples_do_not_see_each_other(rule: Rule, case: Case) -> None:
    together = rule(*case)[0]
    for sample in range(case.pose.shape[0]):
        alone = rule(case.pose[sample : sample + 1], case.transform, case.routing_map)[0]
        torch.testing.assert_close(alone.pose, together.pose[sample : sample + 1], **tolerance(case))
        torch.testing.assert_close(alone.activation, together.activation[sample : sample + 1], **tolerance(case))


def zero_poses_are_finite(rule: Rule, case: Case) -> None:
    pose = torch.zeros_like(case.pose, requires_grad=True)
    transform = case.transform.clone().requires_grad_()
    parents, couplings = rule(pose, transform, case.routing_map)
    (parents.pose.sum() + parents.activation.sum()).backward()
    for value in (parents.pose, parents.activation, couplings, pose.grad, transform.grad):
        assert torch.isfinite(value).all()


def a_silent_child_counts_for_nothing(rule: Rule, case: Case) -> None:
    """A child of activation 0 gives the same parents as no such child."""
    silent = case.pose.clone()
    silent[:, 0] = 0
    kept = case.routing_map.edges[case.routing_map.edges[:, 0] != 0]
    without = rule(case.pose, case.transform, replace(case.routing_map, edges=kept))[0]
    with_silent = rule(silent, case.transform, case.routing_map)[0]
    for found, expected in zip(with_silent, without, strict=True):
        torch.testing.assert_close(found, expected, **tolerance(case))


def gradients_are_right(rule: Rule, case: Case, fast: bool = False) -> None:
    pose = case.pose.double().requires_grad_()
    transform = case.transform.double().requires_grad_()

    def outputs(pose: Tensor, transform: Tensor) -> tuple[Tensor, ...]:
        capsules, couplings = rule(pose, transform, case.routing_map)
        return capsules.pose, capsules.activation, couplings

    assert torch.autograd.gradcheck(outputs, (pose, transform), fast_mode=fast)


def same_input_same_bits(rule: Rule, case: Case) -> None:
    first, again = rule(*case), rule(*case)
    assert torch.equal(first[0].pose, again[0].pose)
    assert torch.equal(first[1], again[1])


ALL = [
    invariant_to_order_of_children,
    equivariant_to_order_of_parent_types,
    samples_do_not_see_each_other,
    zero_poses_are_finite,
    a_silent_child_counts_for_nothing,
    same_input_same_bits,
]
"""Those that hold whatever the options; the couplings' sum and the gradients ask for more than a rule and a case."""
