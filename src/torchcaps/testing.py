"""Tests for routing rules: those of this library and your own. A rule must pass each test on every routing map."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.checks import described
from torchcaps.routing import LayerShape, Rule
from torchcaps.routing.votes import UnknownCouplings
from torchcaps.routing_map import RoutingMap


class Case(NamedTuple):
    """Arguments of a routing rule, except for the activations of the children.

    Arguments:
        pose: ``[B, S, C, R, Q]``, poses of the children; see `torchcaps.capsules` for the dimension letters.
        transform: ``[K, C, J, Q, N]``, the matrices that turn the pose of a child into votes.
        routing_map: the graph that connects child sites with parent sites.
    """

    pose: Tensor
    transform: Tensor
    routing_map: RoutingMap


MAPS = {"dense": RoutingMap.dense(4), "shared": RoutingMap.shared(4), "conv": RoutingMap.conv((3, 3), kernel_size=2)}


def check_rule(
    make: Callable[[LayerShape], Rule], rows: int = 1, columns: int = 4, finite_differences: bool = True
) -> None:
    """Test your own routing rule on a dense, a shared and a convolutional map.

    The test checks these properties:

    - The parents have poses ``[B, P, J, R, N]`` and activations ``[B, P, J]`` of at least 0, and the couplings are
      ``[B, J, E, C]``. Couplings are not tested if the rule does not call `Votes.moments`.
    - The order of child sites does not change the parents, and the order of parent sites changes only the order of the
      parents.
    - In evaluation mode, a sample gives the same result alone as in a batch.
    - In training mode, values and gradients are finite.
    - If all poses are zero, values and gradients are finite, with float32 and with float64 inputs.
    - If one child or no child is active, values and gradients are finite, with float32 and with float64 inputs.
    - A child with activation 0 has no effect, unless the rule has ``weighs_activations = False``.
    - Two calls with the same input give bitwise equal results.
    - After a call, the rule can be copied with ``copy.deepcopy``.
    - The fused kernels and the reference implementation give the same values and gradients, if the rule has a
      ``backend`` attribute and the kernels can run.
    - Gradients of poses, activations, transforms and the parameters of the rule match finite differences.
    - With float32 and with float64 inputs, the result has the dtype of the inputs.
    - `torch.compile` compiles the rule to one graph, and the compiled rule gives the same values.

    Arguments:
        make: function that creates a new rule for a layer with the given `LayerShape`, such as
            ``lambda layer: MyRule(layer.parent_types)``.
        rows, columns: size of a pose. The poses of children and parents have the same size.
        finite_differences: compare gradients with finite differences. Use False for a rule that treats a part of its
            computation as constant, for example with ``votes.detach()`` or ``constant_couplings=True``.

    Raises:
        TypeError: ``make`` is a rule, or a class that needs no `LayerShape`, instead of a function.
        AssertionError: a property does not hold. The message begins with the map and the property.

    Example:
        >>> from torchcaps import UniformRouting
        >>> check_rule(lambda layer: UniformRouting())  # doctest: +SKIP
    """
    needs_layer = not isinstance(make, type) or any(
        argument.default is argument.empty for argument in inspect.signature(make).parameters.values()
    )
    if isinstance(make, nn.Module) or not needs_layer:
        raise TypeError(
            "make must be a function that takes a LayerShape and creates the rule, such as lambda layer: MyRule(); got "
            f"{described(make)}"
        )
    for name, routing_map in MAPS.items():
        generator = torch.Generator().manual_seed(0)
        types, parents = (1, 3) if name == "shared" else (2, 3)
        shape = LayerShape(routing_map.transforms, types, parents, (rows, columns), (rows, columns))
        sizes = (routing_map.transforms, types, parents, columns, columns)
        rule = make(shape).double().eval()
        pose = torch.randn(2, routing_map.child_sites, types, rows, columns, generator=generator).double()
        case = Case(pose, torch.randn(sizes, generator=generator).double(), routing_map)
        activation = torch.rand(pose.shape[:3], generator=generator).double()
        laws = (
            _shapes,
            _copied,
            _sites,
            _parent_sites,
            _samples,
            _training,
            _zero,
            _single,
            _inactive,
            _bits,
            _backends,
            *([_gradients] if finite_differences else []),
            _dtypes,
            _compiled,
        )
        for law in laws:
            try:
                law(rule, case, activation)
            except Exception as error:
                raise AssertionError(f"the rule fails this test on the {name} map: {law.__doc__} ({error})") from error


def _run(rule: Rule, pose: Tensor, activation: Tensor, case: Case) -> tuple[Tensor, ...]:
    """Return pose and activation of the parents, and the couplings if they are known."""
    layer = Capsules(pose, activation), case.transform, case.routing_map
    try:
        parents, couplings = rule(*layer, return_couplings=True)
    except UnknownCouplings:
        return tuple(rule(*layer))
    return parents.pose, parents.activation, couplings


def _shapes(rule: Rule, case: Case, activation: Tensor) -> None:
    """The parents and the couplings have the right shapes, and activations are at least 0."""
    (batch, _, types, rows, _), (_, _, parents, _, columns) = case.pose.shape, case.transform.shape
    capsules = (batch, case.routing_map.parent_sites, parents)
    right = {
        "pose": (*capsules, rows, columns),
        "activation": capsules,
        "couplings": (batch, parents, len(case.routing_map.edges), types),
    }
    results = _run(rule, case.pose, activation, case)
    for (name, shape), found in zip(right.items(), results, strict=False):
        assert found.shape == shape, f"{name} must be {list(shape)}; got {list(found.shape)}"
    assert (lowest := results[1].min()) > -1e-6, f"an activation is {lowest:.3g}: apply a function such as sigmoid"


def _sites(rule: Rule, case: Case, activation: Tensor) -> None:
    """The order of child sites does not change the parents."""
    order = torch.randperm(len(case.pose[0]), generator=torch.Generator().manual_seed(1))
    edges = case.routing_map.edges.clone()
    edges[:, 0] = torch.argsort(order)[edges[:, 0]]
    moved = case._replace(routing_map=replace(case.routing_map, edges=edges.flip(0)))
    found = _run(rule, case.pose[:, order], activation[:, order], moved)
    for one, right in zip(found[:2], _run(rule, case.pose, activation, case), strict=False):
        torch.testing.assert_close(one, right)


def _parent_sites(rule: Rule, case: Case, activation: Tensor) -> None:
    """The order of parent sites changes only the order of the parents."""
    order = torch.randperm(case.routing_map.parent_sites, generator=torch.Generator().manual_seed(1))
    edges = case.routing_map.edges.clone()
    edges[:, 1] = torch.argsort(order)[edges[:, 1]]
    moved = case._replace(routing_map=replace(case.routing_map, edges=edges))
    found = _run(rule, case.pose, activation, moved)
    for one, right in zip(found[:2], _run(rule, case.pose, activation, case), strict=False):
        torch.testing.assert_close(one, right[:, order])


def _samples(rule: Rule, case: Case, activation: Tensor) -> None:
    """A sample gives the same result alone as in a batch."""
    together = _run(rule, case.pose, activation, case)
    for sample in (slice(0, 1), slice(1, 2)):
        alone = _run(rule, case.pose[sample], activation[sample], case)
        for one, right in zip(alone, together, strict=True):
            torch.testing.assert_close(one, right[sample])


def _finite(rule: Rule, pose: Tensor, activation: Tensor, case: Case) -> None:
    for dtype in (torch.float64, torch.float32):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (pose, activation, case.transform)]
        parents = copy.deepcopy(rule).to(dtype)(Capsules(leaves[0], leaves[1]), leaves[2], case.routing_map)
        (parents.pose.sum() + parents.activation.sum()).backward()
        for value in (*parents, *(leaf.grad for leaf in leaves if leaf.grad is not None)):
            assert torch.isfinite(value).all(), f"a value or gradient is not finite with {dtype} inputs"


def _training(rule: Rule, case: Case, activation: Tensor) -> None:
    """In training mode, values and gradients are finite."""
    _finite(copy.deepcopy(rule).train(), case.pose, activation, case)


def _zero(rule: Rule, case: Case, activation: Tensor) -> None:
    """Values and gradients are finite if all poses are zero."""
    _finite(rule, torch.zeros_like(case.pose), activation, case)


def _single(rule: Rule, case: Case, activation: Tensor) -> None:
    """Values and gradients are finite if one child or no child is active."""
    alone = torch.zeros_like(activation)
    _finite(rule, case.pose, alone, case)
    alone[:, 0, 0] = 1
    _finite(rule, case.pose, alone, case)


def _copied(rule: Rule, case: Case, activation: Tensor) -> None:
    """After a call, the rule can be copied with copy.deepcopy; if it stores tensors, detach them first."""
    _run(rule, case.pose, activation, case._replace(transform=case.transform.clone().requires_grad_()))
    copy.deepcopy(rule)


def _inactive(rule: Rule, case: Case, activation: Tensor) -> None:
    """A child with activation 0 has no effect."""
    if not rule.weighs_activations:
        return
    silent, other = activation.clone(), case.pose.clone()
    silent[:, 0], other[:, 0] = 0, 100
    for one, right in zip(_run(rule, other, silent, case)[:2], _run(rule, case.pose, silent, case), strict=False):
        torch.testing.assert_close(one, right)


def _bits(rule: Rule, case: Case, activation: Tensor) -> None:
    """Two calls with the same input give bitwise equal results."""
    first, again = (_run(rule, case.pose, activation, case) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True)), "two calls differ"


def _backends(rule: Rule, case: Case, activation: Tensor) -> None:
    """The fused kernels and the reference give the same values and gradients."""
    results = []
    for backend in ("auto", "reference"):
        one: Any = copy.deepcopy(rule)
        one.backend = backend
        leaves = [x.detach().clone().requires_grad_() for x in (case.pose, activation, case.transform)]
        parents = one(Capsules(leaves[0], leaves[1]), leaves[2], case.routing_map)
        leaves += [x for x in one.parameters() if x.requires_grad]
        loss = sum((x * torch.linspace(1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in parents)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        results.append((*parents, *gradients))
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right)


def _gradients(rule: Rule, case: Case, activation: Tensor) -> None:
    """Gradients match finite differences, also for the parameters of the rule."""
    learned = {name: x for name, x in rule.named_parameters() if x.requires_grad}

    def outputs(pose: Tensor, activation: Tensor, transform: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(learned, parameters, strict=True))
        children = Capsules(pose, activation)
        return tuple(torch.func.functional_call(rule, given, (children, transform, case.routing_map)))

    leaves = [x.detach().clone().requires_grad_() for x in (case.pose, activation, case.transform, *learned.values())]
    torch.autograd.gradcheck(outputs, leaves, fast_mode=True)


def _dtypes(rule: Rule, case: Case, activation: Tensor) -> None:
    """The result has the dtype of the inputs."""
    for dtype in (torch.float64, torch.float32):
        narrow = case._replace(transform=case.transform.to(dtype))
        found = _run(rule.to(dtype), case.pose.to(dtype), activation.to(dtype), narrow)
        assert {x.dtype for x in found} == {dtype}, f"inputs are {dtype}, outputs are {[x.dtype for x in found]}"
    rule.double()


def _compiled(rule: Rule, case: Case, activation: Tensor) -> None:
    """torch.compile compiles the rule to one graph, which gives the same values."""
    torch.compiler.reset()
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager")
    found = compiled(Capsules(case.pose, activation), case.transform, case.routing_map)
    right = rule(Capsules(case.pose, activation), case.transform, case.routing_map)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
