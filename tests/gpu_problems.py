"""Problems for tests of the Triton kernels, and the device of these tests. conftest.py registers the fixtures."""

import sys
import warnings
from functools import partial
from importlib import import_module

import pytest
import torch

from problems import MAPS as ALL_MAPS
from problems import full_problem
from torchcaps import RoutingMap
from torchcaps.kernels import moments as operators
from torchcaps.kernels.memory import packed
from torchcaps.kernels.record import Record
from torchcaps.routing.agreement import kernel_arguments
from torchcaps.routing.votes import Agreement, Gaussians, Means, Moments

MAPS = {
    "dense": RoutingMap.dense(3),
    "shared": RoutingMap.shared(5),
    "conv": RoutingMap.conv((3, 2), 3, padding=1, stride=2),
    **{name: ALL_MAPS[name] for name in ("one-parent", "irregular", "no-edges")},
}
SMALL = RoutingMap(torch.tensor([[1, 1, 0], [0, 0, 1], [1, 0, 1]]), 2, 2, 2, (1, 2))
POSES = {"matrix": (4, 4, 4), "vector": (1, 3, 5), "odd": (3, 2, 2)}
PARTS = ("constant", "linear", "quadratic", "centre")
CHILDREN = ("pose", "activation", "transform")


@pytest.fixture(scope="module")
def device():
    """The device of the kernels: a GPU, or the CPU with Triton's interpreter, which reads the source of the kernels.

    The kernels are imported without type checks. For the interpreter, the operators are registered for the CPU.
    """
    finders = sys.meta_path[:]
    sys.meta_path[:] = [finder for finder in finders if "jaxtyping" not in type(finder).__module__]
    import_module("torchcaps.kernels.gpu.moments")
    sys.meta_path[:] = finders
    if torch.cuda.is_available():
        yield "cuda"
        return
    with pytest.MonkeyPatch.context() as patch:
        library = torch.library.Library("torchcaps", "IMPL")
        with warnings.catch_warnings(action="ignore"):
            for name in ("moments", "moments_backward", "votes_backward", "couplings"):
                library.impl(name, partial(operators.on_gpu, name), "CPU", allow_override=True)
        for module in ("kernels.operator", "routing.votes"):
            patch.setattr(f"torchcaps.{module}.needs_the_dispatcher", lambda arguments: True)
        # The interpreter takes about as long for each program, whatever its size.
        sizes = import_module("torchcaps.kernels.gpu.problem")
        patch.setattr(sizes, "SAMPLES", 4)
        patch.setattr(sizes, "PROGRAMS", 16)
        patch.setattr(sizes.Shape, "block_types", property(lambda shape: 4))
        prepare_once(patch)
        yield "cpu"
        library._destroy()


def prepare_once(patch):
    """Let Triton's interpreter prepare each module only once; preparing it at every call takes half of the time."""
    interpreter, prepared = import_module("triton.runtime.interpreter"), set()

    def call(function, *arguments, **options):
        if id(function.fn.__globals__) not in prepared:
            prepared.add(id(function.fn.__globals__))
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    patch.setattr(interpreter.InterpretedFunction, "__call__", call)


class Fused:
    """The same interface as `Votes`, computed by the operators."""

    def __init__(
        self, pose, activation, transform, routing_map, competition="parents", none_of_the_above=False,
        logit_weights=None,
    ):  # fmt: skip
        self.pose_logits = logit_weights is not None
        transform = packed(transform, logit_weights) if self.pose_logits else transform
        self.children = (pose, activation, transform, routing_map.edge_lists.on(pose.device))
        self.detached = [None if x is None else x.detach() for x in self.children]
        self.sites, self.options = routing_map.parent_sites, (competition == "types", none_of_the_above, False)
        self.tokens = operators.open_votes(*self.children, self.sites, 3, *self.options)

    def run(self, agreement, *options):
        size = len(Record._fields)
        tokens, self.tokens = self.tokens[:size], self.tokens[size:]
        even = agreement is None and not self.pose_logits
        layer = *self.detached, self.sites, *kernel_arguments(agreement or Agreement()), even, *self.options
        return operators.moments(tokens, *layer, *options)

    def moments(self, agreement=None, *, variance=True, constant_couplings=False):
        mass, mean, second, *_ = self.run(agreement, variance, constant_couplings, None)
        return Moments(mass, mean, second) if variance else Means(mass, mean)

    def gaussians(self, agreement=None, *, floor):
        mass, mean, variance, _, _, _, log_volume = self.run(agreement, True, False, floor)
        return Gaussians(mass, mean, variance, log_volume)

    def couplings(self, agreement):
        pose, _, *others = self.detached
        return operators.couplings(pose, *others, self.sites, *kernel_arguments(agreement), *self.options)


def problem(routing_map, parent_types=3, pose="vector", batch=2, child_types=2):
    """Pose, activation, transform and the parts of an agreement, keyed by name, in float64."""
    rows, _, columns = POSES[pose]
    pose, activation, transform, *_ = full_problem(routing_map, parent_types, POSES[pose], child_types, batch)
    parents = (batch, routing_map.parent_sites, parent_types)
    constant, *vectors = (
        torch.randn(parents).double(),
        *(0.5 * torch.randn(*parents, rows, columns).double() for _ in range(3)),
    )
    return dict(zip((*CHILDREN, *PARTS), (0.5 * pose, activation, transform, constant, *vectors), strict=True))


@pytest.fixture
def direct(device, monkeypatch):
    """The device of the kernels; the rules call them without PyTorch's dispatcher, also in the interpreter."""
    if device == "cpu":
        monkeypatch.setattr("torchcaps.kernels.CPU_DTYPES", (torch.float32, torch.float64, torch.bfloat16))
        monkeypatch.setattr("torchcaps.routing.votes.needs_the_dispatcher", lambda arguments: False)
        monkeypatch.setattr(operators.moments, "direct", partial(operators.on_gpu, "moments", direct=True))
    return device
