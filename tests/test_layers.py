import math

import pytest
import torch
from torch import nn

from torchcaps import (
    ROUTINGS,
    Capsules,
    ClassCaps,
    ConvCaps,
    Decoder,
    DenseCaps,
    DynamicRouting,
    EMRouting,
    PoseNorm,
    PrimaryCaps,
    RoutingMap,
    SharedCaps,
    coordinate_addition,
    create_model,
    lengths,
    squash,
)
from torchcaps.convolution import Im2colConv2d
from torchcaps.losses import (
    activation_logit_cross_entropy,
    margin_loss,
    reconstruction_loss,
    spread_loss,
    spread_margin,
)


def test_a_primary_capsule_consists_of_the_channels_at_one_position():
    layer = PrimaryCaps(2, types=3, pose_size=4, kernel_size=3, stride=2)
    features = torch.randn(2, 2, 7, 9)
    convolved = layer.convolution(features)
    capsules = layer(features)
    assert capsules.pose.shape == (2, 3 * 4, 3, 1, 4)
    for y, x, c in [(0, 0, 0), (1, 2, 1), (2, 3, 2)]:
        expected = squash(convolved[:, 4 * c : 4 * c + 4, y, x].unsqueeze(1))
        torch.testing.assert_close(capsules.pose[:, y * 4 + x, c], expected)
    torch.testing.assert_close(capsules.activation, lengths(capsules.pose))


def test_channels_last_inputs_give_the_same_primary_capsules():
    layer = PrimaryCaps(2, types=3, pose_size=4, kernel_size=3)
    features = torch.randn(2, 2, 7, 9)
    torch.testing.assert_close(layer(features).pose, layer(features.contiguous(memory_format=torch.channels_last)).pose)


