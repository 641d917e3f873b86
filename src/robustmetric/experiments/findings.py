"""What was found for a table or figure: each row with the outcomes of its cells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from robustmetric.experiments.cells import Scale
from robustmetric.experiments.outcome import Outcome, find_jobs
from robustmetric.experiments.paper import Experiment, Row


@dataclass(frozen=True)
class Finding:
    """A `row` with what its cells came to: one of the `outcomes` a seed, None where it is not made yet."""

    row: Row
    outcomes: tuple[Outcome | None, ...]


def find(experiment: Experiment, scale: Scale, out: Path) -> list[Finding]:
    """Return what is in `out` for each row of an `experiment` at a `scale`.

    >>> from robustmetric.experiments.paper import experiment
    >>> [finding.outcomes for finding in find(experiment("table7", ["digits"]), Scale(), Path("nowhere"))]
    [(None,), (None,)]
    """
    known = {job.task: outcome for job, outcome in find_jobs(experiment.tasks, scale, out).items()}
    return [Finding(row, tuple(known[task] for task in row.tasks)) for row in experiment.rows]
