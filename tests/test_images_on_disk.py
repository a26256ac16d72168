"""Images that stay encoded on disk give the same pixels, splits, warnings and weights as images in memory."""

import io
import os
import re
import shutil
import signal
import subprocess
import time
import warnings
from dataclasses import replace
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import load_file
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from conftest import COMMAND, ENVIRONMENT, SMALL_CAPSNET, make_images
from image_trees import refused, save, tree
from test_run_folder import tiny
from torchcaps.batches import Batches, ImageBatches, default_workers
from torchcaps.data import (
    Images,
    ImagesOnDisk,
    Preprocessing,
    Variation,
    fingerprint,
    image_digests,
    load_splits,
    save_contact_sheet,
)
from torchcaps.data.fingerprint import difference
from torchcaps.data.image_file import decode, header
from torchcaps.environment import available_cores
from torchcaps.errors import BadInput, DataWarning
from torchcaps.evaluation import clear_errors
from torchcaps.seen_images import seen_in_training
from torchcaps.training import fit

pytestmark = pytest.mark.usefixtures("blank_pictures")
SPLITS = ("train", "validation", "test")


def odd_folder(root):
    """A folder with images of all modes and formats, also rotated, transparent, animated and 12-bit images."""
    random = np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in ("cat", "dog"):
        colour = Image.fromarray(random.integers(0, 256, (9, 14, 3), dtype=np.uint8))
        folder = root / name
        folder.mkdir(parents=True)
        colour.save(folder / "turned.jpg", exif=turned)
        colour.convert("CMYK").save(folder / "ink.jpg")
        colour.convert("P").save(folder / "palette.png")
        colour.convert("L").save(folder / "grey.png")
        colour.convert("1").save(folder / "black.png")
        colour.convert("LA").save(folder / "clear.png")
        colour.convert("RGBA").save(folder / "clear.webp")
        colour.save(folder / "turned.tif", exif=turned)
        colour.save(folder / "turned.png", exif=turned)
        Image.fromarray(random.integers(0, 4096, (9, 14), dtype=np.uint16)).save(folder / "deep.png")
        colour.save(folder / "moving.gif", save_all=True, append_images=[colour.rotate(180)])
    return root


def loaded(source, cache, **options):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        splits = load_splits(str(source), source, validation_fraction=0.3, cache=cache, **options)
    return splits, [str(warning.message) for warning in said]


@pytest.mark.parametrize(("channels", "resize"), [(None, "stretch"), (1, "crop"), (3, "pad")])
def test_images_on_disk_equal_images_in_memory(channels, resize, tmp_path):
    odd_folder(tmp_path)
    options = {"image_size": [8, 7], "channels": channels, "resize": resize}
    memory, said = loaded(tmp_path, "memory", **options)
    disk, said_again = loaded(tmp_path, "none", **options)
    assert said == said_again
    assert sum("changes the aspect ratio" in text for text in said) == (resize == "stretch")
    assert len(said) == 2 + (resize == "stretch")
    for name in SPLITS:
        one, other = getattr(memory, name), getattr(disk, name)
        assert isinstance(other, ImagesOnDisk)
        assert one.image_shape == other.image_shape == (channels or 3, 8, 7)
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.labels, other.labels)
        assert one.files.names == other.files.names
        assert np.array_equal(image_digests(one), image_digests(other))
        chosen = torch.tensor([2, 0])
        assert torch.equal(one.batch(chosen), other.subset(chosen).pixels)
        assert one.subset(chosen).files.names == other.subset(chosen).files.names


