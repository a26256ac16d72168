"""Sabour, Frosst & Hinton 2017, figure 4: what the dimensions of a class capsule represent."""

from dataclasses import replace

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.errors import BadInput, caption
from torchcaps.experiments.study import Outcome, Row, Study, scores_of
from torchcaps.models import CapsNet

STEPS = torch.linspace(-0.25, 0.25, 11)


def swept(model: CapsNet, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B dimension step C H W"]:
    """Reconstruct images from their longest class capsule, after a number is added to one of its dimensions.

    This is done for each dimension and for each of the numbers -0.25, -0.20, …, 0.25.
    """
    assert model.decoder is not None
    with torch.inference_mode():
        prediction = model(images)
        winners = prediction.scores.argmax(dim=1)
        assert prediction.capsules is not None
        size = prediction.capsules.pose.shape[4]
        drawings = []
        for dimension in range(size):
            for step in STEPS:
                moved = prediction.capsules.pose.clone()
                moved[..., dimension] += step
                drawings.append(model.decoder(moved, winners))
    return torch.stack(drawings, dim=1).unflatten(1, (size, len(STEPS)))


def run(study: Study) -> Outcome:
    """Change each capsule dimension for the first correctly classified test image of each class."""
    study.one_seed()
    name, images, epochs = study.choose(
        ("capsnet-mnist-5k", 3_600, 4), ("capsnet-mnist", 54_000, 3), ("capsnet-mnist", 54_000, 10)
    )
    recipe = study.recipe(name, 0, images=60_000, epochs=epochs)
    if study.data:
        recipe = replace(recipe, data=study.data)
    splits = study.splits(recipe, images)
    model, metrics = study.trained("capsules-seed0", recipe, splits)
    assert isinstance(model, CapsNet)
    test, preprocessing = splits.test, recipe.preprocessing()
    right = scores_of(model, test.pixels, preprocessing).argmax(dim=1) == test.labels
    of_class = {name: right & (test.labels == label) for label, name in enumerate(test.class_names)}
    chosen = {name: int(those.nonzero()[0]) for name, those in of_class.items() if those.any()}
    if not chosen:
        raise BadInput(
            f"the network in {study.folder} classifies no test image correctly: train with a larger --budget"
        )
    drawings = swept(model, preprocessing.plain(test.pixels[[*chosen.values()]]))
    change = (drawings[:, :, -1] - drawings[:, :, 0]).abs().mean(dim=(0, 2, 3, 4))
    rows = [Row("accuracy", [metrics["test_accuracy_percent"]], "99.75")]
    rows += [
        Row(f"dimension {number + 1}: mean pixel difference between changes of -0.25 and 0.25", [100 * value])
        for number, value in enumerate(change.tolist())
    ]
    notes = [f"Trained on {len(splits.train):,} {recipe.data} images for {epochs} epochs."]
    if "convolution_channels" in recipe.model_options:
        notes.append("CapsNet has half the paper's width.")
    return Outcome(rows, draw(drawings, [*chosen]), [*notes, *study.notes_on_data(recipe.data)])


def draw(drawings: Tensor, names: list[str]) -> Figure:
    """Draw one panel per class, with one row per dimension and one column per step."""
    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(2.9 * columns, 4.3 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(names) :]:
        axis.axis("off")
    for axis, name, panel in zip(axes, names, drawings, strict=False):
        numbers, steps, channels, height, width = panel.shape
        panel = panel if channels == 3 else panel[:, :, :1]
        picture = panel.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
        axis.imshow(picture.squeeze(-1).clamp(0, 1).numpy(), cmap="gray", vmin=0, vmax=1)
        axis.set_title(caption(name), parse_math=False)
        axis.set_yticks([(number + 0.5) * height for number in range(numbers)], range(1, numbers + 1), fontsize=7)
        axis.set_xticks([(step + 0.5) * width for step in (0, steps // 2, steps - 1)], ["-0.25", "0", "0.25"])
    figure.supylabel("dimension")
    figure.supxlabel("change of the dimension")
    return figure
