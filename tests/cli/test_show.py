"""Scores, checks and the worst case on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from robustmetric import load_record
from robustmetric.cli.show import show_checks, show_scores, show_suite
from robustmetric.cli.terminal import Terminal
from tests.cli.tables import BEFORE, expected, scores_in
from tests.helpers.command import cells, works
from tests.helpers.records import a_record, altered

SUITE = "worst-case(steps=2, targets=1, trials=4)"


def terminal(width: int, *, real: bool = True) -> tuple[Terminal, io.StringIO]:
    text = io.StringIO()
    return Terminal(width=width, file=text, force_terminal=real, color_system=None), text


@pytest.mark.parametrize("width", [80, 100, 137, 160])
def test_all_figures_are_shown_at_any_width(whole: tuple[Path, str], width: int) -> None:
    record = load_record(whole[0])
    console, text = terminal(width)
    show_scores(console, [record, record], ["one", "other"])
    wanted = expected(record)["c2f2 N/A[S]"]
    assert scores_in(text.getvalue()) == {"one": wanted, "other": wanted}
    assert max(map(len, text.getvalue().splitlines())) <= width
    console, text = terminal(width)
    show_scores(console, [record])
    assert scores_in(text.getvalue())[BEFORE] == expected(record)[BEFORE]


def test_an_ers_that_is_not_valid_or_not_checked_is_marked() -> None:
    passed = {"name": "noise", "status": "pass", "figure": 0.0, "limit": "", "says": ""}
    bare, checked = a_record(), altered(a_record(), checks=[passed])
    failed = altered(checked, checks=[{**passed, "status": "fail"}])
    for record, told in ((bare, "not checked: "), (failed, "the ERS is not valid: "), (checked, None)):
        console, text = terminal(200)
        show_scores(console, [record])
        found = [one for one in ("not checked: ", "the ERS is not valid: ") if one in text.getvalue()]
        assert found == ([] if told is None else [told])


@pytest.mark.parametrize("width", [60, 80, 160])
def test_checks_fit_and_lose_no_word(whole: tuple[Path, str], width: int) -> None:
    record = load_record(whole[0])
    console, text = terminal(width)
    show_checks(console, record)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = [word for line in lines if line.startswith("│") for word in cells(line)[3].split()]
    assert words == [w for c in record.checks for w in f"{c.says} allowed: {c.limit}".split()]


@pytest.mark.slow
def test_the_worst_case_has_the_values_of_the_record(run: Path, tmp_path: Path) -> None:
    how = ("--queries", 12, "--steps", 2, "--checks", "none", "--attacks", "ES,GTM", "--suite", SUITE)
    works("evaluate", run, "--out", tmp_path / "one", *how)
    works("evaluate", run, "--out", tmp_path / "two", *how, "--devices", 2)
    for name in ("record.json", "queries.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    record = load_record(tmp_path / "one")
    assert record.suite is not None
    console, text = terminal(160)
    show_suite(console, [record], [record.network.name])
    rows = [cells(line) for line in text.getvalue().splitlines() if line.startswith("│")]
    wanted = []
    for name, goal in record.suite.goals.items():
        column = record.goal_column(name)
        before, value, low, high, alone = (
            column.show(v) for v in (goal.before, goal.value, goal.low, goal.high, goal.alone)
        )
        wanted.append([record.network.name, column.heading, before, value, f"{low} to {high}", alone])
    assert [row for row in rows if len(row) == 6 and row[1].endswith(("↑", "↓"))] == wanted
    # Attacks that broke nothing are in one line, so that the passes of a goal add up.
    passes = [int(row[2].replace(",", "") or 0) for row in rows if len(row) == 3]
    assert sum(passes) == 2 * record.suite.forward
    console, text = terminal(100)
    show_suite(console, [record, record], ["one", "other"])
    assert text.getvalue().count("│ one") == text.getvalue().count("│ other") == len(wanted)
    assert "broke first" not in text.getvalue()
