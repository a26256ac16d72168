"""Warnings and errors about folders of images."""

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from image_trees import refused, save, tree, warned
from torchcaps.data import load_image_folder, load_splits, read_image
from torchcaps.data.image_file import decode
from torchcaps.data.image_list import CHECKED


def test_skipped_files_and_folders_are_named(tmp_path):
    tree(tmp_path)
    for i in range(38):
        (tmp_path / "cat" / f"{i}.HEIC").write_text("")
    for name in ("a.txt", "b.txt", "README"):
        (tmp_path / "dog" / name).write_text("")
    formats = "formats read: .bmp, .gif, .jpeg, .jpg, .png, .tif, .tiff, .webp"
    with warned(f"{tmp_path}: skipped 41 files that", "(.heic 38, .txt 2, no ending 1)", formats):
        load_image_folder(tmp_path)
    save(tmp_path / "dog" / "puppies" / "1.png")
    save(tmp_path / "loose.png")
    with warned("41 files", f"folders of images within a class ({tmp_path / 'dog' / 'puppies'})", "loose.png", formats):
        load_splits(str(tmp_path), tmp_path)


def test_a_warning_lists_only_some_of_many_file_endings(tmp_path):
    tree(tmp_path)
    for i in range(100):
        (tmp_path / "cat" / f"scan.{i:03}").write_text("")
    with warned("100 files", "and 94 other endings"):
        load_image_folder(tmp_path)


def test_files_of_several_frames_are_counted(tmp_path):
    tree(tmp_path)
    frames = [Image.new("L", (8, 6), colour) for colour in (10, 200)]
    for ending in ("gif", "png", "tif", "webp"):
        frames[0].save(tmp_path / "cat" / f"moving.{ending}", save_all=True, append_images=frames[1:])
    with warned(f"{tmp_path}: 4 files have several frames", tmp_path / "cat" / "moving.gif", "only the first"):
        load_image_folder(tmp_path)
    for ending in ("gif", "png", "tif", "webp"):
        assert read_image(tmp_path / "cat" / f"moving.{ending}", channels=1).unique().tolist() == [10]


def test_the_preview_in_a_photo_is_not_counted_as_a_frame(tmp_path):
    tree(tmp_path)
    photo = Image.new("L", (8, 6), 100)
    photo.save(tmp_path / "cat" / "photo.jpg", "MPO", save_all=True, append_images=[Image.new("L", (4, 3), 0)])
    assert load_image_folder(tmp_path)[0].image_shape == (1, 6, 8)


@pytest.mark.parametrize(("largest", "bits", "factor"), [(4095, 12, 16), (1000, 10, 65)])
def test_images_of_twelve_bits_stored_as_sixteen_cause_a_warning(largest, bits, factor, tmp_path):
    tree(tmp_path, count=2)
    for i in (2, 3):
        values = np.full((6, 8), largest - i + 2, dtype=np.uint16)
        Image.fromarray(values).save(tmp_path / "dog" / f"{i}.png")
    with warned(tmp_path, f"is {largest:,} of 65,535", f"{bits}-bit data", "nearly black", f"multiply by {factor}"):
        load_image_folder(tmp_path)
    Image.fromarray(np.full((6, 8), 4096, dtype=np.uint16)).save(tmp_path / "cat" / "deep.png")
    load_image_folder(tmp_path)


def test_dark_images_of_one_class_cause_no_warning_if_those_of_another_class_are_bright(tmp_path):
    """Of images that stay on disk, only some are decoded for this check."""
    for name, value in (("cat", 1_000), ("dog", 60_000)):
        (tmp_path / name).mkdir()
        for number in range(CHECKED + 1):
            values = np.full((6, 8), value + number, dtype=np.uint16)
            Image.fromarray(values).save(tmp_path / name / f"{number}.png")
    load_splits(str(tmp_path), tmp_path, cache="none")


@pytest.mark.parametrize("colour_type", [2, 4, 6])
def test_colours_of_twelve_bits_stored_as_sixteen_cause_a_warning(colour_type, tmp_path):
    tree(tmp_path, count=3, mode="RGB")
    channels = {2: 3, 4: 2, 6: 4}[colour_type]
    values = np.full((6, 8, channels), 4000, dtype=">u2")
    if colour_type != 2:
        values[..., -1] = 65_535  # opaque
    (tmp_path / "dog" / "deep.png").write_bytes(sixteen_bit_png(values, colour_type))
    with warned(tmp_path, "is 4,095 of 65,535", "12-bit data", "nearly black", "multiply by 16"):
        load_image_folder(tmp_path, channels=3)
    assert read_image(tmp_path / "dog" / "deep.png").shape == (1 if colour_type == 4 else 3, 6, 8)


