"""LightningModule with the training, validation and test steps."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import lightning
import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import CatMetric, MeanMetric

from torchcaps.capsules import Prediction
from torchcaps.checks import described
from torchcaps.classifier import check_finite
from torchcaps.confusion import ConfusionMatrix
from torchcaps.data import Images
from torchcaps.errors import BadInput, Diverged
from torchcaps.losses import LOSSES, balanced_class_weights, reconstruction_loss, spread_margin
from torchcaps.pictures import save_reconstructions
from torchcaps.recipe import Recipe, create_optimizer
from torchcaps.routing import Rule
from torchcaps.scores import calibration_error_percent
from torchcaps.split_batches import SplitBatches

WEIGHT_OF_LOSS = 1e-5
"""Factor of the loss in `validation_rank`: less than the smallest difference between two rounded accuracies."""


class TrainingModule(lightning.LightningModule):
    """Lightning module that trains a model with the loss, optimiser and schedules of a recipe.

    Arguments:
        model: network that takes images and labels and returns a `Prediction`.
        recipe: settings of the loss, mixup, the optimiser and the schedules.
        num_classes: number of classes.
        steps: total number of training steps. The schedules of learning rate and margin depend on this number.
        class_weights: ``[K]``, for each class, the factor by which the losses of its images are multiplied; None for
            equal weights.
    """

    tested: Int64[Tensor, "K K"]
    """Confusion matrix of the last test, on the CPU. Rows are true classes, and columns are predicted classes."""
    scored: Float[Tensor, "N K+1"] | None
    """Scores (K columns) and true class (last column) of each image of the last test, from all processes, on the CPU.

    The images are in the order of the split. None if images show several classes.
    """
    class_weights: Tensor | None
    """``[K]``, for each class, the factor by which the losses of its images are multiplied; None for equal weights."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, num_classes: int, steps: int = 1, class_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.steps = steps
        self.recipe = recipe
        modules = [module for module in model.modules() if isinstance(module, Rule)]
        rules = [rule for rule in modules if isinstance(getattr(rule, "iterations", None), int)]
        self._iterations = [(rule, cast(int, rule.iterations)) for rule in rules]
        if recipe.early_epochs and not rules:
            raise BadInput(
                f"early_epochs is {recipe.early_epochs}, but no routing rule of model {recipe.model} has iterations: "
                "set early_epochs=0"
            )
        self.confusion = ConfusionMatrix(num_classes)
        self.validation_loss = MeanMetric()  # for several processes, `log` would round the mean number of images
        self.gathered = CatMetric(nan_strategy="disable")
        self.register_buffer("class_weights", class_weights, persistent=False)
        self._compiled: tuple[Callable[..., Prediction]] | None = None
        self._schedule: torch.optim.lr_scheduler.LambdaLR | None = None

    def _loss(self, images: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        loss, scores = self.loss_and_scores(images, labels, train)
        if not torch.isfinite(loss):
            phase = "training" if train else "validation"
            kept = " (the checkpoint of the last complete epoch is kept)" if self.current_epoch else ""
            raise Diverged(
                f"loss is {loss.item()} at step {self.global_step} (epoch {self.current_epoch + 1}, {phase}); the "
                f"first value that is not finite is {self._first_not_finite(images, labels)}",
                cure=f"use a lower --lr, set gradient_clip, or use --precision float32{kept}",
            )
        return loss, scores

    def loss_and_scores(self, images: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch and the model's scores. Mixup is applied only if `train` is True."""
        recipe = self.recipe
        others, share = labels, 1.0
        if recipe.mixup and train:
            share = float(torch.distributions.Beta(recipe.mixup, recipe.mixup).sample())
            order = torch.randperm(len(images), device="cpu").to(images.device)
            images, others = share * images + (1 - share) * images[order], labels[order]
        network = self.compiled_model() if recipe.compile and train else self.model
        kind = type(self.model).__name__
        try:
            prediction: Any = network(images, labels)
        except TypeError as error:
            if _takes_no_labels(self.model):
                raise BadInput(
                    f"{kind}.forward takes no labels: define it as forward(self, images, labels=None)"
                ) from error
            raise
        if not isinstance(prediction, Prediction):
            raise BadInput(f"{kind}.forward must return a torchcaps.Prediction; got {described(prediction)}")
        loss = self.loss_of(prediction, images, labels, train)
        if share < 1:
            loss = share * loss + (1 - share) * self.loss_of(prediction, images, others, train)
        return loss, prediction.scores

    def loss_of(self, prediction: Prediction, images: Tensor, labels: Tensor, train: bool) -> Tensor:
        """Compute the recipe's loss of a prediction, with the reconstruction loss."""
        recipe = self.recipe
        options = dict(recipe.loss_options)
        if recipe.margin_schedule != "none":
            step = self.global_step if train else self.steps
            options["margin"] = spread_margin(recipe.margin_schedule, step, self.steps)
        loss = self.loss_of_scores(prediction.scores, labels, options)
        if prediction.reconstruction is not None and recipe.reconstruction_weight:
            loss = loss + recipe.reconstruction_weight * reconstruction_loss(prediction.reconstruction, images)
        return loss

    def compiled_model(self) -> Callable[..., Prediction]:
        """Return the model, compiled to one graph for each size of a batch; on a GPU, with CUDA graphs.

        On a GPU, the outputs of a call are valid only until the next call.
        """
        if self._compiled is None:
            mode = "reduce-overhead" if self.device.type == "cuda" else "default"
            # In a tuple, the compiled model is not a submodule, so the weights are saved only once.
            self._compiled = (torch.compile(self.model, fullgraph=True, dynamic=False, mode=mode),)
        return self._compiled[0]

    def loss_of_scores(self, scores: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the recipe's loss of a batch of scores, with the class weights."""
        if self.class_weights is not None:
            options = {**options, "sample_weights": self.class_weights[labels]}
        return LOSSES[self.recipe.loss](scores, labels, **options)

    def scores(self, images: Tensor) -> Tensor:
        """Compute the model's scores for preprocessed images."""
        return self.model(images).scores

    def count(self, scores: Tensor, labels: Tensor) -> None:
        """Add the predictions for a batch to the confusion matrix."""
        self.confusion.update(scores.argmax(dim=1) if scores.ndim == 2 else scores, labels)

    def _first_not_finite(self, images: Tensor, labels: Tensor) -> str:
        if not torch.isfinite(images).all():
            return "the input images"
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                return f"weights {name}"
        found: list[str] = []

        def look(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                outputs = output if isinstance(output, list | tuple) else [output]
                tensors = [x for x in outputs if isinstance(x, Tensor)]
                if not all(bool(torch.isfinite(x).all()) for x in tensors):
                    found.append(name)

            return hook

        handles = [m.register_forward_hook(look(name)) for name, m in self.model.named_modules() if name]
        with torch.no_grad():
            self.loss_and_scores(images, labels, train=False)
        for handle in handles:
            handle.remove()
        return f"the output of module {found[0]}" if found else "the loss itself"

    def on_train_start(self) -> None:
        """Set the learning rate of the first step, because a resumed run can have more epochs than its checkpoint.

        If a subclass has a schedule of its own, the learning rate stays as it is.
        """
        schedule = self._schedule
        if schedule is not None and self.lr_schedulers() is schedule:
            for group, rate in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
                group["lr"] = rate * self._rate(schedule.last_epoch)

    def on_train_epoch_start(self) -> None:
        self.set_iterations(early=self.current_epoch < self.recipe.early_epochs)

    def set_iterations(self, *, early: bool) -> None:
        """Set the iterations of all routing rules to those of the early epochs, or to the rules' own numbers."""
        for rule, iterations in self._iterations:
            rule.iterations = self.recipe.early_iterations if early else iterations  # type: ignore[assignment]

    def on_validation_epoch_start(self) -> None:
        self.set_iterations(early=False)
        if self.recipe.batch_norm_images:
            data: SplitBatches = self.trainer.datamodule  # type: ignore[attr-defined]
            with self.autocast(self.device.type):
                batches = (images.to(self.device) for images, _ in data.batch_norm_dataloader())
                average_batch_norms(self.model, self.scores, batches)

    def autocast(self, device: str) -> torch.autocast:
        """Return the context in which the model runs with the recipe's precision on a kind of device, such as cpu."""
        return torch.autocast(device, torch.bfloat16, enabled=self.recipe.precision == "bf16")

    def training_step(self, batch: Sequence[Tensor], batch_index: int) -> Tensor:
        loss, _ = self._loss(batch[0], batch[1], train=True)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_index: int) -> None:
        loss, scores = self._loss(batch[0][0], batch[1], train=False)
        self.count(scores, batch[1])
        self.validation_loss.update(loss, len(batch[1]))

    def on_validation_epoch_end(self) -> None:
        confusion = self.confusion.compute()
        accuracy, recall = accuracy_percent(confusion), mean_recall_percent(confusion)
        if not self.validation_loss.update_called:
            raise NotImplementedError(
                f"{type(self).__name__}.validation_step must call self.validation_loss.update(loss, len(labels))"
            )
        loss = self.validation_loss.compute()
        self.log("validation_loss", loss)
        self.log("validation_accuracy_percent", accuracy, prog_bar=True)
        self.log("validation_recall_percent", recall)
        reached = accuracy if self.class_weights is None else recall
        rank = validation_rank(float(reached), float(loss))
        exact = torch.tensor(rank, dtype=torch.float64, device="cpu")  # float32 would round the loss away
        self.log("validation_rank", exact)
        self.confusion.reset()
        self.validation_loss.reset()

    def on_test_epoch_start(self) -> None:
        self.scored = None
        self.gathered.reset()

    def test_step(self, batch: Sequence[Tensor], batch_index: int) -> None:
        views, labels = batch
        parts = views.flatten(0, 1).split(max(self.recipe.batch_size, len(labels)))
        scores = torch.cat([self.scores(part) for part in parts]).unflatten(0, views.shape[:2]).mean(dim=0)
        check_finite(scores, self.model, "train again with a lower --lr, or use --precision float32")
        self.count(scores, labels)
        if labels.ndim == 1 and scores.ndim == 2:
            self.gathered.update(torch.cat([scores.float(), labels[:, None].float()], dim=1))

    def on_test_epoch_end(self) -> None:
        confusion = self.confusion.compute()
        self.log("test_accuracy_percent", accuracy_percent(confusion))
        self.tested = confusion.cpu()
        self.confusion.reset()
        if self.gathered.update_called:
            gathered, processes = self.gathered.compute().cpu(), self.trainer.world_size
            # `SplitBatches` gives process r the images r, r + processes, r + 2 * processes, ...
            order = np.concatenate([np.arange(first, len(gathered), processes) for first in range(processes)])
            self.scored = gathered[torch.from_numpy(order.argsort())]

    def calibration_error_percent(self) -> float | None:
        """Compute the expected calibration error of the last test; return None if images show several classes."""
        if self.scored is None:
            return None
        scores, labels = self.scored[:, :-1], self.scored[:, -1].long()
        return calibration_error_percent(scores, labels, getattr(self.model, "logits", None), self.recipe.loss)

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        """Seed the random numbers of dropout at the first batch of each epoch.

        The seed depends on the recipe's seed, the epoch and the rank of the process. ``on_train_epoch_start`` would be
        too early: after that hook, the data loader draws a random number in an uninterrupted run, but not in a resumed
        run, so dropout would differ.
        """
        if batch_index == 0:
            key = [self.recipe.seed, self.current_epoch, self.global_rank]
            torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
            if self.current_epoch:
                # The data loader draws this number in every epoch but the first.
                torch.empty((), dtype=torch.int64).random_()

    def margins_per_epoch(self) -> list[float]:
        """Return the margin of the spread loss at the end of each epoch, or an empty list without a margin schedule."""
        recipe, per_epoch = self.recipe, self.steps // max(1, self.recipe.epochs)
        if recipe.margin_schedule == "none":
            return []
        steps = (per_epoch * (epoch + 1) for epoch in range(recipe.epochs))
        return [spread_margin(recipe.margin_schedule, step, self.steps) for step in steps]

    def save_picture(self, images: Images, path: Path) -> None:
        """Draw images and their reconstructions to a PNG file; do nothing if the model has no decoder."""
        save_reconstructions(self.model, self.recipe.preprocessing(), images, path)

    def configure_optimizers(self) -> Any:
        optimizer = create_optimizer(self.recipe, self.parameters())
        # With a bound method, LambdaLR would save the attributes of the method's object in every checkpoint.
        self._schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        """Return the factor by which the learning rate is multiplied at a step."""
        recipe = self.recipe
        if recipe.schedule == "cosine":
            rate = (1 + math.cos(math.pi * min(1.0, step / max(1, self.steps)))) / 2
        else:
            rate = recipe.decay_rate ** (step / recipe.decay_steps)
        rising = recipe.warm_up_epochs * self.steps / recipe.epochs
        return rate * min(1.0, (step + 1) / rising) if rising else rate


def trained_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorms whose statistics change in training. Sets the model to training mode."""
    return [module for module in model.train().modules() if isinstance(module, _BatchNorm) and module.training]


def images_for_batch_norms(model: nn.Module, recipe: Recipe, images: int) -> int:
    """Return the number of training images with which `average_batch_norms` runs the model before each validation.

    Sets the model to training mode.
    """
    return min(recipe.batch_norm_images, images) if trained_batch_norms(model) else 0


@torch.no_grad()
def average_batch_norms(model: nn.Module, scores: Callable[[Tensor], Any], batches: Iterable[Tensor]) -> None:
    """Replace the statistics of BatchNorm by their averages over batches: Ioffe & Szegedy 2015, algorithm 2.

    Each batch counts in proportion to its number of images. PyTorch's running averages of the training lag behind the
    weights. Where the statistics change fast, as in the first epochs of variational Bayes routing, the accuracy in
    evaluation can be near chance although the network has learned: Wu & Johnson 2021 (arXiv 2105.07576), section 3.

    Other layers, such as dropout, work as in evaluation. Statistics that are frozen in training stay as they are. At
    the end, the model is in evaluation mode.

    Arguments:
        model: network whose statistics are replaced.
        scores: function that runs the network on a batch.
        batches: images, in batches of the size used in training.
    """
    norms = trained_batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train().reset_running_stats()
    seen = 0
    for images in batches if norms else ():
        seen += len(images)
        for norm in norms:
            norm.momentum = len(images) / seen
        scores(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


def class_weights_of(recipe: Recipe, images: Images) -> Float[Tensor, " K"] | None:
    """Compute the class weights of the training images, or return None if the recipe has ``class_weights="none"``.

    Raises:
        BadInput: the recipe has ``class_weights="balanced"``, and each image shows several classes.
    """
    if recipe.class_weights == "none":
        return None
    if images.labels.ndim > 1:
        raise BadInput("class_weights is balanced, but each image shows several classes: set class_weights=none")
    return balanced_class_weights(images.labels, len(images.class_names))


def accuracy_percent(confusion: Int64[Tensor, "K K"]) -> Tensor:
    """Return the percentage of images on the diagonal of a confusion matrix."""
    return 100 * (confusion.diagonal().sum().float() / confusion.sum().float())


def ranking_metric(recipe: Recipe) -> str:
    """Return the name of the validation metric that ranks the epochs: accuracy, or mean recall with class weights."""
    return "validation_accuracy_percent" if recipe.class_weights == "none" else "validation_recall_percent"


def validation_rank(reached_percent: float, loss: float) -> float:
    """Compute the rank of an epoch; the epoch with the highest rank is the best.

    The accuracy (with class weights: the mean recall), rounded to 0.0001 %, decides; among equals, the loss decides.
    """
    return round(reached_percent, 4) - 100 - WEIGHT_OF_LOSS * loss / (1 + loss)


def mean_recall_percent(confusion: Int64[Tensor, "K K"]) -> Tensor:
    """Return the mean recall in per cent, over the classes that have images."""
    images = confusion.sum(dim=1)
    return 100 * (confusion.diagonal().float() / images.clamp_min(1)).sum() / (images > 0).sum()


def _takes_no_labels(model: nn.Module) -> bool:
    try:
        return len(inspect.signature(model.forward).parameters) == 1
    except ValueError:  # TorchScript
        return False
