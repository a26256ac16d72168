"""Options, recipes and results of an experiment. Finished parts are saved, so that the experiment can be resumed."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.data import Images, Preprocessing, Splits, difference, fingerprint, load_splits
from torchcaps.data.files import read_json, write_json
from torchcaps.environment import environment
from torchcaps.errors import BadInput, Diverged
from torchcaps.models import MODELS
from torchcaps.recipe import Recipe, resolve_precision
from torchcaps.recipes import RECIPES
from torchcaps.run_folder import changed_setting, existing_run, finished, read_rows
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

Budget = Literal["quick", "standard", "paper"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)
TOYS = ("toys", "smallnorb")
RECENT_DIGITS_NOTE = (
    "CapsNet has a stem of four convolutions with BatchNorm, 128 channels and 16 primary capsule types. The CNN is the "
    "baseline of Hinton, Sabour & Frosst 2018."
)
NARROW_CAPSNET: dict[str, Any] = {"convolution_channels": 64, "primary_types": 8}
NARROW_CNN: dict[str, Any] = {"channels": (32, 32, 16)}


class Row(NamedTuple):
    """One row of a result table.

    Arguments:
        what: name of the measured quantity.
        ours: measured values, one per seed.
        paper: the paper's value, formatted as in the paper; None if the paper does not report one.
        unit: unit of the values.
    """

    what: str
    ours: list[float]
    paper: str | None = None
    unit: str = "%"

    def measured(self) -> str:
        """Return the mean with its unit, and the standard deviation if there are several seeds, as text."""
        if not all(abs(value) < 1e15 for value in self.ours):  # also False for NaN
            return f"{sum(self.ours) / len(self.ours)} {self.unit}".strip()
        deviation = f" ± {statistics.stdev(self.ours):.2f}" if len(self.ours) > 1 else ""
        mean = statistics.mean([Decimal(str(value)) for value in self.ours])
        return f"{mean.quantize(Decimal('0.01'), ROUND_HALF_UP)}{deviation} {self.unit}".strip()


@dataclass
class Outcome:
    """The outcome of an experiment: the rows of its table, its figure, and notes on how to read them."""

    rows: list[Row]
    figure: Figure
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """The options of an experiment, and the folder of its finished parts.

    Arguments:
        budget: ``quick``, ``standard`` or ``paper``, from the shortest to the longest training.
        data: name of a dataset that replaces the experiment's own dataset; None keeps the experiment's own dataset.
        seeds: number of seeds with which each network is trained.
        data_dir: folder of the datasets.
        folder: folder of this experiment's training runs and evaluations.
        runs: folders of the training runs that this study has used so far.
        commits: commits with which the study's saved evaluations were computed.
    """

    budget: Budget
    data: str | None
    seeds: int
    data_dir: Path
    folder: Path
    runs: list[Path] = field(default_factory=list, compare=False)
    commits: list[str] = field(default_factory=list, compare=False)

    def choose(self, quick: Any, standard: Any, paper: Any) -> Any:
        """Return the argument for the budget of this study: there is one argument per budget."""
        return {"quick": quick, "standard": standard, "paper": paper}[self.budget]

    def splits(self, recipe: Recipe, train: int | None = None, test: int | None = None) -> Splits:
        """Load the recipe's splits, with at most `train` training images and at most `test` test images.

        The images are drawn with seed 0. The validation split shrinks by the same factor as the training split.
        """
        options = tuple(sorted(recipe.data_options.items()))
        held_out = recipe.validation_fraction, recipe.validation_attribute
        splits = _loaded(recipe.data, self.data_dir, *held_out, recipe.seed, options)
        share = 1.0 if train is None else min(1.0, train / len(splits.train))
        return Splits(
            some(splits.train, train),
            some(splits.validation, math.ceil(share * len(splits.validation))),
            some(splits.test, test),
        )

    def at_most(self, images: int, data: str) -> int:
        """Return `images`, or the size of the dataset's training split if that is smaller."""
        return min(images, len(self.splits(replace(RECIPES["capsnet-mnist"](), data=data)).train))

    def trained(
        self,
        part: str,
        recipe: Recipe,
        splits: Splits,
        on_epoch_end: Callable[[nn.Module], Mapping[str, float]] | None = None,
        module_class: type[TrainingModule] = TrainingModule,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Train a network and save the run in the study's subfolder `part`. Return the model and its metrics.

        An interrupted run in the subfolder is resumed, and a finished run is loaded.

        Raises:
            BadInput: the subfolder contains a run with other settings or other data, or `fit` rejects the recipe.
            Diverged: the loss is not finite.
        """
        folder = self.folder / part
        recipe = replace(recipe, precision=resolve_precision(recipe.precision))
        run = existing_run(folder, resume=True)
        if run is not None and (changed := difference(run.data, fingerprint(splits, run.data)[0])):
            raise BadInput(f"{folder} was started with other data ({changed}): use the same data, or another --out")
        if run is not None and (changed := changed_setting(run.recipe, recipe)):
            chosen = changed.startswith(("precision=", "model.im2col="))  # torchcaps chooses them by the hardware
            cure = "continue it on the hardware and with the version of torchcaps of its start, or " if chosen else ""
            raise BadInput(f"{folder} was started with {changed}: {cure}use another --out")
        metrics = None if run is None else finished(folder, recipe)
        table = folder / "metrics.csv"
        if metrics is not None and not read_rows(table):
            raise BadInput(f"{table} is missing or empty: restore it from a copy, or use another --out")
        if folder not in self.runs:  # before the training, which may diverge
            self.runs.append(folder)
        if metrics is None:
            print(f"{part}: {len(splits.train)} images, {recipe.epochs} epochs → {folder}", flush=True)
            try:
                metrics = fit(recipe, splits, folder, resume=True, on_epoch_end=on_epoch_end, module_class=module_class)
            except Diverged as error:
                raise Diverged(f"{part} diverged: {error.reason}", "use another --budget or --data") from error
        model = MODELS[recipe.model].from_pretrained(folder)
        return model.eval(), metrics

    def recipe(
        self,
        name: str,
        seed: int,
        *,
        images: int,
        epochs: int,
        routing_options: Mapping[str, Any] | None = None,
        **model_options: Any,
    ) -> Recipe:
        """Return the recipe `name` with the given seed, number of images, number of epochs, and options.

        `decay_steps` is scaled so that the learning rate decays as far as in the unchanged recipe. The full training
        split is assumed to have 21,870 images (90 % of 24,300) for smallNORB and the toys, and 54,000 images (90 % of
        60,000) for other datasets.
        """
        recipe = replace(RECIPES[name](), seed=seed)
        whole = 0.9 * (24_300 if recipe.data in TOYS else 60_000)
        steps = recipe.decay_steps * (epochs / recipe.epochs) * min(1.0, images / whole)
        options = {**recipe.model_options, **model_options}
        if recipe.model == "capsnet" and not torch.cuda.is_available() and resolve_precision("auto") == "float32":
            options["im2col"] = True
        routing = {**recipe.routing_options, **(routing_options or {})}
        recipe = replace(recipe, model_options=options, routing_options=routing)
        return replace(recipe, epochs=epochs, decay_steps=max(1, round(steps)))

    def digit_recipe(
        self, network: str, seed: int, *, data: str, shift: int, images: int, epochs: int, **model_options: Any
    ) -> Recipe:
        """Return the recipe of `network` (``CNN``, ``capsules`` or ``uniform couplings``) for MNIST digits.

        With the budgets ``quick`` and ``standard``, CapsNet has a quarter of the paper's width and the CNN has an
        eighth, unless `model_options` set the width. The learning rate is multiplied by 0.96 a hundred times during
        training, because networks converge in a short training run only if the learning rate ends near 0.
        """
        cnn = network == "CNN"
        routing = {} if cnn else {"iterations": 3 if network == "capsules" else 1}
        options = dict(model_options)
        if self.budget != "paper":
            options = (NARROW_CNN if cnn else NARROW_CAPSNET) | options
        name = "cnn-baseline-mnist" if cnn else "capsnet-mnist"
        recipe = self.recipe(name, seed, images=images, epochs=epochs, routing_options=routing, **options)
        recipe = replace(recipe, data=data, shift=shift)
        batch_size = self.choose(32, 64, 128)
        steps = -(-images // batch_size) * epochs
        return replace(recipe, batch_size=batch_size, decay_steps=max(1, round(steps / 100)))

    def recent_digit_recipe(
        self, network: str, seed: int, *, data: str, shift: int, images: int, epochs: int, **model_options: Any
    ) -> Recipe:
        """Return a recipe with a cosine schedule for MNIST digits.

        The `network` ``capsules`` is CapsNet with a stem. ``uniform couplings`` is the same network with one routing
        iteration. ``CNN`` is the baseline CNN of Hinton, Sabour & Frosst 2018. `images` is not used,
        because a cosine schedule always ends with the last training step.
        """
        cnn = network == "CNN"
        recipe = RECIPES["cnn-baseline-mnist" if cnn else "capsnet-stem-mnist"]()
        return replace(
            recipe,
            model="matrix-baseline-cnn" if cnn else recipe.model,
            model_options={**recipe.model_options, **model_options},
            routing_options={"iterations": 1} if network == "uniform couplings" else {},
            data=data,
            shift=shift,
            rotation=0.0,
            squeeze=0.0,
            schedule="cosine",
            batch_size=64,
            epochs=epochs,
            seed=seed,
        )

    def notes_on_width(self) -> list[str]:
        """Return a note that the digit networks are narrower than the paper's; no note for the budget ``paper``."""
        if self.budget == "paper":
            return []
        return [
            "CapsNet has a quarter of the paper's width (64 channels, 8 primary capsule types). The CNN has an eighth "
            "of the channels of the paper's CNN."
        ]

    def one_seed(self) -> None:
        """Check that the study has one seed.

        Raises:
            BadInput: `seeds` is larger than 1.
        """
        if self.seeds > 1:
            raise BadInput(f"seeds is {self.seeds}, but this experiment runs one seed: omit --seeds")

    def notes_on_data(self, data: str, papers: str = "mnist") -> list[str]:
        """Return a note that the dataset differs from the dataset of the paper; no note if they are the same."""
        if data == papers:
            return []
        return [f"The paper's numbers are for {papers}, ours for {data}: compare rankings, not absolute values."]

    def toys_or_smallnorb(self) -> str:
        """Return the name of the dataset: ``toys``, or ``smallnorb`` if the study's `data` is ``smallnorb``.

        Raises:
            BadInput: `data` is neither None, ``toys`` nor ``smallnorb``.
        """
        if self.data not in (None, *TOYS):
            raise BadInput(f"data is {self.data!r}, but this experiment supports {' and '.join(TOYS)}: use one of them")
        return self.data or "toys"

    def toys(self, name: str) -> str:
        """Return the name of a recipe with the paper's settings: ``NAME-toys-paper`` or ``NAME-smallnorb-paper``.

        Raises:
            BadInput: `data` is neither None, ``toys`` nor ``smallnorb``.
        """
        return f"{name}-{self.toys_or_smallnorb()}-paper"

    def toy_recipe(self, network: str, seed: int, *, images: int, epochs: int) -> Recipe:
        """Return the recipe of `network` (``CNN``, ``capsules`` or ``uniform couplings``) with the paper's settings."""
        if network == "CNN":
            return self.recipe(self.toys("cnn-baseline"), seed, images=images, epochs=epochs)
        routing = {"iterations": 2 if network == "capsules" else 1}
        return self.recipe(self.toys("matrix-capsnet"), seed, images=images, epochs=epochs, routing_options=routing)

    def recent_toy_recipe(self, network: str, seed: int, *, images: int, epochs: int) -> Recipe:
        """Return the recipe of `network` (``CNN``, ``capsules``, ``uniform couplings``) with settings of later papers.

        The settings are as in the recipe ``matrix-capsnet-toys``: stem, normalisation, mixup, and crops that contain a
        whole toy. `images` is not used, because a cosine schedule always ends with the last training step.
        """
        name = "cnn-baseline-toys" if network == "CNN" else "matrix-capsnet-toys"
        recipe = replace(RECIPES[name](), data=self.toys_or_smallnorb(), seed=seed, epochs=epochs, choose="best")
        if network != "uniform couplings":
            return recipe
        return replace(recipe, routing_options={**recipe.routing_options, "iterations": 1})

    def notes_on_toys(self) -> list[str]:
        """Return a note that the images are rendered toys; no note for smallNORB."""
        if self.data == "smallnorb":
            return []
        return [
            "The paper's numbers are for smallNORB, ours for the rendered toys: compare rankings, not absolute values."
        ]

    def epoch_metrics(self, part: str, *names: str) -> list[tuple[float, ...]]:
        """Return the metrics `names` of each epoch of the run `part`, read from its metrics.csv."""
        rows = read_rows(self.folder / part / "metrics.csv")
        return [tuple(float(row[name]) for name in names) for row in rows]

    def cached(self, part: str, what: str, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`. It is computed once and saved as ``WHAT.json`` in the run folder."""
        path, now = self.folder / part / f"{what}.json", environment()["commit"]
        if not path.exists():
            print(f"{part}: {what} …", flush=True)
            write_json(path, {"commit": now, "result": compute()})
        saved = read_json(path, "remove the file to compute it again")
        if not isinstance(saved, dict) or saved.keys() != {"commit", "result"}:
            saved = {"commit": None, "result": saved}  # written before the commit was saved
        if saved["commit"] != now:
            commit = saved["commit"] or "unknown"
            print(
                f"{path} was computed with another commit ({commit}): remove the file to compute it again", flush=True
            )
        if saved["commit"]:
            self.commits.append(saved["commit"])
        return saved["result"]


def part(name: str, seed: int) -> str:
    """Return the name of the folder with the training run of table row `name` and seed `seed`.

    Example:
        >>> part("T = 3, no decoder", 0)
        'T3-no-decoder-seed0'
    """
    return f"{name.replace(' = ', '').replace(', ', '-').replace(' ', '-')}-seed{seed}"


def some(images: Images, count: int | None) -> Images:
    """Return `count` images, drawn with seed 0. Return all images if `count` is None or larger than their number."""
    if count is None or count >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.subset(order[:count].sort().values)


def scores_of(model: nn.Module, pixels: Tensor, preprocessing: Preprocessing | None = None) -> Tensor:
    """Return the scores ``[N, classes]`` of uint8 pixels, computed on the model's device."""
    preprocessing, device = preprocessing or Preprocessing(), next(model.parameters()).device
    with torch.inference_mode():
        batches = (preprocessing.plain(part).to(device) for part in pixels.split(100))
        return torch.cat([model(batch).scores.cpu() for batch in batches])


def accuracy_of(model: nn.Module, images: Images, preprocessing: Preprocessing | None = None) -> float:
    """Return the accuracy on a split, in per cent."""
    return percent(scores_of(model, images.pixels, preprocessing).argmax(dim=1) == images.labels)


@lru_cache(maxsize=1)
def _loaded(
    data: str, data_dir: Path, fraction: float, attribute: str, seed: int, options: tuple[tuple[str, Any], ...]
) -> Splits:
    """Load a dataset. The last dataset is cached, because most rows of a table use the same data."""
    held_out: dict[str, Any] = {"validation_fraction": fraction, "validation_attribute": attribute}
    return load_splits(data, data_dir, seed=seed, **held_out, **dict(options))


def percent(right: Tensor | Sequence[bool]) -> float:
    """Return the percentage of values that are true."""
    return round(100 * torch.as_tensor(right).double().mean().item(), 4)
