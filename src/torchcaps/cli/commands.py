"""The commands: recipes, train, evaluate, predict, publish, data, experiment, bench, info."""

import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from torchcaps.cli import Interrupted
from torchcaps.cli import data as data_commands
from torchcaps.cli.common import DataDir, keep_heap_warm, print_table, run_folder, setting, writable
from torchcaps.cli.experiment import experiment
from torchcaps.errors import BadInput, DataWarning, nearest

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Capsule networks: train them, evaluate them, use them.",
)
app.add_typer(data_commands.app, name="data")

MOST_CLASSES = 20
RunFolder = Annotated[Path, typer.Argument(help="A folder made by `torchcaps train`.")]


@app.command()
def recipes() -> None:
    """List the recipes that `train` knows."""
    from torchcaps.models import routing_of
    from torchcaps.recipes import RECIPES

    rows = []
    for name, recipe in RECIPES.items():
        summary = (recipe.__doc__ or "").strip().splitlines()[0]
        routing = routing_of(recipe().model, recipe().model_options, recipe().routing_options)
        rule = "" if routing is None else " ".join([routing.name, *(f"{k}={v}" for k, v in routing.options.items())])
        rows.append((name, recipe().model, rule, recipe().data, recipe().epochs, summary))
    print_table(("recipe", "model", "routing", "data", "epochs", "what it is"), rows)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name; see `torchcaps recipes`.")],
    data: Annotated[str | None, typer.Option(help="Another dataset, or a folder of your own images.")] = None,
    data_dir: DataDir = Path("data"),
    out: Annotated[
        Path | None, typer.Option(parser=run_folder, metavar="FOLDER", help="Run folder; default runs/RECIPE-seedN.")
    ] = None,
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
    from torchcaps.run_folder import existing_run
    from torchcaps.training import check_devices, fit

    changes = dict(setting(text) for text in settings or [])
    flags = {"data": data, "epochs": epochs, "batch_size": batch_size, "learning_rate": lr, "seed": seed}
    flags["precision"] = precision
    changes |= {key: str(value) for key, value in flags.items() if value is not None}
    if recipe == "capsnet-images" and data is None:
        raise BadInput("capsnet-images learns from your own images: name their folder with --data FOLDER")
    keep_heap_warm()
    chosen = create_recipe(recipe, changes)
    folder = out or Path("runs") / f"{chosen.name}-seed{chosen.seed}"
    check_devices(devices, chosen)
    if _first_process():
        before = existing_run(folder, resume)
        writable(folder)
        if before is not None and before.recipe.epochs != chosen.epochs:
            print(f"{folder} was begun with {before.recipe.epochs} epochs; now {chosen.epochs}", flush=True)
    try:
        splits = load_splits(
            chosen.data,
            data_dir,
            validation_fraction=chosen.validation_fraction,
            validation_attribute=chosen.validation_attribute,
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
        metrics = fit(chosen, splits, folder, devices=devices, resume=resume)
    except KeyboardInterrupt:
        raise Interrupted(f"the same command with --resume goes on from {folder}") from None
    if _first_process():
        classes = metrics.pop("classes")
        rows = [(key, f"{value:,}" if isinstance(value, int | float) else value) for key, value in metrics.items()]
        print_table(("result", chosen.name), rows, title=str(folder))
        if classes is not None:
            _print_classes(classes)
        for name, what in (
            ("confusion.png", "true and predicted classes"),
            ("reconstructions.png", "images beside their reconstructions"),
        ):
            if (folder / name).exists():
                print(f"{what}: {folder / name}")


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Run folder; several are evaluated as an ensemble.")],
    data: Annotated[str | None, typer.Option(help="Another dataset, or a folder of images.")] = None,
    data_dir: DataDir = Path("data"),
    precision: Annotated[str, typer.Option(help="bf16, float32 or auto.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Images at a time.", min=1)] = 128,
) -> None:
    """Accuracy of a trained run on the test split of its dataset, or of another with the same classes.

    Several runs are evaluated as an ensemble, by the mean of their scores, on the data of the first.
    """
    from torchcaps.classifier import Classifier
    from torchcaps.confusion import per_class, warn_of_one_prediction
    from torchcaps.data import DATASETS, load_splits
    from torchcaps.run_folder import read_run, seen_in_training
    from torchcaps.training import MeanScores
    from torchcaps.training import evaluate as evaluation_of

    keep_heap_warm()
    classifier, *others = (Classifier.from_pretrained(folder) for folder in runs)
    run, (recipe, *_) = runs[0], [read_run(folder).recipe for folder in runs]
    expected = _what_scores_depend_on(classifier)
    for folder, other in zip(runs[1:], others, strict=True):
        for name, value in _what_scores_depend_on(other).items():
            if value != expected[name]:
                raise BadInput(f"{folder} has another {name} than {run}: their scores cannot be averaged")
    model = MeanScores([one.model for one in (classifier, *others)]) if others else classifier.model
    name = data or recipe.data
    channels, height, width = classifier.image_shape
    options = dict(recipe.data_options)
    if name in DATASETS:
        options = {key: value for key, value in options.items() if key in DATASETS[name].options}
    else:
        options = options if name == recipe.data else {}
        options |= {"image_size": (height, width), "channels": channels}
    test = load_splits(name, data_dir, validation_fraction=recipe.validation_fraction, seed=recipe.seed, **options).test
    if test.class_names != tuple(classifier.class_names):
        raise BadInput(
            f"{name} has the classes {', '.join(test.class_names)}, but {run} knows "
            f"{', '.join(classifier.class_names)}: name data with the same classes"
        )
    if test.image_shape != classifier.image_shape:
        raise BadInput(f"{name} has images of {test.image_shape}, but {run} was trained on {classifier.image_shape}")
    seen_by = {folder: seen_in_training(folder, test) for folder in runs}
    found = evaluation_of(model, test, classifier.preparation, batch_size=batch_size, precision=precision)
    accuracy, label = found.accuracy_percent, f"mean of {len(runs)} runs" if others else run
    print_table(
        ("run", "data", "test images", "accuracy %", "error %"),
        [(label, name, f"{len(test):,}", f"{accuracy:.2f}", f"{100 - accuracy:.2f}")],
    )
    _print_classes(per_class(found.confusion, test.class_names))
    warn_of_one_prediction(found.confusion, test.class_names)
    for folder, seen in seen_by.items():
        if any(seen.values()):
            counts = " and ".join(f"{count:,} {split}" for split, count in seen.items() if count)
            warnings.warn(
                f"of these {len(test):,} images, {folder} has seen {counts} images while it was trained: "
                "this is not its accuracy on new images",
                DataWarning,
                stacklevel=1,
            )


