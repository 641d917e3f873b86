"""Plots: the paper's figures, the hardness of samplers, trainings and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from robustmetric.errors import UserError
from robustmetric.evaluation import COLUMNS, Record
from robustmetric.experiments.findings import Finding
from robustmetric.experiments.paper import Experiment
from robustmetric.experiments.samplers import EDGES
from robustmetric.report.style import (
    COLOURS,
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
from robustmetric.report.summary import (
    Estimate,
    Values,
    course,
    record_scores,
    scores_of,
    summarise,
    terms_of,
)
from robustmetric.report.tables import DRAWN, points, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

__all__ = ["FORMATS", "curves", "hardness_histograms", "records", "save", "training"]

_PUBLISHED: dict[str, Any] = {"linestyle": (0, (3, 2)), "markerfacecolor": "white", "linewidth": 0.9}
_SHORT = 26  # letters of a name, of which two fit into a line
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
        _title(figure, title_of(experiment, told))
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
        handles.append(_handle(defense, shape, letters=22))
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


def _handle(label: str, shape: Look, letters: int = 50, **more: Any) -> Line2D:
    """Make an entry of a legend, whose label has so many letters in a line."""
    from matplotlib.lines import Line2D

    told = wrapped(label, letters)
    return Line2D([], [], **{"color": shape.colour, "marker": shape.marker, "label": told, **more})


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


def _errors(estimates: Sequence[Estimate]) -> Values:
    """Return (2, N) lengths of bars below and above."""
    found = [estimate.spread or (0.0, 0.0) for estimate in estimates]
    return np.maximum([[below for below, _ in found], [above for _, above in found]], 0.0)


def hardness_histograms(hardness: Mapping[str, Any], title: str) -> Figure:
    """Return the histograms of the `hardness` that each sampler draws, one below the other, under a `title`.

    `hardness` is what `measure_samplers` returns. Var[H] is that of the means of batches, as in Table 1.

    >>> known = {"mean": -0.495, "variance": None, "variance_within": 0.0}
    >>> made = hardness_histograms({"R": {**known, "counts": [0] * 150 + [7] + [0] * 249}}, "digits")
    >>> made.axes[0].get_ylabel()
    'Random'
    """
    counts = {letter: np.asarray(about["counts"], float) for letter, about in hardness.items()}
    shares = {letter: 100 * found / max(1.0, found.sum()) for letter, found in counts.items()}
    used = np.flatnonzero(sum(counts.values()))
    low, high = (EDGES[used[0]], EDGES[used[-1] + 1]) if len(used) else (EDGES[0], EDGES[-1])
    with styled():
        figure = new_figure(0.75 + 0.55 * len(shares))
        _title(figure, title)
        panels = figure.subplots(len(shares), 1, sharex=True, squeeze=False)[:, 0]
        for number, (axes, (letter, share)) in enumerate(zip(panels, shares.items(), strict=True)):
            colour, about = COLOURS[number % len(COLOURS)], hardness[letter]
            axes.stairs(share, EDGES, fill=True, color=colour, alpha=0.35)
            axes.stairs(share, EDGES, color=colour, linewidth=0.8)
            axes.axvline(about["mean"], color="black", linewidth=0.8, linestyle=(0, (3, 2)))
            axes.set_ylim(0, 1.08 * max(share.max(), 1e-9))
            axes.set_ylabel(plain(DRAWN.get(letter, letter)), rotation=0, ha="right", va="center")
            axes.set_yticks([])
            axes.spines["left"].set_visible(False)
            variance = "–" if about["variance"] is None else f"{about['variance']:.5f}"
            told = f"E[H] {about['mean']:.3f}\nVar[H] {variance}\nwithin {about['variance_within']:.5f}"
            axes.text(1.02, 0.5, told.replace("-", "−"), transform=axes.transAxes, va="center", fontsize=6.5)
        panels[-1].set_xlim(low - 0.02, high + 0.02)
        panels[-1].set_xlabel("hardness of drawn triplets")
    return figure


_COURSES: dict[str, dict[str, tuple[str, Any]]] = {
    "hardness": {
        "hardness/source": ("source", (0, (1, 1.5))),
        "hardness/destination": ("destination", (0, (3, 2))),
        "hardness/reached": ("reached", "-"),
    },
    "perturbed, %": {"perturbed": ("", "-")},
    "loss": {"loss": ("", "-")},
}
"""The panels of a training: columns of its table, what each is called, and its line."""


def training(runs: Mapping[str, Sequence[Mapping[str, str]]], title: str = "") -> Figure:
    """Return hardness, share of perturbed triplets and loss over the steps of trainings, under a `title`.

    `runs` are the rows of each one's metrics.csv by its name. A column that a run does not have is left out;
    of long runs, means of neighbouring rows are shown.

    >>> rows = [{"step": "10", "loss": "0.2"}, {"step": "20", "loss": "0.1"}]
    >>> [axes.get_ylabel() for axes in training({"mine": rows}).axes]
    ['loss']
    """
    found = {
        (panel, column, name): found_course
        for panel, columns in _COURSES.items()
        for column in columns
        for name, rows in runs.items()
        if len((found_course := course(rows, column))[0])
    }
    panels = [panel for panel in _COURSES if any(panel == where for where, _, _ in found)]
    if not panels:
        told = ", ".join(column for columns in _COURSES.values() for column in columns)
        raise UserError(f"there is nothing to plot of {', '.join(runs)}: no row has any of {told}")
    looks = {name: look(number) for number, name in enumerate(runs)}
    with styled():
        figure = new_figure(0.5 + 0.13 * (len(runs) + 1) + 1.15 * len(panels))
        _title(figure, title)
        places = dict(
            zip(panels, figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], strict=True)
        )
        for (panel, column, name), (steps, values) in found.items():
            told, style = _COURSES[panel][column]
            shape, scale = looks[name], 100 if column == "perturbed" else 1
            places[panel].plot(
                steps,
                scale * values,
                color=shape.colour,
                linestyle=style,
                marker=shape.marker if style == "-" else None,
                markevery=max(1, len(steps) // 8),
                label=plain(f"{name} {told}".rstrip()),
            )
        for panel, axes in places.items():
            axes.set_ylabel(panel)
        places[panels[-1]].set_xlabel("training step")
        places[panels[-1]].xaxis.get_major_locator().set_params(integer=True)
        figure.align_ylabels(list(places.values()))
        drawn = {name for _, _, name in found}
        handles = [_handle(name, shape) for name, shape in looks.items() if name in drawn]
        lines = _COURSES["hardness"].values() if "hardness" in panels else ()
        _legend(figure, handles, [_handle(told, Look(GREY, ""), linestyle=style) for told, style in lines])
    return figure


def records(named: Mapping[str, Record], title: str = "") -> Figure:
    """Return the ERS against R@1 of `named` records, and the ERS's terms, with intervals, under a `title`.

    A term is 100 where an attack moves nothing. A hollow mark is an ERS that is not valid.

    >>> records({})
    Traceback (most recent call last):
    ...
    robustmetric.UserError: there is nothing to plot: no record has a score of the ERS
    """
    terms = {name: terms_of(record) for name, record in named.items()}
    shown = [column for column in COLUMNS if any(column in found for found in terms.values())]
    if not shown:
        raise UserError("there is nothing to plot: no record has a score of the ERS")
    scored = {name: record_scores(record) for name, record in named.items()}
    whole = {name: scores for name, scores in scored.items() if {"R@1", "ERS"} <= scores.keys()}
    with styled():
        heights = [1.5, *([2.0 + 0.12 * len(named)])] if whole else [2.0 + 0.12 * len(named)]
        figure = new_figure(0.45 + sum(heights) + 0.14 * len(named))
        _title(figure, title)
        panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
        handles = []
        for number, (name, record) in enumerate(named.items()):
            shape = look(number)
            valid = record.ers is None or record.ers.valid
            how: dict[str, Any] = {
                "color": shape.colour,
                "marker": shape.marker,
                "markerfacecolor": shape.colour if valid else "white",
                "linestyle": "none",
            }
            handles.append(_handle(name if valid else f"{name} (ERS not valid)", shape, **how))
            how["label"] = plain(name)
            if (scores := whole.get(name)) is not None:
                _bars(panels[0], [scores["R@1"].value], [scores], "R@1", "ERS", shape)
                panels[0].plot([scores["R@1"].value], [scores["ERS"].value], **how)
            _dots(panels[-1], [terms[name].get(column) for column in shown], number, len(named), how)
        if whole:
            panels[0].set(xlabel="R@1", ylabel="ERS")
            panels[0].margins(0.12)
        labels = [COLUMNS[column].heading.split()[0] for column in shown]
        panels[-1].set_yticks(range(len(shown)), labels)
        panels[-1].set_ylim(len(shown) - 0.5, -0.5)
        panels[-1].set_xlim(-4, 104)
        panels[-1].tick_params(axis="y", length=0)
        panels[-1].grid(axis="y", visible=False)
        for place in range(0, len(shown), 2):
            panels[-1].axhspan(place - 0.5, place + 0.5, color="#f4f4f4", zorder=0, linewidth=0)
        panels[-1].set_xlabel("term of the ERS: 100 where nothing moves")
        _legend(figure, handles)
    return figure


def _dots(
    axes: Axes, terms: Sequence[Estimate | None], number: int, count: int, how: Mapping[str, Any]
) -> None:
    """Draw the terms of the record of a number, a little below those of the one before."""
    shift = 0.7 * ((number + 0.5) / count - 0.5)
    known = [(place + shift, term) for place, term in enumerate(terms) if term is not None]
    values = [term.value for _, term in known]
    places = [place for place, _ in known]
    axes.errorbar(
        values, places, xerr=_errors([t for _, t in known]), ecolor=how["color"], alpha=0.6, **_BARS
    )
    axes.plot(values, places, **how)


def _title(figure: Figure, title: str) -> None:
    if title:
        figure.suptitle(wrapped(title), x=0.02, ha="left", fontsize=7.5)


def _legend(figure: Figure, handles: Sequence[Line2D], others: Sequence[Line2D] = ()) -> None:
    """Put the legend below all panels, `others` behind; in two columns if all names are short."""
    every = [*handles, *others]
    short = max(len(str(handle.get_label())) for handle in every) <= _SHORT
    if short and others:  # a column of their own
        nothing = _handle("", Look("none", ""), linestyle="none")
        rows = max(len(handles), len(others))
        every = [*handles, *[nothing] * (rows - len(handles)), *others, *[nothing] * (rows - len(others))]
    figure.legend(handles=every, loc="outside lower left", ncols=2 if short else 1)