def test_sizes_and_channels_are_found_from_the_headers(tmp_path):
    tree(tmp_path, count=4)
    assert loaded(tmp_path, "none")[0].train.image_shape == (1, 6, 8)
    save(tmp_path / "cat" / "z.png", mode="RGB", colour=(1, 2, 3))
    assert loaded(tmp_path, "none")[0].test.image_shape == (3, 6, 8)
    other = save(tmp_path / "dog" / "z.png", size=(9, 6))
    for cache in ("none", "memory"):
        refused(lambda cache=cache: load_splits(str(tmp_path), tmp_path, cache=cache), other, "9×6", "image_size=N")


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "TIFF", "WEBP", "PNG"])
@pytest.mark.parametrize("xmp", [False, True])
def test_the_header_of_a_rotated_image_gives_the_size_of_the_decoded_image(kind, xmp):
    for orientation in range(1, 9):
        turned, text, stream = Image.Exif(), PngInfo(), io.BytesIO()
        turned[0x0112] = orientation
        packet = f'<rdf tiff:Orientation="{orientation}"/>'
        text.add_itxt("XML:com.adobe.xmp", packet, zip=orientation % 2 == 0)
        options = {"PNG": {"pnginfo": text}, "TIFF": {"tiffinfo": {700: packet.encode()}}}
        chosen = options.get(kind, {"xmp": packet.encode()}) if xmp else {"exif": turned}
        Image.new("L", (30, 20)).save(stream, kind, **chosen)
        found = header(stream.getvalue(), "photo")
        assert found == decode(stream.getvalue(), "photo", None, None)[1]
        assert (found.height, found.width) == ((30, 20) if orientation > 4 else (20, 30))


def test_the_header_of_a_png_gives_its_size_without_its_pixels(tmp_path):
    content = save(tmp_path / "photo.png", size=(30, 20)).read_bytes()
    found = header(content[: content.index(b"IDAT") + 6], "photo")
    assert (found.height, found.width) == (20, 30)


def test_cache_auto_loads_images_into_memory_if_they_fit(tmp_path, monkeypatch):
    tree(tmp_path, count=4)
    images, said = loaded(tmp_path, "auto")
    assert not isinstance(images.train, ImagesOnDisk)
    assert said == []
    images, said = loaded(tmp_path, "auto", processes=10**12)
    assert isinstance(images.train, ImagesOnDisk)
    assert re.search(
        "8 decoded images of .* would take .* GB of free memory, .* decoded again .* --cache memory", said[0]
    )
    # The images take 1,152 bytes in colour and 384 bytes in grey.
    monkeypatch.setattr("torchcaps.data.image_list.free_memory", lambda: 1_600)
    for options, on_disk in (({}, True), ({"channels": 1}, False), ({"image_size": (3, 4)}, False)):
        assert isinstance(loaded(tmp_path, "auto", **options)[0].train, ImagesOnDisk) == on_disk


def test_unknown_caches_and_named_datasets_are_refused(untyped, tmp_path):
    refused(
        lambda: load_splits("mnist-5k", tmp_path, cache="disk"), "cache must be one of auto, memory, none; got 'disk'"
    )
    refused(lambda: load_splits("mnist-5k", tmp_path, cache="none"), "cache must be auto or memory for mnist-5k")


def test_a_contact_sheet_decodes_only_what_it_draws(tmp_path):
    tree(tmp_path, count=8)
    images = loaded(tmp_path, "none")[0].train
    for name in images.files.names:
        if not name.endswith(("0.png", "1.png", "2.png", "3.png")):
            open(name, "w").close()
    first = images.subset([index for index, name in enumerate(images.files.names) if name.endswith(("0.png", "1.png"))])
    assert save_contact_sheet(first, tmp_path / "sheet.png") == "2 classes"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("data") / "photos", per_class=12)


def training(photos, out, *more):
    """Return the words of a command that trains on a folder of images."""
    options = ("--epochs", 2, "--batch-size", 4, "--out", out, *SMALL_CAPSNET)
    return "train", "capsnet-mnist", "--data", photos, *options, *more


def counts_seen(folder, images):
    return {name: int(seen.sum()) for name, seen in seen_in_training(folder, images).items()}


