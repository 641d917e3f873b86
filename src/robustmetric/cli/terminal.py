"""The terminal: what comes from files, names and records is shown there as it is, and cannot steer it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from robustmetric.text import printable


class Terminal(Console):
    r"""A console that takes text as text: brackets are no markup, and control characters are made visible.

    `options` are those of rich's console. What is to have a style is a `styled` text.

    >>> Terminal(width=80).print("[/b] a\x1b[2J.png")
    [/b] a\x1b[2J.png
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Turn a string into a text, before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything; whatever text is in it comes through here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Put a text together of `parts`: a string, or a string and its style.

    >>> styled(("error:", "bold red"), " no such [file]").plain
    'error: no such [file]'
    """
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((printable(text), style) for text, style in pairs))


def wide() -> Terminal:
    """Make a terminal on which a table of all scores fits, also where the output is none."""
    terminal = Terminal()
    return terminal if terminal.is_terminal else Terminal(width=160)
