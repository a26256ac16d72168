"""The command `torchcaps`. This module defines some of its subcommands, and imports the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from torchcaps.cli import Interrupted
from torchcaps.cli import data as data_commands
from torchcaps.cli.common import (
    Cache,
    DataDir,
    is_inside,
    naming_options,
    print_classes,
    print_table,
    print_version,
    run_folder,
    setting,
    writable,
    writable_file,
)
from torchcaps.cli.evaluate import evaluate
from torchcaps.cli.experiment import experiment
from torchcaps.cli.look import explore, export, inspect, report
from torchcaps.cli.predict import predict
from torchcaps.cli.recipes import recipes
from torchcaps.errors import BadInput, nearest
from torchcaps.process_memory import keep_freed_memory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_commands.app, name="data")

RunFolder = Annotated[Path, typer.Argument(help="Run folder of `torchcaps train`.")]


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, evaluate and use capsule networks."""


app.command()(recipes)


TRAIN_OPTIONS = {
    "data": "--data",
    "epochs": "--epochs",
    "batch_size": "--batch-size",
    "learning_rate": "--lr",
    "seed": "--seed",
    "precision": "--precision",
    "devices": "--devices",
    "cache": "--cache",
    "logger": "--logger",
}
"""Options of `torchcaps train` by the names that error messages use."""


@app.command()
@naming_options(**TRAIN_OPTIONS)
def train(
    recipe: Annotated[str, typer.Argument(help="Name of a recipe; see `torchcaps recipes`.")],
    data: Annotated[
        str | None, typer.Option(help="Dataset to use instead of the recipe's: a name, or a folder or table of images.")
    ] = None,
    data_dir: DataDir = Path("data"),
    out: Annotated[
        Path | None, typer.Option(parser=run_folder, metavar="FOLDER", help="Run folder; default: runs/RECIPE-seedN.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs; default: the recipe's.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Batch size, summed over all devices; default: the recipe's.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Initial learning rate; default: the recipe's.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed of validation split, initial weights, batches and augmentation; default: the recipe's."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16, float32, or auto: bf16 on hardware that computes convolutions faster in bf16, else float32; "
            "default: the recipe's."
        ),
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of processes (DistributedDataParallel).")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            help="DataLoader workers per device; default: 0, or, for images on disk, the number of cores divided by "
            "the number of devices.",
            min=0,
        ),
    ] = None,
    cache: Cache = "auto",
    logger: Annotated[str, typer.Option(help="Logger: tensorboard, csv, wandb, mlflow or none.")] = "tensorboard",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    pretrained: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Initial weights: a run folder, or weights/NAME. The recipe timm-capsnet-images also accepts a "
            ".safetensors file, or the word timm, which downloads the weights that timm publishes.",
        ),
    ] = None,
    no_test: Annotated[
        bool, typer.Option("--no-test", help="Do not evaluate on the test images, to compare settings without them.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only estimate memory and time. Missing data are still downloaded or rendered."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting, written as SETTING=VALUE, such as shift=0; can be repeated."),
    ] = None,
) -> None:
    """Train the network of a recipe. At the end, evaluate the network once on the test images.

    With --no-test, the metrics and pictures at the end are those of the validation images. To evaluate the run on the
    test images later, run the same command with --resume instead of --no-test.
    """
    from torchcaps.data import check_source, load_splits
    from torchcaps.devices import check_devices, check_shares
    from torchcaps.environment import first_process
    from torchcaps.estimate import print_estimate
    from torchcaps.fine_tuning import load_matching
    from torchcaps.loggers import check_logger
    from torchcaps.recipes import OWN_IMAGES, create_recipe, discarded_options
    from torchcaps.run_folder import check_run, existing_run, finished
    from torchcaps.training import fit, new_module

    options = {"data": data, "epochs": epochs, "batch_size": batch_size, "learning_rate": lr, "seed": seed}
    changes = changed_settings(settings or [], options | {"precision": precision, "pretrained": pretrained})
    keep_freed_memory()
    chosen = create_recipe(recipe, changes)
    if chosen.data == OWN_IMAGES and "data" not in changes:
        raise BadInput(f"{recipe} trains on your own images: give the folder of the images with --data FOLDER")
    folder = out or Path("runs") / f"{chosen.name}-seed{chosen.seed}"
    if pretrained is not None and not pretrained.strip():
        raise BadInput("--from is empty: give a folder with weights, or leave out --from")
    check_source(chosen.data)
    if not resume and is_inside(folder, chosen.data):
        raise BadInput(
            f"the run folder {folder} is inside the folder of images {chosen.data}, where the pictures of the run "
            "would be read as images of a class: give another folder with --out"
        )
    check_devices(devices, chosen)
    check_logger(logger)
    if first_process() and (discarded := discarded_options(chosen)):
        print(f"options of {recipe} that are not used with these settings: {', '.join(discarded)}", flush=True)
    if first_process() and (resume or not dry_run):
        before = existing_run(folder, resume)
        if resume and before is None:
            raise BadInput(f"{folder} contains no run to continue: correct --out, or leave out --resume")
        if not dry_run:
            writable(folder)
    try:
        splits = load_splits(
            chosen.data,
            data_dir,
            validation_fraction=chosen.validation_fraction,
            validation_attribute=chosen.validation_attribute,
            seed=chosen.seed,
            cache=cache,  # type: ignore[arg-type]
            processes=devices,
            **chosen.data_options,
        )
        check_shares(splits, devices)
        channels, height, width = splits.train.image_shape
        if first_process():
            print(
                f"{chosen.name}: {len(splits.train)} training, {len(splits.validation)} validation, "
                f"{len(splits.test)} test images of {channels}×{height}×{width}, "
                f"{len(splits.train.class_names)} classes → {folder}",
                flush=True,
            )
        on_start = partial(print_estimate, splits=splits, devices=devices, workers=workers, test=not no_test)
        if dry_run:
            module = new_module(chosen, splits, devices=devices)
            trained = 0
            if resume:
                checked = check_run(folder, module.recipe, splits, module, resume)
                trained = chosen.epochs if finished(folder, module.recipe) else checked.trained
            if chosen.pretrained and not trained:
                print(load_matching(module.model, chosen, splits.train.class_names), flush=True)
            on_start(module, max(0, chosen.epochs - trained))
            return
        how: dict[str, Any] = {"devices": devices, "workers": workers, "resume": resume, "logger": logger}
        metrics = fit(chosen, splits, folder, **how, test=not no_test, on_start=on_start)
    except KeyboardInterrupt:
        begun = not dry_run and (folder / "recipe.json").exists()
        raise Interrupted(
            f"run the same command with --resume to continue in {folder}" if begun else "nothing was written"
        ) from None
    if first_process():
        print_result(metrics, chosen.name, folder)


