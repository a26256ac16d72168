"""Tables of images: CSV files, and Parquet files and saved datasets written by Hugging Face datasets."""

import io
import os
import sys
from dataclasses import replace
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from conftest import SMALL_CAPSNET, make_images
from image_trees import refused, tree, warned
from torchcaps import Classifier, PooledCNN, Preprocessing
from torchcaps.cli.common import splits_for
from torchcaps.data import load_image_table, load_splits
from torchcaps.recipes import create_recipe

pytestmark = pytest.mark.usefixtures("blank_pictures")
SPLITS = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write(path, *lines, encoding="utf-8"):
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


def listed(root, **options):
    """List the images of a folder as lines of a CSV file: path and label."""
    return [f"{path.relative_to(root)},{path.parent.name}" for path in sorted(root.rglob("*.png"))]


def png(value):
    stream = io.BytesIO()
    Image.new("L", (8, 6), value).save(stream, format="PNG")
    return stream.getvalue()


def rows(count, first=0):
    return {
        "image": [{"bytes": png(first + index), "path": None} for index in range(count)],
        "label": [index % 2 for index in range(count)],
    }


def dataset(count, first=0, names=("cat", "dog")):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    return datasets.Dataset.from_dict(rows(count, first), features=features)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_a_csv_file_gives_the_same_images_as_its_folder(cache, tmp_path):
    tree(tmp_path, count=10)
    table = write(tmp_path / "photos.csv", "path,label", *listed(tmp_path), encoding="utf-8-sig")
    one = load_splits(str(tmp_path), tmp_path, cache=cache)
    other = load_splits(str(table), tmp_path, cache=cache)
    for name in SPLITS:
        assert torch.equal(getattr(one, name).pixels, getattr(other, name).pixels)
        assert torch.equal(getattr(one, name).labels, getattr(other, name).labels)
        assert getattr(one, name).files.names == getattr(other, name).files.names
    assert other.train.class_names == ("cat", "dog")


def test_the_splits_of_a_csv_file_are_those_of_its_column(tmp_path):
    tree(tmp_path, count=4)
    ends = ("train", "train", "val", "TEST")
    lines = [f"{line},{ends[index % 4]}" for index, line in enumerate(listed(tmp_path))]
    table = write(tmp_path / "photos.tsv", "file\tclass\tsplit", *(line.replace(",", "\t") for line in lines))
    splits = load_splits(str(table), tmp_path)
    assert [getattr(splits, name).pixels[:, 0, 0, 0].tolist() for name in SPLITS] == [[0, 10] * 2, [20] * 2, [30] * 2]
    train, test = load_image_table(table)
    assert [len(train), len(test)] == [4, 2]


def test_columns_are_chosen_by_name(tmp_path):
    tree(tmp_path, count=4)
    lines = [f"{line},{index % 2}" for index, line in enumerate(listed(tmp_path))]
    table = write(tmp_path / "photos.csv", "path,label,class", *lines)
    known = "path, label, class"
    refused(
        lambda: load_image_table(table),
        "rename one column to label",
        "or train with --set data.label_column=NAME",
        known,
    )
    assert load_image_table(table, label_column="class")[0].class_names == ("0", "1")
    refused(lambda: load_image_table(table, label_column="kind"), "has no column kind", known)
    refused(
        lambda: load_splits(str(tmp_path), tmp_path, label_column="class"), "does not accept the option label_column"
    )


@pytest.mark.parametrize("header", ["path, label , split", "path,label,Split", "path ,label,\tSPLIT"])
def test_spaces_around_names_and_labels_and_the_case_of_split_do_not_matter(header, tmp_path):
    tree(tmp_path, count=4)
    lines = [
        f"{line}{' ' * (index % 2)},{('train', 'test')[index % 4 > 2]}" for index, line in enumerate(listed(tmp_path))
    ]
    train, test = load_image_table(write(tmp_path / "photos.csv", header, *lines))
    assert train.class_names == ("cat", "dog")
    assert test.pixels[:, 0, 0, 0].tolist() == [30, 30]


