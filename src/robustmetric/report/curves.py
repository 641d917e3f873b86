"""Scores against ε and against the number of steps: the same evaluation of fewer queries at other budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from robustmetric.errors import UserError
from robustmetric.evaluation.data import Subject
from robustmetric.evaluation.evaluate import Evaluation, search_cost
from robustmetric.evaluation.job import Progress
from robustmetric.evaluation.plan import STAGES, Plan, Settings
from robustmetric.evaluation.record import RECORD, Record, load_record

FOLDER = "curves"
QUERIES = 64  # that each point attacks, at most
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)  # of ε
_STEPS = (1, 2, 4, 8, 16, 32, 64)
_LESS = ("queries", "checks", "suite")  # of which a point has less than its record

Axis = Literal["eps", "steps"]


class CurvePoint(NamedTuple):
    """A point of a curve: along which `axis`, its `value` there, and the `folder` of its record."""

    axis: Axis
    value: float
    folder: str


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
    found: dict[CurvePoint, dict[str, float]] = {}
    for eps, share in shares.items():
        alpha = _alpha(plan.alpha, eps, plan.steps)
        found[CurvePoint("eps", eps, f"eps-{share:g}")] = {"eps": eps, "alpha": alpha}
    for steps in sorted({*_STEPS, plan.steps}):
        folder = f"eps-{shares[plan.eps]:g}" if steps == plan.steps else f"steps-{steps}"
        alpha = _alpha(plan.alpha, plan.eps, steps)
        found[CurvePoint("steps", steps, folder)] = {"steps": steps, "alpha": alpha}
    return found


def _alpha(alpha: float, eps: float, steps: int) -> float:
    return min(max(alpha, 1.25 * eps / steps), 1.0)


def load_curves(
    folder: Path, record: Record, report: Callable[[str], None] = print
) -> Iterator[tuple[CurvePoint, Record]]:
    """Yield the points of the curves in the `folder` of a `record` that are there, and what was found.

    One that is damaged, or of another evaluation, is left out, and `report` is called with a line about it.
    """
    known: dict[str, Record | None] = {}  # by folder, which points of two curves may share
    for point, changes in _points(record.settings).items():
        if point.folder not in known:
            wanted = {**_of(record), **changes}
            known[point.folder] = _read(folder / FOLDER / point.folder, wanted, report)
        if (found := known[point.folder]) is not None:
            yield point, found


def _read(place: Path, wanted: dict[str, Any], report: Callable[[str], None]) -> Record | None:
    """Return the record of a point, if it is there and what is wanted."""
    try:
        found = load_record(place / RECORD)
    except FileNotFoundError:
        return None
    except (OSError, UserError) as error:
        report(f"{error}; remove {place} and evaluate with --curves again")
        return None
    if _of(found) == wanted:
        return found
    report(f"{place} is of another evaluation; remove it and evaluate with --curves again")
    return None


def _of(record: Record) -> dict[str, Any]:
    """Return what a record and the points of its curves have in common."""
    network, data, plan = record.network, record.data, record.settings
    surrogate = network.surrogate if plan.search.startswith("transfer(") else None  # or it is the suite's
    evaluated = {"of": (network.sha256, surrogate, data.sha256, data.cameras)}
    return {name: value for name, value in plan.model_dump().items() if name not in _LESS} | evaluated


def make_curves(
    subject: Subject,
    plan: Plan,
    out: Path,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Evaluate a `subject` at the points of the curves around a `plan`, each in a folder in `out`/curves.

    Finished points and pieces stay there: after an interruption the same call resumes. `progress` is called
    with the stage "curves", how many of its points are done, and how many there are, `report` with a line
    about what was found damaged.
    """
    subject = _without_suite(subject, plan)
    plans = curve_plans(plan, len(subject.data.images))
    shared: dict[str, Any] = {}  # embeddings and their ranking are those of all points
    for place, (point, each) in enumerate(plans.items()):
        evaluation = Evaluation(subject, each, out / FOLDER / point.folder, report=report)
        if progress is not None:
            evaluation.progress = _as_part(progress, place, len(plans), len(evaluation.pieces))
        evaluation.run(partial(_share, evaluation, shared))
        if progress is not None:
            progress("curves", place + 1, len(plans))


def curve_costs(subject: Subject, plan: Plan, out: Path) -> list[int]:
    """Return what each point of the curves that `make_curves` makes costs, 0 if it is there."""
    found: list[int] = []
    subject = _without_suite(subject, plan)
    for point, each in curve_plans(plan, len(subject.data.images)).items():
        attacks = len(each.attacks) * (search_cost(each.threat) + 2)
        embedded = 0 if found else len(subject.data.every)  # for all points
        there = (out / FOLDER / point.folder / RECORD).exists()
        found.append(0 if there else embedded + len(each.draw(len(subject.data.images))) * attacks)
    return found


def _without_suite(subject: Subject, plan: Plan) -> Subject:
    """Return the subject without a surrogate that is the suite's alone."""
    if subject.surrogate is not None and plan.search_on(subject.surrogate).network is None:
        return replace(subject, surrogate=None)
    return subject


def _share(evaluation: Evaluation, shared: dict[str, Any]) -> None:
    """Give an evaluation the pieces that are the same at all points, made at the first that needs them."""
    with evaluation.frozen():
        for piece in [piece for stage in STAGES[:2] for piece in evaluation.stages[stage]]:
            if evaluation.has(piece):
                shared[piece.file] = evaluation.get(piece)
                continue
            if piece.file not in shared:
                shared[piece.file] = piece.make(lambda count=1: None)
            evaluation.keep(piece, shared[piece.file])
    evaluation.tell()


def _as_part(progress: Progress, place: int, count: int, pieces: int) -> Progress:
    """Report an evaluation of so many pieces as the `place`-th of `count` parts."""
    finished: dict[str, float] = {}

    def tell(stage: str, done: float, total: int) -> None:
        finished[stage] = done
        progress("curves", place + min(sum(finished.values()) / pieces, 0.99), count)

    return tell
