"""Arguments of a wrong type are refused when they are given, not later or by PyTorch, and nothing is changed."""

import numpy as np
import pytest
import torch

import torchcaps
from test_run_folder import SPLITS, tiny
from torchcaps import (
    BadInput,
    BaselineCNN,
    CapsNet,
    CapsuleLayer,
    Capsules,
    Classifier,
    MatrixCapsNet,
    PooledCNN,
    PoseNorm,
    Preprocessing,
    PrimaryCaps,
    Routing,
    RoutingMap,
    Rule,
    UniformRouting,
    coordinate_addition,
    lengths,
    margin_loss,
    squash,
    squashed,
)
from torchcaps.attacks import fgsm, gradient_health
from torchcaps.data import Images, cut_by
from torchcaps.evaluation import evaluate
from torchcaps.losses import (
    activation_cross_entropy,
    activation_logit_cross_entropy,
    balanced_class_weights,
    spread_margin,
)
from torchcaps.training import fit

pytestmark = pytest.mark.usefixtures("untyped")
PIXELS = torch.zeros(3, 1, 4, 4, dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 2])


def refused(message, function, *arguments, **options):
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)


def test_class_names_are_strings_in_the_order_of_the_labels():
    for names, message in (
        ((0, 1, 2), "class_names must be strings; got 0: convert it with str"),
        ({"cat", "dog", "eel"}, "class_names must be a list or tuple of strings; got set"),
        ("abc", "class_names must be a list or tuple of strings; got str 'abc'"),
        ({"dog": 1, "cat": 0, "eel": 2}, "class_names must be a list or tuple of strings; got dict"),
    ):
        refused(message, Images, PIXELS, LABELS, names)
        refused(message, Classifier, PooledCNN((1, 14, 14), 3), names, (1, 14, 14), Preprocessing())
    for names in (np.array(["cat", "dog", "eel"]), dict.fromkeys(("cat", "dog", "eel")).keys()):
        assert Images(PIXELS, LABELS, names).class_names == ("cat", "dog", "eel")


def test_indices_of_images_are_integers_in_range_or_a_mask():
    images = Images(PIXELS, LABELS, ("cat", "dog", "eel"))
    for indices in ((LABELS == 2).float(), [1.7], 1, [[0, 1]]):
        refused(r"indices must be integers, or a mask bool \[3\]; got", images.subset, indices)
    refused("indices must be from 0 to 2; got -4 to 1", images.subset, [1, -4])
    refused("indices must be from 0 to 2; got 3 to 3", images.subset, [3])
    assert images.subset([2, -3]).labels.tolist() == [2, 0]
    assert images.subset(LABELS == 1).labels.tolist() == [1]
    assert len(images.subset([])) == len(images.subset(range(0))) == 0
    for mask in (np.zeros(0, bool), np.zeros(2, bool)):
        refused(r"a mask must be bool \[3\]; got", images.subset, mask)


