"""Your own images: a folder per class, in one tree or in train/ and test/."""

import math
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.data.image_file import FORMATS, Facts, height_and_width, read_with_facts
from torchcaps.data.images import Images, Splits, cut_indices
from torchcaps.errors import BadInput, DataWarning

VALIDATION = ("val", "valid", "validation")
"""Names of the folder of validation images beside train/ and test/."""
CLUTTER = ("thumbs.db", "desktop.ini")
"""Files that systems leave in folders, in lower case; they are skipped without a word, as hidden files are."""
MANY = 2_000
"""Files from which on a progress bar is drawn."""
DISTORTION = 1.05
"""Change of an image's aspect ratio from which on a person is told."""

Tree = dict[str, list[Path]]
"""Class → its files, both sorted by name."""


def load_image_folder(
    root: Path,
    *,
    image_size: int | Sequence[int] | None = None,
    channels: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    progress: bool = True,
) -> tuple[Images, Images]:
    """Read a folder of images as `(train, test)`; the names of the class folders are the class names, sorted.

    Either `root/train/<class>/*` and `root/test/<class>/*`, or `root/<class>/*`, of which `test_fraction` of each class
    is held out, fixed by the seed. Images of `root/val/` (or `valid/`, `validation/`) are read by `load_splits` alone.
    Read are files that end in bmp, gif, jpeg, jpg, png, tif, tiff or webp, in the order of their names, as `read_image`
    does. Names that begin with a dot are passed over; a `DataWarning` names whatever else is.

    Arguments:
        root: the folder.
        image_size: side, or height and width, in pixels, to which every image is resized; None where all agree.
        channels: 1 grey, 3 red-green-blue; None for 1 where all files are grey, else 3.
        seed: of the split of one tree, 0 or greater.
        test_fraction: of the split of one tree, above 0 and below 1.
        progress: draw a progress bar on standard error for more than 2,000 files.
    Raises:
        BadInput: the layout is neither of the two, a class is empty or in only one of train/ and test/, sizes differ
            and no image_size is given, or a file cannot be read.
    Warns:
        DataWarning: files or folders are not read, only the first of several frames is, images come out distorted or
            nearly black, or two class names look the same.
    Example:
        >>> train, test = load_image_folder(Path("photos"), image_size=32)  # doctest: +SKIP
    """
    splits, found = read_folder(root, image_size, channels, seed, test_fraction, progress)
    for remark in found:
        warnings.warn(remark, DataWarning, stacklevel=2)
    return splits.train, splits.test


def read_folder(
    root: Path,
    image_size: int | Sequence[int] | None = None,
    channels: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    progress: bool = True,
    validation: tuple[float, int] | None = None,
) -> tuple[Splits, list[str]]:
    """The images of `load_image_folder`, and what a person should know of them.

    Arguments:
        validation: fraction and seed of the cut of validation images from the training images where there is no folder
            of them; None for no validation images.
    """
    size = height_and_width(image_size)
    if type(test_fraction) not in (int, float) or not 0 < test_fraction < 1:
        raise BadInput(f"test_fraction is {test_fraction!r}; give a number above 0 and below 1")
    if not root.is_dir():
        raise BadInput(f"{root}: no such folder; give one that holds a folder of images per class")
    folders, ignored = _layout(root)
    if validation is None:
        folders.pop("validation", None)
    skipped: list[Path] = []
    trees = {split: _tree(folder, skipped) for split, folder in folders.items()}
    _same_classes(folders, trees)
    class_names = tuple(next(iter(trees.values())))
    files = [file for tree in trees.values() for members in tree.values() for file in members]
    labels = torch.tensor(
        [label for tree in trees.values() for label, members in enumerate(tree.values()) for _ in members]
    )
    lengths = [sum(map(len, tree.values())) for tree in trees.values()]
    rows = dict(zip(trees, torch.arange(len(files)).split(lengths), strict=True))
    if "test" not in rows:
        for name, members in trees["train"].items():
            if len(members) == 1:
                raise BadInput(f"{members[0]}: the only image of class {name}, which no split can share; add another")
        rows["train"], rows["test"] = cut_indices(labels, test_fraction, seed)
    if "validation" not in rows:
        train, rows["validation"] = rows["train"], torch.arange(0)
        if validation is not None:
            rest, held_out = cut_indices(labels[train], *validation)
            rows["train"], rows["validation"] = train[rest], train[held_out]
    splits = [rows[split] for split in ("train", "validation", "test")]
    pixels, facts = _read_all(files, splits, channels, size, progress)
    images = [Images(part, labels[chosen], class_names) for part, chosen in zip(pixels, splits, strict=True)]
    found = [*_found_in_folders(root, skipped, ignored, class_names), *_found_in_files(root, files, facts, size)]
    return Splits(*images), found