def sixteen_bit_png(values, colour_type, transparent=None):
    """Encode values ``[height, width, channels]``; Pillow writes 16 bits only for greyscale."""

    def part(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    key = part(b"tRNS", struct.pack(">HHH", *3 * [transparent])) if transparent is not None else b""
    parts = part(b"IHDR", header), key, part(b"IDAT", zlib.compress(rows)), part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_other_formats_are_not_mistaken_for_sixteen_bits_or_greyscale(tmp_path):
    """A BMP file can have 16 bits per pixel, and the name of the mode LAB begins with LA."""
    rows = np.full((6, 8), 0x0841, dtype="<u2").tobytes()
    header = struct.pack("<IiiHHIIiiII", 40, 8, 6, 1, 16, 3, len(rows), 0, 0, 0, 0)
    masks = struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    content = header + masks + rows
    assert (
        decode(b"BM" + struct.pack("<IHHI", 14 + len(content), 0, 0, 66) + content, "dark.bmp", None, None)[1].largest
        is None
    )
    Image.new("LAB", (8, 6), (100, 128, 128)).save(tmp_path / "lab.tif")
    assert read_image(tmp_path / "lab.tif").shape == (3, 6, 8)


def test_invisible_pixels_do_not_count_as_the_largest_value(tmp_path):
    tree(tmp_path, count=3, mode="RGB")
    values = np.full((6, 8, 4), 65_535, dtype=">u2")
    values[:3, :, :3], values[3:, :, 3] = 4000, 0  # the lower half is white, but transparent
    (tmp_path / "dog" / "deep.png").write_bytes(sixteen_bit_png(values, 6))
    with warned("nearly black"):
        load_image_folder(tmp_path)


def test_the_transparent_colour_of_a_sixteen_bit_image_becomes_black():
    values = np.full((6, 8, 3), 0xF4F4, dtype=">u2")
    values[:3] = 0x34F4
    content = sixteen_bit_png(values, 2, transparent=0x34F4)
    assert decode(content, "colour.png", None, None)[0][0, :, 0].tolist() == [0] * 3 + [0xF4] * 3


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_transparent_value_of_a_greyscale_image_becomes_black(dtype, tmp_path):
    tree(tmp_path, count=3)
    scale = 257 if dtype is np.uint16 else 1
    values = np.full((6, 8), 200 * scale, dtype=dtype)
    values[:3] = 120 * scale
    Image.fromarray(values).save(tmp_path / "dog" / "half.png", transparency=120 * scale)
    Image.fromarray(values * 0 + 120 * scale).save(tmp_path / "dog" / "whole.png", transparency=120 * scale)
    assert read_image(tmp_path / "dog" / "half.png")[0, :, 0].tolist() == [0] * 3 + [200] * 3
    with warned("1 image of", tmp_path / "dog" / "whole.png"):
        load_image_folder(tmp_path)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_black_drawings_on_a_transparent_background_cause_a_warning(cache, tmp_path):
    for name, colour in (("circle", 0), ("square", 255)):
        (tmp_path / name).mkdir()
        for number in range(4):
            values = np.zeros((8, 8, 4), np.uint8)
            values[2:6, 2 : 6 - number % 2] = (colour, colour, colour, 255)
            Image.fromarray(values, "RGBA").save(tmp_path / name / f"{number}.png")
    with warned("at least 4 images of", tmp_path / "circle", "transparent pixels become black: paste"):
        load_splits(str(tmp_path), tmp_path, cache=cache)


def test_pixels_of_unknown_scale_are_refused(tmp_path):
    Image.fromarray(np.full((6, 8), 0.5, dtype=np.float32)).save(tmp_path / "float.tif")
    Image.fromarray(np.full((6, 8), 70_000, dtype=np.int32)).save(tmp_path / "deep.tif")
    refused(lambda: read_image(tmp_path / "float.tif"), "float.tif", "floating-point", "8 or 16 bits")
    refused(lambda: read_image(tmp_path / "deep.tif"), "deep.tif", "70000", "16-bit range 0 to 65535")


def test_pages_of_a_tiff_keep_their_depth_and_orientation(tmp_path):
    Image.fromarray(np.array([[0, 257, 32896, 65535]], dtype=np.uint16)).save(tmp_path / "deep.tiff")
    assert read_image(tmp_path / "deep.tiff").flatten().tolist() == [0, 1, 128, 255]
    turned = Image.fromarray(np.arange(32, dtype=np.uint8).reshape(2, 16))
    for compression in ("raw", "tiff_lzw"):
        turned.save(tmp_path / "turned.tif", tiffinfo={0x0112: 6}, compression=compression)
        assert read_image(tmp_path / "turned.tif")[0, :3].tolist() == [[16, 0], [17, 1], [18, 2]]


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_folder_of_validation_images_is_the_validation_split(name, tmp_path):
    tree(tmp_path / "train", count=3)
    tree(tmp_path / name, count=2, size=(8, 6))
    save(tmp_path / name / "dog" / "1.png", colour=77)
    with pytest.warns(UserWarning, match=r"validation images but no test images, so a part of the training images"):
        splits = load_splits(str(tmp_path), tmp_path, test_fraction=0.4)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [4, 4, 2]
    tree(tmp_path / "test", count=1)
    splits = load_splits(str(tmp_path), tmp_path, seed=3)
    assert [part.labels.tolist() for part in (splits.train, splits.validation, splits.test)] == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 1, 1],
        [0, 1],
    ]
    assert splits.validation.pixels[:, 0, 0, 0].tolist() == [0, 10, 0, 77]
    assert [len(part) for part in load_image_folder(tmp_path)] == [6, 2]
    save(tmp_path / name / "eel" / "0.png")
    refused(lambda: load_splits(str(tmp_path), tmp_path), tmp_path / name / "eel", f"not in {tmp_path / 'train'}")
    tree(tmp_path / ("valid" if name == "val" else "val"), count=1)
    refused(lambda: load_splits(str(tmp_path), tmp_path), "val", "both contain images: keep one of them")


