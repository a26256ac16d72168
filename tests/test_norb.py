"""The file format of smallNORB, and the rendered toys in the same format."""

import gzip
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import examples
from torchcaps import BadInput, Classifier, PooledCNN, Preprocessing
from torchcaps.cli.common import splits_for
from torchcaps.data import Images, camera_rotation, load_splits, parse_norb, read_norb
from torchcaps.data.norb import (
    FILES,
    KINDS,
    MD5,
    as_images,
    load_norb_files,
    norb_bytes,
    norb_file,
)
from torchcaps.data.toy_shapes import Solid, toy
from torchcaps.data.toys import CATEGORIES, DISTANCE, _camera, cast, load_toys, render_toy, render_toys, verify_toys


def write_split(folder, split="train", count=12, size=96, **changed):
    """Write the three files of a split with random content, and replace some of the files."""
    random = np.random.default_rng(0)
    arrays = {
        "dat": random.integers(0, 256, (count, 2, size, size), dtype=np.uint8),
        "cat": np.arange(count, dtype=np.int32) % 5,
        "info": random.integers(0, 6, (count, 4), dtype=np.int32),
        **changed,
    }
    folder.mkdir(exist_ok=True, parents=True)
    for kind in KINDS:
        (folder / norb_file("smallnorb", split, size, kind)).write_bytes(norb_bytes(arrays[kind]))
    return arrays


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (5, 2, 6, 6)])
@pytest.mark.parametrize("kind", [np.uint8, np.int32])
def test_written_files_are_read_back_exactly_raw_and_gzipped(shape, kind, tmp_path):
    array = np.random.default_rng(0).integers(0, 200, shape).astype(kind)
    (tmp_path / "raw.mat").write_bytes(norb_bytes(array))
    (tmp_path / "zipped.mat").write_bytes(gzip.compress(norb_bytes(array)))
    for name in ("raw.mat", "zipped.mat"):
        found = read_norb(tmp_path / name)
        assert found.dtype == kind
        assert np.array_equal(found, array)


def test_the_bytes_of_the_header_equal_the_published_format():
    """Images have four sizes in the header. A vector has three sizes, of which the last two are 1."""
    content = norb_bytes(np.zeros((243, 2, 96, 96), dtype=np.uint8))
    assert content[:24] == bytes(
        [0x55, 0x4C, 0x3D, 0x1E, 4, 0, 0, 0, 243, 0, 0, 0, 2, 0, 0, 0, 96, 0, 0, 0, 96, 0, 0, 0]
    )
    assert len(content) == 24 + 243 * 2 * 96 * 96
    vector = norb_bytes(np.array([5, -6], dtype=np.int32))
    assert vector == struct.pack("<2I3I2i", 0x1E3D4C54, 1, 2, 1, 1, 5, -6)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a binary matrix"),
        (struct.pack("<5I", 0x00000803, 1, 1, 1, 1), "not a binary matrix"),
        (struct.pack("<5I", 0x1E3D4C51, 1, 1, 1, 1), "elements of float32"),
        (struct.pack("<2I", 0x1E3D4C55, 0), "declares 0 dimensions"),
        (struct.pack("<2I", 0x1E3D4C55, 99), "declares 99 dimensions"),
        (struct.pack("<3I", 0x1E3D4C55, 2, 5), "cut off within its header"),
        (struct.pack("<5I", 0x1E3D4C55, 3, 2**31, 2**31, 2**31), "declares an array"),
        (struct.pack("<5I", 0x1E3D4C55, 2, 2, 2, 1) + b"abc", "the file has 23 bytes"),
        (struct.pack("<5I", 0x1E3D4C55, 2, 2, 2, 1) + b"abcde", "the file has more"),
    ],
)
def test_damaged_files_are_refused_in_one_line(content, problem, tmp_path):
    path = tmp_path / "file.mat"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=problem):
        parse_norb(content, "file")
    with pytest.raises(BadInput, match=rf"file\.mat.*{problem}"):
        read_norb(path)


