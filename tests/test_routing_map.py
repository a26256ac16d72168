import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from torchcaps import RoutingMap


def test_dense_and_shared_edges():
    assert RoutingMap.dense(3).edges.tolist() == [[0, 0, 0], [1, 0, 1], [2, 0, 2]]
    assert RoutingMap.shared(3).edges.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.integers(1, 3), st.data())
def test_summed_votes_along_a_conv_map_are_a_convolution(height, width, kernel, stride, data):
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
    summed = routing_map.sum_over_children(torch.ones(votes.shape[:4], dtype=torch.float64), votes)
    image = pose.permute(0, 3, 2, 4, 1).reshape(2 * rows, types * inner, height, width)
    weight = transform.permute(2, 4, 1, 3, 0).reshape(parents * outer, types * inner, kernel, kernel)
    expected = functional.conv2d(image, weight, stride=stride, padding=padding)
    assert routing_map.parent_grid == tuple(expected.shape[2:])
    expected = expected.reshape(2, rows, parents, outer, -1).permute(0, 2, 4, 1, 3)
    torch.testing.assert_close(summed, expected)


def test_couplings_are_a_softmax_over_every_type_at_every_site_that_a_child_reaches():
    routing_map = RoutingMap.conv((1, 2), kernel_size=1)
    two_parents = RoutingMap(torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 0]]), 2, 2, 1, (1, 2))
    logits = torch.randn(1, 3, 3, 1, dtype=torch.float64)
    couplings = two_parents.log_couplings(logits).exp()
    both = logits[0, :, :2, 0].flatten().softmax(0).reshape(3, 2)
    torch.testing.assert_close(couplings[0, :, :2, 0], both)
    torch.testing.assert_close(couplings[0, :, 2, 0], logits[0, :, 2, 0].softmax(0))
    alone = routing_map.log_couplings(logits[:, :, :2]).exp()
    torch.testing.assert_close(alone, logits[:, :, :2].softmax(1))


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([1e30, -1e30, 3e4]).reshape(1, 1, 3, 1).expand(1, 2, 3, 1)
    routing_map = RoutingMap(torch.tensor([[0, 0, 0], [0, 1, 0], [0, 1, 0]]), 1, 2, 1, (1, 2))
    assert torch.isfinite(routing_map.log_couplings(logits).exp()).all()


@pytest.mark.parametrize(
    "sizes", [{"kernel_size": 0}, {"kernel_size": 2, "padding": 2}, {"kernel_size": 1, "stride": 0}]
)
def test_impossible_conv_maps_raise(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        RoutingMap.conv((4, 4), **sizes)
