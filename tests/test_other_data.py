"""Capsules of data other than images: masks, windows that are not square, and maps in the other direction."""

import pytest
import torch
from torch.nn import functional

from torchcaps import (
    ROUTINGS,
    CapsuleLayer,
    Capsules,
    ConvCaps,
    PoseNorm,
    PrimaryCaps,
    Routing,
    RoutingMap,
    SharedCaps,
    margin_loss,
)
from torchcaps.losses import activation_logit_cross_entropy


def padded(capsules, sites, fill):
    """Append child sites to capsules, with poses of any values."""
    missing = sites - capsules.pose.shape[1]
    pose, activation = capsules
    more = pose.new_full((len(pose), missing, *pose.shape[2:]), fill)
    return Capsules(torch.cat([pose, more], dim=1), functional.pad(activation, (0, 0, 0, missing), value=0.5))


@pytest.mark.parametrize("fill", [3.0, float("nan")])
@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_masked_children_have_no_effect_in_two_layers(name, backend, fill):
    options = {"normalise_data": False} if name == "em" else {}
    torch.manual_seed(0)
    transforms = 0.5 * torch.randn(3, 2, 4, 6, 6), 0.5 * torch.randn(1, 4, 3, 6, 6)
    real = Capsules(torch.randn(2, 9, 2, 1, 6), torch.rand(2, 9, 2))
    found = []
    for sites in (12, 20):
        routing_map = RoutingMap.conv((1, sites), (1, 3))
        layers = [
            CapsuleLayer(each, transform, Routing(name, **options))
            for each, transform in zip((routing_map, RoutingMap.shared(sites - 2)), transforms, strict=True)
        ]
        for layer in layers:
            torch.manual_seed(1)
            for parameter in layer.routing.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            layer.routing.backend = backend
            layer.eval()
        keep = (torch.arange(sites) < 9).expand(2, -1)
        capsules = layers[0](padded(real, sites, fill).masked(keep))
        found.append(layers[1](capsules.masked(keep[:, : sites - 2])))
    for right, masked in zip(*found, strict=True):
        torch.testing.assert_close(masked, right, rtol=1e-4, atol=1e-5)


def test_masked_capsules_have_no_gradient_and_others_are_unchanged():
    pose, activation = torch.randn(2, 5, 3, 1, 4, requires_grad=True), torch.rand(2, 5, 3, requires_grad=True)
    keep = torch.rand(2, 5, 3) < 0.5
    masked = Capsules(pose, activation).masked(keep)
    assert torch.equal(masked.activation, activation * keep)
    assert torch.equal(masked.pose, pose * keep[..., None, None])
    (masked.pose.sum() + masked.activation.sum()).backward()
    assert torch.equal(activation.grad.bool(), keep)
    assert torch.equal(pose.grad.bool(), keep[..., None, None].expand_as(pose))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("keep", [torch.ones(2, 5), torch.ones(2, 4).bool(), torch.ones(2, 5, 1).bool(), [True]])
def test_a_mask_of_another_shape_or_dtype_is_refused(keep):
    with pytest.raises(
        ValueError, match=r"keep must be a boolean tensor \[B, S\] or \[B, S, C\], with B, S, C = 2, 5, 3"
    ):
        Capsules(torch.zeros(2, 5, 3, 1, 4), torch.zeros(2, 5, 3)).masked(keep)


def test_a_window_can_have_another_height_than_width():
    pose = torch.randn(2, 5 * 7, 2, 3, 4, dtype=torch.float64)
    transform = torch.randn(6, 2, 3, 4, 5, dtype=torch.float64)
    routing_map = RoutingMap.conv((5, 7), (2, 3), stride=(2, 1), padding=(1, 2))
    summed = routing_map.sum_at_parents(routing_map.votes(pose, transform).sum(dim=3))
    image = pose.permute(0, 3, 2, 4, 1).reshape(2 * 3, 2 * 4, 5, 7)
    weight = transform.permute(2, 4, 1, 3, 0).reshape(3 * 5, 2 * 4, 2, 3)
    expected = functional.conv2d(image, weight, stride=(2, 1), padding=(1, 2))
    assert routing_map.parent_grid == tuple(expected.shape[2:])
    torch.testing.assert_close(summed, expected.reshape(2, 3, 3, 5, -1).permute(0, 2, 4, 1, 3))


