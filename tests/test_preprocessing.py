import pytest
import torch

from torchcaps import BadInput
from torchcaps.data import Preprocessing, shift

PIXELS = torch.arange(2 * 3 * 6 * 8).remainder(251).to(torch.uint8).reshape(2, 3, 6, 8)


def places(whole, crops):
    """Find the position in the whole image from which each crop was cut."""
    size = crops.shape[-1]
    found = []
    for image, crop in zip(whole, crops, strict=True):
        found.append(
            next(
                (row, column)
                for row in range(image.shape[1] - size + 1)
                for column in range(image.shape[2] - size + 1)
                if torch.allclose(image[:, row : row + size, column : column + size], crop)
            )
        )
    return found


def test_plain_preprocessing_scales_pixels_to_0_to_1_and_crops_the_centre():
    torch.testing.assert_close(Preprocessing().plain(PIXELS), PIXELS.float() / 255)
    assert places(PIXELS.float() / 255, Preprocessing(crop=4).plain(PIXELS)) == [(1, 2)] * 2
    assert Preprocessing(crop=4).image_shape((3, 6, 8)) == (3, 4, 4)
    assert Preprocessing().image_shape((3, 6, 8)) == (3, 6, 8)
    assert Preprocessing(crop=4).plain(PIXELS).is_contiguous(memory_format=torch.channels_last)


