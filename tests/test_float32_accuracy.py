"""Results and gradients in float32 are as accurate as the dtype allows, where a simpler computation loses digits."""

import pytest
import torch

from conftest import on_every_instruction_set
from torchcaps import AttentionRouting, Capsules, RoutingMap, SelfRouting, lengths, squash, squashed
from torchcaps.routing.votes import Agreement, Votes


def far(found, exact):
    """Return the distance from the exact tensor, relative to its norm."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def of_length(length):
    """Poses of one length with random directions."""
    pose = torch.randn(100, 1, 16)
    return pose / lengths(pose)[:, None, None] * length


@pytest.mark.parametrize(
    ("form", "length"),
    [
        ("sabour", 1e-11),
        ("sabour", 1.0),
        ("sabour", 1000.0),
        ("su", 1000.0),
        ("exponential", 1e-3),
        ("exponential", 14.0),
        ("unit", 2.0),
        ("none", 2.0),
    ],
)
def test_the_length_of_a_squashed_pose_and_its_gradient_are_accurate(form, length):
    poses = of_length(length)

    def length_and_gradient(dtype, of):
        pose = poses.to(dtype).requires_grad_()
        found = of(pose)
        return found.detach(), torch.autograd.grad(found.sum(), pose)[0]

    exact = length_and_gradient(torch.float64, lambda pose: lengths(squash(pose, form)))
    found = length_and_gradient(torch.float32, lambda pose: squashed(pose, form).activation)
    assert far(found[0], exact[0]) < 1e-6
    if form != "unit":  # the gradient is 0
        assert far(found[1], exact[1]) < 1e-5
    assert torch.equal(squashed(poses, form).pose, squash(poses, form))


@pytest.mark.parametrize("form", ["sabour", "su", "exponential"])
@pytest.mark.parametrize("spoiled", [1e30, float("inf"), float("nan")])
def test_a_pose_that_overflows_has_no_finite_activation(form, spoiled):
    poses = torch.tensor([[[spoiled, 1.0]], [[3.0, 4.0]]])
    found = squashed(poses, form).activation
    assert found[0].isnan()
    assert found[1] == squashed(poses[1:], form).activation


@pytest.mark.parametrize("form", ["sabour", "su", "exponential", "unit", "none"])
def test_a_squashed_zero_pose_has_the_gradient_zero(form):
    pose = torch.zeros(2, 1, 4, requires_grad=True)
    found = squashed(pose, form)
    assert not found.activation.any()
    assert not torch.autograd.grad(found.activation.sum(), pose)[0].any()


@pytest.mark.parametrize(("batch", "rows", "parents"), [(256, 1, 16), (64, 4, 16), (256, 1, 3)])
def test_the_gradient_of_a_shared_transform_is_accurate(batch, rows, parents):
    """In an image with a plain background, most children are equal, so rounding errors do not cancel out."""
    pose = (0.5 + torch.rand(1, 1, 1, rows, 4)).expand(batch, 1000, -1, -1, -1)
    transform, weights = 0.1 * torch.randn(1, 1, parents, 4, 4), torch.linspace(0.5, 1, 4)

    def gradient(dtype):
        shared = transform.to(dtype).requires_grad_()
        votes = Votes(pose.to(dtype), None, shared, RoutingMap.shared(1000), backend="fused")
        mean = votes.moments(variance=False).mean
        return torch.autograd.grad((mean * weights.to(dtype)).sum(), shared)[0]

    exact = gradient(torch.float64)
    for name, found in on_every_instruction_set(lambda: gradient(torch.float32)).items():
        assert far(found, exact) < 1e-5, name


def test_activations_of_self_routing_do_not_depend_on_the_number_of_children():
    """Equal activations are added one after the other: in float32, their sum would be 0.3 % off."""
    children, rule = 262_144, SelfRouting(1, 1, 2, (1, 2))
    torch.nn.init.constant_(rule.bias[..., 0], 4.0)
    capsules = Capsules(torch.ones(1, children, 1, 1, 2), torch.full((1, children, 1), 0.7))
    found = rule(capsules, torch.ones(1, 1, 2, 2, 2), RoutingMap.shared(children)).activation
    torch.testing.assert_close(found[0, 0], torch.tensor([4.0, 0.0]).softmax(dim=0), rtol=1e-5, atol=0)


def test_attention_routing_keeps_the_digits_of_poses_with_a_large_mean():
    torch.manual_seed(0)
    pose, transform = torch.randn(8, 20, 2, 1, 8), torch.randn(20, 2, 3, 8, 16)
    pose[..., 0], transform[..., 0, :] = 1.0, 100.0  # every element of a vote is about 100
    rule = AttentionRouting(16)

    def gradients(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (pose, transform)]
        found = rule.to(dtype)(Capsules(leaves[0], torch.ones(8, 20, 2, dtype=dtype)), leaves[1], RoutingMap.dense(20))
        return torch.autograd.grad(found.pose[..., :5].square().sum(), [leaves[1], rule.norm.weight])

    for found, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        assert far(found, exact) < 5e-4


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("distance", [3.0, 20.0, 100.0])
def test_the_variance_is_accurate_if_the_mean_is_far_from_the_centre_of_the_agreement(distance, batch):
    pose, transform = torch.randn(batch, 64, 1, 4, 4), torch.eye(4).expand(1, 1, 3, 4, 4)
    centre = torch.full((batch, 1, 3, 4, 4), distance)

    def variance(dtype):
        votes = Votes(pose.to(dtype), None, transform.to(dtype), RoutingMap.shared(64))
        agreement = Agreement(quadratic=torch.full_like(centre, 1e-6).to(dtype), centre=centre.to(dtype))
        return votes.moments(agreement).variance

    exact = variance(torch.float64)
    for name, found in on_every_instruction_set(lambda: variance(torch.float32)).items():
        assert ((found - exact).abs() / exact).max() < 2e-5, name
