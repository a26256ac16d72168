"""Every rule on the fused kernels against the same rule on written votes: outputs and every gradient."""

from functools import partial

import pytest

from torchcaps import RoutingMap
from torchcaps.kernels import _cpu, cpu_instruction_sets

pytestmark = pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built")
POSE = (2, 3, 4)
BATCHES_AND_TYPES = [(3, 2), (3, 17), (17, 2), (17, 17)]
"""Kernels hold samples in their vectors, or parent types, or both, by what there is more of."""


@pytest.fixture(params=cpu_instruction_sets())
def instruction_set(request):
    _cpu.use(request.param)
    yield request.param
    _cpu.use(cpu_instruction_sets()[0])


@pytest.fixture
def nothing_written(monkeypatch):
    """Fails where votes are written to memory by anything but the reference."""

    def refuse(*_):
        raise AssertionError("votes were written to memory")

    return partial(monkeypatch.setattr, RoutingMap, "votes", refuse)
