"""Benchmark of fused routing against the reference implementation and against materialised votes.

Most implementations of capsule networks materialise the votes.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchcaps.benchmarks import DEVICE, SCALE, compare
from torchcaps.capsules import Capsules
from torchcaps.errors import BadInput
from torchcaps.routing import dynamic_routing, em_routing
from torchcaps.routing_map import RoutingMap

ITERATIONS = 3


class Problem(NamedTuple):
    """The inputs of routing, and several implementations that compute the result.

    Arguments:
        leaves: tensors that require gradients.
        ways: functions that compute the parent capsules from the leaves, keyed by the name of the implementation.
        agreeing: pairs of functions whose outputs and gradients must agree.
        flops: floating-point operations per image; a multiply-add counts as two operations. None if unknown.
    """

    leaves: list[Tensor]
    ways: dict[str, Callable[[], list[Tensor]]]
    agreeing: list[tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]]
    flops: float | None = None


class Layer(NamedTuple):
    """A convolutional layer of matrix capsules with EM routing."""

    transform: Tensor
    beta_u: Tensor
    beta_a: Tensor
    grid: tuple[int, int]
    stride: int
    routing_map: RoutingMap


def em_stack(
    batch: int, *, grid: int = 14, types: tuple[int, int, int] = (8, 16, 16), iterations: int = ITERATIONS
) -> Problem:
    """Create the `Problem` of EM routing in two ConvCaps layers: 14×14×8 → 6×6×16 → 4×4×16 matrix capsules.

    With the default arguments, the layers are those of the small `MatrixCapsNet`.
    """
    torch.manual_seed(0)
    layers, size = [], (grid, grid)
    for stride, below, above in ((2, *types[:2]), (1, *types[1:])):
        transform = (0.5 * torch.randn(9, below, above, 4, 4, device=DEVICE)).requires_grad_()
        beta_u, beta_a = (0.1 * torch.randn(2, above, device=DEVICE)).unbind()
        routing_map = RoutingMap.conv(size, 3, stride)
        layers.append(Layer(transform, beta_u.requires_grad_(), beta_a.requires_grad_(), size, stride, routing_map))
        size = routing_map.parent_grid
    pose = torch.randn(batch, grid * grid, types[0], 4, 4, device=DEVICE).requires_grad_()
    activation = torch.rand(batch, grid * grid, types[0], device=DEVICE).requires_grad_()

    def routed(**options: Any) -> list[Tensor]:
        capsules = Capsules(pose, activation)
        for layer in layers:
            capsules = em_routing(
                capsules,
                layer.transform,
                layer.routing_map,
                layer.beta_u,
                layer.beta_a,
                iterations=iterations,
                **options,
            )
        return list(capsules)

    def materialised(rule: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        capsules = (pose, activation)
        for layer in layers:
            mean_data = capsules[1][0].numel() / (layer.routing_map.parent_sites * len(layer.beta_u))
            votes, below = em_materialised_votes(*capsules, layer.transform, layer.grid, layer.stride)
            found, parents = rule(votes, below, layer.beta_u, layer.beta_a, mean_data, iterations)
            capsules = (found, parents)
        return list(capsules)

    compiled = cache(lambda: torch.compile(em_of_votes, dynamic=False))
    votes = sum(len(layer.routing_map.edges) * layer.transform.shape[1] * layer.transform.shape[2] for layer in layers)
    return Problem(
        leaves=[pose, activation, *(x for layer in layers for x in layer[:3])],
        ways={
            "fused": lambda: routed(backend="fused"),
            "reference": lambda: routed(backend="reference"),
            "materialised votes": lambda: materialised(em_of_votes),
            "materialised votes, compiled": lambda: materialised(compiled()),
        },
        agreeing=[
            (lambda: routed(backend="fused"), lambda: routed(backend="reference")),
            (lambda: materialised(em_of_votes), lambda: routed(competition="types")),
            (lambda: materialised(compiled()), lambda: materialised(em_of_votes)),
        ],
        flops=votes * (2 * 4 * 16 + iterations * 6 * 16 + (iterations - 1) * (4 * 16 + 9)),
    )


def em_materialised_votes(
    pose: Tensor, activation: Tensor, transform: Tensor, grid: tuple[int, int], stride: int
) -> tuple[Tensor, Tensor]:
    """Compute all votes ``[B, P, K · C, J, 16]`` with unfold and one einsum, and gather the children's activations."""
    batch, _, types = activation.shape
    planes = torch.cat([pose.flatten(2), activation], dim=2).mT.unflatten(2, grid)
    patches = functional.unfold(planes, 3, stride=stride).unflatten(1, (17 * types, 9))
    sites = patches.shape[3]
    patch_pose = patches[:, : 16 * types].reshape(batch, types, 4, 4, 9, sites)
    patch_activation = patches[:, 16 * types :].permute(0, 3, 2, 1).reshape(batch, sites, 9 * types, 1)
    votes = torch.einsum("bcrqkp,kcjqn->bpkcjrn", patch_pose, transform)
    return votes.reshape(batch, sites, 9 * types, transform.shape[2], 16), patch_activation