def test_the_same_file_under_an_absolute_path_is_refused(tmp_path, monkeypatch):
    tree(tmp_path, count=4)
    table = write(tmp_path / "photos.csv", "path,label", *listed(tmp_path), f"{tmp_path / 'cat' / '0.png'},dog")
    monkeypatch.chdir(tmp_path)
    refused(lambda: load_image_table(table.name), "lines 2 and 10 name the same file")


def test_labels_that_look_the_same_cause_a_warning(tmp_path):
    tree(tmp_path, count=10)
    labels = [("caf\u00e9", "cafe\u0301")[index % 2] for index in range(20)]
    lines = [f"{line.partition(',')[0]},{label}" for line, label in zip(listed(tmp_path), labels, strict=True)]
    with warned("photos.csv", "'cafe\\u0301' and 'caf\\xe9'", "write both the same way if they are one class"):
        load_image_table(write(tmp_path / "photos.csv", "path,label", *lines))
    content = {"image": [one["bytes"] for one in rows(8)["image"]], "label": ["cat", "cat "] * 4}
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "photos.parquet")
    with warned("photos.parquet", "'cat' and 'cat '", "write both the same way"):
        load_image_table(tmp_path / "photos.parquet")


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ((), ("the image column of", "none")),
        (("path,label",), ("has no images: add rows",)),
        (("path,label", "cat/0.png,cat,7"), ("line 2", "number of columns")),
        (("path,label", "cat/0.png"), ("line 2", "number of columns")),
        (("path,label", "cat/0.png,"), ("line 2", "label is empty")),
        (("path,label", " ,cat"), ("line 2", "path is empty")),
        (("path,label", "cat/0.png,cat", "cat/0.png,dog"), ("lines 2 and 3", "cat/0.png")),
        (("path,label", "cat/0.png,cat", "cat/1.png,cat"), ("only the class cat",)),
        (("path,label", "cat/0.png,cat", "dog/0.png,dog"), ("0.png", "the only image of class cat")),
        (("path,label", "cat/0.png,cat", "cat/../cat/0.png,cat"), ("lines 2 and 3", "cat/../cat/0.png")),
        (
            ("path,label,split, Split", "cat/0.png,cat,train,test"),
            ("several columns named split", "rename all but one"),
        ),
        (("path,label,label", "cat/0.png,cat,dog"), ("the label column of",)),
        ((",".join(f"column{i}" for i in range(5000)),), ("column19 and 4,980 more",)),
        (
            ("path,label", f"{'x' * 5000}.png,cat", "a.png,cat", "b.png,dog", "c.png,dog"),
            ("line 2", "does not exist: correct the path"),
        ),
        (("path,label,split", "cat/0.png,cat,trial"), ("line 2", "'trial'", "train, validation or test")),
        (
            ("path,label,split", "cat/0.png,cat,test", "dog/0.png,dog,test"),
            ("no training images (its splits: test)",),
        ),
        (("path,label", '"cat/0.png,cat'), ("cannot be read as a table",)),
        (('"path,label"', '"cat/0.png,cat"'), ("remove the quotes around whole lines",)),
        (("path;label", "cat/0.png;cat"), ("are separated by ';': separate them by ','",)),
        (
            ("path,label", *(f"{name}/{index}.png,{name}" for name in ("cat", "dog") for index in "129")),
            ("line 4", "9.png", "does not exist: correct the path"),
        ),
    ],
)
def test_the_error_names_what_is_wrong_with_a_csv_file(lines, parts, tmp_path):
    tree(tmp_path, count=4)
    table = tmp_path / "photos.csv"
    table.write_text("\n".join(lines))
    refused(lambda: load_image_table(table), tmp_path, *parts)


