"""Tables of results on a terminal."""

from __future__ import annotations

from robustmetric.cli.terminal import Terminal, styled
from robustmetric.report.sheet import Sheet


def show_sheet(console: Terminal, sheet: Sheet) -> None:
    """Print a table with its title and notes; columns that do not fit follow in further tables."""
    console.print(styled((sheet.title, "bold")))
    console.table(sheet.headers, sheet.texts, keys=len(sheet.headers) - len(sheet.columns))
    for note in sheet.notes:
        console.say(styled((note, "dim")))
