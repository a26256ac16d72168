"""Turn a list of encoded images with labels and splits into `Splits`, in memory or on disk."""

import hashlib
import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from torchcaps.checks import check_number
from torchcaps.data.image_file import Facts, Resize, Size, check_colour, decode, header, target_size
from torchcaps.data.image_files import ImageFiles, Source, tracked
from torchcaps.data.images import Images, ImagesOnDisk, Splits, cut_indices
from torchcaps.errors import BadInput, DataWarning, printable
from torchcaps.process_memory import free_memory

Cache = Literal["auto", "memory", "none"]
Result = TypeVar("Result")

DISTORTION = 1.05
"""A warning gives the number of images whose aspect ratio is changed by more than this factor."""
SHARE = 0.5
"""With ``cache="auto"``, images are held in memory if they take at most this share of the free memory."""
CHECKED = 50
"""If images are not held in memory, at most this many 16-bit and as many transparent images are decoded as a check."""
MOST_UNREADABLE = 20
"""Reading stops after this many images that cannot be read."""
NUMBER = re.compile(r"(-?)0*([0-9]+)(?:\.0*)?")
"""Pattern of whole numbers. Its groups are the same for 1, 01 and 1.0."""
MISSING = ("NA", "N/A", "<NA>", "NaN", "nan", "NULL", "null")
"""Texts that other programs write for a missing value. As the name of a class, they cause a warning."""


@dataclass(frozen=True, eq=False)
class ImageList:
    """Encoded images with their labels and splits.

    Arguments:
        name: name of the folder or file for messages.
        source: the N encoded images.
        labels: `[N]`, int64, from 0 to `len(class_names) - 1`.
        class_names: names of the classes, in the order of the labels.
        rows: indices of the images of each split: "train", "validation" and "test". Splits may be absent.
        remarks: texts of the warnings about the folder or file.
    """

    name: str
    source: Source
    labels: Int64[Tensor, " N"]
    class_names: tuple[str, ...]
    rows: Mapping[str, Int64[Tensor, " _"]]
    remarks: list[str] = field(default_factory=list)

    def split(self, test_fraction: float, seed: int, validation: tuple[float, int] | None) -> list[Tensor]:
        """Return the indices of the training, validation and test images.

        Validation and test images are held out from the training images if the list has no such splits. A remark is
        added if there are validation images but no test images.

        Arguments:
            test_fraction: fraction of each class to hold out for testing if there is no test split.
            seed: seed for choosing the test images.
            validation: `(fraction, seed)` for holding out validation images if there is no validation split. With None,
                no validation images are held out.

        Raises:
            BadInput: there are no training images; there is no test split, and a class has only one image; or
                `test_fraction` is out of its range.
        """
        check_number("test_fraction", test_fraction, "(0, 1)", BadInput)
        train, test, held_out = self.rows.get("train"), self.rows.get("test"), self.rows.get("validation")
        if train is None or not len(train):
            raise BadInput(f"{self.name} has no training images (its splits: {', '.join(self.rows)}): add some")
        if test is None:
            if held_out is not None:
                self.remarks.append(
                    f"{self.name} has validation images but no test images, so a part of the training images "
                    "(data.test_fraction) is held out for the test: add a test split to choose the test images"
                )
            for label, count in enumerate(self.labels[train].bincount(minlength=len(self.class_names)).tolist()):
                if count == 1:
                    only = self.source.name(int(train[self.labels[train] == label]))
                    raise BadInput(
                        f"{only} is the only image of class {self.class_names[label]}, but the training and test splits"
                        " need one image each: add an image"
                    )
            rest, chosen = cut_indices(self.labels[train], test_fraction, seed)
            train, test = train[rest], train[chosen]
        if held_out is None:
            held_out = torch.arange(0, device="cpu")
            if validation is not None:
                rest, chosen = cut_indices(self.labels[train], *validation)
                train, held_out = train[rest], train[chosen]
        return [train, held_out, test]


