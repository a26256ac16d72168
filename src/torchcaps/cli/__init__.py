"""Entry point of the command `torchcaps`. The module `torchcaps.cli.commands` is imported only when `main` runs."""

import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from functools import partial
from types import FrameType
from typing import Any

from torchcaps.environment import check_ranks, first_process
from torchcaps.errors import BadInput, DataWarning, printable

QUIET_SECONDS = 10.0
"""Seconds after a Ctrl-C during which each further Ctrl-C is ignored."""
LONGEST = 2_000
"""Largest number of characters of a printed error or warning. Longer texts are shortened in the middle."""

MISSING_GLYPH = r"Glyph .* missing from font\(s\) (.*)\."
"""Warning of matplotlib, once per character."""


LONGEST_WAIT = 2.0
"""Seconds for which a signal waits until another thread has been woken up. It may be blocked, for example by a disk."""


class Interrupted(Exception):
    """The user pressed Ctrl-C, or the process received SIGTERM. The message says how to continue."""


def main() -> None:
    """Run `torchcaps` with the arguments in `sys.argv`.

    On bad input, prints one line to standard error and exits with code 2. On Ctrl-C or SIGTERM, prints one line to
    standard error and exits with code 130 or 143 (128 plus the number of the signal).
    """
    interrupt, in_main_thread = _OneInterrupt(), threading.current_thread() is threading.main_thread()
    handles_interrupt = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    handles_sigterm = in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if handles_interrupt:
        signal.signal(signal.SIGINT, interrupt)
    if handles_sigterm:
        signal.signal(signal.SIGTERM, interrupt)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    warnings.filterwarnings("ignore", module=r"(lightning|torch|tensorboard|requests)(\.|$)")
    warnings.filterwarnings("always", MISSING_GLYPH)
    warnings.filterwarnings("always" if first_process() else "ignore", category=DataWarning)
    nondeterministic = ".*(deterministic implementation|non-deterministic|not deterministic)"
    warnings.filterwarnings("once" if first_process() else "ignore", nondeterministic)
    fabric = "lightning.fabric.utilities"
    names = (
        "lightning.pytorch",
        "lightning.pytorch.accelerators.cuda",
        "lightning.pytorch.utilities.rank_zero",
        f"{fabric}.rank_zero",
        f"{fabric}.distributed",
    )
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    show_warning, show_thread = warnings.showwarning, threading.excepthook
    warnings.showwarning, threading.excepthook = partial(_warn, set()), _thread_failed
    try:
        code = _run(interrupt)
        message = "interrupted" if code == 130 else ""  # typer returns 130 on Ctrl-C
    except KeyboardInterrupt:
        message = "interrupted"
    except Interrupted as interrupted:
        message = f"interrupted: {interrupted}"
    finally:
        warnings.showwarning, threading.excepthook = show_warning, show_thread
        if handles_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN if interrupt.seen else signal.default_int_handler)
        if handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if message:
        code = 128 + interrupt.number
        print(_one_line(message), file=sys.stderr)
    raise SystemExit(code)


def _run(interrupt: "_OneInterrupt") -> int:
    try:
        check_ranks()
        from torchcaps.cli.commands import app

        return app(standalone_mode=False) or 0
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "lightning", "torchmetrics", "matplotlib", "tensorboard"):
            raise
        return _refuse(f"the command torchcaps needs {error.name}: pip install 'torchcaps[train]'")
    except Interrupted:
        raise
    except Exception as error:
        if interrupt.seen:  # torch.onnx converts a KeyboardInterrupt to an error of its own
            raise KeyboardInterrupt from error
        unusable_kernels = isinstance(error, ImportError) and error.name == "torchcaps.kernels._cpu"
        if unusable_kernels or isinstance(error, BadInput | OSError):
            return _refuse(str(error))
        if isinstance(error, RuntimeError) and "operator torchvision::" in str(error):  # torchmetrics imports it
            return _refuse(
                f"torchvision does not fit this version of torch ({error}): install both again, or uninstall it"
            )
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            return 2
        said = _complaint(error)
        if "; got " in said:
            return _refuse(said)
        said = said if said.endswith((".", "?")) else f"{said}."
        return _refuse(f"{said} See `torchcaps --help` and `torchcaps COMMAND --help`")


def _complaint(error: Any) -> str:
    """Return the message of typer about a wrong argument, with the value that was given."""
    said = re.sub(r"^Invalid value for '(\S+)': (?=must)", r"\1 ", error.format_message())
    if not hasattr(error.__cause__, "errors"):
        return said
    found = error.__cause__.errors()[0]  # pydantic checks the types
    allowed = found["msg"].removeprefix("Input should be ").partition(",")[0]
    allowed = allowed.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    allowed = allowed.replace("a valid integer", "an integer").replace("a valid number", "a number")
    given = found["input"]
    if allowed.startswith(("at least", "at most")) and re.fullmatch(r"[+-]?\d+", str(given)):
        allowed, given = f"an integer of {allowed}", int(given)
    return f"{error.param.opts[0]} must be {allowed}; got {given!r}"


def _refuse(message: str) -> int:
    sys.stdout.flush()
    print(f"error: {_one_line(message)}", file=sys.stderr)
    return 2


def _one_line(message: str) -> str:
    """Escape control characters, which a terminal would execute, and omit the middle of a very long message."""
    text = printable(" ".join(message.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


class _OneInterrupt:
    """Handler of SIGINT (Ctrl-C) and SIGTERM.

    The first signal stops the command. Further signals are ignored for `QUIET_SECONDS`, so that cleanup can finish.
    After this time, a signal takes effect again: the command may still run, because a library can swallow the exception
    of the first signal.

    Python ignores exceptions that are raised in a ``__del__`` method, such as that of a data loader, and exceptions
    that are raised while a process is forked. The handler waits until such a function ends. It also waits, for at most
    `LONGEST_WAIT`, until an item has been put into a queue, because its reader might not wake up otherwise.
    """

    def __init__(self) -> None:
        self.seen = False
        self.last = 0.0
        self.first = 0.0
        self.number: int = signal.SIGINT
        self.process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.seen and now - self.last < QUIET_SECONDS:
            return
        self.first = self.first or now
        while frame is not None and os.getpid() == self.process:  # a worker process always has the frame of its fork
            function = os.path.basename(frame.f_code.co_filename), frame.f_code.co_name
            wakes_thread = function in (("threading.py", "notify"), ("queue.py", "put"))
            must_end = function[1] == "__del__" or function == ("popen_fork.py", "_launch")
            if must_end or (wakes_thread and now - self.first < LONGEST_WAIT):
                threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
                return
            frame = frame.f_back
        self.seen, self.last, self.first, self.number = True, now, 0.0, number
        raise KeyboardInterrupt


def _warn(printed: set[str], message: Warning | str, category: type[Warning], *_: Any) -> None:
    """Print a warning in one line, unless this command has already printed it."""
    if str(message) in printed:
        return
    printed.add(str(message))
    sys.stdout.flush()
    if missing := re.search(MISSING_GLYPH, str(message)):
        warnings.filterwarnings("ignore", MISSING_GLYPH)
        message = (
            f"the font {missing[1]} lacks some characters, and pictures show boxes instead. Name an installed font "
            "that has them in a file matplotlibrc in this folder: font.family: DejaVu Sans, Noto Sans CJK JP"
        )
    print(f"warning: {_one_line(str(message))}", file=sys.stderr)


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Print the exception of a thread, except an OSError, which the thread that waits for this thread raises again."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)
