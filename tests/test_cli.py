"""The command line as a user sees it."""

import re
from pathlib import Path

from typer.testing import CliRunner

from robustmetric import cli


def test_demo_trains_attacks_and_compares(tmp_path: Path) -> None:
    first, second = (
        CliRunner().invoke(cli.app, ["demo", "--out", str(tmp_path), "--epochs", "1", "--seed", "1"])
        for _ in range(2)
    )
    assert first.exit_code == 0, first.output
    assert "797 digits that were not trained on" in first.output
    rows = {
        name: [float(v) for v in re.findall(r"([\d.]+) %", line)]
        for name in cli.DEFENSES
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


def test_loggers_by_name(tmp_path: Path) -> None:
    options = ["--epochs", "1", "--eta", "1", "--logger", "tensorboard", "--logger", "csv"]
    done = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "run"), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))
    (figures,) = (tmp_path / "run" / "csv").rglob("metrics.csv")
    assert "hardness/reached" in figures.read_text()
    missing = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "other"), "--logger", "wandb"])
    assert isinstance(missing.exception, ValueError)
    assert "the logger wandb needs a package that is not installed" in str(missing.exception)


def test_recipes_are_listed() -> None:
    listed = CliRunner().invoke(cli.app, ["recipes"]).output
    for name in ("28x28", "224x224-text", "224x224-code-strong", "digits"):
        assert name in listed
