"""The command line as a user sees it."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import robustmetric as rm
from robustmetric import cli
from robustmetric.cli.app import COMMANDS, app
from robustmetric.cli.demo import DEFENSES
from robustmetric.errors import UserError
from robustmetric.evaluation import load_record
from robustmetric.training import CollapsedError, Stopped
from robustmetric.workers import WorkerError
from tests.helpers.command import cells, command, refused
from tests.helpers.pages import parsed

PAPER = "R@1 ↑,R@2 ↑,mAP ↑,NMI ↑,CA+ ↑,CA− ↓,QA+ ↑,QA− ↓,TMA ↓,ES:D ↓,ES:R ↑,LTM ↑,GTM ↑,GTT ↑,ERS ↑"

MADE = ("metrics.csv", "pictures.json", "report.html")


@pytest.mark.slow
def test_demo_trains_attacks_and_compares(tmp_path: Path) -> None:
    def demo() -> tuple[str, dict[str, object]]:
        options = ["--out", str(tmp_path), "--epochs", "2", "--queries", "12", "--seed", "1"]
        done = CliRunner().invoke(cli.app, ["demo", *options])
        assert done.exit_code == 0, (done.output, done.exception)
        trained = {str(f): f.read_bytes() for name in MADE for f in tmp_path.rglob(name)}
        return done.output, trained | {str(f): f.stat().st_mtime_ns for f in tmp_path.rglob("record.json")}

    first, files = demo()
    assert len(files) == 7
    assert "797 digits that were not trained on, 12 of them attacked; ε = 0.2, pixels are in [0, 1]" in first
    head, worst = [cells(line) for line in first.splitlines() if line.startswith("┃")]
    assert head == ["", *PAPER.split(",")]
    assert worst == ["goal", *(f"c2f2 {name}" for name in DEFENSES)]
    found = [cells(line) for line in first.splitlines() if line.startswith("│")]
    rows = {name: row for name in DEFENSES for row in found if row[0].endswith(name)}
    (left,) = [row for row in found if row[0] == "misrank ↑"]
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
        assert left[1 + len(records) - 1].startswith(f"{record['misrank']:.1f} (")
        assert record["misrank"] <= min(record[column] for column in ("ES:R", "LTM", "GTM"))
    assert records["HM[S,LGA]&ICS"]["ERS"] > records["N/A[S]"]["ERS"]

    page = parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert f"pictures, plots and checks are on one page: open {tmp_path / 'report.html'}" in first
    assert [one.one("h2").text for one in page.all("section", "head")] == [
        f"c2f2 {name}" for name in DEFENSES
    ]
    shown = [one.all("dd")[0].text for head in page.all("section", "head") for one in head.all("div")]
    assert shown == [f"{records[n][score]:.1f}" for n in DEFENSES for score in ("R@1", "ERS", "misrank")]
    assert len(page.all("article", "shot")) == 2 * 9 * 6
    assert all(page.has(name) for name in ("worst", "map", "training"))
    # A validation set of few digits is ranked as well by many weights: then the last ones are evaluated.
    weights = [record.network.weights for record in records.values()]
    assert all(
        page.by_id("tested").text.count(chosen) == weights.count(chosen) for chosen in weights if chosen
    )

    second, again = demo()
    assert again == files, "something was made anew"
    compared = "797 digits"
    assert second.partition(compared)[2] == first.partition(compared)[2]


HEAVY = ("torch", "lightning", "sklearn", "pandas", "numpy", "pydantic")
RUN = f"""
import sys
from robustmetric.cli import run
try:
    run()
finally:
    print("imported:", *(name for name in {HEAVY} if name in sys.modules))
"""


def start(*command: str) -> str:
    """Give what a command prints in a process of its own, 160 columns wide."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    return done.stdout


def test_the_help_lists_each_command_with_its_own_first_line() -> None:
    shown = start("-c", RUN, "--help")
    assert shown.endswith("imported:\n"), shown.splitlines()[-1]
    listed = re.findall(r"^│ ([a-z]+) +(\S.*?) +│$", shown.partition("Commands")[2], re.MULTILINE)
    for module in pkgutil.iter_modules(cli.__path__):
        importlib.import_module(f"robustmetric.cli.{module.name}")
    commands = typer.main.get_group(app).commands
    assert listed == [(name, (command.help or "").partition("\n\n")[0]) for name, command in commands.items()]
    modules = {name: command.callback.__module__ for name, command in commands.items() if command.callback}
    assert modules == {name: f"robustmetric.cli.{place.module}" for name, place in COMMANDS.items()}


def test_without_a_command_the_help_is_shown() -> None:
    bare, asked = (CliRunner().invoke(cli.app, arguments).output for arguments in ([], ["--help"]))
    assert bare.strip() == asked.strip() != ""


def test_the_version_is_told_without_torch() -> None:
    shown = start("-c", RUN, "--version")
    assert shown == f"robustmetric {rm.__version__}\ntorch {version('torch')}\nimported:\n"


