"""Capsule heads on feature maps of any network: every rule, any size, gradients of the backbone, one compiled graph."""

import pytest
import torch
from torch import nn

from torchcaps import ROUTINGS, CapsuleHead, ResidualCapsNet, create_model
from torchcaps.losses import activation_logit_cross_entropy
from torchcaps.recipes import create_recipe

pytestmark = pytest.mark.usefixtures("blank_pictures")


def backbone_of(channels=6):
    return nn.Sequential(nn.Conv2d(2, channels, 3, stride=2), nn.BatchNorm2d(channels), nn.ReLU())


@pytest.mark.parametrize("rule", ROUTINGS)
def test_every_weight_of_backbone_and_head_has_a_gradient_with_every_rule(rule):
    network = nn.Sequential(backbone_of(), CapsuleHead((6, 4, 5), 3, types=4, routing=rule))
    images, labels = torch.rand(5, 2, 9, 11), torch.tensor([0, 1, 2, 0, 1])
    optimizer = torch.optim.Adam(network.parameters())
    activation_logit_cross_entropy(network(images).scores, labels).backward()
    optimizer.step()  # initial weights of 0 of some rules stop the gradient in the first step
    optimizer.zero_grad()
    prediction = network(images)
    assert prediction.scores.shape == (5, 3)
    assert prediction.capsules.pose.shape == (5, 1, 3, 4, 4)
    assert torch.equal(prediction.scores, prediction.capsules.activation[:, 0])
    assert ((prediction.scores >= 0) & (prediction.scores <= 1)).all()
    activation_logit_cross_entropy(prediction.scores, labels).backward()
    for name, weights in network.named_parameters():
        assert weights.grad is not None, name
        assert torch.isfinite(weights.grad).all(), name
    assert network[0][0].weight.grad.abs().max() > 1e-7


def test_the_scores_of_a_new_head_with_self_attention_are_not_saturated():
    head = CapsuleHead((32, 8, 8), 10, routing="self_attention")
    scores = head(torch.relu(torch.randn(4, 32, 8, 8))).scores
    assert scores.mean() < 0.9
    activation_logit_cross_entropy(scores, torch.arange(4)).backward()
    assert head.class_capsules.transform.grad.abs().max() > 1e-4


@pytest.mark.parametrize("rule", ROUTINGS)
def test_a_network_with_a_head_learns_two_classes_with_every_rule(rule):
    labels = torch.arange(16) % 2
    images = 0.3 * torch.rand(16, 2, 9, 11)
    for image, label in zip(images, labels, strict=True):
        image[label, 2:7, 3:9] += 0.5
    network = nn.Sequential(backbone_of(), CapsuleHead((6, 4, 5), 2, types=4, routing=rule))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        activation_logit_cross_entropy(network(images).scores, labels).backward()
        optimizer.step()
    assert (network.eval()(images).scores.argmax(dim=1) == labels).all()


def test_a_head_accepts_feature_vectors():
    head = CapsuleHead((7,), 3, types=2).eval()
    vectors = torch.randn(4, 7)
    scores = head(vectors).scores
    assert scores.shape == (4, 3)
    as_map = CapsuleHead((7, 1, 1), 3, types=2).eval()
    as_map.load_state_dict(head.state_dict())
    assert torch.equal(as_map(vectors[:, :, None, None]).scores, scores)


def test_the_number_of_weights_does_not_depend_on_the_size_of_the_feature_map():
    counts = {sum(weights.numel() for weights in CapsuleHead((8, side, 3), 5).parameters()) for side in (1, 7, 40)}
    assert len(counts) == 1


