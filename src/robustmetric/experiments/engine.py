"""What runs cells: this process, several that share its cores, or a Ray cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from robustmetric.cluster import Cluster, connect
from robustmetric.data.cache import cores
from robustmetric.evaluation.job import Progress
from robustmetric.experiments.cells import Job
from robustmetric.experiments.sets import check_data
from robustmetric.experiments.work import KilledError, Report, make
from robustmetric.files import check_writable
from robustmetric.training.stops import Stopped
from robustmetric.workers import Endings, run_tasks


def run(
    jobs: Sequence[Job],
    out: Path,
    *,
    on: str = "local",
    address: str | None = None,
    count: int = 1,
    threads: int | None = None,
    report: Report = print,
    watch: Progress | None = None,
) -> Iterator[tuple[Job, Exception | None]]:
    """Make cells in the folder `out`, `count` at a time; yield each as it ends, with its error if it failed.

    They are made `on` "local" or on the "ray" cluster at an `address`. Each has `threads`, by default its
    share of the cores. `report` is called with messages; `watch`, of cells in this process, with how far
    each stage is. When this process is stopped, trainings are saved.
    """
    if not jobs:
        return
    check_writable(out)
    for name in dict.fromkeys(job.task.data for job in jobs):
        if lacks := check_data(name, jobs[0].scale.roots.get(name), jobs[0].scale.queries):
            report(f"careful: {lacks}")
    with ExitStack() as leaving:
        if on == "ray":
            cluster = leaving.enter_context(connect(address))
            cluster.check_folder(out)
            endings = _on_cluster(jobs, cluster, count, threads)
        else:
            _ = jobs[0].scale.torch_device  # refused now, if it is not there
            each = threads or max(1, cores() // count)
            if count > 1:
                endings = run_tasks(_local, [(job, each) for job in jobs], count)
            else:
                torch.set_num_threads(each)
                endings = _here(jobs, report, watch)
        leaving.enter_context(closing(endings))
        for number, error in endings:
            if isinstance(error, Stopped):
                raise error
            yield jobs[number], error


def _here(jobs: Sequence[Job], report: Report, watch: Progress | None) -> Endings:
    for number, job in enumerate(jobs):
        try:
            make(job, report, watch)
        except Exception as error:
            yield number, error
        else:
            yield number, None


def _on_cluster(jobs: Sequence[Job], cluster: Cluster, count: int, threads: int | None) -> Endings:
    """Make each cell as a task of Ray, which runs it again where its worker or machine dies.

    Each has a GPU for each worker, where there are any. By default it has as many CPUs as `count` cells, or
    as many cells as there are GPUs for, can have at the same time.
    """
    gpus = max(job.workers for job in jobs)
    if jobs[0].scale.device not in ("auto", "cuda") or not cluster.room(1, gpus):
        gpus = 0
    cpus = threads or cluster.threads(max(count, cluster.room(1, gpus) if gpus else 0), gpus)
    return cluster.run(_remote, [(job, cpus) for job in jobs], cpus, gpus)


def _local(job: Job, threads: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it has started
    torch.set_num_threads(threads)
    make(job, _silent)


def _remote(job: Job, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        make(job, _silent)
    except (Stopped, KilledError):
        os._exit(1)  # its machine is to go, or something ended its training: Ray runs it again elsewhere


def _silent(_: str) -> None:
    """Say nothing."""
