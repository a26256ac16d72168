"""What the commands share."""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchcaps.errors import BadInput, printable

DataDir = Annotated[Path, typer.Option("--data-dir", help="Folder that holds, or will hold, the datasets.")]


def print_table(columns: Iterable[str], rows: Iterable[Iterable[Any]], title: str = "") -> None:
    """Print rows as they are: no markup is read from them, and what cannot be printed is escaped."""
    table = Table(*columns, title=Text(printable(title)) if title else None)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    console = Console()
    Console(width=console.width if console.is_terminal else 140).print(table)


def run_folder(text: str) -> Path:
    """A folder as named on the command line, where an empty name is most likely an unset variable."""
    if not text.strip():
        raise typer.BadParameter("the name is empty; give the run folder's name.")
    return Path(text)


def setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadInput(f"--set {text}: give key=value, such as --set shift=0")
    return key, value


def keep_heap_warm() -> None:
    """On Linux, keep freed memory in the process: handing every large tensor back to the kernel costs training time."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 30)
        mallopt(trim_threshold, (1 << 31) - 1)


def writable(folder: Path, option: str = "--out") -> None:
    """Find out before hours of training whether a folder, named by this option, can be written to."""
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BadInput(f"{folder} cannot be written to ({error.strerror}): name another with {option}") from error
    if not existed:
        folder.rmdir()
