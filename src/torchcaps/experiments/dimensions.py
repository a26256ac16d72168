"""What the dimensions of a class capsule mean: Sabour, Frosst & Hinton 2017, figure 4."""

from dataclasses import replace

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from torchcaps.experiments.study import Outcome, Row, Study
from torchcaps.models import CapsNet

STEPS = torch.linspace(-0.25, 0.25, 11)


def swept(model: CapsNet, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B dimension step C H W"]:
    """Drawings of each image's most active capsule, each of its dimensions moved by -0.25 … 0.25 in steps of 0.05."""
    assert model.decoder is not None
    with torch.inference_mode():
        prediction = model(images)
        winners = prediction.scores.argmax(dim=1)
        size = prediction.capsules.pose.shape[4]
        drawings = []
        for dimension in range(size):
            for step in STEPS:
                moved = prediction.capsules.pose.clone()
                moved[..., dimension] += step
                drawings.append(model.decoder(moved, winners))
    return torch.stack(drawings, dim=1).unflatten(1, (size, len(STEPS)))


def run(study: Study) -> Outcome:
    """The capsule of each class, of its first test image that is classed rightly or else its first, moved."""
    recipe = study.choose(
        study.recipe("capsnet-mnist-5k", 0, images=60_000, epochs=4),
        study.recipe("capsnet-mnist", 0, images=60_000, epochs=5),
        study.recipe("capsnet-mnist", 0, images=60_000, epochs=10),
    )
    if study.data:
        recipe = replace(recipe, data=study.data)
    splits = study.splits(recipe)
    model, metrics = study.trained("capsules-seed0", recipe, splits)
    assert isinstance(model, CapsNet)
    test, preparation = splits.test, recipe.preparation()
    with torch.inference_mode():
        predicted = torch.cat(
            [model(preparation.plain(part)).scores.argmax(dim=1) for part in test.pixels[:1_000].split(100)]
        )
    labels = test.labels[: len(predicted)]
    rank = 1 + (predicted == labels).int()
    chosen = [int(((labels == label) * rank).argmax()) for label in range(len(test.class_names))]
    drawings = swept(model, preparation.plain(test.pixels[chosen]))
    change = (drawings[:, :, -1] - drawings[:, :, 0]).abs().mean(dim=(0, 2, 3, 4))
    rows = [Row("accuracy", [metrics["test_accuracy_percent"]], "99.75")]
    rows += [
        Row(f"dimension {number + 1}: mean change of a pixel from -0.25 to 0.25", [100 * value])
        for number, value in enumerate(change.tolist())
    ]
    return Outcome(rows, draw(drawings, test.class_names), study.notes_on_data(recipe.data))


def draw(drawings: Tensor, names: tuple[str, ...]) -> Figure:
    """A panel a class: a row a dimension, a column a step."""
    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(4 * columns, 5.8 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes[len(names) :]:
        axis.axis("off")
    for axis, name, panel in zip(axes, names, drawings, strict=False):
        numbers, steps, _, height, width = panel.shape
        picture = panel.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
        axis.imshow(picture.squeeze(-1).clamp(0, 1), cmap="gray", vmin=0, vmax=1)
        axis.set_title(name)
        axis.set_yticks([(number + 0.5) * height for number in range(numbers)], range(1, numbers + 1), fontsize=7)
        axis.set_xticks([(step + 0.5) * width for step in (0, steps // 2, steps - 1)], ["-0.25", "0", "0.25"])
    figure.supylabel("dimension")
    figure.supxlabel("what is added to it")
    return figure
