import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from problems import MAPS, LargestResult
from torchcaps import Capsules, RoutingMap, SharedCaps


def test_edges_of_dense_and_shared_maps():
    assert RoutingMap.dense(3).edges.tolist() == [[0, 0, 0], [1, 0, 1], [2, 0, 2]]
    assert RoutingMap.shared(3).edges.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


def test_a_conv_map_has_stride_1_and_no_padding_by_default():
    assert torch.equal(RoutingMap.conv((5, 4), 2).edges, RoutingMap.conv((5, 4), 2, stride=1, padding=0).edges)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.data())
def test_the_sum_of_votes_along_a_conv_map_equals_a_convolution(height, width, kernel, stride, data):
    padding = data.draw(st.integers(0, kernel - 1))
    if min(height, width) + 2 * padding < kernel:
        with pytest.raises(ValueError, match="larger than"):
            RoutingMap.conv((height, width), kernel, stride, padding)
        return
    routing_map = RoutingMap.conv((height, width), kernel, stride, padding)
    types, rows, inner, parents, outer = 2, 2, 3, 4, 2
    pose = torch.randn(2, height * width, types, rows, inner, dtype=torch.float64)
    transform = torch.randn(kernel**2, types, parents, inner, outer, dtype=torch.float64)
    votes = routing_map.votes(pose, transform)
    summed = routing_map.sum_at_parents(votes.sum(dim=3))
    image = pose.permute(0, 3, 2, 4, 1).reshape(2 * rows, types * inner, height, width)
    weight = transform.permute(2, 4, 1, 3, 0).reshape(parents * outer, types * inner, kernel, kernel)
    expected = functional.conv2d(image, weight, stride=stride, padding=padding)
    assert routing_map.parent_grid == tuple(expected.shape[2:])
    expected = expected.reshape(2, rows, parents, outer, -1).permute(0, 2, 4, 1, 3)
    torch.testing.assert_close(summed, expected)


def test_couplings_are_a_softmax_over_all_types_at_all_parent_sites_of_a_child():
    routing_map = RoutingMap.conv((1, 2), kernel_size=1)
    two_parents = RoutingMap(torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 0]]), 2, 2, 1, (1, 2))
    logits = torch.randn(1, 3, 3, 1, dtype=torch.float64)
    couplings = two_parents.log_couplings(logits).exp()
    both = logits[0, :, :2, 0].flatten().softmax(0).reshape(3, 2)
    torch.testing.assert_close(couplings[0, :, :2, 0], both)
    torch.testing.assert_close(couplings[0, :, 2, 0], logits[0, :, 2, 0].softmax(0))
    alone = routing_map.log_couplings(logits[:, :, :2]).exp()
    torch.testing.assert_close(alone, logits[:, :, :2].softmax(1))


def test_huge_logits_give_finite_couplings():
    logits = torch.tensor([1e30, -1e30, 3e4]).reshape(1, 1, 3, 1).expand(1, 2, 3, 1)
    routing_map = RoutingMap(torch.tensor([[0, 0, 0], [0, 1, 0], [0, 1, 0]]), 1, 2, 1, (1, 2))
    assert torch.isfinite(routing_map.log_couplings(logits).exp()).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kernel_size": 0}, "kernel_size must be an integer of at least 1; got 0"),
        ({"kernel_size": 2, "padding": 2}, r"padding must be an integer from 0 to kernel_size - 1 = 1; got 2"),
        ({"kernel_size": 1, "stride": 0}, "stride must be an integer of at least 1; got 0"),
    ],
)
def test_impossible_conv_maps_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        RoutingMap.conv((4, 4), **sizes)


def test_couplings_are_a_softmax_over_all_edges_also_with_several_edges_to_one_parent():
    routing_map = RoutingMap(torch.tensor([[0, 0, 0], [1, 0, 1], [0, 0, 1]]), 2, 1, 2, (1, 1))
    logits = torch.randn(1, 3, 3, 1, dtype=torch.float64)
    couplings = routing_map.log_couplings(logits).exp()
    both = logits[0, :, [0, 2], 0].flatten().softmax(0).reshape(3, 2)
    torch.testing.assert_close(couplings[0, :, [0, 2], 0], both)
    torch.testing.assert_close(couplings[0, :, 1, 0], logits[0, :, 1, 0].softmax(0))


