"""The command line as a user sees it."""

import re

import pytest
from typer.testing import CliRunner

from robustmetric import cli


def test_demo_trains_attacks_and_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "EPOCHS", 1)
    monkeypatch.setattr(cli, "TRAINING", 1500)
    first, second = (CliRunner().invoke(cli.app, ["demo", "--seed", "1"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert "1500 digits to learn from, 297 others to query" in first.output
    rows = {
        name: [float(v) for v in re.findall(r"([\d.]+) %", line)]
        for name in ("N/A[S]", "HM[S,LGA]&ICS")
        for line in first.output.splitlines()
        if name in line and "%" in line
    }
    assert len(rows) == 2
    for clean, attacked in rows.values():
        # Ten classes: chance is 10 %.
        assert clean > 60
        assert attacked < clean
    assert rows["HM[S,LGA]&ICS"][1] > rows["N/A[S]"][1]
    assert re.findall(r"[\d.]+ %", second.output) == re.findall(r"[\d.]+ %", first.output)


def test_without_a_command_the_help_is_shown() -> None:
    assert "demo" in CliRunner().invoke(cli.app, []).output
