"""Downloads from a real server on this machine, which can break connections, ignore Range, or send wrong bytes."""

import gzip
import re
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from torchcaps.data import DATASETS, cifar, download, load_mnist, svhn
from torchcaps.data.download import complete, fetched
from torchcaps.data.files import md5_of
from torchcaps.data.mnist import FILES
from torchcaps.errors import BadInput

CONTENT = np.random.default_rng(0).bytes(300_000)
RIGHT = md5(CONTENT).hexdigest()
ZIPPED = gzip.compress(CONTENT, mtime=0)


class Handler(BaseHTTPRequestHandler):
    """Answer the request `/<manner>/<file>` with `server.files[file]`, in a manner such as `good` or `absent`."""

    def do_GET(self):
        _, manner, file = self.path.split("/")
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.server.asked.append((manner, int(asked[1]) if asked else 0))
        body = self.server.files.get(file)
        if manner == "absent" or body is None:
            self.send_error(404)
            return
        if manner == "lying":
            body = b"another file " + body
        begin = int(asked[1]) if asked and manner not in ("deaf", "deaf-cutting") else 0
        if begin >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if begin else 200)
        if begin:
            wrong = 1 if manner == "astray" else 0
            self.send_header("Content-Range", f"bytes {begin + wrong}-{len(body) - 1}/{len(body)}")
        rest = body[begin:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if "cutting" in manner and len(self.server.asked) <= self.server.cuts:
            rest = rest[: len(rest) // 2]
        if manner == "slow":
            time.sleep(1)
        self.wfile.write(rest)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.files = {"raw": CONTENT, "zipped.gz": ZIPPED}
        running.asked = []
        running.cuts = 1
        running.url = f"http://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def get(server, tmp_path):
    """Return a function that downloads `file`, with one mirror for each of the given manners, and returns its path."""

    def run(*manners: str, file: str = "raw", right: str = RIGHT):
        path = tmp_path / "data" / file
        download([f"{server.url}/{manner}/{file}" for manner in manners], path, right, progress=False)
        return path

    return run


def left(tmp_path) -> list[str]:
    return sorted(file.name for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.parametrize(("file", "stored"), [("raw", CONTENT), ("zipped.gz", ZIPPED)], ids=["raw", "zipped"])
def test_a_file_is_downloaded_completely(get, tmp_path, file, stored):
    assert get("good", file=file).read_bytes() == stored
    assert left(tmp_path) == [file]


def test_a_checksum_can_be_computed_from_the_compressed_file(server, tmp_path):
    right = md5(ZIPPED).hexdigest()
    download([f"{server.url}/good/zipped.gz"], tmp_path / "x.gz", right, progress=False, digest=md5_of)
    assert (tmp_path / "x.gz").read_bytes() == ZIPPED
    with pytest.raises(BadInput, match="wrong checksum"):
        download([f"{server.url}/good/zipped.gz"], tmp_path / "y.gz", right, progress=False)
    assert left(tmp_path) == ["x.gz"]


def test_missing_files_of_a_dataset_are_downloaded_as_they_are_stored(server, tmp_path):
    files = {"raw": RIGHT, "zipped.gz": md5(ZIPPED).hexdigest()}
    mirrors = [f"{server.url}/good/"]
    (tmp_path / "raw").write_bytes(b"of the user")
    for file, right in files.items():
        assert fetched(tmp_path / file, right, mirrors, progress=False, stored=True) == tmp_path / file
    assert server.asked == [("good", 0)]
    assert (tmp_path / "zipped.gz").read_bytes() == ZIPPED
    assert (tmp_path / "raw").read_bytes() == b"of the user"
    with pytest.raises(BadInput, match=f"raw: its md5 is .*, not {RIGHT}: delete it"):
        complete(tmp_path, files, mirrors, progress=False, stored=True)
    (tmp_path / "raw").unlink()
    complete(tmp_path, files, mirrors, progress=False, stored=True)
    assert left(tmp_path) == ["raw", "zipped.gz"]


@pytest.mark.parametrize(
    ("name", "files"),
    [("svhn", svhn.FILES), ("cifar-10", cifar.CIFAR10.files), ("cifar-100", cifar.CIFAR100.files)],
)
def test_the_named_files_of_a_dataset_are_downloaded(name, files, server, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "mirrors", [f"{server.url}/lying/"])
    file, _ = DATASETS[name].verify(tmp_path)[0]
    server.files[file] = CONTENT
    for use in (DATASETS[name].fetch, DATASETS[name].load):
        with pytest.raises(BadInput, match=f"the download of {file} failed .*/lying/{file}: wrong checksum"):
            use(tmp_path)
    assert left(tmp_path) == []


def test_a_progress_bar_goes_to_standard_error(server, tmp_path, capsys):
    download([f"{server.url}/good/raw"], tmp_path / "raw", RIGHT)
    captured = capsys.readouterr()
    assert "raw" in captured.err
    assert captured.out == ""


def test_a_download_continues_where_the_connection_broke(get, server):
    assert get("cutting").read_bytes() == CONTENT
    assert server.asked == [("cutting", 0), ("cutting", 150_000)]


def test_a_download_continues_a_partial_file_of_an_earlier_call(get, server, tmp_path):
    server.cuts = 99
    with pytest.raises(BadInput, match=r"cut off after 262,500 of 300,000 bytes"):
        get("cutting")
    assert left(tmp_path) == ["raw.part"]
    server.asked.clear()
    assert get("good").read_bytes() == CONTENT
    assert server.asked == [("good", 262_500)]
    assert left(tmp_path) == ["raw"]


def test_a_server_that_ignores_range_is_read_from_the_first_byte(get, server):
    assert get("deaf-cutting").read_bytes() == CONTENT
    assert server.asked == [("deaf-cutting", 0), ("deaf-cutting", 150_000)]


def test_a_partial_file_that_is_complete_is_used(get, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "raw.part").write_bytes(CONTENT)
    assert get("good").read_bytes() == CONTENT


@pytest.mark.parametrize("size", [10_000, 300_000, 400_000])
def test_a_partial_file_of_another_file_is_discarded_and_downloaded_again(get, tmp_path, size):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "raw.part").write_bytes(b"x" * size)
    assert get("good").read_bytes() == CONTENT
    assert left(tmp_path) == ["raw"]


def test_the_next_mirror_is_tried_if_a_mirror_fails(get, server, tmp_path):
    assert get("absent", "lying", "good").read_bytes() == CONTENT
    assert [manner for manner, _ in server.asked] == ["absent", "lying", "good"]
    assert left(tmp_path) == ["raw"]


def test_a_mirror_that_sends_another_range_is_not_used(get, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "raw.part").write_bytes(CONTENT[:1000])
    assert get("astray", "good").read_bytes() == CONTENT


def test_if_all_mirrors_fail_no_file_remains_and_the_message_says_why(get, tmp_path):
    with pytest.raises(BadInput) as caught:
        get("absent", "lying")
    message = str(caught.value)
    assert "\n" not in message
    wrong = md5(b"another file " + CONTENT).hexdigest()
    for part in (
        "raw",
        "/absent/raw: HTTP 404",
        "/lying/raw: wrong checksum",
        wrong,
        RIGHT,
        str(tmp_path / "data/raw"),
    ):
        assert part in message
    assert left(tmp_path) == []


def test_a_damaged_gzip_is_refused(get, server, tmp_path):
    server.files["zipped.gz"] = ZIPPED[:-20]
    with pytest.raises(BadInput, match="damaged gzip"):
        get("good", file="zipped.gz")
    assert left(tmp_path) == []


def test_an_existing_file_is_not_changed_if_the_download_fails(get, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "raw").write_bytes(b"old")
    with pytest.raises(BadInput):
        get("lying")
    assert (tmp_path / "data" / "raw").read_bytes() == b"old"


def test_an_unreachable_server_an_unusable_folder_and_other_addresses_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"refused.*connect to the network"):
        download(["http://127.0.0.1:9/raw"], tmp_path / "raw", RIGHT, progress=False)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written"):
        download(["http://127.0.0.1:9/raw"], tmp_path / "file" / "raw", RIGHT, progress=False)
    for url in ("file:///etc/passwd", "ftp://example.org/raw", "raw"):
        with pytest.raises(BadInput, match="https://"):
            download([url], tmp_path / "raw", RIGHT, progress=False)


def test_mnist_is_downloaded_only_if_it_is_missing(server, tmp_path, monkeypatch):
    files = {
        "train-images-idx3-ubyte": struct.pack(">4I", 0x803, 3, 28, 28) + bytes(3 * 784),
        "train-labels-idx1-ubyte": struct.pack(">2I", 0x801, 3) + bytes([5, 0, 9]),
        "t10k-images-idx3-ubyte": struct.pack(">4I", 0x803, 1, 28, 28) + bytes(784),
        "t10k-labels-idx1-ubyte": struct.pack(">2I", 0x801, 1) + bytes([7]),
    }
    server.files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    sums = {name: md5(content).hexdigest() for name, content in files.items()}
    mirrors = (f"{server.url}/absent/", f"{server.url}/good/")
    monkeypatch.setattr(FILES["mnist"], "mirrors", mirrors)
    monkeypatch.setattr(FILES["mnist"], "md5", sums)
    FILES["mnist"].fetch(tmp_path, progress=False)
    assert len(server.asked) == 8
    assert FILES["mnist"].verify(tmp_path) == [(name, "ok") for name in files]
    train, test = load_mnist(tmp_path)
    assert train.labels.tolist() == [5, 0, 9]
    assert test.image_shape == (1, 28, 28)
    assert len(server.asked) == 8


def test_a_file_that_two_threads_need_at_once_is_downloaded_once(server, tmp_path, capsys):
    path = tmp_path / "data" / "raw"
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(download, [f"{server.url}/slow/raw"], path, RIGHT) for _ in range(2)]:
            done.result()
    assert path.read_bytes() == CONTENT
    assert server.asked == [("slow", 0)]
    assert f"another process is downloading {path}: waiting for it" in capsys.readouterr().err
    assert left(tmp_path) == ["raw"]