def test_a_truncated_gzip_is_refused(tmp_path):
    path = tmp_path / "file.mat.gz"
    path.write_bytes(gzip.compress(norb_bytes(np.zeros((50, 9), dtype=np.int32)))[:-20])
    with pytest.raises(BadInput, match="cannot be read"):
        read_norb(path)


@settings(max_examples=examples(2_000, search=10_000), deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 255)), min_size=5, max_size=5))
def test_a_damaged_file_raises_bad_input_or_gives_an_array(chosen):
    sound = norb_bytes(np.arange(24, dtype=np.int32).reshape(2, 3, 4))
    for kind, place, value in chosen:
        content = bytearray(sound)
        if kind == 0:
            content[place] = value
        elif kind == 1:
            del content[place:]
        elif kind == 2:
            content[place:place] = bytes([value] * (value % 7 + 1))
        else:
            del content[place : place + value % 7 + 1]
        with suppress(BadInput):
            assert parse_norb(bytes(content), "file").size > 0


def test_resized_images_keep_their_attributes_and_are_averaged_over_areas(tmp_path):
    arrays = write_split(tmp_path)
    files = load_norb_files(tmp_path, "smallnorb", "train", 96)
    images = as_images(files, 48, stereo=True)
    assert images.image_shape == (2, 48, 48)
    assert images.class_names == ("animal", "human", "airplane", "truck", "car")
    squares = arrays["dat"].reshape(len(images), 2, 48, 2, 48, 2).mean(axis=(3, 5))
    assert np.array_equal(images.pixels, squares.round())
    for column, name in enumerate(("instance", "elevation", "azimuth", "lighting")):
        assert torch.equal(images.attributes[name], torch.from_numpy(arrays["info"][:, column]).long())
    assert torch.equal(as_images(files, None, stereo=False).pixels[:, 0], torch.from_numpy(arrays["dat"][:, 0]))
    chosen = images.where(azimuth=[1, 2], lighting=[0, 1, 2, 3])
    expected = [i for i, row in enumerate(arrays["info"]) if row[2] in (1, 2) and row[3] < 4]
    assert torch.equal(chosen.pixels, images.pixels[expected])
    assert torch.equal(chosen.subset([0]).attributes["azimuth"], images.attributes["azimuth"][expected[:1]])
    with pytest.raises(BadInput, match="did you mean 'azimuth'"):
        images.where(azimut=[1])
    with pytest.raises(BadInput, match="a divisor of 96, the height of the images"):
        as_images(files, 50, stereo=True)
    with pytest.raises(BadInput, match="size is 48, but the images are not square: omit size"):
        as_images(replace(files, images=files.images[..., :80]), 48, stereo=True)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"cat": np.zeros(11, dtype=np.int32)}, "12 images but .* 11 rows"),
        ({"info": np.zeros((13, 4), dtype=np.int32)}, "12 images but .* 13 rows"),
        (
            {"info": np.zeros((12, 3), dtype=np.int32)},
            "must be int32 .*instance, elevation.*; got an int32 array \\[12, 3\\]",
        ),
        ({"cat": np.zeros((12, 1), dtype=np.int32)}, "must be int32 .N.; got an int32 array"),
        ({"dat": np.zeros((12, 2, 96), dtype=np.uint8)}, "must be uint8 "),
    ],
)
def test_files_that_do_not_match_are_refused_by_name(changed, problem, tmp_path):
    write_split(tmp_path, **changed)
    with pytest.raises(BadInput, match=problem):
        load_norb_files(tmp_path, "smallnorb", "train", 96)


def test_smallnorb_files_with_a_wrong_checksum_are_refused(tmp_path):
    for split in ("train", "test"):
        write_split(tmp_path / "smallnorb", split)
    assert [file for file, _ in FILES.verify(tmp_path)] == [*MD5]
    assert all("md5" in problem for _, problem in FILES.verify(tmp_path))
    with pytest.raises(BadInput, match="the md5 of its content is"):
        load_splits("smallnorb", tmp_path)


