"""A constant tensor of a layer or a routing map."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from torchcaps.checks import has_values, is_compiling


class Constant:
    """A constant tensor with one cached copy per device. The tensor is neither trained nor part of a state dict.

    Unlike a buffer, the tensor keeps its values and dtype when the module is moved, cast or passed through
    ``to_empty()``. Copies made while a graph is traced are not cached.

    Arguments:
        values: the constant tensor.

    Example:
        >>> Constant(torch.arange(3)).on("cpu")
        tensor([0, 1, 2])
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device | str) -> Tensor:
        """Return the copy of the tensor on a device."""
        device = torch.device(device)
        if device == self.values.device:
            return self.values
        if device in self._copies:
            return self._copies[device]
        if is_compiling():
            return self.values.to(device)
        with torch.inference_mode(False):
            copy = self.values.to(device)
        if has_values(copy):
            self._copies[device] = copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values, "_copies": {}}

    def __deepcopy__(self, known: Any) -> "Constant":
        copied = Constant(deepcopy(self.values, known))
        copied._copies = deepcopy(self._copies, known)  # compiled calls cannot add them
        return copied
