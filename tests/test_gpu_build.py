"""The Triton kernels are compiled for a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_all_kernels_compile_for_gpus(tmp_path):
    """Compiles to machine code without a GPU, because the compiler rejects code that the interpreter accepts.

    The compiler must lay out all tiles with one lane in each thread and samples along a warp. So the threads of a warp
    load numbers that are next to each other in memory, and no instruction loads or stores several samples. Only the
    sums over samples, which are the gradients of transforms, have other layouts.
    """
    script = """
import re

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from torchcaps import RoutingMap
from torchcaps.kernels.gpu import moments
from torchcaps.kernels.memory import packed

built, routing_map = [], RoutingMap.conv((3, 3), 2)


class Absent:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compiled(kernel, grid):
    def run(*arguments, **options):
        code, name = kernel.warmup(*arguments, grid=grid, **options).asm, kernel.fn.__name__
        assert code["cubin"]
        sizes = r".*?".join(name + r" = \\[(\\d+)" for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA"))
        found = re.findall(r"#(\\w+) = #ttg.blocked<." + sizes, code["ttgir"])
        layouts = {layout: tuple(map(int, numbers)) for layout, *numbers in found}
        used = re.findall(r"tt.load .*, #(\\w+)>", code["ttgir"]) if name == "_transform_grads" else layouts
        assert {layouts[layout] for layout in used} == {(1, 32, arguments[-1].block_types)}, (name, layouts)
        assert not re.search(r"st\\.global\\S*\\.v\\d", code["ptx"]), name
        built.append(name)
    return run


def run(dtype, parent_types, rows, inner, columns, types, pose_logits=False, child_types=2):
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    scalar, vector = torch.ones(2, 4, parent_types), torch.ones(2, 4, parent_types, rows, columns)
    pose = torch.ones(2, 9, child_types, rows, inner, dtype=dtype)
    activation = torch.ones(2, 9, child_types, dtype=dtype)
    agreement, given = (scalar, vector, vector, vector), (scalar, vector, vector)
    if types:
        activation, agreement, given = None, (None, vector, None, None), (scalar, vector, None)
    transform = torch.ones(4, child_types, parent_types, inner, columns, dtype=dtype)
    if pose_logits:
        transform = packed(transform, torch.ones(4, child_types, parent_types, rows * inner + 1, dtype=dtype))
    layer, options = (pose, activation, transform, routing_map.edge_lists.values, 4), (types, not types, False)
    even = moments.moments([], *layer, *(None,) * 4, 0.0, 0.0, True, *options, not types, False, None)
    forward = (*layer, *agreement, 0.1, 0.5 * (not types), False, *options, not types, False, None)
    mass, mean, variance, largest, log_mass, log_sums, *_ = moments.moments([], *forward)
    nothing, found = torch.empty(0), (mean, largest, log_mass, None if types else variance)
    numbers = None if types else torch.tensor([0.0, 0.1, 0.5])
    record = [nothing if x is None else x for x in (*agreement, log_sums, None, *found, *given, None, numbers)]
    record[5], *_ = moments.moments_backward(*layer, record, *options, not types)
    uniform = [*(nothing,) * 6, even[1], even[3], even[4], nothing, nothing, even[1], *(nothing,) * 3]
    moments.votes_backward(*layer, [*uniform, *record], *options)
    if not types:
        moments.couplings(pose, *layer[2:], *agreement, 0.1, 0.5, *options)


driver.set_active(Absent())
JITFunction.__getitem__ = compiled
run(torch.bfloat16, 5, 4, 4, 4, types=False)
run(torch.float32, 3, 1, 2, 5, types=True)
run(torch.float64, 4, 4, 4, 4, types=False)
run(torch.bfloat16, 4, 4, 4, 4, types=True, pose_logits=True, child_types=4)
for dtype in (torch.bfloat16, torch.float32):
    run(dtype, 5, 4, 4, 4, types=True, pose_logits=True)
assert len(set(built)) == 10, built
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)})
