"""The plots of the report, as SVG inside its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup

from robustmetric.evaluation import COLUMNS, Record
from robustmetric.evaluation.curves import CurvePoint
from robustmetric.report import svg
from robustmetric.report.entries import Entry
from robustmetric.report.summary import course, record_scores, terms_of
from robustmetric.report.words import COLUMN_MEANINGS


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
    """Scores against ε and against steps."""
    plots = []
    axes = (("eps", "ε, in levels of 255"), ("steps", "steps"))
    for axis, across in axes:
        for score in ("ERS", "ES:R"):
            series = [
                svg.Series(entry.name, points)
                for entry in entries
                if (points := list(_curve(entry.curves, axis, score)))
            ]
            if series:
                ticks = None
                if axis == "steps":
                    values = sorted({point.x for one in series for point in one.points})
                    ticks = [(value, f"{value:g}") for value in values]
                plots.append(
                    _plot(
                        partial(svg.lines, series, across=across, up=score, span=(0.0, 100.0)),
                        title=f"{score} against {across}",
                        about=COLUMN_MEANINGS[score],
                        key=f"curve-{axis}-{score.replace(':', '-')}",
                        log=axis == "steps",
                        ticks=ticks,
                    )
                )
    return plots


def plot_maps(entries: Sequence[Entry]) -> list[tuple[Entry, Markup, list[str]]]:
    """The map of each record with pictures, and the attacks whose moves it shows."""
    found = []
    for entry in entries:
        if entry.pictures is None or not entry.pictures.map.points:
            continue
        shown = entry.pictures.map
        drawn = _plot(
            partial(svg.scatter, shown.points, shown.moves, names=shown.classes),
            title=f"Embeddings of {entry.name}",
            about=f"{len(shown.points)} images in the plane of the two largest principal components "
            f"({100 * sum(shown.explained):.0f} % of the variance), and where attacks moved queries",
            key=f"map-{entry.key}",
        )
        found.append((entry, drawn, list(shown.moves)))
    return found


def plot_trainings(entries: Sequence[Entry]) -> list[Markup]:
    """Courses of the trainings: loss, hardness reached, R@1 of validations."""
    columns = {"loss": "loss", "hardness/reached": "hardness reached", "R@1": "R@1"}
    plots = []
    for column, title in columns.items():
        series = []
        for entry in entries:
            steps, values = course(entry.training, column)
            points = [svg.Point(float(x), float(y)) for x, y in zip(steps, values, strict=True)]
            if points:
                series.append(svg.Series(entry.name, points))
        if series:
            key = f"training-{title.replace(' ', '-').replace('@', '')}"
            told = f"{title} over the steps of training"
            draw = partial(svg.lines, series, across="training step", up=title)
            plots.append(_plot(draw, title=told[:1].upper() + told[1:], about=told, key=key))
    return plots


def _curve(points: Sequence[tuple[CurvePoint, Record]], axis: str, score: str) -> Iterator[svg.Point]:
    """Yield the points of a score along an axis, with intervals."""
    for point, record in points:
        known = record_scores(record)
        if point.axis == axis and score in known:
            x = 255 * point.value if axis == "eps" and record.settings.norm == "linf" else point.value
            yield svg.Point(x, known[score].value, known[score].low, known[score].high)


def _plot(draw: Callable[..., str], **about: Any) -> Markup:
    return Markup(draw(**{name: value for name, value in about.items() if value is not None}))  # noqa: S704
