"""A function in several processes of this machine, each with a share of the work."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from typing import Any

from robustmetric.errors import UserError
from robustmetric.usercode import SentTraceError, sendable


class WorkerError(UserError):
    """A worker that ended without saying why."""


def run_workers(
    work: Callable[..., None], arguments: tuple[Any, ...], count: int, tick: Callable[[], None]
) -> None:
    """Call `work(*arguments, k, count)` in `count` new processes; `tick` is called while they run.

    `work` and its `arguments` are sent to the processes, so they must be importable. What a worker raises
    ends the others and is raised here; the same if this process is interrupted. Workers whose parent has gone
    end by themselves.
    """
    context = multiprocessing.get_context("spawn")
    errors: Queue[tuple[Exception, str]] = context.Queue()
    workers = [
        context.Process(target=_worker, args=(work, arguments, k, count, errors), daemon=True)
        for k in range(count)
    ]
    try:
        with _deaf():
            for worker in workers:
                worker.start()
        while any(worker.is_alive() for worker in workers):
            tick()
            _raise_from(errors, wait=0.2)
            if any(worker.exitcode for worker in workers):
                break
        _raise_from(errors, wait=1.0 if any(worker.exitcode for worker in workers) else 0.01)
        if failed := [k for k, worker in enumerate(workers) if worker.exitcode]:
            raise WorkerError(
                f"worker {failed[0]} of {count} ended with code {workers[failed[0]].exitcode}; what was "
                "finished is kept: run the same command again, with fewer workers if memory ran out"
            )
        tick()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
            if worker.pid is not None:
                worker.join()


def _raise_from(errors: Queue[tuple[Exception, str]], wait: float) -> None:
    """Raise what a worker has sent, if one does so within a while."""
    try:
        error, trace = errors.get(timeout=wait)
    except queue.Empty:
        return
    raise error from SentTraceError(trace)


@contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that do not hear Ctrl-C: their parent does, if need be afterwards, and ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    share: int,
    shares: int,
    errors: Queue[tuple[Exception, str]],
) -> None:
    end_with_parent()
    try:
        work(*arguments, share, shares)
    except Exception as error:
        errors.put((sendable(error), f"\n{traceback.format_exc()}"))
        raise SystemExit(1) from None


def end_with_parent() -> None:
    """Let this process end as soon as the one that started it has gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