@pytest.mark.parametrize(("kernel", "stride", "padding", "bias"), [(3, 2, 0, True), (4, 3, 2, False), (1, 1, 0, True)])
def test_im2col_convolutions_equal_convolutions(kernel, stride, padding, bias):
    options = {"stride": stride, "padding": padding, "bias": bias}
    plain = nn.Conv2d(3, 5, kernel, **options).double()
    unfolded = Im2colConv2d(3, 5, kernel, **options).double()
    unfolded.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 7, 9, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(unfolded(images), plain(images))
    slope = torch.randn_like(plain(images))
    for one, other in zip(
        torch.autograd.grad(unfolded(images), [images, *unfolded.parameters()], slope),
        torch.autograd.grad(plain(images), [images, *plain.parameters()], slope),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert torch.autograd.gradcheck(unfolded, [images])


def test_a_network_with_im2col_loads_the_weights_of_a_network_without():
    options = {"convolution_channels": 8, "primary_types": 2}
    plain, unfolded = create_model("capsnet", **options), create_model("capsnet", im2col=True, **options)
    unfolded.load_state_dict(plain.state_dict())
    images = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(unfolded(images).scores, plain(images).scores)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = unfolded(images).scores
        torch.testing.assert_close(scores, plain(images).scores, rtol=0.05, atol=0.005)
    scores.sum().backward()
    assert all(
        x.grad is not None for x in (*unfolded.convolution.parameters(), *unfolded.primary_capsules.parameters())
    )


def test_dense_caps_give_each_child_its_own_transform():
    layer = DenseCaps(4, 2, 8, 10, 16, routing=DynamicRouting(iterations=1, squash_form="none"))
    pose = torch.zeros(1, 4, 2, 1, 8)
    pose[0, 3, 1] = 1.0
    parents = layer(Capsules(pose, lengths(pose)))
    torch.testing.assert_close(parents.pose[0, 0, :, 0], layer.transform[3, 1].sum(dim=1) / 10)


def test_initial_parents_of_dense_caps_have_the_same_length_for_any_number_of_children():
    torch.manual_seed(0)
    lengths_at_start = []
    for sites, classes in ((36, 10), (64, 3), (400, 2)):
        layer = DenseCaps(sites, 32, 8, classes, 16, routing=DynamicRouting(iterations=1, squash_form="none"))
        pose = torch.randn(8, sites, 32, 1, 8)
        pose = 0.5 * pose / pose.norm(dim=-1, keepdim=True)
        lengths_at_start.append(layer(Capsules(pose, lengths(pose))).activation.mean())
    assert max(lengths_at_start) < 1.2 * min(lengths_at_start)
    torch.testing.assert_close(DenseCaps(36, 32, 8, 10, 16).transform.std(), torch.tensor(0.088), rtol=0.02, atol=0)


@pytest.mark.parametrize("sites", [1, 36])
@pytest.mark.parametrize("classes", [30, 100])
def test_initial_activations_of_many_dense_caps_are_neither_0_nor_1(classes, sites):
    """If each child chooses a single parent, most parents are at 0 and get no gradient."""
    activation = DenseCaps(sites, 8, 8, classes, 16)(
        Capsules(squash(torch.randn(16, sites, 8, 1, 8)), torch.rand(16, sites, 8))
    ).activation
    assert activation.min() > 1e-5
    assert activation.max() < 0.9


def test_shared_caps_accept_any_number_of_children_in_any_order():
    layer = SharedCaps(8, 10, 16)
    pose = torch.randn(2, 30, 3, 1, 8)
    children = Capsules(pose, lengths(pose))
    order = torch.randperm(30)
    mixed = Capsules(pose[:, order], lengths(pose[:, order]))
    torch.testing.assert_close(layer(children).pose, layer(mixed).pose, rtol=1e-4, atol=1e-5)
    parents, couplings = layer(children, return_couplings=True)
    assert parents.pose.shape == (2, 1, 10, 1, 16)
    assert couplings.shape == (2, 10, 90, 1)


def test_matrix_primary_capsules_have_linear_poses_and_a_separate_activation():
    layer = PrimaryCaps(2, 3, (4, 4), 1, bias=False, squash_form="none", activation="sigmoid")
    features = torch.randn(2, 2, 5, 6)
    capsules = layer(features)
    assert capsules.pose.shape == (2, 30, 3, 4, 4)
    torch.testing.assert_close(layer(3 * features).pose, 3 * capsules.pose)
    torch.testing.assert_close(capsules.pose[1, 8, 2], layer.convolution(features)[1, 32:48, 1, 2].reshape(4, 4))
    torch.testing.assert_close(capsules.activation[1, 8, 2], layer.activation(features)[1, 2, 1, 2].sigmoid())


@pytest.mark.parametrize("pose_size", [(4, 4), (1, 16)])
def test_a_parent_of_conv_caps_depends_only_on_the_children_in_its_window(pose_size):
    layer = ConvCaps((5, 6), 2, 3, kernel_size=3, stride=2, padding=1, pose_size=pose_size)
    assert layer.parent_grid == (3, 3)
    pose = torch.randn(1, 30, 2, *pose_size, requires_grad=True)
    parents = layer(Capsules(pose, torch.rand(1, 30, 2)))
    assert parents.pose.shape == (1, 9, 3, *pose_size)
    one_pass = ConvCaps((5, 6), 2, 3, 3, 2, 1, pose_size, routing=EMRouting(3, iterations=1))
    one_pass(Capsules(pose, torch.ones(1, 30, 2))).pose[0, 4].sum().backward()
    seen = pose.grad[0].abs().amax(dim=(1, 2, 3)).reshape(5, 6) > 0
    expected = torch.zeros(5, 6, dtype=torch.bool)
    expected[1:4, 1:4] = True
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("pose_size", [(4, 4), (1, 16)])
def test_coordinates_are_added_to_the_first_two_numbers_of_the_last_column(pose_size):
    coordinates = torch.tensor([[0.125, 0.25], [0.5, 0.75]])
    pose, transform = torch.randn(2, 2, 3, *pose_size), torch.randn(1, 3, 5, pose_size[1], pose_size[1])
    routing_map = RoutingMap.shared(2)
    added = routing_map.votes(*coordinate_addition(pose, transform, coordinates)) - routing_map.votes(pose, transform)
    expected = torch.zeros(2, 4, 4)
    expected[:, 0, 3], expected[:, 1, 3] = coordinates.unbind(1)
    expected = expected.reshape(1, 1, 2, 1, *pose_size).expand_as(added)
    torch.testing.assert_close(added, expected, rtol=0, atol=1e-5)


def test_class_capsules_without_coordinates_do_not_depend_on_positions():
    with_coordinates, without = (ClassCaps(torch.rand(6, 2), 2, 4, add_coordinates=on) for on in (True, False))
    children = Capsules(torch.randn(2, 6, 2, 4, 4), torch.rand(2, 6, 2))
    order = torch.randperm(6)
    moved = Capsules(children.pose[:, order], children.activation[:, order])
    torch.testing.assert_close(without(moved).pose, without(children).pose, rtol=1e-3, atol=1e-3)
    assert (with_coordinates(moved).pose - with_coordinates(children).pose).abs().max() > 1e-2
    assert with_coordinates(children, return_couplings=True)[1].shape == (2, 4, 6, 2)


def test_spread_loss_equals_its_formula():
    scores = torch.tensor([[0.7, 0.4, 0.0], [0.1, 0.2, 0.9]])
    expected = ((0.5 - 0.3) ** 2 + 0 + (0.5 + 0.1) ** 2 + (0.5 + 0.8) ** 2) / 2
    torch.testing.assert_close(spread_loss(scores, torch.tensor([0, 0]), margin=0.5), torch.tensor(expected))
    hinge = (1 - (scores[:, :1] - scores[:, 1:])).clamp_min(0).square().sum(dim=1).mean()
    torch.testing.assert_close(spread_loss(scores, torch.tensor([0, 0]), margin=1.0), hinge)


def test_the_margin_rises_from_0_2_to_0_9():
    assert spread_margin("official", 0, 1) == pytest.approx(0.2 + 0.79 / (1 + math.exp(4)))
    assert spread_margin("official", 10**9, 1) == pytest.approx(0.99, abs=1e-3)
    rises = [spread_margin("linear", step, 10) for step in range(12)]
    assert rises == sorted(rises)
    assert (rises[0], rises[-1]) == (0.2, 0.9)


def test_the_decoder_uses_only_the_pose_of_the_chosen_class():
    decoder = Decoder(5, 4, (3, 6, 7))
    pose = torch.randn(2, 1, 5, 1, 4)
    other = pose.clone()
    other[:, :, [0, 1, 3]] += 1
    chosen = torch.tensor([2, 4])
    other[0, :, 4] += 1
    other[1, :, 2] += 1
    drawn = decoder(pose, chosen)
    assert drawn.shape == (2, 3, 6, 7)
    assert torch.equal(drawn, decoder(other, chosen))
    assert not torch.equal(drawn, decoder(pose, torch.tensor([1, 4])))
    assert ((drawn > 0) & (drawn < 1)).all()


def test_routing_maps_follow_the_device_of_their_layer_and_are_not_saved():
    layer = DenseCaps(4, 2, 8, 10, 16).to(torch.float64)
    assert set(layer.state_dict()) == {"transform"}
    there = layer.to("meta")
    assert there.routing_map.edges_on(there.transform.device).is_meta
    assert layer.routing_map is layer.routing_map


def test_margin_loss_equals_its_formula_for_one_class_and_for_several():
    scores = torch.tensor([[0.5, 0.3, 0.95], [0.05, 0.9, 0.6]])
    expected = ((0.4**2 + 0.5 * 0.2**2 + 0.5 * 0.85**2) + (0.85**2 + 0.5 * 0.8**2 + 0.5 * 0.5**2)) / 2
    torch.testing.assert_close(margin_loss(scores, torch.tensor([0, 0])), torch.tensor(expected))
    both = margin_loss(scores[:1], torch.tensor([[1.0, 0.0, 1.0]]), negative_weight=0.25)
    torch.testing.assert_close(both, torch.tensor(0.4**2 + 0.25 * 0.2**2))


def test_reconstruction_loss_sums_over_pixels_and_averages_over_the_batch():
    images = torch.zeros(4, 3, 5, 5)
    torch.testing.assert_close(reconstruction_loss(torch.full_like(images, 0.5), images), torch.tensor(75 / 4.0))
    mean_of_squares = nn.functional.mse_loss(torch.full((2, 1, 28, 28), 0.5), torch.zeros(2, 1, 28, 28))
    summed = 0.0005 * reconstruction_loss(torch.full((2, 1, 28, 28), 0.5), torch.zeros(2, 1, 28, 28))
    torch.testing.assert_close(summed, 0.392 * mean_of_squares)


def test_reconstruction_loss_is_at_least_float32_and_at_least_the_dtype_of_its_inputs():
    drawn, images = torch.rand(2, 2, 1, 3, 3, dtype=torch.float64).unbind()
    exact = (drawn - images).square().sum() / 2
    assert reconstruction_loss(drawn, images).dtype == torch.float64
    torch.testing.assert_close(reconstruction_loss(drawn, images), exact, rtol=1e-14, atol=0)
    assert reconstruction_loss(drawn.half(), images.half()).dtype == torch.float32
    torch.testing.assert_close(reconstruction_loss(drawn.float(), images), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ROUTINGS)
def test_layers_of_low_precision_route_in_float32(rule, dtype):
    layer = ConvCaps((6, 6), 4, 5, 3, routing=rule).to(dtype)
    children = Capsules(30 * torch.randn(2, 36, 4, 4, 4), torch.rand(2, 36, 4))
    low = Capsules(*(part.to(dtype) for part in children))
    expected = layer.float()(Capsules(*(part.float() for part in low)))
    found = layer.to(dtype)(low)
    tolerance = 0.02 if dtype == torch.bfloat16 else 0.003
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), right, rtol=tolerance, atol=tolerance * right.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_of_layers_has_finite_gradients_under_autocast(dtype):
    stack = nn.ModuleList([PrimaryCaps(1, 2, 4, 3), DenseCaps(16, 2, 4, 3, 5)])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        parents = stack[1](stack[0](torch.rand(2, 1, 6, 6)))
    assert parents.pose.dtype == torch.float32
    parents.activation.sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().max() > 0 for p in stack.parameters())


