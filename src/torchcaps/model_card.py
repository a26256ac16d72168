"""Publish a trained network: write its weights without the decoder, and a model card with data, recipe and accuracy."""

import json
import re
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchcaps.classifier import Classifier
from torchcaps.data import DATASETS
from torchcaps.data.files import PART, atomically, read_json
from torchcaps.decoder import has_optional_decoder
from torchcaps.errors import BadInput, listed, printable, unreadable
from torchcaps.models.pretrained import CONFIG
from torchcaps.models.saved_rules import saved_rules
from torchcaps.routing import ROUTINGS
from torchcaps.run_folder import finished, read_run, remove_leftovers

CARD = """# {name}

Network: `{model}`, {parameters:,} parameters, {count} classes: {classes}.{own}

```sh
torchcaps predict {quoted} IMAGE
```

```python
from torchcaps import Classifier

classifier = Classifier.from_pretrained({literal})
print(classifier.predict("IMAGE").predicted_classes)
```

| | |
|---|---|
| test accuracy | {test_accuracy_percent:.2f} % of {test_images:,} images; training read the test split {reads} |
| validation accuracy | {validation_accuracy_percent:.2f} % of {validation_images:,} images |
| training | {train_images:,} images of {data}, {epochs} epochs, {time}, {precision} |
| commit | {commit} |
| versions | {versions} |
| processor | {processor}, threads: {threads}{gpu} |

## Limits

{started}The network was trained{only} on {data}{about}, with images of {shape} (channels × height × width). Images of
other sizes are {resized}. Accuracy on other data has not been measured. Scores are not calibrated
probabilities.{decoder}

## Recipe

```json
{recipe}
```
"""

MOST_CLASSES = 20
"""Number of classes that a model card names."""
PUBLISHED = (
    *("test_accuracy_percent", "test_images", "validation_accuracy_percent", "validation_images", "train_images"),
    *("epochs", "wall_seconds", "precision"),
)
"""Entries of metrics.json that the model card shows."""
RESIZED = {
    "stretch": "stretched to this size",
    "crop": "resized and cropped to this size",
    "pad": "resized to fit and padded with black",
}
LEFTOVER = re.compile(rf"(model\.safetensors|config\.json|README\.md){PART}")
"""Names of temporary files that a killed `publish` may leave behind."""


def publish(run: Path, folder: Path) -> Path:
    """Write the network of a run, without the decoder, to a folder, with a model card in README.md.

    Arguments:
        run: run folder of a finished training run.
        folder: folder for the weights, created if it does not exist. It must not be a run folder. If the path is
            absolute, the model card shows only the name of the folder. Existing files model.safetensors, config.json
            and README.md are replaced.

    Returns:
        The path of README.md.

    Raises:
        BadInput: the run is not finished or is damaged; or `folder` is a run folder, has a README.md or config.json
            of something else, or cannot be written to.
    """
    if (folder / "recipe.json").exists():
        raise BadInput(f"{folder} is the folder of a run: give another folder for the weights")
    if others := [name for name in ("README.md", CONFIG) if (folder / name).exists()]:
        config = None
        with suppress(BadInput):
            config = read_json(folder / CONFIG, "")
        if not isinstance(config, dict) or not {"format", "model"} <= config.keys():
            raise BadInput(
                f"{folder / others[0]} does not belong to a network of torchcaps and would be replaced: give another "
                "folder"
            )
    saved = read_run(run)
    metrics = finished(run, saved.recipe)
    if metrics is None:
        raise BadInput(f"the training of {run} is not finished: finish it with `torchcaps train` and --resume")
    if metrics["evaluated_split"] != "test":
        raise BadInput(
            f"{run} was trained with --no-test, so it has no test accuracy: run `torchcaps train` with --resume and "
            "without --no-test"
        )
    classifier = Classifier.from_pretrained(run)
    if missing := [name for name in PUBLISHED if name not in metrics]:
        raise BadInput(
            f"{run / 'metrics.json'} has no entry {missing[0]!r}: restore this file from a copy, or train again in "
            "another folder"
        )
    model: Any = classifier.model
    has_decoder = has_optional_decoder(model)
    if has_decoder:
        model.decoder, model.options["decoder"] = None, False
    environment, recipe = saved.environment, saved.recipe
    # An absolute path would show a folder of this computer to everybody.
    recipe = replace(recipe, data=_shown(recipe.data), pretrained=_shown(recipe.pretrained))
    where = _shown(str(folder))
    where = f"./{where}" if where.startswith("-") else where
    seconds = metrics["wall_seconds"]
    rules = {rule["rule"] for rule in saved_rules(model).values()}
    own = sorted(name for name in rules if not ROUTINGS[name].__module__.startswith("torchcaps."))
    reads = "once" if metrics["test_evaluations"] == 1 else f"{metrics['test_evaluations']} times"
    try:
        text = CARD.format(
            name=_escaped(folder.resolve().name),
            quoted=shlex.quote(where),
            literal=json.dumps(where, ensure_ascii=False),
            model=recipe.model,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            count=len(classifier.class_names),
            classes=listed([*map(_escaped, classifier.class_names)], MOST_CLASSES)
            + (", see config.json" if len(classifier.class_names) > MOST_CLASSES else ""),
            own="".join(
                f" First import the module that adds the rule `{name}` to `torchcaps.ROUTINGS`." for name in own
            ),
            data=_escaped(recipe.data),
            about=about(saved.recipe.data),
            only="" if recipe.pretrained else " only",
            started=f"The training started with weights from {recipe.pretrained}. " if recipe.pretrained else "",
            time=f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds",
            reads=reads,
            commit=environment["commit"],
            versions=", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
            processor=environment["processor"],
            threads=environment["threads"],
            gpu=f", {environment['gpu']}" if environment["gpu"] else "",
            decoder=" The decoder is not included." if has_decoder else "",
            shape="×".join(map(str, classifier.image_shape)),
            resized=RESIZED[classifier.resize],
            recipe=json.dumps(recipe.plain(), indent=2),
            **{name: metrics[name] for name in PUBLISHED},
        )
    except (ValueError, TypeError) as error:
        raise unreadable(run / "metrics.json", error, "restore it from a copy, or train again elsewhere") from error
    classifier.save_pretrained(folder)
    remove_leftovers(folder, LEFTOVER)
    with atomically(folder / "README.md") as stream:
        stream.write(text.encode())
    return folder / "README.md"


def _escaped(text: str) -> str:
    """Escape the characters that Markdown would not show as they are."""
    return re.sub(r"([\\`*_\[\]<>#|&$~])", r"\\\1", printable(text))


def about(data: str) -> str:
    """Describe a named dataset, without the size of its images, which options and crops can change."""
    return f" ({DATASETS[data].description})" if data in DATASETS else ""


def _shown(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path
