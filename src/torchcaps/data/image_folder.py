"""Read your own images: one folder per class, either in a single tree or in both train/ and test/."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchcaps.data.files import expanded
from torchcaps.data.image_file import FORMATS, Resize
from torchcaps.data.image_files import Paths, shown
from torchcaps.data.image_list import ImageList, remarks_on_names, train_and_test
from torchcaps.data.images import Images
from torchcaps.errors import BadInput, listed

VALIDATION = ("val", "valid", "validation")
"""Accepted names of the folder of validation images, which lies next to train/ and test/."""
CLUTTER = ("thumbs.db", "desktop.ini")
"""Names, in lower case, of files that operating systems create. Like hidden files, they are skipped without warning."""
Tree = dict[str, list[Path]]
"""Image files by class; classes and files are sorted by name."""


def load_image_folder(
    root: str | Path,
    *,
    image_size: int | Sequence[int] | None = None,
    resize: Resize = "stretch",
    channels: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.2,
    progress: bool = True,
) -> tuple[Images, Images]:
    """Read a folder with one subfolder of images per class as `(train, test)`.

    Two layouts are accepted. With `root/train/<class>/*` and `root/test/<class>/*`, the two folders are the splits.
    With a single tree, `root/<class>/*`, the fraction `test_fraction` of each class is held out as the test split. If
    there is `root/val/` (or `valid/`, `validation/`) but no `root/test/`, the test split is held out from
    `root/train/`. The sorted names of the class folders are the class names. This function does not read images in
    `root/val/`; `load_splits` does.

    Files that end in bmp, gif, jpeg, jpg, png, tif, tiff or webp are read in the order of their names. Images are
    rotated upright by their EXIF orientation, transparent pixels are blended with black, and only the first frame or
    page is read. Files and folders whose names start with a dot are skipped; a `DataWarning` lists everything else that
    is skipped.

    Arguments:
        root: the folder.
        image_size: size to which every image is resized, in pixels from 1 to 10,000: 32 for a square, or [height,
            width]. None keeps the sizes, which must then be the same for all images.
        resize: how images of another aspect ratio are resized, as for `read_image`: "stretch", "crop" or "pad".
        channels: 1 for greyscale, 3 for RGB; with None, 1 if all files are greyscale, else 3.
        seed: without test images, seed for choosing them, at least 0.
        test_fraction: without test images, fraction of each class to hold out, in (0, 1).
        progress: draw a progress bar on standard error if there are more than 2,000 files.

    Raises:
        BadInput: the folder has neither layout; there are fewer than two classes; a class has no images; there are no
            test images and a class has only one image; a class is in only one of train/ and test/; the images have
            different sizes and `image_size` is None; a file cannot be read; an argument is out of its range; or the
            images do not fit into memory.

    Warns:
        DataWarning: files or folders are skipped; a file has several frames; resizing changes the aspect ratio by more
            than 5 %; 16-bit images are nearly black; or two class names look the same.

    Example:
        >>> train, test = load_image_folder("photos", image_size=32)  # doctest: +SKIP
    """
    images = list_folder(expanded(root), validation=False)
    options: dict[str, Any] = {"image_size": image_size, "resize": resize, "channels": channels, "progress": progress}
    return train_and_test(images, test_fraction, seed, **options)


def list_folder(root: Path, validation: bool = True, least: int = 2) -> ImageList:
    """List the images of a folder with the layout that `load_image_folder` describes.

    Arguments:
        root: the folder.
        validation: list the images in `root/val/` (or `valid/`, `validation/`) too.
        least: least number of classes.
    """
    if not root.is_dir():
        raise BadInput(f"{root} is not an existing folder: give a folder with one subfolder of images per class")
    folders, ignored = _layout(root)
    if not validation:
        folders.pop("validation", None)
    skipped: list[Path] = []
    trees = {split: _tree(folder, skipped, least) for split, folder in folders.items()}
    _same_classes(folders, trees)
    class_names = tuple(next(iter(trees.values())))
    files = [file for tree in trees.values() for members in tree.values() for file in members]
    labels = [label for tree in trees.values() for label, members in enumerate(tree.values()) for _ in members]
    lengths = [sum(map(len, tree.values())) for tree in trees.values()]
    rows = dict(zip(trees, torch.arange(len(files), device="cpu").split(lengths), strict=True))
    remarks = [*_remarks_on_folders(root, skipped, ignored, class_names)]
    return ImageList(str(root), Paths(files), torch.tensor(labels, device="cpu"), class_names, rows, remarks)


def _layout(root: Path) -> tuple[dict[str, Path], list[Path]]:
    """Find the folder of each split (only "train" for a single tree), and the folders of images that are not read."""
    halves = [half for half in ("train", "test") if (root / half).is_dir() and folders_in(root / half)]
    if not halves:
        return {"train": root}, []
    held_out = [root / name for name in VALIDATION if (root / name).is_dir() and _has_images(root / name)]
    if halves == ["test"] or (halves == ["train"] and not held_out):
        other = {"train": "test", "test": "train"}[halves[0]]
        raise BadInput(
            f"{root}/{halves[0]} contains class folders but {root}/{other} does not: add a folder per class to {other}/"
        )
    if len(held_out) > 1:
        raise BadInput(f"{' and '.join(map(str, held_out))} both contain images: keep one of them")
    known = ("train", "test", *VALIDATION)
    ignored = [folder for folder in folders_in(root) if folder.name not in known and _has_images(folder)]
    folders = {half: root / half for half in halves}
    return folders | ({"validation": held_out[0]} if held_out else {}), ignored


def _tree(root: Path, skipped: list[Path], least: int) -> Tree:
    tree: Tree = {}
    skipped += sorted(path for path in root.iterdir() if is_image(path))
    for folder in folders_in(root):
        try:
            folder.name.encode()
            paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        except UnicodeEncodeError as error:
            raise BadInput(f"the name of the class folder {shown(folder)} is not UTF-8: rename the folder") from error
        except OSError as error:
            raise _not_readable(error) from error
        tree[folder.name] = [path for path in paths if is_image(path)]
        for path in set(paths).difference(tree[folder.name]):
            if _has_images(path) if path.is_dir() else path.name.lower() not in CLUTTER:
                skipped.append(path)
    if len(tree) < least:
        found = f"only one class folder, {next(iter(tree))}" if tree else "no class folders"
        classes = "class" if least == 1 else f"of at least {least} classes"
        raise BadInput(f"{root} has {found}: give a folder with one subfolder of images for each {classes}")
    for name in (name for name, members in tree.items() if not members):
        if _has_images(root / name):
            raise BadInput(
                f"{root / name} contains images only in subfolders: move them into {root / name}; if {name} is a"
                " split, name the splits train, val and test"
            )
        if least > 1 or not any(tree.values()):
            raise BadInput(f"{root / name} contains no {', '.join(FORMATS)} file: add images or remove the folder")
    return tree


def _same_classes(folders: Mapping[str, Path], trees: Mapping[str, Tree]) -> None:
    for split, tree in trees.items():
        for name in sorted(set(trees["train"]) ^ set(tree)):
            there, absent = folders["train"], folders[split]
            if name in tree:
                there, absent = absent, there
            raise BadInput(f"the class {there / name} is not in {absent}: add {absent / name} or remove this folder")


def folders_in(root: Path) -> list[Path]:
    """List the folders in a folder, sorted by name, without hidden folders."""
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def is_image(path: Path) -> bool:
    """Return whether a path is a file, or a link to a missing file, with the extension of a known format.

    Hidden files do not count. Links to missing files count, so that reading them raises an error.
    """
    if path.suffix.lower() not in FORMATS or path.name.startswith("."):
        return False
    return path.is_file() or (path.is_symlink() and not path.exists())


def images_below(root: Path) -> Iterator[Path]:
    """Yield the images in a folder and its subfolders, without hidden ones.

    Raises:
        BadInput: the folder or a subfolder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise _not_readable(error) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if is_image(file := Path(folder, name)))


