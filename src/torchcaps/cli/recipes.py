"""The command `torchcaps recipes`."""

import re
from inspect import getdoc
from typing import Annotated

import typer

from torchcaps.cli.common import print_table
from torchcaps.errors import BadInput, nearest

OWN = "own"
"""Value of `torchcaps recipes --data` that stands for a folder of the user's own images."""


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Recipe whose settings are printed; if omitted, all recipes are listed.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="List only the recipes for this dataset; `own` lists the recipes for your own images."),
    ] = None,
) -> None:
    """List the recipes for `torchcaps train`, or print the description and every setting of one recipe."""
    from torchcaps.models import routing_of
    from torchcaps.recipes import OWN_IMAGES, RECIPES, create_recipe, settings_of

    if name is not None:
        if data is not None:
            raise BadInput("give either the name of a recipe or --data, not both")
        chosen = create_recipe(name)
        rows = [(key, _shown(value), _as_written(meaning)) for key, value, meaning in settings_of(chosen)]
        print(f"{name}: {_description(name)}\n")
        print_table(("setting", "value", "meaning"), rows)
        folder = " --data FOLDER" if chosen.data == OWN_IMAGES else ""
        print(f"to change a setting: torchcaps train {name}{folder} --set SETTING=VALUE")
        return
    made = {key: recipe() for key, recipe in RECIPES.items()}
    sources = {key: OWN if one.data == OWN_IMAGES else one.data for key, one in made.items()}
    if data is not None and data not in sources.values():
        raise BadInput(f"no recipe trains on the data {data!r}{nearest(data, sorted({*sources.values()}))}")
    lines = []
    for key, one in made.items():
        if data not in (None, sources[key]):
            continue
        routing = routing_of(one.model, one.model_options, one.routing_options)
        rule = "" if routing is None else " ".join([routing.name, *(f"{k}={v}" for k, v in routing.options.items())])
        summary = _description(key).partition("\n")[0]
        lines.append((key, one.model, rule, sources[key], one.epochs, summary))
    table = [("recipe", "model", "routing", "data", "epochs", "description"), *lines]
    columns = [*zip(*table, strict=True)]
    if data is not None:
        del columns[3]  # all values are the same
    header, *lines = zip(*columns, strict=True)
    print_table(header, lines)


def _description(name: str) -> str:
    """Return the docstring of a recipe with the names that `torchcaps train` knows, and without backticks."""
    from torchcaps.recipes import RECIPES

    text = getdoc(RECIPES[name]) or ""
    for key in RECIPES:
        text = text.replace(f"`{key.replace('-', '_')}`", key)
    return text.replace("`", "")


def _as_written(meaning: str) -> str:
    """Return the meaning of a setting without backticks and with None, True and False as in `--set`."""
    for python, written in (("None", "null"), ("True", "true"), ("False", "false")):
        meaning = re.sub(rf"\b{python}\b", written, meaning)
    return meaning.replace("`", "")


def _shown(value: object) -> str:
    """Format a value as it is written after `--set KEY=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
