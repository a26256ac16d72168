"""What `torch.utils.flop_counter.FlopCounterMode` counts of a fused operator: the products of the reference.

The operator itself computes its votes again in every pass, which is not counted.
"""

import sys
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["let_flops_be_counted"]


def _votes(pose: Any, transform: Any, edges: Any) -> tuple[int, int]:
    """All numbers in all votes, and the floating-point operations of making them."""
    numbers = pose[0] * edges[0] * pose[3] * prod(transform[1:3]) * transform[4]
    return numbers, 2 * transform[3] * numbers


def _em(pose, activation, transform, beta_u, beta_a, edges, parent_sites, heats, *_, **__) -> int:
    numbers, making = _votes(pose, transform, edges)
    return making + (6 * len(heats) - 2) * numbers


def _em_backward(pose, activation, transform, beta_u, beta_a, edges, *rest, **__) -> int:
    heats = rest[4]
    return 2 * _em(pose, activation, transform, beta_u, beta_a, edges, 0, heats)


def _dynamic(pose, transform, edges, parent_sites, iterations, *_, **__) -> int:
    numbers, making = _votes(pose, transform, edges)
    return making + (4 * iterations - 2) * numbers


def _dynamic_backward(pose, transform, edges, *rest, **__) -> int:
    iterations, all_passes = rest[3], rest[7]
    numbers, making = _votes(pose, transform, edges)
    return 2 * making + (8 * iterations - 6 if all_passes else 2) * numbers


def let_flops_be_counted() -> None:
    """Tells PyTorch's counter the formulas, where somebody has imported it: it loads Triton, too much for an import of
    torchcaps. A counter copies the formulas when it is made, so that those at work are told too."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    operators = torch.ops.torchcaps
    if operators.em_routing not in module.flop_registry:
        module.register_flop_formula(operators.em_routing)(_em)
        module.register_flop_formula(operators.em_routing_backward)(_em_backward)
        module.register_flop_formula(operators.dynamic_routing)(_dynamic)
        module.register_flop_formula(operators.dynamic_routing_backward)(_dynamic_backward)
    for mode in _get_current_dispatch_mode_stack():
        if (counter := getattr(mode, "counter", None)) is not None and hasattr(counter, "flop_registry"):
            for operator, formula in module.flop_registry.items():
                counter.flop_registry.setdefault(operator, formula)
