"""The command line as a user sees it: its help, errors and signals."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import typer.main

from robustmetric.cli import options
from robustmetric.cli.app import COMMANDS, app
from robustmetric.cli.demo import DEFENSES
from robustmetric.cli.terminal import Terminal
from robustmetric.data import DATA
from robustmetric.errors import UserError
from robustmetric.evaluation import load_record
from robustmetric.models import MODELS
from robustmetric.models.c2f2 import C2F2
from robustmetric.training import CollapsedError, Stopped
from robustmetric.workers import WorkerError
from tests.cli.tables import ONE
from tests.helpers.command import cells, command, refused, works
from tests.helpers.pages import parsed
from tests.helpers.processes import at_call, stop_by

TRAIN = ("train", "--data", "digits", "--epochs", 1, "--steps", 1)
NETWORK = ("evaluate", "--model", "c2f2", "--data", "digits", *ONE)
MENDED = "the batch [of 8] is too small: take 16"

# The help

HEAVY = ("torch", "lightning", "sklearn", "pandas", "numpy", "pydantic")
PROGRAM = f"""
import sys
from robustmetric.cli import run
try:
    run()
finally:
    print("imported:", *(name for name in {HEAVY} if name in sys.modules))
"""


@pytest.mark.parametrize("argument", ["-h", "--version"])
def test_the_first_help_imports_nothing_heavy(argument: str) -> None:
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.endswith("imported:\n"), done.stdout.splitlines()[-1]
    shown = [*re.findall(r"^│ ([a-z]+) ", done.stdout, re.MULTILINE)]
    assert shown == list(COMMANDS) if argument == "-h" else f"torch {version('torch')}" in done.stdout


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    for module, _ in COMMANDS.values():
        importlib.import_module(f"robustmetric.cli.{module}")
    return dict(typer.main.get_group(app).commands)


def test_the_table_has_the_module_and_the_first_line_of_each_command(commands: dict[str, Any]) -> None:
    assert len(COMMANDS) == 13
    for name, (module, line) in COMMANDS.items():
        assert commands[name].callback.__module__ == f"robustmetric.cli.{module}"
        assert commands[name].help.partition("\n\n")[0] == line


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_on_two_screens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = works(name, "-h").splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 100
    assert "<bool>" not in "".join(lines)


def test_names_in_the_help_are_those_that_there_are() -> None:
    for declared, names in ((options.Data, DATA), (options.Model, MODELS)):
        told = get_args(declared)[1].help
        assert re.findall(r"[\w-]+(?=, | or )", told.replace("timm:NAME or", ""))[: len(names)] == sorted(
            names
        )


# Tables


def test_a_piped_table_is_split_at_100_columns() -> None:
    text = io.StringIO()
    terminal = Terminal(file=text)
    assert terminal.width <= 100
    head, row = [f"figure {k} ↑" for k in range(14)], [f"{k}.0" for k in range(14)]
    terminal.table(["", *head], [["a network", *row]])
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    heads, rows = ([c for line in lines if line.startswith(edge) for c in cells(line)[1:]] for edge in "┃│")
    assert (heads, rows) == (head, row)


# Errors


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command `recipes NAME` raise this error."""

    def fail(_: str) -> str:
        raise error

    monkeypatch.setattr("robustmetric.cli.train.recipe_text", fail)


@pytest.mark.parametrize("kind", [UserError, FileNotFoundError, CollapsedError, WorkerError])
def test_what_the_user_can_fix_is_one_line(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    failing(kind(MENDED), monkeypatch)
    said = command("recipes", "images")
    assert (said.code, said.err) == (1, f"error: {MENDED}\n")


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError])
def test_any_other_error_is_a_fault_of_ours(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    failing(kind("of [bold] 3"), monkeypatch)
    said = command("recipes", "images")
    assert said.code == 1
    assert said.err.startswith("unexpected error in test_app.py, line ")
    assert "of [bold] 3" in said.err
    assert "--debug" in said.err
    assert "Traceback" not in said.err
    with pytest.raises(kind):
        command("recipes", "images", "--debug")


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        ((*TRAIN, "--lr", "nan"), "(--lr)"),
        ((*TRAIN, "--set", "resize=2"), "(--set resize)"),
        ((*NETWORK, "--dim", 10**12), "from 1 to 65536, not 1000000000000 (--dim)"),
        ((*NETWORK, "--size", 10**6), "from 1 to 4096, not 1000000 (--size)"),
        ((*NETWORK, "--size", 0), "(--size)"),
        ((*NETWORK, "--eps", "8"), "not 8.0"),
        ((*NETWORK, "--steps", 0), "(--steps)"),
        ((*NETWORK, "--devices", 0), "not 0 (--devices)"),
        ((*NETWORK, "--seed", 2**70), "(--seed)"),
        ((*NETWORK, "--address", "auto"), "--on ray"),
    ],
)
def test_the_flag_of_a_bad_value_is_named(arguments: tuple[object, ...], about: str, tmp_path: Path) -> None:
    assert about in refused(*arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--device", "tpu"), ("--split", "train"), ("--eps", "1/0"), ("--protocol", "strickt"), ("--fit", "x")],
)
def test_a_value_that_is_no_choice_or_number_is_a_wrong_usage(flag: str, value: str, tmp_path: Path) -> None:
    said = command(*NETWORK, flag, value, "--out", tmp_path / "out")
    assert said.code == 2
    assert flag in said.err
    assert value in said.err