def test_the_error_names_text_in_another_encoding(tmp_path):
    table = tmp_path / "photos.csv"
    table.write_bytes("path,label\ncat.png,Kätzchen\n".encode("latin-1"))
    refused(lambda: load_image_table(table), table, "cannot be read as a table", "UTF-8")


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_a_saved_dataset_is_read_with_its_splits_and_class_names(cache, tmp_path):
    parts = {"train": dataset(6), "validation": dataset(4, 100), "test": dataset(2, 200), "extra": dataset(2)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    with warned("skipped the split extra"):
        splits = load_splits(str(tmp_path / "saved"), tmp_path, cache=cache)
    found = [getattr(splits, name).pixels[:, 0, 0, 0].tolist() for name in SPLITS]
    assert found == [[0, 1, 2, 3, 4, 5], [100, 101, 102, 103], [200, 201]]
    assert splits.train.class_names == ("cat", "dog")
    assert splits.train.labels.tolist() == [0, 1] * 3
    dataset(10).with_format("torch").save_to_disk(tmp_path / "single")
    assert [len(part) for part in load_image_table(tmp_path / "single")] == [8, 2]


def test_parquet_files_are_read_with_and_without_the_librarys_own_types(tmp_path):
    dataset(6).to_parquet(tmp_path / "typed.parquet")
    train, test = load_image_table(tmp_path / "typed.parquet", test_fraction=0.4)
    assert sorted([*train.pixels[:, 0, 0, 0].tolist(), *test.pixels[:, 0, 0, 0].tolist()]) == [*range(6)]
    plain = {"image": [one["bytes"] for one in rows(6)["image"]], "label": ["b", "a", "b", "a", "b", "a"]}
    (tmp_path / "shards" / "data").mkdir(parents=True)
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test"):
        datasets.Dataset.from_dict(plain).to_parquet(tmp_path / "shards" / "data" / f"{name}.parquet")
    train, test = load_image_table(tmp_path / "shards")
    assert [len(train), len(test)] == [12, 6]
    assert train.class_names == ("a", "b")
    assert test.labels.tolist() == [1, 0] * 3


def test_splits_whose_names_mean_validation_are_merged(tmp_path):
    for name, count in (("train", 6), ("val", 4), ("validation", 2), ("test", 3)):
        dataset(count).to_parquet(tmp_path / f"{name}.parquet")
    splits = load_splits(str(tmp_path), tmp_path)
    assert [len(images) for images in vars(splits).values()] == [6, 6, 3]


def test_a_column_split_of_a_parquet_file_causes_a_warning(tmp_path):
    content = {"image": [one["bytes"] for one in rows(6)["image"]], "label": [0, 1] * 3, "split": ["train", "test"] * 3}
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "photos.parquet")
    with warned("is not read: save each split in its own file"):
        load_image_table(tmp_path / "photos.parquet")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"label": [0, 1, None, 1, 0, 1]}, ("row 2 of train", "no label")),
        ({"label": [0.5, 1.0, 0.5, 1.0, 0.5, 1.0]}, ("row 0 of train", "0.5", "one whole number")),
        ({"label": [[0], [1], [0], [1], [0], [1]]}, ("row 0 of train", "[0]", "one string or one whole number")),
        ({"image": ["a"] * 6, "label": [0, 1] * 3}, ("row 0 of train: a does not exist",)),
        ({"label": ["", "b"] * 3}, ("row 0 of train", "no label")),
        ({"image": [1] * 6}, ("does not contain images", "--set data.image_column=NAME")),
        ({"image": [png(1)] * 5 + [None]}, ("row 5 of train", "has no image")),
        ({"image": [png(1)] * 5 + [b"text"]}, ("row 5 of train", "cannot be read as an image")),
    ],
)
def test_the_error_names_what_is_wrong_with_a_dataset(change, parts, tmp_path):
    content = {"image": [one["bytes"] for one in rows(6)["image"]], "label": [0, 1] * 3} | change
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "photos.parquet")
    refused(lambda: load_image_table(tmp_path / "photos.parquet"), *parts)


