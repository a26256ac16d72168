"""`Recomputed`: agreements that the backward pass computes again need less memory and change no result."""

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from problems import MAPS, full_problem
from torchcaps import Agreement, Capsules, ConvCaps, Recomputed, Votes
from torchcaps.kernels import _cpu

pytestmark = pytest.mark.skipif(_cpu is None, reason="the fused kernels are not built")


def closer(mass, mean, variance, sharpness):
    return Agreement(mass.log(), quadratic=sharpness / (1 + variance), centre=0.5 * mean)


def stored(mass, mean, variance, sharpness):
    return closer(mass, mean, variance, sharpness)


def three_passes(agreement_of, backend="fused", competition="parents", passes=3):
    """Return the results of the passes, and the leaves that have gradients."""
    torch.manual_seed(0)
    pose, activation, transform, *_ = full_problem(MAPS["conv"], 5, (2, 3, 4))
    sharpness = torch.tensor(0.7, dtype=torch.float64)
    leaves = [x.detach().clone().requires_grad_() for x in (pose, activation, transform, sharpness)]
    votes = Votes(*leaves[:3], MAPS["conv"], competition=competition, passes=passes, backend=backend)
    found = votes.moments()
    results = [*found]
    for _ in range(2):
        found = votes.moments(agreement_of(*found, leaves[3]))
        results += found
    return votes, results, leaves


def later(*tensors):
    return Recomputed(closer, *tensors)


def gradients(results, leaves, **options):
    weights = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum() for x in results)
    return torch.autograd.grad(loss, leaves, **options)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("competition", ["parents", "types"])
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_results_and_gradients_are_those_of_a_stored_agreement(backend, competition, passes):
    _, right, leaves = three_passes(stored, backend, competition, passes)
    _, found, own_leaves = three_passes(later, backend, competition, passes)
    torch.testing.assert_close(found, right, rtol=0, atol=0)
    torch.testing.assert_close(gradients(found, own_leaves), gradients(right, leaves), rtol=1e-12, atol=1e-12)


def test_the_loss_may_use_the_last_pass_only():
    _, right, leaves = three_passes(stored)
    _, found, own_leaves = three_passes(later)
    torch.testing.assert_close(
        gradients(found[-2:-1], own_leaves), gradients(right[-2:-1], leaves), rtol=1e-12, atol=1e-12
    )


def test_a_second_backward_gives_the_same_gradients_and_saved_tensors_may_be_moved():
    with save_on_cpu():
        _, found, leaves = three_passes(later)
    once = gradients(found, leaves, retain_graph=True)
    torch.testing.assert_close(gradients(found, leaves), once, rtol=0, atol=0)


def test_gradients_reach_the_agreement_if_the_children_need_none():
    votes = Votes(*full_problem(MAPS["conv"], 5, (2, 3, 4))[:3], MAPS["conv"], backend="fused")
    sharpness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    first = votes.moments()
    losses = [votes.moments(kind(*first, sharpness)).mean.square().sum() for kind in (stored, later)]
    right, found = (torch.autograd.grad(loss, sharpness)[0] for loss in losses)
    assert right != 0
    torch.testing.assert_close(found, right, rtol=1e-12, atol=0)


def test_the_function_runs_without_autocast_in_both_passes():
    weight = torch.randn(4, 4)
    leaves = [x.detach().float().requires_grad_() for x in full_problem(MAPS["conv"], 5, (2, 3, 4))[:3]]

    def linear(mass, mean, variance):
        return Agreement(linear=mean @ weight)

    gradients = []
    for enabled in (False, True):
        votes = Votes(*leaves, MAPS["conv"], passes=2, backend="fused")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = votes.moments(Recomputed(linear, *votes.moments())).mean.square().sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_gradients_of_gradients_are_refused():
    _, found, leaves = three_passes(later)
    first = gradients(found, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        first[3].backward()


def test_a_tensor_that_is_not_an_argument_is_refused():
    sharpness = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def hidden(mass, mean, variance, _):
        return closer(mass, mean, variance, sharpness)

    with pytest.raises(ValueError, match="give the tensor to Recomputed"):
        three_passes(lambda *tensors: Recomputed(hidden, *tensors))


@pytest.mark.parametrize("tensors", [(1.0,), (None,)])
def test_an_argument_that_is_not_a_tensor_is_refused(tensors, untyped):
    with pytest.raises(ValueError, match="must be tensors; got"):
        Recomputed(closer, *tensors)


def test_a_function_that_returns_something_else_is_refused(untyped):
    with pytest.raises(ValueError, match="agreement must be an Agreement, a Recomputed or None"):
        three_passes(lambda *tensors: Recomputed(lambda mass, *_: mass, *tensors))


def test_couplings_use_the_computed_agreement():
    votes, _, _ = three_passes(later)
    other, results, leaves = three_passes(stored)
    torch.testing.assert_close(votes.last_couplings(), other.couplings(stored(*results[3:6], leaves[3])))


def test_nothing_of_the_graph_remains_after_use():
    """Without reference cycles: memory is freed at once, not at the next garbage collection."""
    gc.disable()
    try:
        votes, found, leaves = three_passes(later)
        alive = weakref.ref(found[-1]), weakref.ref(found[1])
        gradients(found, leaves)
        del votes, found, leaves
        assert all(x() is None for x in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("routing", ["em", "variational_bayes", "generative", "attention", "self_routing"])
def test_training_stores_less_than_three_times_the_inputs_outputs_and_gradients(routing):
    layers = [ConvCaps((14, 14), 8, 16, kernel_size=3, stride=2, routing=routing)]
    layers.append(ConvCaps(layers[0].parent_grid, 16, 16, kernel_size=3, routing=routing))
    pose, activation = torch.randn(16, 196, 8, 4, 4, requires_grad=True), torch.rand(16, 196, 8, requires_grad=True)
    stored_bytes: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        stored_bytes[storage.data_ptr()] = storage.nbytes(), storage  # the storage lives on, so its address is unique
        return tensor

    capsules = Capsules(pose, activation)
    given = [x for part in layers for x in part.parameters()] + [pose, activation]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        between = layers[0](capsules)
        parents = layers[1](between)
    base = sum(2 * x.nbytes for x in given) + sum(x.nbytes for x in (*between, *parents))
    assert sum(size for size, _ in stored_bytes.values()) < 3 * base
