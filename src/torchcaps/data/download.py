"""Fetch one file from the first mirror that serves the right bytes."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from torchcaps.data.files import CHUNK, uncompressed_md5
from torchcaps.errors import BadInput

TIMEOUT = 30
"""Seconds without a byte before a mirror is given up."""
ATTEMPTS = 3
"""Connections to one mirror; each goes on where the last was cut."""


def download(
    urls: Sequence[str],
    path: Path,
    md5: str,
    progress: bool = True,
    digest: Callable[[Path], str] = uncompressed_md5,
) -> None:
    """Download `path` from the first mirror that serves it whole.

    The bytes gather in `path` + ".part", resumed with an HTTP Range request where a connection was cut, in this call or
    in an earlier one. Only when the checksum holds are they flushed to disk and renamed, so `path` is never half
    written. A wrong checksum deletes the part. One process at a time may fetch the same file.

    Arguments:
        urls: mirrors of the same file, http or https, tried in order.
        path: where the file shall lie; its folder is made when absent.
        md5: of the uncompressed content, in hexadecimal, whether the mirrors serve it gzipped or raw.
        progress: draw a progress bar on standard error.
        digest: file → what must be `md5`, where it is not that of the uncompressed content.
    Raises:
        BadInput: every mirror failed (the message gives each one's reason), or `path` cannot be written.
    Example:
        >>> urls = ["https://example.org/labels.gz", "https://example.com/labels.gz"]
        >>> download(urls, Path("labels.gz"), "a25bea736e30d166cdddb491f175f624")  # doctest: +SKIP
    """
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https"):
            raise BadInput(f"{url}: not a web address; give one that begins with https:// or http://")
    part = path.with_name(path.name + ".part")
    reasons = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for url in urls:
            reason = _try_mirror(url, part, md5, progress, digest)
            if reason is None:
                os.replace(part, path)
                return
            reasons.append(f"{url}: {reason}")
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error}); give a data folder you may write to") from error
    raise BadInput(
        f"{path.name}: no mirror served it ({'; '.join(reasons)}); connect to the network and try again, or place the"
        f" file yourself at {path}"
    )


def _try_mirror(url: str, part: Path, md5: str, progress: bool, digest: Callable[[Path], str]) -> str | None:
    """Fill `part` from one mirror; the reason why not, or None where the checksum holds."""
    reason = "no attempt"
    for _ in range(ATTEMPTS):
        begun = part.stat().st_size if part.exists() else 0
        try:
            resumed = _receive(url, part, begun, progress)
        except HTTPError as error:
            error.close()
            return f"HTTP {error.code} {error.reason}"
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            if part.exists() and part.stat().st_size > begun:
                continue
            return reason
        fault = _fault(part, md5, digest)
        if fault is None:
            return None
        part.unlink()
        reason = fault
        if not resumed:
            return reason  # the mirror's own bytes are wrong; a part begun elsewhere deserves a fresh start here
    return reason


def _receive(url: str, part: Path, begun: int, progress: bool) -> bool:
    """Append to (or restart) `part` until the mirror has sent all; whether the earlier bytes were kept."""
    request = Request(url, headers={"User-Agent": "torchcaps", **({"Range": f"bytes={begun}-"} if begun else {})})
    try:
        response: HTTPResponse = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != 416 or not begun:
            raise
        error.close()
        return True  # nothing lies beyond what we have: let the checksum judge it
    with response:
        resumed = response.status == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {begun}-"):
            raise HTTPException(f"sent {response.headers.get('Content-Range')} when asked for the bytes from {begun}")
        received = begun if resumed else 0
        total = None if response.length is None else received + response.length
        with part.open("ab" if resumed else "wb") as file, _bar(part.stem, total, progress) as bar:
            while chunk := response.read1(CHUNK):
                file.write(chunk)
                received += len(chunk)
                bar(received)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and received < total:
        raise HTTPException(f"cut off after {received:,} of {total:,} bytes")
    return resumed


def _fault(part: Path, md5: str, digest: Callable[[Path], str]) -> str | None:
    try:
        found = digest(part)
    except BadInput:
        return "the file it serves is a damaged gzip"
    return None if found == md5 else f"wrong checksum, md5 {found} where {md5} is right"


@contextmanager
def _bar(name: str, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown or find_spec("rich") is None:
        yield lambda received: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda received: bar.update(task, completed=received)
