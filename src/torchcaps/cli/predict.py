"""The command `torchcaps predict`."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from torchcaps.cli.common import print_table, writable_file
from torchcaps.errors import BadInput, DataWarning


def predict(
    run: Annotated[Path, typer.Argument(help="Run folder, or folder of published weights.")],
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders; images are resized as in training.")],
    table: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="CSV file to write: path, class and all scores of each image."),
    ] = None,
) -> None:
    """Print, for each image, the class with the highest score and the runner-up.

    Folders are searched for images, including their subfolders. If a folder cannot be read, the command stops with an
    error. If an image cannot be read, a warning names it. A network for stereo pairs gets the same image in both
    channels.
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from torchcaps.classifier import Classifier
    from torchcaps.scores import scores_apart, write_predictions

    paths = [path for given in images for path in images_in(given)]
    if table is not None:
        writable_file(table, "--csv", ending=".csv")
    classifier = Classifier.from_pretrained(run)
    errors = Console(stderr=True)
    shown = track(paths, "predicting", console=errors, disable=not errors.is_terminal, transient=True)
    answers, damaged = [], []
    for path in shown:
        try:
            answers.append((path, classifier.predict(path)))
        except BadInput as error:
            damaged.append(error)
    if not answers:
        several = f"none of the {len(paths):,} images can be read; the first: " if len(paths) > 1 else ""
        raise BadInput(f"{several}{damaged[0]}")
    for error in damaged:
        warnings.warn(f"no prediction: {error}", DataWarning, stacklevel=1)
    if table is not None:
        scores = torch.cat([answer.scores for _, answer in answers])
        write_predictions(table, ["file"], [[path] for path, _ in answers], classifier.class_names, scores)
        print(f"predictions for {len(answers):,} images: {table}")
        return
    lines = []
    for path, answer in answers:
        best = answer.scores[0].sort(descending=True, stable=True)  # of equal scores, argmax takes the first
        first, second = (classifier.class_names[index] for index in best.indices[:2].tolist())
        high, low = scores_apart(best.values[:2].tolist(), digits=3)
        lines.append((path, first, high, second, low))
    print_table(("image", "class", "score", "runner-up", "score"), lines)


def images_in(path: Path) -> list[Path]:
    """List the image files in a folder and its subfolders, sorted by path; for a file, return the file.

    Files and folders whose names start with a dot are skipped. As in `train`, the folders directly in `path` can be
    symbolic links.

    Raises:
        BadInput: the folder contains no images, or the folder or a subfolder cannot be read.
    """
    from torchcaps.data.image_file import FORMATS
    from torchcaps.data.image_folder import folders_in, images_below

    if not path.is_dir():
        return [path]
    linked = [folder for folder in folders_in(path) if folder.is_symlink()]
    found = sorted(image for root in (path, *linked) for image in images_below(root))
    if not found:
        raise BadInput(f"{path} contains no images: give a folder with {', '.join(FORMATS)} files")
    return found
