"""Folders of real image files, written by Pillow."""

import itertools
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from image_trees import refused, save, tree, warned
from torchcaps.data import cut, image_digests, load_image_folder, load_splits, load_test_images, read_image
from torchcaps.data.image_file import FORMATS
from torchcaps.data.image_folder import images_below
from torchcaps.errors import BadInput


def test_a_folder_of_classes_is_split_by_class_and_seed(tmp_path):
    tree(tmp_path, count=10)
    train, test = load_image_folder(tmp_path)
    assert train.class_names == test.class_names == ("cat", "dog")
    assert train.labels.bincount().tolist() == [8, 8]
    assert test.labels.bincount().tolist() == [2, 2]
    assert train.image_shape == (1, 6, 8)
    for label in (0, 1):
        both = torch.cat([part.pixels[part.labels == label, 0, 0, 0] for part in (train, test)])
        assert sorted(both.tolist()) == list(range(0, 100, 10))
    assert torch.equal(load_image_folder(tmp_path)[1].pixels, test.pixels)
    tests = {tuple(load_image_folder(tmp_path, seed=seed)[1].pixels[:, 0, 0, 0].tolist()) for seed in range(4)}
    assert len(tests) > 1
    assert len(load_image_folder(tmp_path, test_fraction=0.5)[1]) == 10


def test_train_and_test_folders_are_not_split_again(tmp_path):
    tree(tmp_path / "train", count=3)
    tree(tmp_path / "test", count=1)
    (tmp_path / "validation" / "cat").mkdir(parents=True)
    train, test = load_image_folder(tmp_path)
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.pixels[:, 0, 0, 0].tolist() == [0, 10, 20] * 2
    assert test.labels.tolist() == [0, 1]


def test_a_class_may_be_named_train(tmp_path):
    tree(tmp_path, classes=("bus", "train"))
    assert load_image_folder(tmp_path)[0].class_names == ("bus", "train")


def test_every_format_is_read_and_other_files_are_skipped(tmp_path):
    names = ("a.PNG", "b.jpg", "c.JpEg", "d.bmp", "e.webp", "f.gif", "g.tif", "h.TIFF")
    assert {name[1:].lower() for name in names} == set(FORMATS)
    for name in names:
        save(tmp_path / "one" / name, mode="RGB", colour=(100, 100, 100))
    for name in (".hidden.png", "Thumbs.db", "desktop.ini", ".DS_Store"):
        (tmp_path / "one" / name).write_text("not an image")
    (tmp_path / "one" / "folder.png").mkdir()
    (tmp_path / ".git").mkdir()
    tree(tmp_path, classes=("two",), count=2)
    train, test = load_image_folder(tmp_path)
    assert (train.labels == 0).sum() + (test.labels == 0).sum() == len(names)
    of_one = torch.cat([train.pixels[train.labels == 0], test.pixels[test.labels == 0]]).int()
    assert of_one.shape[1:] == (3, 6, 8)
    assert ((of_one - 100).abs() <= 2).all()


def test_images_have_one_channel_only_if_all_are_grey(tmp_path):
    tree(tmp_path)
    assert load_image_folder(tmp_path)[0].image_shape == (1, 6, 8)
    assert load_image_folder(tmp_path, channels=3)[0].image_shape == (3, 6, 8)
    save(tmp_path / "dog" / "red.png", mode="RGB", colour=(255, 0, 0))
    train, _ = load_image_folder(tmp_path)
    assert train.image_shape == (3, 6, 8)
    assert torch.equal(train.pixels[0, 0], train.pixels[0, 2])
    assert load_image_folder(tmp_path, channels=1)[0].image_shape == (1, 6, 8)


def test_image_size_resizes_exactly(tmp_path):
    tree(tmp_path)
    save(tmp_path / "dog" / "large.jpg", size=(52, 39))
    assert load_image_folder(tmp_path, image_size=(9, 12))[0].image_shape == (1, 9, 12)
    assert load_image_folder(tmp_path, image_size=[12, 16])[0].image_shape == (1, 12, 16)
    for name, colour in (("cat", 0), ("dog", 9)):
        save(tmp_path / "even" / name / "0.png", size=(7, 7), colour=colour)
        save(tmp_path / "even" / name / "1.png", size=(41, 42), colour=colour)
    assert load_image_folder(tmp_path / "even", image_size=5)[0].image_shape == (1, 5, 5)


