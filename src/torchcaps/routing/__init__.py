"""Routing rules. To add a rule, add a file next to `dynamic.py` and an entry in `ROUTINGS` in `choice.py`."""

from torchcaps.routing.attention import AttentionRouting
from torchcaps.routing.choice import ROUTINGS, Routing, routing_options, rule_for, with_defaults
from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMPass, EMRouting, em_routing
from torchcaps.routing.generative import GenerativeRouting
from torchcaps.routing.rule import LayerShape, Rule
from torchcaps.routing.self_attention import SelfAttentionRouting
from torchcaps.routing.self_routing import SelfRouting
from torchcaps.routing.uniform import UniformRouting
from torchcaps.routing.variational_bayes import VariationalBayesRouting
from torchcaps.routing.votes import Agreement, Gaussians, Means, Moments, Recomputed, Votes

__all__ = [
    "ROUTINGS",
    "Agreement",
    "AttentionRouting",
    "DynamicRouting",
    "EMPass",
    "EMRouting",
    "Gaussians",
    "GenerativeRouting",
    "LayerShape",
    "Means",
    "Moments",
    "Recomputed",
    "Routing",
    "Rule",
    "SelfAttentionRouting",
    "SelfRouting",
    "UniformRouting",
    "VariationalBayesRouting",
    "Votes",
    "dynamic_routing",
    "em_routing",
    "routing_options",
    "rule_for",
    "with_defaults",
]
