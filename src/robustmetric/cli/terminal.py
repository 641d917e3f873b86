"""The terminal: what comes from files, names and records is shown there as it is, and cannot steer it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from robustmetric.text import printable

WIDEST = 100
"""Columns of a table where there is no terminal."""

Cell = str | Text


class Terminal(Console):
    r"""A console that takes text as text: brackets are no markup, and control characters are made visible.

    `options` are those of rich's console. What is to have a style is a `styled` text.

    >>> Terminal(width=80).print("[/b] a\x1b[2J.png")
    [/b] a\x1b[2J.png
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = min(shutil.get_terminal_size((WIDEST, 1)).columns, WIDEST)

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into a text, before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything; whatever text is in it comes through here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def say(self, text: Cell) -> None:
        """Print a line: wrapped on a terminal, whole elsewhere."""
        self.print(text, soft_wrap=not self.is_terminal)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Cell]], keys: int = 1) -> None:
        """Print a table; figures that do not fit next to the `keys` first columns follow in further tables.

        Texts of the keys are wrapped where they are too long.

        >>> Terminal(width=24).table(["", "R@1", "mAP", "NMI"], [["c2f2", "98.2", "91.0", "90.1"]])
        ┏━━━━━━┳━━━━━━┳━━━━━━┓
        ┃      ┃  R@1 ┃  mAP ┃
        ┡━━━━━━╇━━━━━━╇━━━━━━┩
        │ c2f2 │ 98.2 │ 91.0 │
        └──────┴──────┴──────┘
        ┏━━━━━━┳━━━━━━┓
        ┃      ┃  NMI ┃
        ┡━━━━━━╇━━━━━━┩
        │ c2f2 │ 90.1 │
        └──────┴──────┘
        """
        columns = zip(head, *rows, strict=True)
        widths = [max(cell_len(line) for cell in cells for line in _lines(cell)) + 3 for cells in columns]
        room, left = self.width - 1 - sum(widths[:keys]), list(range(keys, len(head)))
        while True:
            count = max(1, sum(sum(widths[k] for k in left[: n + 1]) <= room for n in range(len(left))))
            made = Table()
            for name in head[:keys]:
                made.add_column(name, overflow="fold")
            for k in left[:count]:
                made.add_column(head[k], justify="right", no_wrap=True)
            for row in rows:
                made.add_row(*row[:keys], *(row[k] for k in left[:count]))
            self.print(made)
            left = left[count:]
            if not left:
                return


def _lines(cell: Cell) -> list[str]:
    return printable(str(cell)).split("\n")


def styled(*parts: str | tuple[str, str]) -> Text:
    """Put a text together of `parts`: a string, or a string and its style.

    >>> styled(("error:", "bold red"), " no such [file]").plain
    'error: no such [file]'
    """
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((printable(text), style) for text, style in pairs))
