"""The command line as a user sees it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from robustmetric import cli
from robustmetric.cli.demo import DEFENSES
from robustmetric.robustness import load_record
from robustmetric.training import Stopped

PAPER = "R@1 ↑,R@2 ↑,mAP ↑,NMI ↑,CA+ ↑,CA− ↓,QA+ ↑,QA− ↓,TMA ↓,ES:D ↓,ES:R ↑,LTM ↑,GTM ↑,GTT ↑,ERS ↑"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]


def test_demo_trains_attacks_and_compares(tmp_path: Path) -> None:
    def demo() -> tuple[str, dict[str, object]]:
        options = ["--out", str(tmp_path), "--epochs", "2", "--queries", "12", "--seed", "1"]
        done = CliRunner().invoke(cli.app, ["demo", *options])
        assert done.exit_code == 0, (done.output, done.exception)
        trained = {str(f): f.read_bytes() for f in tmp_path.rglob("metrics.csv")}
        return done.output, trained | {str(f): f.stat().st_mtime_ns for f in tmp_path.rglob("record.json")}

    first, files = demo()
    assert len(files) == 4
    assert "797 digits that were not trained on, 12 of them attacked; ε = 0.2, pixels are in [0, 1]" in first
    (head,) = [cells(line) for line in first.splitlines() if line.startswith("┃")]
    assert head == ["", *PAPER.split(",")]
    found = [cells(line) for line in first.splitlines() if line.startswith("│")]
    rows = {name: row for name in DEFENSES for row in found if row[0].endswith(name)}
    values = {name: dict(zip(head[1:], row[1:], strict=True)) for name, row in rows.items()}
    assert len(values) == 2
    records = {}
    for name, folder in zip(DEFENSES, ("N-A-S", "HM-S-LGA-ICS"), strict=True):
        (file,) = (tmp_path / folder).rglob("record.json")
        record = records[name] = load_record(file)
        assert record.network.name.endswith(name)
        assert (record.settings.eps, record.settings.steps, record.queries.count) == (0.2, 32, 12)
        assert float(values[name]["R@1 ↑"]) == round(record["R@1"], 1)
        # Ten classes: chance is 10 %.
        assert record["R@1"] > 60
        assert record["GTM"] < record["R@1"]
        assert float(values[name]["ERS ↑"].split()[0]) == round(record["ERS"], 1)
        assert f"{name}: ERS {record['ERS']:.1f} (" in first
    assert records["HM[S,LGA]&ICS"]["ERS"] > records["N/A[S]"]["ERS"]

    second, again = demo()
    assert again == files, "something was made anew"
    compared = "797 digits"
    assert second.partition(compared)[2] == first.partition(compared)[2]


def test_without_a_command_the_help_is_shown() -> None:
    shown = CliRunner().invoke(cli.app, []).output
    for name in ("demo", "train", "evaluate", "attack", "compare", "recipes", "data"):
        assert name in shown


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


@pytest.mark.parametrize(("why", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("another worker", 130)])
def test_a_stopped_training_ends_with_the_code_of_its_signal(
    why: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise Stopped(why)

    monkeypatch.setattr("robustmetric.training.run.train", stopped)
    done = CliRunner().invoke(cli.app, ["train", "--out", str(tmp_path / "run")])
    assert done.exit_code == code
    assert f"stopped by {why}; go on with: robustmetric train --out" in done.output


def test_recipes_are_listed() -> None:
    listed = CliRunner().invoke(cli.app, ["recipes"]).output
    for name in ("28x28", "224x224-text", "224x224-code-strong", "digits"):
        assert name in listed
