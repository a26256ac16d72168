"""The command `torchcaps`: recipes, train, evaluate, predict, data, experiment, bench, info."""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torchcaps.errors import BadInput, nearest

try:
    import typer
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(f"error: the command line needs {missing.name}: pip install 'torchcaps[train]'") from missing

from torchcaps.cli import data as data_commands
from torchcaps.cli.common import DataDir, keep_heap_warm, print_table, setting, writable
from torchcaps.cli.experiment import experiment

if TYPE_CHECKING:
    from torch import nn

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Capsule networks: train them, evaluate them, use them.",
)
app.add_typer(data_commands.app, name="data")

RunFolder = Annotated[Path, typer.Argument(help="A folder made by `torchcaps train`.")]


@app.command()
def recipes() -> None:
    """List the recipes that `train` knows."""
    from torchcaps.recipes import RECIPES

    table = Table("recipe", "model", "data", "epochs", "what it is")
    for name, recipe in RECIPES.items():
        summary = (recipe.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, recipe().model, recipe().data, str(recipe().epochs), summary)
    print_table(table)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name; see `torchcaps recipes`.")],
    data: Annotated[str | None, typer.Option(help="Another dataset, or a folder of your own images.")] = None,
    data_dir: DataDir = Path("data"),
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE-seedN.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images a step, over all devices.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate at the start.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of split, weights, order and shifts.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, float32 or auto.")] = None,
    devices: Annotated[int, typer.Option(help="Processes to train with (DistributedDataParallel).")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's last checkpoint.")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value; any setting of a recipe.")] = None,
) -> None:
    """Train a recipe; the epoch is chosen on validation images, the test images are read once, at the end."""
    from torchcaps.data import load_splits
    from torchcaps.recipes import create_recipe
    from torchcaps.training import fit

    changes = dict(setting(text) for text in settings or [])
    flags = {"data": data, "epochs": epochs, "batch_size": batch_size, "learning_rate": lr, "seed": seed}
    flags["precision"] = precision
    changes |= {key: str(value) for key, value in flags.items() if value is not None}
    if recipe == "capsnet-images" and data is None:
        raise BadInput("capsnet-images learns from your own images: name their folder with --data FOLDER")
    keep_heap_warm()
    chosen = create_recipe(recipe, changes)
    folder = out or Path("runs") / f"{chosen.name}-seed{chosen.seed}"
    writable(folder)
    splits = load_splits(
        chosen.data,
        data_dir,
        validation_fraction=chosen.validation_fraction,
        seed=chosen.seed,
        **chosen.data_options,
    )
    channels, height, width = splits.train.image_shape
    if _first_process():
        print(
            f"{chosen.name}: {len(splits.train)} training, {len(splits.validation)} validation, "
            f"{len(splits.test)} test images of {channels}×{height}×{width}, "
            f"{len(splits.train.class_names)} classes → {folder}",
            flush=True,
        )
    try:
        metrics = fit(chosen, splits, folder, devices=devices, resume=resume)
    except KeyboardInterrupt:
        print(f"interrupted: the same command with --resume goes on from {folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    if _first_process():
        table = Table("result", chosen.name, title=str(folder))
        for key, value in metrics.items():
            table.add_row(key, f"{value:,}" if isinstance(value, int | float) else str(value))
        print_table(table)
        if (folder / "reconstructions.png").exists():
            print(f"images beside their reconstructions: {folder / 'reconstructions.png'}")


@app.command()
def evaluate(
    run: RunFolder,
    data: Annotated[str | None, typer.Option(help="Another dataset, or a folder of images.")] = None,
    data_dir: DataDir = Path("data"),
    precision: Annotated[str, typer.Option(help="bf16, float32 or auto.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Images at a time.", min=1)] = 128,
) -> None:
    """Accuracy of a trained run on the test split of its dataset, or of another with the same classes."""
    from torchcaps.data import DATASETS, Preparation, load_splits
    from torchcaps.training import evaluate as accuracy_of

    keep_heap_warm()
    model, said = _load_run(run)
    recipe = said["recipe"]
    name = data or recipe["data"]
    channels, height, width = said["image_shape"]
    options = dict(recipe["data_options"])
    if name in DATASETS:
        options = {key: value for key, value in options.items() if key in DATASETS[name].options}
    else:
        options = options if name == recipe["data"] else {}
        options |= {"image_size": (height, width), "channels": channels}
    splits = load_splits(
        name, data_dir, validation_fraction=recipe["validation_fraction"], seed=recipe["seed"], **options
    )
    if list(splits.test.class_names) != said["class_names"]:
        raise BadInput(
            f"{name} has the classes {', '.join(splits.test.class_names)}, but {run} knows "
            f"{', '.join(said['class_names'])}: name data with the same classes"
        )
    if splits.test.image_shape != (channels, height, width):
        raise BadInput(
            f"{name} has images of {splits.test.image_shape}, but {run} was trained on {said['image_shape']}"
        )
    accuracy = accuracy_of(model, splits.test, Preparation.of(recipe), batch_size=batch_size, precision=precision)
    table = Table("run", "data", "test images", "accuracy %", "error %")
    table.add_row(str(run), name, f"{len(splits.test):,}", f"{accuracy:.2f}", f"{100 - accuracy:.2f}")
    print_table(table)


@app.command()
def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files; resized to the size the run was trained on.")],
) -> None:
    """The class of each image, its score, and the runner-up; a model of stereo pairs sees it with both eyes."""
    import torch

    from torchcaps.data import Preparation, read_image

    model, said = _load_run(run)
    channels, height, width = said["image_shape"]
    preparation = Preparation.of(said["recipe"])
    scores = []
    for path in images:
        pixels = read_image(path, 3 if channels == 3 else 1, (height, width)).expand(channels, -1, -1)
        with torch.inference_mode():
            scores.append(model.eval()(preparation.views(pixels[None])[:, 0]).scores.mean(dim=0))
    best = torch.stack(scores).topk(2, dim=1)
    table = Table("image", "class", "score", "runner-up", "score")
    for path, values, classes in zip(images, best.values.tolist(), best.indices.tolist(), strict=True):
        first, second = (said["class_names"][index] for index in classes)
        table.add_row(str(path), first, f"{values[0]:.3f}", second, f"{values[1]:.3f}")
    print_table(table)


