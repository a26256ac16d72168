"""Sabour, Frosst & Hinton 2017, section 5.2: trained on translated digits, tested on affine-transformed digits."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional

from torchcaps.data import Images, Splits, shift, shift_offsets
from torchcaps.data.fingerprint import checksum
from torchcaps.data.mat_file import read_struct
from torchcaps.errors import BadInput
from torchcaps.experiments.study import RECENT_DIGITS_NOTE, Outcome, Row, Study, accuracy_of, part, some
from torchcaps.recipe import Recipe

SIZE = 40
MARGIN = (SIZE - 28) // 2
NETWORKS = ("CNN", "capsules", "uniform couplings")
PAPER = {"CNN": ("99.22", "66"), "capsules": ("99.23", "79")}


def moved(images: Images, seed: int | None) -> Images:
    """Pad digits to 40×40 pixels, and shift them at random; if `seed` is None, they stay in the centre."""
    pixels = functional.pad(images.pixels, [MARGIN] * 4)
    if seed is not None:
        pixels = shift(pixels, shift_offsets(seed, 0, len(pixels), MARGIN))
    return replace(images, pixels=pixels)


def affine(images: Images, seed: int) -> Images:
    """Transform digits by random affine maps, and return images of 40×40 pixels.

    The ranges are those that affNIST publishes. Digits are rotated by up to ±20°, sheared by up to ±0.2, scaled along
    each axis by 0.8 to 1.2, and then shifted by up to ±6 pixels along each axis. The shift is limited so that the digit
    stays inside the frame. Interpolation is bilinear.
    """
    random = np.random.default_rng(seed)
    count = len(images)
    angle = torch.from_numpy(random.uniform(-math.radians(20), math.radians(20), count))
    shear = torch.from_numpy(random.uniform(-0.2, 0.2, count))
    scale = torch.from_numpy(random.uniform(0.8, 1.2, (count, 2)))
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).unflatten(1, (2, 2))
    slant = torch.eye(2, dtype=torch.double).repeat(count, 1, 1)
    slant[:, 0, 1] = shear
    forward = turn @ slant @ torch.diag_embed(scale)
    maps = torch.cat([torch.linalg.inv(forward), torch.zeros(count, 2, 1, dtype=torch.double)], dim=2).float()
    pixels = functional.pad(images.pixels, [MARGIN] * 4).float()
    changed = []
    for batch, one in zip(pixels.split(1_000), maps.split(1_000), strict=True):
        grid = functional.affine_grid(one, list(batch.shape), align_corners=False)
        changed.append(functional.grid_sample(batch, grid, align_corners=False))
    result = torch.cat(changed).round().clamp(0, 255).to(torch.uint8)
    offsets = torch.from_numpy(random.integers(-MARGIN, MARGIN, size=(count, 2), endpoint=True))
    return replace(images, pixels=shift(result, torch.stack([inside(result, offsets, axis) for axis in (0, 1)], dim=1)))


def read_affnist(path: Path) -> Images:
    """Read the 40×40 digits of an original affNIST file (Tieleman 2013), such as ``test.mat`` or ``1.mat``.

    Raises:
        BadInput: the file is not an affNIST file in MATLAB's format, or is damaged.
    """
    pixels, labels = read_struct(path, "affNISTdata", ["image", "label_int"])
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or len(pixels) != SIZE**2 or labels.size != pixels.shape[1]:
        raise BadInput(
            f"{path} contains {pixels.dtype} images of shape {pixels.shape} and {labels.size} labels, not uint8"
            f" images of shape ({SIZE**2}, N) and N labels: download it again"
        )
    if not np.isin(labels, range(10)).all():
        raise BadInput(f"{path} contains a label that is not a digit from 0 to 9: download the file again")
    rows = torch.from_numpy(pixels.T.copy()).view(-1, 1, SIZE, SIZE)
    return Images(rows, torch.from_numpy(labels.flatten().astype(np.int64)), tuple("0123456789"))


def affnist_test(data_dir: Path) -> Images | None:
    """Read the original affNIST test split from ``affnist/test.mat`` or ``affnist/test_batches/*.mat``.

    Return None if these files do not exist.

    Arguments:
        data_dir: folder of the datasets.
    """
    folder = data_dir / "affnist"
    paths = [folder / "test.mat"] if (folder / "test.mat").exists() else sorted(folder.glob("test_batches/*.mat"))
    if not paths:
        return None
    parts = [read_affnist(path) for path in paths]
    pixels, labels = torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
    return Images(pixels, labels, parts[0].class_names)


def inside(pixels: torch.Tensor, offsets: torch.Tensor, axis: int) -> torch.Tensor:
    """Limit the shifts along an axis so that all nonzero pixels stay inside the frame."""
    ink = (pixels > 0).any(dim=1).any(dim=2 - axis)
    places = torch.arange(ink.shape[1])
    first = torch.where(ink, places, ink.shape[1]).amin(dim=1)
    last = torch.where(ink, places, -1).amax(dim=1)
    room = torch.where(ink.any(dim=1), ink.shape[1] - 1 - last, 0)
    return torch.maximum(torch.minimum(offsets[:, axis], room), -torch.where(ink.any(dim=1), first, 0))


def run(study: Study, recipe_of: Callable[..., Recipe] = Study.digit_recipe) -> Outcome:
    """Train networks on translated digits, and compare their accuracies on affine digits.

    For each network, the epoch is chosen so that all networks have about the same accuracy on translated digits, as in
    the paper.
    """
    source = study.data or study.choose("mnist-5k", "mnist", "mnist")
    train, tested, epochs = study.choose((3_600, 1_000, 6), (30_000, 4_000, 8), (54_000, 10_000, 30))
    train = study.at_most(train, source)
    real = affnist_test(study.data_dir) if source.startswith("mnist") else None
    real = real and some(real, tested)
    test_split = f", on affNIST {checksum(real)[:8]}" if real else ""  # other test images: other runs
    rows: list[Row] = []
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in NETWORKS}
    curves: dict[str, list[tuple[float, ...]]] = {}
    examples: Images | None = None
    for seed in range(study.seeds):
        every: dict[str, list[tuple[float, ...]]] = {}
        for name in NETWORKS:
            recipe = recipe_of(study, name, seed, data=source, shift=MARGIN, images=train, epochs=epochs)
            digits = study.splits(recipe, train, tested)
            translated, changed = moved(digits.validation, 1), real or affine(digits.test, 3)
            examples = examples or changed

            def watch(model, translated=translated, changed=changed) -> dict[str, float]:
                return {
                    "translated_percent": accuracy_of(model, translated),
                    "affine_percent": accuracy_of(model, changed),
                }

            splits = Splits(moved(digits.train, None), translated, moved(digits.test, 2))
            folder = part(f"{name}{test_split}", seed)
            study.trained(folder, recipe, splits, watch)
            every[name] = study.epoch_metrics(folder, "translated_percent", "affine_percent")
        level = min(max(pair[0] for pair in pairs) for pairs in every.values())
        for name, pairs in every.items():
            found[name].append(min(pairs, key=lambda pair: abs(pair[0] - level)))
        curves = curves or every
    for name, chosen in found.items():
        paper = PAPER.get(name, (None, None))
        rows += [
            Row(f"{name}, translated validation digits, at matched accuracy", [pair[0] for pair in chosen], paper[0]),
            Row(f"{name}, affine digits", [pair[1] for pair in chosen], paper[1]),
        ]
    notes = [
        f"Trained on {train:,} {source} digits for {epochs} epochs, tested on {len(changed):,} digits. The networks "
        "are compared at epochs in which they have about the same accuracy on translated validation digits. "
        + (
            "The affine digits are the original affNIST test split."
            if real
            else "The affine digits are test digits that this library transforms with affNIST's published ranges. The "
            "original affNIST test split is used instead if affnist/ in the data folder contains test.mat."
        )
    ]
    assert examples is not None
    notes += study.notes_on_width() if recipe_of is Study.digit_recipe else [RECENT_DIGITS_NOTE]
    return Outcome(rows, draw(curves, examples), [*notes, *study.notes_on_data(source)])


def draw(curves: dict[str, list[tuple[float, ...]]], examples: Images) -> Figure:
    """Draw some affine digits, and plot the accuracy on affine digits against the accuracy on translated digits.

    The plot has one point per network and epoch.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = some(examples, 40).pixels[:, 0]
    shown = functional.pad(shown, (0, 0, 0, 0, 0, 40 - len(shown)))  # blank images if there are fewer than 40
    sheet = shown.unflatten(0, (5, 8)).permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)
    left.imshow(sheet.numpy(), cmap="gray")
    left.set_title(f"affine digits, {shown.shape[1]}×{shown.shape[2]}")
    left.axis("off")
    for (name, pairs), colour, mark in zip(curves.items(), ("#D55E00", "#0072B2", "#999999"), "so^", strict=True):
        translated, changed = zip(*pairs, strict=True)
        right.plot(translated, changed, color=colour, marker=mark, linewidth=0.8, label=name)
    right.set_xlabel("accuracy on translated digits %")
    right.set_ylabel("accuracy on affine digits %")
    right.legend(fontsize=8)
    return figure
