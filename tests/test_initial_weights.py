"""Initial weights of capsule layers, of matrix capsules and of capsule heads: their spread, set by options or sizes."""

import pytest
import torch

from torchcaps import CapsuleHead, ClassCaps, ConvCaps, MatrixCapsNet, SharedCaps, margin_loss


@pytest.mark.parametrize("std", [0.01, 0.3])
def test_initial_transforms_differ_from_the_identity_by_the_given_deviation(std):
    """The normal distribution is truncated at two standard deviations, so its own deviation is 0.88 times as large."""
    layers = [
        ConvCaps((4, 4), 8, 8, kernel_size=3, initial_std=std),
        ClassCaps(torch.rand(9, 2), 32, 16, initial_std=std),
    ]
    for layer in layers:
        noise = layer.transform.detach() - torch.eye(4)
        assert noise.std().item() == pytest.approx(0.88 * std, rel=0.05)
        assert 1.9 * std < noise.abs().max() <= 2 * std


def test_initial_transforms_of_shared_caps_are_uniform_with_a_range_that_depends_on_all_parents():
    transform = SharedCaps(8, parent_types=10, parent_pose_size=16).transform.detach()
    bound = (6 / (8 + 10 * 16)) ** 0.5
    assert 0.98 * bound < transform.abs().max() <= bound
    assert transform.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_poses_and_activations_of_matrix_capsules_have_initial_weights_of_different_deviations():
    model = MatrixCapsNet(primary_initial_std=0.5, activation_initial_std=3.0, initial_std=0.3, class_initial_std=0.01)
    weights = [model.primary_capsules.convolution.weight, model.primary_capsules.activation.weight]
    weights += [layer.transform - torch.eye(4) for layer in (model.first_capsules, model.second_capsules)]
    weights += [model.class_capsules.transform - torch.eye(4)]
    for weight, std in zip(weights, (0.5, 3.0, 0.3, 0.3, 0.01), strict=True):
        assert weight.std().item() == pytest.approx(0.88 * std, rel=0.15)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("classes", [3, 10, 100])
@pytest.mark.parametrize("rule", ["dynamic", "uniform", "self_attention"])
def test_a_head_with_any_number_of_classes_learns_with_the_margin_loss(rule, classes):
    """If all initial scores were near 1, or most of them 0, it would learn almost nothing in these steps."""
    head, centres = CapsuleHead((16, 2, 2), classes, types=8, routing=rule), torch.randn(classes, 16)
    optimizer = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(100):
        labels = torch.randint(0, classes, (64,))
        features = (centres[labels] + 0.1 * torch.randn(64, 16))[:, :, None, None].expand(-1, -1, 2, 2)
        scores = head(features).scores
        optimizer.zero_grad()
        margin_loss(scores, labels).backward()
        optimizer.step()
    assert (scores.argmax(dim=1) == labels).float().mean() > 0.9


def test_a_head_with_poses_of_one_element_is_not_saturated_on_a_large_map():
    head = CapsuleHead((16, 28, 28), 2, types=8, pose_size=(1, 1), coordinates=False)
    scores = head(torch.randn(8, 16, 28, 28)).scores
    assert scores.min() > 0.01
    assert scores.max() < 0.99


def test_a_deviation_of_0_gives_the_identity():
    assert torch.equal(ConvCaps((4, 4), 2, 3, 3, initial_std=0.0).transform[0, 0, 0], torch.eye(4))
    assert not ClassCaps(torch.rand(9, 2), 2, 3, initial_std=0.0, around_identity=False).transform.any()
