"""Checks of named options, which come from JSON files, from the command line or from calls of constructors."""

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchcaps.errors import BadInput, nearest

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    NoneType: "null",
}


LATER: dict[str, tuple[str, ...]] = {
    "recipe": (
        "flip",
        "pretrained",
        "class_weights",
        "elastic",
        "early_iterations",
        "early_epochs",
        "batch_norm_images",
        "compile",
    ),
    "preprocessing": ("flip", "elastic"),
    "capsnet": ("stem",),
    "efficient-capsnet": ("first_kernel_size", "first_stride", "instance_norm"),
    "matrix-capsnet": ("stem_stride",),
    "attention-capsnet": ("concurrent",),
}
"""For each kind of saved settings, the options that the first version of the file format lacked.

If a file lacks one of these options, the default value is used. With this value, torchcaps behaves as before the option
was added.
"""


NEWER = "if a newer version of torchcaps wrote the file, update torchcaps"
"""Cure for a saved file with an unknown entry."""


def absent(owner: str, known: Iterable[str], given: Container[str]) -> list[str]:
    """List the required options that a saved file lacks.

    Arguments:
        owner: kind of settings, such as ``preprocessing``. `LATER` lists, for each kind, the options that files of
            earlier versions lack. All other options are required.
        known: names of all options.
        given: names of the options in the file.

    Example:
        >>> absent("preprocessing", ["crop", "flip"], {})
        ['crop']
    """
    return [name for name in known if name not in given and name not in LATER.get(owner, ())]


def kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Map the name of each option of a function or class to its annotated type.

    An option without annotation has the type of its default if the default is a number, a string, true or false. The
    option ``routing`` is an exception: its default can be a name, but it also accepts a `Routing`.
    """
    return dict(_kinds_of(function))


@functools.lru_cache(maxsize=256)
def _kinds_of(function: Callable[..., Any]) -> dict[str, Any]:
    # The fields of a NamedTuple are annotated in the class, not in __init__.
    constructed = isinstance(function, type) and not issubclass(function, tuple)
    annotated = get_type_hints(function.__init__ if constructed else function)
    kinds: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        simple = isinstance(parameter.default, bool | int | float | str) and name != "routing"
        kinds[name] = annotated.get(name, type(parameter.default) if simple else Any)
    return kinds


def meanings(described: Callable[..., Any]) -> dict[str, str]:
    """Map the name of each option of a function or class to the first sentence of the option's description.

    The descriptions are the entries of ``Arguments:`` in the docstring of the function, the class, or the class's
    constructor. Options without a description are left out.

    Example:
        >>> meanings(meanings)
        {'described': 'function or class whose docstring lists the options under ``Arguments:``.'}

    Arguments:
        described: function or class whose docstring lists the options under ``Arguments:``.
    """
    found: dict[str, str] = {}
    for text in (inspect.getdoc(described), inspect.getdoc(getattr(described, "__init__", None))):
        section = re.search(r"^Arguments:\n((?:    .*\n?|\n)+)", text or "", re.MULTILINE)
        for entry in re.split(r"^    (?=\S)", section[1], flags=re.MULTILINE)[1:] if section else []:
            names, _, description = " ".join(entry.split()).partition(": ")
            sentence = re.split(r"(?<!al\.)(?<=\.) (?=[A-Z0-9`])", description, maxsplit=1)[0]
            for name in names.split(", "):
                found.setdefault(name, sentence)
    return found


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON or the command line matches an annotated type.

    A list matches a tuple type, and an integer matches ``float``. Booleans do not match numeric types, and floats must
    be finite.

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
        return isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, kind)


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can represent
        return False


def described(kind: Any) -> str:
    """Describe an annotated type in words.

    Example:
        >>> described(int | Sequence[int] | None)
        'an integer, a list of integers or null'
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        words = [described(one) for one in arguments]
        return " or ".join([", ".join(words[:-1]), words[-1]])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping of options"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "a list of integers" if int in arguments else "a list"
    return KINDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def check_kind(name: str, value: Any, kind: Any) -> None:
    """Check that a value matches an annotated type.

    Arguments:
        name: name of the option in the error message.
        value: value of the option.
        kind: annotated type.

    Raises:
        BadInput: ``value`` does not match ``kind``.
    """
    if not fits(value, kind):
        raise BadInput(f"{name} must be {described(kind)}; got {value!r}")


def check_options(owner: str, options: Mapping[str, Any], kinds: Mapping[str, Any], *, saved: bool = False) -> None:
    """Check that all options are known and match their annotated types.

    Arguments:
        owner: name of the function or settings that have the options; the error message begins with this name.
        options: value of each option by name.
        kinds: annotated type of each known option by name, as returned by `kinds_of`.
        saved: whether the options come from a saved file, which a newer version of torchcaps may have written.

    Raises:
        BadInput: an option is unknown, or its value does not match the annotated type.
    """
    for name, value in options.items():
        if name not in kinds:
            raise BadInput(f"{owner} has no option {name!r}{nearest(name, kinds)}{f'; {NEWER}' if saved else ''}")
        check_kind(f"{owner}: {name}", value, kinds[name])


def bound_options(
    owner: str, signature: inspect.Signature, positional: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a constructor call by name, also those with default values, except ``routing``.

    Arguments:
        owner: name of the class in the error message.
        signature: signature of ``__init__``.
        positional, named: arguments of the call; the first is the new object.

    Raises:
        TypeError: an argument is missing, given twice or unknown.

    Example:
        >>> def build(self, size, depth=2, routing="em"): ...
        >>> bound_options("Network", inspect.signature(build), (None,), {"size": 3})
        {'size': 3, 'depth': 2}
    """
    try:
        given = signature.bind(*positional, **named)
    except TypeError as error:
        raise TypeError(f"{owner}() {error}") from error
    given.apply_defaults()
    return {name: value for name, value in [*given.arguments.items()][1:] if name != "routing"}


def registered_name(kind: type, table: Mapping[str, Any]) -> str | None:
    """Return the key of a class in `MODELS` or `ROUTINGS`, or None.

    If the class was defined again, for example in a notebook, the key of its new definition is returned.
    """
    defined = kind.__module__, kind.__qualname__
    kinds = {name: known for name, known in table.items() if isinstance(known, type)}
    again = (name for name, known in kinds.items() if (known.__module__, known.__qualname__) == defined)
    return next((name for name, known in kinds.items() if known is kind), next(again, None))


def plain_options(owner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options to the values that they have after they are written to JSON and read again.

    Raises:
        BadInput: an option cannot be written as JSON.
    """
    try:
        return json.loads(json.dumps(dict(options), default=_number))
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"{owner} has an option that cannot be saved ({error}): use numbers, strings and lists"
        ) from error


def _number(value: Any) -> Any:
    """Convert arrays and tensors, and other sequences such as ranges, to Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not plain data")
