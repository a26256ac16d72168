"""The batches of the training, validation and test images of a training."""

from dataclasses import replace
from typing import cast

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader

from torchcaps.batches import Batches, ImageBatches, images_per_batch
from torchcaps.data import Images, Splits
from torchcaps.recipe import Recipe


class SplitBatches(lightning.LightningDataModule):
    """Data module with the batches of the training, validation and test splits.

    If several devices train together, each device loads its own part of every split.

    The order of the training images depends only on the seed, the epoch and the number of training images. The
    augmentation of a training image depends only on these three numbers and the index of the image.

    Arguments:
        splits: training, validation and test images.
        recipe: recipe that sets the batch size, the seed and the image preprocessing.
        workers: number of processes that load images.
    """

    def __init__(self, splits: Splits, recipe: Recipe, workers: int = 0) -> None:
        super().__init__()
        self.splits = splits
        self.recipe = recipe
        self.workers = workers

    def epoch(self, number: int) -> tuple[ImageBatches, np.ndarray]:
        """Return the dataset of training images for an epoch, and the order in which the images are loaded.

        Arguments:
            number: index of the epoch; the first epoch has index 0.
        """
        recipe, images = self.recipe, self.splits.train
        preprocessing = recipe.preprocessing()
        variation = preprocessing.variation(recipe.seed, number, len(images))
        order = np.random.default_rng([recipe.seed, number, 1]).permutation(len(images))
        return ImageBatches(images, preprocessing, variation), order

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        assert trainer is not None
        devices = trainer.world_size
        batches, order = self.epoch(trainer.current_epoch)
        order = order[: len(order) - len(order) % devices][trainer.global_rank :: devices]
        return Batches(batches, order, self.recipe.batch_size // devices, self.workers, self._device)

    def batch_norm_dataloader(self) -> DataLoader:
        """Return the first training images of the epoch, for `average_batch_norms`: the same images on every device."""
        trainer, recipe = self.trainer, self.recipe
        assert trainer is not None
        batches, order = self.epoch(trainer.current_epoch)
        chosen = order[: recipe.batch_norm_images]
        return Batches(batches, chosen, recipe.batch_size // trainer.world_size, self.workers, self._device)

    def val_dataloader(self) -> DataLoader:
        return self._share(self.splits.validation, replace(self.recipe, test_crops=1))

    def evaluation_dataloader(self, images: Images) -> DataLoader:
        """Return batches for the evaluation after the training, with the recipe's number of test crops."""
        return self._share(images, self.recipe)

    def _share(self, images: Images, recipe: Recipe) -> DataLoader:
        assert self.trainer is not None
        mine = np.arange(len(images))[self.trainer.global_rank :: self.trainer.world_size]
        batches = ImageBatches(images, recipe.preprocessing())
        return Batches(batches, mine, images_per_batch(recipe.batch_size, recipe), self.workers, self._device)

    @property
    def _device(self) -> torch.device:
        return cast(lightning.Trainer, self.trainer).strategy.root_device