def test_a_changed_aspect_ratio_causes_a_warning(tmp_path):
    tree(tmp_path, count=2)
    save(tmp_path / "dog" / "tall.jpg", size=(30, 40))
    cure = "set data.resize=crop or data.resize=pad, or set data.image_size=[height,width]"
    with warned(tmp_path, "height 6 and width 8", "1 of 5 images", "width / height is 0.75 to 1.33", cure):
        load_image_folder(tmp_path, image_size=[6, 8])
    with warned(tmp_path, "5 of 5 images"):
        assert load_splits(str(tmp_path), tmp_path, image_size=7).train.image_shape == (1, 7, 7)


@pytest.mark.usefixtures("untyped")
def test_images_are_cropped_or_padded_to_keep_their_aspect_ratio(tmp_path):
    wide = np.full((8, 16), 100, dtype=np.uint8)
    wide[:, :4], wide[:, 12:] = 50, 200
    for turned in (False, True):
        Image.fromarray(wide.T if turned else wide).save(tmp_path / "wide.png")
        cropped, padded = (read_image(tmp_path / "wide.png", 1, 8, resize=resize)[0] for resize in ("crop", "pad"))
        padded = padded.T if turned else padded
        assert cropped.unique().tolist() == [100]
        assert padded[:2].max() == padded[6:].max() == 0
        assert padded[2:6, [0, 4, 7]].tolist() == [[50, 100, 200]] * 4
        assert read_image(tmp_path / "wide.png", 3, [16, 16], resize="pad").amax() == 200
    for width, height in itertools.product(range(2, 12), range(2, 12)):
        image = Image.fromarray(np.random.default_rng(width).integers(1, 256, (height, width), dtype=np.uint8))
        image.save(tmp_path / "noise.png")
        for size in ((5, 8), (8, 8), (9, 4)):
            right = np.asarray(ImageOps.pad(image, size[::-1], Image.Resampling.BILINEAR, color=0))
            assert np.array_equal(read_image(tmp_path / "noise.png", 1, size, "pad")[0], right)
    line = tmp_path / "line.png"
    Image.fromarray(np.full((1, 1000), 60, dtype=np.uint8)).save(line)
    assert read_image(line, image_size=8, resize="pad").sum(dim=2).tolist() == [[0] * 4 + [480] + [0] * 3]
    assert read_image(line, image_size=8, resize="crop").unique().tolist() == [60]
    refused(lambda: read_image(line, image_size=8, resize="fit"), "resize must be one of stretch, crop, pad")
    refused(lambda: read_image(line, resize="pad"), "resize is 'pad', but image_size is None: give image_size too")


def test_shrinking_is_antialiased(tmp_path):
    stripes = np.zeros((32, 32), dtype=np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    pixels = read_image(tmp_path / "stripes.png", image_size=8)
    assert ((pixels.int() - 127).abs() < 20).all()


def test_pixels_are_read_exactly(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (6, 8), dtype=np.uint8)
    colour = np.random.default_rng(1).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(colour).save(tmp_path / "colour.bmp")
    assert np.array_equal(read_image(tmp_path / "grey.png")[0], grey)
    assert np.array_equal(read_image(tmp_path / "grey.png", channels=3)[1], grey)
    assert np.array_equal(read_image(tmp_path / "colour.bmp").permute(1, 2, 0), colour)
    assert read_image(tmp_path / "colour.bmp").is_contiguous()


def test_the_orientation_stored_by_the_camera_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise to see it upright
    pixels = np.zeros((8, 16), dtype=np.uint8)
    pixels[:, :8] = 255
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=exif, quality=100)
    upright = read_image(tmp_path / "turned.jpg")
    assert upright.shape == (1, 16, 8)
    assert (upright[0, :8] > 250).all()
    assert (upright[0, 8:] < 5).all()


