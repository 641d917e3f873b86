"""A CSV file that lists images, their labels and what else is known of them."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from robustmetric.data.base import ImageSet, Part, sets_apart
from robustmetric.data.listing import half, listed, read_text
from robustmetric.errors import UserError, brief, shorten

NEEDED = ("path", "label")
BOX = ("x_1", "y_1", "x_2", "y_2")
KNOWN = (*NEEDED, "split", "is_query", "is_gallery", *BOX, "camera")
DELIMITERS = (",", ";", "\t")
SPLITS: dict[str, Part] = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
EMPTY = ("", "none", "nan")  # how programs write that there is no value
LONGEST = 1 << 31  # pixels of a side, more than any image has
COLUMNS = 1000  # far more than any table of images has
NEAR = 0.75  # how alike a column and a known one are for it to be a slip of the pen

T = TypeVar("T")


@sets_apart
def read_csv(root: Path | None, split: Part) -> ImageSet:
    """Read a table of images: a CSV file with the columns `path` and `label`, in any order.

    `root` is the file, or a directory with exactly one `.csv`. Fields are separated by commas, semicolons or
    tabs. Paths are relative to the file, labels are any text. Known by their names are also:

    - `split`: train, test, or validation (val), which means test if no row says test. Without it, the first
      half of the sorted labels trains and the rest tests.
    - `is_query`, `is_gallery`: true or false (1 or 0); may be empty in rows that train.
    - `x_1`, `y_1`, `x_2`, `y_2`: the part of the image that counts, x_2 and y_2 exclusive; all four empty for
      the whole image.
    - `camera`: any text; cameras are numbered in sorted order.

    Other columns are kept as texts in `ImageSet.columns`; columns without a name are not. The same file may
    be listed with several boxes.
    """
    file = _csv_file(root)
    table = _Table(file)
    boxes = table.boxes()
    paths = [file.parent / path for path in table.texts("path")]
    table.check_distinct(list(zip(paths, boxes.tolist(), strict=True)))
    labels = table.texts("label")
    rows = _chosen(labels, table.each("split", _split), split)
    cameras = table.texts("camera") if "camera" in table.columns else []
    # Numbered over the whole file: a camera has one number in all splits.
    number = {camera: k for k, camera in enumerate(sorted(set(cameras)))}
    return listed(
        "csv",
        split,
        [paths[row] for row in rows],
        [labels[row] for row in rows],
        boxes=boxes[rows] if boxes[rows].any() else None,
        cameras=torch.tensor([number[cameras[row]] for row in rows]) if cameras else None,
        is_query=table.marks("is_query", rows, split),
        is_gallery=table.marks("is_gallery", rows, split),
        columns={
            name: tuple(texts[row] for row in rows)
            for name, texts in table.columns.items()
            if name == "camera" or name not in KNOWN
        },
    )


def csv_rows(file: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fields of each row of a CSV file's `text`; empty ones are left out."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    line = 0
    try:
        for fields in reader:
            line = reader.line_num
            if fields:
                yield line, [field.strip() for field in fields]
    except csv.Error as error:
        # A quote that is not closed takes in all that follows, up to csv's limit for a field.
        raise UserError(
            f"{file}, line {line + 1}: this is not CSV ({error}); close quotes, and give each row a line"
        ) from None


def _csv_file(root: Path | None) -> Path:
    needs = "a CSV file with the columns path and label, or the directory that holds it"
    if root is None or not root.exists():
        told = "csv needs a root:" if root is None else f"there is no {root} for csv; give"
        raise UserError(f"{told} {needs}", parameter="root")
    if not root.is_dir():
        return root
    visible = (path for path in root.iterdir() if not path.name.startswith("."))
    found = sorted(path for path in visible if path.suffix.lower() == ".csv")
    if len(found) != 1:
        names = f": {shorten([path.name for path in found])}" if found else ""
        raise UserError(f"{root} holds {len(found)} .csv files{names}; give the file itself as the root")
    return found[0]


def _chosen(labels: Sequence[str], splits: Sequence[Part], split: Part) -> list[int]:
    if not splits:
        classes = set(half(labels, split)) if split != "validation" else set()
        return [row for row, label in enumerate(labels) if label in classes]
    wanted = split if "test" in splits else {"train": "train", "test": "validation"}.get(split)
    return [row for row, part in enumerate(splits) if part == wanted]


class _Table:
    """The texts of each of a table's `columns`, and the line of each row."""

    def __init__(self, file: Path) -> None:
        self.file = file
        text = read_text(file)
        first = text.partition("\n")[0].partition("\r")[0]
        rows = csv_rows(file, text, max(DELIMITERS, key=lambda one: _fit(first, one)))
        _, names = next(rows, (1, []))
        self._check_header(names, first)
        self.lines: list[int] = []
        lists: list[list[str]] = [[] for _ in names]
        for line, fields in rows:
            if len(fields) != len(names):
                raise UserError(
                    f"{file}, line {line}: {len(fields)} fields; expected {len(names)} ({shorten(names)}), "
                    "with quotes around text that holds the delimiter"
                )
            self.lines.append(line)
            for texts, field in zip(lists, fields, strict=True):
                texts.append(field)
        self.columns = {_called(name): texts for name, texts in zip(names, lists, strict=True) if name}

    def _check_header(self, names: list[str], line: str) -> None:
        where = f"{self.file}, line 1:"
        if len(names) > COLUMNS:
            raise UserError(f"{where} {len(names):,} columns; expected at most {COLUMNS:,}: is it a table?")
        header = [_called(name) for name in names if name]
        missing = [name for name in KNOWN if name not in header]
        for name in header:
            # A misspelt `split` would change the split without a word.
            if name not in KNOWN and (near := difflib.get_close_matches(name.lower(), missing, 1, NEAR)):
                raise UserError(
                    f"{where} unknown column {brief(name)} (did you mean {near[0]!r}?); correct it, or give "
                    "it a name that is less alike if it is something else"
                )
        lacks = [n for n in missing if n in NEEDED or (n in BOX and not {*BOX} <= {*missing})]
        if lacks:
            raise UserError(
                f"{where} the header is {brief(line)} and lacks {' and '.join(lacks)}; expected path and "
                f"label, all or none of {', '.join(BOX)}, and others, separated by commas, semicolons or tabs"
            )
        if len({*header}) < len(header):
            raise UserError(f"{where} a column is there twice in {brief(line)}; give each a name of its own")

    def texts(self, name: str) -> list[str]:
        """Return the texts of a column that may not be empty."""
        texts = self.columns[name]
        if "" in texts:
            line = self.lines[texts.index("")]
            raise UserError(f"{self.file}, line {line}: the {name} is empty; every image needs one")
        return texts

    def each(self, name: str, parse: Callable[[str], T]) -> list[T]:
        """Return what `parse` makes of each text of a column; nothing if there is no such column."""
        found = []
        for line, text in zip(self.lines, self.columns.get(name, ()), strict=False):
            try:
                found.append(parse(text.lower()))
            except (ValueError, OverflowError) as error:
                raise UserError(f"{self.file}, line {line}: {name} is {brief(text)}; {error}") from None
        return found

    def boxes(self) -> Any:
        """Return the boxes (N, 4); zeros are the whole image."""
        sides = [self.each(name, _pixel) for name in BOX if name in self.columns]
        if not sides:
            return np.zeros((len(self.lines), 4), np.int64)
        for line, box in zip(self.lines, zip(*sides, strict=True), strict=True):
            left, top, right, bottom = (-1 if side is None else side for side in box)
            if box != (None,) * 4 and not (0 <= left < right <= LONGEST and 0 <= top < bottom <= LONGEST):
                shown = ",".join("" if side is None else str(side) for side in box)
                raise UserError(
                    f"{self.file}, line {line}: the box {','.join(BOX)} is {shown}; expected 0 <= x_1 < x_2 "
                    "and 0 <= y_1 < y_2, or all empty for the whole image"
                )
        return np.array([[side or 0 for side in column] for column in sides], np.int64).T.reshape(-1, 4)

    def marks(self, name: str, rows: Sequence[int], split: Part) -> Tensor | None:
        """Say which images are queries, or in the gallery; None where no row of the split says so."""
        known = self.each(name, _mark)
        marks = [known[row] for row in rows] if known else []
        # Tables that mark no training image mean nothing by it.
        if all(mark is None for mark in marks) or (split == "train" and not any(marks)):
            return None
        if None in marks and split != "train":
            line = self.lines[rows[marks.index(None)]]
            raise UserError(
                f"{self.file}, line {line}: {name} is empty; only rows that train may leave it out"
            )
        return torch.tensor([mark is not False for mark in marks])

    def check_distinct(self, images: Sequence[tuple[Path, list[int]]]) -> None:
        """Refuse an image that is listed twice with the same box."""
        first: dict[object, int] = {}
        for line, (path, box) in zip(self.lines, images, strict=True):
            if (before := first.setdefault((path, *box), line)) != line:
                raise UserError(
                    f"{self.file}, line {line}: {brief(str(path), 300)} is already in line {before}; list "
                    "each image once, or each box of it"
                )


def _fit(line: str, delimiter: str) -> tuple[bool, int]:
    """Say whether a delimiter makes a header of the first line, and how many fields."""
    try:
        names = [_called(field.strip()) for field in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:  # a field that is too long, at least with this one
        names = []
    return set(NEEDED) <= set(names), len(names)


def _called(name: str) -> str:
    return name.lower() if name.lower() in KNOWN else name


def _split(text: str) -> Part:
    if text not in SPLITS:
        raise ValueError("expected train, test or validation")
    return SPLITS[text]


def _mark(text: str) -> bool | None:
    if text not in TRUTH and text not in EMPTY:
        raise ValueError("expected true or false")
    return TRUTH.get(text)


def _pixel(text: str) -> int | None:
    try:
        return None if text in EMPTY else round(float(text))
    except (ValueError, OverflowError):
        raise ValueError("expected a number of pixels") from None