def test_training_from_disk_with_workers_gives_the_same_weights(photos, call, succeeds, tmp_path):
    folder = tmp_path / "memory"
    succeeds(*training(photos, folder))
    succeeds(*training(photos, tmp_path / "disk", "--cache", "none", "--workers", 2, "--epochs", 1))
    succeeds(*training(photos, tmp_path / "disk", "--resume"))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("memory", "disk")]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    for cache in ("memory", "none"):
        code, _, error = call("evaluate", folder, "--data", photos, "--cache", cache)
        assert code == 0
        assert "are among the" not in error
    shutil.copytree(photos, tmp_path / "again" / "train")
    shutil.copytree(photos, tmp_path / "again" / "test")
    for cache in ("memory", "none"):
        _, _, error = call("evaluate", folder, "--data", tmp_path / "again", "--cache", cache)
        assert re.search("18 training and 2 validation images of .* are among the 24 test images", error)


def test_images_that_cannot_be_compared_with_the_training_images_cause_a_warning(succeeds, photos, tmp_path):
    succeeds(*training(photos, tmp_path / "run", "--cache", "none"))
    test = loaded(photos, "memory")[0].test
    assert counts_seen(tmp_path / "run", test) == {"train": 0, "validation": 0}
    with pytest.warns(DataWarning, match="cannot be compared"):
        seen_in_training(tmp_path / "run", type(test)(test.pixels, test.labels, test.class_names))


def test_the_images_of_a_run_of_an_earlier_version_are_compared_by_their_pixels(photos):
    splits = loaded(photos, "memory")[0]
    before = fingerprint(splits, {"checksums": "pixels"})[0]
    del before["checksums"]  # as before it was saved
    assert difference(before, fingerprint(splits, before)[0]) is None


@pytest.mark.filterwarnings("ignore")
def test_only_some_of_the_splits_may_be_read_from_files(photos, tmp_path):
    splits = loaded(photos, "memory")[0]
    inverted = Images(255 - splits.validation.pixels, splits.validation.labels, splits.train.class_names)
    fit(tiny(1), replace(splits, validation=inverted), tmp_path / "run", logger="none")
    assert counts_seen(tmp_path / "run", splits.train) == {"train": len(splits.train), "validation": 0}


def test_images_on_disk_whose_files_were_used_in_training_are_found_without_decoding(succeeds, photos, tmp_path):
    succeeds(*training(photos, tmp_path / "run"))
    shutil.copytree(photos, tmp_path / "again" / "train")
    shutil.copytree(photos, tmp_path / "again" / "test")
    images = loaded(tmp_path / "again", "none")[0].test
    for index in np.flatnonzero(seen_in_training(tmp_path / "run", images)["train"]):
        Path(images.files.names[index]).unlink()
    assert counts_seen(tmp_path / "run", images) == {"train": 18, "validation": 2}


def test_a_validation_image_with_the_pixels_of_a_training_image_is_found_on_disk_too(succeeds, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "photos" / "train")
    shutil.copytree(photos, tmp_path / "photos" / "val")
    for path in (tmp_path / "photos" / "val").rglob("*.png"):
        Image.open(path).save(path.with_suffix(".bmp"))  # other files with the same pixels
        path.unlink()
    shutil.copytree(tmp_path / "photos" / "val", tmp_path / "photos" / "test")
    succeeds(*training(tmp_path / "photos", tmp_path / "run"))
    found = [
        seen_in_training(tmp_path / "run", loaded(tmp_path / "photos", cache)[0].validation)
        for cache in ("memory", "none")
    ]
    for seen in found:
        assert seen["train"].all()
        assert seen["validation"].all()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_with_damaged_pixels_is_named_in_one_line(call, photos, workers, tmp_path):
    shutil.copytree(photos, tmp_path / "photos")
    bad = tmp_path / "photos" / "left" / "003.png"
    bad.write_bytes(bad.read_bytes()[:-40])
    code, _, error = call(*training(tmp_path / "photos", tmp_path / "run", "--cache", "none", "--workers", workers))
    assert code == 2
    assert len(error.splitlines()) == 1, error
    assert re.match(rf"error: {bad} cannot be read as an image \(.*\): replace or remove it", error)


