"""Tables of results on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from robustmetric.cli.terminal import styled
from robustmetric.report.sheet import Sheet


def show_sheet(console: Console, sheet: Sheet) -> None:
    """Print a table with its title and notes; columns that do not fit follow in further tables."""
    console.print(styled((sheet.title, "bold")), highlight=False)
    head, rows = sheet.headers, sheet.texts
    keys = len(head) - len(sheet.columns)
    left = list(range(keys, len(head)))
    while left:
        count = len(left)
        while count > 1 and _width(console, _table(head, rows, keys, left[:count])) > console.width:
            count -= 1
        console.print(_table(head, rows, keys, left[:count]))
        left = left[count:]
    for note in sheet.notes:
        console.print(styled((note, "dim")), highlight=False, soft_wrap=not console.is_terminal)


def _table(head: list[str], rows: list[list[str]], keys: int, columns: list[int]) -> Table:
    table = Table(*head[:keys], *(head[column] for column in columns))
    for row in rows:
        table.add_row(*row[:keys], *(row[column] for column in columns))
    return table


def _width(console: Console, table: Table) -> int:
    return table.__rich_measure__(console, console.options.update(max_width=10**4)).maximum
