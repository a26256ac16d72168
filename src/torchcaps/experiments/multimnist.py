"""Sabour, Frosst & Hinton 2017, section 6: two overlapping digits, recognised and reconstructed separately."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from torchcaps.data import Images, Splits, shift
from torchcaps.errors import BadInput, caption
from torchcaps.experiments.study import RECENT_DIGITS_NOTE, Outcome, Row, Study, part, percent, scores_of
from torchcaps.experiments.two_digits import StripClassifier, named_alike
from torchcaps.losses import margin_loss, reconstruction_loss
from torchcaps.models import CapsNet
from torchcaps.recipe import Recipe

PADDING = 4
DIGIT = (1, 28, 28)
SHAPE = (1, 36, 36)
SHIFTS = {"paper": 4, "official code": 6}
NETWORKS = ("CNN", "capsules", "uniform couplings")
PAPER = {"CNN": "91.9", "capsules": "94.8", "uniform couplings": "92.5"}


def overlaid(images: Images, count: int, seed: int, pixels: int = SHIFTS["paper"]) -> Images:
    """Overlay pairs of digits of different classes: shift each digit at random, add the two, and clip the sum at 255.

    Arguments:
        images: 28×28 digits.
        count: number of pairs.
        seed: seed of the random choice and of the shifts.
        pixels: largest shift along each axis, in pixels; 4 in the paper, 6 in the authors' code.

    Returns:
        36×36 images with three channels (the pair, the first digit, the second digit), and labels ``[count, 2]``.
    """
    random = np.random.default_rng([seed, pixels])
    first = random.integers(len(images), size=count)
    second = random.integers(len(images), size=count)
    labels = images.labels.numpy()
    while (same := labels[first] == labels[second]).any():
        second[same] = random.integers(len(images), size=int(same.sum()))
    digits = []
    for chosen in (first, second):
        padded = functional.pad(images.pixels[torch.from_numpy(chosen)], [PADDING] * 4)
        offsets = torch.from_numpy(random.integers(-pixels, pixels, size=(count, 2), endpoint=True))
        digits.append(shift(padded, offsets))
    both = (digits[0].int() + digits[1].int()).clamp_max(255).to(torch.uint8)
    return Images(
        torch.cat([both, *digits], dim=1),
        torch.from_numpy(np.stack([labels[first], labels[second]], axis=1)),
        images.class_names,
    )


class PairClassifier(StripClassifier):
    """Training module for pairs of digits, which reconstructs each digit from its own class capsule."""

    def loss_and_scores(self, images: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        both, digits = images[:, :1], images[:, 1:]
        prediction = self.model(both.contiguous(memory_format=torch.channels_last), labels[:, 0])
        present = functional.one_hot(labels, prediction.scores.shape[1]).sum(dim=1).float()
        if prediction.capsules is None:
            return functional.binary_cross_entropy_with_logits(prediction.scores, present), prediction.scores
        decoder = cast(CapsNet, self.model).decoder
        loss = margin_loss(prediction.scores, present)
        if decoder is not None:
            second = decoder(prediction.capsules.pose, labels[:, 1])
            error = reconstruction_loss(prediction.reconstruction, digits[:, :1])
            error = error + reconstruction_loss(second, digits[:, 1:])
            loss = loss + self.recipe.reconstruction_weight * error
        return loss, prediction.scores

    def scores(self, images: Tensor) -> Tensor:
        return self.model(images[:, :1]).scores

    def save_picture(self, images: Images, path: Path) -> None:
        """Save no picture: the experiment draws its own figure."""


PAPER_SIZES = ((6_000, 1_000, 4), (108_000, 10_000, 3), (540_000, 10_000, 20))
RECENT_SIZES = ((6_000, 1_000, 4), (500_000, 10_000, 4), (540_000, 10_000, 20))
"""For each budget (quick, standard, paper): numbers of training pairs, test pairs and epochs."""


def run(
    study: Study,
    networks: Sequence[str] = NETWORKS,
    recipe_of: Callable[..., Recipe] = Study.digit_recipe,
    sizes: Sequence[tuple[int, int, int]] = PAPER_SIZES,
) -> Outcome:
    """Train networks on pairs of overlapping digits, which are shifted as in the paper.

    The networks are tested on pairs with the paper's shifts, and on pairs with the larger shifts of the authors' code.

    Raises:
        BadInput: the images of the dataset do not have one channel and 28×28 pixels.
    """
    source = study.data or study.choose("mnist-5k", "mnist", "mnist")
    count, tested, epochs = study.choose(*sizes)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in networks}
    shown: tuple[CapsNet, Images] | None = None
    for seed in range(study.seeds):
        for name in networks:
            recipe = recipe_of(study, name, seed, data=source, shift=0, images=count, epochs=epochs, image_shape=SHAPE)
            digits = study.splits(recipe)
            if digits.train.image_shape != DIGIT:
                raise BadInput(
                    f"data is {source!r}, whose images have the shape {digits.train.image_shape}, but this experiment "
                    f"overlays images of the shape {DIGIT}: use a dataset with such images, for example mnist"
                )
            tests = {way: overlaid(digits.test, tested, 2, pixels) for way, pixels in SHIFTS.items()}
            splits = Splits(
                overlaid(digits.train, count, 0), overlaid(digits.validation, tested // 2, 1), tests["paper"]
            )
            folder = part(name, seed)
            model, _ = study.trained(folder, recipe, splits, module_class=PairClassifier)

            def compute(model=model, tests=tests) -> dict[str, float]:
                return {way: pair_accuracy(model, images) for way, images in tests.items()}

            found[name].append(study.cached(folder, "pairs", compute))
            if name == "capsules" and shown is None:
                shown = (cast(CapsNet, model), tests["paper"])
    rows = [
        Row(
            f"{name}, shifts of up to {pixels} pixels ({way}): both digits recognised",
            [one[way] for one in results],
            PAPER[name] if way == "paper" else None,
        )
        for name, results in found.items()
        for way, pixels in SHIFTS.items()
    ]
    notes = [
        f"Trained on {count:,} pairs of {source} digits for {epochs} epochs; the paper trains on 60 million pairs. All "
        f"networks train on shifts of up to {SHIFTS['paper']} pixels. The larger shifts of the official code are used "
        "only in the test."
    ]
    assert shown is not None
    notes += study.notes_on_width() if recipe_of is Study.digit_recipe else [RECENT_DIGITS_NOTE]
    return Outcome(rows, draw(*shown), [*notes, *study.notes_on_data(source)])


def pair_accuracy(model: torch.nn.Module, images: Images) -> float:
    """Return the percentage of pairs whose two digits have the two highest scores."""
    return percent(named_alike(scores_of(model, images.pixels[:, :1]), images.labels))


def draw(model: CapsNet, images: Images, count: int = 12) -> Figure:
    """Draw pairs, their digits, and the reconstructions from the two longest class capsules.

    The first digit is orange, the second blue.
    """
    assert model.decoder is not None
    figure = Figure(figsize=(count, 3.6), layout="constrained")
    axes = figure.subplots(3, count)
    inputs = images.pixels[:count, :1].float() / 255
    with torch.inference_mode():
        prediction = model(inputs)
        best = prediction.scores.topk(2, dim=1).indices
        crossed = (best[:, 0] == images.labels[:count, 1]) | (best[:, 1] == images.labels[:count, 0])
        best = torch.where(crossed[:, None], best.flip(1), best)
        assert prediction.capsules is not None
        reconstructions = [model.decoder(prediction.capsules.pose, best[:, place])[:, 0] for place in range(2)]
    colours = torch.tensor([[1.0, 0.45, 0.0], [0.0, 0.55, 1.0]])
    truth = images.pixels[:count].float() / 255
    names = [caption(name, 12) for name in images.class_names]
    between = "\n" if max(map(len, names)) > 3 else " "
    for column in range(count):
        pair, read = (between.join(names[label] for label in labels[column]) for labels in (images.labels, best))
        axes[0, column].imshow(inputs[column, 0].numpy(), cmap="gray")
        axes[0, column].set_title(pair, fontsize=9, parse_math=False)
        axes[1, column].imshow(torch.einsum("dhw,dc->hwc", truth[column, 1:], colours).clamp(0, 1).numpy())
        both = torch.stack([one[column] for one in reconstructions])
        axes[2, column].imshow(torch.einsum("dhw,dc->hwc", both, colours).clamp(0, 1).numpy())
        axes[2, column].set_xlabel(read, fontsize=9, parse_math=False)
    for axis, label in zip(axes[:, 0], ("pair", "digits", "reconstruction"), strict=True):
        axis.set_ylabel(label)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return figure
