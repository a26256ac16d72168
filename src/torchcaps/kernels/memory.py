"""Memory layout of the tensors that the fused kernels read and write."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor
from torch.types import IntLikeType

from torchcaps.checks import is_compiling

__all__ = [
    "Layout",
    "addresses",
    "constants",
    "contiguous",
    "for_kernels",
    "has_strides",
    "laid_out",
    "lanes_of",
    "packed",
    "padded",
    "power_of_2",
    "sample_stride",
    "samples_in_lanes",
    "samples_last_strides",
    "statistics_dtype",
    "unpacked",
    "vector_strides",
]

Layout = tuple[tuple[IntLikeType, ...], tuple[IntLikeType, ...]]
"""Shape and strides of a tensor."""


def contiguous(*shape: IntLikeType) -> Layout:
    """Return the layout of a contiguous tensor."""
    strides = [*accumulate(reversed(shape[1:]), mul, initial=1)]
    return shape, tuple(reversed(strides))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over children: the wider of `dtype` and float32."""
    return torch.promote_types(dtype, torch.float32)


def lanes_of(tensor: Tensor) -> int:
    """Return how many numbers of a tensor fit into the widest SIMD vector of a CPU (64 bytes); 1 on other devices."""
    return 64 // tensor.itemsize if tensor.is_cpu else 1


