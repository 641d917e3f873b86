"""Code that a run or a recipe file brings along, through the command line."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

import pytest
import torch

import robustmetric as rm
from robustmetric import usercode
from robustmetric.usercode import digest_of, files_below
from tests.cli.tables import ONE
from tests.helpers.command import refused, works
from tests.helpers.runs import make_run

NET = """
from pathlib import Path
from helper import WIDTH
from torch import nn

Path({marks!r}, "net").touch()

def net(channels=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 8 * 8, WIDTH))
"""
HELPER = """
from pathlib import Path
Path({marks!r}, "helper").touch()
WIDTH = 8
"""


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """The folder in which code leaves a mark when it is run."""
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def write_code(folder: Path, marks: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(NET.format(marks=str(marks)))
    (folder / "helper.py").write_text(HELPER.format(marks=str(marks)))


@pytest.fixture
def foreign(tmp_path: Path, marks: Path) -> Path:
    """A run that somebody else trained, with a network of a file."""
    run = make_run(tmp_path / "run", model="code/net.py:net", dim=None)
    write_code(run / "code", marks)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8))
    rm.save_weights(network, run / "last.safetensors")
    return run


TRAIN = ("--epochs", 1, "--steps", 1, "--batch", 512)
TRANSFER = ("--model", "c2f2", "--data", "digits", "--search", "transfer", "--surrogate", "RUN")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("evaluate", "RUN", *ONE), id="evaluate"),
        pytest.param(("evaluate", *TRANSFER, *ONE, "--out", "OUT"), id="surrogate"),
        pytest.param(("train", "--recipe", "RUN/recipe.yaml", *TRAIN, "--out", "OUT"), id="recipe"),
    ],
)
def test_foreign_code_is_listed_and_run_only_with_trust(
    words: tuple[object, ...], foreign: Path, marks: Path, tmp_path: Path
) -> None:
    arguments = [str(w).replace("RUN", str(foreign)).replace("OUT", str(tmp_path / "out")) for w in words]
    before = sorted(tmp_path.rglob("*"))
    said = refused(*arguments)
    assert "would run with all your rights" in said
    assert "--trust" in said
    for name in ("net.py", "helper.py"):
        assert str(foreign / "code" / name) in said
    folder = foreign if "--recipe" in arguments else foreign / "code"
    assert digest_of(files_below(foreign / "code"), folder) in said
    assert sorted(tmp_path.rglob("*")) == before, "something was run or written"
    works(*arguments, "--trust")
    assert {mark.name for mark in marks.iterdir()} == {"net", "helper"}
    assert "would run with all your rights" in refused(*arguments), "it was trusted once"


def test_any_changed_file_is_another_digest(foreign: Path) -> None:
    code = foreign / "code"
    digests = {digest_of(files_below(code), code)}
    for name, text in (("data.txt", "1"), ("helper.pyc", ""), ("data.txt", "2")):
        (code / name).write_text(text)
        digests.add(digest_of(files_below(code), code))
    (code / "helper.pyc").rename(code / "other.pyc")
    assert len({*digests, digest_of(files_below(code), code)}) == 5


def test_what_the_command_line_names_is_the_users_own(foreign: Path, marks: Path, tmp_path: Path) -> None:
    write_code(tmp_path / "home", marks)
    (foreign / "recipe.yaml").write_text("model: code/net.py:net\ndata: digits\nbatch: 512\n")
    own = ("--model", f"{tmp_path}/home/net.py:net", "--defense", "N/A[R]", "--epochs", 1)
    (foreign / "code" / "net.py").write_text("raise SystemExit('this was run')")
    said = works("train", "--recipe", foreign / "recipe.yaml", *own, "--out", tmp_path / "out")
    assert f"next: robustmetric evaluate {tmp_path / 'out'} --trust" in said
    defended = ("--defense", f"{tmp_path}/home/net.py:Defense", "--out", tmp_path / "other")
    refused_code = refused("train", "--recipe", foreign / "recipe.yaml", *defended)
    assert str(foreign / "code" / "net.py") in refused_code


def test_compiled_bytes_are_not_run(foreign: Path, marks: Path) -> None:
    helper = foreign / "code" / "helper.py"
    text = helper.read_bytes()
    cached = Path(py_compile.compile(str(helper), doraise=True) or "")
    evil = foreign / "evil.py"
    evil.write_bytes(text.replace(b'"helper"', b'"shadow"'))
    code = Path(py_compile.compile(str(evil), doraise=True) or "").read_bytes()
    cached.write_bytes(cached.read_bytes()[:16] + code[16:])  # it says that it is of the text as it stands
    usercode._IMPORTED.clear()
    sys.modules.pop("helper", None)
    rm.load_run(foreign, trust=True)
    assert {mark.name for mark in marks.iterdir()} == {"net", "helper"}
