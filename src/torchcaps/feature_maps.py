"""Positions of feature maps in the image."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.errors import BadInput
from torchcaps.layers import SharedCaps

SPATIAL = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.AvgPool2d, nn.MaxPool2d)
"""Modules whose outputs have a known position in the image, besides modules named BlurPool2d, as in timm."""


class FeatureMap(NamedTuple):
    """Position of a feature map in the image.

    Arguments:
        grid: height and width of the feature map.
        first: centre of the receptive field of the first site, in pixels (row, column).
        step: distance between the centres of neighbouring sites, in pixels (down, across).
    """

    grid: tuple[int, ...]
    first: tuple[float, ...]
    step: tuple[float, ...]


class FeatureMaps(list[FeatureMap]):
    """Positions of the feature maps of a network, in the order in which they were computed.

    The attribute ``capsules`` contains the capsules that the network has computed from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.capsules: list[Capsules] = []


@contextmanager
def feature_maps(model: nn.Module, routed: Sequence[Any], image: Tensor) -> Iterator[FeatureMaps]:
    """Record the position of each feature map in the image, as long as the list `routed` is empty.

    A feature map that another operation computed, such as the sum in a residual block, has the position of the latest
    known feature map of the same size. If there is no such map, the operation has made a known feature map smaller.
    Feature maps of other threads are not recorded.
    """
    thread = get_ident()
    maps = FeatureMaps()
    whole = FeatureMap(tuple(image.shape[2:]), (0.0, 0.0), (1.0, 1.0))
    known: dict[int, tuple[Tensor, FeatureMap]] = {id(image): (image, whole)}  # the tensors, so that no id is reused

    def look(module: nn.Module, given: Any, *rest: Any) -> None:
        if get_ident() != thread:
            return  # PyTorch can leave out the keyword arguments, if this thread is just adding the hook
        named, result = rest
        if isinstance(result, Capsules) and not routed:
            maps.capsules.append(result)
        spatial = isinstance(module, SPATIAL) or type(module).__name__ == "BlurPool2d"
        if routed or not spatial or not isinstance(result, Tensor) or result.ndim != 4:
            return
        images = given[0] if given else named["input"]
        if id(images) not in known and images.shape[2:] == (1, 1) and (maps[-1] if maps else whole).grid != (1, 1):
            return  # a weight per channel, from global pooling, as in squeeze-and-excitation
        source = known[id(images)][1] if id(images) in known else _of_size(images.shape[2:], [whole, *maps])
        first, step = source.first, source.step
        if not isinstance(module, nn.BatchNorm2d | nn.ReLU):
            size = "filt_size" if hasattr(module, "filt_size") else "kernel_size"
            kernel, stride, spread = (_pair(getattr(module, one, 1)) for one in (size, "stride", "dilation"))
            kernel = [spread[axis] * (kernel[axis] - 1) + 1 for axis in (0, 1)]
            padding = _padding(module, images.shape[2:], result.shape[2:], kernel, stride)
            first = tuple(first[axis] + step[axis] * ((kernel[axis] - 1) / 2 - padding[axis]) for axis in (0, 1))
            step = tuple(step[axis] * stride[axis] for axis in (0, 1))
        maps.append(FeatureMap(tuple(result.shape[2:]), first, step))
        known[id(result)] = result, maps[-1]

    def look_at_children(module: nn.Module, given: Any, named: Any) -> None:
        if get_ident() == thread and not routed:
            maps.capsules.append(given[0] if given else named["children"])

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in model.modules()]
    shared = (module for module in model.modules() if isinstance(module, SharedCaps))
    handles += [module.register_forward_pre_hook(look_at_children, with_kwargs=True) for module in shared]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def _padding(
    module: nn.Module, given: Sequence[int], found: Sequence[int], kernel: Sequence[int], stride: Sequence[int]
) -> list[int]:
    """Return the padding above and to the left of the input of a convolution or pooling.

    Classes of timm whose names end in "Same" pad their input themselves, as little as possible for an output of
    ⌈input / stride⌉ rows. Half of this padding, rounded down, is above.
    """
    declared: Any = module.padding
    padding = []
    for axis in (0, 1):
        fixed = 0 if isinstance(declared, str) else _pair(declared)[axis]
        steps, rest = divmod(given[axis] + 2 * fixed - kernel[axis], stride[axis])
        partial_step = bool(rest) and getattr(module, "ceil_mode", False)
        if declared != "same" and found[axis] - 1 in (steps, steps + partial_step):
            padding.append(fixed)
        elif declared == "same" or type(module).__name__.endswith("Same"):
            padding.append(max(0, (found[axis] - 1) * stride[axis] + kernel[axis] - given[axis]) // 2)
        else:
            raise BadInput(
                f"{type(module).__name__} turned a {given[0]}×{given[1]} map into a {found[0]}×{found[1]} map, which "
                "its padding does not explain, so positions in the image are unknown: use torch.nn.Conv2d(padding=...)"
            )
    return padding


def _of_size(size: Sequence[int], maps: Sequence[FeatureMap]) -> FeatureMap:
    """Return the latest feature map of this size, or else divide the latest one into patches."""
    for one in reversed(maps):
        if one.grid == tuple(size):
            return one
    *_, latest = maps
    if any(below % above for below, above in zip(latest.grid, size, strict=True)):
        raise BadInput(
            f"the positions of a {size[0]}×{size[1]} feature map in the image are unknown: compute the map with a "
            "convolution or pooling module, such as torch.nn.MaxPool2d, instead of a function or another module"
        )
    ratio = [below // above for below, above in zip(latest.grid, size, strict=True)]
    first = tuple(latest.first[axis] + latest.step[axis] * (ratio[axis] - 1) / 2 for axis in (0, 1))
    return FeatureMap(tuple(size), first, tuple(latest.step[axis] * ratio[axis] for axis in (0, 1)))


def _pair(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def place_of(maps: Sequence[FeatureMap], positions: int, sure: bool) -> FeatureMap | None:
    """Return the feature map from which the first capsules were computed; None if they have only one position.

    Arguments:
        maps: feature maps, in the order in which they were computed.
        positions: number of positions of the first capsules.
        sure: False if each position can have several sites, so that ``positions`` is too large.

    Raises:
        BadInput: it is unknown which feature map is the right one.
    """
    if positions == 1:
        return None
    if not maps:
        raise BadInput(
            "no convolution or pooling module computed the features of the first capsules, so the place of a site in "
            "the image is unknown: compute them with a module such as torch.nn.Conv2d"
        )
    counts = [math.prod(one.grid) for one in maps]
    found = max((index for index, count in enumerate(counts) if count == positions), default=None)
    later = [] if found is None else counts[found + 1 :]
    if found is None or any(count > positions or (not sure and count > 1 and not positions % count) for count in later):
        raise BadInput(
            f"the first capsules have {positions} sites, but the last feature map from a convolution or pooling module "
            f"is {maps[-1].grid[0]}×{maps[-1].grid[1]}, so the place of a site in the image is unknown: compute the "
            "capsules in a module that returns Capsules with one site per position of the last map, such as PrimaryCaps"
        )
    return maps[found]


def in_the_image(
    below: Float[Tensor, "passes J S"], place: FeatureMap | None, height: int, width: int
) -> Float[Tensor, "passes J H W"]:
    """Distribute values at the sites of the first capsules among the pixels around the centre of each site.

    Consecutive sites share a position of the feature map ``place``. Along each axis, the share of a pixel falls
    linearly from the centre of a site to the centres of its neighbours. The shares of a site sum to 1, also at the
    border of the image. A centre outside the image is moved to its border. Along an axis with a single site, all pixels
    have the same share.
    """
    grid, first, step = place or FeatureMap((1, 1), (0.0, 0.0), (1.0, 1.0))
    values = below.unflatten(2, (*grid, -1)).sum(dim=4)
    down, across = (
        _shares(grid[axis], first[axis], step[axis], pixels).to(values) for axis, pixels in ((0, height), (1, width))
    )
    return torch.einsum("kjrc,rh,cw->kjhw", values, down, across)


def _shares(sites: int, first: float, step: float, pixels: int) -> Float[Tensor, "sites pixels"]:
    """Compute the share of each pixel in each site along an axis."""
    if sites == 1:
        return torch.full((1, pixels), 1 / pixels, device="cpu")
    places, positions = (torch.arange(size, device="cpu") for size in (sites, pixels))
    centres = (first + step * places).clamp(0, pixels - 1)
    shares = (1 - (positions - centres[:, None]).abs() / max(1.0, step)).clamp_min(0)
    return shares / shares.sum(dim=1, keepdim=True)