def _layout(root: Path) -> tuple[dict[str, Path], list[Path]]:
    """Split → its folder, train alone where it is one tree; and folders beside them that hold images."""
    halves = [half for half in ("train", "test") if (root / half).is_dir() and _folders(root / half)]
    if not halves:
        return {"train": root}, []
    held_out = [root / name for name in VALIDATION if (root / name).is_dir() and _holds_images(root / name)]
    if len(halves) == 1:
        other = {"train": "test", "test": "train"}[halves[0]]
        cure = f"add a folder per class to {other}/"
        if other == "test" and held_out:
            cure += f", or rename {held_out[0].name}/ to test/: validation images are then cut from train/"
        raise BadInput(f"{root}: {halves[0]}/ holds classes but {other}/ does not; {cure}")
    if len(held_out) > 1:
        raise BadInput(f"{root}: {' and '.join(f'{folder.name}/' for folder in held_out)} both hold images; keep one")
    known = ("train", "test", *VALIDATION)
    ignored = [folder for folder in _folders(root) if folder.name not in known and _holds_images(folder)]
    folders = {"train": root / "train", "test": root / "test"}
    return folders | ({"validation": held_out[0]} if held_out else {}), ignored


def _tree(root: Path, skipped: list[Path]) -> Tree:
    tree: Tree = {}
    skipped += sorted(path for path in root.iterdir() if _is_image(path))
    for folder in _folders(root):
        try:
            folder.name.encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"{_shown(folder)}: the name of this class is not UTF-8; rename the folder") from error
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        tree[folder.name] = [path for path in paths if _is_image(path)]
        for path in set(paths).difference(tree[folder.name]):
            if _holds_images(path) if path.is_dir() else path.name.lower() not in CLUTTER:
                skipped.append(path)
    if len(tree) < 2:
        found = f"only one class folder, {next(iter(tree))}" if tree else "no class folders"
        raise BadInput(f"{root}: {found}; give a folder that holds a folder of images for each of two or more classes")
    for name, members in tree.items():
        if not members:
            raise BadInput(f"{root / name}: holds no {', '.join(FORMATS)} file; add images or remove the folder")
    return tree


def _same_classes(folders: Mapping[str, Path], trees: Mapping[str, Tree]) -> None:
    for split, tree in trees.items():
        for name in sorted(set(trees["train"]) ^ set(tree)):
            there, absent = folders["train"], folders[split]
            if name in tree:
                there, absent = absent, there
            raise BadInput(f"{there / name}: this class is not in {absent}; add {absent / name} or remove this one")


def _folders(root: Path) -> list[Path]:
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in FORMATS and not path.name.startswith(".") and path.is_file()


def _holds_images(root: Path) -> bool:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if any(_is_image(Path(folder, name)) for name in names):
            return True
    return False


def _read_all(
    files: list[Path],
    splits: Sequence[Tensor],
    channels: int | None,
    size: tuple[int, int] | None,
    progress: bool,
) -> tuple[list[Tensor], list[Facts]]:
    """Pixels of each split, decoded file by file into their place, and the facts of each file."""
    places = {index: (split, row) for split, chosen in enumerate(splits) for row, index in enumerate(chosen.tolist())}
    pixels: list[Tensor] = []
    facts: list[Facts] = []
    for index, file in enumerate(_tracked(files, progress and len(files) > MANY)):
        image, of_file = read_with_facts(file, channels, size)
        facts.append(of_file)
        count, height, width = image.shape
        if not pixels:
            pixels = [_room(len(chosen), count, height, width, len(files)) for chosen in splits]
        first_height, first_width = pixels[0].shape[2:]
        if (height, width) != (first_height, first_width):
            raise BadInput(
                f"{files[0]} is {first_width} x {first_height} pixels but {file} is {width} x {height}; give all one"
                " size with --set data.image_size=N"
            )
        if count > pixels[0].shape[1]:
            pixels = [part.expand(-1, count, -1, -1).contiguous() for part in pixels]
        split, row = places[index]
        pixels[split][row] = image
    return pixels, facts