def test_the_package_is_a_program() -> None:
    shown = start("-m", "robustmetric", "--help")
    assert "Usage: python -m robustmetric [OPTIONS] COMMAND" in shown
    assert set(re.findall(r"^│ ([a-z]+) ", shown, re.MULTILINE)) == COMMANDS.keys()
    assert "Usage: python -m robustmetric train [OPTIONS]" in start("-m", "robustmetric", "train", "--help")


def test_an_unknown_command_gets_the_nearest() -> None:
    done = CliRunner().invoke(cli.app, ["trian"])
    assert done.exit_code == 2
    assert "No such command 'trian'. Did you mean 'train'?" in done.output


# Errors


C2F2 = ("--model", "c2f2", "--data", "digits")
MENDED = "the batch [of 8] is too small: take 16"


def fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command `recipes NAME` raise this error."""

    def fail(_: str) -> str:
        raise error

    monkeypatch.setattr("robustmetric.cli.train.recipe_text", fail)


@pytest.mark.parametrize("kind", [UserError, FileNotFoundError, CollapsedError, WorkerError])
def test_what_a_person_can_mend_is_said_in_a_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_with(kind(MENDED), monkeypatch)
    said = command("recipes", "images")
    assert (said.code, said.err) == (1, f"error: {MENDED}\n")


@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError, RuntimeError, ZeroDivisionError])
def test_any_other_error_is_not_said_to_be_the_user_s(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_with(kind("of [bold] 3"), monkeypatch)
    said = command("recipes", "images")
    assert said.code == 1
    assert said.err.startswith("unexpected error in test_app.py, line ")
    assert f"{kind.__name__}: " in said.err
    assert "of [bold] 3" in said.err
    assert "no mistake of yours" in said.err
    assert "--debug" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("kind", [UserError, FileNotFoundError, ValueError])
@pytest.mark.parametrize(
    "arguments",
    [("--debug", "recipes", "images"), ("recipes", "--debug", "images"), ("recipes", "images", "--debug")],
)
def test_with_debug_every_error_keeps_its_traceback(
    kind: type[Exception], arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind(MENDED)
    fails_with(error, monkeypatch)
    with pytest.raises(kind) as raised:
        command(*arguments)
    assert raised.value is error


def test_debug_shows_a_traceback_in_a_process_of_its_own() -> None:
    shown = [
        subprocess.run(  # noqa: S603
            [sys.executable, "-m", "robustmetric", "recipes", "image", *more],
            capture_output=True,
            text=True,
            check=False,
        )
        for more in ([], ["--debug"])
    ]
    assert [done.returncode for done in shown] == [1, 1]
    assert ["Traceback" in done.stderr for done in shown] == [False, True]
    assert all("unknown recipe 'image' (did you mean 'images'?)" in done.stderr for done in shown)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["train", "--out", "FILE"], "--out"),
        (["evaluate", *C2F2, "--alpha", "0", "--out", "OUT"], "--alpha"),
        (["evaluate", *C2F2, "--attacks", "ES,ES", "--out", "OUT"], "--attacks"),
        (["evaluate", *C2F2, "--size", "0", "--out", "OUT"], "--size"),
        (["attack", *C2F2, "--attack", "ES", "--out", "FILE"], "--out"),
        (["attack", *C2F2, "--attack", "ES", "--seed", "-1", "--out", "O"], "--seed"),
    ],
)  # fmt: skip
def test_the_flag_of_a_parameter_stands_behind_the_message(
    arguments: list[str], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("no folder")
    out = ["--out", "OUT"] if "--out" not in arguments else []
    said = refused(*arguments, *out)
    assert said.endswith(f" ({flag})\n")
    assert "--" not in said.removesuffix(f"({flag})\n"), "the library speaks of a flag"


def test_a_parameter_that_is_no_flag_of_the_command_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for parameter in ("name", "out", "nonsense"):  # an argument without a flag, one of others, of none
        fails_with(UserError(MENDED, parameter=parameter), monkeypatch)
        assert command("recipes", "images").err == f"error: {MENDED}\n"


@pytest.mark.parametrize("error", ["ValueError", "OSError", "KeyError"])
def test_the_user_s_own_code_is_shown_where_it_failed(error: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, images):\n"
        "        if len(images) > 1:\n"
        f"            raise {error}('not more than one [image]')\n"
        "        return images.flatten(1)\n"
    )
    arguments = [
        "evaluate",
        "--model",
        f"{tmp_path / 'net.py'}:Net",
        "--data",
        "digits",
        "--out",
        tmp_path / "out",
    ]
    said = command(*arguments)
    assert said.code == 1
    assert "not more than one [image]" in said.err
    assert said.err.count("Traceback") == said.err.count("line 5, in forward") == 1
    assert "no mistake of yours" not in said.err


@pytest.mark.slow
def test_loggers_by_name(tmp_path: Path) -> None:
    options = ["--epochs", "1", "--steps", "1", "--logger", "tensorboard", "--logger", "csv"]
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
