"""Memory layout of the tensors that the kernels read and write."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.types import IntLikeType

__all__ = [
    "addresses",
    "empty",
    "has_strides",
    "laid_out",
    "lanes_of",
    "padded",
    "scalar_strides",
    "statistics_dtype",
    "vector_strides",
]

Place = tuple[str, Tensor | None, Sequence[IntLikeType], Sequence[IntLikeType] | None]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over children: float32 for anything narrower."""
    return torch.promote_types(dtype, torch.float32)


def lanes_of(tensor: Tensor) -> int:
    """How many of a tensor's numbers the widest vectors of a CPU hold, 64 bytes; 1 on other devices."""
    return 64 // tensor.dtype.itemsize if tensor.device.type == "cpu" else 1


def padded(count: IntLikeType, lanes: int) -> IntLikeType:
    """The count, rounded up to whole vectors."""
    return -(-count // lanes) * lanes


def vector_strides(shape: Sequence[IntLikeType], by_sample: bool) -> tuple[IntLikeType, ...]:
    """Strides of ``[B, P, J, R, N]``, a vector for each parent, in the kernels of the CPU.

    The dimension that runs along the processor's SIMD lanes is contiguous: ``[B, P, R, N, J]`` in memory, or by sample
    ``[P, J, R, N, B]``.
    """
    batch, sites, types, rows, columns = shape
    if by_sample:
        return 1, types * rows * columns * batch, rows * columns * batch, columns * batch, batch
    return sites * rows * columns * types, rows * columns * types, 1, columns * types, types


def scalar_strides(shape: Sequence[IntLikeType], by_sample: bool) -> tuple[IntLikeType, ...]:
    """Strides of ``[B, P, J]`` in the same order of dimensions."""
    batch, sites, types, *_ = shape
    return (1, types * batch, batch) if by_sample else (sites * types, types, 1)


def has_strides(tensor: Tensor, strides: Sequence[IntLikeType] | None) -> bool:
    """Whether a tensor has these strides, None for contiguous; that of a dimension of size 1 does not matter."""
    if strides is None:
        return tensor.is_contiguous()
    found = tensor.stride()
    if found == strides:
        return True
    return all(size == 1 or a == b for size, a, b in zip(tensor.shape, found, strides, strict=True))


def empty(
    like: Tensor, shape: Sequence[IntLikeType], strides: Sequence[IntLikeType] | None, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty tensor of a shape and of strides, None for contiguous."""
    dtype, device = dtype or like.dtype, like.device
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def laid_out(tensor: Tensor, strides: Sequence[IntLikeType] | None) -> Tensor:
    """The tensor, or a copy of it with these strides, None for contiguous."""
    return tensor if has_strides(tensor, strides) else _copied(tensor, strides)


def _copied(tensor: Tensor, strides: Sequence[IntLikeType] | None) -> Tensor:
    return empty(tensor, tensor.shape, strides).copy_(tensor)


def addresses(dtype: torch.dtype, places: Iterable[Place], keep: list[Tensor]) -> list[int]:
    """The addresses of tensors, 0 for None; of a copy where a tensor has other strides or is not aligned to 64 bytes.

    Arguments:
        dtype: that every tensor must have.
        places: name, tensor, the shape that it must have, and its strides.
        keep: takes the copies, which must live as long as their addresses are used.

    Raises:
        ValueError: a tensor has another shape or dtype, or is not on the CPU.
    """
    found = []
    for name, tensor, shape, strides in places:
        if tensor is None:
            found.append(0)
            continue
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu:
            wrong = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise ValueError(
                f"{name} must be {list(shape)} {dtype} on the CPU for these children and this map; got {wrong}"
            )
        address = tensor.data_ptr()
        if address % 64 or not has_strides(tensor, strides):
            keep.append(_copied(tensor, strides))
            address = keep[-1].data_ptr()
        found.append(address)
    return found
