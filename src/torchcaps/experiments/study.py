"""An experiment under way: what was asked for, and its parts, each computed once however often it is interrupted."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.data import Images, Preparation, Splits, difference, fingerprint, load_splits
from torchcaps.data.files import write_json
from torchcaps.errors import BadInput
from torchcaps.models import MODELS
from torchcaps.recipe import Recipe, resolve_precision
from torchcaps.recipes import RECIPES
from torchcaps.routing import DynamicRouting, EMRouting
from torchcaps.routing_map import RoutingMap
from torchcaps.run_folder import existing_run, finished, read_rows
from torchcaps.training import fit
from torchcaps.training_module import TrainingModule

Budget = Literal["quick", "standard", "paper"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)
TOYS = ("toys", "smallnorb")
RECENT_OF_DIGITS = (
    "CapsNet with a stem of four convolutions and BatchNorm, 128 channels and 16 primary types; the CNN is that of "
    "Hinton, Sabour & Frosst 2018."
)
NARROW_CAPSNET: dict[str, Any] = {"convolution_channels": 64, "primary_types": 8}
NARROW_CNN: dict[str, Any] = {"channels": (32, 32, 16)}


class Row(NamedTuple):
    """One line of a result's table.

    Arguments:
        what: was measured.
        ours: one value a seed.
        paper: what the paper has, as it has it; None where it has nothing.
        unit: of the values; per cent.
    """

    what: str
    ours: list[float]
    paper: str | None = None
    unit: str = "%"

    def measured(self) -> str:
        """The mean, and the standard deviation over seeds where there are several."""
        spread = f" ± {statistics.stdev(self.ours):.2f}" if len(self.ours) > 1 else ""
        return f"{statistics.fmean(self.ours):.2f}{spread} {self.unit}".strip()


@dataclass
class Outcome:
    """What an experiment found: its table, what has to be said beside it, and its picture."""

    rows: list[Row]
    figure: Figure
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """What was asked of an experiment, and where its finished parts lie.

    Arguments:
        budget: quick, standard or paper.
        data: another dataset than the experiment's own; None for its own.
        seeds: trainings of each network.
        data_dir: folder of the datasets.
        folder: of this experiment's trainings and evaluations.
    """

    budget: Budget
    data: str | None
    seeds: int
    data_dir: Path
    folder: Path

    def choose(self, quick: Any, standard: Any, paper: Any) -> Any:
        """The one of three settings that the budget asks for."""
        return {"quick": quick, "standard": standard, "paper": paper}[self.budget]

    def splits(self, recipe: Recipe, train: int | None = None, test: int | None = None) -> Splits:
        """The recipe's data; at most `train` and `test` images of these splits, drawn with seed 0."""
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
        """This number of training images, or all that the data have."""
        return min(images, len(self.splits(replace(RECIPES["capsnet-mnist"](), data=data)).train))

    def trained(
        self,
        part: str,
        recipe: Recipe,
        splits: Splits,
        on_epoch_end: Callable[[nn.Module], Mapping[str, float]] | None = None,
        module_class: type[TrainingModule] = TrainingModule,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """A network trained as the recipe says, and its metrics: finished, gone on with, or begun.

        Raises:
            BadInput: the folder holds a training with other settings, or what `fit` refuses.
        """
        folder = self.folder / part
        recipe = replace(recipe, precision=resolve_precision(recipe.precision))
        run = existing_run(folder, resume=True)
        if run is not None and run.recipe.plain() != recipe.plain():
            raise BadInput(f"{folder} was trained with other settings: remove it, or name another folder with --out")
        if run is not None and (changed := difference(run.data, fingerprint(splits)[0])):
            raise BadInput(f"{folder} was trained on other data ({changed}): remove it, or name another --out")
        metrics = None if run is None else finished(folder, recipe)
        if metrics is None:
            print(f"{part}: {len(splits.train)} images, {recipe.epochs} epochs → {folder}", flush=True)
            metrics = fit(recipe, splits, folder, resume=True, on_epoch_end=on_epoch_end, module_class=module_class)
        model = MODELS[recipe.model].from_pretrained(folder)  # type: ignore[attr-defined]
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
        """A recipe with another seed, routing and model options, and this number of training images and epochs.

        The rate falls as far as it does in the whole recipe, whose training split is taken to be 24,300 images of
        smallNORB or 60,000 of MNIST less a tenth.
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

    def of_digits(
        self, network: str, seed: int, *, data: str, shift: int, images: int, epochs: int, **model_options: Any
    ) -> Recipe:
        """The recipe of the ``CNN``, of ``capsules`` or of ``uniform couplings``, on MNIST's digits.

        But at `paper`, CapsNet has a quarter of the paper's width and the CNN an eighth, if the options do not say
        otherwise. The rate falls by 0.96 a hundred times: short trainings settle only with it near 0.
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

    def recent_of_digits(
        self, network: str, seed: int, *, data: str, shift: int, images: int, epochs: int, **model_options: Any
    ) -> Recipe:
        """CapsNet with a stem, the same with uniform couplings, or the CNN of matrix capsules; a cosine schedule.

        The schedule is as long as the training, whatever the number of `images`.
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
        """What has to be said where the networks of digits are not the paper's."""
        if self.budget == "paper":
            return []
        return ["CapsNet of a quarter of the paper's width (64 channels, 8 primary types), the CNN of an eighth."]

    def one_seed(self) -> None:
        """Refuse several seeds.

        Raises:
            BadInput: there are several.
        """
        if self.seeds > 1:
            raise BadInput(f"seeds is {self.seeds}: this experiment takes one; leave --seeds out")

    def notes_on_data(self, data: str, papers: str = "mnist") -> list[str]:
        """What has to be said beside the paper's figures where the data are not the paper's."""
        return [] if data == papers else [f"The paper's figures are of {papers}, ours of {data}: compare orders."]

    def toys_or_smallnorb(self) -> str:
        """The toys, or smallNORB where that is asked for.

        Raises:
            BadInput: other data are asked for.
        """
        if self.data not in (None, *TOYS):
            raise BadInput(f"data is {self.data!r}: this experiment takes one of {', '.join(TOYS)}")
        return self.data or "toys"

    def toys(self, name: str) -> str:
        """The recipe with the paper's settings for the toys, or for smallNORB where that is asked for.

        Raises:
            BadInput: other data are asked for.
        """
        return f"{name}-smallnorb" if self.toys_or_smallnorb() == "smallnorb" else f"{name}-toys-paper"

    def of_toys(self, network: str, seed: int, *, images: int, epochs: int) -> Recipe:
        """The recipe of the ``CNN``, of ``capsules`` or of ``uniform couplings``, on toys with the paper's settings."""
        if network == "CNN":
            return self.recipe(self.toys("cnn-baseline"), seed, images=images, epochs=epochs)
        routing = {"iterations": 2 if network == "capsules" else 1}
        return self.recipe(self.toys("matrix-capsnet"), seed, images=images, epochs=epochs, routing_options=routing)

    def recent_of_toys(self, network: str, seed: int, *, images: int, epochs: int) -> Recipe:
        """The same with the settings of `matrix_capsnet_toys`: stem, norms, mixup, crops that hold a whole toy.

        The cosine schedule is as long as the training, whatever the number of `images`.
        """
        name = "cnn-baseline-toys" if network == "CNN" else "matrix-capsnet-toys"
        recipe = replace(RECIPES[name](), data=self.toys_or_smallnorb(), seed=seed, epochs=epochs, choose="best")
        if network != "uniform couplings":
            return recipe
        return replace(recipe, routing_options={**recipe.routing_options, "iterations": 1})

    def notes_on_toys(self) -> list[str]:
        """What has to be said beside the paper's figures where the data are not the paper's."""
        if self.data == "smallnorb":
            return []
        return ["The paper's figures are of smallNORB, ours of the rendered toys: compare orders, not numbers."]

    def watched(self, part: str, *names: str) -> list[tuple[float, ...]]:
        """What was watched in a training, a tuple an epoch."""
        rows = read_rows(self.folder / part / "metrics.csv")
        return [tuple(float(row[name]) for name in names) for row in rows]

    def once(self, part: str, what: str, compute: Callable[[], Any]) -> Any:
        """What `compute` returned of a training when it first ended, kept as JSON in the training's folder."""
        path = self.folder / part / f"{what}.json"
        if not path.exists():
            print(f"{part}: {what} …", flush=True)
            write_json(path, compute())
        return json.loads(path.read_text())


class Routed(NamedTuple):
    """What a routing rule was given for a batch, and the parents that came out."""

    rule: DynamicRouting | EMRouting
    children: Capsules
    transform: Tensor
    routing_map: RoutingMap
    parents: Capsules


def routed(model: nn.Module, images: Tensor) -> dict[str, Routed]:
    """Run a model and look at every layer of capsules: the layer's name → what was routed there."""
    found: dict[str, Routed] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(rule: Any, given: tuple[Capsules, Tensor, RoutingMap], parents: Any) -> None:
            children, transform, routing_map = given
            found[name] = Routed(rule, children, transform, routing_map, parents)

        return hook

    rules = {name: rule for name, rule in model.named_modules() if isinstance(rule, DynamicRouting | EMRouting)}
    hooks = [rule.register_forward_hook(look(name.removesuffix(".routing"))) for name, rule in rules.items()]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def part(name: str, seed: int) -> str:
    """A folder's name for the training of a row.

    Example:
        >>> part("T = 3, no decoder", 0)
        'T3-no-decoder-seed0'
    """
    return f"{name.replace(' = ', '').replace(', ', '-').replace(' ', '-')}-seed{seed}"


def some(images: Images, count: int | None) -> Images:
    """`count` images, drawn with seed 0, or all."""
    if count is None or count >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.subset(order[:count].sort().values)


def scores_of(
    model: nn.Module, pixels: Tensor, preparation: Preparation | None = None, batch_size: int = 100
) -> Tensor:
    """The scores of stored pixels, ``[N, classes]``, computed where the model is."""
    preparation, device = preparation or Preparation(), next(model.parameters()).device
    with torch.inference_mode():
        batches = (preparation.plain(part).to(device) for part in pixels.split(batch_size))
        return torch.cat([model(batch).scores.cpu() for batch in batches])


def accuracy_of(model: nn.Module, images: Images, preparation: Preparation | None = None) -> float:
    """Accuracy on a split, in per cent."""
    return percent(scores_of(model, images.pixels, preparation).argmax(dim=1) == images.labels)


@lru_cache(maxsize=1)
def _loaded(
    data: str, data_dir: Path, fraction: float, attribute: str, seed: int, options: tuple[tuple[str, Any], ...]
) -> Splits:
    """The last data are kept: the rows of a table mostly learn from the same."""
    held_out: dict[str, Any] = {"validation_fraction": fraction, "validation_attribute": attribute}
    return load_splits(data, data_dir, seed=seed, **held_out, **dict(options))


def percent(right: Tensor | Sequence[bool]) -> float:
    """The share of what is true, in per cent."""
    return round(100 * torch.as_tensor(right).double().mean().item(), 4)
