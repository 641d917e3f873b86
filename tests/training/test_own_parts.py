"""A network, a data set and a logger of the user's own, through the command line, from any folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from robustmetric import cli, load_record
from robustmetric.training.runs import RunFolder

NET = """
from torch import nn
from width import WIDTH

def build(dim=WIDTH, channels=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 8 * 8, dim))
"""
SETS = """
from robustmetric.data import ImageSet, load

def mine(root, split, first=200):
    some = load("digits", root, split).take(range(first))
    return ImageSet("mine", split, some.labels, some.classes, pixels=some.pixels)
"""
LOGS = """
from lightning.pytorch.loggers import CSVLogger

class Mine(CSVLogger):
    def __init__(self, out):
        super().__init__(out, name="mine", version="")
"""
TRAIN = ["--defense", "N/A[R]", "--recipe", "digits", "--batch", 128, "--epochs", 1, "--out", "run"]
EVALUATE = ["--queries", 8, "--steps", 1, "--attacks", "CA+", "--checks", "none"]


def call(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [*map(str, arguments)])


def works(*arguments: object) -> str:
    done = call(*arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return str(done.output)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"net.py": NET, "sets.py": SETS, "logs.py": LOGS, "width.py": "WIDTH = 16\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_parts_of_ones_own_from_training_to_scores(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--model", "net.py:build", "--data", "sets.py:mine(first=150)", "--logger", "logs.py:Mine"]
    shown = works("train", *own, *TRAIN)
    assert "learns from 130 images of 10 classes" in shown
    assert (home / "run" / "mine" / "metrics.csv").is_file()
    for file in home.glob("*.py"):
        file.unlink()
    shutil.move(home / "run", home / "moved")
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    works("evaluate", "../moved", *EVALUATE)
    record = load_record(home / "moved" / "evaluation")
    assert record.data.images == 150
    works("train", "--out", "../moved", "--resume", "--epochs", 2)
    assert "epochs: 2" in RunFolder(home / "moved").recipe_file.read_text()


@pytest.mark.slow
def test_the_whole_command_again_goes_on(home: Path) -> None:
    own = ["--model", "net.py:build", "--data", "sets.py:mine"]
    works("train", *own, *TRAIN)
    works("train", *own, *TRAIN, "--resume")
    done = call("train", *own, *TRAIN, "--resume", "--model", "net.py:build(dim=8)")
    assert "model was 'net.py:build', is 'net.py:build(dim=8)'" in str(done.exception)


def test_a_network_of_ones_own_with_weights_of_its_own(home: Path) -> None:
    works("train", "--model", "net.py:build(dim=12)", *TRAIN)
    given = ["--model", "net.py:build(dim=12)", "--weights", "run/last.safetensors", "--data", "digits"]
    works("evaluate", *given, *EVALUATE, "--out", "scores")
    assert load_record(home / "scores").network.name == "net.py:build(dim=12) last.safetensors"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "net.py:bild"], "unknown name 'bild' (did you mean 'build'?)"),
        (["--model", "net.py:build(depth=2)"], "'depth'; its options: dim"),
        (["--model", "c2f2", "--data", "sets.py:mine(last=3)"], "has no option 'last'; its options: "),
        (["--data", "setz.py:mine"], "there is no file setz.py to take the data set from"),
        (["--data", "digitz"], "unknown data set 'digitz' (did you mean 'digits'?)"),
        (["--logger", "logs.py:Your"], "unknown name 'Your'"),
        (["--logger", "logs.py:Mine(depth=3)"], "'depth'; its options: none"),
    ],
)
def test_parts_that_cannot_be_made_leave_nothing(arguments: list[str], told: str, home: Path) -> None:
    done = call("train", *TRAIN, *arguments)
    assert done.exit_code == 1
    assert told in str(done.exception)
    assert not (home / "run").exists()
