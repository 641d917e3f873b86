"""Tables of results on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from robustmetric.cli.sheets import show_sheet
from robustmetric.cli.terminal import Terminal
from robustmetric.experiments.findings import Finding
from robustmetric.experiments.outcome import Outcome
from robustmetric.experiments.paper import experiment
from robustmetric.report.layout import Sheet
from robustmetric.report.tables import sheet
from tests.helpers.records import a_record


def made(name: str, seeds: int = 1) -> Sheet:
    """A table in which the second row collapsed and the third is not run."""
    about = experiment(name, seeds=range(seeds))
    outcomes = {1: Outcome(Path(), collapsed="R@1 fell [/b]"), 2: None}
    one = Outcome(Path(), a_record())
    findings = [Finding(row, (outcomes.get(k, one),) * seeds) for k, row in enumerate(about.rows)]
    return sheet(about, findings, "2 epochs")


def shown(table: Sheet, width: int) -> str:
    text = io.StringIO()
    show_sheet(Terminal(width=width, file=text, force_terminal=True, color_system=None), table)
    return re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table5", "table2", "table1", "figure1"])
@pytest.mark.parametrize("width", [80, 110, 160, 260])
@pytest.mark.parametrize("seeds", [1, 3])
def test_every_figure_is_shown_at_any_width(name: str, width: int, seeds: int) -> None:
    table = made(name, seeds)
    text = shown(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = text.split()
    for line in table.lines:
        for value in line.values:
            assert set(value.split()) <= set(words)
    parts = text.count("─\n") + text.count("─ \n")
    titles = [line for line in text.splitlines() if line.split()[:1] == ["data"]]
    heads = [cell for line in titles for cell in re.split(r"\s{2,}", line.strip())]
    assert sorted(head.name for head in table.heads) == sorted(h for h in heads if h not in (*table.keys, ""))
    assert width < 260 or parts == 1


@pytest.mark.slow
def test_what_counts_comes_first_where_not_all_fits() -> None:
    heads = [line for line in shown(made("table5"), 130).splitlines() if "data" in line]
    assert heads[0].split()[3::2] == ["R@1", "R@2", "mAP", "NMI", "ERS"]
    assert heads[1].split()[3::2][0] == "CA+"
    heads = [line for line in shown(made("table5"), 90).splitlines() if "data" in line]
    assert heads[0].split()[3::2][:2] == ["R@1", "ERS"]


def test_a_collapse_is_told_in_every_part() -> None:
    text = shown(made("table5"), 110)
    assert len(re.findall(r"ours +collapse *$", text, re.MULTILINE)) == text.count("data")
    assert len(re.findall(r"ours +not run *$", text, re.MULTILINE)) == text.count("data")
    assert text.startswith("Table 5 on cub: Intra-class structure (2 epochs)")
    assert "R@1 fell [/b]." in text
