"""Agreements with extreme logits, temperatures and variances: both backends against float64, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from conftest import on_every_instruction_set
from problems import MAPS, far
from torchcaps import ROUTINGS, Agreement, Capsules, EMRouting, RoutingMap, Votes
from torchcaps.kernels import _cpu, autograd
from torchcaps.routing import LayerShape

pytestmark = pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built")
BACKENDS = ("fused", "reference")


def gradients(backend, tensors, agreement_of, routing_map, loss, dtype=torch.float32, activated=False):
    """Compute the gradients of a loss on the moments under an agreement, for all tensors.

    Tensors are the pose, the transform, parts of the agreement, and, if `activated`, the activation.
    """
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    activation = leaves.pop() if activated else None
    votes = Votes(leaves[0], activation, leaves[1], routing_map, passes=2, backend=backend)
    loss(votes.moments(agreement_of(votes, *leaves[2:]))).backward()
    leaves += [activation] if activated else []
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("activation", [None, 1.0, 1e-15, 1e-25])
@pytest.mark.parametrize("masked", [-1e4, -1e6, -1e9, -1e30])
def test_a_parent_with_a_very_negative_logit_has_the_right_gradients(backend, batch, masked, activation):
    pose, transform = torch.randn(batch, 8, 1, 1, 3), torch.randn(1, 1, 3, 3, 4)
    constant = torch.tensor([masked, 0.0, 0.0]).expand(batch, 1, 3)
    tensors = [pose, transform, constant]
    if activation is not None:
        tensors.append(activation * torch.rand(batch, 8, 1))

    def of(backend, dtype):
        means = []

        def agreement(votes, constant):
            return Agreement(constant=constant)

        def loss(found):
            means.append(found.mean.detach())
            return (found.mean[..., 0, 0] * torch.tensor([1.0, 2.0, 3.0])).sum()

        found = gradients(backend, tensors, agreement, RoutingMap.shared(8), loss, dtype, len(tensors) == 4)
        return [*means, *found[:2], *found[3:]]

    exact = of("reference", torch.float64)
    for name, results in on_every_instruction_set(partial(of, backend, torch.float32)).items():
        for found, right in zip(results, exact, strict=True):
            assert far(found, right) < 1e-5, name


@pytest.mark.parametrize("none_of_the_above", [False, True])
@pytest.mark.parametrize("logit", [1e6, 1e8, -1e8, 3e37])
@pytest.mark.parametrize("routing_map", ["dense", "conv", "irregular"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_couplings_under_equal_huge_logits_are_equal(backend, routing_map, logit, none_of_the_above):
    routing_map = MAPS[routing_map]
    pose, transform = torch.randn(2, routing_map.child_sites, 2, 1, 3), torch.randn(routing_map.transforms, 2, 3, 3, 4)
    options = {"none_of_the_above": none_of_the_above, "backend": backend}
    constant = torch.full((2, routing_map.parent_sites, 3), logit)
    votes = Votes(pose, None, transform, routing_map, **options)
    found, even = votes.couplings(Agreement(constant=constant)), votes.couplings(Agreement())
    if none_of_the_above:
        without = Votes(pose, None, transform, routing_map, backend=backend).couplings(Agreement())
        even = without if logit > 0 else torch.zeros_like(even)
    torch.testing.assert_close(found, even)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_agreement_of_another_dtype_is_converted(backend):
    votes = Votes(torch.randn(2, 4, 2, 1, 3), None, torch.randn(4, 2, 3, 3, 4), MAPS["dense"], backend=backend)
    linear = torch.randn(2, 1, 3, 1, 4)
    found, right = votes.moments(Agreement(linear=linear.double())), votes.moments(Agreement(linear=linear))
    assert found.mean.dtype == torch.float32
    assert torch.equal(found.mean, right.mean)


@pytest.mark.parametrize("none_of_the_above", [False, True])
@pytest.mark.parametrize("competition", ["parents", "types"])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("routing_map", ["dense", "shared", "conv", "irregular"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_whose_parents_are_all_excluded_has_couplings_of_nan_or_0(
    backend, routing_map, batch, competition, none_of_the_above
):
    routing_map = MAPS[routing_map]
    pose = torch.randn(batch, routing_map.child_sites, 2, 1, 3).requires_grad_()
    transform = torch.randn(routing_map.transforms, 2, 3, 3, 4)
    options = {"competition": competition, "none_of_the_above": none_of_the_above, "backend": backend}
    votes = Votes(pose, None, transform, routing_map, **options)
    constant = torch.zeros(batch, routing_map.parent_sites, 3)
    constant[0] = -torch.inf
    agreement = Agreement(constant, torch.randn(batch, routing_map.parent_sites, 3, 1, 4))
    mass, mean, _ = votes.moments(agreement)
    (mass[:1].sum() + mean[:1].sum()).backward()
    couplings, reached = votes.couplings(agreement).detach(), routing_map.edges[:, 1].unique()
    if none_of_the_above:
        assert torch.equal(mass[0], torch.zeros_like(mass[0]))
        assert pose.grad.isfinite().all()
        assert torch.equal(couplings[0], torch.zeros_like(couplings[0]))
    else:  # such an agreement can result from a number that overflows
        assert mass[0, reached].isnan().all()
        assert mean[0, reached].isnan().all()
        assert couplings[0].isnan().all()
    assert mass[1:].isfinite().all()
    assert (couplings[1:] > 0).all()


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    ("backend", "scale"), [("reference", 1.0), ("reference", 1e9), ("fused", 1.0), ("fused", 1e9), ("fused", 1e12)]
)
def test_gradients_through_a_variance_do_not_underflow(backend, scale, batch):
    routing_map = MAPS["conv"]
    tensors = (
        scale * torch.randn(batch, routing_map.child_sites, 2, 2, 3),
        torch.randn(routing_map.transforms, 2, 3, 3, 2),
    )

    def agreement(votes):
        _, mean, variance = votes.moments()
        return Agreement(centre=mean, variance=variance)

    def loss(found):
        return (found.mean / scale).square().sum()

    exact = gradients("reference", tensors, agreement, routing_map, loss, torch.float64)
    for found, right in zip(gradients(backend, tensors, agreement, routing_map, loss), exact, strict=True):
        assert far(found / right.abs().max(), right / right.abs().max()) < 1e-3


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", ["variance_floor", "inverse_temperature"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_learned_number_in_an_agreement_with_a_variance_is_refused(backend, name):
    votes = Votes(torch.randn(1, 4, 2, 1, 3), None, torch.randn(4, 2, 3, 3, 4), RoutingMap.dense(4), backend=backend)
    _, mean, variance = votes.moments()
    votes.moments(Agreement(centre=mean, variance=variance, **{name: np.float32(0.5)}))
    learned = {name: nn.Parameter(torch.tensor(0.5))}
    with pytest.raises(ValueError, match=r"must be numbers; got .*a float32 tensor \[\].*give quadratic = "):
        votes.moments(Agreement(centre=mean, variance=variance, **learned))


@pytest.mark.parametrize("tempering", [1e-39, 1e-50, 1e-300])
def test_an_inverse_temperature_below_every_float32_makes_couplings_uniform(tempering):
    children = Capsules(torch.randn(2, 9, 3, 4, 4), torch.rand(2, 9, 3))
    transform, routing_map = torch.randn(4, 3, 5, 4, 4), RoutingMap.conv((3, 3), 2)
    found = EMRouting(5, tempering=tempering, backend="fused")(children, transform, routing_map)
    right = EMRouting(5, tempering=tempering, backend="reference")(children, transform, routing_map)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [2, 16])
def test_a_parent_without_children_is_finite_without_a_variance_floor(batch):
    routing_map = MAPS["irregular"]
    transform = torch.randn(routing_map.transforms, 3, 5, 4, 4).double()
    results = []
    for backend in BACKENDS:
        pose = torch.randn(batch, routing_map.child_sites, 3, 4, 4, generator=torch.manual_seed(0)).double()
        pose.requires_grad_()
        children = Capsules(pose, torch.rand(batch, routing_map.child_sites, 3).double())
        rule = EMRouting(5, iterations=2, variance_floor=0.0, backend=backend).double()
        parents = rule(children, transform, routing_map)
        (parents.pose.sum() + parents.activation.sum()).backward()
        results.append([*parents, pose.grad])
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_rule_states_its_number_of_passes(name, monkeypatch):
    sweeps = []

    def counted(*arguments):
        sweeps.append(arguments)
        return real(*arguments)

    real = autograd.votes_backward
    monkeypatch.setattr(autograd, "votes_backward", counted)
    rule = ROUTINGS[name].for_layer(LayerShape(4, 2, 3, (1, 3), (1, 4)))
    pose = torch.randn(2, 4, 2, 1, 3).requires_grad_()
    parents = rule(Capsules(pose, torch.rand(2, 4, 2)), torch.randn(4, 2, 3, 3, 4), RoutingMap.dense(4))
    (parents.pose.sum() + parents.activation.sum()).backward()
    assert len(sweeps) == 1