LAYERS = {
    "dense": (lambda rule: DenseCaps(9, 4, 16, 5, 16, routing=rule), (9, 4, 1, 16)),
    "shared": (lambda rule: SharedCaps(16, 5, 16, routing=rule), (9, 4, 1, 16)),
    "conv": (lambda rule: ConvCaps((3, 3), 4, 5, 2, routing=rule), (9, 4, 4, 4)),
    "vector conv": (lambda rule: ConvCaps((3, 3), 4, 5, 2, pose_size=(1, 16), routing=rule), (9, 4, 1, 16)),
    "class": (lambda rule: ClassCaps(torch.rand(9, 2), 4, 5, routing=rule), (9, 4, 4, 4)),
    "vector class": (lambda rule: ClassCaps(torch.rand(9, 2), 4, 5, (1, 16), routing=rule), (9, 4, 1, 16)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_layer_accepts_the_name_of_every_rule(kind, name):
    make, shape = LAYERS[kind]
    layer = make(name)
    assert type(layer.routing) is ROUTINGS[name]
    children = Capsules(torch.randn(2, *shape), torch.rand(2, *shape[:2]))
    parents, couplings = layer(children, return_couplings=True)
    assert parents.activation.shape[2] == couplings.shape[1] == 5
    assert parents.pose.shape[3:] == ((4, 4) if shape[2] == 4 else (1, 16))
    (parents.pose.square().sum() + parents.activation.sum()).backward()
    assert all(torch.isfinite(weights.grad).all() for weights in layer.parameters() if weights.grad is not None)
    assert layer.transform.grad.abs().max() > 0


@pytest.mark.usefixtures("untyped")
def test_an_unknown_rule_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="unknown routing 'dynamik'; did you mean 'dynamic'"):
        SharedCaps(16, 5, 16, routing="dynamik")


def test_activation_logit_cross_entropy_equals_its_formula_and_is_finite_at_0_and_1():
    scores, target = torch.tensor([[0.9, 0.2, 0.4]]), torch.tensor([1])
    odds = scores / (1 - scores)
    torch.testing.assert_close(activation_logit_cross_entropy(scores, target), -(odds[0, 1] / odds.sum()).log())
    certain = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = activation_logit_cross_entropy(certain, torch.tensor([1]))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(certain.grad).all()


def test_the_exponential_squash_equals_its_formula_and_is_finite_at_zero():
    pose = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]], requires_grad=True)
    found = squash(pose, "exponential")
    torch.testing.assert_close(found[0], (1 - math.exp(-5)) * torch.tensor([[0.6, 0.8]]))
    assert not found[1].any()
    found.sum().backward()
    torch.testing.assert_close(pose.grad[1], torch.ones(1, 2))


