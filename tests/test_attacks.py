"""Attacks with another loss and in small steps, and the measurements of the experiment `adversarial`."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchcaps import Prediction
from torchcaps.attacks import bim, fgsm, gradient_health
from torchcaps.data import Images, Preprocessing
from torchcaps.experiments.adversarial import ATTACKS, EPSILONS, classifier, measured, success


def cross_entropy_of_others(scores, labels):
    """The loss that is low if the score of the label is low."""
    return -functional.cross_entropy(scores, labels)


@pytest.mark.parametrize("attack", [fgsm, bim])
def test_attacks_follow_the_gradient_of_the_given_loss_and_do_not_change_the_images(attack):
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    images, labels = torch.rand(8, 1, 3, 4), torch.randint(0, 3, (8,))
    towards = attack(network, images, labels, 0.1, targeted=True)
    assert torch.equal(attack(network, images, labels, 0.1, loss=cross_entropy_of_others), towards)
    assert not images.requires_grad


def test_bim_moves_each_pixel_by_a_small_step_at_a_time():
    """The score of the class is lowest at the brightness 0.45, so the attack moves around this value."""

    def scores(images):
        distance = (images - 0.45).square().flatten(1)
        return torch.cat([distance, torch.zeros_like(distance)], dim=1)

    attacked = bim(scores, torch.full((1, 1, 1, 1), 0.36), torch.tensor([0]), 0.2, steps=10)
    assert attacked.item() == pytest.approx(0.45, abs=0.021)


class Brightest(nn.Module):
    """The score of each class is the brightness of one pixel."""

    def forward(self, images):
        return Prediction(10 * images.flatten(1))


def bright_pixels():
    """Four images of three pixels, of which the network `Brightest` classifies two correctly."""
    pixels = 100 + 20 * torch.eye(3)[[0, 1, 0, 1]]
    return Images(pixels.to(torch.uint8).view(4, 1, 1, 3), torch.tensor([0, 1, 2, 0]), ("a", "b", "c"))


@pytest.mark.parametrize("attack", ATTACKS.values())
def test_a_targeted_attack_aims_at_every_wrong_class(attack):
    target = classifier(Brightest(), Preprocessing())
    shares = [success(target, functional.cross_entropy, bright_pixels(), attack, epsilon) for epsilon in (0.0, 0.3)]
    assert shares == [100 * 2 / 8, 100]


def test_only_black_box_attacks_use_the_gradients_of_the_other_network():
    loss, pixels = functional.cross_entropy, bright_pixels()
    found = measured(Brightest(), Preprocessing(), loss, pixels, lambda x: 0 * x.flatten(1))
    for name in ATTACKS:
        assert found["black box"][name] == [50] * len(EPSILONS)
        assert found["untargeted"][name][0] == 50
        assert found["untargeted"][name][-1] == 0
    assert found["zero gradients"] == 0


class BlindToDarkPixels(nn.Module):
    def forward(self, images):
        return Prediction(functional.relu(images.flatten(1) - 0.5))


def test_gradients_are_averaged_over_all_images():
    """The experiment computes gradients for 100 images at a time; the last three images have no gradient."""
    pixels = torch.full((103, 1, 1, 3), 200, dtype=torch.uint8)
    pixels[100:] = 0
    images = Images(pixels, torch.arange(103) % 3, ("a", "b", "c"))
    model, loss = BlindToDarkPixels(), functional.cross_entropy
    found = measured(model, Preprocessing(), loss, images, classifier(model, Preprocessing()))
    together = gradient_health(lambda x: model(x).scores, pixels.float() / 255, images.labels, loss)
    assert found["gradient length"] == pytest.approx(together.norm)
    assert found["zero gradients"] == pytest.approx(together.zero) == pytest.approx(100 * 3 / 103)


@pytest.mark.parametrize("attack", [fgsm, bim])
def test_pixels_from_0_to_255_are_not_attacked(attack):
    with pytest.raises(
        ValueError, match=r"images must be in \[0, 1\]; got 0 to 255: divide pixels from 0 to 255 by 255"
    ):
        attack(lambda x: x.flatten(1), torch.tensor([[[[0.0, 255.0]]]]), torch.tensor([0]), 0.1)


@pytest.mark.parametrize(
    ("attack", "options", "problem"),
    [
        (fgsm, {"epsilon": -0.25}, r"epsilon must be in \[0, 1\]; got -0.25"),
        (bim, {"epsilon": 2.55}, r"epsilon must be in \[0, 1\]; got 2.55"),
        (fgsm, {"epsilon": torch.full((1, 1, 1, 1), 0.1)}, r"epsilon must be in \[0, 1\]; got a float32 tensor"),
        (bim, {"epsilon": 0.1, "steps": 0}, "steps must be an integer of at least 1; got 0"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_sizes_of_attacks_out_of_range_are_refused(attack, options, problem):
    with pytest.raises(ValueError, match=problem):
        attack(lambda x: x.flatten(1), torch.rand(1, 1, 1, 2), torch.tensor([0]), **options)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("attack", [fgsm, bim])
def test_integer_images_labels_that_are_no_classes_and_inference_mode_are_refused(attack):
    images, model = torch.rand(2, 1, 1, 3), lambda x: x.flatten(1)
    with pytest.raises(ValueError, match="images must have a floating-point dtype; got a uint8 tensor"):
        attack(model, torch.ones(2, 1, 1, 3, dtype=torch.uint8), torch.tensor([0, 1]), 0.1)
    for label in (-100, 3):
        with pytest.raises(ValueError, match=f"labels must be from 0 to 2 for 3 classes; got .*{label}"):
            attack(model, images, torch.tensor([0, label]), 0.1)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inside torch\.inference_mode"):
        attack(model, images, torch.tensor([0, 1]), 0.1)


@pytest.mark.usefixtures("untyped")
def test_losses_can_have_labels_of_any_kind():
    images, soft = torch.rand(2, 1, 1, 3), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]])
    for loss in (functional.cross_entropy, functional.binary_cross_entropy_with_logits):
        assert (fgsm(lambda x: x.flatten(1), images, soft, 0.1, loss=loss) != images).any()
