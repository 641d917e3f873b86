"""All plots, by matplotlib: of records, trainings, samplers and the paper's figures, in files and pages."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from robustmetric.errors import UserError
from robustmetric.evaluation import COLUMNS, Record
from robustmetric.experiments.findings import Finding
from robustmetric.experiments.paper import Experiment
from robustmetric.experiments.samplers import EDGES
from robustmetric.files import save as save_file
from robustmetric.report.curves import Curves
from robustmetric.report.pictures import Map
from robustmetric.report.summary import SCORES, Estimate, record_scores, scores_of, summarise, terms_of
from robustmetric.report.tables import DRAWN, points, title_of
from robustmetric.report.words import TEMPLATES
from robustmetric.text import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D

FORMATS = ("svg", "pdf", "png")
"""The formats that plots are written in."""
WIDTH = 3.3
"""Inches: a column of a paper."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which people of all kinds of colour vision tell apart, without the yellow."""
MARKERS = "os^Dv<>PX"
GREY, BAND = "#595959", "#f4f4f4"

_UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
_PUBLISHED: dict[str, Any] = {"linestyle": (0, (3, 2)), "markerfacecolor": "white", "linewidth": 0.9}
_LETTERS = 60  # of a line across the column
_SHORT = 26  # letters of a name, of which two fit into a line
_POINTS = 150  # of a line; of longer ones means are shown
_CLASSES = 20  # of a legend
_COURSES: dict[str, dict[str, tuple[str, Any]]] = {
    "hardness": {
        "hardness/source": ("source", (0, (1, 1.5))),
        "hardness/destination": ("destination", (0, (3, 2))),
        "hardness/reached": ("reached", "-"),
    },
    "perturbed, %": {"perturbed": ("", "-")},
    "loss": {"loss": ("", "-")},
    "R@1": {"R@1": ("", "-")},
}
"""The panels of a training: columns of its table, what each is called, and its line."""
_PAGE = {
    **{colour.lower(): f"var(--s{number})" for number, colour in enumerate(COLOURS)},
    GREY: "var(--quiet)",
    "#e4e4e4": "var(--line)",
    BAND: "var(--band)",
    "#ffffff": "var(--card)",
}
"""The colours of plots as those of a page, which may be light or dark."""
Values = Sequence[float] | NDArray[np.float64] | Sequence[Estimate]


class Look(NamedTuple):
    """How a series is drawn: its `colour` and `marker`."""

    colour: str
    marker: str


def look(number: int) -> Look:
    """Return how the series of a `number` is drawn; 63 of them look different."""
    return Look(COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)])


@contextmanager
def styled() -> Iterator[None]:
    """Make and write plots in one style, whatever the user's own settings are; those come back afterwards."""
    import matplotlib.style

    with matplotlib.style.context(["default", TEMPLATES / "plots.mplstyle"]), warnings.catch_warnings():
        # A name may have letters that the font lacks: they are shown as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def new_figure(height: float, title: str = "") -> Figure:
    """Return an empty figure of a column's width and a `height` in inches; make it within `styled`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    if title:
        figure.suptitle(wrapped(title), x=0.02, ha="left", fontsize=7.5)
    return figure


def plain(text: str) -> str:
    r"""Return `text` so that a plot shows it as it is: neither dollars nor a first underscore mean anything.

    >>> print(plain("_cost$"))
     _cost\$
    """
    text = printable(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def wrapped(text: str, letters: int = _LETTERS) -> str:
    """Return `text` in at most five lines of so many `letters`, by default as fit across a column."""
    brief = shortened(printable(text), lambda one: len(one) <= 5 * letters)
    return plain("\n".join(textwrap.wrap(brief, letters, break_on_hyphens=False)))


def save(figure: Figure, stem: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a `figure` in all `formats` to `stem` with their suffixes; return the files."""
    files = [stem.with_name(f"{stem.name}.{name}") for name in formats]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for file, name in zip(files, formats, strict=True):
        save_file(file, drawn(figure, name))
    return files


