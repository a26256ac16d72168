"""Training and evaluation on Lightning. Nothing here knows a dataset or a model by name."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from torchcaps.data import Images, Preparation, Splits, Variation
from torchcaps.data.files import write_json
from torchcaps.errors import BadInput
from torchcaps.losses import LOSSES, reconstruction_loss, spread_margin
from torchcaps.models import create_model
from torchcaps.recipe import OPTIMIZERS, PRECISIONS, Recipe, resolve_precision
from torchcaps.run_folder import (
    AtomicCheckpoints,
    EpochLog,
    begin_run,
    load_checkpoint,
    read_rows,
    save_reconstructions,
)


class ImageBatches(Dataset):
    """Whole batches of an in-memory split: prepared for training where a variation is given, else as a test's views."""

    def __init__(self, images: Images, preparation: Preparation, variation: Variation | None = None) -> None:
        self.images = images
        self.preparation = preparation
        self.variation = variation

    def __getitem__(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices)
        pixels, labels = self.images.pixels[chosen], self.images.labels[chosen]
        if self.variation is None:
            return self.preparation.views(pixels), labels
        return self.preparation.varied(pixels, self.variation.of(chosen)), labels


def _loader(batches: ImageBatches, order: np.ndarray, batch_size: int) -> DataLoader:
    parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return DataLoader(batches, sampler=parts, batch_size=None)


