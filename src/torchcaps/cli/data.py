"""The commands `torchcaps data …`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from torchcaps.cli.common import DataDir, print_table, setting
from torchcaps.errors import BadInput, nearest

app = typer.Typer(no_args_is_help=True, help="Datasets: list them, fetch them, verify their checksums.")


@app.command("list")
def data_list() -> None:
    """The datasets known by name."""
    from torchcaps.data import DATASETS

    rows = [(name, dataset.description, dataset.splits, dataset.source) for name, dataset in DATASETS.items()]
    print_table(("name", "what", "splits", "source"), rows)


@app.command("fetch")
def data_fetch(name: str, data_dir: DataDir = Path("data")) -> None:
    """Download what is absent of a dataset; checksums are verified before a file is put in place."""
    dataset = _dataset(name)
    if dataset.fetch is None:
        print(f"{name} needs no download")
        return
    dataset.fetch(data_dir)
    print(f"{name} is complete in {data_dir / name}")


@app.command("render")
def data_render(
    name: str,
    data_dir: DataDir = Path("data"),
    size: Annotated[int, typer.Option(help="Pixels a side: 48 or 96.")] = 48,
    seed: Annotated[int, typer.Option(help="Another seed, other toys; data.render_seed trains on them.")] = 0,
) -> None:
    """Render the toys, in smallNORB's files; the same seed gives the same bytes."""
    from torchcaps.data import render_toys

    if name != "toys":
        raise BadInput(f"{name} is not rendered{nearest(name, ['toys'])}")
    print(f"the toys are in {render_toys(data_dir, size=size, seed=seed)}")


@app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="A dataset's name, or a folder of images.")],
    data_dir: DataDir = Path("data"),
    out: Annotated[Path | None, typer.Option(help="Picture to write; default NAME.png.")] = None,
    columns: Annotated[int, typer.Option(help="Images of each class.", min=1)] = 10,
    settings: Annotated[list[str] | None, typer.Option("--set", help="data.key=value; an option of the data.")] = None,
) -> None:
    """Draw some training images of each class in one picture."""
    from torchcaps.data import load_splits, save_contact_sheet
    from torchcaps.recipes import create_recipe

    changes = dict(setting(text) for text in settings or [])
    for key in changes:
        if not key.startswith("data."):
            raise BadInput(f"--set {key}: a picture depends on settings of the data alone, such as data.image_size")
    options = create_recipe("capsnet-images", changes).data_options
    path = out or Path(f"{Path(name).name}.png")
    if out is None and path.exists():
        raise BadInput(f"{path} exists already: name the picture with --out, which overwrites it")
    images = load_splits(name, data_dir, **options).train
    print(f"{save_contact_sheet(images, path, columns)} in {path}")


@app.command("verify")
def data_verify(name: str, data_dir: DataDir = Path("data")) -> None:
    """Check the files of a dataset against their checksums."""
    dataset = _dataset(name)
    if dataset.verify is None:
        dataset.load(data_dir)
        print(f"{name} loads; it has no files of its own to check")
        return
    found = dataset.verify(data_dir)
    for file, state in found:
        print(f"{file}: {state}")
    if any(state != "ok" for _, state in found):
        raise BadInput(f"{name} in {data_dir} is not complete: see above; `torchcaps data fetch {name}` mends it")


def _dataset(name: str) -> Any:
    from torchcaps.data import DATASETS

    if name not in DATASETS:
        raise BadInput(f"unknown dataset {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]
