"""Labelled images in memory: hold them, cut them in two, shift them. Knows no file and no dataset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int64, Shaped, UInt8
from torch import Tensor

from torchcaps.errors import BadInput, nearest


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images of one size.

    Arguments:
        pixels: `[N, C, H, W]`, uint8, 0 to 255.
        labels: `[N]`, int64, each from 0 to `len(class_names) - 1`; or `[N, k]`, the k classes on every image.
        class_names: one name per label, in the order of the labels.
        attributes: what else is known of each image, name → `[N]`, int64, such as the azimuth it was taken from.
    Raises:
        BadInput: shapes or types are others, the numbers of images, labels and attributes differ, or a label has no
            name.
    Example:
        >>> Images(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog")).image_shape
        (1, 28, 28)
    """

    pixels: UInt8[Tensor, "N C H W"]
    labels: Int64[Tensor, " N"] | Int64[Tensor, "N k"]
    class_names: tuple[str, ...]
    attributes: Mapping[str, Int64[Tensor, " N"]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pixels.ndim != 4 or self.pixels.dtype != torch.uint8:
            raise BadInput(f"pixels: {_kind(self.pixels)}; give uint8 of shape [N, C, H, W]")
        if self.labels.ndim not in (1, 2) or self.labels.dtype != torch.int64:
            raise BadInput(f"labels: {_kind(self.labels)}; give int64 of shape [N] or [N, k]")
        if len(self.pixels) != len(self.labels):
            raise BadInput(f"{len(self.pixels)} images but {len(self.labels)} labels; give one label per image")
        for name, values in self.attributes.items():
            if values.shape != self.labels.shape[:1] or values.dtype != torch.int64:
                raise BadInput(f"attribute {name}: {_kind(values)}; give int64 of shape [{len(self.labels)}]")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise BadInput(
                f"labels from {int(self.labels.min())} to {int(self.labels.max())} but {len(self.class_names)} class"
                " names; number the classes from 0 and name each"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(C, H, W)`: channels, and height and width in pixels."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def subset(self, indices: Int64[Tensor, " M"] | Sequence[int]) -> "Images":
        """The images at `indices`, in that order, with the same class names."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        attributes = {name: values[chosen] for name, values in self.attributes.items()}
        return Images(self.pixels[chosen], self.labels[chosen], self.class_names, attributes)

    def where(self, **allowed: Sequence[int]) -> "Images":
        """The images whose attributes are all among those allowed.

        Arguments:
            allowed: attribute → its values, such as `azimuth=[0, 2, 34]`.
        Raises:
            BadInput: the images have no such attribute.
        Example:
            >>> azimuth = {"azimuth": torch.tensor([0, 2, 4])}
            >>> images = Images(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 0]), ("car",), azimuth)
            >>> len(images.where(azimuth=[0, 4]))
            2
        """
        chosen = torch.ones(len(self), dtype=torch.bool)
        for name, values in allowed.items():
            if name not in self.attributes:
                raise BadInput(f"unknown attribute {name!r}{nearest(name, self.attributes)}")
            chosen &= torch.isin(self.attributes[name], torch.tensor([*values]))
        return self.subset(chosen.nonzero().flatten())


@dataclass(frozen=True, eq=False)
class Splits:
    """Images to learn from, to choose by, and to report on. They share no image."""

    train: Images
    validation: Images
    test: Images


def cut(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    """Cut images in two, class by class: `(rest, held_out)`, each in the order of the original.

    Of a class of n images, `round(fraction * n)` are held out, but at least one and at most n - 1 where n >= 2; a
    class of one image stays in the rest. The choice depends on the seed and the class alone.

    Arguments:
        images: the images to cut.
        fraction: the part to hold out, above 0 and below 1.
        seed: 0 or greater.
    Raises:
        BadInput: fraction or seed is out of its range.
    Example:
        >>> images = Images(torch.zeros(20, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1] * 10), ("cat", "dog"))
        >>> [len(part) for part in cut(images, 0.1, seed=0)]
        [18, 2]
    """
    rest, held_out = cut_indices(images.labels, fraction, seed)
    return images.subset(rest), images.subset(held_out)


def cut_by(images: Images, attribute: str, seed: int) -> tuple[Images, Images]:
    """Cut images in two by an attribute: `(rest, held_out)`, each in the order of the original.

    Of every class, all images of one value of the attribute are held out, such as one of five toys; which one depends
    on the seed and the class alone.

    Arguments:
        images: the images to cut.
        attribute: one of `images.attributes`.
        seed: 0 or greater.
    Raises:
        BadInput: the images have no such attribute, or it has a single value in some class.
    Example:
        >>> labels, toy = torch.tensor([0, 0, 1, 1]), {"toy": torch.tensor([4, 5, 4, 6])}
        >>> images = Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), labels, ("cat", "dog"), toy)
        >>> [part.labels.tolist() for part in cut_by(images, "toy", seed=0)]
        [[0, 1], [0, 1]]
    """
    if attribute not in images.attributes:
        known = nearest(attribute, images.attributes) if images.attributes else "; these images have none"
        raise BadInput(f"unknown attribute {attribute!r}{known}")
    held_out = torch.zeros(len(images), dtype=torch.bool)
    for label in images.labels.unique().tolist():
        members = images.labels == label
        values = images.attributes[attribute][members].unique()
        if len(values) < 2:
            raise BadInput(f"class {images.class_names[label]} has one value of {attribute}: nothing can be held out")
        chosen = values[int(np.random.PCG64([seed, label]).random_raw() % len(values))]
        held_out |= members & (images.attributes[attribute] == chosen)
    return images.subset((~held_out).nonzero().flatten()), images.subset(held_out.nonzero().flatten())


def cut_indices(
    labels: Int64[Tensor, " N"], fraction: float, seed: int
) -> tuple[Int64[Tensor, " R"], Int64[Tensor, " M"]]:
    """The indices behind `cut`, both ascending."""
    if not 0 < fraction < 1:
        raise BadInput(f"the fraction to hold out is {fraction}; give one above 0 and below 1")
    if seed < 0:
        raise BadInput(f"the seed is {seed}; give 0 or greater")
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        # NumPy promises the raw stream for all versions to come; it does not promise Generator.permutation.
        order = np.random.PCG64([seed, label]).random_raw(len(members)).argsort(kind="stable")
        held_out[members[torch.from_numpy(order[:count])]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def shift(pixels: Shaped[Tensor, "N C H W"], offsets: Int64[Tensor, "N 2"]) -> Shaped[Tensor, "N C H W"]:
    """Translate every image by its own offset; what comes in from outside is 0.

    `shifted[n, c, y, x] = pixels[n, c, y - offsets[n, 0], x - offsets[n, 1]]`

    Arguments:
        pixels: `[N, C, H, W]`, any type, any device.
        offsets: `[N, 2]`, pixels down and to the right, on the same device.
    Example:
        >>> shift(torch.ones(1, 1, 2, 2), torch.tensor([[1, 0]]))
        tensor([[[[0., 0.],
                  [1., 1.]]]])
    """
    _, channels, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device) - offsets[:, :1]
    columns = torch.arange(width, device=pixels.device) - offsets[:, 1:]
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    rows = rows.clamp(0, height - 1)[:, None, :, None].expand(-1, channels, -1, width)
    columns = columns.clamp(0, width - 1)[:, None, None, :].expand(-1, channels, height, -1)
    return pixels.gather(2, rows).gather(3, columns).masked_fill(~inside, 0)


def shift_offsets(seed: int, epoch: int, count: int, pixels: int) -> Int64[Tensor, "count 2"]:
    """Random offsets for `shift`, uniform on the integers from `-pixels` to `pixels`.

    Row i depends on seed, epoch and i alone, so a larger count keeps the rows before.

    Arguments:
        seed, epoch: 0 or greater.
        count: the number of rows.
        pixels: the greatest shift either way, 0 or greater.
    Example:
        >>> shift_offsets(seed=0, epoch=0, count=60_000, pixels=2).shape
        torch.Size([60000, 2])
    """
    generator = np.random.default_rng([seed, epoch])
    return torch.from_numpy(generator.integers(-pixels, pixels, size=(count, 2), endpoint=True))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
