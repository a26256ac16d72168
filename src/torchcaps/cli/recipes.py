"""The command `torchcaps recipes`."""

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
    """List the recipes for `torchcaps train`, or print every setting of one recipe with its value and its meaning."""
    from torchcaps.models import routing_of
    from torchcaps.recipes import OWN_IMAGES, RECIPES, create_recipe, settings_of

    if name is not None:
        if data is not None:
            raise BadInput("give either the name of a recipe or --data, not both")
        chosen = create_recipe(name)
        rows = [(key, _shown(value), meaning.replace("`", "")) for key, value, meaning in settings_of(chosen)]
        print_table(("setting", "value", "meaning"), rows, f"{name}: {_summary(name)}")
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
        lines.append((key, one.model, rule, sources[key], one.epochs, _summary(key)))
    print_table(("recipe", "model", "routing", "data", "epochs", "description"), lines)


def _summary(name: str) -> str:
    from torchcaps.recipes import RECIPES

    return (RECIPES[name].__doc__ or "").strip().splitlines()[0].replace("`", "")


def _shown(value: object) -> str:
    """Format a value as it is written after `--set KEY=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