def _what_scores_depend_on(classifier: Any) -> dict[str, Any]:
    """By name, what runs must have in common for the mean of their scores to have a meaning."""
    return {
        "model": type(classifier.model).__name__,
        "class_names": classifier.class_names,
        "image_shape": classifier.image_shape,
        **{name: getattr(classifier.preparation, name) for name in ("standardise", "crop", "test_crops")},
    }


@app.command()
def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="Image files; resized to the size the run was trained on.")],
) -> None:
    """The class of each image, its score, and the runner-up; a model of stereo pairs sees it with both eyes."""
    from torchcaps.classifier import Classifier

    classifier = Classifier.from_pretrained(run)
    best = classifier.predict(images).scores.topk(2, dim=1)
    rows = []
    for path, values, classes in zip(images, best.values.tolist(), best.indices.tolist(), strict=True):
        first, second = (classifier.class_names[index] for index in classes)
        rows.append((path, first, f"{values[0]:.3f}", second, f"{values[1]:.3f}"))
    print_table(("image", "class", "score", "runner-up", "score"), rows)


@app.command()
def publish(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(help="Folder for the weights, such as weights/NAME.")],
) -> None:
    """Weights to share: a run's network without its decoder, and a page with data, recipe, commit and figures."""
    from torchcaps.model_card import publish as publish_run

    writable(folder, "FOLDER")
    card = publish_run(run, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 2**20:.2f} MiB; read {card}")


app.command()(experiment)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="routing, rules, train or memory.")],
    repeats: Annotated[int, typer.Option(min=2, help="Timed calls of each way.")] = 10,
    heap: Annotated[
        str, typer.Option(help="warm: keep freed memory, as `train` does; plain: as Python does.")
    ] = "warm",
    out: Annotated[Path | None, typer.Option(help="CSV to write, with hardware and versions beside each row.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of `bench memory` to write.")] = None,
) -> None:
    """Time and memory of fused routing, the reference and materialised votes; time of training steps."""
    from torchcaps.benchmarks import write_csv
    from torchcaps.benchmarks.memory import bench_memory, draw_growth
    from torchcaps.benchmarks.routing import bench_routing
    from torchcaps.benchmarks.rules import rule_problems
    from torchcaps.benchmarks.training import bench_training

    runs = {
        "routing": lambda: bench_routing(repeats),
        "rules": lambda: bench_routing(repeats, problems=rule_problems()),
        "train": lambda: bench_training(repeats),
        "memory": bench_memory,
    }
    for kind, name, known in (("benchmark", what, runs), ("heap", heap, ("warm", "plain"))):
        if name not in known:
            raise BadInput(f"unknown {kind} {name!r}{nearest(name, known)}")
    heap = "plain" if what == "memory" else heap
    if heap == "warm":
        keep_heap_warm()
    rows = [{**row, "heap": heap} for row in runs[what]()]
    same = {key: value for key, value in rows[0].items() if all(row[key] == value for row in rows)}
    keys = [key for key in rows[0] if key not in same]
    print_table(keys, [[row[key] for key in keys] for row in rows], ", ".join(f"{k} {v}" for k, v in same.items()))
    if out:
        write_csv(out, rows, f"torchcaps bench {what} --repeats {repeats} --heap {heap}")
    if plot and what == "memory":
        draw_growth(rows, plot)


@app.command()
def info() -> None:
    """Versions, hardware and what they mean for training."""
    from torchcaps.environment import environment
    from torchcaps.kernels import cpu_instruction_sets
    from torchcaps.recipe import resolve_precision

    facts = environment()
    built = ", ".join(cpu_instruction_sets()) or "not built: reference alone"
    rows = {**facts.pop("versions"), **facts, "precision auto": resolve_precision("auto"), "fused routing (CPU)": built}
    print_table(("what", "here"), rows.items())


def _print_classes(classes: dict[str, dict[str, Any]]) -> None:
    """Images, precision and recall of each class; of many, those of lowest recall."""
    lowest = sorted(classes, key=lambda name: classes[name]["recall_percent"] or 0)[:MOST_CLASSES]
    shown = [name for name in classes if name in lowest]
    title = "" if len(shown) == len(classes) else f"the {len(shown)} of {len(classes)} classes with the lowest recall"
    rows = [(name, *(("-" if value is None else value) for value in classes[name].values())) for name in shown]
    print_table(("class", "test images", "precision %", "recall %"), rows, title)


def _first_process() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0
