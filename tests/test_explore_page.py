"""The page of `torchcaps explore` in a real Chromium; `make test-browser` runs these tests."""

import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from conftest import COMMAND, ENVIRONMENT

pytest.importorskip("gradio", reason="needs the extra [browser]")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra [browser]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs Chromium", allow_module_level=True)

WEIGHTS = Path(__file__).parents[1] / "weights"
ANSWER = "document.querySelector('#message').innerText.includes('{}')"


def test_the_oldest_results_are_removed_from_memory(monkeypatch):
    import torch

    from torchcaps.explore import Explorer, page

    explorer = Explorer({"digits": WEIGHTS / "efficient-capsnet-mnist"})
    callbacks = page.Callbacks(explorer)
    (name,) = explorer.sources
    images = [torch.full((1, 28, 28), 20 * k, dtype=torch.uint8) for k in range(4)]
    size = callbacks._view(name, images[0], "self_attention", 1, 0.0).found.support.nbytes
    monkeypatch.setattr(page, "MOST_BYTES", 2 * size)
    for image in images:
        callbacks._view(name, image, "self_attention", 1, 0.0)
    assert [key[1] for key in callbacks.views] == [image.numpy().tobytes() for image in images[-2:]]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Serve the weights of the repository and a network with a decoder; return the address."""
    from torchcaps import CapsNet, Classifier, Preprocessing

    folder = tmp_path_factory.mktemp("explore")
    shutil.copytree(WEIGHTS, folder / "weights")
    network = CapsNet(convolution_channels=8, primary_types=2)
    Classifier(network, tuple("0123456789"), (1, 28, 28), Preprocessing()).save_pretrained(folder / "weights/untrained")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, "explore", "--port", str(port), "--no-browser"]
    server = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, address):
    """Open the page; at the end, check that it requested no other address and logged no error."""
    page = browser.new_page(viewport={"width": 1400, "height": 1200})
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.wait_for_selector("#drawing canvas")
    page.wait_for_function("document.querySelector('#rule input')?.value")
    page.wait_for_timeout(1_000)
    yield page
    hosts = {re.match(r"\w+://([^/]+)", url)[1] for url in asked if url.startswith(("http", "ws"))}
    assert hosts == {address.removeprefix("http://")}
    # Opening another address aborts requests; Gradio then logs an error. If a request fails, Chromium logs another one.
    assert [error for error in errors if "aborted" not in error and "Connection errored out" not in error] == []
    page.close()


@pytest.mark.parametrize(("header", "value", "status"), [("Origin", "http://example.org", 403), ("Host", "a.org", 400)])
def test_requests_from_other_pages_are_refused(address, header, value, status):
    request = urllib.request.Request(f"{address}/gradio_api/upload", data=b"x", headers={header: value})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == status
    refused.value.close()


def choose(page, dropdown: str, option: str) -> None:
    page.locator(f"#{dropdown} input").click()
    page.get_by_role("option", name=option, exact=True).click()


def draw_one(page) -> None:
    box = page.locator("#drawing canvas").first.bounding_box()
    across, down = box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.25
    page.mouse.move(across, down)
    page.mouse.down()
    for step in range(20):
        page.mouse.move(across, down + box["height"] * 0.025 * step)
    page.mouse.up()


def prediction_of(page, words: str) -> str:
    page.wait_for_function(ANSWER.format(words), timeout=20_000)
    return page.locator("#message").inner_text().splitlines()[-1]  # the lines above show Gradio's progress


def test_drawing_switching_the_rule_attacking_and_saving_work(page, tmp_path):
    draw_one(page)
    assert prediction_of(page, "(").startswith("1 (")
    page.wait_for_url(re.compile("network=digit-strips"))
    assert page.locator("#message").get_attribute("aria-live") == "polite"
    assert page.locator("#picture img").get_attribute("alt") == "Input of the network"
    assert len(re.findall(r"-?\d\.\d\d", page.locator("#numbers").inner_text())) == 16
    before = page.locator("#support img").get_attribute("src")
    page.locator("#pass input[type=number]").fill("1")
    page.locator("#pass input[type=number]").press("Enter")
    page.wait_for_function("src => document.querySelector('#support img').src !== src", arg=before)
    before = page.locator("#message").inner_text()
    choose(page, "rule", "uniform")
    page.wait_for_function("text => document.querySelector('#message').innerText !== text", arg=before)
    page.wait_for_url(re.compile("rule=uniform"))
    assert prediction_of(page, "(").startswith("1 (")
    with page.expect_download() as download:
        page.locator("#picture a[download]").click()
    download.value.save_as(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_url_restores_the_choices_on_the_page(page, address):
    page.goto(f"{address}/?network=matrix-capsnet-toys&rule=em&iterations=2&epsilon=0.1&category=truck")
    page.wait_for_function("document.querySelector('#network input')?.value === 'matrix-capsnet-toys'")
    page.wait_for_timeout(1_000)
    assert page.locator("#iterations input[type=number]").input_value() == "2"
    assert page.locator("#epsilon input[type=number]").input_value() == "0.1"
    page.get_by_role("tab", name="Toy").click()
    prediction_of(page, "(")
    before = page.locator("#picture img").get_attribute("src")
    page.locator("#azimuth input[type=number]").fill("10")
    page.locator("#azimuth input[type=number]").press("Enter")
    page.wait_for_function("src => document.querySelector('#picture img').src !== src", arg=before)
    page.goto(f"{address}/?network=<script>&rule=none&iterations=99&epsilon=nan&pass=-1&azimuth=7")
    page.wait_for_function("document.querySelector('#network input')?.value === 'digit-strips'")


def test_a_changed_pose_changes_the_reconstruction(page):
    choose(page, "network", "untrained")
    draw_one(page)
    prediction_of(page, "(")
    page.get_by_text("Change the pose").click()
    before = page.locator("#reconstruction img").get_attribute("src")
    page.locator("#pose-0 input[type=number]").fill("1")
    page.locator("#pose-0 input[type=number]").press("Enter")
    page.wait_for_function("src => document.querySelector('#reconstruction img').src !== src", arg=before)


def bad_files(folder: Path) -> dict[str, Path]:
    from PIL import Image

    files = {name: folder / f"{name}.png" for name in ("truncated", "text", "bomb", "dot")}
    files["cmyk"] = folder / "cmyk.jpg"
    Image.effect_noise((64, 64), 50).save(files["truncated"])
    files["truncated"].write_bytes(files["truncated"].read_bytes()[:600])
    files["text"].write_text("not an image")
    Image.new("1", (20_000, 20_000)).save(files["bomb"])
    Image.new("L", (1, 1), 255).save(files["dot"])
    Image.new("CMYK", (40, 40)).save(files["cmyk"])
    return files


def test_an_upload_that_cannot_be_read_causes_one_sentence(page, tmp_path):
    page.get_by_role("tab", name="Upload").click()
    for name, path in bad_files(tmp_path).items():
        page.locator("#file input[type=file]").set_input_files(path)
        said = prediction_of(page, "(" if name in ("dot", "cmyk") else f"{name}.png")
        assert "Traceback" not in said
        page.locator("#file").get_by_role("button", name=re.compile("clear|remove", re.I)).first.click()
        prediction_of(page, "Draw a digit, or upload an image.")


def test_results_are_computed_one_after_the_other():
    """Otherwise an older result could replace a newer one."""
    from torchcaps.explore import Explorer
    from torchcaps.explore.page import build

    queues = {}
    for function in build(Explorer({"one": Path()})).fns.values():
        queues.setdefault(function.name, set()).add(function.concurrency_id)
    assert queues["show"] == queues["show_best"] == queues["show_support"] == {"result"}
    assert queues["draw_pose"] == {"pose"}
