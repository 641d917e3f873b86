"""What runs cells: this process, several that share its cores, or a cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import FrameType

import torch

from robustmetric.cluster import Cluster
from robustmetric.evaluation.workers import end_with_parent
from robustmetric.experiments.cells import Cell, Job
from robustmetric.experiments.work import Report, make
from robustmetric.locks import handed_on
from robustmetric.trust import Known, known
from robustmetric.validate import UserError


class CellError(UserError):
    """A cell that could not be made."""


Ended = tuple[Job, Exception | None]
"""A job that has ended, and what was wrong if it failed."""


def run_here(jobs: Sequence[Job], report: Report) -> Iterator[Ended]:
    """Make one cell after the other in this process; one that fails does not keep the others from it."""
    for job in jobs:
        try:
            perform(job, report)
        except (UserError, OSError, RuntimeError) as error:
            yield job, error
        else:
            yield job, None


def run_local(jobs: Sequence[Job], count: int, threads: int) -> Iterator[Ended]:
    """Make cells in `count` processes with `threads` each; yield each as it ends.

    When this process is stopped, so are they: a training writes its checkpoint first.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(threads, known))
    waiting: dict[Future[None], Job] = {}
    try:
        waiting = {pool.submit(perform, job): job for job in jobs}
        for future in as_completed(waiting):
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                raise CellError(
                    "a process that made a cell was killed, by the system if memory ran out; what is "
                    "finished is kept: run the same command again, with fewer jobs"
                ) from None
            if error is not None and not isinstance(error, Exception):
                raise error
            yield waiting[future], error
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_ray(jobs: Sequence[Job], cluster: Cluster, count: int, threads: int | None) -> Iterator[Ended]:
    """Make each cell as a task of Ray, which runs it again where its worker or machine dies.

    As many as fit run at the same time, with a GPU for each worker of a training where the `cluster` has any,
    and with `threads` CPUs each, by default as many as `count` of them, or as many as there are GPUs for, can
    have.
    """
    wants = any(node.gpus for node in cluster.nodes) and jobs[0].scale.accelerator in ("auto", "gpu")
    gpus = max(_workers(job) for job in jobs) if wants else 0
    if gpus:
        count = max(count, sum(node.gpus // gpus for node in cluster.nodes))
    cpus = threads or cluster.threads(count, gpus)
    for outcome in cluster.run(_task, [(job, cpus) for job in jobs], cpus=cpus, gpus=gpus):
        yield jobs[outcome.number], outcome.error


def _task(job: Job, threads: int) -> None:
    torch.set_num_threads(threads)
    perform(job)


def _workers(job: Job) -> int:
    return job.scale.workers(job.task.data) if isinstance(job.task, Cell) else 1


def perform(job: Job, report: Report | None = None) -> None:
    """Make a cell; a training of several workers as a program of its own, for each worker is one.

    Without `report`, nothing is said.
    """
    if _workers(job) == 1:
        make(job, report or _silent)
        return
    said = None if report is not None else subprocess.DEVNULL
    program = [sys.executable, "-m", "robustmetric", *job.command]
    with (
        subprocess.Popen(program, stdout=said, env={**os.environ, **handed_on()}) as process,  # noqa: S603
        _passed_on(process),
    ):
        code = process.wait()
    if code:
        raise CellError(f"{job.task.label} ended with code {code}: run its own command to see why")


def _begin(threads: int, trusted: Known) -> None:
    """Begin a process that makes cells: out of reach of the terminal's Ctrl-C, which its parent passes on."""
    if hasattr(os, "setsid"):
        os.setsid()
    trusted.share()
    torch.set_num_threads(threads)
    end_with_parent()


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass a SIGTERM on to a process inside."""

    def stop(number: int, frame: FrameType | None) -> None:
        process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _silent(_: str) -> None:
    """Say nothing."""
