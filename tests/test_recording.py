"""`recorded`: what the record contains after training, failed calls and checkpointing."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchcaps import Agreement, Capsules, DenseCaps, PooledCNN, RoutingMap, Rule
from torchcaps.feature_maps import feature_maps
from torchcaps.recording import recorded

CHILDREN = Capsules(torch.randn(2, 4, 3, 1, 4, generator=torch.Generator().manual_seed(1)), torch.full((2, 4, 3), 0.6))


class Biased(Rule):
    """Rule with a learned constant that is a direct part of the agreement."""

    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(5))

    def route(self, votes):
        found = votes.moments(Agreement(self.constant.expand(votes.parent_shape[:3])))
        return Capsules(found.mean, found.mass / votes.activation_sums()[..., None])


class Fails(Biased):
    broken = True
    error: type[BaseException] = RuntimeError

    def route(self, votes):
        found = super().route(votes)
        if self.broken:
            raise self.error("broken")
        return found


class Interrupted(Fails):
    error = KeyboardInterrupt


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("rule", ["dynamic", Biased()])
def test_a_record_does_not_change_if_the_layer_is_trained_afterwards(rule, backend):
    layer = DenseCaps(4, 3, 4, 5, 4, routing=rule)
    layer.routing.backend = backend
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with recorded(layer) as layers, torch.no_grad():
        parents, couplings = layer(CHILDREN, return_couplings=True)
    votes, agreement, _ = layers[0].passes[-1]
    expected = votes.materialised()
    layer(CHILDREN).pose.square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer(CHILDREN).pose, parents.pose)
    assert torch.equal(votes.couplings(agreement), couplings)
    assert torch.equal(votes.materialised(), expected)


def test_calls_with_the_same_weights_share_one_copy_of_them():
    layer = DenseCaps(4, 3, 4, 5, 4)
    with recorded(layer) as layers, torch.no_grad():
        layer(CHILDREN)
        layer(CHILDREN)
        layer.transform.mul_(2)
        layer(CHILDREN)
    first, *_, last = (one.votes.materialised() for one in layers[0].passes)
    copies = {one.votes._transform.data_ptr() for one in layers[0].passes}
    assert len(copies) == 2
    assert layer.transform.data_ptr() not in copies
    torch.testing.assert_close(last, 2 * first)


@pytest.mark.parametrize("way", ["fused optimiser", "data"])
def test_a_record_has_the_weights_of_its_time_if_their_version_does_not_change(way):
    layer = DenseCaps(4, 3, 4, 5, 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.5, fused=True)
    with recorded(layer) as layers:
        for _ in range(2):
            optimizer.zero_grad()
            layer(CHILDREN).pose.square().sum().backward()
            used = layer.transform.detach().clone()
            if way == "data":
                layer.transform.data.mul_(2)
            else:
                optimizer.step()
    assert torch.equal(layers[0].passes[-1].votes._transform, used)


def test_a_call_after_an_interrupted_one_is_recorded():
    layer = DenseCaps(4, 3, 4, 5, 4, routing=Interrupted())
    with recorded(layer) as layers:
        with pytest.raises(KeyboardInterrupt):
            layer(CHILDREN)
        layer.routing.broken = False
        layer(CHILDREN)
    assert [(len(layer.passes), len(layer.runs)) for layer in layers] == [(1, 1)]


def test_gradients_flow_through_recorded_couplings():
    layer = DenseCaps(4, 3, 4, 5, 4).double()
    children = Capsules(*(part.double() for part in CHILDREN))
    with recorded(layer) as layers:
        _, couplings = layer(children, return_couplings=True)
    votes, agreement, _ = layers[0].passes[-1]
    found = torch.autograd.grad(votes.couplings(agreement).square().sum(), layer.transform, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(couplings.square().sum(), layer.transform))


def test_a_copy_that_was_made_during_the_recording_is_not_recorded_later():
    layer = DenseCaps(4, 3, 4, 5, 4)
    with recorded(layer) as layers:
        layer(CHILDREN)
        copy = deepcopy(layer)
    assert torch.equal(copy(CHILDREN).pose, layer(CHILDREN).pose)
    assert [len(layer.runs) for layer in layers] == [1]


@pytest.mark.parametrize("failed_calls", [1, 2])
def test_a_call_that_fails_leaves_no_record(failed_calls):
    layer = DenseCaps(4, 3, 4, 5, 4, routing=Fails())
    with recorded(layer) as layers:
        for _ in range(failed_calls):
            with pytest.raises(RuntimeError, match="broken"):
                layer(CHILDREN)
        with pytest.raises(ValueError, match="child sites"):
            layer.routing(CHILDREN, layer.transform, RoutingMap.dense(9))
        assert not layers
        layer.routing.broken = False
        layer(CHILDREN)
    assert [(len(layer.passes), len(layer.runs)) for layer in layers] == [(1, 1)]


def test_a_layer_with_checkpointing_is_recorded_once():
    layer = DenseCaps(4, 3, 4, 5, 4)
    with recorded(layer) as layers:
        poses = checkpoint(lambda: layer(CHILDREN).pose, use_reentrant=False)
        poses.square().sum().backward()
    assert layer.transform.grad.norm() > 0
    assert (len(layers), len(layers[0].passes), len(layers[0].runs)) == (1, layer.routing.iterations, 1)


def test_other_threads_can_use_a_model_whose_feature_maps_are_recorded():
    model, image = PooledCNN((1, 28, 28), 3).eval(), torch.rand(1, 1, 28, 28)
    with ThreadPoolExecutor(1) as thread, feature_maps(model, [], image) as maps, torch.no_grad():
        model(image)
        count = len(maps)
        thread.submit(model, torch.rand(2, 1, 31, 31)).result()
    assert len(maps) == count > 0
