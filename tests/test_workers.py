"""Processes that share work: what they raise, how they die, and that their parent hears of it."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from robustmetric.errors import UserError
from robustmetric.registry import registry
from robustmetric.workers import WorkerError, attempt, finish, run_tasks
from tests.helpers.processes import alive, until

pytestmark = pytest.mark.slow  # workers start as processes that import everything

# Workers import what they call, so it stands in a module of its own.
WORK = """
import os, signal, time
from pathlib import Path
from robustmetric.errors import UserError

class Picky(ValueError):
    pass

class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")

def write(folder, number):
    Path(folder, str(number)).write_text(str(os.getpid()))

def fail_or_wait(folder, number):
    write(folder, number)
    if number == 0:
        raise Picky("no [such] share", 3)
    time.sleep(600)

def fail(error):
    user = UserError("no", parameter="out")
    raise {"long": ValueError("x" * 300_000), "odd": Odd("one", "two"), "user": user}[error]

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that workers import."""
    name = f"work_{os.getpid()}_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


def begun(folder: Path) -> list[int]:
    return [int(file.read_text() or 0) for file in folder.iterdir() if file.name.isdecimal()]


def test_each_task_is_done_once_while_tick_is_called(work: Any, tmp_path: Path) -> None:
    heard, ticks = signal.getsignal(signal.SIGINT), []
    tasks = [(str(tmp_path), k) for k in range(5)]
    ended = dict(run_tasks(work.write, tasks, 2, lambda: ticks.append(1)))
    assert ended == dict.fromkeys(range(5))
    assert len(begun(tmp_path)) == 5
    assert len({*begun(tmp_path), os.getpid()}) <= 3
    assert len(ticks) > 1
    assert signal.getsignal(signal.SIGINT) is heard
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_what_a_worker_raises_is_raised_and_ends_the_others(work: Any, tmp_path: Path) -> None:
    with pytest.raises(work.Picky) as caught:
        finish(run_tasks(work.fail_or_wait, [(str(tmp_path), k) for k in (0, 1)], 2))
    assert caught.value.args == ("no [such] share", 3)
    assert "in fail_or_wait" in caught.value.__notes__[0]
    assert not any(map(alive, begun(tmp_path)))


def test_an_interrupt_ends_all_workers(work: Any, tmp_path: Path) -> None:
    def interrupt() -> None:
        if len(begun(tmp_path)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_tasks(work.fail_or_wait, [(str(tmp_path), k) for k in (1, 2, 3)], 2, interrupt))
    assert len(begun(tmp_path)) == 2, "one has begun after the stop"
    assert until(lambda: not any(map(alive, begun(tmp_path))))


def test_errors_arrive_as_they_were(work: Any) -> None:
    # A pipe holds 64 KiB, and Odd can be pickled but not made again: its constructor takes two arguments.
    found = dict(run_tasks(work.fail, [("long",), ("odd",), ("user",)], 1))
    assert type(found[0]) is ValueError
    assert len(str(found[0])) == 300_000
    assert "Odd: one and two" in str(found[1])
    assert isinstance(found[2], UserError)
    assert (str(found[2]), found[2].parameter) == ("no", "out")


def test_a_worker_that_is_killed_is_told(work: Any) -> None:
    with pytest.raises(WorkerError, match="what is finished is kept"):
        finish(run_tasks(work.die, [()], 1))


def test_an_error_in_a_file_of_the_user_s_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def odd():\n    return {}['odd']\n")
    error = attempt(registry("check").bind(f"{tmp_path / 'own.py'}:odd"), ())
    assert type(error) is UserError
    assert f'File "{tmp_path / "own.py"}", line 2, in odd' in str(error)
