"""Scores against ε and against the number of steps: the same evaluation of fewer queries at other budgets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from robustmetric.errors import UserError
from robustmetric.evaluation.data import Subject
from robustmetric.evaluation.evaluate import Evaluation
from robustmetric.evaluation.job import Progress
from robustmetric.evaluation.plan import STAGES, Plan, Settings
from robustmetric.evaluation.record import Record, load_record

FOLDER = "curves"
QUERIES = 64  # that each point attacks, at most
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)  # of ε
_STEPS = (1, 2, 4, 8, 16, 32, 64)
_LESS = {"queries", "checks", "suite"}  # of which a point has less than its record


class CurvePoint(NamedTuple):
    """A point of a curve: along which `axis`, its `value` there, and the `folder` of its record."""

    axis: Literal["eps", "steps"]
    value: float
    folder: str


Curves = list[tuple[CurvePoint, Record]]


def curve_plans(plan: Plan, images: int) -> dict[CurvePoint, Plan]:
    """Return the plans of the curves around a `plan` for so many `images` that query.

    Each attacks at most 64 queries, without checks and suite. Along ε the number of steps stays, along the
    steps ε does; where both are the plan's it is one point of both curves. A step is at least so large that
    all steps together cross the ball with a quarter to spare.

    >>> plans = curve_plans(Plan.make(eps=8 / 255, steps=8, queries=256), 1000)
    >>> [round(255 * plan.settings.eps) for point, plan in plans.items() if point.axis == "eps"]
    [2, 4, 8, 12, 16]
    >>> [plan.settings.steps for point, plan in plans.items() if point.axis == "steps"]
    [1, 2, 4, 8, 16, 32, 64]
    """
    fewer = min(QUERIES, plan.settings.queries or images)
    return {
        point: plan.changed(**changes, queries=fewer, checks="none", suite="none")
        for point, changes in _points(plan.settings).items()
    }


def _points(plan: Settings) -> dict[CurvePoint, dict[str, float]]:
    """Return the points around a plan, each value once, and what they change of it."""
    most = 1.0 if plan.norm == "linf" else math.inf
    shares: dict[float, float] = {}
    for share in _SHARES:
        shares.setdefault(min(share * plan.eps, most), share)
    points: dict[CurvePoint, dict[str, float]] = {
        CurvePoint("eps", eps, f"eps-{share:g}"): {"eps": eps} for eps, share in shares.items()
    }
    for steps in sorted({*_STEPS, plan.steps}):
        folder = f"eps-{shares[plan.eps]:g}" if steps == plan.steps else f"steps-{steps}"
        points[CurvePoint("steps", steps, folder)] = {"steps": steps}
    for changes in points.values():
        crossing = 1.25 * changes.get("eps", plan.eps) / changes.get("steps", plan.steps)
        changes["alpha"] = min(max(plan.alpha, crossing), 1.0)
    return points


def load_curves(folder: Path, record: Record) -> tuple[Curves, list[str]]:
    """Return the points of the curves in the `folder` of a `record`, and why others are left out.

    Those are damaged, or of another evaluation.
    """
    found: Curves = []
    left_out: list[str] = []
    for point, changes in _points(record.settings).items():
        place = folder / FOLDER / point.folder
        try:
            one = load_record(place)
            if _of(one) != {**_of(record), **changes}:
                raise UserError(f"{place} is of another evaluation")
            found.append((point, one))
        except FileNotFoundError:
            pass
        except (OSError, UserError) as error:
            left_out.append(f"{error}; remove {place} and evaluate with --curves again")
    return found, list(dict.fromkeys(left_out))  # a point may be on two curves


def _of(record: Record) -> dict[str, Any]:
    """Return what a record and the points of its curves have in common."""
    network, data, plan = record.network, record.data, record.settings
    surrogate = network.surrogate if plan.search.startswith("transfer(") else None  # or it is the suite's
    evaluated = {"of": (network.sha256, surrogate, data.sha256, data.cameras)}
    return plan.model_dump(exclude=_LESS) | evaluated


def make_curves(
    subject: Subject,
    plan: Plan,
    out: Path,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Evaluate a `subject` at the points of the curves around a `plan`, each in a folder in `out`/curves.

    Finished points and pieces stay there: after an interruption the same call resumes. `progress` is called
    with the stage "curves", the number of its points that are done, and the number of points, `report` with a
    line about what was damaged.
    """
    if subject.surrogate is not None and plan.search_on(subject.surrogate).network is None:
        subject = replace(subject, surrogate=None)  # which is the suite's alone
    plans = curve_plans(plan, len(subject.data.images))
    shared: dict[str, Any] = {}  # embeddings and their ranking are those of all points
    for place, (point, each) in enumerate(plans.items()):
        evaluation = Evaluation(subject, each, out / FOLDER / point.folder, report=report)
        evaluation.run(partial(_share, evaluation, shared))
        if progress is not None:
            progress("curves", place + 1, len(plans))


def _share(evaluation: Evaluation, shared: dict[str, Any]) -> None:
    """Give an evaluation the pieces that are the same at all points, made at the first that needs them."""
    with evaluation.frozen():
        for piece in [piece for stage in STAGES[:2] for piece in evaluation.stages[stage]]:
            if evaluation.has(piece):
                shared[piece.file] = evaluation.get(piece)
            else:
                if piece.file not in shared:
                    shared[piece.file] = piece.make(lambda count=1: None)
                evaluation.keep(piece, shared[piece.file])
