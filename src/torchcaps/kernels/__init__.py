"""Fused kernels: routing that never writes a vote to memory; and which backend a call runs on."""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchcaps.kernels.flops import let_flops_be_counted

_cpu: Any = import_module(f"{__name__}._cpu") if find_spec(f"{__name__}._cpu") else None
_TRITON = find_spec("triton") is not None
MOST_NUMBERS = 64
CPU_DTYPES = (torch.float32, torch.float64)
GPU_DTYPES = (*CPU_DTYPES, torch.bfloat16, torch.float16)

Backend = Literal["auto", "reference", "fused"]

__all__ = [
    "Backend",
    "chosen_fused",
    "cpu_instruction_sets",
    "cpu_kernel",
    "expect_one_device",
    "in_onnx_export",
    "obstacle",
    "once",
    "peak_gflops",
]


def cpu_instruction_sets() -> list[str]:
    """Instruction sets of the processor that the fused kernels are built for, best first; empty where not built."""
    return [] if _cpu is None else _cpu.instruction_sets()


def peak_gflops() -> float:
    """10⁹ multiplications and additions a second, float32, in registers alone on torch's number of threads; the best
    of five tries. 0 where the kernels are not built."""
    return 0.0 if _cpu is None else max(_cpu.peak_gflops(torch.get_num_threads()) for _ in range(5))


def chosen_fused(backend: Backend, obstacle: str | None) -> bool:
    """Whether a call runs fused: ``auto`` where nothing stands against it, ``fused`` always or not at all.

    Arguments:
        backend: ``auto``, ``reference`` or ``fused``.
        obstacle: why the fused kernels cannot take the call; None where they can.

    Raises:
        ValueError: an unknown backend, or ``fused`` against an obstacle.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(get_args(Backend))}")
    if backend == "fused" and obstacle is not None:
        raise ValueError(f'backend "fused" cannot run this: {obstacle}; use "auto" or "reference"')
    fused = backend != "reference" and obstacle is None
    if fused and not torch.compiler.is_compiling():
        let_flops_be_counted()
    return fused


def obstacle(pose: Tensor, transform: Tensor, dtype: torch.dtype) -> str | None:
    """Why the fused kernels cannot take these children, whatever the rule; None where they can.

    Arguments:
        pose: ``[B, S, C, R, Q]``.
        transform: ``[K, C, J, Q, N]``.
        dtype: that the call is computed in.
    """
    device = pose.device.type
    if device not in ("cpu", "cuda"):
        return f"there are no fused kernels for {device}"
    if device == "cpu" and _cpu is None:
        return "the fused kernels are not built here"
    if device == "cuda" and not _TRITON:
        return "triton is not installed"
    if dtype not in (CPU_DTYPES if device == "cpu" else GPU_DTYPES):
        return f"there are no fused kernels for {dtype}"
    if pose.shape[3] * max(transform.shape[3:]) > MOST_NUMBERS:
        return f"there are no fused kernels for poses of more than {MOST_NUMBERS} numbers"
    if in_onnx_export():
        return "ONNX has no operator for them"
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return "the fused kernels know nothing of torch.func and of forward-mode differentiation"
    return None


def in_onnx_export() -> bool:
    """Asks torch.onnx alone where somebody has imported it: loading it takes longer than most calls."""
    return "torch.onnx" in sys.modules and sys.modules["torch.onnx"].is_in_onnx_export()


def expect_one_device(pose: Tensor, edges: Tensor) -> None:
    """With edges on the meta device the dispatcher would take the operator's shapes for its results.

    Raises:
        ValueError: pose and edges are on different devices.
    """
    if pose.device != edges.device:
        raise ValueError(f"pose is on {pose.device} and edges on {edges.device}: move both to one device")


def cpu_kernel(name: str, dtype: torch.dtype) -> Any:
    """The kernel of a name for float32 or float64."""
    return getattr(_cpu, f"{name}_{'float64' if dtype == torch.float64 else 'float32'}")


def once(*_: Any) -> None:
    """The gradient of a gradient.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError('fused routing is differentiated once; use backend="reference" for the gradients of gradients')
