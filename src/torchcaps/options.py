"""Options that come from outside, by name: are they known, and of the right kind?"""

import inspect
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchcaps.errors import BadInput, nearest

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    NoneType: "null",
}


LATER: dict[str, tuple[str, ...]] = {
    "recipe": ("flip",),
    "preparation": ("flip",),
    "capsnet": ("stem",),
    "matrix-capsnet": ("stem_stride",),
}
"""Kind of saved settings → options added since the current file format was introduced. A file without them gets their
defaults, which change nothing."""


def absent(owner: str, known: Iterable[str], given: Container[str]) -> list[str]:
    """Required options that a saved file lacks.

    Example:
        >>> absent("preparation", ["crop", "flip"], {})
        ['crop']
    """
    return [name for name in known if name not in given and name not in LATER.get(owner, ())]


def kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function or class, name → annotated type."""
    constructed = isinstance(function, type) and not issubclass(function, tuple)  # a NamedTuple annotates its class
    annotated = get_type_hints(function.__init__ if constructed else function)
    names = inspect.signature(function).parameters
    return {name: annotated.get(name, Any) for name in names}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value, as JSON or a command line gives it, is of an annotated type.

    A list stands for a tuple, a whole number for a float; true is no number; a number is finite.

    Example:
        >>> fits([3, 4], Sequence[int]), fits(True, int), fits("3", int | None), fits(2, float)
        (True, False, False, True)
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        fixed = origin is tuple and Ellipsis not in arguments
        kinds = arguments if fixed else arguments[:1] * len(value) if isinstance(value, list | tuple) else ()
        return (
            isinstance(value, list | tuple)
            and len(value) == len(kinds)
            and all(fits(one, of) for one, of in zip(value, kinds, strict=True))
        )
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def described(kind: Any) -> str:
    """What a value of an annotated type looks like, in words.

    Example:
        >>> described(int | Sequence[int] | None)
        'a whole number, a list of whole numbers or null'
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        words = [described(one) for one in arguments]
        return " or ".join([", ".join(words[:-1]), words[-1]])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table of options"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "a list of whole numbers" if int in arguments else "a list"
    return KINDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Refuse a value that is not of an annotated type.

    Raises:
        BadInput: it is not.
    """
    if not fits(value, kind):
        raise BadInput(f"{name} takes {described(kind)}; got {value!r}")


def check_options(owner: str, options: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Refuse options that are unknown or of another kind than annotated.

    Arguments:
        owner: whose options they are, as an error names it.
        options: name → value.
        kinds: name → annotated type, as `kinds_of` gives them.

    Raises:
        BadInput: an unknown option, with the nearest known one, or a value of another kind.
    """
    for name, value in options.items():
        if name not in kinds:
            raise BadInput(f"{owner} has no option {name!r}{nearest(name, kinds)}")
        check_kind(f"{owner}: {name}", value, kinds[name])
