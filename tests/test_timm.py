"""Networks of timm with a capsule head. If timm is not installed, only the error message is tested."""

import re
import sys

import pytest
import safetensors.torch
import torch

from test_models import HAS_TIMM
from torchcaps import BadInput, Classifier, DataWarning, TimmCapsNet
from torchcaps.losses import activation_logit_cross_entropy

needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm cannot be imported")


@pytest.fixture
def weights(tmp_path):
    """A network of timm and a file with its weights."""
    import timm

    network = timm.create_model("test_resnet")
    safetensors.torch.save_file(network.state_dict(), tmp_path / "timm.safetensors")
    return tmp_path / "timm.safetensors", network


def test_the_error_without_timm_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(BadInput, match=r"timm cannot be imported .*pip install 'torchcaps\[timm\]'"):
        TimmCapsNet()


@needs_timm
def test_the_features_equal_those_of_timm(weights):
    """The network of timm computes the feature map with stride 8 from normalised pixels."""
    file, network = weights
    model = TimmCapsNet((3, 64, 48), 4, backbone="test_resnet", stride=8).eval()
    assert model.load_backbone(str(file)) == f"the backbone has the weights of {file}"
    images = torch.rand(2, 3, 64, 48)
    maps = network.eval().forward_intermediates((images - 0.5) / 0.5, intermediates_only=True)
    (features,) = [one for one in maps if one.shape[-2:] == (8, 6)]
    assert model.head.features_shape == tuple(features.shape[1:])
    torch.testing.assert_close(model(images).scores, model.head(features).scores)


@needs_timm
def test_feature_maps_with_the_channels_last_are_permuted():
    model = TimmCapsNet((1, 64, 64), 2, backbone="swin_tiny_patch4_window7_224").eval()
    assert model.head.features_shape == (384, 4, 4)
    assert model(torch.rand(1, 1, 64, 64)).scores.shape == (1, 2)


@needs_timm
def test_a_frozen_backbone_does_not_change():
    model = TimmCapsNet((3, 32, 32), 3, backbone="test_resnet", freeze_backbone=True)
    assert model.training
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    for _ in range(2):
        activation_logit_cross_entropy(model(torch.rand(3, 3, 32, 32)).scores, torch.arange(3)).backward()
        optimizer.step()
    changed = {
        name.partition(".")[0] for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {"head"}


@needs_timm
def test_bad_backbones_strides_and_weights_are_refused(weights, tmp_path):
    def refuse(says, **options):
        with pytest.raises(BadInput, match=says):
            TimmCapsNet(**{"image_shape": (3, 64, 64), "backbone": "test_resnet", **options})

    refuse("timm has no network 'resnet1x'; similar names: resnet18", backbone="resnet1x")
    refuse(
        "timm publishes no weights named test_resnet.x: use test_resnet, "
        r"or test_resnet with the tag of published weights \(test_resnet.r160_in1k\)",
        backbone="test_resnet.x",
    )
    refuse("test_resnet has no feature map with stride 7: use one of the strides 2, 4, 8, 16, 32", stride=7)
    model = TimmCapsNet((3, 64, 64), backbone="test_resnet")
    before = model.state_dict()["backbone.conv1.0.weight"].clone()
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(2)}, other)
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(weights[0].read_bytes()[:1000])
    scalar = tmp_path / "scalar.safetensors"
    safetensors.torch.save_file({**weights[1].state_dict(), "fc.weight": torch.tensor(1.0)}, scalar)
    for file, says in (
        (scalar, r"scalar.safetensors has no weights for test_resnet .*fc.weight"),
        (other, r"other.safetensors has no weights for test_resnet .*Missing key\(s\) in state_dict: \"conv1"),
        (damaged, "damaged.safetensors has no weights for test_resnet"),
        (tmp_path / "none.safetensors", "none.safetensors does not exist"),
        (tmp_path / "weights.pth", "is not a .safetensors file"),
    ):
        with pytest.raises(BadInput, match=says):
            model.load_backbone(str(file))
    assert torch.equal(model.state_dict()["backbone.conv1.0.weight"], before)


