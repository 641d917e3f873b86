"""Scores against ε and against the number of steps: the same evaluation of fewer queries at other budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.record import Record, load_record

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
