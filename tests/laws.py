"""Laws that every routing rule must obey, for tests that pass a rule as a ``Routed`` function.

A ``Routed`` function takes (pose, transform, routing_map), the parts of a `Case`, and returns (parent capsules,
couplings). It computes the activations of the children from the poses.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing_map import RoutingMap
from torchcaps.testing import Case

Routed = Callable[[Tensor, Tensor, RoutingMap], tuple[Capsules, Tensor]]


def tolerance(case: Case) -> dict[str, Any]:
    """Return the tolerances for comparing two results that differ only by rounding."""
    return {"rtol": 1e-4, "atol": 1e-5} if case.pose.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}


def couplings_of_children(rule: Routed, case: Case) -> Tensor:
    """Sum the couplings of each child over all its parents: ``[B, S, C]``."""
    per_edge = rule(*case)[1].sum(dim=1)
    per_child = per_edge.new_zeros(per_edge.shape[0], case.routing_map.child_sites, per_edge.shape[2])
    return per_child.index_add(1, case.routing_map.edges[:, 0], per_edge)


def couplings_sum_to_one(rule: Routed, case: Case, leaky: bool = False, competition: str = "parents") -> None:
    """Check that the couplings of each child sum to 1 over the parents that compete, or to at most 1 if leaky."""
    if competition == "types":
        total = rule(*case)[1].sum(dim=1)
    else:
        total = couplings_of_children(rule, case)[:, case.routing_map.edges[:, 0].unique()]
    if leaky:
        assert (total > 0).all()
        assert (total <= 1 + tolerance(case)["atol"]).all()
    else:
        torch.testing.assert_close(total, torch.ones_like(total), **tolerance(case))


def invariant_to_order_of_children(rule: Routed, case: Case) -> None:
    """Check that permuting child sites, child types and edges does not change the parents."""
    pose, transform, routing_map = case
    sites, types = torch.randperm(pose.shape[1]), torch.randperm(pose.shape[2])
    edges = routing_map.edges.clone()
    edges[:, 0] = torch.argsort(sites)[edges[:, 0]]
    edges = edges[torch.randperm(len(edges))]
    moved = rule(pose[:, sites][:, :, types], transform[:, types], replace(routing_map, edges=edges))[0]
    for found, expected in zip(moved, rule(*case)[0], strict=True):
        torch.testing.assert_close(found, expected, **tolerance(case))


def equivariant_to_order_of_parent_types(rule: Routed, case: Case) -> None:
    """Check that permuting the parent types permutes the parents in the same way."""
    order = torch.randperm(case.transform.shape[2])
    moved, moved_couplings = rule(case.pose, case.transform[:, :, order], case.routing_map)
    parents, couplings = rule(*case)
    torch.testing.assert_close(moved.pose, parents.pose[:, :, order], **tolerance(case))
    torch.testing.assert_close(moved.activation, parents.activation[:, :, order], **tolerance(case))
    torch.testing.assert_close(moved_couplings, couplings[:, order], **tolerance(case))


def samples_are_independent(rule: Routed, case: Case) -> None:
    """Check that a sample gives the same result alone as in a batch."""
    together = rule(*case)[0]
    for sample in range(case.pose.shape[0]):
        alone = rule(case.pose[sample : sample + 1], case.transform, case.routing_map)[0]
        torch.testing.assert_close(alone.pose, together.pose[sample : sample + 1], **tolerance(case))
        torch.testing.assert_close(alone.activation, together.activation[sample : sample + 1], **tolerance(case))


def zero_poses_are_finite(rule: Routed, case: Case) -> None:
    """Check that zero poses give finite values and gradients."""
    pose = torch.zeros_like(case.pose, requires_grad=True)
    transform = case.transform.clone().requires_grad_()
    parents, couplings = rule(pose, transform, case.routing_map)
    (parents.pose.sum() + parents.activation.sum()).backward()
    for value in (parents.pose, parents.activation, couplings, pose.grad, transform.grad):
        assert value is not None
        assert torch.isfinite(value).all()


def inactive_child_has_no_effect(rule: Routed, case: Case) -> None:
    """Check that a child with pose 0, and therefore activation 0, does not change the parents."""
    silent = case.pose.clone()
    silent[:, 0] = 0
    kept = case.routing_map.edges[case.routing_map.edges[:, 0] != 0]
    without = rule(case.pose, case.transform, replace(case.routing_map, edges=kept))[0]
    with_silent = rule(silent, case.transform, case.routing_map)[0]
    for found, expected in zip(with_silent, without, strict=True):
        torch.testing.assert_close(found, expected, **tolerance(case))


def gradients_are_right(rule: Routed, case: Case, fast: bool = False) -> None:
    """Check that gradients match finite differences in float64."""
    pose = case.pose.double().requires_grad_()
    transform = case.transform.double().requires_grad_()

    def outputs(pose: Tensor, transform: Tensor) -> tuple[Tensor, ...]:
        capsules, couplings = rule(pose, transform, case.routing_map)
        return capsules.pose, capsules.activation, couplings

    assert torch.autograd.gradcheck(outputs, (pose, transform), fast_mode=fast)


def same_input_same_bits(rule: Routed, case: Case) -> None:
    """Check that two calls with the same input give bitwise equal results."""
    first, again = rule(*case), rule(*case)
    assert torch.equal(first[0].pose, again[0].pose)
    assert torch.equal(first[1], again[1])


ALL = [
    invariant_to_order_of_children,
    equivariant_to_order_of_parent_types,
    samples_are_independent,
    zero_poses_are_finite,
    inactive_child_has_no_effect,
    same_input_same_bits,
]
"""Tests that take only a rule and a case. `couplings_sum_to_one` and `gradients_are_right` have a third argument."""