@pytest.mark.parametrize("shape", [10**18, 10**30])
def test_memory_that_runs_out_anywhere(shape: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((MemoryError, RuntimeError, TypeError)) as raised:
        _ = np.empty(shape) if shape < 10**20 else torch.empty(shape)
    failing(raised.value, monkeypatch)
    assert "not enough memory" in refused("recipes", "images")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EISDIR, errno.EMFILE])
def test_an_error_of_the_system_names_the_file(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(OSError(number, os.strerror(number), "images/[a].png"), monkeypatch)
    said = refused("recipes", "images")
    assert f"images/[a].png: {os.strerror(number)}; " in said
    assert "Errno" not in said


def test_errors_in_code_of_the_user_are_shown_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, images):\n"
        "        raise KeyError('no [image]')\n"
    )
    out = ("--data", "digits", "--out", tmp_path / "out")
    said = command("evaluate", "--model", f"{tmp_path / 'net.py'}:Net", *out)
    assert said.code == 1
    assert "no [image]" in said.err
    assert said.err.count("Traceback") == said.err.count("line 4, in forward") == 1


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_an_output_of_any_encoding_is_written_to(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    show = [sys.executable, "-m", "robustmetric", "evaluate", "-h"]
    done = subprocess.run(show, env=environment, capture_output=True, check=False, timeout=600)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u03b5" in done.stdout  # ε


# Signals


@pytest.fixture
def heard() -> Iterator[None]:
    """Hear Ctrl-C, as in a terminal: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM, None])
def test_the_first_signal_ends_a_command_with_its_code(
    number: signal.Signals,
    code: int,
    again: signal.Signals | None,
    heard: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(_: str) -> str:
        try:
            stop_by(number)()
        finally:
            if again is not None:  # during the clean-up
                signal.raise_signal(again)
        return ""

    monkeypatch.setattr("robustmetric.cli.train.recipe_text", stopped)
    said = command("recipes", "images")
    assert (said.code, said.out) == (code, "")
    assert said.err == "stopped; what is finished is kept: run the same command again to resume\n"


@pytest.mark.parametrize(("why", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("another worker", 130)])
def test_a_stopped_training_ends_with_the_code_of_its_signal(
    why: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise Stopped(why)

    monkeypatch.setattr("robustmetric.training.run.train", stopped)
    assert command("train", "--out", tmp_path / "run").code == code


@pytest.mark.slow
def test_a_pipe_that_closes_ends_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "robustmetric", "recipes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert started.stderr.read() == b""


# The demo

MADE = ("metrics.csv", "pictures.json", "report.html")


@pytest.mark.slow
def test_the_demo_trains_attacks_compares_and_resumes(tmp_path: Path, heard: None) -> None:
    options = ("demo", "--out", tmp_path, "--epochs", 2, "--queries", 12, "--seed", 1)
    for call in (3, 40):  # while it trains, while it evaluates
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(C2F2, "forward", at_call(call, stop_by(signal.SIGTERM), C2F2.forward))
            assert command(*options).code == 143
    printed = works(*options)
    files = {str(f): f.read_bytes() for name in MADE for f in tmp_path.rglob(name)}
    assert len(files) == 5
    shown = printed.partition("797 digits")[2]
    assert len(shown.splitlines()) <= 25
    rows = {row[0]: row for row in map(cells, shown.splitlines()) if len(row) > 1}
    records = {}
    for name, folder in zip(DEFENSES, ("N-A-S", "HM-S-LGA-ICS"), strict=True):
        record = records[name] = load_record(next((tmp_path / folder).rglob("record.json")))
        assert (record.settings.eps, record.settings.steps, record.queries.count) == (0.2, 32, 12)
        assert rows[f"c2f2 {name}"][1] == f"{record['R@1']:.1f}"
        assert rows[f"c2f2 {name}"][2].startswith(f"{record['ERS']:.1f}")
        assert rows[f"c2f2 {name}"][3].startswith(f"{record['misrank']:.1f}")
        assert record["R@1"] > 60  # chance is 10 %
        assert record["misrank"] <= min(record[column] for column in ("ES:R", "LTM", "GTM"))
    assert records["HM[S,LGA]&ICS"]["ERS"] > records["N/A[S]"]["ERS"]
    page = parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [one.one("h2").text for one in page.all("section", "head")] == [f"c2f2 {n}" for n in DEFENSES]
    works(*options)
    assert {str(f): f.read_bytes() for name in MADE for f in tmp_path.rglob(name)} == files
