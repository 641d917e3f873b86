"""Images listed in files: what the readers of all data sets share, and the reader of a table of one's own."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from robustmetric.data.base import ImageSet, Split

Key = TypeVar("Key", int, str)

SHOWN = 5
COLUMNS = ("path", "label", "split")
HINT = "correct the paths, which are relative to the CSV file"


def read_csv(root: Path | None, split: Split) -> ImageSet:
    r"""Read a table of images: a CSV file with the header ``path,label`` or ``path,label,split``.

    ``root`` is the file, or a directory with exactly one ``.csv``. Paths are relative to the file, labels
    are any text, ``split`` is train or test; without that column the first half of the sorted labels
    trains and the rest tests. Images keep the order of the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for image in ("1.png", "2.png"):
    ...         Path(folder, image).touch()
    ...     _ = Path(folder, "mine.csv").write_text("path,label\n1.png,cat\n2.png,cat\n")
    ...     read_csv(Path(folder), "train").classes
    ('cat',)
    """
    file = _csv_file(root)
    rows = _read_rows(file)
    if any(part for _, _, part in rows):
        chosen = [(path, label) for path, label, part in rows if part == split]
    else:
        classes = set(half((label for _, label, _ in rows), split))
        chosen = [(path, label) for path, label, _ in rows if label in classes]
    return listed("csv", split, chosen, {label: label for _, label in chosen}, hint=HINT)


def find_root(
    name: str, root: Path | None, holds: Sequence[str], published: str, *, nested: str | None = None
) -> Path:
    """Return the directory that holds a data set's parts: ``root``, or ``nested`` in it if that is there.

    >>> find_root("cub", None, ["images.txt", "images"], "It is published at https://example.org")
    Traceback (most recent call last):
    ...
    ValueError: cub needs a root: the directory that holds images.txt, images. It is published at ...
    """
    needs = f"the directory that holds {', '.join(holds)}. {published}"
    root = check_root(name, root, needs)
    inner = root / nested if nested else root
    folder = root if (root / holds[0]).exists() or not inner.is_dir() else inner
    if missing := [part for part in holds if not (folder / part).exists()]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)} of {name}; give {needs}")
    return folder


def check_root(name: str, root: Path | None, needs: str) -> Path:
    """Return the root if it was given and is a directory.

    >>> check_root("mine", Path("nowhere"), "the directory of the images")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no directory nowhere for mine; give the directory of the images
    """
    if root is None:
        raise ValueError(f"{name} needs a root: {needs}")
    if not root.is_dir():
        raise FileNotFoundError(f"there is no directory {root} for {name}; give {needs}")
    return root


def listed(
    name: str, split: Split, rows: Sequence[tuple[Path, Key]], names: Mapping[Key, str], *, hint: str
) -> ImageSet:
    """Make the image set of one split from its (file, class) rows, in their order, and check the files.

    ``names`` gives each class its name; ``hint`` tells what to do when files are missing.

    >>> listed("mine", "train", [(Path("no.png"), 7), (Path("none.png"), 7)], {7: "cat"}, hint="copy them")
    Traceback (most recent call last):
    ...
    FileNotFoundError: 2 of 2 image files of the train split of mine are missing: no.png, none.png; copy them
    """
    labels, classes = count_classes(name, split, [key for _, key in rows])
    files = tuple(path for path, _ in rows)
    if missing := [str(path) for path in files if not path.is_file()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} image files of the {split} split of {name} are missing: "
            f"{shorten(missing)}; {hint}"
        )
    return ImageSet(name, split, labels, tuple(names[key] for key in classes), files=files)


def count_classes(name: str, split: Split, keys: Sequence[Key]) -> tuple[Tensor, list[Key]]:
    """Return labels (N,) that count the sorted classes from 0, and those classes.

    A split where no class has two images is refused: there would be nothing to retrieve.

    >>> count_classes("mine", "train", [30, 20, 30])
    (tensor([1, 0, 1]), [20, 30])
    """
    counts = Counter(keys)
    if max(counts.values(), default=0) < 2:
        raise ValueError(
            f"no class in the {split} split of {name} has two images ({len(keys)} images, {len(counts)} "
            "classes), so there are no pairs to train on or to retrieve; add images or classes, or check "
            "that labels name classes and not single images"
        )
    classes = sorted(counts)
    index = {key: label for label, key in enumerate(classes)}
    return torch.tensor([index[key] for key in keys]), classes


def half(keys: Iterable[Key], split: Split) -> list[Key]:
    """Return the classes of a zero-shot split: the first half in sorted order trains, the rest tests.

    Of an odd number of classes the middle one trains, because training needs other classes to compare with.

    >>> half([5, 3, 4, 3], "train"), half([5, 3, 4, 3], "test")
    ([3, 4], [5])
    """
    classes = sorted(set(keys))
    middle = (len(classes) + 1) // 2
    return classes[:middle] if split == "train" else classes[middle:]


def read_text(path: Path) -> str:
    r"""Read a text file as UTF-8, with or without the mark that spreadsheets put first.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.csv").write_bytes(b"\xef\xbb\xbfpath")
    ...     read_text(Path(folder, "a.csv"))
    'path'
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None


