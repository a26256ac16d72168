"""The command `torchcaps evaluate`."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from torchcaps.cli.common import (
    RUN_FILES,
    Cache,
    DataDir,
    image_options,
    naming_options,
    print_classes,
    print_table,
    same_data,
    splits_for,
    writable_file,
)
from torchcaps.errors import BadInput, DataWarning
from torchcaps.process_memory import keep_freed_memory

if TYPE_CHECKING:
    from torchcaps.classifier import Classifier
    from torchcaps.data import Images
    from torchcaps.run_folder import Run


@naming_options(precision="--precision", cache="--cache", data="--data")
def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folder or folder of weights; several folders are evaluated as an ensemble."),
    ],
    data: Annotated[
        str | None, typer.Option(help="Dataset to use instead of the run's: a name, or a folder or table of images.")
    ] = None,
    data_dir: DataDir = Path("data"),
    precision: Annotated[
        str | None,
        typer.Option(help="Precision: bf16, float32 or auto; default: float32 if the recipe sets float32, else auto."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Batch size.", min=1)] = 128,
    cache: Cache = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that load images; default: 0, or, for images on disk, the number of cores.", min=0
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the run's dataset to evaluate: test or validation.")] = "test",
    csv: Annotated[Path | None, typer.Option(help="CSV file to write, with the scores of each image.")] = None,
) -> None:
    """Print the accuracy of a run on the test split of its dataset or of another dataset with the same classes.

    The other dataset can be your own folder or table of images. If it has no test split, all of its images are
    evaluated, except images that the run used in training or validation. With --split validation, the run is evaluated
    on its validation images; --data can then only give the new path of its dataset. Weights without a recipe.json, such
    as published weights, need --data.

    Several runs are evaluated as an ensemble, whose scores are the mean of the runs' scores. By default, an ensemble is
    evaluated on the dataset of the first run.
    """
    from torchcaps.checks import check_choice
    from torchcaps.classifier import Classifier
    from torchcaps.confusion import per_class, warn_of_one_prediction
    from torchcaps.data.files import expanded
    from torchcaps.evaluation import evaluate as evaluation_of
    from torchcaps.recipe import Precision
    from torchcaps.run_folder import finished, read_run
    from torchcaps.scores import MeanScores, write_scores
    from torchcaps.seen_images import warn_of_seen_images

    check_choice("--split", split, ("test", "validation"), BadInput)
    check_choice("--precision", "auto" if precision is None else precision, get_args(Precision), BadInput)
    keep_freed_memory()
    classifier, *others = (Classifier.from_pretrained(folder) for folder in runs)
    known = {one: read_run(one) for one in runs if any(os.path.lexists(one / name) for name in RUN_FILES)}
    recipe = known[runs[0]].recipe if runs[0] in known else None
    if recipe is None and split == "validation":
        raise BadInput(
            f"--split is validation, but {runs[0]} has no recipe.json, so its validation images are unknown: give a "
            "run folder, or leave out --split and give images with --data"
        )
    name = data or (recipe.data if recipe else "")
    if not name:
        raise BadInput(f"{runs[0]} has no recipe.json, so its test images are unknown: give images with --data")
    if csv is not None:
        writable_file(csv, "--csv", new_folder=True, inputs=[expanded(name)], ending=".csv")
    expected = _what_scores_depend_on(classifier)
    for folder, other in zip(runs[1:], others, strict=True):
        for fact, value in _what_scores_depend_on(other).items():
            if value != expected[fact]:
                raise BadInput(f"{folder} and {runs[0]} differ in {fact}: evaluate these runs one at a time")
    model = MeanScores([one.model for one in (classifier, *others)]) if others else classifier.model
    images = _images(classifier, runs[0], known, data, data_dir, cache, split)
    if precision is None:
        precision = "float32" if recipe and recipe.precision == "float32" else "auto"
    losses = {known[one].recipe.loss if one in known else "" for one in runs}
    loss = losses.pop() if len(losses) == 1 else ""
    options: dict[str, Any] = {"batch_size": batch_size, "precision": precision, "loss": loss, "workers": workers}
    found = evaluation_of(model, images, classifier.preprocessing, **options)
    accuracy, label = found.accuracy_percent, f"mean of {len(runs)} runs" if others else runs[0]
    # The calibration error depends on the loss of the training.
    error = found.calibration_error_percent if all(one in known for one in runs) else None
    calibration = "-" if error is None else f"{error:.2f}"
    top_5 = {} if found.top_5_percent is None else {"top-5 accuracy %": f"{found.top_5_percent:.2f}"}
    row = {
        "run": label,
        "data": name,
        f"{split} images": f"{len(images):,}",
        "accuracy %": f"{accuracy:.2f}",
        "error %": f"{100 - accuracy:.2f}",
        **top_5,
        "calibration error %": calibration,
    }
    print_table(tuple(row), [tuple(row.values())])
    print_classes(per_class(found.confusion, images.class_names))
    warn_of_one_prediction(found.confusion, images.class_names)
    if csv is not None and found.scores is not None:
        csv.parent.mkdir(parents=True, exist_ok=True)
        write_scores(csv, images, found.scores)
        print(f"scores of each image: {csv}")
    for folder, one in known.items():
        if finished(folder, one.recipe) is None:
            warnings.warn(
                f"the training of {folder} to epoch {one.recipe.epochs} is not finished, or metrics.json is missing, "
                "so the evaluated weights can be those of an earlier epoch: complete the run with --resume",
                DataWarning,
                stacklevel=1,
            )
    for folder in (one for one in runs if one not in known):
        print(
            f"{folder} contains no list of its training images: if some of the evaluated images are training images, "
            "the accuracy is too high"
        )
    started = [Path(one.recipe.pretrained) for one in known.values() if one.recipe.pretrained]
    warn_of_seen_images([*dict.fromkeys([*runs, *started])], **{split: images})


def _what_scores_depend_on(classifier: "Classifier") -> dict[str, Any]:
    """Return the properties that must be the same for all runs whose scores are averaged, keyed by name."""
    return {
        "model": type(classifier.model).__name__,
        "class_names": classifier.class_names,
        "image_shape": classifier.image_shape,
        "resize": classifier.resize,
        **{name: getattr(classifier.preprocessing, name) for name in ("standardise", "crop", "test_crops")},
    }


def _images(
    classifier: "Classifier",
    folder: Path,
    runs: Mapping[Path, "Run"],
    data: str | None,
    data_dir: Path,
    cache: str,
    split: str,
) -> "Images":
    """Load the images on which one or several runs with the same classes are evaluated.

    Arguments:
        classifier: network of the first run.
        folder: folder of the first run.
        runs: folder and content of recipe.json of each run. Folders without recipe.json are missing.
        data: name, folder or table; None for the data of the first run.
        data_dir: folder of the named datasets.
        cache: as for `torchcaps.data.load_splits`.
        split: ``test`` or ``validation``. For ``validation``, `data` can only be a new path of the first run's data.

    Raises:
        BadInput: the data for the validation split are not those of the first run, or the images cannot be read or do
            not fit the network.

    Warns:
        DataWarning: the data of the first run have changed since the training.
    """
    import numpy as np
    import torch

    from torchcaps.data import DATASETS, load_test_images
    from torchcaps.data.files import expanded
    from torchcaps.data.image_table import HUB
    from torchcaps.seen_images import seen_in_training

    columns: dict[str, Any] = {}
    if folder in runs:
        run, recipe = runs[folder], runs[folder].recipe
        name = recipe.data if data is None else data
        known = name in DATASETS or name.startswith(HUB)
        if data is None and not known and not expanded(name).exists():
            raise BadInput(f"{folder} was trained on {name}, which does not exist here: give its path with --data")
        if split == "validation" or name in DATASETS or same_data(name, recipe.data):
            return _split_of(classifier, folder, run, name, data_dir, cache, split)
        columns = {
            key: recipe.data_options[key] for key in ("image_column", "label_column") if key in recipe.data_options
        }
    else:
        name = data or ""
        if name in DATASETS:
            return splits_for(classifier, None, name, data_dir, cache).test
    images, has_test_split = load_test_images(
        name,
        classifier.class_names,
        cache=cache,  # type: ignore[arg-type]
        **image_options(classifier),
        **columns,
    )
    if has_test_split:
        return images
    masks = [mask for one in runs for mask in seen_in_training(one, images).values()]
    used = np.any(masks, axis=0) if masks else np.zeros(len(images), bool)
    if used.all():
        raise BadInput(f"{folder} used all images of {name} in training or validation: give new ones with --data")
    rest = f"; the run used the other {used.sum():,} in training or validation" if used.any() else ""
    print(f"{name} has no test split: {(~used).sum():,} of {len(images):,} images are evaluated{rest}", flush=True)
    return images.subset(torch.from_numpy(np.flatnonzero(~used)))


def _split_of(
    classifier: "Classifier", folder: Path, run: "Run", name: str, data_dir: Path, cache: str, split: str
) -> "Images":
    """Load the test or validation images of a run's own data, or of the named dataset `name`."""
    from torchcaps.data import DATASETS, difference, fingerprint
    from torchcaps.data.image_table import HUB

    recipe, same = run.recipe, same_data(name, run.recipe.data)
    moved = split == "validation" and not same
    if moved and any(one in DATASETS or one.startswith(HUB) for one in (name, recipe.data)):
        raise BadInput(
            f"--split validation needs the data of {folder}, {recipe.data}, but --data is {name}: leave out --data"
        )
    splits = splits_for(classifier, replace(recipe, data=name) if moved else recipe, name, data_dir, cache)
    changed = difference(run.data, fingerprint(splits, run.data)[0]) if same or moved else None
    if changed and moved:
        raise BadInput(
            f"--split validation needs the data of {folder}, but {name} is other data ({changed}): give an unchanged "
            "copy of the data"
        )
    if changed:
        warnings.warn(
            f"{name} has changed since {folder} was trained on it ({changed}), so the accuracy cannot be compared with "
            "the accuracy of that training",
            DataWarning,
            stacklevel=2,
        )
    return splits.test if split == "test" else splits.validation
