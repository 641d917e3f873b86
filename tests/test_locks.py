"""A folder belongs to one program at a time."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from io import FileIO
from pathlib import Path

import pytest

from robustmetric import locks
from robustmetric.errors import UserError
from robustmetric.locks import LOCK, InUseError, handed_out, locked
from tests.helpers.faults import fault
from tests.helpers.processes import die, forked, needs_fork

HERE = socket.gethostname()


def owner(**changes: object) -> str:
    return json.dumps({"host": HERE, "process": 1, "doing": "a training", "since": "today", **changes})


def test_the_file_names_the_owner_and_goes_with_it(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "run", "a training"):
        found = json.loads((tmp_path / "new" / "run" / LOCK).read_text())
        assert (found["host"], found["process"], found["doing"]) == (HERE, os.getpid(), "a training")
    assert not (tmp_path / "new").exists()


def test_what_was_written_stays(tmp_path: Path) -> None:
    with locked(tmp_path / "run", "a training"):
        (tmp_path / "run" / "note").write_text("kept")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["note"]


@needs_fork
def test_a_second_process_is_told_who_holds_it(tmp_path: Path) -> None:
    said = tmp_path / "said"

    def second() -> None:
        try:
            with locked(tmp_path, "an evaluation"):
                said.write_text("inside")
        except InUseError as error:
            said.write_text(str(error))

    with locked(tmp_path, "a training"):
        assert forked(second)[0] == 0
    assert f"a training by process {os.getpid()} on {HERE}" in said.read_text()


@needs_fork
def test_the_lock_of_a_killed_process_is_told_and_taken_over(tmp_path: Path) -> None:
    def first() -> None:
        with locked(tmp_path, "a training"):
            die()

    assert forked(first)[0] == -9
    said: list[str] = []
    with locked(tmp_path, "an evaluation", said.append):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    (line,) = said
    assert "a training by process" in line
    assert "has ended" in line


@fault(
    "training",
    "the folder is locked by a process of another host",
    "refused; the message says who holds it, and which file to remove",
)
def test_the_lock_of_another_host_is_refused_with_the_file_to_remove(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(owner(host="elsewhere"))
    with (
        pytest.raises(InUseError, match=rf"on elsewhere .* remove {tmp_path / LOCK}"),
        locked(tmp_path, "a training"),
    ):
        pass
    (tmp_path / LOCK).unlink()
    with locked(tmp_path, "a training"):
        assert (tmp_path / LOCK).exists()


SLURM = {"SLURM_CLUSTER_NAME": "c", "SLURM_JOB_ID": "17"}


@fault(
    "training",
    "Ray, or Slurm by --requeue, runs a task again on another machine, which finds the lock of the first",
    "taken over and told, where the file system grants it; every other task is refused",
)
@pytest.mark.parametrize(
    ("task", "environment", "left", "alone", "goes_on"),
    [
        ("ray 1", {}, "ray 1", True, True),
        ("ray 1", {}, "ray 1", False, False),  # it still runs
        ("ray 1", {}, "ray 1", None, False),  # whether it does cannot be seen
        ("ray 1", {}, "ray 2", True, False),
        ("ray 1", {}, None, True, False),
        (None, {}, "ray 1", True, False),
        (None, {}, None, True, False),
        (None, {**SLURM, "SLURM_RESTART_COUNT": "2"}, "slurm c 17 0", True, True),
        (None, {**SLURM, "SLURM_RESTART_COUNT": "2"}, "slurm c 17 1", True, True),
        (None, {**SLURM, "SLURM_RESTART_COUNT": "2"}, "slurm c 17 2", True, False),  # another step of the job
        (None, {**SLURM, "SLURM_RESTART_COUNT": "2"}, "slurm c 18 0", True, False),
        (None, SLURM, "slurm c 17 0", True, False),
    ],
)
def test_the_lock_of_another_host_is_taken_by_a_later_attempt_at_the_same_task(
    task: str | None,
    environment: dict[str, str],
    left: str | None,
    alone: bool | None,
    goes_on: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*SLURM, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if alone is not True:
        monkeypatch.setattr(locks, "_alone", lambda _: alone)
    before = owner(host="elsewhere", **({} if left is None else {"task": left}))
    (tmp_path / LOCK).write_text(before)
    said: list[str] = []
    with nullcontext() if task is None else handed_out(task):
        if not goes_on:
            with pytest.raises(InUseError, match="on elsewhere"), locked(tmp_path, "a training"):
                pass
            assert (tmp_path / LOCK).read_text() == before
            return
        with locked(tmp_path, "a training", said.append):
            mine = json.loads((tmp_path / LOCK).read_text())
    assert mine["host"] == HERE
    assert mine["task"] == (task or "slurm c 17 2")
    assert "on elsewhere" in said[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1}', "\x00\xff"])
def test_a_file_that_says_nothing_is_taken(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with locked(tmp_path, "a training"):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


@pytest.mark.parametrize(("process", "runs"), [(os.getppid(), True), (2**22 + 1, False), ("x", False)])
def test_without_locks_of_the_kernel_the_process_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: object, runs: bool
) -> None:
    monkeypatch.setattr(locks, "_alone", lambda _: None)
    (tmp_path / LOCK).write_text(owner(process=process))
    entered = False
    try:
        with locked(tmp_path, "a training", lambda _: None):
            entered = True
    except InUseError:
        pass
    assert entered is not runs


@fault(
    "training",
    "the lock of a folder from somebody else is a link to another file",
    "refused; that file stays as it is",
)
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_no_lock(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    precious, run = tmp_path / "precious.txt", tmp_path / "run"
    precious.write_text("mine")
    run.mkdir()
    link(precious, run / LOCK)
    with pytest.raises(UserError, match="is a link"), locked(run, "a training"):
        pass
    assert precious.read_text() == "mine"


def test_a_lock_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileIO):
        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(locks, "FileIO", Full)
    with pytest.raises(UserError, match="make room"), locked(tmp_path / "new" / "run", "a training"):
        pass
    assert list(tmp_path.iterdir()) == []
