"""Concurrent attention routing, which updates all layers in each iteration: Tsai et al. 2020, algorithm 2."""

import pytest
import torch
from torch.nn import functional

from torchcaps import AttentionCapsNet, Capsules, DenseCaps, Routing
from torchcaps.classifier import Classifier
from torchcaps.data import Preprocessing
from torchcaps.errors import BadInput
from torchcaps.inspection import inspect
from torchcaps.models import create_model
from torchcaps.recipes import create_recipe


def network(iterations, concurrent=True):
    """A small network with random weights in every layer."""
    torch.manual_seed(0)
    routing = Routing("attention", iterations=iterations)
    model = AttentionCapsNet((1, 17, 15), 5, channels=6, types=3, pose_side=2, routing=routing, concurrent=concurrent)
    with torch.no_grad():
        for weights in model.parameters():
            weights.normal_(std=0.6)
    return model.double()


def windows(pose, grid, stride):
    """Gather children ``[B, height, width, 3 · 3 · C, 2, 2]`` of each parent, in the order of the transforms."""
    pose = pose.unflatten(1, grid).unfold(1, 3, stride).unfold(2, 3, stride)
    return pose.permute(0, 1, 2, 6, 7, 3, 4, 5).flatten(3, 5)


def algorithm_2(model, images, iterations):
    """Compute the scores with einsums over all votes, from the equations of the paper."""
    primary = model.primary_capsules(model.features(images)).pose
    poses = [model.primary_norm(primary.flatten(3)).view(primary.shape)]
    layers = model.first_capsules, model.second_capsules, model.class_capsules
    grids = (9, 8), model.first_capsules.parent_grid

    def updated(number, below, above):
        transform = layers[number].transform.flatten(0, 1)
        children = windows(below, grids[number], 2 - number) if number < 2 else below.flatten(1, 2)[:, None, None]
        votes = torch.einsum("bhwirq,ijqn->bhwijrn", children, transform).flatten(1, 2).flatten(4)
        coupling = torch.full_like(votes[..., 0], 1 / votes.shape[3])
        if above is not None:
            logits = torch.einsum("bpijd,bpjd->bpij", votes, above.flatten(3)) / votes.shape[4] ** 0.5
            coupling = logits.softmax(dim=3)
        norm = layers[number].routing.norm
        total = torch.einsum("bpij,bpijd->bpjd", coupling, votes)
        return functional.layer_norm(total, (4,), norm.weight, norm.bias).unflatten(3, (2, 2))

    for number in range(3):
        poses.append(updated(number, poses[-1], None))
    for _ in range(iterations - 1):
        poses = [poses[0], *(updated(number, poses[number], poses[number + 1]) for number in range(3))]
    return model.class_capsules.routing.score(poses[3].flatten(3)).squeeze(3).sigmoid()[:, 0]


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.usefixtures("untyped")
def test_concurrent_routing_equals_the_algorithm_of_its_paper(iterations):
    model, images = network(iterations), torch.rand(2, 1, 17, 15, dtype=torch.float64)
    weights = [weights for weights in model.parameters() if weights.requires_grad]
    results = []
    for scores in (model(images).scores, algorithm_2(model, images, iterations)):
        results.append([scores, *torch.autograd.grad(scores.square().sum(), weights)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    sequential = network(iterations, concurrent=False)(images).scores
    assert torch.equal(sequential, results[0][0]) == (iterations == 1)


def test_the_number_of_concurrent_iterations_can_be_changed():
    model, images = network(1), torch.rand(2, 1, 17, 15, dtype=torch.float64)
    for layer in (model.first_capsules, model.second_capsules, model.class_capsules):
        layer.routing.iterations = 3
    torch.testing.assert_close(model(images).scores, algorithm_2(model, images, 3), rtol=1e-9, atol=1e-11)


def test_parents_of_an_earlier_call_continue_the_routing():
    layer = network(3).first_capsules
    children = Capsules(torch.randn(2, 72, 3, 2, 2).double(), torch.rand(2, 72, 3).double())
    parents = layer(children, iterations=2)
    whole, couplings = layer(children, return_couplings=True)
    continued, last = layer(children, return_couplings=True, parents=parents, iterations=1)
    torch.testing.assert_close(continued, whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(last, couplings, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("iterations", [2, 4])
def test_inspection_traces_every_concurrent_pass_to_the_passes_below_that_it_depends_on(iterations):
    """In iteration t, a layer reads the result of iteration t - 1 of the layer below."""
    model = network(iterations).float().eval()
    image = torch.randint(256, (1, 17, 15), dtype=torch.uint8)
    classifier = Classifier(model, tuple("abcde"), (1, 17, 15), Preprocessing())
    support = inspect(classifier, image).support
    assert support.shape == (iterations, 5, 17, 15)
    for number in range(iterations):
        fewer = Classifier(network(number + 1).float().eval(), tuple("abcde"), (1, 17, 15), Preprocessing())
        torch.testing.assert_close(support[number], inspect(fewer, image).support[-1])


def test_the_scores_of_poses_of_one_element_depend_on_the_image():
    model = AttentionCapsNet((1, 13, 13), 3, channels=4, types=4, pose_side=1)
    first, second = model(torch.rand(2, 1, 13, 13)).scores
    assert (first - second).abs().max() > 1e-6


def test_layers_that_cannot_change_the_scores_are_not_computed():
    model, calls = network(4), []
    layers = model.first_capsules, model.second_capsules, model.class_capsules
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: calls.append(module))
    model(torch.rand(2, 1, 17, 15, dtype=torch.float64))
    assert [calls.count(layer) for layer in layers] == [2, 3, 4]


def test_a_wrong_number_of_concurrent_iterations_is_refused():
    model = network(2)
    model.class_capsules.routing.iterations = 0
    with pytest.raises(ValueError, match="iterations must be an integer from 1 to 1,000; got 0"):
        model(torch.rand(2, 1, 17, 15, dtype=torch.float64))


def test_a_saved_network_routes_as_before(tmp_path):
    model, images = network(2).float().eval(), torch.rand(2, 1, 17, 15)
    model.save_pretrained(tmp_path)
    loaded = AttentionCapsNet.from_pretrained(tmp_path)
    assert loaded.concurrent
    assert torch.equal(loaded(images).scores, model(images).scores)


@pytest.mark.usefixtures("untyped")
def test_concurrent_routing_with_another_rule_is_refused():
    with pytest.raises(BadInput, match="concurrent is true, but the routing is EMRouting: use the routing 'attention'"):
        create_model("attention-capsnet", concurrent=True, routing="em")
    children = Capsules(torch.randn(2, 6, 3, 1, 4), torch.rand(2, 6, 3))
    with pytest.raises(TypeError, match="parents"):
        DenseCaps(6, 3, 4, 5, 8, routing="uniform")(children, parents=children)
    with pytest.raises(ValueError, match=r"parents must be Capsules\(pose, activation\); got"):
        DenseCaps(6, 3, 4, 5, 8, routing="attention")(children, parents=children.pose)
    with pytest.raises(ValueError, match=r"parents must have shape \[2, 1, 5, 1, 8\] .* got \[2, 6, 3, 1, 4\]"):
        DenseCaps(6, 3, 4, 5, 8, routing="attention")(children, parents=children)


def test_the_recipe_of_the_attention_network_routes_concurrently():
    assert create_recipe("attention-capsnet-cifar10").model_options == {"concurrent": True}