def test_preprocessing_refuses_pixels_that_are_not_uint8_and_does_not_change_them():
    pixels = torch.ones(1, 1, 4, 4)
    for convert in (Preprocessing().plain, Preprocessing(crop=2, test_crops=2).views):
        for wrong, cure in ((pixels, "use plain_of"), (pixels.int(), r"use pixels\.to\(torch\.uint8\)")):
            refused(f"pixels must be uint8, from 0 to 255; got .* {cure}", convert, wrong)
    refused("images must have a floating-point dtype", Preprocessing().plain_of, pixels.int())
    assert torch.equal(Preprocessing().plain_of(pixels), pixels)


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (CapsNet, {"decoder": None}, "CapsNet: decoder must be true or false; got None"),
        (CapsNet, {"decoder": "False"}, "CapsNet: decoder must be true or false; got 'False'"),
        (MatrixCapsNet, {"around_identity": 0}, "MatrixCapsNet: around_identity must be true or false; got 0"),
        (MatrixCapsNet, {"widths": 3}, "MatrixCapsNet: widths must be a list of integers or null; got 3"),
        (MatrixCapsNet, {"widths": (4.0, 2, 2, 2)}, "MatrixCapsNet: widths must be a list of integers or null; got"),
    ],
)
def test_networks_refuse_options_that_could_not_be_saved(network, options, message):
    refused(message, network, (1, 20, 20), 3, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers must be an integer of at least 0; got -1"),
        ({"workers": 1.5}, "workers must be an integer of at least 0; got 1.5"),
        ({"devices": "1"}, "devices must be an integer of at least 1; got str '1'"),
        ({"on_epoch_end": 5}, "on_epoch_end must be a function or None; got 5"),
    ],
)
def test_fit_checks_its_arguments_before_it_writes(options, message, tmp_path):
    refused(message, fit, tiny(1), SPLITS, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_classifiers_check_their_arguments():
    network, names = PooledCNN((1, 14, 14), 2), ("cat", "dog")
    for arguments, message in (
        ((None, names, (1, 14, 14), Preprocessing()), "model must be an instance of Module; got NoneType None"),
        ((network, names, (14, 14), Preprocessing()), r"image_shape must be a tuple \(channels, height, width\)"),
        ((network, names, (1, 14, 14), {}), "preprocessing must be an instance of Preprocessing; got dict {}"),
    ):
        with pytest.raises(BadInput, match=message):
            Classifier(*arguments)


def test_attacks_accept_networks_and_what_losses_accept():
    images, network = torch.rand(3, 1, 14, 14), PooledCNN((1, 14, 14), 3).eval()
    classifier = Classifier(network, ("cat", "dog", "eel"), (1, 14, 14), Preprocessing())
    refused(
        "network must be a function of images; got .*: give classifier.model", fgsm, classifier, images, LABELS, 0.1
    )
    with torch.inference_mode():
        inferred = images.clone()

    def scores(images):
        return network(images).scores

    attacked = fgsm(scores, images, LABELS, 0.1)
    assert torch.equal(fgsm(scores, inferred, LABELS.int(), 0.1), attacked)
    assert torch.equal(fgsm(network, images, LABELS, 0.1), attacked)
    refused("labels must be a tensor; got list", fgsm, scores, images, [0, 1, 2], 0.1)
    refused("images must have a floating-point dtype; got a uint8 tensor", gradient_health, scores, PIXELS, LABELS)


def test_losses_of_activations_refuse_logits():
    logits = torch.tensor([[-2.0, 3.0]])
    for loss in (margin_loss, activation_cross_entropy, activation_logit_cross_entropy):
        refused("scores must be at least 0; the smallest value is -2: convert logits", loss, logits, torch.tensor([0]))
    refused("step must be a finite number of at least 0; got -1", spread_margin, "linear", -1, 10)
    refused("labels must be integers", balanced_class_weights, [0, 1], 2)
    refused("num_classes must be an integer of at least 1; got str '3'", balanced_class_weights, LABELS, "3")
    refused(r"positive_margin must be in \(0, 1\]; got bool True", margin_loss, -logits.abs().neg(), LABELS[:1], True)


@pytest.mark.parametrize("function", [lengths, squash, squashed])
def test_poses_are_floating_point_tensors_with_rows_and_columns(function):
    for wrong, message in (
        ([1.0], "pose must be a tensor; got list"),
        (torch.ones(2, 2, dtype=torch.int64), "pose must have a floating-point dtype"),
        (torch.ones(4), r"pose must be \[..., R, Q\], with rows and columns; got \[4\]: use pose\[None\]"),
    ):
        refused(message, function, wrong)


def test_layers_refuse_other_types():
    transform, routing_map = torch.randn(6, 4, 10, 8, 16), RoutingMap.dense(6)
    for shape in ("ab", (2.5, 3), (1, 8, 9), 3):
        refused(r"child_pose_shape must be a tuple \(R, Q\)", CapsuleLayer, routing_map, transform, "dynamic", shape)
    refused("transform must be a floating-point tensor", CapsuleLayer, routing_map, transform.long(), "dynamic")
    refused(
        r"capsules must be Capsules\(pose, activation\); got a float32", PoseNorm(4, (2, 2)), torch.rand(2, 9, 4, 2, 2)
    )
    pose, matrix, place = torch.randn(1, 3, 1, 2, 2), torch.randn(3, 1, 1, 2, 2), torch.rand(3, 2)
    refused("pose must have a floating-point dtype", coordinate_addition, pose.long(), matrix, place)
    refused("transform must have 5 dimensions", coordinate_addition, pose, matrix[0], place)
    refused(r"coordinates must be \[S, 2\] = \[3, 2\]; got \[2, 2\]", coordinate_addition, pose, matrix, place[:2])


def test_layers_show_their_sizes_and_modules_are_attributes_of_the_package():
    layer = CapsuleLayer(RoutingMap.dense(6), torch.randn(6, 4, 10, 8, 16), "uniform")
    assert "K=6, C=4, J=10, Q=8, N=16" in repr(layer)
    assert repr(layer.routing_map) == "RoutingMap(child_sites=6, parent_sites=1, transforms=6, parent_grid=(1, 1))"
    assert torchcaps.losses.margin_loss is margin_loss
    for name in ("nonsense", "foo.bar", "losses.x", "_cpu"):
        assert not hasattr(torchcaps, name)
    with pytest.raises(TypeError, match=r"Own cannot derive from Routing: derive routing rules from torchcaps\.Rule"):
        type("Own", (Routing,), {})


def test_primary_capsules_squash_poses_only_if_their_length_is_the_activation():
    forms = [PrimaryCaps(1, 2, (2, 2), 3, activation=activation).squash_form for activation in ("length", "sigmoid")]
    assert forms == ["sabour", "none"]
    for wrong in ("", 0):
        refused("squash_form must be one of sabour, su", PrimaryCaps, 1, 2, (2, 2), 3, squash_form=wrong)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_classifier_is_evaluated_with_its_preprocessing_on_images_that_fit_it():
    torch.manual_seed(0)
    network, names = PooledCNN((1, 14, 14), 3), ("cat", "dog", "eel")
    classifier = Classifier(network, names, (1, 16, 16), Preprocessing(crop=14, standardise="last"))
    pixels = torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)
    found = evaluate(classifier, Images(pixels, LABELS, names), precision="float32")
    torch.testing.assert_close(found.scores, classifier.predict(pixels).scores)
    swapped = Images(pixels, LABELS, names[::-1])
    refused("class_names of the images is .* in the classifier", evaluate, classifier, swapped)
    small = Images(pixels[..., :14, :14], LABELS, names)
    refused(r"image_shape of the images is \(1, 14, 14\), but \(1, 16, 16\)", evaluate, classifier, small)
    empty = Images(pixels, LABELS, names).subset([])
    refused(r"images must be .*; got Images\(0 images of 1×16×16, 3 classes\)", evaluate, classifier, empty)


