"""Read files that may be gzipped, and write files either completely or not at all."""

import errno
import gzip
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torchcaps.errors import BadInput, unreadable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHUNK = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers (errno) of a full disk, of an exceeded disk quota, and of a file that is too large."""

WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers (errno) of a file system without locks."""
PART = r"\.\d+(-[0-9a-f]+)?\.part"
"""Pattern of the end of the names of temporary files of `atomically`. Earlier versions wrote no hexadecimal number."""


def content_of(path: Path, header_bytes: int, promised: Callable[[bytes], int], md5: str | None = None) -> bytearray:
    """Read the uncompressed content of a file, and stop if the content is longer than the file's header declares.

    Arguments:
        path: the file, raw or gzipped.
        header_bytes: length of the header in bytes.
        promised: function that takes the header and returns the length in bytes that it declares for the uncompressed
            file, including the header.
        md5: the right MD5 of the content; None if it is not known.

    Raises:
        BadInput: the file cannot be read, its gzip stream is truncated or corrupt, `promised` rejects the header, or
            the content has another MD5.
    """
    try:
        with _uncompressed(path) as stream:
            content = bytearray(stream.read(header_bytes))
            length = promised(bytes(content))
            while len(content) <= length and (chunk := stream.read(CHUNK)):
                content += chunk
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    _check_content(path, content, md5)
    return content


def uncompressed_md5(path: Path) -> str:
    """Compute the MD5 of the uncompressed content of a file, in hexadecimal.

    A file and its gzipped copy have the same checksum.

    Arguments:
        path: the file, raw or gzipped.

    Raises:
        BadInput: the file cannot be read, or its gzip stream is truncated or corrupt.

    Example:
        >>> uncompressed_md5(Path("train-labels-idx1-ubyte.gz"))  # doctest: +SKIP
        'a25bea736e30d166cdddb491f175f624'
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
    """Compute the MD5 of a file as stored, in hexadecimal.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def content_as_stored(path: Path, md5: str | None = None) -> bytes:
    """Read a file as stored.

    Arguments:
        path: the file.
        md5: the right MD5 of the file; None if it is not known.

    Raises:
        BadInput: the file cannot be read, or has another MD5.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    _check_content(path, content, md5, stored=True)
    return content


def _check_content(path: Path, content: bytes | bytearray, md5: str | None, stored: bool = False) -> None:
    """Raise `BadInput` if the content of a file, as stored or uncompressed, has another MD5 than ``md5``, if given."""
    if md5 is not None:
        problem = _compared(hashlib.md5(content, usedforsecurity=False).hexdigest(), md5, stored=stored)
        if problem != "ok":
            raise BadInput(f"{path}: {problem}")


def present(path: Path, stored: bool = False) -> Path | None:
    """Return `path` if it exists, else `path` with `.gz` appended if that exists, else None.

    With ``stored``, a file with `.gz` appended is not considered.
    """
    candidates = (path,) if stored else (path, path.with_name(path.name + ".gz"))
    return next((file for file in candidates if file.exists()), None)


def verified(folder: Path, md5: Mapping[str, str], cure: str = "", stored: bool = False) -> list[tuple[str, str]]:
    """Check the files of a dataset; returns `(file, "ok" or the problem)` for each file.

    Arguments:
        folder: folder of the files.
        md5: MD5 of each file, keyed by file name.
        cure: as for `checked`; if given, it is also the cure for a missing file.
        stored: whether the MD5 are those of the files as stored. Otherwise, they are those of the uncompressed content
            of the files, raw or gzipped.
    """
    found = []
    for file, right in md5.items():
        path = present(folder / file, stored)
        try:
            problem = checked(path, right, cure, stored) if path else f"missing from {folder}{cure and f': {cure}'}"
        except BadInput as error:
            problem = str(error).removeprefix(f"{path} ")
        found.append((file, problem))
    return found


def checked(path: Path, md5: str, cure: str = "", stored: bool = False) -> str:
    """Return "ok" if a file has this MD5, otherwise the problem.

    Arguments:
        path: the file, raw or gzipped.
        md5: the right MD5.
        cure: what the user can do about a wrong file; by default, delete it to download it again.
        stored: whether the MD5 is that of the file as stored, instead of its uncompressed content.
    """
    return _compared(md5_of(path) if stored else uncompressed_md5(path), md5, cure, stored)


def _compared(seen: str, right: str, cure: str = "", stored: bool = False) -> str:
    if seen == right:
        return "ok"
    what = "its md5" if stored else "the md5 of its content"
    return f"{what} is {seen}, not {right}: {cure or 'delete it to download it again'}"


@contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a stream that replaces the file at `path` either completely or not at all.

    The data is written to a temporary file in the same folder, flushed to disk, and renamed to `path`.

    Raises:
        BadInput: the path is a folder or a device, or the file cannot be written, for example because the disk is full.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    if path.exists() and not path.is_file():
        raise BadInput(f"{path} is a folder or a device: give the name of a file")
    try:
        with part.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BadInput(
            f"{path} could not be written ({error.strerror or error}): free disk space or choose another folder, then "
            "try again (to continue a training run, add --resume); if the file existed before, it is unchanged"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_picture(path: Path, figure: "Figure") -> None:
    """Write a figure of matplotlib as a PNG file, either completely or not at all."""
    with atomically(path) as stream:
        figure.savefig(stream, format="png", dpi=120)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file either completely or not at all."""
    with atomically(path) as stream:
        stream.write(as_json(content))


def read_json(path: Path, cure: str) -> Any:
    """Read a JSON file.

    Arguments:
        path: the file.
        cure: what the user can do if the content is invalid.

    Raises:
        BadInput: the file cannot be read or is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error, cure) from error


def as_json(content: Any) -> bytes:
    """Return the bytes of the JSON file that `write_json` writes."""
    return (json.dumps(content, indent=2) + "\n").encode()


def _uncompressed(path: Path) -> BufferedIOBase:
    with path.open("rb") as stream:
        gzipped = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if gzipped else path.open("rb")


def expanded(path: str | Path) -> Path:
    """Replace ``~`` by the home folder. A path such as ``~name`` is unchanged if there is no user of this name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def check_length(name: str, content: bytes | bytearray, promised: int) -> None:
    """Check that a file has as many bytes as its header declares.

    Raises:
        BadInput: `content` is longer or shorter.
    """
    if len(content) != promised:
        much = "more" if len(content) > promised else f"{len(content):,} bytes"
        raise BadInput(f"{name} declares {promised:,} bytes, but the file has {much}: download it again")


def unwritable(path: Path, error: OSError) -> BadInput:
    """Return the error for a file or folder in the data folder that cannot be written."""
    return BadInput(f"{path} cannot be written ({error}): use another folder with --data-dir (in Python, data_dir)")


def _unreadable(path: Path, error: Exception) -> BadInput:
    cure = (
        "change its permissions so that you can read it"
        if isinstance(error, PermissionError)
        else "delete it and download it again"
    )
    return BadInput(f"{path} cannot be read ({error or type(error).__name__}): {cure}")