def test_files_that_are_not_datasets_are_refused(tmp_path):
    text = write(tmp_path / "photos.parquet", "text")
    refused(lambda: load_image_table(text), text, "cannot be opened as a dataset")
    refused(lambda: load_splits("hf:../nowhere", tmp_path), "hf:../nowhere cannot be opened as a dataset")
    datasets.DatasetDict({"trial": dataset(4)}).save_to_disk(tmp_path / "saved")
    refused(
        lambda: load_image_table(tmp_path / "saved"), "has no split named train, validation or test (its splits: trial)"
    )


def test_a_damaged_table_raises_one_line_or_gives_images(tmp_path):
    random = np.random.default_rng(0)
    tree(tmp_path, count=3)
    text = write(tmp_path / "photos.csv", "path,label,split", *(f"{line},train" for line in listed(tmp_path)))
    dataset(6).to_parquet(tmp_path / "photos.parquet")
    dataset(6).save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for table in (text, tmp_path / "photos.parquet", arrow):
        whole = table.read_bytes()
        for _ in range(40):
            content = bytearray(whole)
            for place in random.integers(0, len(whole), 3):
                content[place] = random.integers(256)
            damaged = arrow if table == arrow else table.with_stem("damaged")
            damaged.unlink(missing_ok=True)  # a file that is mapped into memory must not change
            damaged.write_bytes(content)
            try:
                said, count = "", len(load_image_table(tmp_path / "saved" if table == arrow else damaged)[0])
            except ValueError as error:
                said, count = str(error), 0
            assert count > 0 or (str(tmp_path) in said and "\n" not in said)


def test_the_command_line_trains_and_evaluates_on_a_table(succeeds, refused, tmp_path):
    photos = make_images(tmp_path / "photos", per_class=12)
    table = write(tmp_path / "photos.csv", "picture,label", *listed(photos))
    table = table.rename(photos / "photos.csv")
    chosen = ("--data", table, "--set", "data.image_column=picture")
    options = ("--epochs", 1, "--out", tmp_path / "run", *SMALL_CAPSNET)
    succeeds("train", "capsnet-mnist", *chosen, *options)
    succeeds("evaluate", tmp_path / "run")
    wrong = ("--data", photos, "--set", "data.image_column=picture", "--out", tmp_path / "other")
    assert "does not accept the option image_column" in refused("train", "capsnet-mnist", *wrong)


def trained_on(data, **options):
    """A classifier of images of 8 × 6 pixels, and the recipe of its training."""
    recipe = replace(create_recipe("capsnet-images"), data=str(data), data_options=options)
    names = ("cat", "dog")
    return Classifier(PooledCNN((1, 16, 16), 2), names, (1, 6, 8), Preprocessing()), recipe


