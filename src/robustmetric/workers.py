"""Functions in processes of this machine: tasks that wait for a free one, or shares of one work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from typing import Any

from robustmetric.errors import UserError
from robustmetric.usercode import sendable

Endings = Generator[tuple[int, Exception | None], None, None]
"""The number of each task as it ends, and its error if it failed."""


class WorkerError(UserError):
    """A process that ended without saying why."""


def run_tasks(
    function: Callable[..., object],
    tasks: Sequence[tuple[Any, ...]],
    count: int,
    tick: Callable[[], None] = lambda: None,
) -> Endings:
    """Call `function` with each of the `tasks`, its arguments, in `count` processes; yield each as it ends.

    Both are sent to the processes, so they must be importable. `tick` is called in the meantime. Leaving the
    loop, by Ctrl-C for example, ends the processes by SIGTERM; they end as well when this one is killed.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_begin)
    running: dict[Future[Exception | None], int] = {}
    left = list(enumerate(tasks))
    try:
        while left or running:
            while left and len(running) < count:  # what the pool has queued cannot be taken back
                number, arguments = left.pop(0)
                with _blocked(signal.SIGINT):  # a terminal's Ctrl-C goes to all its processes
                    running[pool.submit(attempt, function, arguments)] = number
            ended = wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done
            tick()
            for future in ended:
                yield running.pop(future), future.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a worker was killed, by the system if memory ran out; what is finished is kept: run the same "
            "command again, with fewer workers"
        ) from None
    finally:
        with _blocked(signal.SIGINT, signal.SIGTERM):
            for process in multiprocessing.active_children() if running else ():
                process.terminate()
            pool.shutdown(cancel_futures=True)


def finish(endings: Endings) -> None:
    """Wait for all tasks; the first error is raised, and ends the others."""
    with closing(endings):
        for _, error in endings:
            if error is not None:
                raise error


def attempt(function: Callable[..., object], arguments: tuple[Any, ...]) -> Exception | None:
    """Call a `function` for another process; return what it raises, with its traceback as a note."""
    try:
        function(*arguments)
    except Exception as error:
        sent = sendable(error)
        sent.__notes__ = [traceback.format_exc()]  # type: ignore[attr-defined]  # shown from Python 3.11
        return sent
    return None


@contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Hear these signals afterwards; a process that is started inside does not hear them until it begins."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