def test_standardised_images_have_mean_0_and_variance_1_and_constant_images_are_finite():
    images = Preprocessing(standardise="first").plain(torch.randint(0, 256, (4, 2, 9, 9)).to(torch.uint8))
    torch.testing.assert_close(images.mean(dim=(1, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std(dim=(1, 2, 3), correction=0), torch.ones(4))
    flat = Preprocessing(standardise="first").plain(torch.full((1, 1, 4, 4), 7, dtype=torch.uint8))
    torch.testing.assert_close(flat, torch.zeros(1, 1, 4, 4), atol=1e-4, rtol=0)


def test_standardisation_does_not_amplify_differences_of_less_than_one_grey_level():
    pixels = torch.full((1, 1, 10, 10), 7, dtype=torch.uint8)
    pixels[0, 0, 3, 3] = 8
    images = Preprocessing(standardise="first").plain(pixels)
    torch.testing.assert_close(images.max(), torch.tensor(0.99))


def test_crops_are_uniform_and_depend_only_on_seed_epoch_and_index():
    preprocessing = Preprocessing(crop=5)
    variation = preprocessing.variation(seed=1, epoch=2, count=4000)
    fewer = preprocessing.variation(seed=1, epoch=2, count=1000)
    assert torch.equal(variation.uniform[:1000], fewer.uniform)
    assert not torch.equal(fewer.uniform, preprocessing.variation(1, 3, 1000).uniform)
    assert not torch.equal(fewer.uniform, preprocessing.variation(2, 2, 1000).uniform)
    ramp = torch.arange(48, dtype=torch.uint8).reshape(1, 1, 6, 8).expand(4000, -1, -1, -1)
    corners = (preprocessing.varied(ramp, variation)[:, 0, 0, 0] * 255).round().long()
    counts = corners.bincount(minlength=48).reshape(6, 8)
    assert (counts > 0).nonzero().tolist() == [[row, column] for row in range(2) for column in range(4)]
    assert counts[counts > 0].min() > 400
    alone = preprocessing.varied(ramp[:1], variation.of(torch.tensor([17])))
    torch.testing.assert_close(alone[0], preprocessing.varied(ramp, variation)[17])


def test_brightness_is_added_and_contrast_scales_the_distance_from_the_mean():
    pixels = torch.randint(0, 256, (500, 1, 4, 4)).to(torch.uint8)
    plain = Preprocessing().plain(pixels)
    brighter = Preprocessing(brightness=0.25)
    added = brighter.varied(pixels, brighter.variation(0, 0, 500)) - plain
    torch.testing.assert_close(added, added[:, :, :1, :1].expand_as(added), atol=1e-6, rtol=0)
    assert -0.25 <= added.min() < -0.2
    assert 0.2 < added.max() <= 0.25
    starker = Preprocessing(contrast=0.8)
    stretched = starker.varied(pixels, starker.variation(0, 0, 500))
    torch.testing.assert_close(stretched.mean(dim=(1, 2, 3)), plain.mean(dim=(1, 2, 3)))
    ratio = stretched.std(dim=(1, 2, 3)) / plain.std(dim=(1, 2, 3))
    assert 0.2 <= ratio.min() < 0.3
    assert 1.7 < ratio.max() <= 1.801


def test_shifted_images_equal_the_function_shift():
    preprocessing = Preprocessing(shift=2)
    variation = preprocessing.variation(0, 0, 2)
    assert variation.uniform is None
    expected = shift(PIXELS, variation.offsets).float() / 255
    torch.testing.assert_close(preprocessing.varied(PIXELS, variation), expected)


def test_the_crops_of_a_test_image_reach_from_corner_to_corner():
    views = Preprocessing(crop=4, test_crops=3).views(PIXELS)
    assert views.shape == (9, 2, 3, 4, 4)
    seen = [places(PIXELS.float() / 255, view)[0] for view in views]
    assert seen == [(row, column) for row in (0, 1, 2) for column in (0, 2, 4)]
    torch.testing.assert_close(Preprocessing(crop=4).views(PIXELS), Preprocessing(crop=4).plain(PIXELS)[None])


@pytest.mark.parametrize(
    "options",
    [
        {"crop": -1},
        {"test_crops": 0},
        {"test_crops": 2},
        {"brightness": -0.1},
        {"brightness": float("inf")},
        {"contrast": float("nan")},
        {"contrast": 1.5},
        {"elastic": -0.5},
    ],
)
def test_values_out_of_range_are_refused(options):
    with pytest.raises(BadInput, match=next(iter(options))):
        Preprocessing(**options)


def test_a_crop_larger_than_the_image_is_refused():
    with pytest.raises(BadInput, match="at most 6"):
        Preprocessing(crop=7).image_shape((3, 6, 8))


@pytest.mark.usefixtures("untyped")
def test_standardise_last_gives_mean_0_and_variance_1_after_crop_and_jitter():
    pixels = torch.randint(0, 256, (50, 2, 9, 9)).to(torch.uint8)
    jitter = {"crop": 5, "brightness": 0.3, "contrast": 0.8}
    for standardise, flat in (("last", True), ("first", False)):
        preprocessing = Preprocessing(standardise=standardise, **jitter)
        varied = preprocessing.varied(pixels, preprocessing.variation(0, 0, 50))
        means, deviations = varied.mean(dim=(1, 2, 3)), varied.std(dim=(1, 2, 3), correction=0)
        assert bool(means.abs().max() < 1e-5 and (deviations - 1).abs().max() < 1e-4) == flat
        plain = preprocessing.plain(pixels)
        assert bool(plain.mean(dim=(1, 2, 3)).abs().max() < 1e-5) == flat
        torch.testing.assert_close(plain, preprocessing.plain_of(pixels.float() / 255))
        torch.testing.assert_close(plain, preprocessing.views(pixels)[0])
    with pytest.raises(BadInput, match="standardise must be one of none, first, last; got 'twice'"):
        Preprocessing(standardise="twice")


def test_standardise_last_gives_mean_0_and_variance_1_after_rotation_and_erasing():
    pixels = torch.randint(0, 256, (50, 2, 12, 12)).to(torch.uint8)
    preprocessing = Preprocessing(standardise="last", rotation=30.0, erase=4)
    varied = preprocessing.varied(pixels, preprocessing.variation(0, 0, 50))
    torch.testing.assert_close(varied.mean(dim=(1, 2, 3)), torch.zeros(50), atol=1e-5, rtol=0)
    torch.testing.assert_close(varied.std(dim=(1, 2, 3), correction=0), torch.ones(50))


def test_every_part_of_the_augmentation_depends_on_seed_and_epoch():
    preprocessing = Preprocessing(shift=3, crop=4, flip=True, rotation=30.0, elastic=1.0)
    variation, again = (preprocessing.variation(seed=1, epoch=2, count=100) for _ in range(2))
    for part, same in zip(variation, again, strict=True):
        assert torch.equal(part, same)
    for seed, epoch in ((2, 2), (1, 3)):
        for part, other in zip(variation, preprocessing.variation(seed, epoch, 100), strict=True):
            assert not torch.equal(part, other)


def test_the_random_numbers_of_different_parts_of_the_augmentation_are_independent():
    warp = Preprocessing(rotation=30.0, squeeze=0.2, erase=1).variation(seed=0, epoch=0, count=20_000).warp
    turned = (warp[:, :1] != 0).float()
    correlations = torch.corrcoef(torch.cat([turned, warp[:, 1:]], dim=1).T)
    torch.testing.assert_close(correlations, torch.eye(len(correlations)), rtol=0, atol=0.05)


def test_a_rotation_turns_half_of_the_images_about_their_centre_by_less_than_the_limit():
    image = torch.zeros(1, 1, 29, 29, dtype=torch.uint8)
    image[0, 0, 14, 20:27] = 255
    preprocessing = Preprocessing(rotation=40.0)
    varied = preprocessing.varied(image.expand(2000, -1, -1, -1), preprocessing.variation(0, 0, 2000))[:, 0]
    span = torch.arange(29.0) - 14
    down, across = ((varied * x).sum(dim=(1, 2)) / varied.sum(dim=(1, 2)) for x in (span[:, None], span))
    angles = torch.rad2deg(torch.atan2(down, across))
    turned = angles.abs() > 1e-3
    assert 900 < turned.sum() < 1100
    assert 35 < angles.abs().max() < 40.5
    assert abs(angles[turned].std() - 40 / 3) < 1
    torch.testing.assert_close(torch.hypot(down, across), torch.full((2000,), 9.0), atol=0.2, rtol=0)


def test_a_rotation_of_an_image_that_is_not_square_keeps_distances_from_the_centre():
    image = torch.zeros(1, 1, 25, 51, dtype=torch.uint8)
    image[0, 0, 12, 31:38] = 255
    preprocessing = Preprocessing(rotation=40.0)
    varied = preprocessing.varied(image.expand(200, -1, -1, -1), preprocessing.variation(0, 0, 200))[:, 0]
    rows, columns = torch.arange(25.0)[:, None] - 12, torch.arange(51.0) - 25
    down, across = ((varied * x).sum(dim=(1, 2)) / varied.sum(dim=(1, 2)) for x in (rows, columns))
    assert down.abs().max() > 4
    torch.testing.assert_close(torch.hypot(down, across), torch.full((200,), 9.0), atol=0.2, rtol=0)


def test_squeezed_images_are_narrower_within_the_limit_and_equally_high():
    image = torch.full((1, 1, 20, 40), 255, dtype=torch.uint8)
    preprocessing = Preprocessing(squeeze=0.5)
    varied = preprocessing.varied(image.expand(500, -1, -1, -1), preprocessing.variation(0, 0, 500))[:, 0]
    torch.testing.assert_close(varied.sum(dim=1), varied[:, :1].sum(dim=1) * 20)
    widths = varied[:, 0].sum(dim=1)
    assert 20 <= widths.min() < 23
    assert 39 < widths.max() < 41


def test_a_square_is_erased_anywhere_except_at_the_border():
    image = torch.full((1, 3, 12, 14), 255, dtype=torch.uint8)
    preprocessing = Preprocessing(erase=3)
    varied = preprocessing.varied(image.expand(3000, -1, -1, -1), preprocessing.variation(0, 0, 3000))
    erased = varied == 0
    assert (erased.sum(dim=(2, 3)) == 9).all()
    ever = erased[:, 0].any(dim=0)
    assert ever[3:9, 3:11].all()
    assert ever.sum() == 6 * 8
    with pytest.raises(BadInput, match="erase must be at most 2, a third of the image's shorter side; got 3"):
        preprocessing.image_shape((1, 8, 20))
    with pytest.raises(BadInput, match="shift must be at most 7 for images of 8×20 pixels; got 8"):
        Preprocessing(shift=8).image_shape((1, 8, 20))


def test_an_elastic_distortion_moves_the_pixels_by_the_distances_of_the_grid():
    pixels = torch.zeros(2, 1, 31, 31, dtype=torch.uint8)
    pixels[:, :, 8:23, 8:23] = torch.randint(0, 256, (15, 15)).to(torch.uint8)
    preprocessing = Preprocessing(elastic=1.0)
    variation = preprocessing.variation(seed=0, epoch=0, count=2)
    distances = torch.zeros(2, 2, 6, 6)
    distances[0, 0], distances[1, 1] = 3, -2
    moved = preprocessing.varied(pixels, variation._replace(distances=distances))
    expected = pixels / 255
    torch.testing.assert_close(moved[0], expected[0].roll(-3, dims=2))
    torch.testing.assert_close(moved[1], expected[1].roll(2, dims=1))


def test_elastic_distortions_are_smooth_and_depend_only_on_seed_epoch_and_index():
    ramp = torch.arange(0, 240, 4, dtype=torch.uint8).expand(2000, 1, 20, -1)
    preprocessing = Preprocessing(elastic=0.5)
    variation = preprocessing.variation(seed=1, epoch=2, count=2000)
    assert torch.equal(preprocessing.variation(1, 2, 50).distances, variation.distances[:50])
    assert not torch.equal(preprocessing.variation(1, 3, 50).distances, variation.distances[:50])
    varied = preprocessing.varied(ramp, variation)
    alone = preprocessing.varied(ramp[:1], variation.of(torch.tensor([17])))
    torch.testing.assert_close(alone[0], varied[17])
    columns = 255 * varied[:, 0] / 4 - torch.arange(60.0)
    inner = columns[:, 3:-3, 6:-6]  # pixels near the border may come from outside the image
    assert 0.3 < inner.std() < 0.5
    assert inner.diff(dim=2).abs().mean() < 0.2 * inner.abs().mean()  # of white noise, it is 1.4


def test_a_flip_mirrors_half_of_the_images_and_swaps_the_cameras_of_a_pair():
    pixels = torch.randint(0, 256, (200, 2, 6, 5), dtype=torch.uint8)
    preprocessing = Preprocessing(flip=True)
    variation = preprocessing.variation(seed=0, epoch=0, count=200)
    varied = preprocessing.varied(pixels, variation)
    plain, mirrored = pixels / 255, pixels.flip(3).flip(1) / 255
    chosen = variation.mirrored[:, None, None, None]
    assert 70 < chosen.sum() < 130
    torch.testing.assert_close(varied, torch.where(chosen, mirrored, plain))
    grey = preprocessing.varied(pixels[:, :1], variation)
    torch.testing.assert_close(grey, torch.where(chosen, plain.flip(3), plain)[:, :1])
    torch.testing.assert_close(preprocessing.plain(pixels), plain)
