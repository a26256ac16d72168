"""The routing rules. A new rule is one file beside `dynamic.py` and one line in the table."""

from torch import nn

from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMPass, EMRouting, em_routing

ROUTINGS: dict[str, type[nn.Module]] = {"dynamic": DynamicRouting, "em": EMRouting}

__all__ = ["ROUTINGS", "DynamicRouting", "EMPass", "EMRouting", "dynamic_routing", "em_routing"]
