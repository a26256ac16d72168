"""Draw a contact sheet: one picture with some images of each class."""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from torchcaps.data.files import atomically
from torchcaps.data.images import Images
from torchcaps.errors import captions

MOST_CLASSES = 100
"""Largest number of classes in one picture."""
LONGEST_NAME = 60
"""Class names with more characters than this are shortened to this length."""
TILE = 128
"""Images whose longer side has more pixels than this are reduced to this size."""
LONGEST_PICTURE = 6_000
"""Largest side of the picture in pixels, without the class names."""


def save_contact_sheet(images: Images, path: Path, columns: int = 10, seed: int = 0) -> str:
    """Draw random images of each class as a PNG file, one row per class.

    At most 100 classes are drawn. Of a stereo pair, only the image of the first camera is drawn.

    Arguments:
        images: images to choose from, with one label per image.
        path: file to write.
        columns: number of images to draw per class, at least 1. If a class has fewer images, all of them are drawn.
        seed: seed for choosing the images.

    Returns:
        The number of classes drawn, such as "10 classes" or "the first 100 of 700 classes".

    Raises:
        BadInput: `path` cannot be written.

    Example:
        >>> import tempfile
        >>> from torchcaps.data import load_mnist_5k
        >>> save_contact_sheet(load_mnist_5k()[0], Path(tempfile.mkdtemp()) / "digits.png", columns=3)
        '10 classes'
    """
    from matplotlib.figure import Figure

    names = captions(images.class_names[:MOST_CLASSES], LONGEST_NAME)
    rows, columns = len(names), min(columns, int(images.labels.bincount(minlength=1).max()))
    sheet, height, width = _mosaic(images, rows, columns, seed)
    inches = min(1.0, LONGEST_PICTURE / 100 / max(rows, columns)) / max(height, width)
    figure = Figure(figsize=(columns * width * inches, rows * height * inches))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.imshow(sheet, cmap="gray", vmin=0, vmax=255, aspect="auto")
    axis.set_xticks([])
    axis.set_yticks(height * (np.arange(rows) + 0.5) - 0.5, names, fontsize=9, parse_math=False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    with atomically(path) as stream:
        figure.savefig(stream, format="png", dpi=100, bbox_inches="tight", pad_inches=0.1)
    every = len(images.class_names)
    return f"the first {rows} of {every} classes" if rows < every else f"{rows} classes"


def _mosaic(images: Images, rows: int, columns: int, seed: int) -> tuple[np.ndarray, int, int]:
    """Arrange images on a white sheet, one row per class.

    Returns the sheet, and the height and width of an image with its margin, in pixels.
    """
    channels, height, width = images.image_shape
    scale = min(1.0, TILE / max(height, width))
    height, width = max(round(height * scale), 1), max(round(width * scale), 1)
    margin = max(max(height, width) // 14, 1)
    shape = (rows, height + margin, columns, width + margin, 3 if channels == 3 else 1)
    sheet = np.full(shape, 255, np.uint8)
    random = np.random.default_rng(seed)
    for label in range(rows):
        members = (images.labels == label).nonzero().flatten().numpy()
        chosen = images.batch(torch.from_numpy(random.permutation(members)[:columns]))[:, : shape[-1]]
        if scale < 1:
            chosen = functional.interpolate(chosen, (height, width), mode="bilinear", antialias=True)
        inner = sheet[label, margin // 2 : margin // 2 + height, : len(chosen), margin // 2 : margin // 2 + width]
        inner[:] = chosen.permute(2, 0, 3, 1).numpy()
    return sheet.reshape(rows * shape[1], columns * shape[3], -1), shape[1], shape[3]
