"""Training with Lightning, independent of any particular dataset or model."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

try:
    import lightning
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "torchcaps.training needs lightning: pip install 'torchcaps[train]'", name=error.name
    ) from error

from torchcaps.batches import default_workers
from torchcaps.checkpoints import load_best, load_checkpoint, load_saved
from torchcaps.checks import check_integer, described
from torchcaps.chosen_epoch import best_epoch, check_best
from torchcaps.classifier import Classifier
from torchcaps.compilation import check_compiled
from torchcaps.confusion import per_class, save_confusion, warn_of_one_prediction
from torchcaps.convolution import use_channels_last
from torchcaps.data import Images, Splits
from torchcaps.data.files import write_json
from torchcaps.devices import (
    SMALLER_BATCHES,
    check_devices,
    check_shares,
    clear_memory_errors,
    process_group_closed_at_exit,
    reproducible,
)
from torchcaps.early_stopping import EarlyStopping
from torchcaps.environment import first_process, is_terminal, prepare_processes, processes
from torchcaps.errors import BadInput, first_line
from torchcaps.evaluation import NO_FOLDER, OwnHandler, accuracy_on, clear_errors, cluster
from torchcaps.fine_tuning import load_matching
from torchcaps.loggers import LoggerName, check_logger, create_logger
from torchcaps.losses import check_loss
from torchcaps.models import Pretrained, create_model, routing_of
from torchcaps.models.pretrained import check_loadable
from torchcaps.pictures import save_curves, save_worst
from torchcaps.recipe import PRECISIONS, Recipe, batch_starts, resolve_precision
from torchcaps.run_folder import begin_run, check_run, finished, locked, read_rows, read_run, write_run
from torchcaps.run_writers import AtomicCheckpoints, EpochLog, ProgressBar, RunCheckpoint
from torchcaps.seen_images import warn_of_seen_images
from torchcaps.split_batches import SplitBatches
from torchcaps.threads import Lock, training
from torchcaps.training_module import TrainingModule, class_weights_of, images_for_batch_norms

_SEEDED = Lock()
"""Lock for the random numbers of the process while initial weights are drawn."""
FEWER_WORKERS = "use fewer --workers, and continue with --resume"
"""Cure in an error message if a worker process of a training ends."""


@clear_memory_errors(SMALLER_BATCHES)
@process_group_closed_at_exit()
@reproducible()
def fit(
    recipe: Recipe,
    splits: Splits,
    folder: str | Path,
    *,
    devices: int = 1,
    workers: int | None = None,
    resume: bool = False,
    on_start: Callable[[TrainingModule, int], None] | None = None,
    on_epoch_end: Callable[[nn.Module], Mapping[str, float] | None] | None = None,
    module_class: type[TrainingModule] = TrainingModule,
    logger: LoggerName = "tensorboard",
    test: bool = True,
) -> dict[str, Any]:
    """Train a model, evaluate its best epoch once on the test split, and write the run folder.

    The best epoch is the one with the highest validation accuracy (with class weights: the highest mean recall) and,
    among equals, the lowest validation loss. If the recipe has ``choose="last"``, the last epoch is evaluated instead.
    With `resume`, a finished run continues only if the recipe has more epochs than the run. At its end, the continued
    run is evaluated on the test split again.

    With ``test=False``, the test split is not evaluated, so that settings can be compared without it. The metrics of
    the classes, the calibration error and the pictures are then those of the validation split. To evaluate such a run
    on the test split without more training, call `fit` again with ``resume=True`` and ``test=True``; the logger does
    not receive this test accuracy.

    At the end, the state of PyTorch's random numbers is restored: that of the CPU, and that of the current GPU if the
    process has used a GPU before. Trainings in several threads of one process share these random numbers, so networks
    with dropout do not train reproducibly there: use one process per training.

    Arguments:
        recipe: all settings of the training. They are saved in the folder's recipe.json.
        splits: training, validation and test images.
        folder: run folder; created if absent. It must be empty or contain a run. `fit` writes recipe.json,
            image-digests.safetensors, metrics.csv, metrics.json, last.ckpt, model.safetensors, config.json,
            tensorboard/, curves.png, confusion.png, worst.png, and reconstructions.png if the model has a decoder.
            `fit` does not change other files in the folder.
        devices: number of processes that train together (DistributedDataParallel). It must divide the batch size.
            Under `torchrun`, which has started the processes already, this argument is not used.
        workers: number of worker processes per device that read and decode images. The default for images on disk
            is the number of cores divided by the number of devices, at least 1; for images in memory it is 0. The
            number of workers does not change the results.
        resume: continue from the folder's last.ckpt; if the folder contains no run, a new run starts. The final weights
            are bit-identical to the weights of an uninterrupted run, unless a GPU operation has no deterministic
            algorithm; a warning names such an operation.
        on_start: function that is called once before the first epoch, with the module and the number of epochs left.
            If it raises an error, nothing is written.
        on_epoch_end: function that takes the model, in evaluation mode, and is called after every epoch. If it returns
            values, they are written to metrics.csv and given to the logger.
        module_class: subclass of `TrainingModule` that defines loss and metric by the methods `loss_and_scores` and
            `count`.
        logger: ``tensorboard``, ``csv``, ``wandb``, ``mlflow`` or ``none``; see `torchcaps.loggers.create_logger`.
        test: whether to evaluate the model on the test split.

    Returns:
        The content of metrics.json.

    Raises:
        BadInput: a setting is invalid; a split has no images; the folder contains a run and `resume` is False; the
            folder contains files but no recipe.json; the run was started with other data or settings; a file cannot be
            read or written; the memory runs out; or the network is to be compiled, but PyTorch cannot
            compile it or computes wrong gradients.
        Diverged: the loss is not finite.
        KeyboardInterrupt: the training was interrupted, for example by Ctrl-C.

    Warns:
        DataWarning: test images are among the training or validation images of this run or of the run in
            ``recipe.pretrained``; or validation images are among the training images of one of these runs.
    """
    folder = Path(folder)
    check_integer("devices", devices, 1, error=BadInput)
    if workers is not None:
        check_integer("workers", workers, 0, error=BadInput)
    for name, function in (("on_start", on_start), ("on_epoch_end", on_epoch_end)):
        if function is not None and not callable(function):
            raise BadInput(f"{name} must be a function or None; got {described(function)}")
    check_devices(devices, recipe)
    check_logger(logger)
    check_shares(splits, devices)
    prepare_processes(devices)
    module = new_module(recipe, splits, module_class, devices)
    recipe = module.recipe
    workers = default_workers(splits.train, processes(devices)[0]) if workers is None else workers
    data, last = SplitBatches(splits, recipe, workers), folder / "last.ckpt"
    if recipe.pretrained and not (resume and (last.exists() or finished(folder, recipe))):
        loaded = load_matching(module.model, recipe, splits.train.class_names)
        if first_process():
            print(loaded, flush=True)
    options: dict[str, Any] = {"on_epoch_end": on_epoch_end, "logger": logger, "test": test}
    enough = ("test",) if test else ("test", "validation")
    if not first_process():
        done = finished(folder, recipe) if resume else None
        if done is not None and done["evaluated_split"] in enough:
            return done
        last_of_run = last if resume and last.exists() else None
        with training(module.model), _random_numbers_kept():
            return _train(recipe, data, folder, module, devices, last_of_run, **options, trained=done is not None)
    with locked(folder), training(module.model), _random_numbers_kept():
        begun = check_run(folder, recipe, splits, module, resume)
        done = finished(folder, recipe)
        if done is not None and done["evaluated_split"] in enough:
            planned = read_run(folder)
            if planned.recipe.epochs != recipe.epochs:  # a longer training was interrupted in its first epoch
                write_run(folder, replace(planned, recipe=replace(planned.recipe, epochs=recipe.epochs)))
            print(f"{folder} is finished: raise --epochs to train for more epochs", flush=True)
            return done
        check_best(folder, recipe, begun.trained)
        if recipe.compile and done is None:
            print("compiling the network, and checking its gradients; this can take minutes", flush=True)
            check_compiled(module, splits)
        if on_start is not None and done is None:
            on_start(module, recipe.epochs - (begun.trained if begun.last else 0))
        if done is None and recipe.precision == "bf16" and resolve_precision("auto") == "float32":
            print("bf16 is slower than float32 on this hardware: use --precision auto for a new run", flush=True)
        begin_run(folder, begun)
        folders = [folder, *([Path(recipe.pretrained)] if recipe.pretrained else [])]
        warn_of_seen_images(folders, splits.test, splits.validation)
        return _train(recipe, data, folder, module, devices, begun.last, **options, trained=done is not None)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore PyTorch's random numbers at the end, so that those of the caller do not depend on the recipe's seed."""
    with _SEEDED:  # another thread may have seeded them to draw initial weights
        cpu = torch.get_rng_state()
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        with _SEEDED:
            torch.set_rng_state(cpu)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu)


