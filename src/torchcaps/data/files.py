"""Files that may be gzipped, read no further than they promise; and files that are written whole or not at all."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

from torchcaps.errors import BadInput

CHUNK = 1 << 20


def content_of(path: Path, header_bytes: int, promised: Callable[[bytes], int]) -> bytearray:
    """The uncompressed bytes of a file, read no further than one chunk beyond what its header promises.

    Arguments:
        path: the file, raw or gzipped.
        header_bytes: number of bytes of the header.
        promised: those bytes → the length of the whole file.
    Raises:
        BadInput: the file cannot be read, its gzip stream is cut or corrupt, or `promised` refuses the header.
    """
    try:
        with _uncompressed(path) as stream:
            content = bytearray(stream.read(header_bytes))
            length = promised(bytes(content))
            while len(content) <= length and (chunk := stream.read(CHUNK)):
                content += chunk
            return content
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def uncompressed_md5(path: Path) -> str:
    """MD5 of what a file holds once uncompressed, in hexadecimal: the same for `x` and for any gzip of `x`.

    Raises:
        BadInput: the file cannot be read, or its gzip stream is cut or corrupt.
    """
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with _uncompressed(path) as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    return digest.hexdigest()


def md5_of(path: Path) -> str:
    """MD5 of a file as stored, in hexadecimal.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def present(path: Path) -> Path | None:
    """The file itself, or else the one with `.gz` behind its name, or None where neither exists."""
    return next((file for file in (path, path.with_name(path.name + ".gz")) if file.exists()), None)


@contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """A stream to write a file with: the file is whole or as it was, however the writing ends.

    Written beside it, flushed to disk, then renamed over it.

    Raises:
        BadInput: the file cannot be written, such as on a full disk.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BadInput(
            f"{path} could not be written ({error.strerror or error}): free some space or name another folder, then "
            "try again (a training with --resume); what the file held before is untouched"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with atomically(path) as stream:
        stream.write((json.dumps(content, indent=2) + "\n").encode())


def _uncompressed(path: Path) -> BufferedIOBase:
    with path.open("rb") as stream:
        gzipped = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if gzipped else path.open("rb")


def _unreadable(path: Path, error: Exception) -> BadInput:
    cure = "allow it to be read" if isinstance(error, PermissionError) else "delete it and get it again"
    return BadInput(f"{path}: cannot be read ({error or type(error).__name__}); {cure}")