class SplitBatches(lightning.LightningDataModule):
    """Order and shifts of every epoch, a function of (seed, epoch, index) alone; each device takes its share."""

    def __init__(self, splits: Splits, recipe: Recipe) -> None:
        super().__init__()
        self.splits = splits
        self.recipe = recipe

    def train_dataloader(self) -> DataLoader:
        recipe, images, trainer = self.recipe, self.splits.train, self.trainer
        assert trainer is not None
        epoch, devices = trainer.current_epoch, trainer.world_size
        order = np.random.default_rng([recipe.seed, epoch, 1]).permutation(len(images))
        order = order[: len(images) - len(images) % devices][trainer.global_rank :: devices]
        preparation = recipe.preparation()
        variation = preparation.variation(recipe.seed, epoch, len(images))
        return _loader(ImageBatches(images, preparation, variation), order, recipe.batch_size // devices)

    def val_dataloader(self) -> DataLoader:
        return self._share(self.splits.validation, replace(self.recipe, test_crops=1))

    def test_dataloader(self) -> DataLoader:
        return self._share(self.splits.test, self.recipe)

    def _share(self, images: Images, recipe: Recipe) -> DataLoader:
        assert self.trainer is not None
        mine = np.arange(len(images))[self.trainer.global_rank :: self.trainer.world_size]
        return _loader(ImageBatches(images, recipe.preparation()), mine, recipe.batch_size)


class Classifier(lightning.LightningModule):
    """A model, its loss and its optimiser, as the recipe says."""

    def __init__(self, model: nn.Module, recipe: Recipe, classes: int, steps: int = 1) -> None:
        super().__init__()
        self.model = model
        self.steps = steps
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
        self.recipe = recipe
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def _loss(self, images: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        loss, scores = self.loss_and_scores(images, labels, train)
        if not torch.isfinite(loss):
            phase = "training" if train else "validation"
            raise BadInput(
                f"loss is {loss.item()} at step {self.global_step} (epoch {self.current_epoch + 1}, {phase}); "
                f"first not finite: {self._first_not_finite(images, labels)}; "
                "the last good checkpoint is kept: lower --lr or set gradient_clip, or try --precision float32"
            )
        return loss, scores

    def loss_and_scores(self, images: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        """What is minimised, and the scores."""
        recipe = self.recipe
        prediction = self.model(images, labels)
        options = dict(recipe.loss_options)
        if recipe.margin_schedule != "none":
            step = self.global_step if train else self.steps
            options["margin"] = spread_margin(recipe.margin_schedule, step, self.steps)  # type: ignore[arg-type]
        loss = LOSSES[recipe.loss](prediction.scores, labels, **options)
        if prediction.reconstruction is not None and recipe.reconstruction_weight:
            loss = loss + recipe.reconstruction_weight * reconstruction_loss(prediction.reconstruction, images)
        return loss, prediction.scores

    def scores(self, images: Tensor) -> Tensor:
        """The model's scores of prepared images."""
        return self.model(images).scores

    def count(self, scores: Tensor, labels: Tensor) -> None:
        """Add a batch to the accuracy."""
        self.accuracy.update(scores, labels)

    def _first_not_finite(self, images: Tensor, labels: Tensor) -> str:
        if not torch.isfinite(images).all():
            return "the input images"
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                return f"weights {name}"
        found: list[str] = []

        def look(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                tensors = [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]
                if not all(bool(torch.isfinite(x).all()) for x in tensors):
                    found.append(name)

            return hook

        handles = [m.register_forward_hook(look(name)) for name, m in self.model.named_modules() if name]
        with torch.no_grad():
            self.loss_and_scores(images, labels, train=False)
        for handle in handles:
            handle.remove()
        return f"output of module {found[0]}" if found else "the loss itself"

    def training_step(self, batch: Sequence[Tensor], batch_index: int) -> Tensor:
        loss, _ = self._loss(batch[0], batch[1], train=True)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_index: int) -> None:
        loss, scores = self._loss(batch[0][0], batch[1], train=False)
        self.count(scores, batch[1])
        self.log("validation_loss", loss, batch_size=len(batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        accuracy = 100 * self.accuracy.compute()
        loss = self.trainer.callback_metrics["validation_loss"]
        self.log("validation_accuracy_percent", accuracy, prog_bar=True)
        self.log("validation_rank", -(100 - accuracy) - 0.001 * loss / (1 + loss))  # near 0, where floats are close
        self.accuracy.reset()

    def test_step(self, batch: Sequence[Tensor], batch_index: int) -> None:
        views = torch.stack([self.scores(view) for view in batch[0]])
        self.count(views.mean(dim=0), batch[1])

    def on_test_epoch_end(self) -> None:
        self.log("accuracy_percent", 100 * self.accuracy.compute())
        self.accuracy.reset()

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        """Dropout is a function of (seed, epoch, rank); hooks before this one come too early in a resumed epoch."""
        if batch_index == 0:
            key = [self.recipe.seed, self.current_epoch, self.global_rank]
            torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
            if self.current_epoch:
                torch.empty((), dtype=torch.int64).random_()  # what the loader of a later epoch takes

    def save_picture(self, images: Images, path: Path) -> None:
        """Images beside their reconstructions, where the model reconstructs."""
        save_reconstructions(self.model, self.recipe.preparation(), images, path)

    def configure_optimizers(self) -> Any:
        recipe = self.recipe
        optimizer = OPTIMIZERS[recipe.optimizer](
            self.parameters(),
            lr=recipe.learning_rate,  # type: ignore[call-arg]
            weight_decay=recipe.weight_decay,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: recipe.decay_rate ** (step / recipe.decay_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    recipe: Recipe,
    splits: Splits,
    folder: Path,
    *,
    devices: int = 1,
    resume: bool = False,
    watch: Callable[[nn.Module], Mapping[str, float]] | None = None,
    classifier: type["Classifier"] | None = None,
) -> dict[str, Any]:
    """Train as the recipe says, choose the epoch on validation, read the test split once, and fill the run folder.

    Of epochs with equal validation accuracy the one of lower validation loss is kept.

    Arguments:
        recipe: all settings; what it says can be repeated from the folder's recipe.json.
        splits: train, validation and test images.
        folder: made if absent; gets recipe.json, metrics.csv, metrics.json, last.ckpt, best.ckpt, model.safetensors,
            config.json, tensorboard/, and reconstructions.png where the model reconstructs.
        devices: processes to train with, through DistributedDataParallel; must divide the batch size.
        resume: go on from the folder's last.ckpt, to the same bits as a run that was never stopped.
        watch: called with the model, in evaluation mode, after every epoch; what it returns stands in metrics.csv.
        classifier: what makes losses and right answers of a model's; `Classifier` where there is none.

    Returns:
        The content of metrics.json.

    Raises:
        BadInput: a setting does not fit, a checkpoint cannot be read or written, the loss is not finite.
        KeyboardInterrupt: as sent; Lightning turns it into an exit, and this turns it back.
    """
    if devices < 1 or recipe.batch_size % devices:
        raise BadInput(
            f"devices is {devices}: use 1, or a larger number that divides the batch size {recipe.batch_size}"
        )
    recipe = replace(recipe, precision=resolve_precision(recipe.precision))
    torch.manual_seed(recipe.seed)
    classes = len(splits.train.class_names)
    image_shape = recipe.preparation().image_shape(splits.train.image_shape)
    options = {"image_shape": image_shape, "classes": classes, **recipe.model_options}
    model = create_model(recipe.model, **options)
    first_process = int(os.environ.get("LOCAL_RANK", 0)) == 0
    last = folder / "last.ckpt"
    if first_process:
        begin_run(folder, asdict(recipe), splits, resume)
    module = (classifier or Classifier)(
        model, recipe, classes, recipe.epochs * math.ceil(len(splits.train) / recipe.batch_size)
    )
    best = ModelCheckpoint(
        folder,
        "best",
        monitor="validation_rank",
        mode="max",
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
    latest = ModelCheckpoint(folder, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    callbacks: list[Callback] = [EpochLog(folder / "metrics.csv", len(splits.train), watch), best, latest]
    if recipe.patience:
        callbacks.append(EarlyStopping("validation_accuracy_percent", mode="max", patience=recipe.patience))
    show_bar = sys.stdout.isatty()
    trainer = lightning.Trainer(
        max_epochs=recipe.epochs,
        accelerator="auto",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        precision=PRECISIONS[recipe.precision],  # type: ignore[arg-type]
        logger=TensorBoardLogger(folder, name="", version="tensorboard"),
        callbacks=[*callbacks, RichProgressBar(leave=False)] if show_bar else callbacks,
        gradient_clip_val=recipe.gradient_clip or None,
        plugins=[AtomicCheckpoints()],
        deterministic=True,
        enable_progress_bar=show_bar,
        enable_model_summary=False,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
    )
    data = SplitBatches(splits, recipe)
    if go_on := resume and last.exists():
        load_checkpoint(last, module)
    try:
        trainer.fit(module, data, ckpt_path=last if go_on else None)
    except SystemExit as interrupted:
        raise KeyboardInterrupt from interrupted
    chosen = load_checkpoint(folder / "best.ckpt", module)
    module.load_state_dict(chosen["state_dict"])
    validation = trainer.test(module, data.val_dataloader(), verbose=False)[0]["accuracy_percent"]
    test = trainer.test(module, data.test_dataloader(), verbose=False)[0]["accuracy_percent"]
    rows = read_rows(folder / "metrics.csv")
    metrics = {
        "test_error_percent": round(100 - test, 4),
        "test_accuracy_percent": round(test, 4),
        "validation_accuracy_percent": round(validation, 4),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_images_per_second": round(float(np.median([float(row["train_images_per_second"]) for row in rows])), 2),
        "wall_seconds": round(sum(float(row["seconds"]) for row in rows), 2),
        "epochs": len(rows),
        "best_epoch": chosen["epoch"] + 1,
        "precision": recipe.precision,
        "train_images": len(splits.train),
        "validation_images": len(splits.validation),
        "test_images": len(splits.test),
    }
    if trainer.is_global_zero:
        model.save_pretrained(folder)  # type: ignore[operator]
        (folder / "README.md").unlink(missing_ok=True)
        module.save_picture(splits.validation, folder / "reconstructions.png")
        write_json(folder / "metrics.json", metrics)
    return metrics


def evaluate(
    model: nn.Module,
    images: Images,
    preparation: Preparation | None = None,
    *,
    batch_size: int = 128,
    precision: str = "auto",
) -> float:
    """Accuracy in per cent of a model on a split, on one device.

    Arguments:
        model: any model of `MODELS`.
        images: the split.
        preparation: how they become the model's input; pixels in [0, 1] by default.
        batch_size: images at a time; the result does not depend on it.
        precision: auto, bf16 or float32.
    """
    recipe = Recipe("evaluate", "", "", batch_size=batch_size)
    module = Classifier(model, recipe, len(images.class_names))
    trainer = lightning.Trainer(
        devices=1,
        precision=PRECISIONS[resolve_precision(precision)],  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
    )
    batches = _loader(ImageBatches(images, preparation or Preparation()), np.arange(len(images)), batch_size)
    return trainer.test(module, batches, verbose=False)[0]["accuracy_percent"]
