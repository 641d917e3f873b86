"""A table of one's own: a CSV file that lists images, their labels and what else is known of them."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from robustmetric.data.base import Box, ImageSet, Part, sets_apart
from robustmetric.data.listing import half, listed, quoted, read_text
from robustmetric.errors import UserError, shorten

NEEDED = ("path", "label")
BOX = ("x_1", "y_1", "x_2", "y_2")
KNOWN = (*NEEDED, "split", "is_query", "is_gallery", *BOX, "camera")
DELIMITERS = (",", ";", "\t")
SPLITS: dict[str, Part] = {"train": "train", "test": "test", "validation": "validation", "val": "validation"}
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
EMPTY = ("", "none", "nan")  # how programs write that there is no value
WHOLE: Box = (0, 0, 0, 0)
LONGEST = 1 << 31  # pixels of a side, more than any image has
COLUMNS = 1000  # far more than any table of images has
NEAR = 0.75  # how alike a column and a known one are for it to be a slip of the pen
HINT = "correct the paths, which are relative to the CSV file"


class _Row(NamedTuple):
    line: int
    path: Path
    label: str
    split: Part | None
    box: Box
    camera: str | None
    is_query: bool | None
    is_gallery: bool | None
    more: tuple[str, ...]  # the fields of further columns


@sets_apart
def read_csv(root: Path | None, split: Part) -> ImageSet:
    r"""Read a table of images: a CSV file with the columns ``path`` and ``label``, in any order.

    ``root`` is the file, or a directory with exactly one ``.csv``. Fields are separated by commas, semicolons
    or tabs. Paths are relative to the file, labels are any text. Known by their names are also:

    - ``split``: train, test, or validation (val), which means test if no row says test. Without it, the first
      half of the sorted labels trains and the rest tests.
    - ``is_query``, ``is_gallery``: true or false (1 or 0); may be empty in rows that train.
    - ``x_1``, ``y_1``, ``x_2``, ``y_2``: the part of the image that counts, x_2 and y_2 exclusive; all four
      empty for the whole image.
    - ``camera``: any text; cameras are numbered in sorted order.

    Other columns are kept as texts in ``ImageSet.columns``; columns without a name are not. Images keep the
    order of the file, and the same file may be listed with several boxes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for image in ("1.png", "2.png"):
    ...         Path(folder, image).touch()
    ...     _ = Path(folder, "mine.csv").write_text("shop;label;path\nA;cat;1.png\nB;cat;2.png\n")
    ...     cats = read_csv(Path(folder), "train")
    >>> cats.classes, cats.columns
    (('cat',), {'shop': ('A', 'B')})
    """
    file = _csv_file(root)
    further, rows = _read(file)
    chosen = _chosen(rows, split)
    pairs = [(row.path, row.label) for row in chosen]
    images = listed("csv", split, pairs, {label: label for _, label in pairs}, hint=HINT)
    boxes = np.array([row.box for row in chosen], dtype=np.int64).reshape(-1, 4)
    # Numbered over the whole file: a camera has one number in all splits.
    number = {camera: k for k, camera in enumerate(sorted({row.camera for row in rows if row.camera}))}
    cameras = [number[row.camera] for row in chosen if row.camera]
    return replace(
        images,
        boxes=boxes if boxes.any() else None,
        cameras=torch.tensor(cameras, dtype=torch.long) if number else None,
        is_query=_marks(file, split, "is_query", [(row.line, row.is_query) for row in chosen]),
        is_gallery=_marks(file, split, "is_gallery", [(row.line, row.is_gallery) for row in chosen]),
        columns={name: tuple(row.more[k] for row in chosen) for k, name in enumerate(further)}
        | ({"camera": tuple(row.camera or "" for row in chosen)} if number else {}),
    )


def _csv_file(root: Path | None) -> Path:
    needs = "a CSV file with the columns path and label, or the directory that holds it"
    if root is None:
        raise UserError(f"csv needs a root: {needs}", parameter="root")
    if not root.exists():
        raise FileNotFoundError(f"there is no {root} for csv; give {needs}")
    if not root.is_dir():
        return root
    visible = (path for path in root.iterdir() if not path.name.startswith("."))
    found = sorted(path for path in visible if path.suffix.lower() == ".csv")
    if len(found) != 1:
        names = f": {shorten([path.name for path in found])}" if found else ""
        raise UserError(f"{root} holds {len(found)} .csv files{names}; give the file itself as the root")
    return found[0]


def _chosen(rows: Sequence[_Row], split: Part) -> list[_Row]:
    splits = {row.split for row in rows}
    if None in splits:  # there is no such column
        classes = set(half((row.label for row in rows), split)) if split != "validation" else set()
        return [row for row in rows if row.label in classes]
    if "test" not in splits:
        wanted = {"train": "train", "test": "validation"}.get(split)
        return [row for row in rows if row.split == wanted]
    return [row for row in rows if row.split == split]


def _marks(file: Path, split: Part, name: str, marks: Sequence[tuple[int, bool | None]]) -> Tensor | None:
    """Say which images are queries, or in the gallery; None where no row of the split says so."""
    unmarked = [line for line, mark in marks if mark is None]
    # Tables that mark no training image mean nothing by it.
    if len(unmarked) == len(marks) or (split == "train" and not any(mark for _, mark in marks)):
        return None
    if unmarked and split != "train":
        raise UserError(f"{file}, line {unmarked[0]}: {name} is empty; only rows that train may leave it out")
    return torch.tensor([mark is not False for _, mark in marks], dtype=torch.bool)


def _read(file: Path) -> tuple[list[str], list[_Row]]:
    """Return the names of the columns that are not known, and the rows."""
    text = read_text(file)
    first = text.partition("\n")[0].partition("\r")[0]
    rows: list[_Row] = []
    lines: dict[tuple[Path, Box], int] = {}
    number = 0
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=_delimiter(first))
        header = _header(file, first, next(reader, []))
        number = reader.line_num
        further = [k for k, name in enumerate(header) if name and name not in KNOWN]
        for fields in reader:
            number = reader.line_num
            if not fields:
                continue
            row = _row(file, number, header, further, fields)
            before = lines.setdefault((row.path, row.box), row.line)
            if before != row.line:
                name = fields[header.index("path")].strip()
                raise UserError(
                    f"{file}, line {row.line}: {quoted(name)} is already in line {before}; list each image "
                    "once, or each box of it"
                )
            rows.append(row)
    except csv.Error as error:
        # A quote that is not closed takes in all that follows, up to csv's limit for a field.
        raise UserError(
            f"{file}, line {number + 1}: this is not CSV ({error}); close quotes, and give each row a line"
        ) from None
    return [header[k] for k in further], rows


def _delimiter(line: str) -> str:
    """Choose the delimiter that makes a header of the first line, or else the most fields."""

    def fit(delimiter: str) -> tuple[bool, int]:
        try:
            names = [field.strip().lower() for field in next(csv.reader([line], delimiter=delimiter), [])]
        except csv.Error:  # a field that is too long, at least with this one
            names = []
        return set(NEEDED) <= set(names), len(names)

    return max(DELIMITERS, key=fit)


def _header(file: Path, line: str, fields: Sequence[str]) -> list[str]:
    """Return the names of the columns: known ones in lower case, others as they are."""
    names = [field.strip() for field in fields]
    header = [name.lower() if name.lower() in KNOWN else name for name in names]
    where = f"{file}, line 1:"
    if len(names) > COLUMNS:
        raise UserError(
            f"{where} {len(names):,} columns; expected at most {COLUMNS:,}: is it a table of images?"
        )
    missing = [name for name in KNOWN if name not in header]
    for name in header:
        # A misspelt `split` would change the split without a word.
        if name not in KNOWN and (near := difflib.get_close_matches(name.lower(), missing, 1, NEAR)):
            raise UserError(
                f"{where} unknown column {quoted(name)} (did you mean {near[0]!r}?); correct it, or give it "
                "a name that is less alike if it is something else"
            )
    if lacks := [name for name in NEEDED if name in missing]:
        raise UserError(
            f"{where} the header is {quoted(line)} and lacks {' and '.join(lacks)}; expected the columns "
            "path and label, and others if you like, separated by commas, semicolons or tabs"
        )
    if twice := [name for k, name in enumerate(header) if name and name in header[:k]]:
        raise UserError(
            f"{where} the column {quoted(twice[0])} is there twice; give each column a name of its own"
        )
    if any(name in header for name in BOX) and (lacks := [name for name in BOX if name in missing]):
        raise UserError(f"{where} a box takes {', '.join(BOX)}; {' and '.join(lacks)} lacks")
    return header


def _row(file: Path, line: int, header: Sequence[str], further: Sequence[int], fields: Sequence[str]) -> _Row:
    where = f"{file}, line {line}:"
    if len(fields) != len(header):
        raise UserError(
            f"{where} {len(fields)} fields; expected {len(header)} ({shorten(header)}), "
            "with quotes around text that holds the delimiter"
        )
    texts = [field.strip() for field in fields]
    row = dict(zip(header, texts, strict=True))
    for column in (*NEEDED, "camera"):
        if row.get(column) == "":
            raise UserError(f"{where} the {column} is empty; every image needs one")
    return _Row(
        line,
        file.parent / row["path"],
        row["label"],
        _split(where, row["split"]) if "split" in row else None,
        _box(where, [row[name] for name in BOX]) if BOX[0] in row else WHOLE,
        row.get("camera"),
        _mark(where, "is_query", row),
        _mark(where, "is_gallery", row),
        tuple(texts[k] for k in further),
    )


def _split(where: str, text: str) -> Part:
    split = SPLITS.get(text.lower())
    if split is None:
        raise UserError(f"{where} the split is {quoted(text)}; expected train, test or validation")
    return split


def _mark(where: str, name: str, row: Mapping[str, str]) -> bool | None:
    text = row.get(name, "").lower()
    if text not in TRUTH and text not in EMPTY:
        raise UserError(f"{where} {name} is {quoted(row[name])}; expected true or false")
    return TRUTH.get(text)


def _box(where: str, texts: Sequence[str]) -> Box:
    empty = [name for name, text in zip(BOX, texts, strict=True) if text.lower() in EMPTY]
    if len(empty) == len(BOX):
        return WHOLE
    if empty:
        raise UserError(
            f"{where} the box lacks {' and '.join(empty)}; give all four, or none for the whole image"
        )
    left, top, right, bottom = (_pixel(where, name, text) for name, text in zip(BOX, texts, strict=True))
    if not (0 <= left < right <= LONGEST and 0 <= top < bottom <= LONGEST):
        raise UserError(
            f"{where} the box {','.join(BOX)} is {','.join(texts)}; expected 0 <= x_1 < x_2 and "
            "0 <= y_1 < y_2"
        )
    return left, top, right, bottom


def _pixel(where: str, name: str, text: str) -> int:
    try:
        return round(float(text))
    except (ValueError, OverflowError):
        raise UserError(f"{where} {name} is {quoted(text)}; expected a number of pixels") from None