def read_list(
    images: ImageList,
    splits: Sequence[Int64[Tensor, " _"]],
    *,
    image_size: int | Sequence[int] | None = None,
    resize: Resize = "stretch",
    channels: int | None = None,
    cache: Cache = "memory",
    processes: int = 1,
    progress: bool = True,
) -> tuple[Splits, list[str]]:
    """Read the images of a list; returns the splits and the texts of the warnings.

    Arguments:
        images: the encoded images with their labels.
        splits: indices of the training, validation and test images.
        image_size, resize, channels, progress: as for `load_image_folder`.
        cache: "memory" decodes all images now. "none" decodes only the header of each image now, and decodes an
            image each time it is used. "auto" is "memory" if the decoded images take at most half of the free memory,
            else "none".
        processes: number of processes that each store a copy of all images. Only ``cache="auto"`` uses it: the memory
            of all copies together is compared with the free memory.

    Raises:
        BadInput: an image cannot be read; images have different sizes and `image_size` is None; or the images do not
            fit into memory.
    """
    size = target_size(image_size, resize)
    check_colour(channels)
    remarks = list(images.remarks)
    used = torch.cat([*splits]).sort().values.tolist()
    if cache == "auto":
        needed, free = _decoded_bytes(images.source, used, channels, size) * processes, free_memory()
        cache = "memory"
        if free is not None and needed > SHARE * free:
            cache = "none"
            remarks.append(
                f"the {len(images.source):,} decoded images of {images.name} would take {needed / 1e9:,.1f} GB, more "
                f"than half of the {free / 1e9:,.1f} GB of free memory, so images are decoded again in each epoch: use"
                " --cache memory or a smaller data.image_size to hold them in memory"
            )
    digests = np.zeros(len(images.source), np.uint64)
    indices = tracked(used, "reading images", len(images.source)) if progress else used
    if cache == "memory":
        decoded = _each_read(images.source, indices, digests, partial(decode, channels=channels, size=size))
        pixels, facts = _decode_all(images.source, decoded, splits)
    else:
        facts = dict(_each_read(images.source, indices, digests, header))
        shape = _common_shape(images.source, facts, channels, size)
        facts = _with_pixels(images.source, facts)
    parts: list[Images] = []
    for number, chosen in enumerate(splits):
        files = ImageFiles(images.source, digests, chosen, None if size is None else size.resize)
        labels = images.labels[chosen]
        if cache == "memory":
            parts.append(Images(pixels[number], labels, images.class_names, files=files))
        else:
            parts.append(ImagesOnDisk(files, labels, images.class_names, shape))
    remarks += [*_remarks_on_copies(images, used, digests), *_remarks_on_files(images, facts, size)]
    return Splits(*parts), remarks


def train_and_test(images: ImageList, test_fraction: float, seed: int, **options: Any) -> tuple[Images, Images]:
    """Read the training and test images of a list into memory, and issue the warnings.

    Arguments:
        images: the encoded images with their labels; images of a validation split are not read.
        test_fraction, seed: as for `ImageList.split`.
        options: as for `read_list`.
    """
    train, _, test = images.split(test_fraction, seed, None)
    read, remarks = read_list(images, [train, torch.arange(0, device="cpu"), test], **options)
    for remark in remarks:
        warnings.warn(remark, DataWarning, stacklevel=3)
    return read.train, read.test


def remarks_on_names(name: str, class_names: Sequence[str], cure: str) -> Iterator[str]:
    """Yield warning texts about class names that look the same, or like a missing value."""
    alike: dict[str, str] = {}
    for one in class_names:
        plain = unicodedata.normalize("NFC", one).strip()
        key = plain.casefold() if len(plain) > 2 else plain  # short names, such as letters, can differ only in case
        if number := NUMBER.fullmatch(plain):
            key = "".join(number.groups())
        other = alike.setdefault(key, one)
        if other != one:
            yield f"{name} has the class names {other!a} and {one!a}, which look alike: {cure} if they are one class"
        if plain in MISSING:
            yield f"{name} has the class {one!a}, like a missing value: remove its images if they have no class"


def _decoded_bytes(source: Source, used: Sequence[int], channels: int | None, size: Size | None) -> int:
    """Estimate the memory that the decoded images take, from the header of the first image that can be read."""
    for index in used:
        with suppress(BadInput):
            first = header(source.read(index), source.name(index))
            height, width = size[:2] if size else (first.height, first.width)
            return len(source) * (channels or 3) * height * width
    return 0


def _each_read(
    source: Source, indices: Iterable[int], digests: np.ndarray, read: Callable[[bytes, str], Result]
) -> Iterator[tuple[int, Result]]:
    """Yield the index of each image and the result of `read`, and write the checksum of the image to `digests`.

    Raises:
        BadInput: images cannot be read. The error is raised at the end, or after `MOST_UNREADABLE` such images.
    """
    errors: dict[str, BadInput] = {}
    for index in indices:
        name = source.name(index)
        try:
            content = source.read(index)
            result = read(content, name)
        except BadInput as error:
            errors[name] = error
            if len(errors) == MOST_UNREADABLE:
                break
            continue
        digests[index] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        yield index, result
    if errors:
        first, *others = errors
        count = f"at least {len(others)}" if len(errors) == MOST_UNREADABLE else len(others)
        more = f"; {count} more cannot be read: {', '.join(map(printable, others))}" if others else ""
        raise BadInput(f"{errors[first]}{more}") from errors[first]


def _decode_all(
    source: Source, decoded: Iterable[tuple[int, tuple[Tensor, Facts]]], splits: Sequence[Tensor]
) -> tuple[list[Tensor], dict[int, Facts]]:
    """Copy each decoded image into the tensor of its split; returns the pixels per split and the `Facts`."""
    places = {index: (split, row) for split, chosen in enumerate(splits) for row, index in enumerate(chosen.tolist())}
    pixels: list[Tensor] = []
    facts: dict[int, Facts] = {}
    for index, (image, found) in decoded:
        facts[index] = found
        count, height, width = image.shape
        if not pixels:
            pixels = [_room(len(chosen), count, height, width, len(source)) for chosen in splits]
        _check_size(source, next(iter(facts)), index, (height, width), tuple(pixels[0].shape[2:]))
        if count > pixels[0].shape[1]:
            pixels = [part.expand(-1, count, -1, -1).contiguous() for part in pixels]
        split, row = places[index]
        pixels[split][row] = image
    return pixels, facts