def drawn(figure: Figure, kind: str, **how: Any) -> bytes:
    """Return a `figure` in the format of a `kind`: the same bytes for the same figure."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, dpi=300, metadata=_UNDATED[kind], **how)
    return buffer.getvalue()


def inline(figure: Figure, about: str, key: str) -> Markup:
    """Return a `figure` as SVG for a page: in its colours, and without the styles that its policy forbids.

    `about` describes it to those who do not see it, and `key` tells its ids from those of other plots.
    """
    text = drawn(figure, "svg", transparent=True).decode()
    text = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|\n", "", text[text.index("<svg") :], flags=re.S
    )
    text = re.sub("<[^>]+>", partial(_for_page, key), text)
    root = 'class="plot" role="img" fill="currentColor" stroke-linejoin="round"'
    return Markup(text.replace("<svg ", f'<svg {root} aria-label="{escape(printable(about))}" ', 1))  # noqa: S704


def _for_page(key: str, tag: re.Match[str]) -> str:
    """Turn the styles of a tag into attributes, its colours into the page's, and its ids into its own."""

    def attributes(style: re.Match[str]) -> str:
        pairs = (
            entry.split(": ", 1) for entry in style[1].split("; ") if not entry.startswith("font-family")
        )
        return " ".join(f'{name}="{_PAGE.get(value, value)}"' for name, value in pairs)

    text = re.sub('style="([^"]*)"', attributes, tag[0])
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{key}-", text)


def curves(experiment: Experiment, findings: Sequence[Finding], told: str) -> Figure:
    """Return the figure of an `experiment`: ERS and R@1 against the training cost, and ERS against R@1.

    `findings` are those of its rows, `told` is the scale, part of the title. Ours are solid, with the
    interval over queries or the deviation over seeds; published ones are dashed. A collapsed training is a
    cross.
    """
    lines = points(findings)
    with styled():
        figure = new_figure(0.35 + 2.75 * len(experiment.data), title_of(experiment, told))
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
    kinds: dict[str, dict[str, Any]] = {}
    for number, (defense, found) in enumerate(lines.items()):
        rows = {finding.row.cost: summarise(finding.outcomes, scores_of) for finding in found}
        known = {f.row.cost: f.row.published.scores for f in found if f.row.published is not None}
        theirs = {cost: {n: Estimate(v) for n, v in scores.items()} for cost, scores in known.items()}
        ours = {cost: row.estimates for cost, row in rows.items() if not row.fallen}
        for kind, every, how in (("ours", ours, {}), ("published", theirs, _PUBLISHED)):
            if scored := {cost: s for cost, s in every.items() if {"R@1", "ERS"} <= s.keys()}:
                kinds[kind] = how
                ers, r1 = ([s[name] for s in scored.values()] for name in ("ERS", "R@1"))
                for axes, x, y in ((cost, [*scored], ers), (recall, [*scored], r1), (both, r1, ers)):
                    _draw(axes, x, y, look(number), f"{defense} {kind}", **how)
        if fallen := [cost for cost, row in rows.items() if row.fallen]:
            kinds["collapsed"] = cross = {"linestyle": "none", "marker": "x"}
            for axes in (cost, recall):
                how = {"transform": axes.get_xaxis_transform(), "clip_on": False, **cross}
                axes.plot(fallen, [0.03] * len(fallen), color=look(number).colour, **how)
    costs = sorted({finding.row.cost for found in lines.values() for finding in found})
    cost.set_xscale("log", base=2)
    cost.set_xticks(costs, [str(c) for c in costs])
    for axes, across, up in ((cost, "cost η+1", "ERS"), (recall, "cost η+1", "R@1"), (both, "R@1", "")):
        axes.set(xlabel=across, ylabel=up)
        axes.minorticks_off()
    both.tick_params(labelleft=False)
    handles = [_handle(defense, look(number), letters=22) for number, defense in enumerate(lines)]
    shapes = [_handle(kind, Look(GREY, "o"), **how) for kind, how in kinds.items()]
    legend.legend(handles=[*handles, *shapes], loc="upper left")


