"""Labelled images in memory or on disk, and functions that split and shift them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64, Shaped, UInt8
from torch import Tensor

from torchcaps.checks import INTEGERS, bounds, check_integer, check_number, described
from torchcaps.data.image_files import ImageFiles
from torchcaps.errors import BadInput, nearest


def checked_names(class_names: Iterable[str]) -> tuple[str, ...]:
    """Check that class names are strings in a fixed order, and return them as a tuple.

    Raises:
        BadInput: ``class_names`` is a single string, a set or a mapping, or a name is not a string.
    """
    if isinstance(class_names, str | set | frozenset | Mapping) or not isinstance(class_names, Iterable):
        raise BadInput(
            f"class_names must be a list or tuple of strings; got {described(class_names)}: list the names in the "
            "order of the labels"
        )
    for name in (names := tuple(class_names)):
        if not isinstance(name, str):
            raise BadInput(f"class_names must be strings; got {described(name)}: convert it with str()")
    return names


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Labelled images of one size, in memory.

    Arguments:
        pixels: `[N, C, H, W]`, uint8, 0 to 255.
        labels: `[N]`, int64, from 0 to `len(class_names) - 1`; or `[N, k]` if each image shows k classes.
        class_names: names of the classes, in the order of the labels.
        attributes: other properties of the images, such as the azimuth of the camera: int64 tensors `[N]`, keyed by
            name.
        files: the N encoded images, such as PNG files, from which the pixels were decoded; None if there are none.

    Raises:
        BadInput: `pixels`, `labels` or an attribute has the wrong shape or dtype; the numbers of images, labels and
            attribute values differ; a label is not an index of `class_names`; or a class name is not a string.

    Example:
        >>> Images(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog")).image_shape
        (1, 28, 28)
    """

    pixels: UInt8[Tensor, "N C H W"]
    labels: Int64[Tensor, " N"] | Int64[Tensor, "N k"]
    class_names: Sequence[str]
    attributes: Mapping[str, Int64[Tensor, " N"]] = field(default_factory=dict)
    files: ImageFiles | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_names", checked_names(self.class_names))
        for name, part in (("pixels", self.pixels), ("labels", self.labels), *self.attributes.items()):
            if not isinstance(part, Tensor):
                raise BadInput(f"{name} must be a torch.Tensor; got {described(part)}: convert it with torch.as_tensor")
        if self.pixels.ndim != 4 or self.pixels.dtype != torch.uint8:
            raise BadInput(f"pixels must be uint8 [N, C, H, W]; got {_kind(self.pixels)}")
        if self.labels.ndim not in (1, 2) or self.labels.dtype != torch.int64:
            raise BadInput(f"labels must be int64 [N] or [N, k]; got {_kind(self.labels)}")
        if len(self.pixels) != len(self.labels):
            raise BadInput(
                f"pixels has {len(self.pixels)} images, but labels has {len(self.labels)}: give one label per image"
            )
        for name, values in self.attributes.items():
            if values.shape != self.labels.shape[:1] or values.dtype != torch.int64:
                raise BadInput(f"attribute {name} must be int64 [{len(self.labels)}]; got {_kind(values)}")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise BadInput(
                f"labels are {int(self.labels.min())} to {int(self.labels.max())}, but there are"
                f" {len(self.class_names)} class names: number the classes from 0 and give a name for each"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape, classes = "×".join(map(str, self.image_shape)), len(self.class_names)
        return f"{type(self).__name__}({len(self)} images of {shape}, {classes} classes)"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(C, H, W)`: number of channels, height and width in pixels."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def batch(self, indices: Int64[Tensor, " M"]) -> UInt8[Tensor, "M C H W"]:
        """Return the pixels of the images at `indices`."""
        return self.pixels[indices]

    def subset(self, indices: Int64[Tensor, " M"] | Bool[Tensor, " N"] | Sequence[int]) -> "Images":
        """Return the images at `indices`, in that order, with the same class names. `indices` can also be a mask.

        Raises:
            BadInput: `indices` are neither integers in the range of the images nor a mask with one value per image.
        """
        chosen = self._chosen(indices)
        attributes = {name: values[chosen] for name, values in self.attributes.items()}
        files = None if self.files is None else self.files.subset(chosen)
        return Images(self.pixels[chosen], self.labels[chosen], self.class_names, attributes, files)

    def _chosen(self, indices: Any) -> Int64[Tensor, " M"]:
        chosen = torch.as_tensor(indices, device="cpu")
        if chosen.shape == (0,) and chosen.dtype != torch.bool:  # torch.as_tensor([]) has a floating-point dtype
            return chosen.to(torch.int64)
        if chosen.ndim != 1 or chosen.dtype not in (torch.bool, *INTEGERS):
            raise BadInput(f"indices must be integers, or a mask bool [{len(self)}]; got {described(indices)}")
        if chosen.dtype == torch.bool:
            if chosen.shape != (len(self),):
                raise BadInput(f"a mask must be bool [{len(self)}]; got {_kind(chosen)}: give one value per image")
            return chosen.nonzero().flatten()
        chosen = chosen.to(torch.int64)
        low, high = bounds(chosen)
        if low < -len(self) or high >= len(self):
            raise BadInput(f"indices must be from 0 to {len(self) - 1}; got {low} to {high}")
        return chosen

    def where(self, **allowed: Sequence[int]) -> "Images":
        """Return the images whose attributes have the given values.

        Arguments:
            allowed: accepted values, as one keyword argument per attribute, such as `azimuth=[0, 2, 34]`.

        Raises:
            BadInput: `allowed` names an attribute that the images do not have.

        Example:
            >>> azimuth = {"azimuth": torch.tensor([0, 2, 4])}
            >>> images = Images(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 0]), ("car",), azimuth)
            >>> len(images.where(azimuth=[0, 4]))
            2
        """
        chosen = torch.ones(len(self), dtype=torch.bool, device="cpu")
        for name, values in allowed.items():
            if name not in self.attributes:
                raise BadInput(f"unknown attribute {name!r}{nearest(name, self.attributes)}")
            chosen &= torch.isin(self.attributes[name], torch.tensor([*values], device="cpu"))
        return self.subset(chosen)


class ImagesOnDisk(Images):
    """Labelled images that stay encoded on disk and are decoded each time they are used.

    `batch` decodes some of the images; `pixels` decodes all of them into memory.

    Arguments:
        files: the N encoded images. If their `resize` is None, `batch` and `pixels` raise `BadInput` for an image whose
            size differs from `image_shape`.
        labels: `[N]`, int64, from 0 to `len(class_names) - 1`.
        class_names: names of the classes, in the order of the labels.
        image_shape: `(C, H, W)` of the decoded images.
    """

    files: ImageFiles
    decoded_shape: tuple[int, int, int]

    def __init__(
        self,
        files: ImageFiles,
        labels: Int64[Tensor, " N"],
        class_names: Sequence[str],
        image_shape: tuple[int, int, int],
    ) -> None:
        vars(self).update(files=files, labels=labels, class_names=checked_names(class_names), attributes={})
        vars(self).update(decoded_shape=image_shape)

    @property
    def pixels(self) -> UInt8[Tensor, "N C H W"]:
        """All images, decoded."""
        return self.files.decoded(self.decoded_shape)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """`(C, H, W)`: number of channels, height and width in pixels."""
        return self.decoded_shape

    def batch(self, indices: Int64[Tensor, " M"]) -> UInt8[Tensor, "M C H W"]:
        """Decode the images at `indices`."""
        return self.files.subset(indices).decoded(self.decoded_shape)

    def subset(self, indices: Int64[Tensor, " M"] | Bool[Tensor, " N"] | Sequence[int]) -> Images:
        """Return the images at `indices`, in that order, with the same class names; nothing is decoded."""
        chosen = self._chosen(indices)
        files, labels = self.files.subset(chosen), self.labels[chosen]
        return ImagesOnDisk(files, labels, self.class_names, self.decoded_shape)


@dataclass(frozen=True, eq=False)
class Splits:
    """The three splits of a dataset. No image is in more than one split.

    Arguments:
        train: images to train on.
        validation: images for choosing settings, such as the learning rate, and the epoch whose weights are saved.
        test: images on which the reported accuracy is measured.

    Raises:
        BadInput: the splits differ in their class names.

    Example:
        >>> images = Images(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 0]), ("cat",))
        >>> len(Splits(images.subset([0]), images.subset([1]), images.subset([2])).test)
        1
    """

    train: Images
    validation: Images
    test: Images

    def __post_init__(self) -> None:
        for name, images in (("validation", self.validation), ("test", self.test)):
            if tuple(images.class_names) != tuple(self.train.class_names):
                raise BadInput(
                    f"the class names of the {name} images are {images.class_names}, but those of the training images "
                    f"{self.train.class_names}: give all splits the same classes, in the same order"
                )


def cut(images: Images, fraction: float, seed: int) -> tuple[Images, Images]:
    """Hold out a fraction of each class; returns `(rest, held_out)`, both in the original order.

    From a class of n >= 2 images, `round(fraction * n)` are held out, but at least 1 and at most n - 1. The only image
    of a class stays in `rest`. The choice within a class does not depend on the other classes.

    Arguments:
        images: images to split, with labels `[N]`.
        fraction: fraction of each class to hold out, in (0, 1).
        seed: seed for choosing the images, at least 0.

    Raises:
        BadInput: `fraction` or `seed` is out of its range.

    Example:
        >>> images = Images(torch.zeros(20, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1] * 10), ("cat", "dog"))
        >>> [len(part) for part in cut(images, 0.1, seed=0)]
        [18, 2]
    """
    rest, held_out = cut_indices(images.labels, fraction, seed)
    return images.subset(rest), images.subset(held_out)


def cut_by(images: Images, attribute: str, seed: int) -> tuple[Images, Images]:
    """Hold out one value of an attribute per class; returns `(rest, held_out)`, both in the original order.

    For each class, one value of the attribute is chosen, and all images of the class with this value are held out: for
    example, all views of one toy out of five. The choice within a class does not depend on the other classes.

    Arguments:
        images: images to split, with labels `[N]`.
        attribute: name of the attribute, a key of `images.attributes`.
        seed: seed for choosing which value of the attribute is held out for each class, at least 0.

    Raises:
        BadInput: the images have no attribute of this name, all images of a class have the same value, or `seed` is
            not an integer of at least 0.

    Example:
        >>> labels, toy = torch.tensor([0, 0, 1, 1]), {"toy": torch.tensor([4, 5, 4, 6])}
        >>> images = Images(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), labels, ("cat", "dog"), toy)
        >>> [part.labels.tolist() for part in cut_by(images, "toy", seed=0)]
        [[0, 1], [0, 1]]
    """
    check_integer("seed", seed, 0, error=BadInput)
    if attribute not in images.attributes:
        known = nearest(attribute, images.attributes) if images.attributes else "; these images have no attributes"
        raise BadInput(f"unknown attribute {attribute!r}{known}")
    held_out = torch.zeros(len(images), dtype=torch.bool, device="cpu")
    for label in images.labels.unique().tolist():
        members = images.labels == label
        values = images.attributes[attribute][members].unique()
        if len(values) < 2:
            raise BadInput(
                f"class {images.class_names[label]} has only one value of {attribute}, so none can be held out: choose"
                " another attribute"
            )
        chosen = values[int(np.random.PCG64([seed, label]).random_raw() % len(values))]
        held_out |= members & (images.attributes[attribute] == chosen)
    return images.subset(~held_out), images.subset(held_out)


def cut_indices(
    labels: Int64[Tensor, " N"], fraction: float, seed: int
) -> tuple[Int64[Tensor, " R"], Int64[Tensor, " M"]]:
    """Compute two lists of indices, both ascending: the images that `cut` keeps, and the images that it holds out."""
    check_number("fraction", fraction, "(0, 1)", BadInput)
    check_integer("seed", seed, 0, error=BadInput)
    held_out = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        # NumPy guarantees that future versions give the same random_raw, but does not guarantee this for permutation.
        order = np.random.PCG64([seed, label]).random_raw(len(members)).argsort(kind="stable")
        held_out[members[torch.from_numpy(order[:count])]] = True
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


def shift(pixels: Shaped[Tensor, "N C H W"], offsets: Int64[Tensor, "N 2"]) -> Shaped[Tensor, "N C H W"]:
    """Shift each image by its own offset and fill the border with 0.

    `shifted[n, c, y, x] = pixels[n, c, y - offsets[n, 0], x - offsets[n, 1]]`

    Arguments:
        pixels: images `[N, C, H, W]`, of any dtype.
        offsets: shifts down and to the right, in pixels, `[N, 2]`, on the device of `pixels`.

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
    """Draw random offsets `[count, 2]` for `shift`, uniform on the integers from `-pixels` to `pixels`.

    Row i depends only on `seed`, `epoch`, `pixels` and i, so a larger `count` does not change the first rows.

    Arguments:
        seed, epoch: seeds of the draw, at least 0.
        count: number of images.
        pixels: largest shift in each direction, at least 0.

    Example:
        >>> shift_offsets(seed=0, epoch=0, count=60_000, pixels=2).shape
        torch.Size([60000, 2])
    """
    generator = np.random.default_rng([seed, epoch])
    return torch.from_numpy(generator.integers(-pixels, pixels, size=(count, 2), endpoint=True))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
