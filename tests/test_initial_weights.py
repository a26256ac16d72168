"""Initial weights of capsule layers, of matrix capsules and of capsule heads: their spread, set by options or sizes."""

import pytest
import torch

from torchcaps import CapsuleHead, ClassCaps, ConvCaps, MatrixCapsNet, Routing, SharedCaps


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


def test_initial_class_capsules_of_a_head_have_the_same_length_for_any_number_of_classes():
    routing = Routing("dynamic", iterations=1, squash_form="none")
    sizes = [
        CapsuleHead((6, 4, 5), classes, routing=routing)(torch.rand(8, 6, 4, 5)).scores.mean() for classes in (2, 40)
    ]
    assert max(sizes) < 2 * min(sizes)


def test_a_deviation_of_0_gives_the_identity():
    assert torch.equal(ConvCaps((4, 4), 2, 3, 3, initial_std=0.0).transform[0, 0, 0], torch.eye(4))
    assert not ClassCaps(torch.rand(9, 2), 2, 3, initial_std=0.0, around_identity=False).transform.any()