EDGES = torch.tensor([[0, 0, 0], [1, 1, 2]])


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edges": EDGES.float()}, r"edges must be an integer tensor .*got a float32 tensor \[2, 3\]"),
        ({"edges": EDGES.bool()}, r"edges must be an integer tensor .*got a bool tensor"),
        ({"edges": EDGES[:, :2]}, r"edges must be an integer tensor \[E, 3\].*\[2, 2\]"),
        ({"edges": [[0, 0, 0]]}, r"edges must be an integer tensor .*got list"),
        ({"edges": EDGES - 1}, r"edges contain child sites from -1 to 0, but the map has 2, numbered 0 to 1"),
        ({"child_sites": 1}, r"edges contain child sites from 0 to 1, but the map has 1.*set child_sites to 2"),
        ({"parent_sites": 1, "parent_grid": (1, 1)}, r"edges contain parent sites .*set parent_sites to 2"),
        ({"transforms": 2}, r"edges contain transforms from 0 to 2.*set transforms to 3"),
        ({"transforms": 0}, r"transforms must be an integer of at least 1; got 0"),
        ({"child_sites": 2.0}, r"child_sites must be an integer of at least 1; got 2.0"),
        ({"parent_grid": 2}, r"parent_grid must be a tuple \(height, width\).*; got 2"),
        ({"parent_grid": (2, 2)}, r"parent_grid must be .*parent_sites = 2; got \(2, 2\)"),
        ({"edges": EDGES.to("meta")}, r'edges are on the meta device.*device="cpu"'),
    ],
)
def test_bad_arguments_of_a_map_are_refused(arguments, message):
    right = {"edges": EDGES, "child_sites": 2, "parent_sites": 2, "transforms": 3, "parent_grid": (1, 2)}
    RoutingMap(**right)
    with pytest.raises(ValueError, match=message):
        RoutingMap(**{**right, **arguments})


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_edges_of_any_integer_dtype_are_stored_as_int64(dtype):
    routing_map = RoutingMap(EDGES.to(dtype), 2, 2, 3, (1, 2))
    assert torch.equal(routing_map.edges, EDGES)
    assert routing_map.edges.dtype == torch.int64


def test_a_map_does_not_change_with_the_tensor_of_its_edges():
    edges = torch.tensor([[0, 0, 0], [1, 0, 1]])
    routing_map = RoutingMap(edges, 2, 1, 2, (1, 1))
    edges[0, 2] = 1
    assert routing_map.edges.tolist() == [[0, 0, 0], [1, 0, 1]]


def test_maps_can_be_copied_pickled_and_created_under_any_default_device():
    for again in (copy.deepcopy(MAPS["conv"]), pickle.loads(pickle.dumps(MAPS["conv"]))):
        assert torch.equal(again.edges, MAPS["conv"].edges)
        assert torch.equal(again.edges_on("cpu"), MAPS["conv"].edges)
    with torch.device("meta"):
        for routing_map in (RoutingMap.dense(2), RoutingMap.shared(2), RoutingMap.conv((2, 2), 1)):
            assert routing_map.edges.device.type == "cpu"
    assert MAPS["conv"].edges_on("meta").is_meta
    assert torch.equal(MAPS["conv"].edges_on("cpu"), MAPS["conv"].edges)


def test_a_map_created_in_inference_mode_can_be_used_in_training():
    with torch.inference_mode():
        routing_map = RoutingMap.conv((2, 2), 1)
    votes = routing_map.votes(torch.randn(1, 4, 1, 1, 2, requires_grad=True), torch.randn(1, 1, 3, 2, 2))
    votes.sum().backward()


def test_a_shared_transform_is_not_copied_for_each_edge():
    routing_map, transform = RoutingMap.conv((6, 6), 3), torch.randn(1, 2, 3, 4, 5)
    shared = RoutingMap(routing_map.edges * torch.tensor([1, 1, 0]), 36, 16, 1, (4, 4))
    pose = torch.randn(2, 36, 2, 1, 4)
    expected = routing_map.votes(pose, transform.expand(9, -1, -1, -1, -1))
    torch.testing.assert_close(shared.votes(pose, transform), expected)

    with LargestResult() as results:
        votes = shared.votes(pose[:1], transform)
    assert results.largest == votes.numel() < len(shared.edges) * transform.numel()


@pytest.mark.usefixtures("untyped")
def test_a_layer_with_a_shared_transform_is_exported_for_any_number_of_sites():
    class Series(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = SharedCaps(4, 2, 5)

        def forward(self, pose):
            return self.layer(Capsules(pose, pose.norm(dim=(3, 4)))).pose

    network, sites = Series().eval(), torch.export.Dim("sites", min=2, max=1000)
    network.layer.routing.backend = "reference"
    exported = torch.export.export(network, (torch.randn(2, 24, 3, 1, 4),), dynamic_shapes={"pose": {1: sites}})
    pose = torch.randn(2, 41, 3, 1, 4)
    torch.testing.assert_close(exported.module()(pose), network(pose))
