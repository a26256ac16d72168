"""Early stopping of a training run."""

from typing import Any

import lightning
from lightning.pytorch import callbacks as lightning_callbacks

from torchcaps.recipe import Recipe
from torchcaps.training_module import ranking_metric


class EarlyStopping(lightning_callbacks.EarlyStopping):
    """Early stopping that says when it ends the training.

    If a training that stopped early is resumed with the same number of epochs, it ends at once. With more epochs, it
    continues, and counts the epochs without improvement from 0.

    The class has the same name as Lightning's class, because Lightning finds the saved state by this name.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(ranking_metric(recipe), mode="max", patience=recipe.patience)
        self.epochs = recipe.epochs
        self.best_epoch = 0
        self.ended = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epochs": self.epochs, "best_epoch": self.best_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.best_epoch = state_dict.get("best_epoch", 0)
        if self.wait_count >= self.patience:
            self.ended = state_dict.get("epochs") == self.epochs
            self.wait_count = self.patience if self.ended else 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.ended

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        before = self.best_score
        super().on_train_epoch_end(trainer, pl_module)
        if self.best_score != before:
            self.best_epoch = trainer.current_epoch + 1
        if self.wait_count >= self.patience and trainer.is_global_zero and trainer.current_epoch + 1 < self.epochs:
            now, name = trainer.current_epoch + 1, self.monitor.removesuffix("_percent").replace("_", " ")
            best = self.best_epoch or now - self.wait_count  # older checkpoints do not contain the best epoch
            print(f"stopped early after epoch {now}: the {name} has not improved since epoch {best}", flush=True)
