"""Code that a run or a recipe file brings along, through the command line."""

from __future__ import annotations

import hashlib
import py_compile
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import robustmetric as rm
from robustmetric import trust, usercode
from robustmetric.defenses import defense
from robustmetric.errors import UserError
from robustmetric.models import NetworkSource
from robustmetric.training.code import admit_files
from robustmetric.training.recipe import load_recipe
from tests.cli.tables import ONE
from tests.helpers.command import command, refused, works
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
SHADOW = """
from pathlib import Path
Path({marks!r}, "shadow").touch()
"""


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which code leaves a mark when it is run; the user trusts nothing yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
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


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_told(said: str, folder: Path, marks: Path) -> None:
    """Each file is named with its digest, what it would do and the way on; nothing was run."""
    assert "would run with all your rights" in said
    for name in ("net.py", "helper.py"):
        assert f"{digest(folder / name)}  {folder / name}" in said
    assert "--trust" in said
    assert not any(marks.iterdir())


COMMANDS = {
    "evaluate": ("evaluate", "RUN", *ONE),
    "attack": ("attack", "RUN", "--attack", "ES", "--queries", 2, "--steps", 1, "--out", "OUT"),
    "surrogate": (
        "evaluate",
        "--model",
        "c2f2",
        "--data",
        "digits",
        "--search",
        "transfer",
        "--surrogate",
        "RUN",
        *ONE,
        "--out",
        "OUT",
    ),
    "resume": ("train", "--resume", "--out", "RUN", "--epochs", 1, "--steps", 1, "--batch", 512),
    "recipe": (
        "train",
        "--recipe",
        "RUN/recipe.yaml",
        "--epochs",
        1,
        "--steps",
        1,
        "--batch",
        512,
        "--out",
        "OUT",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "evaluate",
        "attack",
        "surrogate",
        "resume",
        "recipe",
    ],
)
def test_foreign_code_is_named_and_run_only_if_trusted(
    name: str, foreign: Path, marks: Path, tmp_path: Path
) -> None:
    places = {"RUN": str(foreign), "OUT": str(tmp_path / "out")}
    arguments = [str(part).replace("RUN", places["RUN"]) for part in COMMANDS[name]]
    arguments = [places.get(part, part) for part in arguments]
    before = sorted(tmp_path.rglob("*"))
    check_told(refused(*arguments), foreign / "code", marks)
    assert sorted(tmp_path.rglob("*")) == before
    changed = command(*arguments, "--trust")
    if name == "resume":  # it is another batch than the run's, which is told after its code was trusted
        assert "batch was" in changed.err
    else:
        assert changed.code == 0, changed.err
        assert {mark.name for mark in marks.iterdir()} == {"net", "helper"}
    store = tmp_path / "data" / "robustmetric" / "trusted"
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert {digest(f) for f in (foreign / "code").glob("*.py")} <= set(store.read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["net.py", "helper.py"])
def test_what_is_trusted_stays_so_until_it_changes(changed: str, foreign: Path, marks: Path) -> None:
    rm.load_run(foreign, trust=True)
    moved = foreign.rename(foreign.with_name("moved"))
    rm.load_run(moved)
    with (moved / "code" / changed).open("a") as file:
        file.write("# and more\n")
    trust.known.digests.clear()
    with pytest.raises(trust.UntrustedError, match=digest(moved / "code" / changed)) as raised:
        rm.load_run(moved)
    other = {"net.py", "helper.py"} - {changed}
    assert f"/{other.pop()}" not in str(raised.value), "a file that is trusted is listed"
    rm.load_run(moved, trust=True)


@pytest.mark.slow
def test_ones_own_runs_need_no_flag(tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_code(tmp_path / "home", marks)
    quick = ("--epochs", 1, "--batch", 512, "--defense", "N/A[R]")
    works("train", "--model", f"{tmp_path}/home/net.py:net", *quick, "--out", tmp_path / "run")
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "run").rename(tmp_path / "moved")
    trust.known.digests.clear()
    works("evaluate", tmp_path / "moved", *ONE)
    works("train", "--resume", "--out", tmp_path / "moved", "--epochs", 2)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "of another user"))
    trust.known.digests.clear()
    assert "would run with all your rights" in refused("evaluate", tmp_path / "moved", *ONE)