def new_module(
    recipe: Recipe, splits: Splits, module_class: type[TrainingModule] = TrainingModule, devices: int = 1
) -> TrainingModule:
    """Build the module that `fit` trains on this number of devices. The recipe's seed determines the initial weights.

    The recipe's precision ``auto`` is replaced with ``bf16`` or ``float32``.

    Raises:
        BadInput: an option of the model, of its routing rule or of the loss is invalid, or the loss does not accept
            the scores of the model.
    """
    recipe = replace(recipe, precision=resolve_precision(recipe.precision))
    together = math.prod(processes(devices))
    images, batch_size = len(splits.train) // together, recipe.batch_size // together
    steps = recipe.epochs * len(batch_starts(images, batch_size))
    weights = class_weights_of(recipe, splits.train)
    classes = len(splits.train.class_names)
    with _SEEDED, _random_numbers_kept():
        torch.manual_seed(recipe.seed)
        model = _new_model(recipe, splits.train, one_per_batch=min(images, batch_size) == 1)
        use_channels_last(model)
        module = module_class(model, recipe, classes, steps, weights)
    if module_class.loss_and_scores is not TrainingModule.loss_and_scores:
        if recipe.compile:
            raise BadInput(f"compile is true, but {module_class.__name__} has its own loss: set compile=false")
        return module  # it computes its loss in its own way
    for name, part in (("validation", splits.validation), ("test", splits.test)):
        if part.image_shape != splits.train.image_shape and not model.any_size:
            raise BadInput(
                f"the {name} images have the shape {part.image_shape}, but the training images "
                f"{splits.train.image_shape}: give all splits the same size"
            )
    check_loss(recipe.loss, recipe.model, cast(Pretrained, module.model).logits)
    labels = splits.train.labels[:1]
    scores = torch.full((1, classes), 0.5, device=labels.device)
    try:
        module.loss_of_scores(scores, labels, dict(recipe.loss_options))
    except (ValueError, RuntimeError) as error:
        raise BadInput(f"loss {recipe.loss} cannot run with these options: {first_line(error)}") from error
    return module