def test_a_loaded_network_is_in_evaluation_mode(tmp_path):
    PooledCNN((1, 14, 14), 3).train().save_pretrained(tmp_path)
    assert not any(module.training for module in PooledCNN.from_pretrained(tmp_path).modules())


def test_the_seed_of_a_split_by_attribute_is_checked():
    images = Images(PIXELS, torch.tensor([0, 0, 0]), ("cat",), {"toy": LABELS})
    for seed in (-1, "3"):
        refused("seed must be an integer of at least 0", cut_by, images, "toy", seed)


@pytest.mark.parametrize("form", ["sabour", "su", "exponential", "unit"])
def test_squash_in_half_precision_is_finite_and_as_accurate_as_its_dtype(form):
    for length in (0.0, 1e-7, 1e-5, 0.01, 1.0, 240.0):
        pose = torch.tensor([[length * 0.6, length * 0.8]], dtype=torch.float16, requires_grad=True)
        wide = pose.detach().double().requires_grad_()
        for squashing in (lambda pose: squash(pose, form), lambda pose: squashed(pose, form).pose):
            found, right = squashing(pose), squashing(wide)
            assert found.dtype == torch.float16
            [gradient], [exact] = (torch.autograd.grad(x.sum(), y) for x, y in ((found, pose), (right, wide)))
            assert torch.allclose(found.double(), right, rtol=2e-3, atol=1e-7)
            assert torch.isfinite(gradient).all() or exact.abs().max() > 65_504
            if exact.abs().max() < 65_504:
                assert torch.allclose(gradient.double(), exact, rtol=1e-2, atol=1e-3 * exact.abs().max().item() + 6e-8)


def test_unknown_and_missing_arguments_of_networks_name_the_network():
    with pytest.raises(TypeError, match=r"CapsNet\(\) got an unexpected keyword argument 'iterations'"):
        CapsNet((1, 20, 20), 3, iterations=3)
    with pytest.raises(TypeError, match=r"PooledCNN\(\) .*multiple values for argument 'image_shape'"):
        PooledCNN((1, 20, 20), image_shape=(1, 20, 20))


def test_rules_define_route_not_forward():
    with pytest.raises(TypeError, match=r"the routing rule Own overrides forward: define route\(self, votes\) instead"):

        class Own(Rule):
            def forward(self, votes):
                return votes

    class Logged(UniformRouting):
        def forward(self, *arguments, **options):
            return super().forward(*arguments, **options)

    children = Capsules(torch.randn(2, 6, 4, 1, 8), torch.rand(2, 6, 4))
    assert CapsuleLayer(RoutingMap.dense(6), torch.randn(6, 4, 3, 8, 2), Logged())(children).pose.shape == (
        2,
        1,
        3,
        1,
        2,
    )


def test_numbers_of_numpy_are_accepted_as_options():
    network = CapsNet((1, 20, 20), np.int64(2), convolution_channels=8, primary_types=2, decoder=np.False_)
    assert network.decoder is None
    for channels in (np.array([8, 8, 8]), range(8, 11)):
        assert BaselineCNN((1, 20, 20), 2, channels=channels).options["num_classes"] == 2