def read_fields(path: Path, *columns: str) -> list[tuple[int, list[str]]]:
    r"""Read lines of fields separated by spaces, as (line number, fields); the last field may hold spaces.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "images.txt").write_text("1 a b.jpg\n")
    ...     read_fields(Path(folder, "images.txt"), "image_id", "path")
    [(1, ['1', 'a b.jpg'])]
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        fields = line.strip().split(maxsplit=len(columns) - 1)
        if fields and len(fields) != len(columns):
            raise ValueError(f"{path}, line {number}: {line.strip()!r} is not '{' '.join(columns)}'")
        if fields:
            rows.append((number, fields))
    return rows


def integer(text: str, where: str) -> int:
    """Read a whole number such as an image's or a class's.

    >>> integer("x", "images.txt, line 3: image_id")
    Traceback (most recent call last):
    ...
    ValueError: images.txt, line 3: image_id is 'x'; expected a whole number
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where} is {text!r}; expected a whole number") from None


def check_distinct(source: Path, paths: Iterable[str]) -> None:
    """Refuse a file that lists an image twice: it would be its own partner, or in two classes.

    >>> check_distinct(Path("images.txt"), ["a.jpg", "b.jpg", "a.jpg"])
    Traceback (most recent call last):
    ...
    ValueError: images.txt lists images more than once: a.jpg; list each image once
    """
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise ValueError(f"{source} lists images more than once: {shorten(twice)}; list each image once")


def shorten(items: Sequence[object]) -> str:
    """Write the first few of many items.

    >>> shorten([1, 2, 3]), shorten(range(12))
    ('1, 2, 3', '0, 1, 2, 3, 4 and 7 more')
    """
    text = ", ".join(str(item) for item in items[:SHOWN])
    return f"{text} and {len(items) - SHOWN} more" if len(items) > SHOWN else text


def _csv_file(root: Path | None) -> Path:
    needs = "a CSV file with the header path,label or path,label,split, or the directory that holds it"
    if root is None:
        raise ValueError(f"csv needs a root: {needs}")
    if not root.exists():
        raise FileNotFoundError(f"there is no {root} for csv; give {needs}")
    if not root.is_dir():
        return root
    visible = (path for path in root.iterdir() if not path.name.startswith("."))
    found = sorted(path for path in visible if path.suffix.lower() == ".csv")
    if len(found) != 1:
        names = f": {shorten([path.name for path in found])}" if found else ""
        raise ValueError(f"{root} holds {len(found)} .csv files{names}; give the file itself as the root")
    return found[0]


def _read_rows(file: Path) -> list[tuple[Path, str, str]]:
    """Return path, label and split of each row; the split is empty where the file has no such column."""
    reader = csv.reader(io.StringIO(read_text(file), newline=""), strict=True)
    rows: list[tuple[Path, str, str]] = []
    lines: dict[Path, int] = {}
    try:
        header = _header(file, next(reader, []))
        for fields in reader:
            if not fields:
                continue
            where = f"{file}, line {reader.line_num}"
            path, label, part = _row(where, header, fields)
            image = file.parent / path
            if image in lines:
                raise ValueError(f"{where}: {path!r} is already in line {lines[image]}; list each image once")
            lines[image] = reader.line_num
            rows.append((image, label, part))
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: this is not CSV ({error})") from None
    return rows


def _header(file: Path, fields: Sequence[str]) -> list[str]:
    header = [field.strip() for field in fields]
    # A column by another name is refused: a misspelt `split` would change the split without a word.
    if sorted(header) not in (sorted(COLUMNS), sorted(COLUMNS[:2])):
        raise ValueError(
            f"{file}, line 1: the header is {','.join(fields)!r}; expected path,label or path,label,split, "
            "separated by commas"
        )
    return header


def _row(where: str, header: Sequence[str], fields: Sequence[str]) -> tuple[str, str, str]:
    if len(fields) != len(header):
        raise ValueError(
            f"{where}: {len(fields)} fields; expected {len(header)} ({','.join(header)}), "
            "with quotes around text that holds a comma"
        )
    row = {column: field.strip() for column, field in zip(header, fields, strict=True)}
    for column in COLUMNS[:2]:
        if not row[column]:
            raise ValueError(f"{where}: the {column} is empty; every image needs a path and a label")
    if "split" in row and row["split"] not in ("train", "test"):
        raise ValueError(f"{where}: the split is {row['split']!r}; expected train or test")
    return row["path"], row["label"], row.get("split", "")