def em_of_votes(
    votes: Tensor, activation: Tensor, beta_u: Tensor, beta_a: Tensor, mean_data: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """Route materialised votes by EM routing, as most implementations do.

    Each iteration reads all votes. The softmax of the couplings runs over the parent types of each parent site
    separately.
    """
    couplings = votes.new_full(votes.shape[:4], 1 / votes.shape[3])
    mean, parents = votes, activation
    for iteration in range(iterations):
        routed = couplings * activation
        data = routed.sum(dim=2, keepdim=True)
        share = (routed / data).unsqueeze(4)
        mean = (share * votes).sum(dim=2, keepdim=True)
        variance = (share * (votes - mean).square()).sum(dim=2, keepdim=True) + 1e-4
        log_deviation = 0.5 * variance.log()
        cost = (beta_u[:, None] + log_deviation).sum(dim=4) * data / mean_data
        parents = torch.sigmoid((1 - 0.95 ** (iteration + 1)) * (beta_a - cost))
        if iteration < iterations - 1:
            log_probability = -((votes - mean).square() / (2 * variance) + log_deviation).sum(dim=4)
            couplings = (parents.log() + log_probability).softmax(dim=3)
    return mean.squeeze(2).unflatten(3, (4, 4)), parents.squeeze(2)


def dynamic_layer(batch: int) -> Problem:
    """Create the `Problem` of CapsNet's class capsules: 1152 poses with 8 elements → 10 poses with 16 elements."""
    torch.manual_seed(0)
    pose = (0.3 * torch.randn(batch, 36, 32, 1, 8, device=DEVICE)).requires_grad_()
    transform = (0.05 * torch.randn(36, 32, 10, 8, 16, device=DEVICE)).requires_grad_()
    routing_map = RoutingMap.dense(36)
    compiled = cache(lambda: torch.compile(dynamic_with_materialised_votes, dynamic=False))
    ways = {
        "fused": lambda: [dynamic_routing(pose, transform, routing_map, backend="fused").pose],
        "reference": lambda: [dynamic_routing(pose, transform, routing_map, backend="reference").pose],
        "materialised votes": lambda: [dynamic_with_materialised_votes(pose, transform)],
        "materialised votes, compiled": lambda: [compiled()(pose, transform)],
    }
    return Problem(
        leaves=[pose, transform],
        ways=ways,
        agreeing=[(way, ways["reference"]) for way in ways.values()],
        flops=1152 * 10 * (2 * 8 * 16 + ITERATIONS * 2 * 16 + (ITERATIONS - 1) * (2 * 16 + 9)),
    )


def dynamic_with_materialised_votes(pose: Tensor, transform: Tensor) -> Tensor:
    """Compute all votes with one einsum, and route them by dynamic routing, as most implementations do."""
    votes = torch.einsum("bscq,scjqn->bscjn", pose[:, :, :, 0], transform).flatten(1, 2)
    logits = votes.new_zeros(votes.shape[:3])
    parents = votes
    for iteration in range(ITERATIONS):
        total = torch.einsum("bij,bijn->bjn", logits.softmax(dim=2), votes)
        length = total.norm(dim=2, keepdim=True)
        parents = total * length / (1 + length.square())
        if iteration < ITERATIONS - 1:
            logits = logits + torch.einsum("bijn,bjn->bij", votes, parents)
    return parents[:, None, :, None]


PROBLEMS: dict[str, tuple[Callable[[int], Problem], int]] = {
    "EM, ConvCaps stack": (em_stack, 32 * SCALE),
    "dynamic, CapsNet": (dynamic_layer, 100 * SCALE),
}


def bench_routing(
    repeats: int = 10, problems: Mapping[str, tuple[Callable[[int], Problem], int]] = PROBLEMS
) -> Iterator[dict[str, Any]]:
    """Time all implementations of all problems: the forward pass alone, then the forward and the backward pass.

    On a GPU, the fused implementation is also timed as a CUDA graph, which has no overhead of Python.

    Raises:
        BadInput: two implementations that must agree compute different values or gradients.
    """
    for name, (create, batch) in problems.items():
        problem = create(batch)
        check_agreement(name, problem)
        yield from times_of(name, problem, batch, repeats)


def times_of(name: str, problem: Problem, batch: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Time all implementations of one problem, whose agreement has been checked."""
    for direction, call, share in (("forward", forward, 1), ("forward and backward", both, 3)):
        ways = {way: call(problem, run) for way, run in problem.ways.items()}
        if DEVICE == "cuda":
            ways["fused, CUDA graph"] = captured(ways["fused"])
        for row in compare(f"{name}, {direction}", ways, images=batch, repeats=repeats, warm_ups=3):
            if problem.flops is not None:
                reached = share * problem.flops * batch / (1e6 * row["median ms"])
                row["useful GFLOP/s"] = round(reached, 1)
            yield row


def forward(problem: Problem, run: Callable[[], list[Tensor]]) -> Callable[[], None]:
    """Return a function that runs the forward pass without gradients."""

    def call() -> None:
        with torch.no_grad():
            run()

    return call


def both(problem: Problem, run: Callable[[], list[Tensor]]) -> Callable[[], None]:
    """Return a function that runs the forward and the backward pass."""

    def call() -> None:
        torch.autograd.grad(sum((x.sum() for x in run()), torch.zeros(())), problem.leaves)

    return call


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Record a call as a CUDA graph, and return a function that replays it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()  # it compiles the kernels, which is not possible during the recording
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def check_agreement(name: str, problem: Problem) -> float:
    """Check that the two functions of each pair in ``problem.agreeing`` compute the same values and gradients.

    Returns:
        The largest difference of an output or gradient, divided by its norm.

    Raises:
        BadInput: the two outputs or gradients of a pair differ by 1 % of their norm or more.
    """
    largest = 0.0
    for one, other in problem.agreeing:
        found, right = (_values_and_gradients(problem.leaves, way) for way in (one, other))
        for x, y in zip(found, right, strict=True):
            apart = ((x - y).norm() / y.norm()).item()
            if not apart < 0.01:
                raise BadInput(
                    f"{name}: the results of two implementations differ by {apart:.1%}, so nothing was timed: "
                    "correct one of the two"
                )
            largest = max(largest, apart)
    return largest


def _values_and_gradients(leaves: list[Tensor], way: Callable[[], list[Tensor]]) -> list[Tensor]:
    outputs = way()
    return [*outputs, *torch.autograd.grad(sum((x.square().mean() for x in outputs), torch.zeros(())), leaves)]
