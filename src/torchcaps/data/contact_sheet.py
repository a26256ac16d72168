"""A dataset at a glance: some images of each class in one picture."""

from pathlib import Path

import numpy as np

from torchcaps.data.files import atomically
from torchcaps.data.images import Images


def save_contact_sheet(images: Images, path: Path, columns: int = 10, seed: int = 0) -> None:
    """Draw `columns` images of each class, a row a class, as a PNG; of stereo pairs the first camera.

    Arguments:
        images: the images.
        path: of the picture.
        columns: images of each class, 1 or more; a class with fewer shows them all.
        seed: of which are shown.
    Example:
        >>> import tempfile
        >>> from torchcaps.data import load_mnist_5k
        >>> save_contact_sheet(load_mnist_5k()[0], Path(tempfile.mkdtemp()) / "digits.png", columns=3)
    """
    from matplotlib.figure import Figure

    rows = len(images.class_names)
    figure = Figure(figsize=(columns, 1.05 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    random = np.random.default_rng(seed)
    for label, name in enumerate(images.class_names):
        members = (images.labels == label).nonzero().flatten().numpy()
        chosen = random.permutation(members)[:columns]
        for column, axis in enumerate(axes[label]):
            axis.set_xticks([])
            axis.set_yticks([])
            if column < len(chosen):
                pixels = images.pixels[int(chosen[column])]
                shown = pixels.permute(1, 2, 0) if len(pixels) == 3 else pixels[0]
                axis.imshow(shown.numpy(), cmap="gray", vmin=0, vmax=255)
        axes[label, 0].set_ylabel(name, fontsize=9)
    with atomically(path) as stream:
        figure.savefig(stream, format="png", dpi=100)
