"""Processes that are started, killed and waited for.

A file of tests may also be a program that tests start: it imports everything once and forks a process for
each attempt, so that an attempt costs only its work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="SIGKILL and fork are POSIX's")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into Linux's /proc")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_by(number: signal.Signals) -> Callable[..., None]:
    """Return what lets this process get a signal, whatever it is called with."""
    return lambda *_, **__: signal.raise_signal(number)


def at_call(number: float, act: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Call `act`, with the same arguments, before the n-th call of a function."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act(*args, **kwargs)
        return original(*args, **kwargs)

    return counted


def forked(act: Callable[[], object], hear: Callable[[str, int], bool] | None = None) -> tuple[int, str]:
    """Act in a new process; return its exit code, −9 if it was killed, and what it printed.

    `hear` is called with each line and the number of the process as they come; lines of which it says so are
    left out of what is returned.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.close(reading)
            os.dup2(writing, 1)
            act()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            print(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as said:
        text = "".join(line for line in said if hear is None or not hear(line, child))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), text


ENTRY = """
import signal
from robustmetric.cli import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
run()
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start the command line in a session of its own, as a terminal does."""
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", ENTRY, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def run_program(file: str, order: object) -> Any:
    """Run a file of tests as a program that reads its order and prints its answer, both as JSON."""
    module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-W", "error", "-m", module, json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def alive(number: int) -> bool:
    """Tell whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(what: Callable[[], bool], seconds: float = 600) -> bool:
    """Wait until something is so; return whether it is."""
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    return what()