def hardness_histograms(hardness: Mapping[str, Any], title: str) -> Figure:
    """Return the histograms of the `hardness` that each sampler draws, one below the other, under a `title`.

    `hardness` is what `measure_samplers` returns. Var[H] is that of the means of batches, as in Table 1.
    """
    counts = {letter: np.asarray(about["counts"], float) for letter, about in hardness.items()}
    used = np.flatnonzero(sum(counts.values()))
    low, high = (EDGES[used[0]], EDGES[used[-1] + 1]) if len(used) else (EDGES[0], EDGES[-1])
    with styled():
        figure = new_figure(0.75 + 0.55 * len(counts), title)
        panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False)[:, 0]
        for number, (axes, (letter, found)) in enumerate(zip(panels, counts.items(), strict=True)):
            colour, about = COLOURS[number % len(COLOURS)], hardness[letter]
            share = 100 * found / max(1.0, found.sum())
            axes.stairs(share, EDGES, fill=True, color=colour, alpha=0.35)
            axes.stairs(share, EDGES, color=colour, linewidth=0.8)
            axes.axvline(about["mean"], color="black", linewidth=0.8, linestyle=(0, (3, 2)))
            axes.set(ylim=(0, 1.08 * max(share.max(), 1e-9)), yticks=[])
            axes.set_ylabel(plain(DRAWN.get(letter, letter)), rotation=0, ha="right", va="center")
            axes.spines["left"].set_visible(False)
            variance = "–" if about["variance"] is None else f"{about['variance']:.5f}"
            told = f"E[H] {about['mean']:.3f}\nVar[H] {variance}\nwithin {about['variance_within']:.5f}"
            axes.text(1.02, 0.5, told.replace("-", "−"), transform=axes.transAxes, va="center", fontsize=6.5)
        panels[-1].set(xlim=(low - 0.02, high + 0.02), xlabel="hardness of drawn triplets")
    return figure


