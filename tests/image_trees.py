"""Folders of images written by Pillow, and checks for the errors and warnings that they cause."""

import warnings
from contextlib import contextmanager

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from idx_files import refused as refused_with
from torchcaps.errors import DataWarning


def save(path, mode="L", size=(8, 6), colour=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = colour if colour is not None else 100
    Image.new(mode, size, colour).save(path, **options)
    return path


def tree(root, classes=("cat", "dog"), count=5, **options):
    for name in classes:
        comment = PngInfo()
        comment.add_text("class", name)  # so that no two classes have equal files
        for i in range(count):
            save(root / name / f"{i}.png", colour=10 * i, pnginfo=comment, **options)
    return root


def refused(call, *parts):
    with refused_with(*map(str, parts)):
        call()


@contextmanager
def warned(*parts):
    """Check that the block causes one `DataWarning` of one line that contains all `parts`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [warning.category for warning in caught] == [DataWarning], [str(warning.message) for warning in caught]
    message = str(caught[0].message)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
