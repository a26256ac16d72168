"""Warnings about class names that look the same, and about images that occur in several classes."""

import re
from contextlib import nullcontext

import pytest
from PIL import Image

from image_trees import tree
from torchcaps.data import load_splits
from torchcaps.errors import DataWarning


@pytest.mark.parametrize(
    ("first", "second", "warning"),
    [
        ("1", "1.0", "'1' and '1.0', which look alike: write both the same way if they are one class"),
        ("007", "7", "'007' and '7', which look alike"),
        ("Cat", "cat ", "'Cat' and 'cat', which look alike"),
        ("NA", "cat", "has the class 'NA', like a missing value: remove its images if they have no class"),
        ("A", "a", ""),
        ("1.5", "15", ""),
        ("3.1", "3.10", ""),
        ("CO", "Co", ""),
        (f"{10**30 - 1}", f"{10**30}", ""),
        ("1e1", "10", ""),
    ],
)
def test_labels_that_look_the_same_or_missing_cause_a_warning(first, second, warning, tmp_path):
    tree(tmp_path, count=4)
    labels, table = {"cat": first, "dog": second}, tmp_path / "photos.csv"
    lines = [f"{path},{labels[path.parent.name]}\n" for path in tmp_path.rglob("*.png")]
    table.write_text("".join(["path,label\n", *lines]))
    with pytest.warns(DataWarning, match=re.escape(warning)) if warning else nullcontext():
        load_splits(str(table), tmp_path)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_copies_of_an_image_in_another_class_cause_a_warning(cache, tmp_path):
    tree(tmp_path, count=4)
    other = tmp_path / "dog" / "copy.png"
    for path in (tmp_path / "cat" / "one.png", tmp_path / "cat" / "again.png", other):
        Image.new("L", (8, 6), 99).save(path)
    warning = "3 images of .* are copies that occur in several classes, for example "
    with pytest.warns(DataWarning, match=warning) as found:
        load_splits(str(tmp_path), tmp_path, cache=cache)
    assert str(other) in str(found[0].message)
