"""Saving and loading of the routing rules of a network: name and options of the rule of each layer."""

import hashlib
import inspect
import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any, cast

from torch import nn

from torchcaps.errors import BadInput
from torchcaps.models.foreign import is_foreign, keeping_random_state
from torchcaps.options import NEWER, check_kind, check_options, kinds_of, plain_options, registered_name
from torchcaps.routing import ROUTINGS, Routing, Rule
from torchcaps.routing.rule import stored_options
from torchcaps.routing_map import RoutingMap

RULE_ATTRIBUTES = ("competition", "weighs_activations", "none_of_the_above", "activation_from_mass")
"""Attributes of `Rule` that a subclass can change."""


def layer_rules(model: nn.Module) -> dict[str, Rule]:
    """Return the routing rule of each layer that has one, keyed by the name of the layer."""
    return {
        name: layer.routing
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "routing", None), Rule)
    }


def _described(rule: Rule) -> dict[str, Any] | None:
    """Return the rule's name in `ROUTINGS` and its options; None if the rule is not in `ROUTINGS`.

    A saved network has the backend ``auto``, because other machines may lack the kernels.
    """
    name = registered_name(type(rule), ROUTINGS)
    if name is None:
        return None
    options = plain_options(name, rule.saved_options)
    return {"rule": name, "options": {**options, "backend": "auto"} if "backend" in options else options}


def saved_rules(model: nn.Module) -> dict[str, Any]:
    """Describe the rule of every layer, so that `from_pretrained` can create it again.

    Raises:
        BadInput: a rule is not in `ROUTINGS`; its options are unknown; or it inherits ``saved_options`` from a rule
            with other constructor arguments.
    """
    rules = layer_rules(model)
    found = {layer: _described(rule) for layer, rule in rules.items()}
    for layer, kind in ((layer, type(rule)) for layer, rule in rules.items()):
        owner = next((one for one in kind.__mro__ if "saved_options" in vars(one)), kind)
        own, inherited = (inspect.signature(one).parameters.keys() for one in (kind, owner))
        if owner is not Rule and own != inherited:
            raise BadInput(
                f"layer {layer} has the routing rule {kind.__name__}, which inherits saved_options from "
                f"{owner.__name__} but has other constructor arguments: define saved_options in {kind.__name__}"
            )
    for layer, rule in found.items():
        if rule is None:
            raise BadInput(
                f"layer {layer} has the routing rule {type(rules[layer]).__name__}, which from_pretrained cannot "
                "create: add it to torchcaps.ROUTINGS, or save model.state_dict()"
            )
    return found


