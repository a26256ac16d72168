"""Find images that a run used in training."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from jaxtyping import Bool
from safetensors import SafetensorError

from torchcaps.data import Images, ImagesOnDisk, image_digests
from torchcaps.errors import DataWarning, unreadable
from torchcaps.run_folder import DIGESTS


def seen_in_training(folder: Path, images: Images) -> dict[str, Bool[np.ndarray, " N"]]:
    """Find which of the given images are in the training split of a run, and which are in its validation split.

    An image is found by the checksum of its file or of its pixels, whichever the run stores. Images on disk are not
    decoded if the checksums of their files find them in the training split.

    Returns:
        For each image, whether it is in the split, under the keys ``train`` and ``validation``; empty if the images
        cannot be compared.

    Raises:
        BadInput: the run's image digests are missing or damaged.

    Warns:
        DataWarning: the run has checksums of image files, but `images` were not read from files.
    """
    path = folder / DIGESTS
    try:
        known = safetensors.numpy.load(path.read_bytes())
        seen = {name: np.zeros(len(images), bool) for name in ("train", "validation")}
        files = images.files if {"train files", "validation files"} <= known.keys() else None
        by_pixels = seen.keys() <= known.keys()
        if files is not None:
            for name in seen:
                seen[name] |= np.isin(files.digests, known[f"{name} files"])
        if by_pixels:
            rest, compared = np.arange(len(images)), images
            if isinstance(images, ImagesOnDisk):
                rest = np.flatnonzero(~seen["train"])
                compared = images.subset(rest.tolist())
            found = image_digests(compared)
            for name in seen:
                seen[name][rest] |= np.isin(found, known[name])
        if files is None and not by_pixels:
            warnings.warn(
                f"the given images cannot be compared with the training images of {folder}, because the run stores"
                " checksums of image files, and the given images were not read from files: give images that are read "
                "from files",
                DataWarning,
                stacklevel=2,
            )
            return {}
        return seen
    except (OSError, LookupError, SafetensorError) as error:
        raise unreadable(path, error, "restore it from a copy") from error


def warn_of_seen_images(folders: Sequence[Path], test: Images | None = None, validation: Images | None = None) -> None:
    """Warn if test or validation images are among the images that a run has used.

    Arguments:
        folders: run folders. Other folders, such as folders of published weights, are skipped.
        test: test images, or None.
        validation: validation images, or None.

    Raises:
        BadInput: the image digests of a run are missing or damaged.

    Warns:
        DataWarning: test images are among the training or validation images of a run, or validation images are among
            the training images of a run.
    """
    for folder in folders:
        if not (folder / "recipe.json").is_file():
            continue
        seen = {} if test is None else seen_in_training(folder, test)
        counts = " and ".join(
            f"{mask.sum():,} {split.replace('train', 'training')}" for split, mask in seen.items() if mask.any()
        )
        if test is not None and counts:
            warnings.warn(
                f"{counts} images of {folder} are among the {len(test):,} test images, so the accuracy on new images "
                "can be lower: leave them out of the test images",
                DataWarning,
                stacklevel=2,
            )
        if validation is None or (test is not None and not seen):  # `seen_in_training` has warned already
            continue
        trained = seen_in_training(folder, validation).get("train")
        if trained is not None and trained.any():
            warnings.warn(
                f"{trained.sum():,} of the {len(trained):,} validation images are among the training images of "
                f"{folder}, so the validation accuracy can be too high: remove copies of images from the data, or use "
                "the validation images of that run, for example with the same seed",
                DataWarning,
                stacklevel=2,
            )