def training(runs: Mapping[str, Sequence[Mapping[str, str]]], title: str = "") -> Figure:
    """Return the course of trainings: hardness, share of perturbed triplets, loss and R@1 of validations.

    `runs` are the rows of each one's metrics.csv by its name. A column that a run does not have is left out;
    of long runs, means of neighbouring rows are shown.
    """
    found = {
        (panel, column, name): values
        for panel, columns in _COURSES.items()
        for column in columns
        for name, rows in runs.items()
        if len(values := course(rows, column))
    }
    if not found:
        told = ", ".join(column for columns in _COURSES.values() for column in columns)
        raise UserError(f"there is nothing to plot of {', '.join(runs)}: no row has any of {told}")
    looks = {name: look(number) for number, name in enumerate(runs)}
    shown = {name for _, _, name in found}
    handles = [_handle(name, shape) for name, shape in looks.items() if name in shown]
    lines = _COURSES["hardness"].values() if any(panel == "hardness" for panel, _, _ in found) else ()
    others = [_handle(told, Look(GREY, ""), linestyle=style) for told, style in lines]
    with styled():
        figure, panels = _stack([*dict.fromkeys(panel for panel, _, _ in found)], handles, others, title)
        for (panel, column, name), values in found.items():
            told, style = _COURSES[panel][column]
            shape = looks[name] if style == "-" else Look(looks[name].colour, "")
            up = values[:, 1] * (100 if column == "perturbed" else 1)
            often = max(1, len(values) // 8)
            _draw(
                panels[panel],
                values[:, 0],
                up,
                shape,
                f"{name} {told}".rstrip(),
                linestyle=style,
                markevery=often,
            )
        last = [*panels.values()][-1]
        last.set_xlabel("training step")
        last.locator_params(axis="x", integer=True)
    return figure


def course(rows: Sequence[Mapping[str, str]], column: str) -> NDArray[np.float64]:
    """Return the steps and values (N, 2) of a `column` of `rows`, as far as they are numbers.

    Of more than 150 of them, means of neighbouring ones are returned.

    >>> course([{"step": "10", "loss": "0.2"}, {"step": "20", "loss": "-"}], "loss")
    array([[10. ,  0.2]])
    """
    pairs = [(_logged(row.get("step")), _logged(row.get(column))) for row in rows]
    kept = np.array([pair for pair in pairs if np.isfinite(pair).all()], float).reshape(-1, 2)
    each = max(1, math.ceil(len(kept) / _POINTS))
    return np.array([kept[k : k + each].mean(0) for k in range(0, len(kept), each)]).reshape(-1, 2)


def _logged(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def records(named: Mapping[str, Record], title: str = "") -> Figure:
    """Return the ERS against R@1 of `named` records, and the ERS's terms, with intervals, under a `title`.

    A term is 100 where an attack moves nothing. A hollow mark is an ERS that is not valid.
    """
    terms = {name: terms_of(record) for name, record in named.items()}
    shown = [column for column in COLUMNS if any(column in found for found in terms.values())]
    if not shown:
        raise UserError("there is nothing to plot: no record has a score of the ERS")
    scored = {name: record_scores(record) for name, record in named.items()}
    whole = {name: scores for name, scores in scored.items() if {"R@1", "ERS"} <= scores.keys()}
    with styled():
        heights = [*([1.5] if whole else []), 2.0 + 0.12 * len(named)]
        figure = new_figure(0.45 + sum(heights) + 0.14 * len(named), title)
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        top, axes, handles = panels[0], panels[-1], []
        for number, (name, record) in enumerate(named.items()):
            shape, valid = look(number), record.ers is None or record.ers.valid
            hollow: dict[str, Any] = {
                "markerfacecolor": shape.colour if valid else "white",
                "linestyle": "none",
            }
            handles.append(_handle(name if valid else f"{name} (ERS not valid)", shape, **hollow))
            if (scores := whole.get(name)) is not None:
                _draw(top, [scores["R@1"]], [scores["ERS"]], shape, name, **hollow)
            shift = 0.7 * ((number + 0.5) / len(named) - 0.5)
            known = {
                k + shift: terms[name][column] for k, column in enumerate(shown) if column in terms[name]
            }
            if known:
                _draw(axes, [*known.values()], [*known], shape, name, **hollow)
        if whole:
            top.set(xlabel="R@1", ylabel="ERS")
            top.margins(0.12)
        axes.set_yticks(range(len(shown)), [COLUMNS[column].heading.split()[0] for column in shown])
        axes.set(ylim=(len(shown) - 0.5, -0.5), xlim=(-4, 104))
        axes.set_xlabel("term of the ERS: 100 where nothing moves")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        for place in range(0, len(shown), 2):
            axes.axhspan(place - 0.5, place + 0.5, color=BAND, zorder=0, linewidth=0)
        _legend(figure, handles)
    return figure


def budgets(named: Mapping[str, Curves]) -> dict[str, Figure]:
    """Return figures of scores against ε, for each norm, and against steps, by what they are against.

    `named` are the points of each record's curves. The scores are the ERS and ES:R; where neither was
    measured, the first two that were.
    """
    every = {name: [(*pair, record_scores(pair[1])) for pair in found] for name, found in named.items()}
    measured = {score for found in every.values() for _, _, scores in found for score in scores}
    scores = [s for s in ("ERS", "ES:R") if s in measured] or [s for s in COLUMNS if s in measured][:2]
    figures: dict[str, Figure] = {}
    for across, axis, norms, unit in (
        ("ε, in levels of 255", "eps", {"linf"}, 255),
        ("ε, a length (L2)", "eps", {"l2"}, 1),
        ("steps", "steps", {"linf", "l2"}, 1),
    ):
        lines = {
            name: [(unit * p.value, s) for p, r, s in found if p.axis == axis and r.settings.norm in norms]
            for name, found in every.items()
        }
        shown = [(name, look(number)) for number, (name, line) in enumerate(lines.items()) if line]
        if not shown or not scores:
            continue
        with styled():
            figure, panels = _stack(scores, [_handle(name, shape) for name, shape in shown])
            for score, axes in panels.items():
                axes.set_ylabel(SCORES[score].heading)
                for name, shape in shown:
                    line = [(x, found[score]) for x, found in lines[name] if score in found]
                    _draw(axes, [x for x, _ in line], [y for _, y in line], shape, name)
            ticks = sorted({x for line in lines.values() for x, _ in line})
            if axis == "steps":
                axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{x:.3g}" for x in ticks])
            axes.minorticks_off()
            axes.set_xlabel(across)
        figures[across] = figure
    return figures


def embedding_map(shown: Map, attacks: Sequence[str]) -> Figure:
    """Return a map of embeddings, coloured by class; arrows show where `attacks` moved queries.

    The arrows of the k-th attack are a group with the id `moves-k`.
    """
    looks = {name: look(number) for number, name in enumerate(shown.classes)}
    with styled():
        legend = len(looks) <= _CLASSES
        figure = new_figure(3.1 + 0.07 * len(looks) * legend)
        axes = figure.subplots()
        for number, shape in enumerate(looks.values()):
            here = [(x, y) for x, y, label in shown.points if label == number]
            across, up = zip(*here, strict=True)
            _draw(axes, across, up, shape, "", linestyle="none", markersize=2.4, alpha=0.8)
        for number, attack in enumerate(attacks):
            if moves := shown.moves.get(attack):
                x, y, to_x, to_y = np.array(moves).T
                how: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006}
                axes.quiver(x, y, to_x - x, to_y - y, color=GREY, gid=f"moves-{number}", **how)
        axes.set_aspect("equal", adjustable="datalim")
        axes.tick_params(labelbottom=False, labelleft=False, length=0)
        if legend:
            _legend(figure, [_handle(name, shape, linestyle="none") for name, shape in looks.items()])
    return figure


def _draw(axes: Axes, x: Values, y: Values, shape: Look, label: str, **how: Any) -> None:
    """Draw a series of points, with how far they may be off where they are estimates."""
    (across, width), (up, height) = _spread(x), _spread(y)
    bars = {"ecolor": (shape.colour, 0.6), "elinewidth": 0.8, "capthick": 0.8}
    look = {"color": shape.colour, "marker": shape.marker, "label": plain(label)}
    axes.errorbar(across, up, height, width, **{**bars, **look, **how})


def _spread(values: Values) -> tuple[Any, NDArray[np.float64] | None]:
    """Return values as numbers, and the lengths (2, N) of their bars below and above, if there are any."""
    estimates = [value for value in values if isinstance(value, Estimate)]
    if not estimates:
        return values, None
    lengths = np.array([estimate.spread for estimate in estimates]).T
    return [estimate.value for estimate in estimates], lengths if lengths.any() else None


def _stack(
    names: Sequence[str], handles: Sequence[Line2D], others: Sequence[Line2D] = (), title: str = ""
) -> tuple[Figure, dict[str, Axes]]:
    """Make a figure of panels one below the other, by name, with a legend below all."""
    figure = new_figure(0.5 + 0.13 * (len(handles) + 1) + 1.15 * len(names), title)
    panels = dict(zip(names, figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], strict=True))
    for name, axes in panels.items():
        axes.set_ylabel(name)
    figure.align_ylabels([*panels.values()])
    _legend(figure, handles, others)
    return figure, panels


def _handle(label: str, shape: Look, letters: int = 50, **more: Any) -> Line2D:
    """Make an entry of a legend, whose label has so many letters in a line."""
    from matplotlib.lines import Line2D

    told = wrapped(label, letters)
    return Line2D([], [], **{"color": shape.colour, "marker": shape.marker, "label": told, **more})


def _legend(figure: Figure, handles: Sequence[Line2D], others: Sequence[Line2D] = ()) -> None:
    """Put the legend below all panels, `others` last; in two columns if all names are short."""
    every = [*handles, *others]
    short = max(len(str(handle.get_label())) for handle in every) <= _SHORT
    figure.legend(handles=every, loc="outside lower left", ncols=2 if short else 1)