def _common_shape(
    source: Source, facts: Mapping[int, Facts], channels: int | None, size: Size | None
) -> tuple[int, int, int]:
    """Return the shape `(C, H, W)` that all images have when they are decoded."""
    place = next(iter(facts))
    first = facts[place].height, facts[place].width
    if size is None:
        for index, found in facts.items():
            _check_size(source, place, index, (found.height, found.width), first)
    return (channels or (1 if all(found.grey for found in facts.values()) else 3), *(size[:2] if size else first))


def _check_size(source: Source, place: int, index: int, size: tuple[int, ...], first: tuple[int, ...]) -> None:
    if size != first:
        raise BadInput(
            f"{source.name(place)} is {first[1]}×{first[0]} pixels (width×height), but {source.name(index)} is "
            f"{size[1]}×{size[0]}: resize all images with --set data.image_size=N (in Python, image_size=N)"
        )


def _room(count: int, channels: int, height: int, width: int, of: int) -> Tensor:
    try:
        return torch.empty(count, channels, height, width, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise BadInput(
            f"{of:,} images of {width}×{height} pixels (width×height) take "
            f"{of * channels * height * width / 1e9:,.1f} GB, more than the free memory: make them smaller with --set "
            "data.image_size=N (in Python, image_size=N), or decode them in each epoch with --cache none (in Python, "
            'cache="none")'
        ) from error


def _with_pixels(source: Source, facts: dict[int, Facts]) -> dict[int, Facts]:
    """Decode at most `CHECKED` 16-bit and `CHECKED` transparent images, and complete their `Facts`."""
    deep = [index for index, found in facts.items() if found.deep]
    transparent = [index for index, found in facts.items() if found.transparent]
    for chosen in (deep, transparent):
        for index in chosen[:: math.ceil(len(chosen) / CHECKED) or 1]:
            facts[index] = decode(source.read(index), source.name(index), None, None)[1]
    return facts


def _remarks_on_copies(images: ImageList, used: Sequence[int], digests: np.ndarray) -> Iterator[str]:
    """Yield a warning text if the same file content occurs in several classes."""
    order = np.asarray(used, np.int64)
    labels = images.labels.numpy()
    order = order[np.lexsort((labels[order], digests[order]))]
    conflicts = np.flatnonzero((np.diff(digests[order]) == 0) & (np.diff(labels[order]) != 0))
    if len(conflicts):
        count = np.isin(digests[order], digests[order[conflicts]]).sum()
        first, second = (printable(images.source.name(int(order[conflicts[0] + one]))) for one in (0, 1))
        yield (
            f"{count:,} images of {images.name} are copies that occur in several classes, for example {first} and"
            f" {second}: remove the copies in the wrong class"
        )


def _remarks_on_files(images: ImageList, facts: Mapping[int, Facts], size: Size | None) -> Iterator[str]:
    """Yield warning texts about files with several frames, nearly black images, and changed aspect ratios."""
    several = [index for index, found in facts.items() if found.several]
    if several:
        have = "1 file has" if len(several) == 1 else f"{len(several):,} files have"
        first = printable(images.source.name(several[0]))
        yield f"{images.name}: {have} several frames, such as {first}; only the first frame is read"
    largest = max((found.largest for found in facts.values() if found.largest is not None), default=None)
    if largest is not None and largest < 4096:
        yield (
            f"the largest value of the 16-bit images in {images.name} is {largest:,} of 65,535, as in"
            f" {largest.bit_length()}-bit data, so these images are nearly black: scale them to the full 16 bits"
            f" (multiply by {65_535 // max(largest, 1):,})"
        )
    if black := [index for index, found in facts.items() if found.black]:
        have = "1 image" if len(black) == 1 else f"at least {len(black):,} images"
        are = "is" if len(black) == 1 else "are"
        first = printable(images.source.name(black[0]))
        yield (
            f"{have} of {images.name} {are} black everywhere, such as {first}, because transparent pixels become black:"
            " paste the images on a background of another colour"
        )
    if size is not None and size.resize == "stretch":
        ratios = [found.width / found.height for found in facts.values()]
        target = math.log(size.width / size.height)
        distorted = sum(abs(math.log(ratio) - target) > math.log(DISTORTION) for ratio in ratios)
        seen = " to ".join(dict.fromkeys((f"{min(ratios):.2f}", f"{max(ratios):.2f}")))
        if distorted:
            yield (
                f"resizing {images.name} to height {size.height} and width {size.width} changes the aspect ratio of"
                f" {distorted:,} of {len(facts):,} images by more than 5 % (before resizing, width / height is {seen}):"
                " set data.resize=crop or data.resize=pad, or set data.image_size=[height,width] to their aspect ratio"
            )