def test_a_store_that_cannot_be_written_is_told(
    tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null/data")
    write_code(tmp_path / "home", marks)
    quick = ("--epochs", 1, "--batch", 512, "--defense", "N/A[R]")
    said = works("train", "--model", f"{tmp_path}/home/net.py:net", *quick, "--out", tmp_path / "run")
    assert "/dev/null/data/robustmetric/trusted cannot be written" in said
    assert "--trust" in said
    trust.known.digests.clear()
    assert "--trust" in refused("evaluate", tmp_path / "run", *ONE)
    works("evaluate", tmp_path / "run", *ONE, "--trust")


def test_what_the_command_line_names_is_the_user_s(foreign: Path, marks: Path, tmp_path: Path) -> None:
    write_code(tmp_path / "home", marks)
    (foreign / "recipe.yaml").write_text("model: code/net.py:net\ndata: digits\nbatch: 512\n")
    own = ("--model", f"{tmp_path}/home/net.py:net", "--defense", "N/A[R]", "--epochs", 1)
    (foreign / "code" / "net.py").write_text("raise SystemExit('this was run')")
    works("train", "--recipe", foreign / "recipe.yaml", *own, "--out", tmp_path / "out")
    defended = ("--defense", f"{tmp_path}/home/net.py:Defense", "--out", tmp_path / "other")
    assert str(foreign / "code" / "net.py") in refused(
        "train", "--recipe", foreign / "recipe.yaml", *defended
    )


def test_compiled_bytes_are_not_run(foreign: Path, marks: Path) -> None:
    rm.load_run(foreign, trust=True)
    trust.known.folders.clear()
    helper = foreign / "code" / "helper.py"
    text, times = helper.read_bytes(), helper.stat()
    cached = Path(py_compile.compile(str(helper), doraise=True) or "")
    evil = foreign / "evil.py"
    evil.write_bytes(text.replace(b"'helper'", b"'shadow'").replace(b'"helper"', b'"shadow"'))
    assert evil.stat().st_size == len(text)
    code = Path(py_compile.compile(str(evil), doraise=True) or "").read_bytes()
    cached.write_bytes(cached.read_bytes()[:16] + code[16:])  # it says that it is of the text as it stands
    assert helper.stat().st_mtime_ns == times.st_mtime_ns
    (marks / "helper").unlink()
    forget_modules()
    rm.load_run(foreign)
    assert {mark.name for mark in marks.iterdir()} == {"net", "helper"}


def forget_modules() -> None:
    """Let what tests imported be imported anew."""
    usercode._IMPORTED.clear()
    for name in ("helper", "colorsys", "not_installed_anywhere"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        pytest.param(
            "not_installed_anywhere.py",
            "__import__('not_installed_' + 'anywhere')",
        ),
        pytest.param(
            "colorsys.py",
            "import colorsys",
        ),
        pytest.param(
            "helper/__init__.py",
            "",
        ),
    ],
)
def test_what_no_list_showed_is_stopped_when_it_is_imported(
    name: str, line: str, foreign: Path, marks: Path
) -> None:
    net = foreign / "code" / "net.py"
    net.write_text(net.read_text() + f"\n{line}\n")
    forget_modules()
    trust.remember(digest(file) for file in (foreign / "code").glob("*.py"))
    trust.known.digests.clear()
    shadow = foreign / "code" / name
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text(SHADOW.format(marks=str(marks)) + "WIDTH = 8\n")
    said = refused("evaluate", foreign, *ONE)
    assert f"{digest(shadow)}  {shadow}" in said
    assert "--trust" in said
    assert not (marks / "shadow").exists()
    forget_modules()
    works("evaluate", foreign, *ONE, "--trust")
    assert (marks / "shadow").exists()
    forget_modules()
    trust.known.folders.clear()
    rm.load_run(foreign)


@pytest.mark.parametrize("name", ["colorsys.py", "colorsys/__init__.py"])
def test_a_link_to_code_elsewhere_is_stopped(name: str, foreign: Path, marks: Path) -> None:
    net = foreign / "code" / "net.py"
    net.write_text(net.read_text() + "\nimport colorsys\n")
    forget_modules()
    trust.remember(digest(file) for file in (foreign / "code").glob("*.py"))
    trust.known.digests.clear()
    elsewhere = foreign.parent / "elsewhere" / name
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_text(SHADOW.format(marks=str(marks)))
    link = foreign / "code" / Path(name).parts[0]
    link.symlink_to(foreign.parent / "elsewhere" / Path(name).parts[0])
    assert f"{digest(elsewhere)}  {foreign / 'code' / name}" in refused("evaluate", foreign, *ONE)
    assert not (marks / "shadow").exists()


@pytest.mark.slow
def test_workers_do_not_ask_again(foreign: Path, marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null/data")
    works("evaluate", foreign, *ONE, "--trust", "--devices", 2)


# Which files a text names

PIECES = st.sampled_from(
    [
        "a.py:S",
        "b.py:T",
        "HM[",
        "N/A[",
        "]",
        ",",
        "&",
        "(",
        ")",
        "'",
        '"',
        ":",
        "k=1",
        "k='c.py:Z'",
        "x/",
        "a:b.py:c/",
        " ",
        "LGA",
        "S",
        "gB(",
        "ICS",
        ".py",
        "\n",
        "c.py",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(["defense", "model", "data"]))
def test_no_other_file_is_imported_than_the_list_shows(text: str, key: str) -> None:
    listed: list[Path] = []
    imported: list[Path] = []

    def note(_: str, file: Path) -> None:
        imported.append(file)
        raise UserError("not here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("robustmetric.registry.import_file", note)
        patch.setattr("robustmetric.training.code.admit", lambda _, files, trust: listed.extend(files))
        try:
            admit_files({key: text}, Path("recipe.yaml"), {})
        except UserError as error:
            assert "--trust" in str(error)  # noqa: PT017
            return
        make: dict[str, Callable[[str], object]] = {
            "defense": defense,
            "model": lambda name: NetworkSource(name).check(),
            "data": rm.data.load,
        }
        with suppress(UserError, OSError):
            make[key](text)
    assert set(imported) <= set(listed)


@pytest.mark.parametrize(
    "entry",
    ["defense: N/A['net.py:S']", "defense: HM[x(y)/net.py:S,LGA]", "model: net.py:f(o='b.py:g(1)')"],
)
def test_a_text_that_can_be_read_in_two_ways_is_refused(entry: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    (tmp_path / "mine.yaml").write_text(f'{entry.partition(" ")[0]} "{entry.partition(" ")[2]}"\n')
    said = refused("train", "--recipe", tmp_path / "mine.yaml", "--out", tmp_path / "out")
    assert "mine.yaml" in said
    assert "--trust" in said
    load_recipe(tmp_path / "mine.yaml", trust=True)
