"""Texts as terminals, shells and spreadsheets take them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable


def printable(text: str) -> str:
    r"""Return `text` with what would steer a terminal, or turn the direction of writing, made visible.

    Bytes of a file's name that are no text are, too. Ends of lines and tabs stay.

    >>> print(printable("a\x1b[2J.png"))
    a\x1b[2J.png
    """
    return _STEERING.sub(_visible, text)


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code:02x}"  # bytes follow 0xDC00


def one_line(text: str) -> str:
    r"""Return `text` with ends of lines and tabs made visible, too.

    >>> print(one_line("two\nlines"))
    two\nlines
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def command_line(words: Iterable[str]) -> str:
    """Return a command of these `words` as one types it: what has single quotes stands in double ones.

    >>> print(command_line(["robustmetric", "evaluate", "my run", "--suite", "worst-case(goals='misrank')"]))
    robustmetric evaluate 'my run' --suite "worst-case(goals='misrank')"
    """
    return " ".join(
        f'"{word}"' if "'" in word and not _WITHIN_QUOTES.search(word) else shlex.quote(word)
        for word in words
    )


_WITHIN_QUOTES = re.compile(r'["$`\\!]')  # what a shell reads in double quotes, too


def spreadsheet_text(text: str) -> str:
    """Return `text` as a cell of a CSV file that no spreadsheet takes for a formula.

    >>> spreadsheet_text("=1+1"), spreadsheet_text("cat")
    ("'=1+1", 'cat')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


_STEERING = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def shortened(text: str, fits: Callable[[str], bool]) -> str:
    """Return `text`, of its middle left out as much as it takes until it `fits`.

    >>> shortened("cat/a-long-name.png", lambda text: len(text) <= 12)
    'cat/a-…e.png'
    """
    if fits(text):
        return text
    kept, many = 0, len(text)  # letters that fit, and that do not
    while many - kept > 1:
        middle = (kept + many) // 2
        kept, many = (middle, many) if fits(_without_middle(text, middle)) else (kept, middle)
    return _without_middle(text, kept)


def _without_middle(text: str, kept: int) -> str:
    return f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