def changed_settings(settings: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that `--set` and the other options change, and their values as text.

    Raises:
        BadInput: both give a setting different values.
    """
    changes = dict(setting(text) for text in settings)
    for key, value in options.items():
        if value is not None and changes.setdefault(key, str(value)) != str(value):
            option = TRAIN_OPTIONS.get(key, "--from")
            raise BadInput(f"--set {key}={changes[key]} and {option} {value} change the same setting: leave one out")
    return changes


def print_result(metrics: dict[str, Any], name: str, folder: Path) -> None:
    """Print the metrics of a finished run, and the pictures in its folder."""
    classes, split = metrics.pop("classes"), metrics["evaluated_split"]
    rows = [(key, f"{value:,}" if isinstance(value, int | float) else value) for key, value in metrics.items()]
    print_table(("result", name), rows, title=str(folder))
    if classes is not None:
        print_classes(classes)
    for file, what in (
        ("curves.png", "learning curves"),
        ("confusion.png", "confusion matrix"),
        ("worst.png", f"{split} images with the worst scores"),
        ("reconstructions.png", "images and reconstructions"),
    ):
        if (folder / file).exists():
            print(f"{what}: {folder / file}")


app.command()(evaluate)
app.command()(predict)
app.command()(inspect)
app.command()(report)
app.command()(export)
app.command()(explore)


@app.command()
def publish(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="Folder for the weights, such as weights/NAME.")],
) -> None:
    """Write the weights of a run, without the decoder, and a model card to a folder that you can share."""
    from torchcaps.model_card import publish as publish_run

    writable(folder, "FOLDER")
    publish_run(run, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"weights and model card, {size / 2**20:.2f} MiB: {folder}")


app.command()(experiment)


@app.command()
def bench(
    what: Annotated[
        str,
        typer.Argument(
            help="Benchmark: routing (EM and dynamic routing), rules (other routing rules), published (published "
            "implementations beside torchcaps; needs --clones), train (training steps), devices (a training step in "
            "two processes) or memory (peak memory)."
        ),
    ],
    repeats: Annotated[int | None, typer.Option(min=2, help="Timed calls per implementation. Default: 10.")] = None,
    heap: Annotated[
        str | None,
        typer.Option(
            help="What the process does with freed memory. warm: keep it for reuse, as `torchcaps train` does; plain: "
            "the default of the system's memory allocator. Default: warm."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="CSV file to write; rows include hardware and versions. An interrupted benchmark leaves its rows in "
            "FILE.partial."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG file to write: a picture of the results (not for `bench devices`).")
    ] = None,
    clones: Annotated[
        Path | None,
        typer.Option(
            help="For `bench published`: folder with clones of the published implementations. Their code runs on this "
            "computer. Without this option, an error message names the repositories."
        ),
    ] = None,
) -> None:
    """Measure the time and memory of several implementations of routing, and the time of training steps.

    The benchmark `devices` measures strong scaling: it times a training step in one process, and then the same step
    with its images divided between two processes.
    """
    import torch

    from torchcaps.benchmarks import draw_times, write_csv
    from torchcaps.benchmarks.devices import bench_devices
    from torchcaps.benchmarks.memory import bench_memory, draw_growth
    from torchcaps.benchmarks.published import PUBLISHED, bench_published
    from torchcaps.benchmarks.routing import bench_routing
    from torchcaps.benchmarks.rules import rule_problems
    from torchcaps.benchmarks.training import bench_training
    from torchcaps.checks import check_choice
    from torchcaps.data.files import write_picture
    from torchcaps.kernels import cpu_instruction_sets

    times, state = repeats or 10, heap or ("plain" if what == "memory" else "warm")
    runs: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "routing": lambda: bench_routing(times),
        "rules": lambda: bench_routing(times, problems=rule_problems()),
        "published": lambda: bench_published(times, cast(Path, clones)),
        "train": lambda: bench_training(times),
        "devices": lambda: bench_devices(times),
        "memory": bench_memory,
    }
    if what not in runs:
        raise BadInput(f"unknown benchmark {what!r}{nearest(what, runs)}")
    if not torch.cuda.is_available() and not cpu_instruction_sets():
        raise BadInput(
            "torchcaps bench measures the fused kernels, and this installation was built without them: install "
            "torchcaps with a compiler"
        )
    check_choice("--heap", state, ("warm", "plain"), BadInput)
    for option, value in (("--repeats", repeats), ("--heap", heap)):
        if what == "memory" and value is not None:
            raise BadInput(f"{option} is {value}, but `bench memory` does not use it: leave out {option}")
    if clones and what != "published":
        raise BadInput(f"--clones is {clones}, but `bench {what}` does not use it: leave out --clones")
    if what == "published" and clones is None:
        sources = ", ".join(f"https://github.com/{source.repository}" for source, *_ in PUBLISHED.values())
        raise BadInput(f"--clones is missing: git clone each of {sources} into one folder, and pass the folder")
    if plot and what == "devices":
        raise BadInput(f"--plot is {plot}, but `bench devices` draws no picture: leave out --plot")
    if out and plot and out.resolve() == plot.resolve():
        raise BadInput(f"--out and --plot are both {plot}: give two files")
    for path, option, ending in ((out, "--out", ".csv"), (plot, "--plot", ".png")):
        if path is not None:
            writable_file(path, option, ending=ending)
    if state == "warm":
        keep_freed_memory()
    command = f"torchcaps bench {what}" + (" --clones CLONES" if what == "published" else "")
    command += "" if what == "memory" else f" --repeats {times} --heap {state}"
    rows, unfinished = [], out and out.with_name(f"{out.name}.partial")
    for row in runs[what]():
        rows.append({**row, "heap": state})
        if unfinished:
            write_csv(unfinished, rows, command, on_cpu=what == "devices")
    if out and unfinished:
        unfinished.replace(out)
    same = {key: value for key, value in rows[0].items() if all(row[key] == value for row in rows)}
    keys = [key for key in rows[0] if key not in same]
    print_table(keys, [[row[key] for key in keys] for row in rows], ", ".join(f"{k} {v}" for k, v in same.items()))
    if plot:
        plot.parent.mkdir(parents=True, exist_ok=True)
        write_picture(plot, (draw_growth if what == "memory" else draw_times)(rows))


@app.command()
def info() -> None:
    """Print the versions, the hardware, the default precision, and the available fused CPU kernels."""
    from torchcaps.environment import environment
    from torchcaps.kernels import cpu_instruction_sets
    from torchcaps.recipe import resolve_precision

    facts = environment()
    built = ", ".join(cpu_instruction_sets()) or "not built; using the reference implementation"
    rows = {**facts.pop("versions"), **facts, "precision auto": resolve_precision("auto"), "fused routing (CPU)": built}
    print_table(("property", "value"), [(name, "none" if value is None else value) for name, value in rows.items()])
