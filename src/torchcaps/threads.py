"""Safety in threads and after forks: locks, the modes of networks that several threads use, and silent warnings."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock, get_ident

from torch import nn

from torchcaps.errors import BadInput


class Lock:
    """Reentrant lock that is free in a forked process, even if another thread held it when the process was forked."""

    def __init__(self) -> None:
        self._lock = RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_CHANGING = Lock()
"""Lock for changes of all variables below, and of the modes of networks."""
_uses: list["_Use"] = []
"""Uses of networks inside `evaluating`, in the order in which they began."""
_trainers: dict[nn.Module, int] = {}
"""For each module of the networks that `fit` trains now, the thread that trains it."""
_silent = 0
"""Number of threads inside `without_warnings`."""
_filters = ExitStack()
"""Restores the filters of warnings when it is closed."""


@dataclass(eq=False)
class _Use:
    """One use of a network in a thread, and the modes that its modules get back at the end."""

    thread: int
    modes: dict[nn.Module, bool]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode. At the end, each module gets its own mode back: frozen modules stay frozen.

    If several threads evaluate the same modules, the modules get their modes back when the last thread has finished.

    Raises:
        BadInput: another thread trains the model.
    """
    use = _Use(get_ident(), {})
    try:
        with _CHANGING:
            # The mode of a compiled module is that of the original module in it.
            originals = (module for module in model.modules() if "_orig_mod" not in module._modules)
            modes = {module: module.training for module in originals}
            if any(_trainers.get(module, use.thread) != use.thread for module in modes):
                raise BadInput(
                    "another thread trains this network, and evaluation mode would disturb the training: use a copy "
                    "of the network, made with copy.deepcopy"
                )
            use.modes = modes
            _uses.append(use)
            model.eval()
        yield
    finally:
        with _CHANGING:
            begun = _uses.index(use) if use in _uses else len(_uses)
            others = [(place, other) for place, other in enumerate(_uses) if other.thread != use.thread]
            for module, mode in use.modes.items():
                same = [(place, other) for place, other in others if module in other.modes]
                later = [other for place, other in same if place > begun]
                if later:
                    later[0].modes[module] = mode
                elif not same:
                    module.training = mode
            _uses[:] = [other for other in _uses if other is not use]


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Mark a model as being trained by this thread, so that `evaluating` refuses it in other threads."""
    modules = [*model.modules()]
    with _CHANGING:
        _trainers.update(dict.fromkeys(modules, get_ident()))
    try:
        yield
    finally:
        with _CHANGING:
            for module in modules:
                _trainers.pop(module, None)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore all warnings in the process, and restore the filters of warnings when the last thread has finished.

    `warnings.catch_warnings` is not enough: if several threads use it, they can leave the wrong filters behind.
    """
    global _silent
    if getattr(sys.flags, "context_aware_warnings", False):  # each thread has filters of its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        return
    with _CHANGING:
        if not _silent:
            _filters.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        _silent += 1
    try:
        yield
    finally:
        with _CHANGING:
            _silent -= 1
            if not _silent:
                _filters.close()


def _forget_other_threads() -> None:
    """Forget what other threads were doing when this process was forked."""
    global _silent
    _silent = 0
    _filters.close()
    _uses.clear()
    _trainers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
