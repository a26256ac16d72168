"""`ROUTINGS`, the table of all routing rules by name, and `Routing`, the name and options of a rule."""

import inspect
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchcaps.checks import described
from torchcaps.errors import BadInput, nearest
from torchcaps.options import check_kind, check_options, kinds_of
from torchcaps.routing.attention import AttentionRouting
from torchcaps.routing.dynamic import DynamicRouting
from torchcaps.routing.em import EMRouting
from torchcaps.routing.generative import GenerativeRouting
from torchcaps.routing.rule import LayerShape, Rule
from torchcaps.routing.self_attention import SelfAttentionRouting
from torchcaps.routing.self_routing import SelfRouting
from torchcaps.routing.uniform import UniformRouting
from torchcaps.routing.variational_bayes import VariationalBayesRouting

ROUTINGS: dict[str, type[Rule]] = {
    "dynamic": DynamicRouting,
    "em": EMRouting,
    "uniform": UniformRouting,
    "self_routing": SelfRouting,
    "attention": AttentionRouting,
    "variational_bayes": VariationalBayesRouting,
    "generative": GenerativeRouting,
    "self_attention": SelfAttentionRouting,
}
"""All routing rules by name. Add a rule of your own to use it by name and to save networks that contain it."""


@dataclass(frozen=True, init=False, repr=False)
class Routing:
    """Name and options of a routing rule. Each layer uses them to create its own rule, with the sizes of that layer.

    Arguments:
        name: a key of `ROUTINGS`.
        options: keyword arguments of the rule's class. Only arguments with a default can be given; the others are
            sizes, which the layer sets.

    Raises:
        BadInput: ``name`` is not in `ROUTINGS`, the rule has no such option, or a value has the wrong type.

    Example:
        >>> from torchcaps import MatrixCapsNet
        >>> model = MatrixCapsNet(routing=Routing("em", iterations=2))
        >>> Routing("attention", iterations=3).options
        {'iterations': 3}
    """

    name: str
    _options: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, /, **options: Any) -> None:
        check_kind("name of a Routing", name, str)
        if name not in ROUTINGS:
            raise BadInput(
                f"unknown routing {name!r}{nearest(name, ROUTINGS)}. For a rule of your own, first import the "
                "module that adds it to torchcaps.ROUTINGS"
            )
        if not isinstance(ROUTINGS[name], type) or not issubclass(ROUTINGS[name], Rule):
            raise BadInput(
                f"torchcaps.ROUTINGS[{name!r}] must be a class derived from torchcaps.Rule; got "
                f"{described(ROUTINGS[name])}"
            )
        check_options(f"routing {name}", options, routing_options(name))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_options", tuple(sorted(options.items())))

    def __init_subclass__(cls) -> None:
        raise TypeError(f"{cls.__name__} cannot derive from Routing: derive routing rules from torchcaps.Rule")

    @property
    def options(self) -> dict[str, Any]:
        """The given options, as a new dictionary on every access."""
        return dict(self._options)

    def replace(self, **options: Any) -> "Routing":
        """Return a copy with some options changed."""
        return Routing(self.name, **{**self.options, **options})

    def __repr__(self) -> str:
        return f"Routing({', '.join([repr(self.name), *(f'{name}={value!r}' for name, value in self._options)])})"


def routing_options(name: str) -> dict[str, Any]:
    """Return the annotated type of each option of a rule in `ROUTINGS`, keyed by the name of the option."""
    rule = ROUTINGS[name]
    arguments = inspect.signature(rule).parameters.values()
    options = {argument.name for argument in arguments if argument.default is not argument.empty}
    return {option: kind for option, kind in kinds_of(rule).items() if option in options}


def with_defaults(routing: Rule | Routing | str, defaults: Routing) -> Rule | Routing | str:
    """Return ``routing``, with missing options taken from ``defaults`` if both name the same rule.

    Example:
        >>> with_defaults("em", Routing("em", iterations=2)), with_defaults("uniform", Routing("em", iterations=2))
        (Routing('em', iterations=2), Routing('uniform'))
    """
    routing = Routing(routing) if isinstance(routing, str) else routing
    if isinstance(routing, Routing) and routing.name == defaults.name:
        return defaults.replace(**routing.options)
    return routing


def rule_for(routing: Rule | Routing | str, layer: LayerShape) -> Rule:
    """Create the rule for a layer from a name or a `Routing`. A rule module is checked and returned unchanged.

    Raises:
        ValueError: ``routing`` is not a rule module, a `Routing` or a name in `ROUTINGS`; an option is out of its
            range; or the rule module was created for a layer with other sizes.
    """
    if isinstance(routing, str):
        routing = Routing(routing)
    if isinstance(routing, Routing):
        return _created(routing, layer)
    if not isinstance(routing, Rule):
        raise ValueError(
            "routing must be a Rule, such as DynamicRouting(); a Routing, such as Routing('em'); or one of the names "
            f"{', '.join(ROUTINGS)}; got {described(routing)}"
        )
    own: dict[str, Any] = {"parent_types": getattr(routing, "parent_types", layer.parent_types)}
    # Attributes of a rule of your own may have other meanings, unless the rule defines saved_options.
    defined = type(routing).saved_options is not Rule.saved_options
    if defined or isinstance(routing, tuple(ROUTINGS.values())):
        with suppress(BadInput):  # an argument is not stored
            own |= routing.saved_options
    for name, size in {**layer._asdict(), "pose_size": math.prod(layer.parent_pose_shape)}.items():
        made_for = tuple(own[name]) if isinstance(own.get(name), list) else own.get(name, size)
        if made_for != size:
            raise ValueError(
                f"routing is a rule ({type(routing).__name__}) made for {name}={made_for}, but the layer has "
                f"{name}={size}: make the rule for this layer, or pass the name of the rule, such as 'em', so that "
                "each layer creates its own rule"
            )
    return routing


def _created(routing: Routing, layer: LayerShape) -> Rule:
    kind: Any = ROUTINGS[routing.name]
    if getattr(kind.for_layer, "__func__", None) is Rule.for_layer.__func__:  # type: ignore[attr-defined]
        arguments = inspect.signature(kind, follow_wrapped=False).parameters.values()
        named = [one for one in arguments if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if missing := [one.name for one in named if one.default is one.empty and one.name not in routing.options]:
            raise BadInput(
                f"the routing rule {kind.__name__} needs {missing[0]}: give it the class method for_layer(cls, layer, "
                f"**options), which passes {missing[0]} to the constructor, such as {missing[0]}=layer.parent_types"
            )
    return kind.for_layer(layer, **routing.options)
