"""Checks of arguments. Every error message names the argument, the value that was given and the cure.

Ranges have one form: "an integer from 1 to 1,000", "an integer of at least 1", "in [0, 1)", "a finite number of at
least 0", "a finite number above 0"; without limits, "a finite number".
"""

import math
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
MOST_ITERATIONS = 1000


def bounds(tensor: Tensor) -> tuple[float | int, float | int]:
    """Return the smallest and the largest number in a tensor, with a single transfer from a GPU.

    Example:
        >>> bounds(torch.tensor([3, 1, 2]))
        (1, 3)
    """
    low, high = torch.stack(tensor.detach().aminmax()).tolist()
    return low, high


def is_compiling() -> bool:
    """Return whether this thread compiles or exports a network.

    ``torch.compiler.is_compiling`` is not enough: during an export, it returns True in all threads of the process.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def has_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read now.

    Values cannot be read on the meta device, while a graph is traced, under `torch.func`, or while a CUDA graph is
    captured.

    Example:
        >>> has_values(torch.zeros(2)), has_values(torch.zeros(2, device="meta"))
        (True, False)
    """
    return (
        not is_compiling()
        and not torch.jit.is_tracing()
        and type(tensor) is Tensor
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def described(value: Any) -> str:
    """Describe a value for an error message.

    Example:
        >>> described(torch.zeros(2, 3)), described("em"), described(Tensor), described(0.5)
        ('a float32 tensor [2, 3]', "str 'em'", 'the class Tensor', '0.5')
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Tensor | np.ndarray):
        dtype, kind = str(value.dtype).removeprefix("torch."), "tensor" if isinstance(value, Tensor) else "array"
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} {kind} {list(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else f"an object of type {type(value).__name__}"


def check_floating(name: str, tensor: Tensor) -> None:
    """Check that a value is a tensor with a floating-point dtype.

    Raises:
        ValueError: ``tensor`` is not a tensor, or its dtype is not floating-point.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor; got {described(tensor)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must have a floating-point dtype; got {described(tensor)}: use {name}.float()")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Check that a tensor is on ``device``, the device of the pose.

    Raises:
        ValueError: ``tensor`` is on another device.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and pose on {device}: move both to one device with .to(device)")


def check_activation(activation: Tensor, pose: Tensor) -> None:
    """Check that the activation is a floating-point tensor ``[B, S, C]`` on the device of the pose."""
    if not isinstance(activation, Tensor) or activation.shape != pose.shape[:3]:
        raise ValueError(
            f"activation must be [B, S, C] = {list(pose.shape[:3])} to fit pose; got {described(activation)}"
        )
    check_floating("activation", activation)
    check_device("activation", activation, pose.device)


def _can_be_read_at_once(tensor: Tensor) -> bool:
    """Return whether a tensor has values on a CPU: reading them does not wait for operations of a GPU."""
    return tensor.is_cpu and has_values(tensor) and tensor.numel() > 0 and not is_in_torch_dispatch_mode()


def check_not_negative(name: str, tensor: Tensor) -> None:
    """Check that no value of a tensor on a CPU is negative, except for rounding errors.

    On other devices the values are not checked, because reading them would wait for all previous operations. They are
    not checked while a graph is traced either. A tensor that contains NaN is accepted.

    Raises:
        ValueError: a value is below -1e-3.
    """
    if _can_be_read_at_once(tensor):
        least = tensor.detach().amin().item()
        if least < -1e-3:
            raise ValueError(
                f"{name} must be at least 0; the smallest value is {least:g}: convert logits with torch.sigmoid({name})"
            )


def check_values(name: str, tensor: Tensor, least: float, most: float) -> None:
    """Check that all values of a tensor are in [least, most]. They are not checked while a graph is traced.

    Raises:
        ValueError: a value is out of range.
    """
    if has_values(tensor) and tensor.numel():
        low, high = bounds(tensor)
        if low < least or high > most:
            allowed = f"in [{least:g}, {most:g}]" if most < math.inf else f"at least {least:g}"
            raise ValueError(f"{name} must be {allowed}; got {low:g} to {high:g}")


def check_reconstructible(images: Tensor, reconstruction: Tensor) -> None:
    """Check that images on a CPU are in [0, 1], give or take 0.5, if all pixels of their reconstruction are in [0, 1].

    The values are not checked on other devices or while a graph is traced. NaN is accepted.

    Raises:
        ValueError: the pixels of the reconstruction are in [0, 1], and a pixel of the images is not.
    """
    if not _can_be_read_at_once(images) or not has_values(reconstruction.detach()):
        return
    low, high = bounds(images)
    if low < -0.5 or high > 1.5:
        least, most = bounds(reconstruction)
        if 0 <= least < most <= 1:
            raise ValueError(
                f"images must be in [0, 1] like their reconstruction; got {low:g} to {high:g}: scale pixels to [0, 1], "
                "and reconstruct images as they are before the standardisation"
            )


def check_sizes(**sizes: Any) -> None:
    """Check that all sizes are integers of at least 1.

    Raises:
        ValueError: a size is not an integer of at least 1.
    """
    for name, size in sizes.items():
        check_integer(name, size, 1)


def check_integer(
    name: str, value: Any, least: int, most: int | None = None, error: type[ValueError] = ValueError
) -> None:
    """Check that a value is an integer of at least ``least`` and, if ``most`` is given, of at most ``most``.

    Raises:
        ValueError: ``value`` is not such an integer. ``error`` is the class of the error.
    """
    if not _is_integer(value) or value < least or (most is not None and value > most):
        allowed = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise error(f"{name} must be an integer {allowed}; got {described(value)}")


def check_number(name: str, value: Any, interval: str, error: type[ValueError] = ValueError) -> None:
    """Check that a number is in an interval.

    Arguments:
        name: name of the argument in the error message.
        value: the number.
        interval: the interval, such as ``[0, 1)``, which does not contain 1, ``(0, inf)`` or ``(-inf, inf)``.
        error: class of the error.

    Raises:
        ValueError: ``value`` is not in the interval. ``error`` is the class of the error.

    Example:
        >>> check_number("label_smoothing", 1.5, "[0, 1]")
        Traceback (most recent call last):
        ...
        ValueError: label_smoothing must be in [0, 1]; got 1.5
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    number = value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, Real) and not isinstance(value, bool)
    above = number and (value > low or (value == low and interval.startswith("[")))
    if not above or not (value < high or (value == high and interval.endswith("]"))):
        one_sided = "a finite number"
        if low > -math.inf:
            one_sided += f" {'of at least' if interval.startswith('[') else 'above'} {low:g}"
        shown = value.item() if isinstance(value, Tensor) and number and has_values(value) else described(value)
        raise error(f"{name} must be {one_sided if high == math.inf else f'in {interval}'}; got {shown}")


def check_padding(padding: Any, most: int | None = None) -> None:
    """Check that a padding is an integer of at least 0 and, if ``most`` is given, of at most ``most``.

    Raises:
        ValueError: ``padding`` is not such an integer.
    """
    if not _is_integer(padding) or padding < 0 or (most is not None and padding > most):
        allowed = "of at least 0" if most is None else f"from 0 to kernel_size - 1 = {most}"
        raise ValueError(f"padding must be an integer {allowed}; got {described(padding)}")


def pair(name: str, value: Any, least: int = 1) -> tuple[int, int]:
    """Return a vertical and a horizontal size, given two sizes or one integer for both.

    Raises:
        ValueError: ``value`` is not an integer of at least ``least``, or two such integers.
    """
    if not isinstance(value, list | tuple):
        check_integer(name, value, least)
        return value, value
    if len(value) != 2 or any(not _is_integer(n) or n < least for n in value):
        raise ValueError(f"{name} must be one integer, or two, of at least {least}; got {described(value)}")
    return value[0], value[1]


def check_shape(name: str, shape: Any, dimensions: str, error: type[ValueError] = ValueError) -> None:
    """Check that a shape is a tuple or list with one integer of at least 1 for each dimension.

    Arguments:
        name: name of the argument in the error message.
        shape: the shape.
        dimensions: names of the dimensions, separated by ", ".
        error: class of the error.

    Raises:
        ValueError: ``shape`` is not a tuple or list of this form. ``error`` is the class of the error.

    Example:
        >>> check_shape("image_shape", (1, 28, 28), "channels, height, width")
    """
    count = len(dimensions.split(", "))
    if not isinstance(shape, Sequence) or len(shape) != count or any(not _is_integer(n) or n < 1 for n in shape):
        raise error(f"{name} must be a tuple ({dimensions}) of integers of at least 1; got {described(shape)}")


def check_channels(name: str, sizes: Any) -> None:
    """Check that the sizes of consecutive layers are at least one integer, each at least 1.

    Raises:
        ValueError: ``sizes`` is not a tuple, list or array of this form.
    """
    listed = isinstance(sizes, Sequence | np.ndarray) and len(sizes) > 0
    if not listed or any(not _is_integer(n) or n < 1 for n in sizes):
        raise ValueError(f"{name} must be a tuple of integers of at least 1, one per layer; got {described(sizes)}")


def check_iterations(iterations: Any) -> None:
    """Check that the number of routing iterations is an integer from 1 to 1,000.

    Raises:
        ValueError: ``iterations`` is not an integer from 1 to 1,000.
    """
    check_integer("iterations", iterations, 1, MOST_ITERATIONS)


def check_choice(name: str, value: Any, allowed: Collection[Any], error: type[ValueError] = ValueError) -> None:
    """Check that an option has one of the allowed values.

    Raises:
        ValueError: ``value`` is not one of the allowed values. ``error`` is the class of the error.
    """
    if value not in allowed:
        raise error(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


def _is_integer(value: Any) -> bool:
    # The first test is faster: Integral is an abstract class.
    return type(value) is int or (isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool))
