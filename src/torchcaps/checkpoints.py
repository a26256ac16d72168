"""Checkpoints that are written atomically, contain a checksum, and are read with ``weights_only=True``."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import nn

from torchcaps.errors import BadInput, unreadable
from torchcaps.models.pretrained import CONFIG, WEIGHTS, different_shapes, read_config, read_weights
from torchcaps.options import check_kind

SEAL = b"\nsha256:"
"""Separator between the bytes from `torch.save` and their hexadecimal SHA-256 checksum.

`torch.load` ignores the separator and the checksum.
"""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint and verify its checksum.

    Raises:
        BadInput: the file is missing, cannot be read, is damaged, or is not a checkpoint of torchcaps.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise BadInput(
            f"{path} is missing: restore it from a copy, or train again in another folder with --out"
        ) from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    end = content.rfind(SEAL)
    body = memoryview(content)[: max(0, end)]  # a view, because a checkpoint can be too large to copy
    if end < 0 or hashlib.sha256(body).hexdigest().encode() != content[end + len(SEAL) :]:
        raise BadInput(
            f"{path} is damaged or not a checkpoint of torchcaps (wrong checksum): "
            "restore it from a copy, or train again in another folder with --out"
        )
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own message advises weights_only=False
        raise BadInput(
            f"{path} contains more than tensors and plain data, or was written by another version of torch: "
            "train again in another folder with --out"
        ) from error


def load_checkpoint(path: Path, module: nn.Module) -> dict[str, Any]:
    """Read a checkpoint and check that its weights have the names and shapes of the module's weights.

    Raises:
        BadInput: the checkpoint cannot be read or belongs to another model.
    """
    checkpoint = read_checkpoint(path)
    _check_shapes(path, checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None, module)
    return checkpoint


def load_last(path: Path, module: nn.Module) -> dict[str, Any]:
    """Read the checkpoint from which a training continues, and check its weights, its epoch and its optimiser.

    PyTorch does not check the state of an optimiser, and fused optimisers write behind the end of tensors that are too
    small. Optimisers of a subclass of `TrainingModule` are not checked.

    Raises:
        BadInput: the checkpoint cannot be read or belongs to another model, or an entry is missing or damaged.
    """
    checkpoint = load_checkpoint(path, module)
    configure: Any = getattr(module, "configure_optimizers", None)
    try:
        for name in ("epoch", "global_step"):
            check_kind(name, checkpoint[name], int)
            if checkpoint[name] < 0:
                raise ValueError(f"{name} is {checkpoint[name]}")
        checkpoint["loops"]["fit_loop"], checkpoint["callbacks"].items()
        if getattr(configure, "__module__", None) == "torchcaps.training_module":
            [state], [schedule] = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
            schedule["lr_lambdas"], schedule["last_epoch"]
            _check_optimizer(configure()["optimizer"], state)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise unreadable(path, error, "restore it from a copy, or train again in another folder with --out") from error
    return checkpoint


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Check the saved state of an optimiser in `OPTIMIZERS`."""
    [own], [given] = optimizer.param_groups, saved["param_groups"]
    for name in ("amsgrad", "momentum", "nesterov", "maximize"):
        if given.get(name) != own.get(name):
            raise ValueError(f"{name} of the optimiser is {given.get(name)}")
    weights = own["params"]
    if given["params"] != [*range(len(weights))]:
        raise ValueError("the optimiser has other weights")
    names = {"momentum_buffer"} if own.get("momentum") else {"step", "exp_avg", "exp_avg_sq"}
    if not saved["state"]:
        raise ValueError("the optimiser has no state")
    for index, state in saved["state"].items():
        if {*state} != names:
            raise ValueError(f"the state of weight {index} has other entries")
        for name, value in state.items():
            right = () if name == "step" else weights[index].shape
            if value.shape != right or value.clone().stride() != value.stride():  # a clone does not repeat elements
                raise ValueError(f"{name} of weight {index} has shape {[*value.shape]} and strides {value.stride()}")


def _check_shapes(path: Path, weights: Mapping[str, Any] | None, module: nn.Module) -> None:
    if different := different_shapes(weights or {}, module.state_dict()):
        name, there, here = different
        raise BadInput(
            f"{path} is the checkpoint of another model ({name} is {there} there, but {here} here):"
            " give the run folder of this recipe with --out, or train in a new folder"
        )


def load_best(folder: Path, module: nn.Module) -> dict[str, Any]:
    """Read the weights of the best epoch: from best.ckpt if it exists, otherwise from model.safetensors.

    Returns:
        A checkpoint with the entry ``state_dict``. A checkpoint from best.ckpt also has the entry ``epoch``.

    Raises:
        BadInput: the weights are missing or damaged, or belong to another model.
    """
    if (folder / "best.ckpt").exists():
        return load_checkpoint(folder / "best.ckpt", module)
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise BadInput(
            f"{folder} has neither best.ckpt nor {missing[0]}: restore one of these files from a copy, or train again "
            "in another folder with --out"
        )
    weights = read_weights(folder / WEIGHTS, read_config(folder).weights_sha256)
    chosen = {f"model.{name}": value for name, value in weights.items()}
    _check_shapes(folder / WEIGHTS, chosen, module)
    return {"state_dict": chosen}


def load_saved(folder: Path, model: nn.Module) -> None:
    """Load the weights in a finished run's model.safetensors into a network.

    Raises:
        BadInput: the weights are damaged or belong to another model.
    """
    weights = read_weights(folder / WEIGHTS, read_config(folder).weights_sha256)
    _check_shapes(folder / WEIGHTS, weights, model)
    model.load_state_dict(weights)


class _Hashing(io.RawIOBase):
    """Stream that writes bytes to another stream, hashes the bytes, and stores the error of a failed write."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return self.stream.write(data)
        except OSError as error:
            self.error = error
            raise


def save_sealed(checkpoint: dict[str, Any], stream: BinaryIO) -> None:
    """Write a checkpoint and its checksum."""
    hashing = _Hashing(stream)
    try:
        torch.save(checkpoint, cast(BinaryIO, hashing))
    except RuntimeError as error:  # torch replaces every error of the stream with RuntimeError
        raise hashing.error or error from error
    stream.write(SEAL + hashing.digest.hexdigest().encode())