def test_images_of_sixteen_bits_are_scaled_to_eight_bits(tmp_path):
    Image.fromarray(np.array([[0, 200, 257, 32896, 65400, 65535]], dtype=np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png").flatten().tolist() == [0, 1, 1, 128, 254, 255]
    assert read_image(tmp_path / "deep.png", channels=3).shape == (3, 1, 6)


def test_transparent_pixels_are_black(tmp_path):
    save(tmp_path / "clear.png", mode="RGBA", colour=(200, 100, 50, 0))
    save(tmp_path / "half.png", mode="LA", colour=(200, 128))
    save(tmp_path / "solid.png", mode="RGBA", colour=(200, 100, 50, 255))
    assert read_image(tmp_path / "clear.png").max() == 0
    assert read_image(tmp_path / "half.png").unique().tolist() == [100]
    assert read_image(tmp_path / "half.png").shape[0] == 1
    assert read_image(tmp_path / "solid.png")[:, 0, 0].tolist() == [200, 100, 50]


@pytest.mark.parametrize(("bits", "scale"), [(1, 255), (2, 85), (4, 17), (8, 1)])
def test_a_transparent_grey_is_black_whatever_the_number_of_bits(bits, scale, tmp_path):
    white = 2**bits - 1
    row = [white, 0, white // 3, white, 0, 0, white // 3, white]
    packed = int("".join(f"{value:0{bits}b}" for value in row), 2).to_bytes(bits, "big")
    content = b"\x89PNG\r\n\x1a\n"
    for name, part in (
        (b"IHDR", struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0)),
        (b"tRNS", struct.pack(">H", white)),
        (b"IDAT", zlib.compress(b"\0" + packed)),
        (b"IEND", b""),
    ):
        content += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
    (tmp_path / "drawing.png").write_bytes(content)
    assert read_image(tmp_path / "drawing.png").flatten().tolist() == [scale * value % 255 for value in row]


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("P", 3), ("CMYK", 3)])
def test_pixels_of_other_modes_are_read(mode, channels, tmp_path):
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    Image.new("RGB", (4, 4), "white").convert(mode).save(path)
    pixels = read_image(path)
    assert pixels.shape == (channels, 4, 4)
    assert pixels.min() > 250


def test_images_of_different_sizes_are_refused_by_name(tmp_path):
    tree(tmp_path)
    odd = save(tmp_path / "dog" / "odd.png", size=(9, 6))
    refused(
        lambda: load_image_folder(tmp_path),
        tmp_path / "cat" / "0.png", "8×6", odd, "9×6", "--set data.image_size=N",
    )  # fmt: skip


def test_layouts_that_cannot_be_used_are_refused(tmp_path):
    refused(lambda: load_image_folder(tmp_path / "nowhere"), tmp_path / "nowhere", "is not an existing folder")
    refused(lambda: load_image_folder(tmp_path), tmp_path, "no class folders")
    tree(tmp_path, classes=("cat",))
    refused(lambda: load_image_folder(tmp_path), tmp_path, "only one class folder, cat")
    (tmp_path / "dog").mkdir()
    refused(lambda: load_image_folder(tmp_path), tmp_path / "dog", "add images or remove")
    only = save(tmp_path / "dog" / "only.png")
    refused(lambda: load_image_folder(tmp_path), only, "the only image of class dog")


def test_train_and_test_that_do_not_match_are_refused(tmp_path):
    tree(tmp_path / "train", classes=("cat", "dog", "eel"), count=1)
    refused(
        lambda: load_image_folder(tmp_path), tmp_path, f"{tmp_path}/test does not", "add a folder per class to test/"
    )
    tree(tmp_path / "test", count=1)
    refused(lambda: load_image_folder(tmp_path), tmp_path / "train" / "eel", tmp_path / "test" / "eel")
    tree(tmp_path / "test", classes=("eel", "fox"), count=1)
    refused(lambda: load_image_folder(tmp_path), tmp_path / "test" / "fox", f"not in {tmp_path / 'train'}")


