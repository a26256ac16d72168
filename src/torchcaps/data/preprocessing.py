"""Convert uint8 images to the input of a network: random augmentation, standardisation and crops."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from torchcaps.checks import check_floating, check_integer, check_number, described
from torchcaps.data.images import shift, shift_offsets
from torchcaps.errors import BadInput
from torchcaps.options import check_kind, kinds_of

Standardise = Literal["none", "first", "last"]


class Variation(NamedTuple):
    """Random numbers for the augmentation of N images in one epoch, as drawn by `Preprocessing.variation`.

    Arguments:
        offsets: shifts down and to the right, in pixels, ``[N, 2]``; None if images are not shifted.
        uniform: four numbers in [0, 1) per image, ``[N, 4]``: vertical and horizontal position of the crop, brightness,
            contrast. None if the preprocessing uses none of the four.
        warp: four numbers per image, ``[N, 4]``: rotation (clockwise if positive) and squeeze in [-1, 1]; vertical and
            horizontal position of the erased square in [0, 1). None if the preprocessing uses none of the four.
        mirrored: whether each image is mirrored, ``[N]``; None if images are not mirrored.
        distances: elastic distortion at a 6×6 grid of points, ``[N, 2, 6, 6]``: distances right and down, in pixels,
            to the place from which the pixel at the point is taken. None if images are not distorted.

    Example:
        >>> Preprocessing(shift=2).variation(seed=0, epoch=0, count=5).offsets.shape
        torch.Size([5, 2])
    """

    offsets: Int64[Tensor, "N 2"] | None
    uniform: Float[Tensor, "N 4"] | None
    warp: Float[Tensor, "N 4"] | None = None
    mirrored: Bool[Tensor, " N"] | None = None
    distances: Float[Tensor, "N 2 6 6"] | None = None

    def of(self, indices: Int64[Tensor, " M"]) -> "Variation":
        """Return the random numbers of the images at `indices`."""
        return Variation(*(None if part is None else part[indices] for part in self))

    def to(self, device: torch.device) -> "Variation":
        """Copy the random numbers to a device."""
        return Variation(*(None if part is None else part.to(device, non_blocking=True) for part in self))


@dataclass(frozen=True)
class Preprocessing:
    """Converts batches of uint8 images to the input of a network, with random augmentation in training.

    Pixels are scaled to [0, 1]. With the default arguments, this scaling is the only step. The order in training is:
    shift, flip, standardise (``first``), crop, contrast, brightness, rotation, then squeeze, erase, standardise
    (``last``); elastic distortion is part of the interpolation of rotation and squeeze. Results outside [0, 1] are
    kept. Rotation, squeeze and erase are similar to the augmentation of Mazzia, Salvetti & Chiaberge 2021.

    Arguments:
        shift: training only; largest shift in each direction, in pixels, with zero padding; 0 is off. As in Sabour,
            Frosst & Hinton 2017.
        standardise: when to scale each image, over all its channels, to mean 0 and variance 1. "first": before crop,
            brightness and contrast, as in the text of Hinton, Sabour & Frosst 2018; "last": after all other steps, as
            in the code of the same authors; "none": never. If the standard deviation of an image is less than 1/255,
            1/255 is used instead. "last" removes random brightness and contrast, unless an image is also rotated,
            squeezed, distorted or erased.
        crop: height and width of the crop, in pixels. The crop is at a random position in training, else in the centre;
            if the margins cannot be equal, the top and left margins are one pixel larger. 0 keeps the whole image.
        flip: training only; mirror each image left to right with probability 0.5. The two channels of a mirrored stereo
            pair are swapped too, because mirroring exchanges the left and the right camera.
        brightness: training only; largest number that is added to or subtracted from all pixels of an image, in
            [0, 10].
        contrast: training only; largest relative change of contrast, in [0, 1]. The difference of each pixel from the
            mean of its crop, over all channels, is multiplied by a random factor from 1 - contrast to 1 + contrast.
        rotation: training only; largest angle in degrees, in [0, 180]. Each image is rotated about its centre with
            probability 0.5. Pixels are interpolated bilinearly, and pixels from outside the image are 0. Angles are
            normally distributed and clipped to the largest angle. The standard deviation is a third of the largest
            angle.
        squeeze: training only; largest fraction by which the width of an image is reduced, in [0, 0.9].
            For each image, the fraction is the absolute value of a normally distributed number, clipped to the largest
            fraction. The standard deviation of this number is a third of the largest fraction.
        erase: training only; height and width, in pixels, of a square that is set to 0. Its position is random, but its
            distance from the border is at least `erase`. 0 erases nothing.
        elastic: training only; standard deviation, in pixels, of a random elastic distortion, in [0, 100] (Ronneberger,
            Fischer & Brox 2015, arXiv 1505.04597). The points of a 6×6 grid are displaced by normally distributed
            distances. The corners of the grid are the corner pixels. The displacements of the pixels between the points
            are interpolated bicubically, and added to the places from which rotation and squeeze take the pixels.
        test_crops: evaluation only, from 1 to 32; scores are averaged over test_crops² evenly spaced crops. 1 uses only
            the centre crop.

    Raises:
        BadInput: a value has the wrong type or is out of its range, or `test_crops` is above 1 and `crop` is 0.

    Example:
        >>> Preprocessing(crop=4).plain(torch.zeros(2, 1, 6, 6, dtype=torch.uint8)).shape
        torch.Size([2, 1, 4, 4])
    """

    shift: int = 0
    standardise: Standardise = "none"
    crop: int = 0
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    rotation: float = 0.0
    squeeze: float = 0.0
    erase: int = 0
    elastic: float = 0.0
    test_crops: int = 1

    def __post_init__(self) -> None:
        for key, kind in kinds_of(type(self)).items():
            check_kind(key, getattr(self, key), kind)
        for key in ("shift", "crop", "erase"):
            check_integer(key, getattr(self, key), 0, 10_000, BadInput)
        check_integer("test_crops", self.test_crops, 1, 32, BadInput)
        intervals = {"brightness": "[0, 10]", "contrast": "[0, 1]", "rotation": "[0, 180]", "squeeze": "[0, 0.9]"}
        for key, interval in {**intervals, "elastic": "[0, 100]"}.items():
            check_number(key, getattr(self, key), interval, BadInput)
        if self.test_crops > 1 and not self.crop:
            raise BadInput(f"test_crops is {self.test_crops}, but crop is 0: set crop too, or test_crops=1")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """Create a `Preprocessing` from a mapping of settings; ignore settings that it does not have."""
        return cls(**{key.name: settings[key.name] for key in fields(cls) if key.name in settings})

    def image_shape(self, stored: tuple[int, int, int]) -> tuple[int, int, int]:
        """Compute the shape `(C, H, W)` of the network's input.

        Arguments:
            stored: shape `(C, H, W)` of the images before the preprocessing.

        Raises:
            BadInput: `crop` is larger than the shorter side of the images before the preprocessing; `shift` is not
                smaller than this side; or `erase` is larger than a third of the shorter side of the input.
        """
        channels, height, width = stored
        if self.crop > min(height, width):
            raise BadInput(
                f"crop must be at most {min(height, width)}, the shorter side of the images; got {self.crop}: use a "
                "smaller crop, or crop=0 for the whole image"
            )
        if self.shift >= min(height, width):
            most = min(height, width) - 1
            raise BadInput(f"shift must be at most {most} for images of {height}×{width} pixels; got {self.shift}")
        if 3 * self.erase > (self.crop or min(height, width)):
            most = (self.crop or min(height, width)) // 3
            raise BadInput(f"erase must be at most {most}, a third of the image's shorter side; got {self.erase}")
        return (channels, self.crop, self.crop) if self.crop else stored

    def variation(self, seed: int, epoch: int, count: int) -> Variation:
        """Draw the random numbers for the augmentation of `count` images in one epoch.

        The same preprocessing and the same arguments always give the same numbers.
        """
        varied = self.crop or self.brightness or self.contrast
        uniform = np.random.default_rng([seed, epoch, 2]).random((count, 4), dtype=np.float32) if varied else None
        return Variation(
            shift_offsets(seed, epoch, count, self.shift) if self.shift else None,
            None if uniform is None else torch.from_numpy(uniform),
            self._warp(np.random.default_rng([seed, epoch, 3]), count),
            torch.from_numpy(np.random.default_rng([seed, epoch, 4]).random(count) < 0.5) if self.flip else None,
            self._distances(np.random.default_rng([seed, epoch, 5]), count),
        )

    def _warp(self, random: np.random.Generator, count: int) -> Tensor | None:
        if not (self.rotation or self.squeeze or self.erase):
            return None
        amounts = (random.standard_normal((count, 2)) / 3).clip(-1, 1)
        uniform = random.random((count, 3))
        amounts[:, 0] *= uniform[:, 2] < 0.5
        return torch.from_numpy(np.concatenate([amounts, uniform[:, :2]], axis=1)).float()

    def _distances(self, random: np.random.Generator, count: int) -> Tensor | None:
        if not self.elastic:
            return None
        return torch.from_numpy(random.standard_normal((count, 2, 6, 6), dtype=np.float32)) * self.elastic

    def varied(self, pixels: UInt8[Tensor, "B C H W"], variation: Variation) -> Float[Tensor, "B C h w"]:
        """Convert a batch for training, with augmentation. Image i uses row i of each tensor in `variation`."""
        if variation.offsets is not None:
            pixels = shift(pixels, variation.offsets)
        if variation.mirrored is not None:
            mirrored = pixels.flip(3).flip(1) if pixels.shape[1] == 2 else pixels.flip(3)
            pixels = torch.where(variation.mirrored[:, None, None, None], mirrored, pixels)
        images = self._standardised(_scaled(pixels), "first")
        if variation.uniform is not None:
            down, across, brightness, contrast = variation.uniform.unbind(1)
            images = self._cut(images, down, across)
            factor, more = 1 + self.contrast * (2 * contrast - 1), self.brightness * (2 * brightness - 1)
            mean = images.mean(dim=(1, 2, 3))
            images = images * factor[:, None, None, None] + (mean * (1 - factor) + more)[:, None, None, None]
        images = self._warped(images, variation)
        if variation.warp is not None and self.erase:
            images = self._erased(images, variation.warp)
        return _channels_last(self._standardised(images, "last"))

    def _warped(self, images: Tensor, variation: Variation) -> Tensor:
        """Rotate and squeeze each image about its centre, and distort it elastically."""
        if not (self.rotation or self.squeeze or self.elastic):
            return images
        _, _, height, width = images.shape
        warp = images.new_zeros(len(images), 4) if variation.warp is None else variation.warp
        turn, squeeze, _, _ = warp.unbind(1)
        angle, stretch = torch.deg2rad(self.rotation * turn), 1 / (1 - self.squeeze * squeeze.abs())
        cosine, sine, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        rows = [cosine * stretch, sine * height / width, zero, -sine * stretch * width / height, cosine, zero]
        places = functional.affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), list(images.shape), False)
        if variation.distances is not None:
            moved = functional.interpolate(variation.distances, (height, width), mode="bicubic", align_corners=True)
            places = places + moved.permute(0, 2, 3, 1) * moved.new_tensor([2 / width, 2 / height])
        return functional.grid_sample(images, places, align_corners=False)

    def _erased(self, images: Tensor, warp: Tensor) -> Tensor:
        """Set a square of each image to 0."""
        inside = []
        for place, side in zip(warp.unbind(1)[2:], images.shape[2:], strict=True):
            first = self.erase + (place * (side - 3 * self.erase + 1)).floor()
            distance = torch.arange(side, device=images.device) - first[:, None]
            inside.append((distance >= 0) & (distance < self.erase))
        return images.masked_fill(inside[0][:, None, :, None] & inside[1][:, None, None, :], 0)

    def plain(self, pixels: UInt8[Tensor, "B C H W"]) -> Float[Tensor, "B C h w"]:
        """Convert a batch without augmentation; the crop is taken from the centre."""
        return self._at(_scaled(pixels), 0.5, 0.5)

    def plain_of(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C h w"]:
        """Convert images with pixels in [0, 1], as `plain` converts uint8 images. The conversion is differentiable."""
        check_floating("images", images)
        return self._at(images, 0.5, 0.5)

    def views(self, pixels: UInt8[Tensor, "B C H W"]) -> Float[Tensor, "V B C h w"]:
        """Convert a batch for evaluation into `test_crops`² crops per image, or one whole image if `crop` is 0."""
        if self.test_crops == 1 or not self.crop:
            return self.plain(pixels)[None]
        places = _places(self.test_crops)
        images = self._standardised(_scaled(pixels), "first")
        return torch.stack([self._cropped(images, down, across) for down in places for across in places])

    def _at(self, images: Tensor, down: float, across: float) -> Tensor:
        return self._cropped(self._standardised(images, "first"), down, across)

    def _cropped(self, images: Tensor, down: float, across: float) -> Tensor:
        if self.crop:
            row, column = (
                min(int(np.float32(place) * np.float32(side - self.crop + 1)), side - self.crop)
                for place, side in zip((down, across), images.shape[2:], strict=True)
            )
            images = images[:, :, row : row + self.crop, column : column + self.crop]
        return _channels_last(self._standardised(images, "last"))

    def _standardised(self, images: Tensor, when: Standardise) -> Tensor:
        if self.standardise != when:
            return images
        deviation, mean = torch.std_mean(images, dim=(1, 2, 3), keepdim=True, correction=0)
        return (images - mean) / deviation.clamp_min(1 / 255)

    def _cut(self, images: Tensor, down: Tensor, across: Tensor) -> Tensor:
        """Crop each image; `down` and `across` give its position, from 0 (top, left) to 1 (bottom, right)."""
        if not self.crop:
            return images
        _, channels, height, width = images.shape
        first_row = (down * (height - self.crop + 1)).long().clamp_max(height - self.crop)
        first_column = (across * (width - self.crop + 1)).long().clamp_max(width - self.crop)
        span = torch.arange(self.crop, device=images.device)
        rows = (first_row[:, None] + span)[:, None, :, None].expand(-1, channels, -1, width)
        columns = (first_column[:, None] + span)[:, None, None, :].expand(-1, channels, self.crop, -1)
        return images.gather(2, rows).gather(3, columns)


def _scaled(pixels: Tensor) -> Tensor:
    if pixels.dtype != torch.uint8:
        cure = "use plain_of for numbers in [0, 1]" if pixels.is_floating_point() else "use pixels.to(torch.uint8)"
        raise BadInput(f"pixels must be uint8, from 0 to 255; got {described(pixels)}: {cure}")
    return pixels.float().div_(255)


def _places(count: int) -> list[float]:
    """Compute torch.linspace(0, 1, count).tolist() for count > 1, in a way that torch.export can trace."""
    step = float(np.float32(1 / (count - 1)))
    places = [step * k if 2 * k < count - 1 else 1 - step * (count - 1 - k) for k in range(count)]
    return np.array(places, np.float32).tolist()


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
