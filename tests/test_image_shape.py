"""Image shapes that networks accept and refuse."""

import pytest
import torch

from test_models import NETWORKS, SMALL
from torchcaps import BadInput, create_model


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("capsnet", 16),
        ("pooled-cnn", 13),
        ("pooled-capsnet", 13),
        ("matrix-capsnet", 16),
        ("efficient-capsnet", 10),
        ("attention-capsnet", 12),
        ("generative-capsnet", 28),
    ],
)
def test_an_image_that_is_too_small_is_refused(name, size):
    with pytest.raises(
        BadInput, match=rf"images for \w+ must be at least {size + 1}×{size + 1} pixels; got {size}×{size}"
    ):
        create_model(name, image_shape=(1, size, size))
    create_model(name, image_shape=(1, size + 1, size + 1), **SMALL[name])


def test_a_shape_whose_channels_come_last_is_refused_with_the_right_order():
    with pytest.raises(BadInput, match=r"got \(32, 28, 3\): if the channels come last, use \(3, 32, 28\)"):
        create_model("capsnet", image_shape=(32, 28, 3))


def test_the_padded_generative_network_takes_images_of_one_pixel():
    model = create_model("generative-capsnet", image_shape=(1, 1, 1), num_classes=3, **SMALL["generative-capsnet"])
    assert model.eval()(torch.rand(2, 1, 1, 1)).scores.shape == (2, 3)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("name", NETWORKS)
def test_images_that_do_not_fit_the_network_are_refused(name):
    shape = (1, 20, 24)
    model = create_model(name, image_shape=shape, num_classes=3, **SMALL[name]).eval()
    sides = "height, width" if "pooled" in name else "20, 24"
    for images, message in (
        (torch.rand(shape), rf"images must be .* \[B, 1, {sides}\]; got .* \[1, 20, 24\]: add .* images\[None\]"),
        (torch.rand(2, 3, 20, 24), r"got a float32 tensor \[2, 3, 20, 24\]: .*with image_shape=\(3, 20, 24\)"),
        (torch.rand(5, 20, 24), r"got a float32 tensor \[5, 20, 24\]: add .*channels, as in images\[:, None\]"),
        (torch.rand(2, 20, 24, 1), r"got a float32 tensor \[2, 20, 24, 1\]: move .*images\.permute\(0, 3, 1, 2\)"),
        (torch.rand(2, *shape).numpy(), r"got a float32 array .*: convert them, as in torch\.as_tensor"),
        (torch.rand(20, 24), r"got a float32 tensor \[20, 24\]: reshape the images"),
        (torch.zeros(2, *shape, dtype=torch.uint8), r"got a uint8 tensor .*: scale the pixels .* images / 255"),
    ):
        with pytest.raises(ValueError, match=message):
            model(images)
    larger = torch.rand(2, 1, 24, 24)
    if "pooled" in name:
        assert model(larger).scores.shape == (2, 3)
        with pytest.raises(ValueError, match=r"\[2, 1, 13, 24\]: resize them to at least 14×14 pixels"):
            model(larger[:, :, :13])
    else:
        with pytest.raises(ValueError, match=r"got a float32 tensor \[2, 1, 24, 24\]"):
            model(larger)
