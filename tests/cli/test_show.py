"""Scores and progress on a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from robustmetric import attack, load_record
from robustmetric.attacks import DISTANCE, Column
from robustmetric.cli.show import show_checks, show_scores
from robustmetric.cli.terminal import Terminal
from robustmetric.evaluation import Record
from tests.cli.tables import BEFORE, expected, scores_in
from tests.helpers.command import works
from tests.helpers.records import a_record, altered


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("QA-(m=5)", ["QA−(m=5) ↓"]),
        ("CA-(w=5)", ["CA−(w=5) ↓"]),
        ("CA+(w=5)", ["CA+(w=5) ↑"]),
        ("QA+", ["QA+ ↑"]),
        ("SP-QA+(m=2)", ["SP-QA+(m=2) ↑", "SP-QA+(m=2):keep"]),
        ("SP-QA-", ["SP-QA− ↓", "SP-QA−:keep"]),
        ("ES", ["ES:D ↓", "ES:R ↑"]),
    ],
)
def test_arrows_point_to_the_better_side(name: str, shown: list[str]) -> None:
    assert [column.heading for column in attack(name).columns] == shown


def test_the_arrow_of_a_column_of_ones_own() -> None:
    columns = [Column("MY:D", "lower", DISTANCE), Column("MY:R", "higher"), Column("mine", None)]
    assert [column.heading for column in columns] == ["MY:D ↓", "MY:R ↑", "mine"]


def shown(record: Record, width: int) -> str:
    text = io.StringIO()
    show_scores(Console(width=width, file=text, force_terminal=True, color_system=None), [record])
    return re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())


@pytest.mark.parametrize(("width", "count"), [(160, 1), (110, 2)])
def test_a_narrow_terminal_gets_two_tables(whole: tuple[Path, str], width: int, count: int) -> None:
    record = load_record(whole[0])
    text = shown(record, width)
    assert text.count("┏") == count
    rows = scores_in(text)
    assert rows["c2f2 N/A[S]"] == expected(record)["c2f2 N/A[S]"]
    assert rows[BEFORE]["TMA ↓"] == expected(record)[BEFORE]["TMA ↓"]
    assert max(map(len, text.splitlines())) <= width


def test_what_was_not_checked_or_failed_is_said_beside_the_ers() -> None:
    passed = {"name": "noise", "status": "pass", "figure": 0.0, "limit": "", "says": ""}
    bare, checked = a_record(), altered(a_record(), checks=[passed])
    failed = altered(checked, checks=[{**passed, "status": "fail"}])
    for told in (lambda record: shown(record, 200), str):
        assert ("checked" in told(bare), "not valid" in told(bare)) == (True, False)
        assert "only collapse" in told(bare)
        assert "only collapse" not in told(checked)
        assert "not valid" not in told(checked)
        assert "not valid: the check noise failed" in told(failed)


@pytest.mark.parametrize("width", [80, 100, 125, 131, 133, 135, 137])
def test_no_figure_is_cut_at_any_width(whole: tuple[Path, str], width: int) -> None:
    record = load_record(whole[0])
    text = shown(record, width)
    assert "…" not in text
    for row in expected(record).values():
        for value in row.values():
            for word in value.split():
                assert word in text


@pytest.mark.parametrize(
    ("width", "beside"), [(60, False), (80, False), (119, False), (120, True), (160, True)]
)
def test_checks_fit_on_the_terminal(whole: tuple[Path, str], width: int, beside: bool) -> None:
    record, text = load_record(whole[0]), io.StringIO()
    show_checks(Terminal(width=width, file=text, color_system=None), record)
    head, *lines = text.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    assert ("allowed" in head) == beside
    found = head.index("what was found")
    begins = [number for number, line in enumerate(lines) if line[1] != " "] + [len(lines)]
    for number, check in enumerate(record.checks):
        part = lines[begins[number] : begins[number + 1]]
        assert part[0].split()[:2] == [check.name, check.status.split()[0]]
        if beside:
            allowed = head.index("allowed")
            assert one_line(line[found:allowed] for line in part) == check.says
            assert one_line(line[allowed:] for line in part) == check.limit
        else:
            assert one_line(line[found:] for line in part) == f"{check.says} allowed: {check.limit}"
    assert len(begins) == len(record.checks) + 1


def one_line(parts: Iterable[str]) -> str:
    return " ".join(" ".join(parts).split())


def test_the_width_of_the_terminal_counts(whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert works("compare", whole[0]).count("┏") == 2
    monkeypatch.setenv("COLUMNS", "170")
    assert works("compare", whole[0]).count("┏") == 1
