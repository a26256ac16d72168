"""The commands of `torchcaps data`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from torchcaps.cli.common import DataDir, is_inside, naming_options, print_table, setting, writable_file
from torchcaps.errors import BadInput, nearest, printable

Dataset = Annotated[str, typer.Argument(help="Name of a dataset; see `torchcaps data list`.")]

app = typer.Typer(no_args_is_help=True, help="List, download, render, show and verify datasets.")


@app.command("list")
def data_list() -> None:
    """List the datasets."""
    from torchcaps.data import DATASETS

    rows = [
        (name, f"{', '.join(filter(None, (x.description, x.image_format)))}.", x.splits, x.source)
        for name, x in DATASETS.items()
    ]
    print_table(("name", "description", "splits", "source"), rows)


@app.command("fetch")
def data_fetch(name: Dataset, data_dir: DataDir = Path("data")) -> None:
    """Download the missing files of a dataset and verify their checksums."""
    dataset = _dataset(name)
    if dataset.fetch is None:
        print(f"{name} needs no download")
        return
    dataset.fetch(data_dir)
    print(f"complete dataset: {data_dir / name}")


@app.command("render")
@naming_options(size="--size", seed="--seed")
def data_render(
    name: Annotated[str, typer.Argument(help="Name of the dataset: toys.")],
    data_dir: DataDir = Path("data"),
    size: Annotated[int, typer.Option(help="Height and width in pixels: 48 or 96.")] = 48,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed of shapes and noise. To train on toys with a seed other than 0, add --set "
            "data.render_seed=SEED to `torchcaps train`."
        ),
    ] = 0,
) -> None:
    """Render the dataset `toys` in the file format of smallNORB. On processors of the same kind, the same size and
    seed give the same files.
    """
    from torchcaps.data import render_toys

    if name != "toys":
        raise BadInput(f"{name!r} is not a dataset that can be rendered{nearest(name, ['toys'])}")
    print(f"rendered toys: {render_toys(data_dir, size=size, seed=seed)}")


@app.command("show")
@naming_options()
def data_show(
    name: Annotated[str, typer.Argument(help="Name of a dataset, or a folder or table of images.")],
    data_dir: DataDir = Path("data"),
    out: Annotated[Path | None, typer.Option(help="PNG file to write; default: NAME.png.")] = None,
    columns: Annotated[int, typer.Option(help="Images per class.", min=1)] = 10,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change a data option, written as data.OPTION=VALUE.")
    ] = None,
) -> None:
    """Draw some training images of each class in one picture."""
    from torchcaps.data import DATASETS, load_splits, save_contact_sheet
    from torchcaps.data.files import expanded
    from torchcaps.data.image_files import Paths
    from torchcaps.data.image_table import is_table
    from torchcaps.recipes import create_recipe

    changes = dict(setting(text) for text in settings or [])
    for key in changes:
        if not key.startswith("data."):
            raise BadInput(f"--set must be an option of the data, such as --set data.KEY=VALUE; got {key}")
    options = create_recipe("capsnet-images", {**changes, "data": name}).data_options
    path = out or Path(f"{os.path.basename(os.path.abspath(name))}.png")
    if out is None and path.exists():
        raise BadInput(f"{path} exists already: add --out {path} to overwrite it, or --out OTHER.png to keep it")
    writable_file(path, ending=".png", inputs=[] if name in DATASETS else [expanded(name)])
    images = load_splits(name, data_dir, cache="auto", **options).train
    source = None if images.files is None else images.files.source
    if isinstance(source, Paths):
        writable_file(path, inputs=source.paths)
        folder, folders = path.resolve().parent, {file.parent for file in source.paths}
        inside = is_inside(path, name) and folder != expanded(name).resolve()
        if inside or (not is_table(name) and folder in {one.resolve() for one in folders}):
            raise BadInput(f"--out is {path}, where it would be read as an image of {name}: use another folder")
    print(f"picture of {save_contact_sheet(images, path, columns)}: {path}")


@app.command("verify")
def data_verify(name: Dataset, data_dir: DataDir = Path("data")) -> None:
    """Check the files of a dataset against their checksums."""
    dataset = _dataset(name)
    if dataset.verify is None:
        dataset.load(data_dir)
        print(f"{name} can be loaded; there are no files to check")
        return
    found = dataset.verify(data_dir)
    for file, state in found:
        print(printable(f"{file}: {state}"))
    if any(state != "ok" for _, state in found):
        cure = f": `torchcaps data fetch {name}` downloads missing files" if dataset.fetch else ""
        raise BadInput(f"{name} in {data_dir} has missing or damaged files, listed above{cure}")


def _dataset(name: str) -> Any:
    from torchcaps.data import DATASETS

    if name not in DATASETS:
        raise BadInput(f"unknown dataset {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]
