"""Images of one's own: a directory for each class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from robustmetric.data.base import ImageSet, Part, sets_apart
from robustmetric.data.decode import SUFFIXES
from robustmetric.data.listing import check_root, half, listed, with_queries
from robustmetric.errors import UserError, shorten

HINT = "mend or remove these links"


@sets_apart
def read_folder(root: Path | None, split: Part) -> ImageSet:
    """Read a directory that holds one directory for each class, or one for each split with the classes in it.

    The splits are ``train``; ``test``, or else ``query`` and ``gallery``; and ``val`` or ``validation``,
    which is the test split if there is no other. Without them, the first half of the classes, sorted by name,
    trains and the rest tests. Images are the files directly in a class's directory that end in .jpg, .jpeg,
    .png, .webp, .bmp, .gif, .tif, .tiff, .ppm, .pgm, .pbm or .pnm, in natural order (2 before 10); of films
    and files of several pages the first counts. Other files and hidden ones are ignored, links are followed.

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
    splits = _splits(root)
    if splits:
        rows = [row for folder in splits[split] for row in _rows(_images(folder))]
    elif split == "validation":
        rows = []
    else:
        images = _images(root)
        rows = _rows({name: images[name] for name in half(images, split)})
    found = listed("folder", split, rows, {name: name for _, name in rows}, hint=HINT)
    if split == "test" and len(splits.get("test", ())) == 2:
        return with_queries(found, [file.is_relative_to(root / "query") for file, _ in rows])
    return found


def _splits(root: Path) -> dict[Part, list[Path]]:
    """Find the directories that hold the classes of each split; none if the root holds the classes itself."""
    train, test, query, gallery = (root / name for name in ("train", "test", "query", "gallery"))
    own = [root / name for name in ("val", "validation") if (root / name).is_dir()]
    tests = [test] if test.is_dir() else [query, gallery] if query.is_dir() and gallery.is_dir() else []
    if not train.is_dir() or not (tests or own):
        return {}
    if len(own) == 2 or (len(tests) == 1 and query.is_dir() and gallery.is_dir()):
        raise UserError(
            f"{root} holds {'val and validation' if len(own) == 2 else 'test beside query and gallery'}; "
            "which of them is meant? Keep one, and move the other elsewhere"
        )
    return {"train": [train], "validation": own if tests else [], "test": tests or own}


def _rows(images: Mapping[str, Sequence[Path]]) -> list[tuple[Path, str]]:
    return [(image, name) for name, files in images.items() for image in files]


def _images(root: Path) -> dict[str, list[Path]]:
    """Return the images of each class, classes sorted by name."""
    visible = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    if broken := [str(path) for path in visible if not path.exists()]:
        raise FileNotFoundError(f"links that lead nowhere: {shorten(broken)}; {HINT}")
    classes = {path.name: _class_images(path) for path in visible if path.is_dir()}
    if not classes:
        raise UserError(f"{root} holds no directories; put the images of each class into one of its own")
    if empty := [root / name for name, images in classes.items() if not images]:
        found = Counter(
            path.suffix.lower() or "without an ending"
            for folder in empty
            for path in folder.iterdir()
            if path.is_file() and not path.name.startswith(".")
        )
        held = shorten([f"{count} {kind}" for kind, count in found.most_common()])
        raise UserError(
            f"{len(empty)} class directories hold no images that are read: "
            f"{shorten([str(path) for path in empty])}; in them are {held or 'no files'}, and read are "
            f"{', '.join(SUFFIXES)}, directly in each. Convert images of another kind, to .png for one; keep "
            "other directories outside the root; and call splits train and test, val, or query and gallery"
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