@pytest.mark.parametrize("form", ["photos/", "./photos", "ABSOLUTE", "../HERE/photos"])
def test_another_path_of_the_training_images_gives_the_same_splits(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree(tmp_path / "photos", count=10)
    path = form.replace("ABSOLUTE", str(tmp_path / "photos")).replace("HERE", tmp_path.name)
    for data, options in (("", {}), ("/photos.csv", {"image_column": "file one", "label_column": "name"})):
        write(tmp_path / "photos" / "photos.csv", "file one,name", *listed(tmp_path / "photos"))
        classifier, recipe = trained_on(f"photos{data}", test_fraction=0.5, **options)
        splits = splits_for(classifier, recipe, f"{path}{data}", tmp_path)
        assert len(splits.test) == 10
        (tmp_path / "photos" / "photos.csv").unlink()


def test_a_new_table_is_read_with_the_columns_of_the_training(tmp_path):
    tree(tmp_path, count=10)
    write(tmp_path / "new.csv", "picture,kind,label", *(f"{line},none" for line in listed(tmp_path)))
    classifier, recipe = trained_on("old.csv", test_fraction=0.5, image_column="picture", label_column="kind")
    assert len(splits_for(classifier, recipe, str(tmp_path / "new.csv"), tmp_path).test) == 4
    (tmp_path / "new.csv").unlink()
    assert len(splits_for(classifier, recipe, str(tmp_path), tmp_path).test) == 4
    other = write(tmp_path / "other.csv", "path,label", *listed(tmp_path))
    refused(lambda: splits_for(classifier, recipe, str(other), tmp_path), "rename a column to picture")


def test_other_images_need_no_validation_attribute_of_the_training(tmp_path):
    tree(tmp_path, count=10)
    classifier, recipe = trained_on("toys")
    recipe = replace(recipe, validation_attribute="instance")
    assert len(splits_for(classifier, recipe, str(tmp_path), tmp_path).test) == 4


def test_only_load_splits_reads_the_validation_images_of_a_table(tmp_path):
    """`load_image_table` returns no validation images, so it ignores damaged ones."""
    tree(tmp_path, count=6)
    lines = [f"{line},{name}" for line, name in zip(listed(tmp_path), [*SPLITS, *SPLITS] * 2, strict=True)]
    table = write(tmp_path / "photos.csv", "path,label,split", *lines)
    assert [len(part) for part in load_image_table(table)] == [4, 4]
    for line in lines:
        if line.endswith(",validation"):
            (tmp_path / line.partition(",")[0]).write_text("damaged")
    train, test = load_image_table(table)
    assert [len(train), len(test)] == [4, 4]
    assert train.files.digests.all()
    refused(lambda: load_splits(str(table), tmp_path), "cannot be read as an image")


def test_splits_with_different_class_names_are_refused(tmp_path):
    for names, shown in ((("dog", "cat"), "dog, cat"), (("ant", "cat", "dog"), "ant, cat, dog")):
        folder = tmp_path / names[0]
        datasets.DatasetDict({"train": dataset(6), "test": dataset(4, 100, names)}).save_to_disk(folder)
        refused(partial(load_splits, str(folder), tmp_path), folder, "splits train (cat, dog) and test (" + shown + ")")
    text = datasets.Dataset.from_dict({**rows(4), "label": ["cat", "dog"] * 2})
    number = datasets.Dataset.from_dict(rows(6))
    datasets.DatasetDict({"train": number, "test": text}).save_to_disk(tmp_path / "mixed")
    refused(lambda: load_splits(str(tmp_path / "mixed"), tmp_path), tmp_path / "mixed", "labels that are text")


def test_a_parquet_file_that_is_replaced_at_the_same_time_is_read_again(tmp_path):
    path = tmp_path / "photos.parquet"
    for count, first in ((10, 0), (20, 100), (20, 200)):
        dataset(count, first).to_parquet(path)
        os.utime(path, (1e9, 1e9))
        train, test = load_image_table(path)
        assert sorted(torch.cat([train.pixels, test.pixels])[:, 0, 0, 0].tolist()) == [*range(first, first + count)]


def test_parquet_files_with_brackets_in_their_path_are_read(tmp_path):
    folder = tmp_path / "photos[1]"
    folder.mkdir()
    dataset(10).to_parquet(folder / "train[2].parquet")
    assert [len(part) for part in load_image_table(folder / "train[2].parquet")] == [8, 2]
    dataset(10).to_parquet(folder / "train.parquet")
    (folder / "train[2].parquet").unlink()
    assert [len(part) for part in load_image_table(folder)] == [8, 2]


def test_a_library_datasets_that_cannot_be_imported_is_named_with_the_cure(tmp_path, monkeypatch):
    dataset(10).to_parquet(tmp_path / "photos.parquet")
    (tmp_path / "datasets.py").write_text("raise ImportError('pyarrow requires NumPy 2.0 or newer')")
    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.syspath_prepend(tmp_path)
    refused(
        lambda: load_image_table(tmp_path / "photos.parquet"),
        "photos.parquet needs Hugging Face datasets, which cannot be imported (pyarrow requires NumPy 2.0",
        "pip install -U 'torchcaps[datasets]'",
    )