def _new_model(recipe: Recipe, images: Images, one_per_batch: bool) -> Pretrained:
    """Build the recipe's model and run it on one blank image, so that invalid options fail before training starts."""
    shape = recipe.preprocessing().image_shape(images.image_shape)
    options: dict[str, Any] = {"image_shape": shape, "num_classes": len(images.class_names), **recipe.model_options}
    if routing := routing_of(recipe.model, recipe.model_options, recipe.routing_options):
        options["routing"] = routing
    model = create_model(recipe.model, **options).eval()
    blank = torch.zeros(1, *model.options["image_shape"], device=next(model.parameters()).device)
    try:
        with torch.inference_mode():
            model(blank)
            if one_per_batch:  # BatchNorm can fail
                deepcopy(model).train()(blank)
    except (ValueError, RuntimeError, MemoryError) as error:
        cure = "; if batches of one image are the cause, use a larger --batch-size" if one_per_batch else ""
        raise BadInput(f"model {recipe.model} cannot run with these options: {error}{cure}") from error
    check_loadable(model)  # not only at the end of the training
    return model.train()


def _train(
    recipe: Recipe,
    data: SplitBatches,
    folder: Path,
    module: TrainingModule,
    devices: int,
    last: Path | None,
    *,
    on_epoch_end: Callable[[nn.Module], Mapping[str, float] | None] | None,
    logger: LoggerName,
    test: bool,
    trained: bool,
) -> dict[str, Any]:
    """Train the model, unless it is `trained` already, evaluate it, and write the results."""
    splits = data.splits
    between = len(splits.validation) + images_for_batch_norms(module.model, recipe, len(splits.train))
    log = EpochLog(folder / "metrics.csv", len(splits.train), on_epoch_end, between)
    trainer = _trainer(module, folder, devices, log, "none" if trained else logger)  # it would log the test as step 0
    if trained:
        data.trainer, kept = trainer, best_epoch(folder, recipe)
        load_saved(folder, module.model)
    else:
        with clear_errors(trainer, FEWER_WORKERS), ExitStack() as stack:
            if recipe.compile:
                stack.callback(torch.compiler.reset)  # it frees the memory of the CUDA graphs
            trainer.fit(module, data, ckpt_path=last)
        trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs = [], []
        module.zero_grad()  # the memory of optimiser and gradients is enough to read the checkpoint
        chosen = load_best(folder, module) if recipe.choose == "best" else load_checkpoint(folder / "last.ckpt", module)
        kept = chosen["epoch"] + 1 if "epoch" in chosen else best_epoch(folder, recipe)
        module.load_state_dict(chosen["state_dict"])
    run = read_run(folder)
    run = replace(run, test_evaluations=run.test_evaluations + test)
    loggers, trainer.loggers = trainer.loggers, []  # they have received the accuracy on the validation split already
    metrics: dict[str, Any] = {}
    evaluated = splits.validation
    validation = accuracy_on(trainer, module, data.evaluation_dataloader(evaluated), FEWER_WORKERS)
    trainer.loggers = loggers
    if test:
        evaluated = splits.test
        accuracy = accuracy_on(trainer, module, data.evaluation_dataloader(evaluated), FEWER_WORKERS)
        metrics = {"test_error_percent": round(100 - accuracy, 4), "test_accuracy_percent": round(accuracy, 4)}
    rows = read_rows(folder / "metrics.csv")
    names = evaluated.class_names
    metrics |= {
        "validation_accuracy_percent": round(validation, 4),
        "parameters": sum(parameter.numel() for parameter in module.model.parameters()),
        "train_images_per_second": round(float(np.median([float(row["train_images_per_second"]) for row in rows])), 2),
        "wall_seconds": round(sum(float(row["seconds"]) for row in rows), 2),
        "epochs": len(rows),
        "epochs_planned": recipe.epochs,
        "best_epoch": kept,
        "precision": recipe.precision,
        "train_images": len(splits.train),
        "validation_images": len(splits.validation),
        "test_images": len(splits.test),
        "test_evaluations": run.test_evaluations,
        "calibration_error_percent": module.calibration_error_percent(),
        "evaluated_split": "test" if test else "validation",
        "classes": per_class(module.tested, names) if evaluated.labels.ndim == 1 else None,
    }
    if trainer.is_global_zero:
        write_run(folder, run)
        model, stored, preprocessing = cast(Pretrained, module.model), splits.train.image_shape, recipe.preprocessing()
        if tuple(model.options["image_shape"]) == preprocessing.image_shape(stored):
            resize = (splits.train.files and splits.train.files.resize) or "stretch"
            Classifier(module.model, names, stored, preprocessing, resize).save_pretrained(folder)
        else:  # a subclass of TrainingModule can make images of another size
            model.save_pretrained(folder)
        module.save_picture(splits.validation, folder / "reconstructions.png")
        save_curves(rows, folder / "curves.png", module.margins_per_epoch())
        if evaluated.labels.ndim == 1:
            save_confusion(module.tested, names, folder / "confusion.png")
            if module.scored is not None:
                scores = module.scored[:, :-1]
                save_worst(module.model, recipe.preprocessing(), evaluated, scores, folder / "worst.png")
            warn_of_one_prediction(module.tested, names)
        write_json(folder / "metrics.json", metrics)
        (folder / "best.ckpt").unlink(missing_ok=True)  # model.safetensors contains these weights
    return metrics