def test_only_a_head_with_coordinates_depends_on_positions():
    features = torch.rand(1, 3, 4, 4)
    flipped = features.flip(3)
    for coordinates in (True, False):
        head = CapsuleHead((3, 4, 4), 2, types=4, coordinates=coordinates).eval()
        close = torch.allclose(head(features).capsules.pose, head(flipped).capsules.pose, atol=1e-5)
        assert close == (not coordinates)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ((3, 4), 2),
            r"features_shape must be \(channels, height, width\), or \(channels,\) for vectors; got tuple \(3, 4\)",
        ),
        ((512, 2), r"features_shape must be \(channels, height, width\), .*; got 512"),
        (((8, 4, 4, 4), 2), r"got tuple \(8, 4, 4, 4\): join two dimensions of a volume with features.flatten\(2, 3\)"),
        (((3, 0, 4), 2), "height must be an integer of at least 1; got 0"),
        (((3, 4, 4), 0), "num_classes must be an integer of at least 1"),
        (((3, 4, 4), 2, 4, (1, 8)), "adding coordinates to vector votes needs a pose size of"),
        (((3, 4, 4), 2, 4, (4, 4), True, "atention"), "did you mean 'attention'"),
    ],
)
def test_a_head_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CapsuleHead(*arguments)


@pytest.mark.usefixtures("untyped")
def test_features_of_another_shape_are_refused():
    head = CapsuleHead((3, 4, 4), 2)
    for shape in ((2, 3, 4, 5), (2, 3), (3, 4, 4)):
        with pytest.raises(ValueError, match=r"features must be \[B, 3, 4, 4\]; got a float32 tensor"):
            head(torch.rand(shape))


def test_backbone_and_head_compile_to_one_graph(python):
    """Runs in its own process, because torch.compile cannot trace the run-time type checks."""
    script = """
import torch
from torch import nn
from torchcaps import CapsuleHead

torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(2, 6, 3, stride=2), nn.ReLU(), CapsuleHead((6, 4, 5), 3, types=4)).eval()
compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
for batch in (2, 3):
    images = torch.rand(batch, 2, 9, 11)
    torch.testing.assert_close(compiled(images).scores, network(images).scores)
"""
    done = python(["-W", "error", "-c", script])
    assert done.returncode == 0, done.stderr


def test_the_residual_network_has_the_expected_number_of_weights():
    stem, first, second = 9 * 3 * 4 + 8, 9 * 4 * 8 + 9 * 8 * 8 + 4 * 8 + 48, 9 * 8 * 16 + 9 * 16 * 16 + 8 * 16 + 96
    head = 16 * 2 * 16 + 2 * 5 * 16 + 3 * 16 + 1
    sizes = [
        sum(weights.numel() for weights in ResidualCapsNet((3, *size), 5, (4, 8, 16), 2).parameters())
        for size in ((8, 9), (64, 48))
    ]
    assert sizes == [stem + first + second + head] * 2


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_narrow_residual_network_trains_on_larger_images(precision, python):
    """Runs in its own process, because a fault of oneDNN would end the process."""
    code = f"""
import torch
from torchcaps import ResidualCapsNet

model = ResidualCapsNet((3, 64, 64), 2, widths=(8, 16, 32))
images = torch.rand(16, 3, 64, 64).contiguous(memory_format=torch.channels_last)
with torch.autocast("cpu", {precision}, enabled={precision != torch.float32}):
    for _ in range(5):
        model(images).scores.sum().backward()
"""
    done = python(["-c", code])
    assert done.returncode == 0, done.stderr


def test_the_recipe_for_own_images_trains_a_residual_network(succeeds, images, tmp_path):
    small = [
        "--set",
        "model.widths=[8,16]",
        "--epochs",
        8,
        "--batch-size",
        8,
        "--precision",
        "float32",
        "--out",
        tmp_path / "run",
    ]
    said = succeeds("train", "residual-capsnet-images", "--data", images, *small)
    accuracy = next(line for line in said.splitlines() if "test_accuracy_percent" in line)
    assert float(accuracy.replace("│", " ").split()[1]) > 90
    recipe = create_recipe("residual-capsnet-images")
    create_model(recipe.model, image_shape=(3, 16, 16), **recipe.model_options)


def test_a_head_has_16_types_of_4x4_poses_with_coordinates_by_default():
    head = CapsuleHead((6, 3, 3), 5)
    given = CapsuleHead((6, 3, 3), 5, types=16, pose_size=(4, 4), coordinates=True, routing="attention")
    assert {name: x.shape for name, x in head.named_parameters()} == {n: x.shape for n, x in given.named_parameters()}
    assert head.class_capsules.add_coordinates