@pytest.mark.slow  # it depends on the moment at which PyTorch notices that a process has ended
def test_a_killed_worker_process_causes_an_error_of_one_line(photos, tmp_path):
    words = [*COMMAND, "train", "capsnet-mnist", "--data", str(photos), "--out", str(tmp_path / "run"), *SMALL_CAPSNET]
    words += ["--cache", "none", "--workers", "1", "--epochs", "500", "--batch-size", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=ENVIRONMENT, **pipes) as process:
        for line in process.stdout:
            if line.startswith("epoch 1/500"):
                break
        while process.poll() is None:
            for worker in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(worker), signal.SIGKILL)
            time.sleep(0.05)
        _, error = process.communicate()
    assert process.returncode == 2, error
    # PyTorch can print more before it, if the worker is killed at the moment when the training ends it.
    last = error.splitlines()[-1]
    assert re.fullmatch(r"error: a worker process .* use fewer --workers, and continue with --resume", last)


def one_image():
    return Images(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), ("cat",))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_connection_to_a_worker_process_names_the_worker_processes(workers, monkeypatch):
    def reset(_):
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_next_data", reset)
    monkeypatch.setattr(_SingleProcessDataLoaderIter, "_next_data", reset)
    batches = Batches(ImageBatches(one_image(), Preprocessing()), np.arange(1), 1, workers, torch.device("cpu"))
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    error, says = (
        (BadInput, "a worker process ended .*: use less") if workers else (ConnectionResetError, "^Connection")
    )
    with pytest.raises(error, match=says), clear_errors(trainer, "use less"):
        next(iter(batches))


class Unreachable(ImageBatches):
    """Batches whose images are on a server that does not answer."""

    def stored(self, indices):
        raise ConnectionRefusedError("storage.example refused the connection")


def test_an_error_of_the_dataset_stays_an_error_of_the_dataset():
    batches = Batches(Unreachable(one_image(), Preprocessing()), np.arange(1), 1, 1, torch.device("cpu"))
    with pytest.raises(ConnectionRefusedError, match=r"storage\.example refused"):
        next(iter(batches))


@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda *_: None])
def test_worker_processes_leave_the_signal_handler_alone(handler, monkeypatch):
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    batches = Batches(ImageBatches(one_image(), Preprocessing()), np.arange(1), 1, 1, torch.device("cpu"))
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        next(iter(batches))
        assert signal_handling._SIGCHLD_handler_set
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_worker_processes_need_enough_shared_memory():
    pixels = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1000, 1, 12_000, 12_000)
    images = Images(pixels, torch.zeros(1000, dtype=torch.int64), ("cat",))
    elastic = Variation(None, None, distances=torch.zeros(1, 1, 1, 1).expand(1000, 2, 6000, 3000))
    for preprocessing, variation, megabytes in (
        (Preprocessing(), None, "288,000"),
        (Preprocessing(crop=10_000, test_crops=2), None, "288,000"),
        (Preprocessing(elastic=1.0), elastic, "576,000"),
    ):
        dataset = ImageBatches(images, preprocessing, variation)
        batches = Batches(dataset, np.arange(1000), 1000, 1, torch.device("cpu"))
        says = rf"1 worker processes need {megabytes} MB in /dev/shm, but only .* use fewer --workers"
        with pytest.raises(BadInput, match=says):
            next(iter(batches))


def test_the_cores_are_divided_among_the_devices(photos):
    in_memory, on_disk = (loaded(photos, cache)[0].train for cache in ("memory", "none"))
    assert default_workers(in_memory) == 0
    assert default_workers(on_disk) == available_cores()
    assert default_workers(on_disk, devices=2) == max(1, available_cores() // 2)
    assert default_workers(on_disk, devices=1000) == 1


def test_images_are_shown_without_being_decoded(tmp_path):
    tree(tmp_path, count=10)
    images = load_splits(str(tmp_path), cache="none").train
    for path in map(Path, images.files.names):
        path.unlink()
    assert repr(images) == f"ImagesOnDisk({len(images)} images of 1×6×8, 2 classes)"


def test_class_names_in_another_unicode_form_are_reported():
    one, other = ({"class_names": ["Brot", name]} for name in ("K\xe4se", "Ka\u0308se"))
    assert difference(one, other) == (
        "the Unicode characters of the class names were 'Brot, K\\xe4se' and are now 'Brot, Ka\\u0308se'"
    )
