"""A directory of images for each class."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from robustmetric.data.base import ImageSet, Part, sets_apart
from robustmetric.data.decode import SUFFIXES
from robustmetric.data.listing import check_root, count_classes, half, with_queries
from robustmetric.errors import UserError, shorten


@sets_apart
def read_folder(root: Path | None, split: Part) -> ImageSet:
    """Read a directory that holds one directory for each class, or one for each split with the classes in it.

    The splits are `train`; `test`, or else `query` and `gallery`; and `val` or `validation`, which is the
    test split if there is no other. Without them, the first half of the classes, sorted by name, trains and
    the rest tests. Images are the files directly in a class's directory with one of the endings `SUFFIXES`,
    in natural order (2 before 10). Hidden files are ignored, links are followed; files that cannot be opened
    are broken images.
    """
    root = check_root("folder", root, "the directory that holds a directory of images for each class")
    splits = _splits(root)
    if not splits and split == "validation":
        return ImageSet("folder", split, count_classes([])[0], (), files=())
    found = [one for folder in (splits[split] if splits else [root]) for one in _classes(folder)]
    if not splits and split != "validation":
        kept = half([one.name for one in found], split)
        found = [one for one in found if one.name in kept]
    pairs = [(file, one.name) for one in found for file in one.files]
    labels, names = count_classes([name for _, name in pairs])
    files = tuple(file for file, _ in pairs)
    unread = sum((one.others for one in found), Counter[str]())
    images = ImageSet("folder", split, labels, tuple(names), files=files, unread=unread)
    if split == "test" and len(splits.get("test", ())) == 2:
        return with_queries(images, [file.is_relative_to(root / "query") for file in files])
    return images


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


class _Class(NamedTuple):
    name: str
    files: list[Path]
    others: Counter[str]  # files of other kinds, by their endings


def _classes(root: Path) -> list[_Class]:
    """Return the images of each class, classes sorted by name."""
    visible = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    if broken := [str(path) for path in visible if not path.exists()]:
        raise UserError(f"links that lead nowhere: {shorten(broken)}; mend or remove them")
    found = []
    for folder in (path for path in visible if path.is_dir()):
        files = [path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir()]
        known = [path for path in files if path.suffix.lower() in SUFFIXES]
        others = Counter(path.suffix.lower() or "without an ending" for path in {*files} - {*known})
        found.append(_Class(folder.name, sorted(known, key=lambda path: _natural(path.name)), others))
    if not found:
        raise UserError(f"{root} holds no directories; put the images of each class into one of its own")
    if empty := [one for one in found if not one.files]:
        others = sum((one.others for one in empty), Counter[str]())
        held = shorten([f"{count} {kind}" for kind, count in others.most_common()])
        raise UserError(
            f"{len(empty)} class directories hold no images that are read: "
            f"{shorten([str(root / one.name) for one in empty])}; in them are {held or 'no files'}, and read "
            f"are {', '.join(SUFFIXES)}, directly in each. Convert images of another kind, to .png for one; "
            "keep other directories outside the root; call splits train and test, val, or query and gallery"
        )
    return found


def _natural(name: str) -> tuple[list[str | int], str]:
    parts = re.split(r"([0-9]+)", name)
    # Every second part is a number, so that like is compared with like.
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name
