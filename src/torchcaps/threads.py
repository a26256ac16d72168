"""Safety in threads and after forks: locks, the modes of networks that several threads use, and silent warnings."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any

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
        with suppress(RuntimeError):  # the process was forked inside the block, and the lock was renewed
            self._lock.release()


class Shared:
    """Context manager that all threads of the process share: the first thread enters it, and the last one leaves it.

    Arguments:
        make: function that creates the context manager.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._users, self._entered, self._lock = make, 0, ExitStack(), Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._entered.enter_context(self._make())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users = max(0, self._users - 1)  # 0 already, if the process was forked inside the block
                if not self._users:
                    self._entered.close()

    def forget(self) -> None:
        """Leave the context in a process that was just forked, in which no other thread exists."""
        self._users = 0
        self._entered.close()


_CHANGING = Lock()
"""Lock for changes of the two lists below, and of the modes of networks."""
_uses: list["_Use"] = []
"""Uses of networks inside `evaluating`, in the order in which they began."""
_trainings: list[tuple[int, set[nn.Module]]] = []
"""Trainings that run now: the thread of each training, and the modules of its network."""


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
            if any(_is_trained(module, use.thread) for module in modes):
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
                elif not same and not _is_trained(module, use.thread):
                    module.training = mode
            _uses[:] = [other for other in _uses if other is not use]


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Mark a model as being trained by this thread, so that `evaluating` refuses it in other threads."""
    mark = get_ident(), set(model.modules())
    with _CHANGING:
        _trainings.append(mark)
    try:
        yield
    finally:
        with _CHANGING:
            _trainings[:] = [other for other in _trainings if other is not mark]


def _is_trained(module: nn.Module, thread: int) -> bool:
    """Return whether a thread other than `thread` trains a module."""
    return any(other != thread and module in modules for other, modules in _trainings)


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_SILENCE = Shared(_ignored_warnings)


def without_warnings() -> AbstractContextManager[None]:
    """Ignore all warnings in the process, and restore the filters of warnings when the last thread has finished.

    `warnings.catch_warnings` is not enough: if several threads use it, they can leave the wrong filters behind.
    """
    own_filters = getattr(sys.flags, "context_aware_warnings", False)  # each thread has filters of its own
    return _ignored_warnings() if own_filters else _SILENCE()


def _forget_other_threads() -> None:
    """Forget what other threads were doing when this process was forked."""
    _SILENCE.forget()
    _uses.clear()
    _trainings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
