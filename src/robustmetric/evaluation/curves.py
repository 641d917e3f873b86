"""Scores against ε and against the number of steps: the same evaluation of fewer queries at other budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from robustmetric.evaluation.evaluate import Evaluation
from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.record import Record, load_record
from robustmetric.evaluation.staged import Progress
from robustmetric.evaluation.subject import Subject

FOLDER = "curves"
QUERIES = 64  # that each point attacks, at most
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)  # of ε
_STEPS = (1, 2, 4, 8, 16, 32, 64)

Axis = Literal["eps", "steps"]


class CurvePoint(NamedTuple):
    """A point of a curve: along which `axis`, its `value` there, and the `folder` of its record."""

    axis: Axis
    value: float
    folder: str


def curve_plans(plan: Plan) -> dict[CurvePoint, Plan]:
    """Return the plans of the curves around a `plan`, at most 64 queries each, without checks and suite.

    Along ε the number of steps stays, along the steps ε does. A step is at least so large that all steps
    together cross the ball with a quarter to spare.

    >>> plans = curve_plans(Plan.make(eps=8 / 255, steps=8, queries=256))
    >>> [round(255 * plan.eps) for point, plan in plans.items() if point.axis == "eps"]
    [2, 4, 8, 12, 16]
    >>> [plan.steps for point, plan in plans.items() if point.axis == "steps"]
    [1, 2, 4, 8, 16, 32, 64]
    """
    fewer = QUERIES if plan.queries is None else min(plan.queries, QUERIES)
    return {
        point: plan.changed(**changes, queries=fewer, checks="none", suite="none")
        for point, changes in _points(plan).items()
    }


def _points(plan: Plan) -> dict[CurvePoint, dict[str, float]]:
    """Return the points around a plan, and what they change of it."""
    most = 1.0 if plan.norm == "linf" else math.inf
    found: dict[CurvePoint, dict[str, float]] = {}
    for share in _SHARES:
        eps = min(share * plan.eps, most)
        alpha = _alpha(plan.alpha, eps, plan.steps)
        found[CurvePoint("eps", eps, f"eps-{share:g}")] = {"eps": eps, "alpha": alpha}
    for steps in sorted({*_STEPS, plan.steps}):
        alpha = _alpha(plan.alpha, plan.eps, steps)
        found[CurvePoint("steps", steps, f"steps-{steps}")] = {"steps": steps, "alpha": alpha}
    return found


def _alpha(alpha: float, eps: float, steps: int) -> float:
    return min(max(alpha, 1.25 * eps / steps), 1.0)


def load_curves(folder: Path, record: Record) -> Iterator[tuple[CurvePoint, Record]]:
    """Yield the points of the curves in the `folder` of a `record` that are there, and what was found.

    >>> list(load_curves(Path("nowhere"), None))
    []
    """
    if not (folder / FOLDER).is_dir():
        return
    for point in _points(record.settings):
        place = folder / FOLDER / point.folder
        if (place / "record.json").is_file():
            found = load_record(place)
            if (found.network.sha256, found.data.sha256) == (record.network.sha256, record.data.sha256):
                yield point, found


def make_curves(
    subject: Subject,
    plan: Plan,
    out: Path,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Evaluate a `subject` at the points of the curves around a `plan`, each in a folder in `out`/curves.

    What is finished stays there: the same call goes on where an interrupted one stopped. `progress` is told
    the stage "curves", how many of its points are done, and how many there are; `report` is told in a line
    what was found damaged.
    """
    plans = curve_plans(plan)
    shared: dict[str, Any] = {}  # embeddings and their ranking are those of all points
    for place, (point, each) in enumerate(plans.items()):
        told = None if progress is None else _Whole(progress, place, len(plans))
        evaluation = Evaluation(subject, each, out / FOLDER / point.folder, told, report)
        if evaluation.begin() is not None:
            continue
        with subject.frozen():
            for piece in (piece for stage in evaluation.stages[:2] for piece in stage.pieces):
                if not evaluation.store.has(piece):
                    if piece.file not in shared:
                        shared[piece.file] = piece.make(evaluation.materials)
                    evaluation.store.keep(piece, shared[piece.file])
        evaluation.run()
    if progress is not None:
        progress("curves", len(plans), len(plans))


class _Whole:
    """Tells of an evaluation, the `place`-th of several, as a part of all of them."""

    def __init__(self, progress: Progress, place: int, count: int) -> None:
        self.progress, self.place, self.count = progress, place, count
        self.stages: dict[str, tuple[float, int]] = {}

    def __call__(self, stage: str, done: float, total: int) -> None:
        self.stages[stage] = (done, total)
        whole = sum(total for _, total in self.stages.values())
        share = sum(done for done, _ in self.stages.values()) / max(1, whole)
        self.progress("curves", self.place + min(share, 0.99), self.count)
