"""FLOP formulas of the fused operators for `torch.utils.flop_counter.FlopCounterMode`.

The formulas count the multiply-adds of the reference implementation, which computes the votes only once. The
computation of the votes is counted in the pass with uniform couplings, usually the first routing iteration. A rule
without such a pass, such as self-routing, is therefore counted without the computation of its votes. The fused kernels
compute the votes again in each later iteration; the formulas do not count these computations.
"""

import sys
from math import prod

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchcaps.threads import Lock

__all__ = ["let_flops_be_counted"]

_REGISTERING = Lock()


def _of_votes(pose, transform, edge_lists, parent_sites) -> tuple[int, int, int]:
    """Return the FLOPs of a multiply-add per element of all votes, of computing all votes, and of the pose logits."""
    from torchcaps.kernels.record import shapes_of  # imported here to avoid a circular import

    edges = shapes_of(pose, transform, edge_lists, parent_sites, types=False, by_sample=False).edges
    product = 2 * pose.shape[0] * edges * pose.shape[3] * prod(transform.shape[1:3]) * transform.shape[4]
    logits = product // (pose.shape[3] * transform.shape[4]) * (prod(pose.shape[3:]) + 1)
    return product, pose.shape[4] * product, logits if transform.shape[3] > pose.shape[4] else 0


def _given(*tensors: Tensor | None) -> int:
    return sum(x is not None for x in tensors)


def _moments(
    tokens, pose, activation, transform, edge_lists, parent_sites, constant, linear, quadratic, centre, variance_floor,
    inverse_temperature, uniform, types, none_of_the_above, by_sample, with_variance, *_, **__,
):  # fmt: skip
    product, making, logits = _of_votes(pose, transform, edge_lists, parent_sites)
    return uniform * making + (1 + with_variance + _given(linear, quadratic)) * product + logits


def _couplings(pose, transform, edge_lists, parent_sites, constant, linear, quadratic, *_, **__):
    product, _, logits = _of_votes(pose, transform, edge_lists, parent_sites)
    return _given(linear, quadratic) * product + logits


def _moments_backward(
    pose, activation, transform, edge_lists, parent_sites, record, types, none_of_the_above, by_sample, agreement_grads,
    *_, **__,
):  # fmt: skip
    """Count the FLOPs of the gradients of the couplings and of the agreement."""
    from torchcaps.kernels.record import records_of

    product, *_ = _of_votes(pose, transform, edge_lists, parent_sites)
    (one,) = records_of(record)
    return (_given(one.mean_grad, one.variance) + agreement_grads * _given(one.linear, one.quadratic)) * product


def _votes_backward(pose, activation, transform, edge_lists, parent_sites, records, *_, **__):
    """Count the FLOPs of the gradients of children and transforms.

    The sum consists of: the gradients of the votes, for each pass; the gradients of the activations, for each pass with
    uniform couplings; and the gradients of poses and transforms, once.
    """
    from torchcaps.kernels.record import records_of

    product, making, logits = _of_votes(pose, transform, edge_lists, parent_sites)
    products = 0
    for one in records_of(records):
        products += (1 + (activation is not None and not _given(one.log_sums))) * _given(one.mean_grad, one.variance)
        products += _given(one.coupling_grads) * _given(one.linear, one.quadratic)
    return 2 * (making + logits) + products * product


def let_flops_be_counted() -> None:
    """Register the formulas in all active FLOP counters, and in PyTorch's module of FLOP counters if it is imported.

    This function does not import the module, because the module imports Triton. A counter copies the formulas when it
    is created, so the formulas are also added to counters that are already active.
    """
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None or not hasattr(module, "FlopCounterMode"):  # another thread may be importing it
        return
    operators = torch.ops.torchcaps
    if operators.moments not in module.flop_registry:
        with _REGISTERING:
            for formula in (_moments, _couplings, _moments_backward, _votes_backward):
                operator = getattr(operators, formula.__name__[1:])
                if operator not in module.flop_registry:
                    module.register_flop_formula(operator, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        if (counter := getattr(mode, "counter", None)) is not None and hasattr(counter, "flop_registry"):
            for operator, formula in module.flop_registry.items():
                counter.flop_registry.setdefault(operator, formula)