def settings_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the plain attributes of the layers of a network, by layer and attribute, to compare two networks.

    These are the types and attributes of all layers of torch and torchcaps; for other rules in `ROUTINGS`, the
    constructor arguments that they and their base classes store as attributes, and the class attributes of `Rule`; and
    the constructor arguments that another network stores as attributes. The attributes ``training`` and ``backend`` are
    left out, because they are not part of the network.
    """
    found: dict[tuple[str, str], Any] = {}
    for name, layer in model.named_modules():
        kind = nn.Conv2d if isinstance(layer, nn.Conv2d) else type(layer)  # Im2colConv2d computes the same
        if not is_foreign(type(layer)):
            found[name, "type"] = kind.__name__
            compared = {*vars(layer)} - {"training", "backend"}
        elif registered_name(kind, ROUTINGS):
            compared = {*stored_options(cast(Rule, layer)), *RULE_ATTRIBUTES} - {"backend"}
        elif layer is model:
            compared = {*vars(layer)} & inspect.signature(kind).parameters.keys()
        else:
            continue
        for key in sorted(compared):
            value = getattr(layer, key)
            if key[0] != "_" and _is_plain(value):
                found[name, key] = value
    return found


def both_settings(one: nn.Module, other: nn.Module) -> tuple[dict[tuple[str, str], Any], ...]:
    """Return `settings_of` two networks, and checksums of the routing maps that both networks have."""
    maps = [
        {
            (name, f"{key}{place}"): _checksum(routing_map)
            for name, layer in model.named_modules()
            for key, value in vars(layer).items()
            for place, routing_map in _maps_in(value)
        }
        for model in (one, other)
    ]
    both = maps[0].keys() & maps[1].keys()  # a layer can create a map in its first call
    return tuple(
        {**settings_of(model), **{key: own[key] for key in both}} for model, own in zip((one, other), maps, strict=True)
    )


def _maps_in(value: Any) -> list[tuple[str, RoutingMap]]:
    if isinstance(value, RoutingMap):
        return [("", value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [(f"[{key!r}]", one) for key, one in items if isinstance(one, RoutingMap)]


def _checksum(routing_map: RoutingMap) -> str:
    sizes = routing_map.child_sites, routing_map.parent_sites, routing_map.transforms, *routing_map.parent_grid
    digest = hashlib.sha256(f"{sizes}".encode() + routing_map.edges.cpu().numpy().tobytes()).hexdigest()
    return f"a map of {len(routing_map.edges)} edges with checksum {digest[:8]}"


def cure_of(model: nn.Module, layer: str, attribute: str) -> str:
    """Return what to do if a setting of a layer would differ in the loaded network, as part of an error message."""
    changed = dict(model.named_modules()).get(layer)
    if _maps_in(getattr(changed, attribute.partition("[")[0], None)):
        return "create the map from the arguments of the constructor, or from a seeded torch.Generator"
    of_rule = isinstance(changed, Rule) and is_foreign(type(changed))
    return (f"return {attribute} in saved_options of this rule, " if of_rule else "") + "undo the change of this layer"


def same_setting(one: Any, other: Any) -> bool:
    """Return whether two values of `settings_of` are equal, except for rounding. A list equals a tuple."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_setting, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or one == other
    return bool(one == other)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | Real) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))


def restore_rules(model: nn.Module, saved: Mapping[str, Any], change: Any, path: Path) -> None:
    """Set the saved rule of every layer, except where ``change`` is another rule."""
    change = Routing(change) if isinstance(change, str) else change
    layers = layer_rules(model).keys()
    for layer in sorted(layers ^ saved.keys()):
        problem = "lacks the layer" if layer in layers else "has a layer that the network does not have, namely"
        raise BadInput(f"the entry 'routing' in {path} {problem} {layer!r}: save the network again")
    for layer, rule in saved.items():
        entry = f"{path}: routing of {layer!r}"
        check_kind(entry, rule, Mapping[str, Any])
        if set(rule) != {"rule", "options"}:
            raise BadInput(f"{entry} must have exactly the entries 'options' and 'rule': save the network again")
        check_kind(f"{entry}: rule", rule["rule"], str)
        if rule["rule"] not in ROUTINGS:
            raise BadInput(
                f"{entry} is {rule['rule']!r}, which is not in torchcaps.ROUTINGS: import the module that adds this "
                f"rule to ROUTINGS before you load the network, or, {NEWER}"
            )
        kind = ROUTINGS[rule["rule"]]
        check_kind(f"{entry}: options", rule["options"], Mapping[str, Any])
        check_options(entry, rule["options"], kinds_of(kind), saved=True)
        if change is not None and (not isinstance(change, Routing) or change.name != rule["rule"]):
            continue
        try:
            with keeping_random_state(kind):
                made = kind(**{**rule["options"], **(change.options if change else {})})
        except (TypeError, ValueError, RuntimeError, MemoryError) as error:
            raise BadInput(f"{entry}: {error}") from error
        if missing := set(made.saved_options) - {*rule["options"], *made.later_options}:
            cure = f"add it to later_options of {kind.__name__}, or " if is_foreign(kind) else ""
            raise BadInput(f"{entry} lacks the option {min(missing)!r}: {cure}save the network again")
        constructed = dict(layer_rules(model)[layer].named_parameters())
        for name, parameter in made.named_parameters():
            if name in constructed and not constructed[name].requires_grad:
                parameter.requires_grad_(False)
        model.get_submodule(layer).routing = made
