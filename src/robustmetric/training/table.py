"""The table of what a training logged, read again; also after a spreadsheet has saved it."""

from __future__ import annotations

import codecs
import csv
import io
import re
from pathlib import Path

from robustmetric.training.stops import Report

_DECIMAL = re.compile(r"-?\d+,\d+(?:[eE][-+]?\d+)?")


def kept_rows(path: Path, step: int, report: Report = print) -> list[dict[str, str]]:
    """Return the rows of the table `path` up to a `step`; none where there is no table.

    Rows that cannot be read are left out. A table of which nothing can be read is put aside, which `report`
    is told.

    >>> kept_rows(Path("nowhere.csv"), 10)
    []
    """
    if not path.exists():
        return []
    rows = read_rows(path)
    if rows is None:
        aside = _free(path)
        path.replace(aside)
        report(f"{path} cannot be read as a table with a step in each row: it was put aside as {aside}")
        return []
    known = [(row, number) for row in rows if (number := _number(row["step"])) is not None]
    if lost := len(rows) - len(known):
        report(f"{path}: {lost} rows without a step were left out")
    return [{**row, "step": str(number)} for row, number in known if number <= step]


def last_step(path: Path) -> int:
    """Return the last step in the table `path`, which may be written to meanwhile; 0 where there is none.

    >>> last_step(Path("nowhere.csv"))
    0
    """
    try:
        rows = read_rows(path)
    except OSError:
        return 0
    return max((number for row in rows or () if (number := _number(row["step"])) is not None), default=0)


def read_rows(path: Path) -> list[dict[str, str]] | None:
    """Return the rows of the table `path`, as spreadsheets write it too; None if it has no steps, or is none.

    >>> read_rows(Path("nowhere.csv"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.csv'
    """
    content = path.read_bytes()
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        return None
    # A row that was cut short, by a full disk or the end of power, has no end of line or too few fields.
    whole = [line for line in io.StringIO(text, newline="") if line.endswith("\n")]
    if not whole:
        return []
    between = max(",;\t", key=whole[0].count)
    try:
        reader = csv.DictReader(whole, delimiter=between)
        found = [row for row in reader if None not in row.values() and None not in row]
    except csv.Error:
        return None
    if "step" not in (reader.fieldnames or ()):
        return None
    return [{name: _plain(value, between) for name, value in row.items()} for row in found]


def _plain(value: str, between: str) -> str:
    """Write a number with a point, where a spreadsheet wrote a comma."""
    return value.replace(",", ".") if between != "," and _DECIMAL.fullmatch(value) else value


def _number(text: str) -> int | None:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return None


def _free(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return aside
