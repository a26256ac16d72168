"""Images in memory, the datasets with a name, and the splits."""

import gzip
import os
from hashlib import md5
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from idx_files import idx, refused
from torchcaps import BadInput
from torchcaps.data import (
    DATASETS,
    Dataset,
    Images,
    Splits,
    cut,
    cut_by,
    load_idx_pair,
    load_mnist,
    load_mnist_5k,
    load_splits,
    save_contact_sheet,
    shift,
    shift_offsets,
)
from torchcaps.data.mnist import FILES
from torchcaps.errors import DataWarning


def numbered(labels: list[int], classes: int) -> Images:
    """Images of one pixel; the value of the pixel is the index of the image."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).reshape(-1, 1, 1, 1)
    return Images(pixels, torch.tensor(labels), tuple(f"class {i}" for i in range(classes)))


def indices(images: Images) -> list[int]:
    return images.pixels.flatten().tolist()


# Images


def test_images_have_a_length_a_shape_and_subsets():
    images = Images(torch.zeros(3, 2, 4, 5, dtype=torch.uint8), torch.tensor([0, 1, 1]), ("a", "b"))
    assert len(images) == 3
    assert images.image_shape == (2, 4, 5)
    assert images.subset([2, 0]).labels.tolist() == [1, 0]
    assert images.subset(images.labels == 1).labels.tolist() == [1, 1]
    assert len(images.subset([])) == 0
    with pytest.raises(BadInput, match=r"a mask must be bool \[3\]; got .*: give one value per image"):
        images.subset(torch.tensor([True, False]))


def test_splits_with_different_classes_are_refused():
    images = Images(torch.zeros(2, 1, 4, 5, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    swapped = Images(images.pixels, images.labels, ("b", "a"))
    for splits, name in (((images, images, swapped), "test"), ((images, swapped, images), "validation")):
        with pytest.raises(
            BadInput, match=rf"class names of the {name} images are \('b', 'a'\), but those of the train"
        ):
            Splits(*splits)


def test_images_whose_pixels_labels_and_class_names_do_not_match_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for a user, without run-time type checks
    pixels, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    with refused("pixels has 2 images, but labels has 1"):
        Images(pixels, labels[:1], ("a", "b"))
    for wrong in ([0, 2], [-1, 0]):
        with refused("2 class names"):
            Images(pixels, torch.tensor(wrong), ("a", "b"))
    with refused("float32", "uint8"):
        Images(pixels.float(), labels, ("a", "b"))
    with refused("[2, 4, 4]"):
        Images(pixels[:, 0], labels, ("a", "b"))
    with refused("int64"):
        Images(pixels, labels.int(), ("a", "b"))


@pytest.mark.parametrize("name", ["$a_$", r"$\frac$", "two\nlines", "n" * 300])
def test_a_contact_sheet_draws_each_class_in_its_own_row_whatever_its_name(name, tmp_path):
    pixels = torch.tensor([10, 10, 90, 90, 200]).to(torch.uint8).reshape(5, 1, 1, 1).expand(5, 2, 30, 150).contiguous()
    images = Images(pixels, torch.tensor([0, 0, 1, 1, 2]), ("a", name, "c"))
    assert save_contact_sheet(images, tmp_path / "sheet.png", columns=50) == "3 classes"
    with Image.open(tmp_path / "sheet.png") as drawn:
        grey = np.asarray(drawn.convert("L")).astype(int)
    assert grey.shape[1] < 1_000
    right = [np.median(row) for row in np.array_split(grey[10:-10, -160:-10], 3)]
    assert right == pytest.approx([10, 90, (200 + 255) / 2], abs=30)


def test_a_contact_sheet_shows_a_hundred_classes_at_most(tmp_path):
    images = Images(torch.zeros(700, 3, 8, 8, dtype=torch.uint8), torch.arange(700), tuple(map(str, range(700))))
    assert save_contact_sheet(images, tmp_path / "sheet.png") == "the first 100 of 700 classes"
    with Image.open(tmp_path / "sheet.png") as drawn:
        assert 5_900 < drawn.height < 6_200


@pytest.mark.parametrize(
    ("counts", "parts"),
    [((30, 3, 0), ["no training image of class c"]), ((31, 3, 3), ["31 training images of class a"])],
)
def test_classes_without_images_and_unbalanced_classes_cause_a_warning(counts, parts, tmp_path, monkeypatch):
    labels = torch.arange(3).repeat_interleave(torch.tensor(counts) + 1)
    images = Images(torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels, ("a", "b", "c"))
    images = images.subset([i for i in range(len(labels)) if counts[labels[i]]])
    toy = Dataset(lambda _: (images, images), "", "", "")
    monkeypatch.setitem(DATASETS, "own", toy)
    with pytest.warns(DataWarning) as caught:
        load_splits("own", tmp_path, validation_fraction=0.01)
    assert [part in str(warning.message) for part, warning in zip(parts, caught, strict=True)] == [True]


@pytest.mark.parametrize(("train", "test", "empty"), [(0, 9, "train"), (1, 9, "validation"), (9, 0, "test")])
def test_a_dataset_with_an_empty_split_is_refused(train, test, empty, tmp_path, monkeypatch):
    nine = numbered([0] * 9, 1)
    toy = Dataset(lambda _: (nine.subset(range(train)), nine.subset(range(test))), "", "", "")
    monkeypatch.setitem(DATASETS, "own", toy)
    with refused(f"the {empty} split of own has no images", "give every class more images"):
        load_splits("own", tmp_path)


def test_cut_gives_stratified_complete_disjoint_and_sorted_parts():
    images = numbered([i % 3 for i in range(90)], 3)
    rest, held_out = cut(images, 0.2, seed=5)
    assert held_out.labels.bincount().tolist() == [6, 6, 6]
    assert sorted(indices(rest) + indices(held_out)) == list(range(90))
    assert indices(rest) == sorted(indices(rest))
    assert indices(held_out) == sorted(indices(held_out))
    assert held_out.labels.tolist() == [i % 3 for i in indices(held_out)]


def test_cut_with_the_same_seed_gives_the_same_parts():
    images = numbered([i % 3 for i in range(90)], 3)
    assert indices(cut(images, 0.2, seed=5)[1]) == indices(cut(images, 0.2, seed=5)[1])
    assert indices(cut(images, 0.2, seed=5)[1]) != indices(cut(images, 0.2, seed=6)[1])
    assert indices(cut(numbered([0] * 10, 1), 0.3, seed=0)[1]) == [
        1,
        2,
        3,
    ]  # must never change
    several = numbered([i % 3 for i in range(30)], 3)
    assert indices(cut(several, 0.2, seed=4)[1]) == [8, 9, 10, 16, 21, 29]  # must never change


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.floats(0.01, 0.99), st.integers(0, 2**40))
@settings(max_examples=100, deadline=None, database=None)
def test_cut_leaves_every_class_with_two_images_in_both_parts(labels, fraction, seed):
    rest, held_out = cut(numbered(labels, 4), fraction, seed)
    assert sorted(indices(rest) + indices(held_out)) == list(range(len(labels)))
    for label in set(labels):
        count = labels.count(label)
        held = held_out.labels.tolist().count(label)
        assert held == (min(max(round(fraction * count), 1), count - 1) if count > 1 else 0)


def test_cut_by_holds_out_one_value_of_the_attribute_per_class():
    labels = torch.arange(600) % 3
    toys = Images(torch.zeros(600, 1, 2, 2, dtype=torch.uint8), labels, ("a", "b", "c"), {"toy": torch.arange(600) % 5})
    chosen = set()
    for seed in range(20):
        rest, held_out = cut_by(toys, "toy", seed)
        assert (len(rest), len(held_out)) == (480, 120)
        values = [held_out.attributes["toy"][held_out.labels == label].unique().tolist() for label in range(3)]
        assert all(len(value) == 1 for value in values)
        for label, (value,) in enumerate(values):
            assert value not in rest.attributes["toy"][rest.labels == label]
            chosen.add((label, value))
    assert len(chosen) > 12
    with pytest.raises(BadInput, match="unknown attribute 'toys'"):
        cut_by(toys, "toys", 0)
    with pytest.raises(BadInput, match="class a has only one value of toy"):
        cut_by(toys.where(toy=[0]), "toy", 0)


def test_cut_by_with_the_same_seed_holds_out_the_same_values():
    toys = {"toy": torch.arange(30) % 10}
    images = Images(torch.zeros(30, 1, 2, 2, dtype=torch.uint8), torch.arange(30) // 10, ("a", "b", "c"), toys)
    assert cut_by(images, "toy", seed=4)[1].attributes["toy"].tolist() == [6, 0, 1]  # must never change


def test_where_keeps_the_images_that_have_an_accepted_value_of_every_attribute():
    attributes = {"toy": torch.tensor([0, 0, 1, 1, 2]), "azimuth": torch.tensor([0, 2, 0, 2, 0])}
    images = Images(torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1), torch.zeros(5).long(), ("a",), attributes)
    assert indices(images.where(toy=[1, 2], azimuth=[0])) == [2, 4]
    assert indices(images.where(azimuth=[0], toy=[0])) == [0]


def test_cut_refuses_fractions_and_seeds_out_of_range():
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with refused("fraction"):
            cut(numbered([0, 0], 1), fraction, seed=0)
    with refused("seed must be an integer of at least 0; got -1"):
        cut(numbered([0, 0], 1), 0.5, seed=-1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_shift_equals_a_loop_over_pixels(dtype):
    pixels = torch.arange(6 * 2 * 3 * 5, dtype=dtype).reshape(6, 2, 3, 5)
    offsets = torch.tensor([[0, 0], [1, 0], [0, -2], [-2, 4], [3, 0], [0, -99]])
    expected = torch.zeros_like(pixels)
    for n, (down, right) in enumerate(offsets.tolist()):
        for y in range(3):
            for x in range(5):
                if 0 <= y - down < 3 and 0 <= x - right < 5:
                    expected[n, :, y, x] = pixels[n, :, y - down, x - right]
    assert torch.equal(shift(pixels, offsets), expected)


def test_shift_pads_with_zero_also_next_to_infinite_pixels():
    shifted = shift(torch.full((1, 1, 2, 2), torch.inf), torch.tensor([[1, 0]]))
    assert shifted.flatten().tolist() == [0, 0, torch.inf, torch.inf]


def test_shift_offsets_do_not_depend_on_count_and_stay_in_range():
    long = shift_offsets(seed=1, epoch=2, count=1001, pixels=2)
    for count in (0, 1, 7, 1000):
        assert torch.equal(shift_offsets(1, 2, count, 2), long[:count])
    assert long.dtype == torch.int64
    assert long.unique().tolist() == [-2, -1, 0, 1, 2]
    assert not torch.equal(long, shift_offsets(1, 3, 1001, 2))
    assert not torch.equal(long, shift_offsets(2, 2, 1001, 2))
    assert not shift_offsets(0, 0, 5, pixels=0).any()


# MNIST and Fashion-MNIST


def test_different_numbers_of_images_and_labels_are_refused(tmp_path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx(np.arange(12).reshape(3, 2, 2)))
    labels.write_bytes(idx(np.array([0, 1, 1])))
    assert load_idx_pair(images, labels, ("a", "b")).image_shape == (1, 2, 2)
    with refused(str(labels), "1 class names"):
        load_idx_pair(images, labels, ("a",))
    with refused(str(images), "check whether the two files are swapped"):
        load_idx_pair(labels, images, ("a", "b"))
    labels.write_bytes(idx(np.array([0, 1])))
    with refused("3 images", "2 labels", str(images), str(labels)):
        load_idx_pair(images, labels, ("a", "b"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_a_wrong_checksum_is_refused(name, tmp_path):
    path = tmp_path / name / "train-images-idx3-ubyte"
    path.parent.mkdir()
    content = idx(np.zeros((2, 28, 28)))
    path.write_bytes(content)
    with refused(str(path), md5(content).hexdigest(), FILES[name].md5[path.name], "delete it"):
        DATASETS[name].load(tmp_path)
    path.write_bytes(gzip.compress(content)[:-9])
    with refused(str(path), "delete it"):
        DATASETS[name].load(tmp_path)
    assert DATASETS[name].verify is not None
    problems = dict(DATASETS[name].verify(tmp_path))
    assert problems.pop(path.name).startswith("cannot be read (Compressed file ended")
    assert len(problems) == 3
    assert all("missing" in problem for problem in problems.values())


@pytest.mark.parametrize("name", FILES)
def test_the_downloaded_files_of_each_dataset_load(name):
    data_dir = Path(os.environ.get("TORCHCAPS_TEST_DATA", "no-such-folder"))
    if not (data_dir / name).is_dir():
        pytest.skip(f"TORCHCAPS_TEST_DATA names no folder that holds {name}/")
    assert [problem for _, problem in FILES[name].verify(data_dir)] == ["ok"] * 4
    train, test = DATASETS[name].load(data_dir)
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.image_shape == test.image_shape == (1, 28, 28)
    assert test.labels.bincount().tolist()[:2] == {"mnist": [980, 1135], "fashion-mnist": [1000, 1000]}[name]


# mnist-5k and the splits


def test_mnist_5k_has_balanced_classes_and_no_image_twice():
    train, test = load_mnist_5k()
    assert train.image_shape == (1, 28, 28)
    assert train.labels.bincount().tolist() == [400] * 10
    assert test.labels.bincount().tolist() == [100] * 10
    assert 30 < train.pixels.float().mean() < 36
    assert len({image.numpy().tobytes() for part in (train, test) for image in part.pixels}) == 5_000


def test_all_digits_of_mnist_5k_are_training_digits_of_mnist():
    data_dir = Path(os.environ.get("TORCHCAPS_TEST_DATA", "no-such-folder"))
    if not (data_dir / "mnist").is_dir():
        pytest.skip("TORCHCAPS_TEST_DATA names no folder that holds mnist/")
    full, _ = load_mnist(data_dir)
    known = {image.numpy().tobytes() for image in full.pixels[:6_000]}
    assert all(image.numpy().tobytes() in known for part in load_mnist_5k() for image in part.pixels)


def test_load_splits_takes_validation_images_from_the_training_images_only(tmp_path):
    one, other = (load_splits("mnist-5k", tmp_path, seed=seed) for seed in (0, 1))
    assert (len(one.train), len(one.validation), len(one.test)) == (3_600, 400, 1_000)
    assert torch.equal(one.test.pixels, other.test.pixels)
    assert not torch.equal(one.validation.pixels, other.validation.pixels)
    assert one.validation.labels.bincount().tolist() == [40] * 10
    assert not list(tmp_path.iterdir())


def test_load_splits_refuses_unknown_datasets_options_and_bad_fractions(tmp_path):
    with refused("minst", "did you mean 'mnist'?", "neither a dataset nor an existing folder or table"):
        load_splits("minst", tmp_path)
    with refused("/no/such/place", "mnist-5k"):
        load_splits("/no/such/place", tmp_path)
    with refused("image_size", "mnist-5k", "Accepted options: none"):
        load_splits("mnist-5k", tmp_path, image_size=32)
    with refused("colour", "image_size, resize, channels, test_fraction"):
        load_splits(str(tmp_path), tmp_path, colour=True)
    for fraction in (0.0, 0.51, -0.1, float("nan")):
        with refused("validation_fraction"):
            load_splits("mnist-5k", tmp_path, validation_fraction=fraction)
    with refused("seed"):
        load_splits("mnist-5k", tmp_path, seed=-1)


def test_the_name_of_a_dataset_is_preferred_to_a_folder_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mnist-5k").mkdir()
    assert len(load_splits("mnist-5k", tmp_path).test) == 1_000


@pytest.mark.usefixtures("untyped")
def test_arrays_that_are_not_tensors_are_refused():
    pixels, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    with refused("pixels must be a torch.Tensor; got a uint8 array [2, 1, 4, 4]"):
        Images(pixels.numpy(), labels, ("cat", "dog"))
    with refused("labels must be a torch.Tensor; got list [0, 1]"):
        Images(pixels, labels.tolist(), ("cat", "dog"))
