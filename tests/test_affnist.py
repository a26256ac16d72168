"""Random affine transforms of digits, and affNIST's files: valid files are read, and damaged files are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from idx_files import damaged
from torchcaps.data import Images
from torchcaps.errors import BadInput
from torchcaps.experiments.affnist import NETWORKS, SIZE, affine, affnist_test, draw, inside, moved, read_affnist, run
from torchcaps.experiments.study import Study
from torchcaps.recipes import create_recipe

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_affine_digits_stay_inside_the_image_and_keep_most_of_their_brightness():
    pixels = torch.zeros(50, 1, 28, 28, dtype=torch.uint8)
    pixels[:, :, 6:22, 8:20] = 200
    digits = Images(pixels, torch.zeros(50, dtype=torch.long), ("block",))
    changed = affine(digits, seed=0)
    assert changed.image_shape == (1, SIZE, SIZE)
    ink = changed.pixels.float().sum(dim=(1, 2, 3)) / pixels[0].float().sum()
    assert ink.min() > 0.6
    assert ink.max() < 1.5
    assert ink.std() > 0.05
    assert (affine(digits, seed=0).pixels == changed.pixels).all()
    still, anywhere = moved(digits, None), moved(digits, 0)
    assert (still.pixels[:, :, 12:28, 14:26] == 200).all()
    assert (anywhere.pixels.sum(dim=(1, 2, 3)) == still.pixels.sum(dim=(1, 2, 3))).all()
    assert not (anywhere.pixels == still.pixels).all()


def test_affine_digits_have_the_area_of_the_digits_on_average():
    """The factors of both axes are uniform in [0.8, 1.2], so the mean of their product is 1."""
    pixels = torch.zeros(1000, 1, 28, 28, dtype=torch.uint8)
    pixels[:, :, 8:20, 8:20] = 200
    changed = affine(Images(pixels, torch.zeros(1000, dtype=torch.long), ("block",)), seed=0).pixels
    ink = changed.float().sum(dim=(1, 2, 3)) / pixels[0].float().sum()
    assert ink.mean().item() == pytest.approx(1, abs=0.015)
    assert 0.63 < ink.min() < ink.max() < 1.45


def test_shifts_are_limited_so_that_no_ink_leaves_the_frame():
    pixels = torch.zeros(3, 1, 10, 10, dtype=torch.uint8)
    pixels[:2, :, 2:6, 1:10] = 1
    down, across = torch.tensor([6, -6, 6]), torch.tensor([6, -6, 6])
    offsets = torch.stack([down, across], dim=1)
    assert inside(pixels, offsets, 0).tolist() == [4, -2, 0]
    assert inside(pixels, offsets, 1).tolist() == [0, -1, 0]


def test_affnist_files_are_read_and_damaged_files_are_refused(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (1600, 6)).astype(np.uint8)
    labels = np.arange(6, dtype=np.uint8)
    folder = tmp_path / "affnist/test_batches"
    folder.mkdir(parents=True)
    assert affnist_test(tmp_path) is None
    for name, part in (("1.mat", slice(0, 4)), ("2.mat", slice(4, 6))):
        savemat(folder / name, {"affNISTdata": {"image": images[:, part], "label_int": labels[part]}})
    found = affnist_test(tmp_path)
    assert found is not None
    assert found.image_shape == (1, SIZE, SIZE)
    assert found.labels.tolist() == labels.tolist()
    assert (found.pixels.numpy()[3, 0] == images[:, 3].reshape(SIZE, SIZE)).all()
    whole = (folder / "1.mat").read_bytes()
    other = {"image": images[:, :2].astype(float), "label_int": labels[:2]}
    too_high = {"image": images[:, :2], "label_int": np.array([3, 12], np.uint8)}
    for number, content in enumerate((whole[:200], whole[:3000], b"", bytes(500), other, too_high, {"image": images})):
        path = tmp_path / f"{number}.mat"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            savemat(path, {"affNISTdata": content})
        with pytest.raises(BadInput, match=path.name):
            read_affnist(path)


@pytest.mark.filterwarnings("ignore")
def test_a_network_is_trained_again_only_if_the_affnist_files_have_changed(tmp_path, monkeypatch):
    def recipe_of(study, network, seed, *, data, shift, images, epochs):
        if network != "CNN":
            raise InterruptedError  # one network is enough
        recipe = create_recipe("pooled-cnn-mnist", {"epochs": "1", "precision": "float32"})
        return replace(recipe, data=data, shift=shift, seed=seed)

    monkeypatch.setattr(Study, "choose", lambda study, *sizes: (60, 20, 1))
    folder = tmp_path / "affnist/test_batches"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (1600, 10)).astype(np.uint8)
    runs = []
    for file in (1, 1, 2):
        savemat(folder / f"{file}.mat", {"affNISTdata": {"image": pixels, "label_int": np.full(10, file, np.uint8)}})
        study = Study("quick", "mnist-5k", 1, tmp_path, tmp_path / "runs")
        with pytest.raises(InterruptedError):
            run(study, recipe_of)
        runs += study.runs
    assert runs[0] == runs[1] != runs[2]
    assert all((run / "metrics.json").exists() for run in runs)


@pytest.mark.parametrize("size", [28, 40])
@pytest.mark.parametrize("count", [1, 39, 41])
def test_the_figure_shows_few_digits_and_their_real_size(count, size):
    digits = Images(torch.ones(count, 1, size, size, dtype=torch.uint8), torch.zeros(count, dtype=torch.long), ("a",))
    left, _ = draw({name: [(90.0, 80.0)] for name in NETWORKS}, digits).axes
    assert left.get_title() == f"affine digits, {size}×{size}"
    assert left.images[0].get_array().sum() == min(count, 40) * size**2


@given(st.booleans(), st.lists(st.tuples(st.integers(0, 5_300), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None, database=None)
def test_a_damaged_affnist_file_raises_bad_input_or_gives_digits(tmp_path_factory, compressed, changes):
    path = tmp_path_factory.getbasetemp() / "damaged.mat"
    images = np.arange(4_800).reshape(1_600, 3).astype(np.uint8)
    savemat(path, {"affNISTdata": {"image": images, "label_int": np.arange(3.0)}}, do_compression=compressed)
    path.write_bytes(damaged(path.read_bytes(), changes))
    try:
        found, said = read_affnist(path).image_shape, ""
    except BadInput as error:
        found, said = (1, SIZE, SIZE), str(error)
    assert found == (1, SIZE, SIZE)
    assert not said or (str(path) in said and "\n" not in said)


def test_a_file_that_crashes_scipy_or_declares_gigabytes_is_refused(tmp_path):
    images = np.ones((1_600, 3), np.uint8)
    savemat(tmp_path / "whole.mat", {"affNISTdata": {"image": images, "label_int": np.arange(3)}})
    whole = (tmp_path / "whole.mat").read_bytes()
    pixels = whole.index(b"\x02\0\0\0\xc0\x12\0\0")  # type and length of the images' numbers
    sides = whole.index(b"\x40\x06\0\0\x03\0\0\0")
    huge = b"\xff\xff\xff\x7f" * 2
    for number, (place, changed) in enumerate({pixels: b"\x5f", pixels + 4: huge[:4], sides: huge}.items()):
        path = tmp_path / f"{number}.mat"
        path.write_bytes(whole[:place] + changed + whole[place + len(changed) :])
        with pytest.raises(BadInput, match=path.name):
            read_affnist(path)