def test_layers_over_a_series_have_a_transform_for_each_position_in_the_window():
    children = PrimaryCaps(3, types=2, pose_size=(4, 4), kernel_size=(1, 3), squash_form="none", activation="sigmoid")
    layer = ConvCaps((1, 22), 2, parent_types=4, kernel_size=(1, 5), stride=(1, 2), padding=(0, 1))
    found = layer(children(torch.randn(2, 3, 1, 24)))
    assert (layer.transform.shape[0], found.pose.shape) == (5, (2, 10, 4, 4, 4))
    found.pose.sum().backward()
    assert layer.transform.grad.flatten(1).norm(dim=1).gt(0).all()


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kernel_size": 5}, r"larger than the 1×24 .*more padding; for a series, use kernel_size=\(1, 5\)$"),
        ({"kernel_size": 25}, "larger than the 1×24 .*more padding$"),
        ({"kernel_size": (1, 0)}, r"kernel_size must be one integer, or two, of at least 1; got tuple \(1, 0\)"),
        ({"kernel_size": (1, 2, 3)}, r"kernel_size must be one integer, or two, of at least 1; got tuple \(1, 2, 3\)"),
        ({"kernel_size": (1, 3), "stride": (1, 1.0)}, "stride must be one integer, or two, of at least 1"),
        ({"kernel_size": (1, 3), "padding": (1, 1)}, "padding must be an integer from 0 to kernel_size - 1 = 0; got 1"),
    ],
)
def test_impossible_windows_over_a_series_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        RoutingMap.conv((1, 24), **sizes)


def test_the_sum_of_votes_along_a_transposed_map_equals_a_transposed_convolution():
    pose, transform = torch.randn(1, 3 * 4, 1, 1, 2), torch.randn(9, 1, 1, 2, 2)
    routing_map = RoutingMap.conv((7, 9), 3, stride=2).transposed((7, 9))
    assert (routing_map.child_sites, routing_map.parent_grid) == (12, (7, 9))
    summed = routing_map.sum_at_parents(routing_map.votes(pose, transform).sum(dim=3))[0, 0, :, 0]
    image, weight = pose[0, :, 0, 0].T.reshape(1, 2, 3, 4), transform[:, 0, 0].permute(1, 2, 0).reshape(2, 2, 3, 3)
    expected = functional.conv_transpose2d(image, weight, stride=2)[0].flatten(1).T
    torch.testing.assert_close(summed, expected)
    assert RoutingMap.shared(5).transposed().parent_grid == (1, 5)
    with pytest.raises(ValueError, match="height × width = parent_sites = 63"):
        RoutingMap.conv((7, 9), 3, stride=2).transposed((9, 9))


def test_children_without_a_dimension_of_sites_or_rows_are_refused():
    message = r"pose must be \[B, S, C, R, Q\]; got a float32 tensor \[2, 5, 4, 8\]: use pose\[..., None, :\]"
    other = r"activation must be \[B, S, C\] = \[2, 5, 1\] to fit pose; got .* \[2, 5\]$"
    for layer in (SharedCaps(8, 3, 16), PoseNorm(4, 8)):
        with pytest.raises(ValueError, match=message):
            layer(Capsules(torch.randn(2, 5, 4, 8), torch.rand(2, 5, 4)))
        with pytest.raises(ValueError, match=other):
            layer(Capsules(torch.randn(2, 5, 1, 1, 8), torch.rand(2, 5)))


@pytest.mark.usefixtures("untyped")
def test_losses_name_the_loss_for_several_classes_and_the_shapes_for_scores_per_pixel():
    several = torch.tensor([[1, 0, 1], [0, 0, 1]])
    with pytest.raises(ValueError, match=r"argmax.*; for several classes per sample, use margin_loss"):
        activation_logit_cross_entropy(torch.rand(2, 3), several)
    with pytest.raises(ValueError, match=r"pass prediction.scores, or flatten all dimensions except the classes"):
        margin_loss(torch.rand(2, 4, 3), torch.zeros(2, 4).long())
