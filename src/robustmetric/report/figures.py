"""The plots of the report, as SVG inside its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from robustmetric.evaluation import COLUMNS, Record
from robustmetric.report import svg
from robustmetric.report.curves import CurvePoint
from robustmetric.report.entries import Entry
from robustmetric.report.summary import SCORES, course, record_scores, terms_of
from robustmetric.report.words import COLUMN_MEANINGS

_CURVES = ("ERS", "ES:R")  # what curves show; where neither was measured, the first scores that were
_SPANS = {"%": (0.0, 100.0), "cosine": (0.0, 1.0), "distance": (0.0, 2.0)}


def plot_terms(entries: Sequence[Entry]) -> Markup | None:
    """The plot of the terms of the ERS."""
    found = [terms_of(entry.record) for entry in entries]
    rows = [name for name in COLUMNS if any(name in terms for terms in found)]
    if not rows:
        return None
    series = [
        svg.Series(
            entry.name,
            [
                svg.Point(place, terms[name].value, terms[name].low, terms[name].high)
                for place, name in enumerate(rows)
                if name in terms
            ],
        )
        for entry, terms in zip(entries, found, strict=True)
    ]
    return _plot(
        partial(svg.dots, [COLUMNS[name].heading.split()[0] for name in rows], series),
        title="Terms of the ERS",
        about="100 where an attack moves nothing, 0 where it reaches all it wants; the table has the scores.",
        key="terms",
    )


def plot_curves(entries: Sequence[Entry]) -> list[Markup]:
    """Scores against ε, for each norm, and against steps."""
    axes = (
        ("eps", "linf", "ε, in levels of 255"),
        ("eps", "l2", "ε, a length (L2)"),
        ("steps", None, "steps"),
    )
    plots = []
    for axis, norm, across in axes:
        curves = [e.curves if norm in (None, e.record.settings.norm) else () for e in entries]
        for score in _of_curves([record for each in curves for _, record in each]):
            points = [list(_curve(each, axis, score)) for each in curves]
            if not any(points):
                continue
            log, ticks = axis == "steps", None
            if log:
                ticks = [(x, f"{x:g}") for x in sorted({point.x for each in points for point in each})]
            plots.append(
                _plot(
                    partial(svg.lines, _series(entries, points), across=across, up=SCORES[score].heading),
                    title=f"{score} against {across}",
                    about=COLUMN_MEANINGS[score],
                    key=f"curve-{axis}-{norm or 'any'}-{score.replace(':', '-').replace('+', 'p')}",
                    span=_SPANS.get(SCORES[score].unit.name),
                    log=log,
                    ticks=ticks,
                )
            )
    return plots


def plot_maps(entries: Sequence[Entry]) -> list[tuple[Entry, Markup]]:
    """The map of each record with pictures."""
    found = []
    for place, entry in enumerate(entries):
        if entry.pictures is None or not entry.pictures.map.points:
            continue
        shown = entry.pictures.map
        drawn = _plot(
            partial(svg.scatter, shown.points, shown.moves, names=shown.classes),
            title=f"Embeddings of {entry.name}",
            about=f"{len(shown.points)} images in the plane of the two largest principal components "
            f"({100 * sum(shown.explained):.0f} % of the variance), and where attacks moved queries",
            key=f"map-{place}",
        )
        found.append((entry, drawn))
    return found


def plot_trainings(entries: Sequence[Entry]) -> list[Markup]:
    """Courses of the trainings: loss, hardness reached, R@1 of validations."""
    columns = {"loss": "loss", "hardness/reached": "hardness reached", "R@1": "R@1"}
    plots = []
    for column, title in columns.items():
        points = []
        for entry in entries:
            steps, values = course(() if entry.run is None else entry.run.rows, column)
            points.append([svg.Point(float(x), float(y)) for x, y in zip(steps, values, strict=True)])
        if any(points):
            key = f"training-{title.replace(' ', '-').replace('@', '')}"
            told = f"{title} over the steps of training"
            draw = partial(svg.lines, _series(entries, points), across="training step", up=title)
            plots.append(_plot(draw, title=told[:1].upper() + told[1:], about=told, key=key))
    return plots


def _series(entries: Sequence[Entry], points: Sequence[Sequence[svg.Point]]) -> list[svg.Series]:
    """Return a series for each entry, so that all have the colours of theirs; one without points no name."""
    return [svg.Series(e.name if each else "", each) for e, each in zip(entries, points, strict=True)]


def _of_curves(records: Sequence[Record]) -> list[str]:
    """Return the scores that curves of these records show."""
    known = {name for record in records for name in record_scores(record)}
    attacked = [name for name in COLUMNS if name in known]
    return [name for name in _CURVES if name in known] or attacked[:2]


def _curve(points: Sequence[tuple[CurvePoint, Record]], axis: str, score: str) -> Iterator[svg.Point]:
    """Yield the points of a score along an axis, with intervals."""
    for point, record in points:
        known = record_scores(record)
        if point.axis == axis and score in known:
            x = 255 * point.value if axis == "eps" and record.settings.norm == "linf" else point.value
            yield svg.Point(x, known[score].value, known[score].low, known[score].high)


def _plot(draw: Callable[..., str], **about: Any) -> Markup:
    return Markup(draw(**{name: value for name, value in about.items() if value is not None}))  # noqa: S704
