"""Processes that share work: what they raise, how they die, and that their parent hears of it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robustmetric.errors import UserError
from robustmetric.registry import registry
from robustmetric.usercode import UserCodeError, sendable
from robustmetric.workers import WorkerError, _deaf, run_workers

pytestmark = pytest.mark.slow  # workers start as processes that import everything

# Workers import what they call, so it stands in a module of its own.
WORK = """
import os, signal, time
from pathlib import Path

class Picky(ValueError):
    pass

def write(folder, share, shares):
    Path(folder, f"{share} of {shares}").write_text(str(os.getpid()))

def fail_or_wait(folder, share, shares):
    write(folder, share, shares)
    if share == 0:
        raise Picky("no [such] share", 3)
    time.sleep(600)

def die(folder, share, shares):
    os.kill(os.getpid(), signal.SIGKILL)

def complain(folder, share, shares):
    raise ValueError("x" * 300_000)

class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")

def be_odd(folder, share, shares):
    raise Odd("one", "two")
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that workers import."""
    name = f"work_{os.getpid()}_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def deaf(child: Any) -> bool:
    """Tell whether a process ignores or blocks SIGINT; true where there is no /proc to look into."""
    status = Path(f"/proc/{child.pid}/status")
    masks = re.findall(r"Sig(?:Ign|Blk):\s+(\w+)", status.read_text()) if status.exists() else ["f"]
    return any(int(mask, 16) >> (signal.SIGINT - 1) & 1 for mask in masks)


def test_each_share_is_done_once_while_tick_is_called(work: Any, tmp_path: Path) -> None:
    heard, ticks = signal.getsignal(signal.SIGINT), 0
    first: list[bool] = []

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 1:
            first.extend(deaf(child) for child in multiprocessing.active_children())

    run_workers(work.write, (str(tmp_path),), 2, tick)
    done = {file.name: int(file.read_text()) for file in tmp_path.glob("* of *")}
    assert set(done) == {"0 of 2", "1 of 2"}
    assert len({*done.values(), os.getpid()}) == 3
    assert not any(map(alive, done.values()))
    assert ticks > 1
    assert signal.getsignal(signal.SIGINT) is heard
    # Ctrl-C goes to all processes of a terminal, and a worker needs seconds to import what it calls.
    assert first == [True, True], "workers hear Ctrl-C, and print a traceback, until they have begun"


def test_what_a_worker_raises_is_raised_and_ends_the_others(work: Any, tmp_path: Path) -> None:
    with pytest.raises(work.Picky) as caught:
        run_workers(work.fail_or_wait, (str(tmp_path),), 2, lambda: None)
    assert type(caught.value) is work.Picky
    assert caught.value.args == ("no [such] share", 3)
    assert not any(alive(int(file.read_text())) for file in tmp_path.glob("* of *"))


def test_a_worker_that_dies_is_named_with_its_code(work: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="worker 0 of 1 ended with code -9; what was finished is kept"):
        run_workers(work.die, (str(tmp_path),), 1, lambda: None)


def within(seconds: float, call: Callable[[], None]) -> BaseException | None:
    """Give what a call raises; None if it is not back in time."""
    raised: list[BaseException] = []

    def note() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=note, daemon=True)
    thread.start()
    thread.join(seconds)
    return raised[0] if raised else None


def test_a_long_message_comes_through(work: Any, tmp_path: Path) -> None:
    # A pipe holds 64 KiB; a list of broken images or parameters can be longer.
    raised = within(40, lambda: run_workers(work.complain, (str(tmp_path),), 1, lambda: None))
    assert raised is not None, "the parent waits for its worker, and the worker for its parent"
    assert isinstance(raised, ValueError)
    assert len(str(raised)) == 300_000


def test_an_exception_that_cannot_be_sent_is_still_told(work: Any, tmp_path: Path) -> None:
    # It can be pickled but not made again: its constructor takes two arguments.
    with pytest.raises(RuntimeError, match="Odd: one and two"):
        run_workers(work.be_odd, (str(tmp_path),), 1, lambda: None)


def test_an_interrupt_while_workers_start_is_not_lost() -> None:
    # A shell starts its jobs in the background deaf to it.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
        with pytest.raises(KeyboardInterrupt), _deaf():
            signal.raise_signal(signal.SIGINT)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
    finally:
        signal.signal(signal.SIGINT, heard)


def sent(error: Exception) -> Exception:
    """Return what arrives of an error."""
    arrived = pickle.loads(pickle.dumps(sendable(error)))  # noqa: S301 (our own bytes)
    assert isinstance(arrived, Exception)
    return arrived


def test_an_error_of_the_user_s_own_stays_one_on_its_way(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def odd():\n    return {}['odd']\n")
    with pytest.raises(KeyError) as failed:
        registry("check").bind(f"{tmp_path / 'own.py'}:odd")()
    arrived = sent(failed.value)
    assert type(arrived) is UserError
    assert f'File "{tmp_path / "own.py"}", line 2, in odd' in str(arrived)


def test_what_a_person_can_mend_stays_so_on_its_way() -> None:
    arrived = sent(UserCodeError("own.py failed"))
    assert (type(arrived), str(arrived)) == (UserCodeError, "own.py failed")
    arrived = sent(UserError("no such folder", parameter="out"))
    assert isinstance(arrived, UserError)
    assert (str(arrived), arrived.parameter) == ("no such folder", "out")