def test_links_to_missing_images_are_refused_by_name(tmp_path):
    tree(tmp_path)
    link = tmp_path / "cat" / "link.png"
    link.symlink_to(tmp_path / "missing.png")
    refused(lambda: load_image_folder(tmp_path), link)
    assert link in images_below(tmp_path)


def test_all_damaged_images_are_named_in_one_error(tmp_path):
    tree(tmp_path, count=4)
    first, second, third = bad = [tmp_path / name for name in ("cat/0.png", "dog/0.png", "dog/2.png")]
    for path in bad:
        path.write_bytes(b"no image")
    for cache in ("memory", "none", "auto"):
        message = f"replace or remove it; 2 more cannot be read: {second}, {third}"
        refused(lambda cache=cache: load_splits(str(tmp_path), tmp_path, cache=cache), f"{first} cannot be", message)
    (tmp_path / "table.csv").write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in bad[:2]))
    refused(lambda: load_test_images(tmp_path / "table.csv", ["cat", "dog"]), f"1 more cannot be read: {second}")
    for index in range(30):
        (tmp_path / "eel").mkdir(exist_ok=True)
        (tmp_path / "eel" / f"{index}.png").write_bytes(b"no image")
    refused(lambda: load_splits(str(tmp_path), tmp_path), f"{first} cannot be", "at least 19 more cannot be read")


