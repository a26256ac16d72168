"""Compute checksums of the images of a run, to detect later whether the images have changed."""

import hashlib
from typing import Any

import numpy as np
from jaxtyping import UInt64

from torchcaps.data.images import Images, Splits


def image_digests(images: Images) -> UInt64[np.ndarray, " N"]:
    """Compute a 64-bit checksum of the size and the pixels of each image.

    Arguments:
        images: N images.
    Returns:
        The checksums, ``[N]``.
    Example:
        >>> import torch
        >>> images = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
        >>> one, other = image_digests(images)
        >>> bool(one == other)
        True
    """
    shape = repr(images.image_shape).encode()
    pixels = images.pixels.contiguous().numpy().reshape(len(images), -1)
    digests = (hashlib.blake2b(row.data, digest_size=8, key=shape).digest() for row in pixels)
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def fingerprint(splits: Splits) -> tuple[dict[str, Any], dict[str, UInt64[np.ndarray, " N"]]]:
    """Summarise each split of a run: the number of images, and a checksum of their pixels, labels and order.

    Arguments:
        splits: training, validation and test images.
    Returns:
        The summary that is saved in recipe.json, and the `image_digests` of each split.
    Example:
        >>> import torch
        >>> images = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
        >>> fingerprint(Splits(images, images, images))[0]["test"]["images"]
        2
    """
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    digests = {name: image_digests(images) for name, images in parts.items()}
    summary = {}
    for name, images in parts.items():
        digest = hashlib.sha256(digests[name].astype("<u8").tobytes())
        digest.update(images.labels.contiguous().numpy().astype("<i8").tobytes())
        summary[name] = {"images": len(images), "sha256": digest.hexdigest()}
    return {"class_names": list(splits.train.class_names), **summary}, digests


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe how the data of a run have changed; returns None if the data are the same.

    Arguments:
        before, now: summaries returned by `fingerprint`.
    Example:
        >>> difference({"class_names": ["cat", "dog"]}, {"class_names": ["cat", "eel"]})
        'its classes were cat, dog and are now cat, eel'
    """
    if before["class_names"] != now["class_names"]:
        return f"its classes were {', '.join(before['class_names'])} and are now {', '.join(now['class_names'])}"
    for name in ("train", "validation", "test"):
        one, other = before[name], now[name]
        if one["images"] != other["images"]:
            return f"it had {one['images']} {name} images and now has {other['images']}"
        if one["sha256"] != other["sha256"]:
            return f"its {name} images, their labels or their order have changed"
    return None