def test_normalised_primary_capsules_have_poses_of_unit_variance_and_logits_of_mean_zero():
    layer = PrimaryCaps(3, 4, (4, 4), 1, squash_form="none", activation="sigmoid", normalise="plain")
    capsules = layer(5 + 3 * torch.randn(16, 3, 6, 6))
    torch.testing.assert_close(capsules.pose.std(dim=(0, 1), correction=0), torch.ones(4, 4, 4), atol=1e-2, rtol=0)
    torch.testing.assert_close(capsules.activation.logit().mean(dim=(0, 1)), torch.zeros(4), atol=1e-4, rtol=0)
    assert {name for name, _ in layer.named_parameters()} == {
        f"{part}.{kind}" for part in ("convolution", "activation") for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("affine", [False, True])
def test_pose_norm_gives_every_number_mean_0_and_variance_1_over_samples_and_sites(affine):
    norm = PoseNorm(3, (2, 4), affine=affine)
    children = Capsules(5 + 3 * torch.randn(16, 9, 3, 2, 4), torch.rand(16, 9, 3))
    parents = norm(children)
    torch.testing.assert_close(parents.pose.mean(dim=(0, 1)), torch.zeros(3, 2, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(parents.pose.var(dim=(0, 1), correction=0), torch.ones(3, 2, 4), atol=1e-3, rtol=0)
    assert parents.activation is children.activation
    assert len(list(norm.parameters())) == 2 * affine
    half = norm.bfloat16()(children).pose
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, parents.pose, atol=0.1, rtol=0)


@pytest.mark.parametrize("normalise", ["none", "plain", "affine"])
@pytest.mark.parametrize("activation", ["length", "sigmoid"])
def test_every_weight_of_primary_capsules_has_a_gradient(activation, normalise):
    """DistributedDataParallel refuses a network in which a weight gets no gradient."""
    layer = PrimaryCaps(1, 2, 3, 3, activation=activation, normalise=normalise)
    capsules = layer(torch.randn(4, 1, 5, 5))
    (capsules.pose.square().sum() + capsules.activation.square().sum()).backward()
    assert not [name for name, weight in layer.named_parameters() if weight.grad is None]
    assert ("activation_norm" in {name.split(".")[0] for name in layer.state_dict()}) == (
        activation == "sigmoid" and normalise != "none"
    )
