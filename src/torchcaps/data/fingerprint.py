"""Compute checksums of the images of a run, to detect later whether the images have changed."""

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt64
from torch import Tensor

from torchcaps.data.image_files import tracked
from torchcaps.data.images import Images, ImagesOnDisk, Splits

SPLITS = ("train", "validation", "test")
AT_ONCE = 256
"""Number of images that are decoded at the same time to compute their checksums."""


def image_digests(images: Images) -> UInt64[np.ndarray, " N"]:
    """Compute a 64-bit checksum of the size and the pixels of each image.

    Arguments:
        images: N images.

    Returns:
        The checksums, ``[N]``.

    Example:
        >>> images = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
        >>> one, other = image_digests(images)
        >>> bool(one == other)
        True
    """
    shape = repr(images.image_shape).encode()
    digests = b""
    parts: Iterable[Tensor] = torch.arange(len(images), device="cpu").split(AT_ONCE)
    if isinstance(images, ImagesOnDisk):
        parts = tracked(parts, "comparing images", len(images))
    for indices in parts:
        rows = images.batch(indices).flatten(1).contiguous().numpy()
        digests += b"".join(hashlib.blake2b(row.data, digest_size=8, key=shape).digest() for row in rows)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def checksum(images: Images, digests: UInt64[np.ndarray, " N"] | None = None) -> str:
    """Compute a SHA-256 checksum of images, their labels and their order.

    Arguments:
        images: N images with labels.
        digests: checksum of each image, ``[N]``; by default, `image_digests` of the images.

    Returns:
        The checksum as 64 hexadecimal digits.
    """
    found = image_digests(images) if digests is None else digests
    digest = hashlib.sha256(found.astype("<u8").tobytes())
    digest.update(images.labels.contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def fingerprint(
    splits: Splits, before: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, UInt64[np.ndarray, " N"]]]:
    """Summarise each split of a run: the number of images, and a checksum of the images, their labels and their order.

    The checksum covers the encoded image files if all images were read from files, else the pixels. If the files are
    cropped or padded, the summary says so.

    Arguments:
        splits: training, validation and test images.
        before: earlier summary of the same run, to be compared with the new summary. If the earlier summary contains
            checksums of pixels, the new summary contains checksums of pixels too.

    Returns:
        The summary, which is saved in recipe.json, and a dict with a checksum of every image. In this dict, each split
        that is in memory has the key "train", "validation" or "test", with its `image_digests`. Each split that was
        read from files has the key "train files", "validation files" or "test files", with checksums of the files.

    Example:
        >>> images = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
        >>> fingerprint(Splits(images, images, images))[0]["test"]["images"]
        2
    """
    parts = {name: getattr(splits, name) for name in SPLITS}
    digests = {}
    for name, images in parts.items():
        if not isinstance(images, ImagesOnDisk):
            digests[name] = image_digests(images)
        if images.files is not None:
            digests[f"{name} files"] = images.files.digests
    kind = "files" if all(f"{name} files" in digests for name in SPLITS) else "pixels"
    if before is not None and before.get("checksums", "pixels") == "pixels":
        kind = "pixels"
    summary = {}
    for name, images in parts.items():
        found = digests.get(f"{name} files" if kind == "files" else name)
        summary[name] = {"images": len(images), "sha256": checksum(images, found)}
        resize = images.files.resize if kind == "files" and images.files is not None else None
        if resize not in (None, "stretch"):
            summary[name]["resize"] = resize
    return {"class_names": list(splits.train.class_names), "checksums": kind, **summary}, digests


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe how the data of a run have changed; returns None if the data are the same.

    Arguments:
        before, now: summaries returned by `fingerprint`.

    Example:
        >>> difference({"class_names": ["cat", "dog"]}, {"class_names": ["cat", "eel"]})
        'the classes were cat, dog and are now cat, eel'
    """
    if before["class_names"] != now["class_names"]:
        one, other = (", ".join(part["class_names"]) for part in (before, now))
        if unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other):  # macOS changes names to NFD
            return f"the Unicode characters of the class names were {one!a} and are now {other!a}"
        return f"the classes were {one} and are now {other}"
    for name in SPLITS:
        one, other = before[name], now[name]
        if one["images"] != other["images"]:
            return f"there were {one['images']} {name} images and there are now {other['images']}"
        earlier, current = (part.get("resize", "stretch") for part in (one, other))
        if earlier != current:
            return f"resize was {earlier} and is now {current}"
        if one["sha256"] != other["sha256"]:
            return f"the {name} images, their labels or their order have changed"
    return None