def _not_readable(error: OSError) -> BadInput:
    return BadInput(
        f"{shown(error.filename)} cannot be read ({error.strerror}): change its permissions, or give only folders that"
        " can be read"
    )


def _has_images(root: Path) -> bool:
    return next(images_below(root), None) is not None


def _remarks_on_folders(
    root: Path, skipped: Sequence[Path], ignored: Sequence[Path], class_names: Sequence[str]
) -> Iterator[str]:
    """Yield warning texts about skipped files and folders, and about class names that look the same."""
    folders, loose = [path for path in skipped if path.is_dir()], [path for path in skipped if is_image(path)]
    others = len(skipped) - len(folders) - len(loose)
    parts = []
    if others:
        endings = Counter(path.suffix.lower() or "no ending" for path in set(skipped).difference(folders, loose))
        known = ", ".join(f"{shown(ending)} {count:,}" for ending, count in endings.most_common(6))
        more = f" and {len(endings) - 6:,} other endings" if len(endings) > 6 else ""
        kind = "file that is not an image" if others == 1 else "files that are not images"
        parts.append(f"skipped {others:,} {kind} of a known format ({known}{more})")
    if folders:
        parts.append(f"skipped folders of images within a class ({_listed(folders)})")
    if loose:
        parts.append(f"skipped images outside the class folders ({_listed(loose)})")
    if parts:
        yield f"{root}: {'; '.join(parts)}; formats read: {', '.join(FORMATS)}"
    if ignored:
        yield (
            f"{root}: skipped folders of images next to train/ and test/ ({_listed(ignored)}); only "
            f"{', '.join(f'{name}/' for name in ('train', *VALIDATION, 'test'))} are read"
        )
    yield from remarks_on_names(str(root), class_names, "move the images into one folder")


def _listed(paths: Sequence[Path]) -> str:
    return listed([shown(path) for path in sorted(paths)])