def test_the_error_names_a_missing_file(tmp_path):
    with pytest.raises(BadInput, match=r"smallnorb-5x46789x9x18x6x2x96x96-training-dat\.mat nor smallnorb"):
        load_norb_files(tmp_path, "smallnorb", "train", 96)


@pytest.fixture
def few_views(monkeypatch):
    """Reduce the views to two elevations, two azimuths and one lighting, so that rendering takes seconds."""
    from torchcaps.data import toys

    monkeypatch.setattr(toys, "ELEVATIONS", (0, 8))
    monkeypatch.setattr(toys, "AZIMUTHS", (0, 26))
    monkeypatch.setattr(toys, "LIGHTINGS", (5,))


@pytest.mark.usefixtures("few_views")
def test_the_same_seed_renders_the_same_bytes_and_another_seed_other_bytes(tmp_path):
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    render_toys(first, progress=False)
    render_toys(again, progress=False)
    load_toys(other, render_seed=1)
    names = sorted(path.name for path in (first / "toys").iterdir())
    files = [norb_file("toys", split, 48, kind) for split in ("train", "test") for kind in KINDS]
    assert names == sorted([*files, "toys-48x48-md5.json"])
    for name in names:
        assert (first / "toys" / name).read_bytes() == (again / "toys" / name).read_bytes()
    images = norb_file("toys", "train", 48, "dat")
    assert (first / "toys" / images).read_bytes() != (other / "toys-seed1" / images).read_bytes()
    assert torch.equal(
        load_toys(other, render_seed=1)[0].pixels, torch.from_numpy(read_norb(other / "toys-seed1" / images))
    )
    assert verify_toys(other) == [(f"toys-seed1/{file}", "ok") for file in files]
    (other / "toys-seed1" / images).write_bytes(b"x")
    (other / "toys-seed1" / files[-1]).unlink()
    problems = dict(verify_toys(other))
    assert "md5" in problems[f"toys-seed1/{images}"]
    assert "missing" in problems[f"toys-seed1/{files[-1]}"]
    with pytest.raises(BadInput, match="to render the toys again"):
        load_toys(other, render_seed=1)
    assert "missing from" in verify_toys(tmp_path / "nowhere")[0][1]
    train, test = load_toys(first)
    assert len(train) == len(test) == 5 * 5 * 2 * 2
    assert train.image_shape == (2, 48, 48)
    assert train.attributes["instance"].unique().tolist() == [4, 6, 7, 8, 9]
    assert test.attributes["instance"].unique().tolist() == [0, 1, 2, 3, 5]
    assert train.labels.bincount().tolist() == [20] * 5
    row = train.where(instance=[7], elevation=[8], azimuth=[26], lighting=[5])
    view = 1 * 2 + 1
    expected = [torch.from_numpy(render_toy(category, 7)[view]) for category in range(5)]
    assert torch.equal(row.pixels, torch.stack(expected))
    assert load_toys(first, size=24, stereo=False)[0].image_shape == (1, 24, 24)
    splits = load_splits("toys", first, size=24)
    assert splits.train.image_shape == (2, 24, 24)
    assert set(splits.validation.attributes) == {"instance", "elevation", "azimuth", "lighting"}
    for shape in ((1, 24, 24), (2, 24, 24)):
        network = Classifier(PooledCNN(shape, 5), train.class_names, shape, Preprocessing())
        assert splits_for(network, None, "toys", first).test.image_shape == shape


def test_toys_fill_the_image_without_leaving_it():
    for category in CATEGORIES:
        corners = [
            np.array(solid.centre) + solid.rotation() @ (np.array(solid.half_sizes) * signs)
            for solid in toy(category, 3)
            for signs in [(1, 1, 1), (-1, -1, -1), (1, -1, 1), (-1, 1, -1)]
        ]
        assert 0.6 < max(np.linalg.norm(corner) for corner in corners) <= 1 + 1e-9