def test_damaged_images_are_refused_by_name(tmp_path):
    tree(tmp_path)
    bad = tmp_path / "dog" / "bad.jpg"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "good.jpg")
    whole = (tmp_path / "good.jpg").read_bytes()
    for content in (b"", b"no image", whole[: len(whole) // 2], whole[:30]):
        bad.write_bytes(content)
        refused(lambda: load_image_folder(tmp_path, image_size=8), bad, "replace or remove it")
    png = (tmp_path / "dog" / "0.png").read_bytes()
    bad.write_bytes(png[: len(png) // 2])
    refused(lambda: read_image(bad), bad)
    save(tmp_path / "other.tga")
    bad.write_bytes((tmp_path / "other.tga").read_bytes())
    refused(lambda: read_image(bad), bad)
    refused(lambda: read_image(tmp_path / "absent.png"), "absent.png")


@pytest.mark.parametrize("limit", [30, 20])
def test_images_with_too_many_pixels_are_refused(limit, tmp_path, monkeypatch):
    bomb = save(tmp_path / "bomb.png")  # 48 pixels: Pillow warns beyond its limit, and raises beyond twice its limit
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    refused(lambda: read_image(bomb), bomb, "too many pixels")


def test_options_out_of_range_are_refused(tmp_path):
    path = save(tree(tmp_path) / "image.png")
    for channels in (0, 2, 4):
        refused(lambda channels=channels: read_image(path, channels=channels), "channels", "1 (grey) or 3")
    for size in (0, -1, (3,), (3, 0), (1, 2, 3)):
        refused(lambda size=size: read_image(path, image_size=size), "image_size", "height and width")
    for fraction in (0.0, 1.0, 1.5):
        refused(lambda fraction=fraction: load_image_folder(tmp_path, test_fraction=fraction), "fraction")


@pytest.mark.usefixtures("untyped")
def test_options_of_another_type_are_refused(tmp_path):
    tree(tmp_path)
    for size in (10_001, 10**10, (5, 10**10), 8.0, True, "8", "many", "8,", (8, "6")):
        refused(lambda size=size: load_image_folder(tmp_path, image_size=size), "image_size", "from 1 to 10,000")
    refused(lambda: load_image_folder(tmp_path, image_size="48,24"), "'48,24'", "in brackets, such as [48,24]")
    refused(lambda: read_image(tmp_path / "cat" / "0.png", image_size="7,9"), "such as [7,9];")
    for fraction in ("0.2", None, [0.2], True):
        refused(
            lambda fraction=fraction: load_image_folder(tmp_path, test_fraction=fraction), "test_fraction", "in (0, 1)"
        )


def test_images_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    tree(tmp_path)

    def full(*shape, **_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    refused(lambda: load_image_folder(tmp_path), "10 images of 8×6", "more than the free memory", "data.image_size")


def test_many_files_draw_a_progress_bar_on_standard_error(tmp_path, capsys):
    for name, colour in (("cat", 0), ("dog", 9)):
        first = save(tmp_path / name / "0.png", size=(2, 2), colour=colour).read_bytes()
        for i in range(1, 1_001):
            (tmp_path / name / f"{i}.png").write_bytes(first)
    assert len(load_image_folder(tmp_path)[1]) == 400
    captured = capsys.readouterr()
    assert "reading images" in captured.err
    assert captured.out == ""
    load_image_folder(tmp_path, progress=False)
    assert capsys.readouterr().err == ""
    on_disk = load_splits(str(tmp_path), tmp_path, cache="none").test
    capsys.readouterr()
    assert len(image_digests(on_disk.subset([0, 1] * 1_001))) == 2_002
    assert "comparing images" in capsys.readouterr().err


def test_load_splits_accepts_a_folder_and_its_options(tmp_path):
    tree(tmp_path, count=20)
    options = {"image_size": (3, 4), "channels": 3, "test_fraction": 0.5}
    one, other = (
        load_splits(str(tmp_path), tmp_path, validation_fraction=0.2, seed=seed, **options) for seed in (0, 1)
    )
    assert [len(part) for part in (one.train, one.validation, one.test)] == [16, 4, 20]
    assert one.test.image_shape == (3, 3, 4)
    assert torch.equal(one.test.pixels, other.test.pixels)
    assert not torch.equal(one.validation.pixels, other.validation.pixels)
    train, test = load_image_folder(tmp_path, **options)
    rest, held_out = cut(train, 0.2, seed=0)
    for found, expected in zip((one.train, one.validation, one.test), (rest, held_out, test), strict=True):
        assert torch.equal(found.pixels, expected.pixels)
        assert torch.equal(found.labels, expected.labels)


def test_a_test_fraction_without_effect_causes_a_warning(tmp_path):
    for split in ("train", "test"):
        tree(tmp_path / split, count=6)
    assert len(load_splits(str(tmp_path), tmp_path).test) == 12
    with warned("test_fraction is 0.5", "has a test split, so test_fraction has no effect"):
        assert len(load_splits(str(tmp_path), tmp_path, test_fraction=0.5).test) == 12


# Damage and size


def damaged(content, random):
    kind, place = random.integers(3), int(random.integers(len(content)))
    if kind == 0:
        return content[:place]
    flipped = bytearray(content)
    for at in random.integers(0, len(content), 1 + 2 * kind):
        flipped[at] = random.integers(256)
    return bytes(flipped)


@pytest.mark.parametrize("ending", sorted(set(FORMATS) - {".jpeg", ".tiff"}))
def test_a_damaged_file_raises_bad_input_or_gives_an_image(ending, tmp_path):
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    path = tmp_path / f"damaged{ending}"
    picture.save(path, **({"compression": "tiff_lzw"} if ending == ".tif" else {}))
    whole = path.read_bytes()
    for _ in range(150):
        path.write_bytes(damaged(whole, random))
        try:
            said, size = "", read_image(path, image_size=5).shape[1:]
        except BadInput as error:
            said, size = str(error), (5, 5)
        assert not said or (str(path) in said and "\n" not in said)
        assert size == (5, 5)


@pytest.mark.parametrize("late", [False, True])
def test_loading_needs_little_more_memory_than_the_images(late, tmp_path, monkeypatch):
    tree(tmp_path, classes=("cat", "dog"), count=100, size=(192, 128))
    if late:
        save(tmp_path / "dog" / "z.png", mode="RGB", size=(192, 128), colour=(1, 2, 3))
    held = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: held.append(shape) or empty(*shape, **options))
    tracemalloc.start()
    train, test = load_image_folder(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_500_000  # Python's and NumPy's share; the images are 4.9 MB and more
    assert [shape[0] for shape in held] == [len(train), 0, len(test)]
