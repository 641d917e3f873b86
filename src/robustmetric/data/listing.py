"""Images listed in files: what the readers of all data sets share."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from robustmetric.data.base import Half, ImageSet, Part
from robustmetric.errors import UserError, brief, shorten

Key = TypeVar("Key", int, str)

LONGEST = 1 << 30  # bytes of a list of images; that of fourteen million has about half of this


def find_root(name: str, root: Path | None, holds: Sequence[str], nested: str = "") -> Path:
    """Return the directory that holds a data set's parts: `root`, or `nested` in it if that is there."""
    needs = f"the directory that holds {', '.join(holds)}"
    root = check_root(name, root, needs)
    folder = root if (root / holds[0]).exists() or not (root / nested).is_dir() else root / nested
    if missing := [part for part in holds if not (folder / part).exists()]:
        raise UserError(f"{folder} lacks {', '.join(missing)} of {name}; give {needs}", parameter="root")
    return folder


def check_root(name: str, root: Path | None, needs: str) -> Path:
    """Return the root if it was given and is a directory."""
    if root is None:
        raise UserError(f"{name} needs a root: {needs}", parameter="root")
    if not root.is_dir():
        raise UserError(f"there is no directory {root} for {name}; give {needs}", parameter="root")
    return root


def listed(name: str, split: Part, files: Sequence[Path], keys: Sequence[Key], **known: Any) -> ImageSet:
    """Make the image set of one split from the file and the class of each image, and check the files.

    `known` is what else is known of them; `names`, among it, calls each class by its name.
    """
    if missing := [path for path in files if not _is_file(path)]:
        raise UserError(
            f"{len(missing)} of {len(files)} image files of the {split} split of {name} are missing: "
            f"{shorten([brief(str(path), 300) for path in missing])}; copy them, or correct the paths"
        )
    names: Mapping[Any, str] | None = known.pop("names", None)
    labels, classes = count_classes(keys)
    called = tuple(str(key if names is None else names[key]) for key in classes)
    return ImageSet(name, split, labels, called, files=tuple(files), **known)


def count_classes(keys: Sequence[Key]) -> tuple[Tensor, list[Key]]:
    """Return labels (N,) that count the sorted classes from 0, and those classes.

    >>> count_classes([30, 20, 30])
    (tensor([1, 0, 1]), [20, 30])
    """
    classes = sorted(set(keys))
    index = {key: label for label, key in enumerate(classes)}
    return torch.tensor([index[key] for key in keys], dtype=torch.long), classes


def check_retrievable(images: ImageSet) -> ImageSet:
    """Return a split if some class of it has two images, and if some are queries and some in the gallery."""
    counts = Counter(images.labels.tolist())
    if max(counts.values(), default=0) < 2:
        raise UserError(
            f"no class in the {images.split} split of {images.name} has two images ({len(images)} images, "
            f"{len(counts)} classes), so there are no pairs to train on or to retrieve; add images or "
            "classes, or check that labels name classes and not single images"
        )
    for what, marks in (("query", images.is_query), ("gallery", images.is_gallery)):
        if marks is not None and not marks.any():
            raise UserError(f"the {images.split} split of {images.name} has no {what} image; name some")
    return images


def with_queries(images: ImageSet, is_query: Sequence[bool]) -> ImageSet:
    """Say which images are queries; the others are the gallery."""
    marks = torch.tensor(is_query, dtype=torch.bool)
    return replace(images, is_query=marks, is_gallery=~marks)


def half(keys: Iterable[Key], split: Half) -> list[Key]:
    """Return the classes of a zero-shot split: the first half in sorted order trains, the rest tests.

    Of an odd number of classes the middle one trains, because training needs other classes to compare with.

    >>> half([5, 3, 4, 3], "train"), half([5, 3, 4, 3], "test")
    ([3, 4], [5])
    """
    classes = sorted(set(keys))
    middle = (len(classes) + 1) // 2
    return classes[:middle] if split == "train" else classes[middle:]


def read_text(path: Path) -> str:
    """Read a text file as UTF-8, with or without the mark that spreadsheets put first."""
    data = read_bytes(path, LONGEST)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data:
        raise UserError(f"{path} is not UTF-8 text, but UTF-16 or damaged; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} is not UTF-8 text (line {line}: {error.reason}); save it as UTF-8") from None


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes."""
    if not path.is_file():  # a pipe might never end
        raise UserError(f"{path} is not a file; give one")
    if (length := path.stat().st_size) > limit:
        raise UserError(f"{path} has {length:,} bytes; expected at most {limit:,}: is it the right file?")
    return path.read_bytes()


def read_fields(
    path: Path, columns: Mapping[str, type], *, header: bool = False, skip: int = 0
) -> list[tuple[Any, ...]]:
    """Read lines of fields separated by spaces, each of the type of its column; the last may hold spaces.

    The first `skip` lines are left out. With a `header`, the next names the columns. No number or path may
    stand twice in a column that is called an image's.
    """
    rows = []
    for line, text in enumerate(read_text(path).split("\n")[skip:], start=skip + 1):
        fields = text.strip().split(maxsplit=len(columns) - 1)
        if header and fields:
            if fields != [*columns]:
                raise UserError(
                    f"{path}: the header is {brief(text.strip())}; expected {' '.join(columns)!r}"
                )
            header = False
        elif fields and len(fields) != len(columns):
            raise UserError(f"{path}, line {line}: {brief(text.strip())} is not '{' '.join(columns)}'")
        elif fields:
            rows.append(tuple(_parsed(path, line, *one) for one in zip(columns.items(), fields, strict=True)))
    if header:
        raise UserError(f"{path}: there is no header; expected {' '.join(columns)!r}")
    for place, name in enumerate(columns):
        if name in ("image_id", "path", "image_name"):
            check_distinct(path, name, (row[place] for row in rows))
    return rows


def _parsed(path: Path, line: int, column: tuple[str, type], text: str) -> Any:
    name, kind = column
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{path}, line {line}: {name} is {brief(text)}; expected a whole number") from None


def check_distinct(source: Path, name: str, values: Iterable[object]) -> None:
    """Refuse a file that lists an image twice: it would be its own partner, or in two classes."""
    if twice := [brief(value) for value, count in Counter(values).items() if count > 1]:
        raise UserError(f"{source} lists a {name} more than once: {shorten(twice)}; list each image once")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False
