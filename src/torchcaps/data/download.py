"""Download a file from the first mirror whose copy has the right checksum."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from torchcaps.data.files import CHUNK, WITHOUT_LOCKS, checked, md5_of, present, uncompressed_md5, unwritable, verified
from torchcaps.errors import BadInput

TIMEOUT = 30
"""A connection is given up after this many seconds without data."""
ATTEMPTS = 3
"""Largest number of connections per mirror; each one continues where the previous connection was cut off."""


def download(
    urls: Sequence[str],
    path: Path,
    md5: str,
    progress: bool = True,
    digest: Callable[[Path], str] = uncompressed_md5,
) -> None:
    """Download a file to `path` from the first mirror whose copy has the right checksum.

    Data is written to a partial file, `path` + ".part". If a connection was cut off, in this call or an earlier one, an
    HTTP Range request continues where the partial file ends. The partial file is renamed to `path` only if its checksum
    is right, so `path` is always complete. A partial file with a wrong checksum is deleted. If another process is
    downloading the same file, this process waits for it.

    Arguments:
        urls: mirrors of the file, http or https, tried in order.
        path: file to write; its folder is created if missing.
        md5: expected checksum, in hexadecimal. With the default `digest`, it is the MD5 of the uncompressed
            content, even if a mirror serves the file gzipped.
        progress: draw a progress bar on standard error.
        digest: function that computes the checksum of the downloaded file, to compare with `md5`.

    Raises:
        BadInput: a URL is neither http nor https, every mirror failed (the message gives the reason for each), or
            `path` cannot be written.

    Example:
        >>> urls = ["https://example.org/labels.gz", "https://example.com/labels.gz"]
        >>> download(urls, Path("labels.gz"), "a25bea736e30d166cdddb491f175f624")  # doctest: +SKIP
    """
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https"):
            raise BadInput(f"urls contains {url!r}: give web addresses that start with https:// or http://")
    part = path.with_name(path.name + ".part")
    reasons = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _downloading(path, progress) as waited:
            if waited and path.exists() and digest(path) == md5:
                return
            for url in urls:
                reason = _try_mirror(url, part, md5, progress, digest)
                if reason is None:
                    os.replace(part, path)
                    return
                reasons.append(f"{url}: {reason}")
    except OSError as error:
        raise unwritable(path, error) from error
    raise BadInput(
        f"the download of {path.name} failed ({'; '.join(reasons)}): connect to the network and try again, or copy the"
        f" file to {path} yourself"
    )


@contextmanager
def _downloading(path: Path, progress: bool) -> Iterator[bool]:
    """Wait until no other process downloads the file. The result is whether this process has waited.

    On a file system without locks, this process does not wait.
    """
    from filelock import FileLock, Timeout

    file, waited = path.with_name(f"{path.name}.lock"), False
    lock = FileLock(file, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waited = True
            if progress:
                print(f"another process is downloading {path}: waiting for it", file=sys.stderr, flush=True)
            lock.acquire()
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    try:
        yield waited
    finally:
        with suppress(OSError):  # Windows cannot delete an open file; filelock deletes it there
            file.unlink()  # a process that waits for this lock finds the complete file
        lock.release()


def fetched(path: Path, md5: str, mirrors: Sequence[str], progress: bool = True, stored: bool = False) -> Path:
    """Return the path of a file, raw or gzipped; download it if both are missing.

    Arguments:
        path: the file, without `.gz`.
        md5: MD5 of its uncompressed content, which is checked only after a download.
        mirrors: URLs of folders that serve the file, with `.gz` appended to its name.
        progress: draw a progress bar on standard error.
        stored: the mirrors serve the file under its own name, and the MD5 is that of the file as stored.

    Raises:
        BadInput: the file cannot be downloaded or written.
    """
    found = present(path, stored)
    if found is None:
        found = path if stored else path.with_name(f"{path.name}.gz")
        digest = md5_of if stored else uncompressed_md5
        download([f"{mirror}{found.name}" for mirror in mirrors], found, md5, progress, digest)
    return found


def complete(
    folder: Path, md5: Mapping[str, str], mirrors: Sequence[str], progress: bool = True, stored: bool = False
) -> None:
    """Download the missing files of a dataset, and check the others.

    Arguments:
        folder: folder of the files.
        md5: MD5 of the uncompressed content of each file, keyed by file name.
        mirrors: URLs of folders that serve each file, with `.gz` appended to its name.
        progress: draw a progress bar on standard error.
        stored: as for `fetched`.

    Raises:
        BadInput: a file has a wrong checksum, cannot be read, or cannot be downloaded or written.
    """
    for file, right in md5.items():
        path = present(folder / file, stored)
        if path is None:
            fetched(folder / file, right, mirrors, progress, stored)
        elif (problem := checked(path, right, stored=stored)) != "ok":
            raise BadInput(f"{path}: {problem}")


@dataclass
class RemoteFiles:
    """Files of a dataset that can be downloaded.

    Arguments:
        folder: name of the files' folder in the data folder.
        mirrors: URLs of folders that serve each file, with `.gz` appended to its name.
        md5: MD5 of the uncompressed content of each file, keyed by file name.
        stored: as for `fetched`.
    """

    folder: str
    mirrors: Sequence[str]
    md5: dict[str, str]
    stored: bool = False

    def path(self, data_dir: Path, file: str) -> Path:
        """Return the path of a file, raw or gzipped; download it if both are missing."""
        return fetched(data_dir / self.folder / file, self.md5[file], self.mirrors, stored=self.stored)

    def fetch(self, data_dir: Path, progress: bool = True) -> None:
        """Download the missing files, and check the others; see `complete`."""
        complete(data_dir / self.folder, self.md5, self.mirrors, progress, self.stored)

    def verify(self, data_dir: Path) -> list[tuple[str, str]]:
        """Check the files without downloading them; returns `(file, "ok" or the problem)` for each file."""
        return verified(data_dir / self.folder, self.md5, stored=self.stored)


def _try_mirror(url: str, part: Path, md5: str, progress: bool, digest: Callable[[Path], str]) -> str | None:
    """Download to `part` from one mirror; returns None if the checksum is right, else the reason for the failure."""
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
            return reason  # all bytes came from this mirror in one go, so another attempt would give the same bytes
    return reason


def _receive(url: str, part: Path, begun: int, progress: bool) -> bool:
    """Download to `part` until the mirror has sent everything; returns whether earlier bytes of `part` were kept."""
    request = Request(url, headers={"User-Agent": "torchcaps", **({"Range": f"bytes={begun}-"} if begun else {})})
    try:
        response: HTTPResponse = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != 416 or not begun:
            raise
        error.close()
        return True  # `part` may be complete already: the caller verifies its checksum
    with response:
        resumed = response.status == 206
        sent = response.headers.get("Content-Range", "")
        if resumed and not sent.startswith(f"bytes {begun}-"):
            raise HTTPException(f"the server sent the range {sent!r}, but 'bytes={begun}-' was requested")
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
        return "damaged gzip file"
    return None if found == md5 else f"wrong checksum: md5 {found}, not {md5}"


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
