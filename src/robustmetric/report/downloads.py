"""The numbers of a report as links that hold them: a table of all scores, and the records."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from robustmetric.evaluation import Record
from robustmetric.report.entries import Entry
from robustmetric.text import printable, spreadsheet_text

_HEAD = ("network", "score", "value", "low", "high", "before", "better", "unit")
_MOST = 2_000_000  # bytes of records in a page


def scores_csv(entries: Sequence[Entry]) -> str:
    """Return all scores of `entries` as a table, as the address of a link.

    >>> scores_csv([])[:36]
    'data:text/csv;charset=utf-8;base64,b'
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_HEAD)
    for entry in entries:
        for row in _figures(entry.record):
            writer.writerow([_safe(cell) for cell in (entry.name, *row)])
    return _link("text/csv", text.getvalue())


def records_json(entries: Sequence[Entry]) -> str | None:
    """Return the records of `entries` as the address of a link; None where they are too large for a page.

    >>> records_json([])
    'data:application/json;charset=utf-8;base64,W10='
    """
    records = [entry.record.model_dump(mode="json", by_alias=True) for entry in entries]
    text = json.dumps(records, indent=1)
    return _link("application/json", text) if len(text) <= _MOST else None


def _figures(record: Record) -> Iterator[tuple[Any, ...]]:
    """Yield the scores of a record as rows of a table."""
    for name, score in {**record.retrieval, **record.scores}.items():
        column = record.column(name)
        yield name, score.value, score.low, score.high, score.before, column.better, column.unit.name
    if record.ers is not None:
        column = record.column("ERS")
        yield "ERS", record.ers.value, record.ers.low, record.ers.high, None, column.better, column.unit.name
    for name, goal in ({} if record.suite is None else record.suite.goals).items():
        yield f"worst case {name}", goal.value, goal.low, goal.high, goal.before, goal.better, goal.unit


def _safe(cell: object) -> object:
    return "" if cell is None else spreadsheet_text(printable(cell)) if isinstance(cell, str) else cell


def _link(kind: str, text: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
