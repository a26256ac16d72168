"""Classes outside torch and torchcaps, and networks that are created without random initial values."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

DRAWS = (Tensor.normal_, Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_)
"""Functions with which networks draw initial values."""


def is_foreign(kind: type) -> bool:
    """Return whether a class belongs neither to torch nor to torchcaps."""
    return not kind.__module__.startswith(("torch.nn.", "torchcaps."))


class _WithoutDraws(TorchFunctionMode):
    """Mode that leaves out random initial values.

    On the meta device, PyTorch would import its compiler to draw numbers that no memory holds, which takes more than a
    second.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def keeping_random_state(*kinds: type) -> AbstractContextManager[Any]:
    """Return a context manager in which networks and rules of these classes do not change the random state.

    The initial values of classes of torchcaps are not drawn. Foreign classes draw numbers, and `fork_rng` restores the
    random state of the process at the end, also if another thread has drawn numbers meanwhile.
    """
    return torch.random.fork_rng(devices=[]) if any(map(is_foreign, kinds)) else _WithoutDraws()
