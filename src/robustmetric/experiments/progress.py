"""How far cells are, as their folders tell, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from robustmetric.evaluation.job import PARTS
from robustmetric.experiments.cells import Cell, Job
from robustmetric.experiments.estimate import Cost
from robustmetric.experiments.outcome import evaluation_of, run_of
from robustmetric.training.folder import read_rows


def share_done(job: Job, cost: Cost) -> float:
    """Return the share of an unfinished cell that is done, below 1, as far as its folder tells.

    `cost` says how much of it is the training, and how many steps that takes.
    """
    if not isinstance(job.task, Cell) or not cost.steps:
        return 0.0
    run = run_of(job.folder)
    trained = cost.train / max(cost.total, 1e-9)
    pieces = evaluation_of(job.folder, job.scale) / PARTS
    if pieces.is_dir():
        with suppress(OSError):  # a record has just taken them
            return trained + (1 - trained) * min(0.99, sum(1 for _ in pieces.iterdir()) / cost.pieces)
        return 0.99
    return trained * min(
        0.99, max((int(row["step"]) for row in read_rows(run.metrics)), default=0) / cost.steps
    )


class Pace:
    """Tells how much of the work is done and how long the rest will take, from the pace so far.

    `costs` are what the jobs that are left were expected to cost; `workers` share them.

    >>> from pathlib import Path
    >>> from robustmetric.experiments.cells import Scale
    >>> clock = iter([0.0, 60.0])
    >>> jobs = [Job(Cell("digits", f"N/A[{s}]"), Scale(), Path("nowhere", s)) for s in "RS"]
    >>> pace = Pace({job: Cost(20.0) for job in jobs}, clock=lambda: next(clock))
    >>> pace.ended(jobs[0])
    >>> pace.now()
    (0.5, 60.0)
    """

    def __init__(
        self, costs: Mapping[Job, Cost], workers: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.left, self.workers, self.clock = dict(costs), workers, clock
        self.whole = sum(cost.total for cost in costs.values())
        self.before = self._done()
        self.begun = clock()

    def ended(self, job: Job) -> None:
        """Count a job as done."""
        self.left.pop(job, None)

    def now(self) -> tuple[float, float]:
        """Return the share of the work that is done, and the seconds that the rest will take."""
        done, passed = self._done(), self.clock() - self.begun
        fresh, rest = done - self.before, self.whole - done
        # Before there is a pace, the estimate counts.
        pace = fresh / passed if fresh > 0.02 * self.whole and passed > 0 else float(self.workers)
        return done / max(self.whole, 1e-9), rest / pace

    def _done(self) -> float:
        rest = sum(cost.total * (1 - share_done(job, cost)) for job, cost in list(self.left.items()))
        return self.whole - rest