def test_other_folders_beside_train_and_test_are_named(tmp_path):
    for half in ("train", "test"):
        tree(tmp_path / half, count=2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "validation" / "cat").mkdir(parents=True)
    load_image_folder(tmp_path)
    save(tmp_path / "extra" / "cat" / "more" / "0.png")
    with warned(
        f"next to train/ and test/ ({tmp_path / 'extra'})", "train/, val/, valid/, validation/, test/ are read"
    ):
        load_image_folder(tmp_path)


def test_a_class_whose_name_is_not_utf8_is_refused(tmp_path):
    tree(tmp_path)
    (tmp_path / "dog").rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    refused(lambda: load_image_folder(tmp_path), r"/\xff\xfe is not UTF-8: rename the folder")


@pytest.mark.parametrize(("one", "other"), [("caf\u00e9", "cafe\u0301"), ("cat", "cat ")])
def test_class_names_that_look_the_same_cause_a_warning(one, other, tmp_path):
    tree(tmp_path, classes=("ant", one, other))
    with warned(tmp_path, ascii(one), ascii(other), "one folder if they are one class"):
        load_image_folder(tmp_path)


def test_unbalanced_classes_cause_a_warning(tmp_path):
    tree(tmp_path, classes=("cat", "eel"), count=58)
    tree(tmp_path, classes=("dog",), count=5)
    load_image_folder(tmp_path)
    said = (
        tmp_path,
        "41 training images of class cat",
        "only 3 of class dog",
        "accuracy can mislead",
        "recall of each class",
    )
    with warned(*said):
        load_splits(str(tmp_path), tmp_path)
    tree(tmp_path, classes=("dog",), count=8)
    load_splits(str(tmp_path), tmp_path)


def test_a_split_without_images_is_refused(tmp_path):
    tree(tmp_path, count=2)
    refused(lambda: load_splits(str(tmp_path), tmp_path), tmp_path, "the validation split of", "more images")
    tree(tmp_path, count=9)
    refused(lambda: load_splits(str(tmp_path), tmp_path, test_fraction=0.999), "validation split", "data.test_fraction")
