"""The routing rules. A new rule is one file beside `dynamic.py` and one line in the table."""

from torch import nn

from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing

ROUTINGS: dict[str, type[nn.Module]] = {"dynamic": DynamicRouting}

__all__ = ["ROUTINGS", "DynamicRouting", "dynamic_routing"]
