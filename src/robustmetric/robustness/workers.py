"""Several processes that share an evaluation."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any


def run_workers(
    work: Callable[..., None], arguments: tuple[Any, ...], count: int, tick: Callable[[], None]
) -> None:
    """Call `work(*arguments, k, count)` in `count` new processes; `tick` is called while they run.

    `work` and its arguments are sent to the processes, so they must be importable. What a worker raises ends
    the others and is raised here; the same if this process is interrupted. Workers whose parent has gone end
    by themselves.
    """
    context = multiprocessing.get_context("spawn")
    errors: SimpleQueue[BaseException] = context.SimpleQueue()
    workers = [
        context.Process(target=_worker, args=(work, arguments, k, count, errors), daemon=True)
        for k in range(count)
    ]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            tick()
            for worker in workers:
                worker.join(0.1)
            if any(worker.exitcode for worker in workers):
                break
        if not errors.empty():
            raise errors.get()
        if failed := [k for k, worker in enumerate(workers) if worker.exitcode]:
            raise RuntimeError(
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


def _worker(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    share: int,
    shares: int,
    errors: SimpleQueue[BaseException],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        work(*arguments, share, shares)
    except Exception as error:
        errors.put(error)
        raise SystemExit(1) from None


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