def padded(count: IntLikeType, lanes: int) -> IntLikeType:
    """Round a count up to a multiple of `lanes`."""
    return -(-count // lanes) * lanes


def packed(transform: Tensor, logit_weights: Tensor) -> Tensor:
    """Append the weights of the logits that depend on poses to the numbers of each transform, in rows of N numbers.

    The kernels recognise these transforms, because they have more rows than the poses have columns.

    Arguments:
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        logit_weights: ``[K, C, J, R·Q + 1]``; see `torchcaps.Votes`.
    """
    columns, numbers = transform.shape[4], torch.cat([transform.flatten(3), logit_weights], dim=3)
    return torch.nn.functional.pad(numbers, (0, -numbers.shape[3] % columns)).unflatten(3, (-1, columns))


def unpacked(transform: Tensor, pose_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the arguments of `packed`, for children with poses of ``pose_shape`` (R, Q)."""
    (rows, inner), columns = pose_shape, transform.shape[4]
    numbers, weights, _ = transform.flatten(3).split_with_sizes(
        [inner * columns, rows * inner + 1, (transform.shape[3] - inner) * columns - rows * inner - 1], dim=3
    )
    return numbers.unflatten(3, (inner, columns)), weights


def samples_in_lanes(pose: Tensor, transform: Tensor, own_transforms: bool, most_edges: int) -> bool:
    """Return whether the SIMD lanes of the CPU hold samples rather than parent types; False on other devices.

    Lanes hold samples if each child site has its own transforms: several samples then share each read of a transform.
    Lanes also hold samples if parent types would leave many lanes empty, and the parents of a child fit into the cache.
    While a graph is traced, the choice does not depend on the batch size, so that the graph fits every batch size.

    Arguments:
        pose: ``[B, S, C, R, Q]``, poses of the children.
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        own_transforms: whether every transform is used by only one child site.
        most_edges: largest number of edges that start at one child site.
    """
    if own_transforms or not pose.is_cpu:
        return pose.is_cpu
    lanes, types, numbers = lanes_of(pose), transform.shape[2], pose.shape[3] * transform.shape[4]
    full, cache = types / padded(types, lanes), 256 * 1024
    small = 5 * 64 * most_edges * types * numbers <= cache
    return small and full < 0.75 and (is_compiling() or pose.shape[0] >= lanes / 2)


def vector_strides(shape: Sequence[IntLikeType], by_sample: bool) -> tuple[IntLikeType, ...]:
    """Return the strides that the kernels use for ``[B, P, J, R, N]``, a tensor with one vector per parent.

    The dimension along the SIMD lanes is contiguous. If the lanes hold parent types, the memory order is
    ``[B, P, R, N, J]``. If the lanes hold samples (`by_sample`), it is ``[P, J, R, N, B]``, as always on a GPU.
    """
    if by_sample:
        return samples_last_strides(shape)
    _, sites, types, rows, columns = shape
    return sites * rows * columns * types, rows * columns * types, 1, columns * types, types


def samples_last_strides(shape: Sequence[IntLikeType]) -> tuple[IntLikeType, ...]:
    """Return the strides of a tensor ``[B, …]`` in whose memory the samples are the last dimension."""
    batch, *others = shape
    return 1, *(batch * stride for _, stride in zip(*contiguous(*others), strict=False))


def sample_stride(batch: int) -> int:
    """Return the distance between two numbers of a pose in the memory of a GPU.

    It is the batch size, rounded up to a power of 2 that is at least 32.
    """
    return power_of_2(max(batch, 32))


def power_of_2(number: int) -> int:
    """Round a positive number up to a power of 2."""
    return 1 << (number - 1).bit_length()


def for_kernels(of_children: Tensor) -> Tensor:
    """Return poses or activations of children in the memory order that the kernels read.

    While compiling, the batch size may be symbolic. Then poses are not padded, and the GPU kernels copy them if
    `sample_stride` is not the batch size.
    """
    if of_children.is_cpu:
        return of_children.contiguous()
    batch, *others = of_children.shape
    if of_children.ndim < 5 or is_compiling() or sample_stride(batch) == batch:
        return of_children.movedim(0, -1).contiguous().movedim(-1, 0)
    return laid_out(of_children, samples_last_strides((sample_stride(batch), *others)))


def constants(values: tuple[float, ...], like: Tensor, keep: bool) -> Tensor:
    """Return a tensor with these values, and with the dtype and the device of `like`. Do not change the tensor.

    Making such a tensor takes several calls or launches; with `keep`, it is made once and kept. Do not use `keep` in
    compiled functions: a CUDA graph may own the memory that they allocate.
    """
    if keep and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _kept_constants(values, like.dtype, like.device)
    return torch.stack([like.new_full((), value) for value in values])


@lru_cache(maxsize=256)
def _kept_constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def has_strides(tensor: Tensor, strides: Sequence[IntLikeType]) -> bool:
    """Return whether a tensor has these strides, ignoring dimensions of size 1."""
    found = tensor.stride()
    if found == strides:
        return True
    return all(size == 1 or a == b for size, a, b in zip(tensor.shape, found, strides, strict=True))


def laid_out(tensor: Tensor, strides: Sequence[IntLikeType]) -> Tensor:
    """Return the tensor if it has these strides, otherwise a copy with these strides."""
    return tensor if has_strides(tensor, strides) else _copied(tensor, strides)


def _copied(tensor: Tensor, strides: Sequence[IntLikeType]) -> Tensor:
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def addresses(
    dtype: torch.dtype, layouts: Mapping[str, Layout], tensors: Iterable[Tensor | None], keep: list[Tensor]
) -> list[int]:
    """Return the memory addresses of tensors, and 0 for None.

    A tensor is copied first if its strides are not the required ones, its memory is not aligned to 64 bytes, or its
    memory holds the negated values (`Tensor.is_neg`).

    Arguments:
        dtype: required dtype of all tensors.
        layouts: name and required layout of each tensor. The last names may have no tensor.
        tensors: the tensors, in the order of the layouts.
        keep: list to which the copies are appended. The copies must stay alive as long as their addresses are used.

    Raises:
        ValueError: a tensor does not have the required shape or dtype, or is not on the CPU.
    """
    found = []
    for tensor, (name, (shape, strides)) in zip(tensors, layouts.items(), strict=False):
        if tensor is None:
            found.append(0)
            continue
        if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
            wrong = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise ValueError(
                f"{name} must be a CPU tensor {list(shape)} {dtype} to fit the children and the routing map; got "
                f"{wrong}"
            )
        address = tensor.data_ptr()
        if address % 64 or not has_strides(tensor, strides) or tensor.is_neg():
            keep.append(_copied(tensor, strides))
            address = keep[-1].data_ptr()
        found.append(address)
    return found
