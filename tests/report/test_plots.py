"""The plots: what they show is what they are given, and the same content gives the same bytes."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from robustmetric.experiments.findings import Finding
from robustmetric.experiments.outcome import Outcome
from robustmetric.experiments.paper import experiment
from robustmetric.experiments.samplers import EDGES
from robustmetric.report import plots
from robustmetric.report.curves import CurvePoint
from robustmetric.report.pictures import Map
from robustmetric.report.plots import inline, plain, save, styled
from tests.helpers.pages import parsed
from tests.helpers.records import a_record, altered


def lines_of(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each named series."""
    return {str(c.get_label()): _points(c.lines[0]) for c in axes.containers}  # type: ignore[attr-defined]


def _points(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def bars_of(axes: Axes) -> list[list[list[float]]]:
    """The two ends of all error bars, by series and direction."""
    return [np.array(c.get_segments()).reshape(-1, 4).tolist() for c in axes.collections]  # type: ignore[attr-defined]


def drawn(figure: Figure) -> None:
    """Draw a figure, and check that no text reaches out of it."""
    with styled():
        FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
        box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 >= -0.02
    assert box.y0 >= -0.02
    assert box.x1 <= width + 0.02
    assert box.y1 <= height + 0.02


def figure_1(shift: float = 1.0, seeds: int = 1) -> tuple[Figure, list[Finding]]:
    """Figure 1 with ours a little above what was published, one point missing and one collapsed."""
    about = experiment("figure1", seeds=range(seeds))
    found = []
    for number, row in enumerate(about.rows):
        assert row.published is not None
        scores = row.published.scores
        made: list[Outcome | None] = [
            Outcome(Path(), a_record({**scores, "R@1": scores["R@1"] + shift, "ERS": scores["ERS"] + k}))
            for k in range(seeds)
        ]
        if number == 1:
            made = [None] * seeds
        if number == 2:
            made = [Outcome(Path(), collapsed="fell")] * seeds
        found.append(Finding(row, tuple(made)))
    return plots.curves(about, found, "150 epochs"), found


@pytest.mark.slow
def test_curves_show_ours_and_the_published_points() -> None:
    figure, findings = figure_1()
    (part,) = figure.subfigs
    cost, both, recall, _ = part.axes
    known = {
        (f.row.defense, f.row.cost): f.row.published.scores for f in findings if f.row.published is not None
    }
    for name in ("ACT[R]", "ACT[S]", "HM[S,LGA]&ICS"):
        rows = {c: known[name, c] for c in (3, 5, 9, 17, 33)}
        kept = {c: s for c, s in rows.items() if name != "ACT[R]" or c not in (5, 9)}
        for label, points, shift in (("published", rows, 0), ("ours", kept, 1)):
            key = f"{name} {label}"
            assert lines_of(cost)[key] == [(c, s["ERS"]) for c, s in points.items()]
            assert lines_of(recall)[key] == [(c, s["R@1"] + shift) for c, s in points.items()]
            assert lines_of(both)[key] == [(s["R@1"] + shift, s["ERS"]) for s in points.values()]
    crosses = [_points(line) for line in cost.lines if line.get_marker() == "x"]
    assert crosses == [[(9.0, 0.03)]]  # collapsed, at the foot
    drawn(figure)


def test_error_bars_are_the_interval_or_the_deviation() -> None:
    assert bars_of(figure_1()[0].subfigs[0].axes[0])[0][0] == pytest.approx([3, 5.8 - 1, 3, 5.8 + 1])
    mean, deviation = 5.8 + 0.5, math.sqrt(0.5)
    cost = figure_1(seeds=2)[0].subfigs[0].axes[0]
    assert bars_of(cost)[0][0] == pytest.approx([3, mean - deviation, 3, mean + deviation])


def test_histograms_are_shares_of_each_samplers_triplets() -> None:
    rng = np.random.default_rng(0)
    counts = {letter: rng.multinomial(1000, np.ones(20) / 20) for letter in "RMSDH"}
    hardness = {
        letter: {"mean": 0.1 * -k, "variance": 0.001 * k or None, "variance_within": 0.05,
                 "counts": [0] * 190 + found.tolist() + [0] * 190}
        for k, (letter, found) in enumerate(counts.items())
    }  # fmt: skip
    figure = plots.hardness_histograms(
        hardness, "digits $x$ samplers, and more than fits into a single line of it"
    )
    names = ["Random", "Semihard", "Softhard", "Distance", "Hardest"]
    assert [axes.get_ylabel() for axes in figure.axes] == names
    for axes, found in zip(figure.axes, counts.values(), strict=True):
        steps: Any = axes.patches[1]
        values, edges, _ = steps.get_data()
        np.testing.assert_allclose(values[190:210], found / 10)
        np.testing.assert_array_equal(edges, EDGES)
    assert figure.axes[1].lines[0].get_xdata() == [-0.1, -0.1]
    assert figure.axes[0].texts[0].get_text().splitlines()[1] == "Var[H] –", "of a single batch"
    drawn(figure)


ROWS = [
    {"step": "10", "loss": "0.2", "perturbed": "0.5", "hardness/source": "-0.3",
     "hardness/destination": "-0.1", "hardness/reached": "-0.2", "R@1": ""},
    {"step": "15", "loss": "", "perturbed": "", "hardness/source": "",
     "hardness/destination": "", "hardness/reached": "", "R@1": "98"},
    {"step": "20", "loss": "nan", "perturbed": "0.25", "hardness/source": "-0.4",
     "hardness/destination": "inf", "hardness/reached": "much", "R@1": ""},
]  # fmt: skip


def test_a_training_shows_what_was_logged() -> None:
    figure = plots.training({"mine": ROWS, "other": [{"step": "5", "loss": "1.5"}]}, "two runs")
    hardness, perturbed, loss, recall = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["hardness", "perturbed, %", "loss", "R@1"]
    assert lines_of(recall) == {"mine": [(15, 98)]}
    assert lines_of(hardness) == {
        "mine source": [(10, -0.3), (20, -0.4)],
        "mine destination": [(10, -0.1)],
        "mine reached": [(10, -0.2)],
    }
    assert lines_of(perturbed) == {"mine": [(10, 50), (20, 25)]}
    assert lines_of(loss) == {"mine": [(10, 0.2)], "other": [(5, 1.5)]}
    told = [text.get_text() for text in figure.legends[0].get_texts() if text.get_text()]
    assert told == ["mine", "other", "source", "destination", "reached"]
    drawn(figure)


def test_records_show_ers_recall_and_terms() -> None:
    named = {
        "plain": a_record({"R@1": 53.9, "CA+": 20.0, "TMA": 0.75}, width=2.0),
        "fallen": a_record(why="one point"),
    }
    figure = plots.records(named)
    scatter, terms = figure.axes
    for number, (name, record) in enumerate(named.items()):
        assert record.ers is not None
        assert lines_of(scatter)[name] == [(record["R@1"], record["ERS"])]
        values, places = np.transpose(lines_of(terms)[name])
        assert values.tolist() == pytest.approx(list(record.ers.terms.values()))
        np.testing.assert_allclose(places, np.arange(10) + 0.35 * (number - 0.5))
    across, up = bars_of(scatter)[:2]
    ers = named["plain"]["ERS"]
    assert across == [pytest.approx([51.9, ers, 55.9, ers])]
    assert up == [pytest.approx([53.9, ers - 2, 53.9, ers + 2])]
    bars = bars_of(terms)[0]
    assert bars[0][::2] == pytest.approx([40 - 4, 40 + 4])  # CA+: twice the rank
    assert bars[4][::2] == pytest.approx([25 - 2, 25 + 2])  # TMA
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["plain", "fallen (ERS not valid)"]
    drawn(figure)


def test_terms_of_the_strict_protocol_stay_within_their_range() -> None:
    record = a_record({"CA+": 70.0, "GTT": 0.5}, protocol="strict")
    (_, terms) = plots.records({"one": record}).axes
    assert lines_of(terms)["one"][0] == (100.0, 0.0)
    assert bars_of(terms)[0][9][::2] == pytest.approx([0.0, 1.5])


@pytest.mark.slow
def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    first = save(figure_1()[0], tmp_path / "a" / "plot.1")
    assert [file.name for file in first] == ["plot.1.svg", "plot.1.pdf", "plot.1.png"]
    with mpl.rc_context({"font.size": 20, "lines.linewidth": 9, "svg.hashsalt": "other"}):
        second = save(figure_1()[0], tmp_path / "b" / "plot")
        assert mpl.rcParams["font.size"] == 20
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    svg = first[0].read_text(encoding="utf-8")
    assert ">HM[S,LGA]&amp;ICS</text>" in svg
    assert "<dc:date>" not in svg
    assert b"/CIDFontType2" in first[1].read_bytes()  # 42, which editors can edit; not type 3
    assert b"/Type3" not in first[1].read_bytes()
    assert b"CreationDate" not in first[1].read_bytes()
    with Image.open(first[2]) as image:
        assert image.width == 990
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert not [file for file in (tmp_path / "a").iterdir() if file.name.startswith(".")]


def test_hostile_and_foreign_names_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["_first", "$x^$ \\frac", "a\x1b[2J", "漢字", "long " * 60, "/a/path/without/spaces" * 9]
    named = {name: a_record() for name in names}
    figure = plots.records(named, "title $1 and _ 漢字 " * 9)
    (file,) = save(figure, tmp_path / "plot", ["svg"])
    text = file.read_text(encoding="utf-8")
    assert ">$x^$ \\frac</text>" in text
    assert "\x1b" not in text
    drawn(figure)
    told = [label.get_text() for label in figure.legends[0].get_texts()]
    assert told[0] == plain("_first")
    assert len(told) == len(names)


def test_curves_stand_at_their_budgets() -> None:
    record = altered(a_record(), settings={"eps": 16 / 255})
    points = [
        CurvePoint("eps", 8 / 255, "a"),
        CurvePoint("eps", 16 / 255, "b"),
        CurvePoint("steps", 4.0, "b"),
    ]
    length = altered(a_record({"ERS": 50.0}), settings={"norm": "l2", "eps": 2.0, "search": "apgd"})
    named = {"one": [(p, record) for p in points], "two": [(CurvePoint("eps", 2.0, "c"), length)], "none": []}
    found = plots.budgets(named)
    assert [*found] == ["ε, in levels of 255", "ε, a length (L2)", "steps"]
    levels, lengths, steps = (figure.axes for figure in found.values())
    assert lines_of(levels[0]) == {"one": [(8, record["ERS"]), (16, record["ERS"])]}
    assert lines_of(lengths[0]) == {"two": [(2, 50)]}
    assert lines_of(steps[1]) == {"one": [(4, record["ES:R"])]}
    for figure in found.values():
        drawn(figure)
    assert plots.budgets({"none": []}) == {}


def test_a_map_has_its_points_and_the_moves_of_each_attack() -> None:
    shown = Map(
        points=[(0.0, 0.1, 0), (1.0, 0.2, 1), (0.5, 0.5, 1)], classes=["$a$", "b"], explained=(0.5, 0.2),
        moves={"ES": [(0.0, 0.1, 0.5, 0.6)], "TMA": []},
    )  # fmt: skip
    figure = plots.embedding_map(shown, ["TMA", "ES"])
    assert [_points(c.lines[0]) for c in figure.axes[0].containers] == [[(0, 0.1)], [(1, 0.2), (0.5, 0.5)]]  # type: ignore[attr-defined]
    page = parsed(inline(figure, "a map", "map-0"))
    assert [one["id"] for one in page.all("g") if "moves" in one.attributes.get("id", "")] == [
        "map-0-moves-1"
    ]
    assert "$a$" in page.text
    drawn(figure)


def test_a_plot_within_a_page_has_no_styles_and_the_page_s_colours() -> None:
    names = ["plain", '</svg><script>alert(1)</script> style="x: y"']
    text = inline(plots.records({name: a_record() for name in names}), 'about "it" <b>', "key")
    svg = parsed(text).one("svg")
    assert svg["aria-label"] == 'about "it" <b>'
    assert not [*svg.all("style"), *svg.all("metadata"), *svg.all("script")]
    assert names[1] in svg.text, "a name is a text, whatever it looks like"
    assert not [one for one in svg.every() if "style" in one.attributes]
    ids = [one["id"] for one in svg.every() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    assert all(name.startswith("key-") for name in ids)
    values = [value for one in svg.every() for value in one.attributes.values()]
    assert all(link in ids for value in values for link in re.findall(r"(?:^|url\()#([\w-]+)", value))
    colours = {one.attributes.get(name, "") for one in svg.every() for name in ("stroke", "fill")}
    assert {"var(--s0)", "var(--s1)"} <= colours
    assert not [colour for colour in colours if colour.startswith("#")]
