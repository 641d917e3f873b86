"""Tables of results on a terminal: in several parts where one is too wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from robustmetric.cli.terminal import styled
from robustmetric.report.layout import WORDS, Kind, Sheet

_STYLES: dict[Kind, str] = {"ours": "", "published": "dim", "difference": "dim italic"}


def show_sheet(console: Console, sheet: Sheet) -> None:
    """Print a table with its title and notes; what does not fit beside it comes in tables below.

    Where not all columns fit, those of the attacks come after the others, or else R@1 and the ERS first.
    """
    console.print(styled((sheet.title, "bold")), highlight=False)
    left = list(range(len(sheet.heads)))
    if not _fits(console, sheet, left):
        first = [number for number in left if sheet.heads[number].rank < 2]
        if len(first) < len(left) and _fits(console, sheet, first):
            console.print(_table(sheet, first))
            left = [number for number in left if number not in first]
        left.sort(key=lambda number: sheet.heads[number].rank)
    while left:
        count = len(left)
        while count > sheet.together and not _fits(console, sheet, left[:count]):
            count -= sheet.together
        console.print(_table(sheet, left[:count]))
        left = left[count:]
    for note in sheet.notes:
        console.print(styled((note, "dim")), highlight=False, soft_wrap=not console.is_terminal)


def _fits(console: Console, sheet: Sheet, columns: Sequence[int]) -> bool:
    wide = console.options.update(max_width=10**4)
    return _table(sheet, columns).__rich_measure__(console, wide).maximum <= console.width


def _table(sheet: Sheet, columns: Sequence[int]) -> Table:
    """Lay out some of the columns of figures behind the keys."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    text = len(sheet.headers) - len(sheet.heads)
    for name in sheet.headers[:text]:
        table.add_column(name, vertical="bottom")
    for number in columns:
        head = sheet.heads[number]
        table.add_column(f"{head.group}\n{head.name}" if sheet.grouped else head.name, justify="right")
    for line, row in zip(sheet.lines, sheet.rows, strict=True):
        cells = [line.values[number] for number in columns]
        if line.values[0] in WORDS and not any(line.values[1:]):  # in each part of the table
            cells[0] = line.values[0]
        figures = (styled((cell, _colour(cell))) for cell in cells)
        table.add_row(*row[:text], *figures, style=_STYLES[line.kind])
    return table


def _colour(cell: str) -> str:
    return {"collapse": "red", "not run": "dim"}[cell] if cell in WORDS else ""
