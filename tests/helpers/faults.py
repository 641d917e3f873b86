"""The list of all faults that tests try: marks on those tests, and the table made of them.

    python -m tests.helpers.faults

writes the table of docs/reliability.md anew.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"
PLACES = (
    "training", "evaluation", "attack", "data", "code", "terminal", "weights", "records", "reproduction",
    "vectors", "export", "verification", "app", "zoo",
)  # fmt: skip


class Fault(NamedTuple):
    """Something that goes wrong at a `place`, and what comes of it."""

    place: str
    what: str
    outcome: str


def fault(place: str, what: str, outcome: str) -> pytest.MarkDecorator:
    """Mark a test, or a case of one (`pytest.param(…, marks=fault(…))`), as trying a fault.

    Write the three as plain strings: the table is made of the text of the tests.
    """
    assert place in PLACES
    return pytest.mark.fault(place, what, outcome)


def listed() -> list[Fault]:
    """Return all faults that tests try, by place and in the order of the files."""
    found: dict[Fault, None] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        for node in calls:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault":
                found[Fault(*(str(ast.literal_eval(argument)) for argument in node.args))] = None
    return sorted(found, key=lambda one: PLACES.index(one.place))


def table() -> str:
    """Return the table as Markdown."""
    rows = [f"| {one.place} | {one.what} | {one.outcome} |" for one in listed()]
    return "\n".join(["| where | what goes wrong | what comes of it |", "|---|---|---|", *rows]) + "\n"


def page(text: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
