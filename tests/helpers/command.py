"""The command line as a user sees it, within the process of the test."""

from __future__ import annotations

import io
import re
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from robustmetric import cli


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


def command(*arguments: object) -> Said:
    """Run the entry point in this process; only an exit ends it, anything else is raised: a traceback."""
    out, err = io.StringIO(), io.StringIO()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["robustmetric", *map(str, arguments)])
        try:
            with pytest.raises(SystemExit) as ended:
                cli.run()
        finally:
            for number, handler in before.items():  # a command that was stopped ignores further signals
                signal.signal(number, handler)
    return Said(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def works(*arguments: object) -> str:
    said = command(*arguments)
    assert said.code == 0, (said.out, said.err)
    return said.out


def refused(*arguments: object) -> str:
    """Return what is said of a mistake: one error, without a traceback, with exit code 1."""
    said = command(*arguments)
    assert said.code == 1, (said.out, said.err)
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err + said.out
    return said.err


def cells(line: str) -> list[str]:
    """Return the cells of a table's line."""
    return [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]


class Clock:
    """A clock that is set by hand."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