def _room(count: int, channels: int, height: int, width: int, of: int) -> Tensor:
    try:
        return torch.empty(count, channels, height, width, dtype=torch.uint8)
    except RuntimeError as error:
        raise BadInput(
            f"{of:,} images of {width} x {height} pixels take {of * channels * height * width / 1e9:,.1f} GB, more"
            " memory than there is; make them smaller with --set data.image_size=N"
        ) from error


def _tracked(files: list[Path], shown: bool) -> Iterable[Path]:
    if not shown or find_spec("rich") is None:
        return files
    from rich.console import Console
    from rich.progress import track

    return track(files, "reading images", console=Console(stderr=True))


def _found_in_folders(
    root: Path, skipped: Sequence[Path], ignored: Sequence[Path], class_names: Sequence[str]
) -> Iterator[str]:
    """What a person should know of the folders: what is not read, and names that look the same."""
    folders, loose = [path for path in skipped if path.is_dir()], [path for path in skipped if _is_image(path)]
    others = len(skipped) - len(folders) - len(loose)
    said = []
    if others:
        endings = Counter(path.suffix.lower() or "no ending" for path in set(skipped).difference(folders, loose))
        listed = ", ".join(f"{_shown(ending)} {count:,}" for ending, count in endings.most_common(6))
        more = f" and {len(endings) - 6:,} other endings" if len(endings) > 6 else ""
        kind = "file that is not an image" if others == 1 else "files that are not images"
        said.append(f"skipped {others:,} {kind} of a known format ({listed}{more})")
    if folders:
        said.append(f"skipped folders of images within a class ({_listed(folders)})")
    if loose:
        said.append(f"skipped images in no class folder ({_listed(loose)})")
    if said:
        yield f"{root}: {'; '.join(said)}; formats read: {', '.join(FORMATS)}"
    if ignored:
        yield (
            f"{root}: skipped folders of images beside train/ and test/ ({_listed(ignored)}); only "
            f"{', '.join(f'{name}/' for name in ('train', *VALIDATION, 'test'))} are read"
        )
    alike: dict[str, str] = {}
    for name in class_names:
        other = alike.setdefault(unicodedata.normalize("NFC", name).strip(), name)
        if other != name:
            yield (
                f"{root}: the class names {other!a} and {name!a} differ in Unicode normalisation or in spaces"
                " around them alone; move the images into one folder if they are one class"
            )


def _found_in_files(
    root: Path, files: Sequence[Path], facts: Sequence[Facts], size: tuple[int, int] | None
) -> Iterator[str]:
    """What a person should know of the files that were read."""
    several = [file for file, image in zip(files, facts, strict=True) if image.several]
    if several:
        holds = "1 file holds" if len(several) == 1 else f"{len(several):,} files hold"
        yield f"{root}: {holds} several frames; only the first is read (first: {_shown(several[0])})"
    largest = max((image.largest for image in facts if image.largest is not None), default=None)
    if largest is not None and largest < 4096:
        yield (
            f"{root}: the largest value of the 16-bit images is {largest:,} of 65,535, as in data of"
            f" {largest.bit_length()} bits, and they come out nearly black; scale them to the full 16 bits"
            f" (multiply by {65_535 // max(largest, 1):,})"
        )
    if size is not None:
        ratios = [image.width / image.height for image in facts]
        target = math.log(size[1] / size[0])
        distorted = sum(abs(math.log(ratio) - target) > math.log(DISTORTION) for ratio in ratios)
        seen = " to ".join(dict.fromkeys((f"{min(ratios):.2f}", f"{max(ratios):.2f}")))
        if distorted:
            yield (
                f"{root}: resizing to height {size[0]} and width {size[1]} changes the aspect ratio of {distorted:,} of"
                f" {len(files):,} images by more than 5 % (width / height is {seen});"
                " crop them, or give data.image_size=[height,width] of their shape"
            )


def _listed(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(_shown(path) for path in sorted(paths)[:3]) + more


def _shown(path: Path | str) -> str:
    """A path that can be printed anywhere: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