def may_have_unused_parameters(module: TrainingModule) -> bool:
    """Return whether the loss of a batch may not depend on some parameters.

    Networks of this package use the same parameters for all images, unless the number of routing iterations changes.
    """
    model = cast(Pretrained, module.model)
    packages = {type(part).__module__.partition(".")[0] for part in model.modules()}
    if type(module) is not TrainingModule or module.recipe.early_epochs or packages - {"torch", "torchcaps"}:
        return True
    weights = [one for one in model.parameters() if one.requires_grad]
    images = torch.zeros(1, *model.options["image_shape"], device=weights[0].device)
    labels = torch.zeros(1, dtype=torch.long, device=images.device)
    loss = module.loss_of(model.eval()(images, labels), images, labels, train=True)
    model.train()
    return any(gradient is None for gradient in torch.autograd.grad(loss, weights, allow_unused=True))


def _trainer(module: TrainingModule, folder: Path, devices: int, log: EpochLog, logger: str) -> lightning.Trainer:
    recipe = module.recipe
    same: dict[str, Any] = {"save_on_train_epoch_end": True, "enable_version_counter": False}
    callbacks: list[Callback] = [OwnHandler(), log, RunCheckpoint(str(folder), "last", **same)]
    if recipe.choose == "best":
        rank: dict[str, Any] = {"monitor": "validation_rank", "mode": "max", "save_weights_only": True}
        callbacks.insert(2, RunCheckpoint(str(folder), "best", **rank, **same))
    if recipe.patience:
        callbacks.append(EarlyStopping(recipe))
    show_bar = is_terminal(sys.stdout)
    devices, nodes = processes(devices)
    strategy = "auto"
    if devices * nodes > 1:
        strategy = "ddp_find_unused_parameters_true" if may_have_unused_parameters(module) else "ddp"
    return lightning.Trainer(
        max_epochs=recipe.epochs,
        accelerator="auto",
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        precision=PRECISIONS[recipe.precision],  # type: ignore[arg-type]
        logger=create_logger(logger, folder, recipe),
        callbacks=[*callbacks, ProgressBar()] if show_bar else callbacks,
        gradient_clip_val=recipe.gradient_clip or None,
        plugins=[AtomicCheckpoints(), *cluster()],
        default_root_dir=NO_FOLDER,
        enable_progress_bar=show_bar,
        enable_model_summary=False,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
    )