@needs_timm
@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet", "deit_tiny_distilled_patch16_224"])
def test_weights_of_a_network_with_other_classes_are_loaded(backbone, tmp_path):
    import timm

    network = timm.create_model(backbone, num_classes=7)
    safetensors.torch.save_file(network.state_dict(), tmp_path / "seven.safetensors")
    model = TimmCapsNet((3, 224, 224), 4, backbone=backbone)
    model.load_backbone(str(tmp_path / "seven.safetensors"))
    theirs = network.state_dict()
    loaded = [
        torch.equal(weights, theirs[name.removeprefix("model.")])
        for name, weights in model.backbone.state_dict().items()
        if name.removeprefix("model.") in theirs
    ]
    assert len(loaded) > 20
    assert all(loaded)


@needs_timm
@pytest.mark.parametrize(
    ("backbone", "stride", "shape", "says"),
    [
        ("vit_tiny_patch16_224", 16, (3, 60, 40), r"first 48×32 pixels of images of 60×40: .* 64×48 .*=\[64,48\]\)"),
        ("mixer_s16_224", 16, (1, 30, 30), r"first 16×16 pixels of images of 30×30: .* 32×32 .*=32\)"),
        ("convnext_atto", 8, (3, 62, 62), r"first 60×60 pixels of images of 62×62: .* 64×64 .*=64\)"),
        ("inception_v3", 16, (3, 96, 96), r"pixels of images of 96×96$"),
    ],
)
def test_a_warning_says_which_rows_and_columns_the_backbone_ignores(backbone, stride, shape, says):
    with pytest.warns(DataWarning, match=says) as caught:
        model = TimmCapsNet(shape, 3, backbone=backbone, stride=stride).eval()
    height, width = map(int, re.search(r"first (\d+)×(\d+)", str(caught[0].message)).groups())
    images = torch.rand(2, *shape)
    images[1] = images[0]
    images[1, :, height:] = images[1, :, :, width:] = 0
    scores = model(images).scores
    torch.testing.assert_close(scores[0], scores[1])


@needs_timm
def test_new_initial_weights_are_those_of_a_new_network_of_timm():
    model = TimmCapsNet((1, 32, 32), 3, backbone="test_vit")
    constants = [buffer.clone() for buffer in (model.mean, model.std, *model.backbone.buffers())]
    stds = {name: weights.std().item() for name, weights in model.backbone.named_parameters()}
    with torch.no_grad():
        for weights in [*model.parameters(), *model.buffers()]:
            weights.fill_(7)
    model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    assert not any((weights == 7).all() for weights in model.parameters())
    for name, weights in model.backbone.named_parameters():
        assert weights.std().item() == pytest.approx(stds[name], rel=0.5), name
    buffers = (model.mean, model.std, *model.backbone.buffers())
    assert all(map(torch.equal, buffers, constants))


@needs_timm
def test_a_network_of_timm_can_be_created_in_inference_mode():
    with torch.inference_mode():
        model = TimmCapsNet((3, 32, 32), 3, backbone="test_resnet")
    assert all(weights.requires_grad for weights in model.parameters())


@needs_timm
@pytest.mark.parametrize("backbone", ["resnet18", "regnetx_002", "test_resnet", "test_efficientnet", "test_byobnet"])
@pytest.mark.parametrize("shape", [(3, 33, 47), (1, 28, 28), (3, 63, 64)])
def test_backbones_of_overlapping_convolutions_accept_images_of_any_size(backbone, shape):
    model = TimmCapsNet(shape, 3, backbone=backbone).eval()
    zeros = [name for name, weight in model.backbone.named_parameters() if not weight.any()]
    assert zeros or "resnet" not in backbone  # the last BatchNorm of a residual block starts at 0
    assert model(torch.rand(2, *shape)).scores.isfinite().all()


@needs_timm
def test_the_command_trains_from_weights_on_disk(command, images, weights, tmp_path):
    file, network = weights
    small = (
        "--set",
        "model.backbone=test_resnet",
        "--set",
        "data.image_size=[40,48]",
        "--epochs",
        1,
        "--out",
        tmp_path / "run",
    )
    frozen = ("--from", file, "--set", "model.freeze_backbone=true")
    done = command("train", "timm-capsnet-images", "--data", images, *small, *frozen)
    assert done.returncode == 0, done.stderr
    assert f"the backbone has the weights of {file}" in done.stdout
    trained = Classifier.from_pretrained(tmp_path / "run").model
    theirs = network.state_dict()
    own = {name.replace("backbone.", ""): value for name, value in trained.state_dict().items()}
    shared = own.keys() & theirs.keys()
    assert len(shared) > 20
    assert all(torch.equal(own[name], theirs[name]) for name in shared)
