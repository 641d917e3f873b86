"""Plots: the paper's figures, the hardness of samplers, trainings and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from robustmetric.experiments.findings import Finding
from robustmetric.experiments.paper import Experiment
from robustmetric.report.style import (
    FORMATS,
    GREY,
    Look,
    look,
    new_figure,
    plain,
    save,
    styled,
    wrapped,
)
from robustmetric.report.summary import Estimate, scores_of, summarise
from robustmetric.report.tables import points, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

__all__ = ["FORMATS", "curves", "save"]

_PUBLISHED: dict[str, Any] = {"linestyle": (0, (3, 2)), "markerfacecolor": "white", "linewidth": 0.9}
_BARS: dict[str, Any] = {"fmt": "none", "elinewidth": 0.8, "capsize": 1.8, "capthick": 0.8}


def curves(experiment: Experiment, findings: Sequence[Finding], told: str) -> Figure:
    """Return the figure of an `experiment`: ERS and R@1 against the training cost, and ERS against R@1.

    `findings` are those of its rows, `told` is the scale, part of the title. Ours are solid, with the
    interval over queries or the deviation over seeds; published ones are dashed. A collapsed training is a
    cross.

    >>> from robustmetric.experiments.paper import experiment
    >>> rows = experiment("figure1").rows
    >>> made = curves(experiment("figure1"), [Finding(row, (None,)) for row in rows], "150 epochs")
    >>> [axes.get_ylabel() for axes in made.subfigs[0].axes]
    ['ERS', '', 'R@1', '']
    """
    lines = points(findings)
    with styled():
        figure = new_figure(0.35 + 2.75 * len(experiment.data))
        figure.suptitle(wrapped(title_of(experiment, told)), x=0.02, ha="left", fontsize=7.5)
        parts = figure.subfigures(len(experiment.data), 1, squeeze=False)[:, 0]
        for data, part in zip(experiment.data, parts, strict=True):
            own = {defense: found for (of, defense), found in lines.items() if of == data}
            if len(experiment.data) > 1:
                part.suptitle(plain(data), fontsize=7.5)
            _panels(part, own)
    return figure


def _panels(part: SubFigure, lines: Mapping[str, Sequence[Finding]]) -> None:
    """Draw the three panels of a data set; the fourth place is the legend's."""
    cost, both, recall, legend = part.subplots(2, 2).flat
    both.sharey(cost)
    recall.sharex(cost)
    legend.axis("off")
    handles: list[Line2D] = []
    kinds: set[str] = set()
    for number, (defense, found) in enumerate(lines.items()):
        shape = look(number)
        rows = {finding.row.cost: summarise(finding.outcomes, scores_of) for finding in found}
        known = {f.row.cost: f.row.published.scores for f in found if f.row.published is not None}
        published = {c: s for c, s in known.items() if {"R@1", "ERS"} <= s.keys()}
        ours = {
            c: s.estimates for c, s in rows.items() if {"R@1", "ERS"} <= s.estimates.keys() and not s.fallen
        }
        for axes, x, y in ((cost, None, "ERS"), (recall, None, "R@1"), (both, "R@1", "ERS")):
            if published:
                xs = [c if x is None else s[x] for c, s in published.items()]
                _line(
                    axes, xs, [s[y] for s in published.values()], shape, f"{defense} published", **_PUBLISHED
                )
            if ours:
                xs = [c if x is None else s[x].value for c, s in ours.items()]
                _line(axes, xs, [s[y].value for s in ours.values()], shape, f"{defense} ours")
                _bars(axes, xs, ours.values(), x, y, shape)
        for axes in (cost, recall):
            for c in (c for c, summary in rows.items() if summary.fallen):
                axes.plot(
                    [c], [0.03], "x", color=shape.colour, transform=axes.get_xaxis_transform(), clip_on=False
                )
        kinds |= {kind for kind, some in (("ours", ours), ("published", published)) if some}
        kinds |= {"collapsed" for summary in rows.values() if summary.fallen}
        handles.append(_handle(defense, shape))
    costs = sorted({finding.row.cost for found in lines.values() for finding in found})
    cost.set_xscale("log", base=2)
    cost.set_xticks(costs, [str(c) for c in costs])
    cost.minorticks_off()
    recall.minorticks_off()
    for axes, x, y in ((cost, "cost η+1", "ERS"), (recall, "cost η+1", "R@1"), (both, "R@1", "")):
        axes.set(xlabel=x, ylabel=y)
    both.tick_params(labelleft=False)
    how = {"ours": {}, "published": _PUBLISHED, "collapsed": {"linestyle": "none", "marker": "x"}}
    shapes = [_handle(kind, Look(GREY, "o"), **how[kind]) for kind in how if kind in kinds]
    legend.legend(handles=[*handles, *shapes], loc="upper left")


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], shape: Look, label: str, **more: Any) -> None:
    axes.plot(x, y, color=shape.colour, marker=shape.marker, label=plain(label), **more)


def _handle(label: str, shape: Look, **more: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"color": shape.colour, "marker": shape.marker, "label": plain(label), **more})


def _bars(axes: Axes, x: Sequence[float], found: Any, across: str | None, up: str, shape: Look) -> None:
    """Draw how far estimates may be off."""
    rows: list[Mapping[str, Estimate]] = list(found)
    axes.errorbar(
        x,
        [row[up].value for row in rows],
        yerr=_errors([row[up] for row in rows]),
        xerr=None if across is None else _errors([row[across] for row in rows]),
        ecolor=shape.colour,
        alpha=0.6,
        **_BARS,
    )


def _errors(estimates: Sequence[Estimate]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return (2, N) lengths of bars below and above."""
    found = [estimate.spread or (0.0, 0.0) for estimate in estimates]
    return np.array([[below for below, _ in found], [above for _, above in found]])
