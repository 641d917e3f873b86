"""What runs cells: this process, several that share its cores, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch

from robustmetric.cluster import Cluster
from robustmetric.errors import UserError
from robustmetric.experiments.cells import Cell, Job
from robustmetric.experiments.work import Report, make
from robustmetric.training.stops import Stopped
from robustmetric.workers import end_with_parent

_PERIOD = 1.0  # seconds between two looks at the parent


class CellError(UserError):
    """A cell that could not be made."""


class KilledError(CellError):
    """A cell whose program was stopped or killed: made again, it goes on."""


Ended = tuple[Job, Exception | None]
"""A job that has ended, and what was wrong if it failed."""
Endings = Generator[Ended, None, None]


def run_here(jobs: Sequence[Job], report: Report) -> Endings:
    """Make one cell after the other in this process; one that fails does not keep the others from it."""
    for job in jobs:
        try:
            perform(job, report)
        except Stopped:
            raise
        except Exception as error:
            yield job, error
        else:
            yield job, None


def run_local(jobs: Sequence[Job], count: int, threads: int) -> Endings:
    """Make cells in `count` processes with `threads` each; yield each as it ends.

    When this process is stopped, so are they: a training writes its checkpoint first.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(threads,))
    running: dict[Future[None], Job] = {}
    left = list(jobs)
    try:
        while left or running:
            # No more than there are processes: what the pool has queued cannot be taken back.
            while left and len(running) < count:
                job = left.pop(0)
                running[pool.submit(perform, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise CellError(
                        "a process that made a cell was killed, by the system if memory ran out; what is "
                        "finished is kept: run the same command again, with fewer jobs"
                    ) from None
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield running.pop(future), error
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Room:
    """What each cell has on a cluster: `cpus` and `gpus`; and how many of them run `at_once`."""

    cpus: int
    gpus: int
    at_once: int

    @classmethod
    def of(cls, cluster: Cluster, jobs: Sequence[Job], count: int, threads: int | None) -> Room:
        """Share a `cluster` out: each cell has a GPU a worker, where there are any, and `threads` CPUs.

        By default it has as many CPUs as `count` cells, or as many as there are GPUs for, can have.
        """
        nodes = cluster.nodes
        wanted = any(node.gpus for node in nodes) and jobs[0].scale.accelerator in ("auto", "gpu", "cuda")
        gpus = max(_workers(job) for job in jobs) if wanted else 0
        if gpus:
            count = max(count, sum(node.gpus // gpus for node in nodes))
        cpus = threads or cluster.threads(count, gpus)
        return cls(cpus, gpus, max(1, sum(node.room(cpus, gpus) for node in nodes)))


def run_ray(jobs: Sequence[Job], cluster: Cluster, room: Room) -> Endings:
    """Make each cell as a task of Ray, which runs it again where its worker or machine dies."""
    arguments = [(job, room.cpus) for job in jobs]
    for outcome in cluster.run(_task, arguments, cpus=room.cpus, gpus=room.gpus):
        yield jobs[outcome.number], outcome.error


def _task(job: Job, threads: int) -> None:
    """Make a cell on a machine of a cluster."""
    torch.set_num_threads(threads)
    try:
        perform(job)
    except (Stopped, KilledError):
        os._exit(1)  # its machine is to go, or something killed it: Ray runs the task again elsewhere


def perform(job: Job, report: Report | None = None) -> None:
    """Make a cell; a training of several workers as a program of its own, for each worker is one.

    Without `report`, nothing is said.
    """
    if (workers := _workers(job)) == 1:
        make(job, report or _silent)
        return
    program = [sys.executable, "-m", "robustmetric", *job.command, "--parent", str(os.getpid())]
    threads = str(max(1, torch.get_num_threads() // workers))
    process = subprocess.Popen(  # noqa: S603
        program,
        stdout=None if report is not None else subprocess.DEVNULL,
        env={"OMP_NUM_THREADS": threads, **os.environ},
        start_new_session=True,  # a terminal's Ctrl-C comes from here
    )
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code < 0 or code - 128 in (signal.SIGINT, signal.SIGTERM):
        raise KilledError(f"its program was stopped or killed (code {code}): run the same command again")
    if code:
        raise CellError(f"its program ended with code {code}: run its own command, which --dry-run prints")


def end_with(parent: int) -> None:
    """Let this program stop, as by SIGTERM, as soon as it is not the child of process `parent` any more."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_PERIOD)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True, name="parent").start()


def _begin(threads: int) -> None:
    """Begin a process that makes cells: out of reach of the terminal's Ctrl-C, which its parent passes on."""
    if hasattr(os, "setsid"):
        os.setsid()
    torch.set_num_threads(threads)
    end_with_parent()


def _workers(job: Job) -> int:
    return job.scale.workers(job.task.data) if isinstance(job.task, Cell) else 1


def _silent(_: str) -> None:
    """Say nothing."""