app.command()(experiment)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="routing, train or memory.")],
    repeats: Annotated[int, typer.Option(min=2, help="Timed calls of each way.")] = 10,
    heap: Annotated[
        str, typer.Option(help="warm: keep freed memory, as `train` does; plain: as Python does.")
    ] = "warm",
    out: Annotated[Path | None, typer.Option(help="CSV to write, with hardware and versions beside each row.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of `bench memory` to write.")] = None,
) -> None:
    """Routing fused, by the reference and with votes in memory: its time, that of training steps, and peak memory."""
    from torchcaps.benchmarks import write_csv
    from torchcaps.benchmarks.memory import bench_memory, draw_growth
    from torchcaps.benchmarks.routing import bench_routing
    from torchcaps.benchmarks.training import bench_training

    runs = {"routing": lambda: bench_routing(repeats), "train": lambda: bench_training(repeats), "memory": bench_memory}
    for kind, name, known in (("benchmark", what, runs), ("heap", heap, ("warm", "plain"))):
        if name not in known:
            raise BadInput(f"unknown {kind} {name!r}{nearest(name, known)}")
    heap = "plain" if what == "memory" else heap
    if heap == "warm":
        keep_heap_warm()
    rows = [{**row, "heap": heap} for row in runs[what]()]
    same = {key: value for key, value in rows[0].items() if all(row[key] == value for row in rows)}
    table = Table(*(key for key in rows[0] if key not in same), title=", ".join(f"{k} {v}" for k, v in same.items()))
    for row in rows:
        table.add_row(*(str(value) for key, value in row.items() if key not in same))
    print_table(table)
    if out:
        write_csv(out, rows, f"torchcaps bench {what} --repeats {repeats} --heap {heap}")
    if plot and what == "memory":
        draw_growth(rows, plot)


@app.command()
def info() -> None:
    """Versions, hardware and what they mean for training."""
    from torchcaps.kernels import cpu_instruction_sets
    from torchcaps.recipe import resolve_precision
    from torchcaps.run_folder import environment

    facts = environment()
    table = Table("what", "here")
    for key, value in {**facts.pop("versions"), **facts}.items():
        table.add_row(key, str(value))
    table.add_row("precision auto", resolve_precision("auto"))
    built = ", ".join(cpu_instruction_sets()) or "not built: reference alone"
    table.add_row("fused routing (CPU)", built)
    print_table(table)


def _load_run(run: Path) -> tuple["nn.Module", dict[str, Any]]:
    from torchcaps.models import MODELS

    for needed in ("recipe.json", "config.json", "model.safetensors"):
        if not (run / needed).is_file():
            raise BadInput(f"{run} has no {needed}: name the folder of a finished `torchcaps train`")
    try:
        said = json.loads((run / "recipe.json").read_text())
        model = said["recipe"]["model"]
        said["image_shape"], said["class_names"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise BadInput(f"{run / 'recipe.json'} is damaged ({error}): train the run again") from error
    if model not in MODELS:
        raise BadInput(f"{run / 'recipe.json'} names the unknown model {model!r}{nearest(model, MODELS)}")
    return MODELS[model].from_pretrained(run), said  # type: ignore[attr-defined]


def _first_process() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def main() -> None:
    """Entry point: bad input is one line on standard error and exit code 2."""
    warnings.filterwarnings("ignore", module=r"lightning|torch|tensorboard|requests")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        code = app(standalone_mode=False)
    except (BadInput, OSError) as error:
        code = _refuse(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            code = 2
        else:
            code = _refuse(
                f"{error.format_message()} `torchcaps --help` and `torchcaps COMMAND --help` list what there is"
            )
    raise SystemExit(code)


def _refuse(message: str) -> int:
    sys.stdout.flush()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2
