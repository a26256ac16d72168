"""Fused kernels: routing that never writes a vote to memory; and which backend a call runs on."""

from typing import Literal, get_args

try:
    from torchcaps.kernels import _cpu  # type: ignore[attr-defined]
except ImportError:
    _cpu = None

Backend = Literal["auto", "reference", "fused"]

__all__ = ["Backend", "chosen_fused", "cpu_instruction_sets"]


def cpu_instruction_sets() -> list[str]:
    """Instruction sets of the processor that the fused kernels are built for, best first; empty where not built."""
    return [] if _cpu is None else _cpu.instruction_sets()


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
    return backend != "reference" and obstacle is None
