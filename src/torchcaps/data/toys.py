"""Render toys in smallNORB's structure and file format: 50 toys, 9 elevations, 18 azimuths, 6 lightings, 2 cameras.

The rendered toys are a substitute for smallNORB if its files are not available. The viewpoint of each image is known
exactly. A toy consists of solids (see `toy_shapes.py`) and is rendered by ray casting. Processors of different kinds
round differently, so a few pixels can differ between computers.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torchcaps.checks import check_integer
from torchcaps.data.files import atomically, unwritable, verified, write_json
from torchcaps.data.image_files import tracked
from torchcaps.data.images import Images
from torchcaps.data.norb import CATEGORIES, KINDS, as_images, load_norb_files, norb_bytes, norb_file
from torchcaps.data.toy_shapes import Solid, toy
from torchcaps.errors import BadInput

INSTANCES = {"train": (4, 6, 7, 8, 9), "test": (0, 1, 2, 3, 5)}
ELEVATIONS, AZIMUTHS, LIGHTINGS = range(9), range(0, 36, 2), range(6)
SIZES = (48, 96)
SUMS = "toys-{0}x{0}-md5.json"
"""Name of the file of checksums for one image size. It is written last: without it, the rendering is incomplete."""
DISTANCE, HALF_WIDTH, BASELINE = 6.0, 1.3, 0.35
"""Distance of the camera from the centre of the toy, half the width of the view at that distance, and distance between
the two cameras. A toy has radius 1."""
NOISE = 2.0
"""Standard deviation of the noise in grey levels, from 0 (black) to 255 (white)."""
VIEWS_AT_ONCE = 18


def render_toys(data_dir: Path, *, size: int = 48, seed: int = 0, progress: bool = True) -> Path:
    """Render toys with the structure and file format of smallNORB: 24,300 stereo pairs each for training and test.

    There are five categories with ten toys each. Every toy is rendered from 9 elevations and 18 azimuths under 6
    lightings. The same `size` and `seed` give the same bytes on processors of the same kind. The rows of a file cycle
    through the five categories; within a category, they are ordered by instance, elevation, azimuth and lighting. A
    file of checksums is written last. If this file is missing, the rendering is incomplete, and `load_toys` repeats it.

    Arguments:
        data_dir: data folder. The files are written to its subfolder `toys`, or `toys-seedN` for a seed N above 0.
        size: height and width of the images in pixels, 48 or 96.
        seed: seed of the shapes and the noise, at least 0. Each seed gives a different set of fifty toys.
        progress: draw a progress bar on standard error.

    Returns:
        The folder of the files.

    Raises:
        BadInput: `size` is not 48 or 96, `seed` is negative, or the files cannot be written.

    Example:
        >>> render_toys(Path("data"))  # doctest: +SKIP
        PosixPath('data/toys')
    """
    if size not in SIZES:
        raise BadInput(f"size must be 48 or 96; got {size}")
    check_integer("seed", seed, 0, error=BadInput)
    folder = _folder(data_dir, seed)
    jobs = [
        (split, instance, category) for split in INSTANCES for instance in INSTANCES[split] for category in range(5)
    ]
    grid = np.array([*product(ELEVATIONS, AZIMUTHS, LIGHTINGS)])
    rendered, sums = {}, {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        for split, instance, category in tracked(jobs, "rendering toys", len(jobs) * len(grid)) if progress else jobs:
            rendered[split, instance, category] = render_toy(category, instance, size=size, seed=seed)
        (folder / SUMS.format(size)).unlink(missing_ok=True)
        for split, instances in INSTANCES.items():
            rows = [[rendered[split, instance, category] for category in range(5)] for instance in instances]
            images = np.concatenate([np.stack(row, axis=1).reshape(-1, 2, size, size) for row in rows])
            categories = np.tile(np.arange(5, dtype=np.int32), len(images) // 5)
            info = np.concatenate([np.insert(grid, 0, instance, axis=1) for instance in instances])
            arrays = (images, categories, np.repeat(info, 5, axis=0).astype(np.int32))
            for kind, array in zip(KINDS, arrays, strict=True):
                name, content = norb_file("toys", split, size, kind), norb_bytes(array)
                sums[name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
                with atomically(folder / name) as stream:
                    stream.write(content)
        write_json(folder / SUMS.format(size), sums)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def render_toy(category: int, instance: int, *, size: int = 48, seed: int = 0) -> np.ndarray:
    """Render all views of one toy as uint8 ``[elevations · azimuths · lightings, 2 cameras, size, size]``.

    Arguments:
        category: index in `CATEGORIES`, from 0 to 4.
        instance: index of the toy in its category, from 0 to 9.
        size: height and width of the images in pixels.
        seed: seed of shapes and noise.
    """
    solids = toy(CATEGORIES[category], instance, seed)
    views = [(elevation, azimuth, camera) for elevation in ELEVATIONS for azimuth in AZIMUTHS for camera in (0, 1)]
    shaded = []
    for start in range(0, len(views), VIEWS_AT_ONCE):
        cameras = [_camera(*view) for view in views[start : start + VIEWS_AT_ONCE]]
        normals, hit = cast(solids, cameras, 2 * size)
        shaded.append(torch.nn.functional.avg_pool2d(_shade(normals, hit).unflatten(2, (2 * size, 2 * size)), 2))
    grey = torch.cat(shaded).unflatten(0, (-1, 2)).transpose(1, 2).flatten(0, 1)
    random = np.random.default_rng([seed, category, instance, 1])
    noise = random.standard_normal(tuple(grey.shape), dtype=np.float32)
    return np.clip(np.rint(255 * grey.numpy() + NOISE * noise), 0, 255).astype(np.uint8)


def load_toys(data_dir: Path, *, size: int = 48, stereo: bool = True, render_seed: int = 0) -> tuple[Images, Images]:
    """Load the rendered toys as `(train, test)`: 24,300 stereo pairs each, uint8 `[N, 2, size, size]`, five classes.

    The two splits show different toys. Each image has the attributes of smallNORB: instance, elevation, azimuth and
    lighting. The function `camera_rotation` computes the rotation matrix of the camera from elevation and azimuth.
    Missing toys are rendered first, and the checksums are verified on every load.

    Arguments:
        data_dir: data folder; the files are in its subfolder `toys`, or `toys-seedN` for a render_seed N above 0.
        size: height and width in pixels, 96 or a divisor of 48.
        stereo: True for both cameras as two channels, False for the first camera only.
        render_seed: seed of the toys' shapes and of the noise, at least 0.

    Raises:
        BadInput: `size` is neither 96 nor a divisor of 48, `render_seed` is negative, or a file has a wrong checksum,
            cannot be read, or cannot be written.

    Example:
        >>> train, test = load_toys(Path("data"))  # doctest: +SKIP
    """
    check_integer("render_seed", render_seed, 0, error=BadInput)
    rendered = 96 if size == 96 else 48
    if not 1 <= size <= rendered or rendered % size:
        raise BadInput(f"size must be 96 or a divisor of 48; got {size}")
    folder = _folder(data_dir, render_seed)
    if not (folder / SUMS.format(rendered)).exists():
        render_toys(data_dir, size=rendered, seed=render_seed)
    for file, problem in _verified(folder, rendered):
        if problem != "ok":
            raise BadInput(f"{folder / file}: {problem}")
    train, test = (as_images(load_norb_files(folder, "toys", split, rendered), size, stereo) for split in INSTANCES)
    return train, test


def verify_toys(data_dir: Path) -> list[tuple[str, str]]:
    """Check all files of rendered toys in a data folder; returns `(file, "ok" or the problem)` for each file."""
    found = []
    for folder in sorted(data_dir.glob("toys*")):
        for size in SIZES:
            if (folder / SUMS.format(size)).exists():
                found += [(f"{folder.name}/{file}", problem) for file, problem in _verified(folder, size)]
    return found or [("toys", f"missing from {data_dir}: run `torchcaps data render toys`")]


def _verified(folder: Path, size: int) -> list[tuple[str, str]]:
    again = f"remove {folder / SUMS.format(size)} to render the toys again"
    try:
        sums = json.loads((folder / SUMS.format(size)).read_text())
        md5 = {str(file): str(right) for file, right in sums.items()}
        if md5.keys() != {norb_file("toys", split, size, kind) for split in INSTANCES for kind in KINDS}:
            raise ValueError("it does not name exactly the rendered files")
    except (ValueError, AttributeError) as error:
        return [(SUMS.format(size), f"damaged ({error}); {again}")]
    return verified(folder, md5, again)


def _folder(data_dir: Path, seed: int) -> Path:
    return data_dir / (f"toys-seed{seed}" if seed else "toys")


def camera_rotation(elevation: int, azimuth: int, camera: int = 0) -> Float[np.ndarray, "3 3"]:
    """Compute the rotation matrix `[3, 3]` of the camera that took an image of the rendered toys.

    The rows are unit vectors in the coordinates of the toy: the camera's right, the camera's up, and the direction from
    the toy to the camera.

    Arguments:
        elevation: attribute of an image, 0 to 8 for 30° to 70° in steps of 5°.
        azimuth: attribute of an image in units of 10°: 0, 2, …, 34.
        camera: channel of a stereo pair, 0 or 1.

    Example:
        >>> camera_rotation(0, 0).shape
        (3, 3)
    """
    _, right, up, towards = _camera(elevation, azimuth, camera)
    return np.stack([right, up, towards])


def cast(
    solids: Sequence[Solid], cameras: Sequence[tuple[np.ndarray, ...]], width: int
) -> tuple[Float[Tensor, "views 3 rays"], Bool[Tensor, "views rays"]]:
    """Find the first surface that each ray of each camera hits.

    Arguments:
        solids: solids of one toy.
        cameras: for each camera, its position and three unit vectors: right, up, and from the toy towards the camera.
        width: number of rays per row and per column.

    Returns:
        For each ray, the unit normal of the surface that it hits, and whether it hits a surface.
    """
    place, right, up, towards = (torch.from_numpy(np.stack(part)).float() for part in zip(*cameras, strict=True))
    across = ((torch.arange(width, device=place.device) + 0.5) / width * 2 - 1) * HALF_WIDTH / DISTANCE
    x, y = across.repeat(width), -across.repeat_interleave(width)
    nearest = place.new_full((len(cameras), width * width), torch.inf)
    normals = place.new_zeros(len(cameras), 3, width * width)
    for solid in solids:
        turn = place.new_tensor(solid.rotation())
        half = place.new_tensor(solid.half_sizes)
        into = turn.T / half[:, None]
        start = _product(place - place.new_tensor(solid.centre), into)
        ahead, aside, above = (_product(part, into)[:, :, None] for part in (-towards, right, up))
        distance, normal = MEETINGS[solid.kind](start[:, :, None], ahead + x * aside + y * above, solid.taper)
        closer = distance < nearest
        nearest = torch.where(closer, distance, nearest)
        out = (turn / half)[None, :, :, None] * normal[:, None]
        normals = torch.where(closer[:, None], out[:, :, 0] + out[:, :, 1] + out[:, :, 2], normals)
    length = (normals[:, 0] ** 2 + normals[:, 1] ** 2 + normals[:, 2] ** 2).sqrt()
    return normals / length.clamp_min(1e-12)[:, None], nearest.isfinite()


def _product(vectors: Tensor, matrix: Tensor) -> Tensor:
    """Compute ``matrix · vector`` for each row, adding in a fixed order so that all machines round in the same way."""
    terms = vectors[:, None, :] * matrix[None]
    return terms[..., 0] + terms[..., 1] + terms[..., 2]


def _meet_ellipsoid(start: Tensor, ray: Tensor, taper: float) -> tuple[Tensor, Tensor]:
    a = ray[:, 0] ** 2 + ray[:, 1] ** 2 + ray[:, 2] ** 2
    b = start[:, 0] * ray[:, 0] + start[:, 1] * ray[:, 1] + start[:, 2] * ray[:, 2]
    c = start[:, 0] ** 2 + start[:, 1] ** 2 + start[:, 2] ** 2 - 1
    inside = b * b - a * c
    distance = torch.where(inside > 0, (-b - inside.clamp_min(0).sqrt()) / a, torch.inf)
    return distance, start + distance.nan_to_num(posinf=0.0)[:, None] * ray


def _meet_box(start: Tensor, ray: Tensor, taper: float) -> tuple[Tensor, Tensor]:
    safe = torch.where(ray.abs() < 1e-9, 1e-9, ray)
    one, other = (-1 - start) / safe, (1 - start) / safe
    enter, face = torch.minimum(one, other).max(dim=1)
    leave = torch.maximum(one, other).amin(dim=1)
    normal = torch.zeros_like(ray).scatter(1, face[:, None], -ray.gather(1, face[:, None]).sign())
    return torch.where((enter < leave) & (enter > 0), enter, torch.inf), normal


def _meet_cylinder(start: Tensor, ray: Tensor, taper: float) -> tuple[Tensor, Tensor]:
    middle, slope = (1 + taper) / 2, (taper - 1) / 2
    radius = middle + slope * start[:, 2]
    a = ray[:, 0] ** 2 + ray[:, 1] ** 2 - (slope * ray[:, 2]) ** 2
    b = start[:, 0] * ray[:, 0] + start[:, 1] * ray[:, 1] - slope * ray[:, 2] * radius
    c = start[:, 0] ** 2 + start[:, 1] ** 2 - radius**2
    inside = b * b - a * c
    safe = torch.where(a.abs() < 1e-9, 1e-9, a)
    best = torch.full_like(a, torch.inf)
    normal = torch.zeros_like(ray)
    for sign in (-1.0, 1.0):
        distance = (-b + sign * inside.clamp_min(0).sqrt()) / safe
        z = start[:, 2] + distance * ray[:, 2]
        closer = (inside > 0) & (z.abs() <= 1) & (middle + slope * z >= 0) & (distance > 0) & (distance < best)
        best = torch.where(closer, distance, best)
        point = start + distance[:, None] * ray
        side = torch.stack([point[:, 0], point[:, 1], -slope * (middle + slope * z)], dim=1)
        normal = torch.where(closer[:, None], side, normal)
    along = torch.where(ray[:, 2].abs() < 1e-9, 1e-9, ray[:, 2])
    for end in (-1.0, 1.0):
        distance = (end - start[:, 2]) / along
        point = start + distance[:, None] * ray
        width = middle + slope * end
        closer = (point[:, 0] ** 2 + point[:, 1] ** 2 <= width**2) & (distance > 0) & (distance < best)
        best = torch.where(closer, distance, best)
        cap = ray.new_tensor([0.0, 0.0, end])[None, :, None].expand_as(point)
        normal = torch.where(closer[:, None], cap, normal)
    return best, normal


MEETINGS = {"ellipsoid": _meet_ellipsoid, "box": _meet_box, "cylinder": _meet_cylinder}
"""Functions that intersect rays with a solid of unit size. Arguments: start and direction of the rays, and the taper of
the solid. Results: the distance to the surface and the normal of the surface."""


def _shade(normals: Float[Tensor, "views 3 rays"], hit: Bool[Tensor, "views rays"]) -> Float[Tensor, "views L rays"]:
    """Compute grey in [0, 1] under each lighting: matte surfaces, some ambient light, and a uniform background."""
    shades = []
    for lighting in LIGHTINGS:
        lights = _lights(lighting)
        grey = 0.12 + 0.08 * normals[:, 2]
        ground = 0.25
        for direction, strength in lights:
            x, y, z = direction.tolist()
            grey = grey + 0.75 * strength * (x * normals[:, 0] + y * normals[:, 1] + z * normals[:, 2]).clamp_min(0)
            ground += 0.5 * strength * z
        shades.append(torch.where(hit, grey, ground))
    return torch.stack(shades, dim=1)


def _camera(elevation: int, azimuth: int, camera: int) -> tuple[np.ndarray, ...]:
    rise, turn = math.radians(30 + 5 * elevation), math.radians(10 * azimuth)
    towards = np.array([math.cos(rise) * math.cos(turn), math.cos(rise) * math.sin(turn), math.sin(rise)])
    right = np.array([-math.sin(turn), math.cos(turn), 0.0])
    place = DISTANCE * towards + (camera - 0.5) * BASELINE * right
    towards = place / np.linalg.norm(place)
    right = np.cross([0.0, 0.0, 1.0], towards)
    right /= np.linalg.norm(right)
    return place, right, np.cross(towards, right), towards


def _lights(lighting: int) -> list[tuple[np.ndarray, float | int]]:
    """Return the direction and the strength of each light in one lighting."""
    places = [(60, 40), (35, 160), (50, 280), (75, 0)]
    strengths = [
        (0.9, 0, 0, 0.1),
        (0, 0.9, 0, 0.1),
        (0, 0, 0.9, 0.1),
        (0, 0, 0, 0.9),
        (0.5, 0.5, 0, 0),
        (0.3, 0, 0.3, 0.4),
    ]
    lights = []
    for (rise, turn), strength in zip(places, strengths[lighting], strict=True):
        up, around = math.radians(rise), math.radians(turn)
        lights.append(
            (np.array([math.cos(up) * math.cos(around), math.cos(up) * math.sin(around), math.sin(up)]), strength)
        )
    return lights
