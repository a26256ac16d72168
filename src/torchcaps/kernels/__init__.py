"""Fused kernels, which route without storing votes, and the choice between them and the reference implementation."""

import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.types import IntLikeType

from torchcaps.checks import check_choice, is_compiling
from torchcaps.kernels.flops import let_flops_be_counted

try:
    _cpu: Any = import_module(f"{__name__}._cpu") if find_spec(f"{__name__}._cpu") else None
except ImportError as error:
    raise ImportError(
        f"the fused kernels cannot be loaded ({error}): install torchcaps again on this machine, or set "
        "TORCHCAPS_NO_KERNELS=1 during the installation to install only the reference implementation",
        name=f"{__name__}._cpu",
    ) from error
_TRITON = find_spec("triton") is not None
MOST_NUMBERS = 64
MANY_NUMBERS = 2**26
"""Size of the tensor of all votes (256 MiB in float32) above which a warning says why they are stored."""
NOT_BUILT = "this installation was built without the fused kernels"
IN_ONNX = "ONNX has no operators for the fused kernels"
IN_TRACE = "the fused kernels do not support torch.jit.trace"
IN_TORCH_FUNC = "the fused kernels do not support torch.func or forward-mode differentiation"
NO_VALUES = "there are no fused kernels for meta"
CHOSEN = (NOT_BUILT, NO_VALUES, IN_ONNX, IN_TRACE, IN_TORCH_FUNC)
"""Reasons for the reference implementation that follow from a choice of the user, and need no warning."""
CPU_DTYPES = (torch.float32, torch.float64)
GPU_DTYPES = (*CPU_DTYPES, torch.bfloat16, torch.float16)

Backend = Literal["auto", "reference", "fused"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

__all__ = [
    "Backend",
    "chosen_fused",
    "cpu_instruction_sets",
    "cpu_kernel",
    "expect_one_device",
    "in_onnx_export",
    "in_torch_func",
    "kernels_read",
    "obstacle",
    "once",
    "warn_of_stored_votes",
]


def cpu_instruction_sets() -> list[str]:
    """List the instruction sets that this processor has and for which the fused kernels are built, best first.

    The list is empty if the kernels are not built.
    """
    return [] if _cpu is None else _cpu.instruction_sets()


def chosen_fused(backend: Backend, obstacle: str | None) -> bool:
    """Return whether a call runs on the fused kernels.

    Arguments:
        backend: ``auto`` (fused if possible), ``reference`` (never fused) or ``fused`` (always fused).
        obstacle: reason why the fused kernels do not support the call; None if they do.

    Raises:
        ValueError: `backend` is not one of the known backends, or is ``fused`` although `obstacle` is given.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "fused" and obstacle is not None:
        raise ValueError(f'backend "fused" does not support this call ({obstacle}): use "auto" or "reference"')
    fused = backend != "reference" and obstacle is None
    if fused and not is_compiling():
        let_flops_be_counted()
    return fused


def warn_of_stored_votes(obstacle: str | None, numbers: IntLikeType) -> None:
    """Warn if the reference implementation stores large votes although the user has not chosen it.

    Arguments:
        obstacle: reason why the fused kernels do not support the call; None if they do.
        numbers: size of the tensor of all votes.
    """
    if obstacle not in (None, *CHOSEN) and not is_compiling() and numbers > MANY_NUMBERS:
        message = f"{obstacle}: routing stores all votes, which needs much memory; use a smaller batch or smaller poses"
        warnings.warn(message, stacklevel=3)


def kernels_read(dtype: torch.dtype, on_cpu: bool) -> bool:
    """Return whether the fused kernels read tensors of a dtype. They compute sums in float32 or float64."""
    return dtype in (CPU_DTYPES if on_cpu else GPU_DTYPES)


def obstacle(pose: Tensor, transform: Tensor, dtype: torch.dtype) -> str | None:
    """Return the reason why the fused kernels cannot route these children, or None if they can.

    Arguments:
        pose: poses of the children, ``[B, S, C, R, Q]``.
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        dtype: dtype of the computation.
    """
    on_cpu = pose.is_cpu
    if not on_cpu and not pose.is_cuda:
        return f"there are no fused kernels for {pose.device.type}"
    if on_cpu and _cpu is None:
        return NOT_BUILT
    if not on_cpu and not _TRITON:
        return "triton is not installed"
    # torch.compile cannot trace the question for the capability. Inductor refuses NVIDIA GPUs below 7.0 itself.
    if not on_cpu and (
        torch.version.hip is not None or (not is_compiling() and not _has_capability(pose.device.index))
    ):
        return "the fused kernels need an NVIDIA GPU of compute capability 7.0 or higher"
    if not kernels_read(dtype, on_cpu):
        return f"there are no fused kernels for {dtype}"
    if in_onnx_export():
        return IN_ONNX
    if torch.jit.is_tracing():
        return IN_TRACE
    if in_torch_func():
        return IN_TORCH_FUNC
    if pose.shape[3] * max(transform.shape[3:]) > MOST_NUMBERS:
        return f"there are no fused kernels for poses of more than {MOST_NUMBERS} numbers"
    return None


@cache
def _has_capability(gpu: int) -> bool:
    if not torch.cuda.is_available():
        return True  # a fake tensor
    return torch.cuda.get_device_capability(gpu) >= (7, 0)


def in_torch_func() -> bool:
    """Return whether a transform of torch.func or forward-mode differentiation is active, also while compiling."""
    if is_compiling() and not torch.compiler.is_dynamo_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def in_onnx_export() -> bool:
    """Return whether this thread exports a network to ONNX.

    This function does not import torch.onnx, because the import takes longer than a typical call of a kernel. Another
    thread may be importing it just now. An export in another thread does not count.
    """
    running = getattr(sys.modules.get("torch.onnx"), "is_in_onnx_export", None)
    if running is None or not running():
        return False
    return torch._C._len_torch_dispatch_stack() > 0 or torch.jit.is_tracing()


def expect_one_device(pose: Tensor, edges: Tensor) -> None:
    """Check that pose and edges are on the same device.

    Without this check, edges on the meta device would make the dispatcher run the fake kernel, and the results would be
    uninitialised tensors.

    Raises:
        ValueError: `pose` and `edges` are on different devices.
    """
    if pose.device != edges.device:
        raise ValueError(f"pose is on {pose.device} and edges on {edges.device}: move both to one device")


@cache
def cpu_kernel(name: str, dtype: torch.dtype) -> Any:
    """Return the CPU kernel `name` for float32 or float64."""
    return getattr(_cpu, f"{name}_{'float64' if dtype == torch.float64 else 'float32'}")


def once(*_: Any) -> None:
    """Reject the gradient of a gradient. This function is registered as the backward of the backward operators.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        'fused routing can be differentiated only once: for gradients of gradients, set backend to "reference" '
        "(in a layer: layer.routing.backend)"
    )
