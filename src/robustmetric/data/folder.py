"""Images of one's own: a directory for each class."""

from __future__ import annotations

import re
from pathlib import Path

from robustmetric.data.base import ImageSet, Split
from robustmetric.data.table import check_root, half, listed, shorten

# Not .gif: it may be a film, of which only the first picture would be used.
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
HINT = "mend or remove these links"


def read_folder(root: Path | None, split: Split) -> ImageSet:
    """Read a directory that holds one directory for each class.

    If it holds both ``train`` and ``test``, those hold the classes of the two splits; otherwise the first
    half of the classes, sorted by name, trains and the rest tests. Images are the files directly in a class's
    directory that end in .bmp, .jpeg, .jpg, .png or .webp, in natural order (2 before 10); other files and
    hidden ones are ignored, links are followed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for image in ("cat/2.png", "cat/10.png", "dog/1.png"):
    ...         Path(root, image).parent.mkdir(exist_ok=True)
    ...         Path(root, image).touch()
    ...     train = read_folder(Path(root), "train")
    >>> train.classes, [file.name for file in train.files]
    (('cat',), ['2.png', '10.png'])
    """
    root = check_root("folder", root, "the directory that holds a directory of images for each class")
    if (root / "train").is_dir() and (root / "test").is_dir():
        images = _images(root / split)
        classes = list(images)
    else:
        images = _images(root)
        classes = half(images, split)
    rows = [(image, name) for name in classes for image in images[name]]
    return listed("folder", split, rows, {name: name for name in classes}, hint=HINT)


def _images(root: Path) -> dict[str, list[Path]]:
    """Return the images of each class, classes sorted by name."""
    visible = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    if broken := [str(path) for path in visible if not path.exists()]:
        raise FileNotFoundError(f"links that lead nowhere: {shorten(broken)}; {HINT}")
    classes = {path.name: _class_images(path) for path in visible if path.is_dir()}
    if not classes:
        raise ValueError(f"{root} holds no directories; put the images of each class into one of its own")
    if empty := [str(root / name) for name, images in classes.items() if not images]:
        raise ValueError(
            f"{len(empty)} class directories hold no images: {shorten(empty)}; expected files that end in "
            f"{', '.join(SUFFIXES)} directly in each. Remove the empty ones, and call splits train and test"
        )
    return classes


def _class_images(directory: Path) -> list[Path]:
    images = [
        path
        for path in directory.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and not path.is_dir()
    ]
    return sorted(images, key=lambda path: _natural(path.name))


def _natural(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"([0-9]+)", name)
    # Every second part is a number, so that like is compared with like.
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name