@pytest.mark.parametrize("kind", ["ellipsoid", "box", "cylinder"])
def test_rays_hit_solids_at_the_computed_position(kind):
    """The ray along the optical axis hits the near face of a solid, and the normal points to the camera."""
    place, right, up, towards = _camera(0, 0, 0)
    turned = (place, right, up, towards)
    axis = Solid("box", (0, 0, 0), (1, 1, 1), (0, 60, 0)).rotation() @ np.array([0, 0, 1.0])
    solid = Solid(kind, (0, 0, 0), (0.5, 0.5, 0.5), (0, 60, 0))
    normals, hit = cast([solid], [turned], 33)
    middle = 33 * 16 + 16
    assert hit[0, middle]
    assert float(normals[0, :, middle] @ torch.tensor(towards, dtype=torch.float32)) > 0.99
    assert float(normals[0, :, middle] @ torch.tensor(axis, dtype=torch.float32)) > 0.99
    share = float(hit.float().mean())
    width = 0.5 / 1.3
    expected = {"ellipsoid": np.pi / 4, "box": 1.0, "cylinder": np.pi / 4}[kind] * width**2
    assert share == pytest.approx(expected, rel=0.25)
    behind = Solid(kind, tuple((-towards).tolist()), (0.2, 0.2, 0.2))
    both = cast([behind, solid], [turned], 33)[0]
    torch.testing.assert_close(both[0, :, middle], normals[0, :, middle])


def test_camera_rotations_are_orthogonal_and_point_at_the_toy():
    for view in [(0, 0, 0), (8, 34, 1), (4, 18, 0)]:
        rotation = camera_rotation(*view)
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
        assert np.linalg.det(rotation) == pytest.approx(1)
        place = _camera(*view)[0]
        np.testing.assert_allclose(rotation @ place, [0, 0, np.linalg.norm(place)], atol=1e-9)
        assert np.linalg.norm(place) == pytest.approx(DISTANCE, rel=0.01)


def test_the_second_camera_is_to_the_right_of_the_first():
    (right, _, _), (_, _, towards_second) = (camera_rotation(2, 5, camera) for camera in (0, 1))
    assert right @ towards_second > 0.05


def test_a_tapered_cylinder_is_narrower_at_its_top():
    place = _camera(0, 0, 0)
    rows = []
    for taper in (1.0, 0.2):
        hit = cast([Solid("cylinder", (0, 0, 0), (0.4, 0.4, 0.6), taper=taper)], [place], 40)[1].reshape(40, 40)
        widths = hit.sum(dim=1)
        rows.append((int(widths[widths.nonzero()[2]].item()), int(widths.max())))
    assert rows[1][0] < rows[0][0] * 0.6
    assert rows[1][1] <= rows[0][1] + 1


@pytest.mark.parametrize(("options", "problem"), [({"size": 50}, "48 or 96"), ({"seed": -1}, "at least 0; got -1")])
def test_renderings_out_of_range_are_refused(options, problem, tmp_path):
    with pytest.raises(BadInput, match=problem):
        render_toys(tmp_path, **options)
    with pytest.raises(BadInput, match="a divisor of 48"):
        load_toys(tmp_path, size=32)
    with pytest.raises(BadInput, match="a divisor of 96"):
        load_splits("smallnorb", tmp_path, size=50)
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("untyped")
def test_attributes_of_another_length_are_refused():
    with pytest.raises(BadInput, match="attribute azimuth"):
        Images(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0]), ("a",), {"azimuth": torch.zeros(2)})


def test_toys_are_not_rendered_for_a_folder_that_cannot_be_written_to(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("torchcaps.data.toys.render_toy", None)
    with pytest.raises(BadInput, match=r"toys cannot be written .*use another folder with --data-dir"):
        render_toys(tmp_path / "file" / "data")
