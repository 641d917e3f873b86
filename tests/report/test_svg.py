"""Plots as SVG: marks stand where the ticks say, and no text from data can say anything else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree  # what is parsed is made here

import numpy as np
import pytest

from robustmetric import UserError
from robustmetric.report.svg import Point, Series, dots, lines, radar, scatter
from robustmetric.report.svg_axes import doublings, fit, nice, spread, tick_texts, wide

ROUNDED = 0.05 + 1e-9  # places have one decimal
TERMS = ["CA+", "CA−", "QA+", "QA−", "TMA", "ES:D", "ES:R", "LTM", "GTM", "GTT"]
NAMES = ["c2f2 HM[S,LGA]&ICS", "c2f2 N/A[R]", "c2f2 ACT[S]", "resnet18 " + "x" * 60]
HOSTILE = "<script>alert(1)</script> \"a\" 'b' & &amp; ]]> \x1b[2J \x00 \ud800 \uffff \u202e"
TOLD: dict[str, Any] = {"title": "Terms", "about": "See the table.", "key": "plot"}
Element = ElementTree.Element


def read(text: str) -> Element:
    """Parse without the name space, and check what holds for every plot."""
    root = ElementTree.fromstring(text.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1))  # noqa: S314
    assert root.tag == "svg"
    assert root.get("role") == "img"
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert {root.attrib["aria-labelledby"], root.attrib["aria-describedby"]} <= set(ids)
    assert "width" not in root.attrib
    assert float(root.attrib["font-size"]) >= 11
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    assert (left, top, width) == (0, 0, 640)
    for element in root.iter():
        assert element.tag in ("svg", "title", "desc", "g", "path", "circle", "rect", "text")
        for name, value in element.attrib.items():
            assert name != "style"
            assert not name.startswith("on")
            if name in ("fill", "stroke"):
                assert value in ("none", "currentColor")
        if element.tag in ("circle", "text") or element.get("d", "").startswith("M"):
            x, y = place(element)
            assert 0 <= x <= width
            assert 0 <= y <= height
    assert "nan" not in text.replace(root.findtext("desc") or "", "")
    return root


def place(element: Element) -> tuple[float, float]:
    if element.tag == "path":
        found = re.match(r"M(\S+) ([^a-zA-Z]+)", element.attrib["d"])
        assert found is not None
        return float(found[1]), float(found[2])
    names = ("cx", "cy") if element.tag == "circle" else ("x", "y")
    return float(element.attrib[names[0]]), float(element.attrib[names[1]])


def of_class(root: Element, *names: str) -> list[Element]:
    return [element for element in root.iter() if set(names) <= set(element.get("class", "").split())]


def marks(root: Element, number: int) -> dict[str, tuple[float, float]]:
    """Where the marks of a series are, by what is told on hovering."""
    return {e.findtext("title") or "": place(e) for e in of_class(root, f"s{number}") if e.findtext("title")}


def text_of(element: Element) -> str:
    return "".join(element.itertext())


def ruler(root: Element, axis: int, log: bool = False) -> Callable[[float], float]:
    """The map from values to places that the first and the last tick of an axis show."""
    texts = [
        (text_of(e).replace("−", "-"), place(e), e.attrib["text-anchor"]) for e in of_class(root, "tick")
    ]
    found = [(float(t), p[axis]) for t, p, anchor in texts if (anchor == "middle") == (axis == 0)]
    (low, start), (high, end) = min(found), max(found)
    scale: Callable[[float], float] = math.log2 if log else float
    shift = 0.35 * 12 if axis else 0  # from a text's base line to its middle
    return lambda v: start - shift + (scale(v) - scale(low)) / (scale(high) - scale(low)) * (end - start)


def some(seed: int = 0, count: int = 2) -> list[Series]:
    drawn = np.random.default_rng(seed)
    values = [[drawn.uniform(5, 95) for _ in TERMS] for _ in range(count)]
    return [
        Series(
            name, [Point(k, y, y - drawn.uniform(0, 5), y + drawn.uniform(0, 5)) for k, y in enumerate(found)]
        )
        for name, found in zip(NAMES, values, strict=False)
    ]


def test_dots_stand_at_their_values_in_their_rows() -> None:
    series = some(count=3)
    root = read(dots(TERMS, series, **TOLD))
    x_of = ruler(root, 0)
    bands = [float(e.attrib["y"]) for e in of_class(root, "band")]
    each = (bands[1] - bands[0]) / 2
    for number, one in enumerate(series):
        found = list(marks(root, number).items())
        assert len(found) == len(TERMS)
        for point, (told, (x, y)) in zip(one.points, found, strict=True):
            assert told.startswith(f"{one.name}, {TERMS[int(point.x)]}: {point.y:.8g}"[:-1])
            assert x == pytest.approx(
                x_of(point.y or 0), abs=3 * ROUNDED
            )  # two ticks and the mark are rounded
            assert math.floor((y - bands[0]) / each) == point.x
        for point, whisker in zip(one.points, of_class(root, "whisker", f"s{number}"), strict=True):
            first, last = re.match(r"M(\S+) .*H([\d.]+)", whisker.attrib["d"]).groups()  # type: ignore[union-attr]
            assert float(first) == pytest.approx(x_of(point.low or 0), abs=3 * ROUNDED)
            assert float(last) == pytest.approx(x_of(point.high or 0), abs=3 * ROUNDED)
    rows = {round(y, 1) for number in range(3) for _, y in marks(root, number).values()}
    assert len(rows) == 3 * len(TERMS), "two series of a row have the same height"


@pytest.mark.parametrize("log", [False, True])
def test_lines_go_through_their_values(log: bool) -> None:
    one = Series(
        "mine", [Point(x, y, y - 2, y + 2) for x, y in ((2, 11.5), (3, 20.0), (9, 31.25), (33, 18.0))]
    )
    root = read(lines([one], across="cost", up="ERS", log=log, **TOLD))
    x_of, y_of = ruler(root, 0, log), ruler(root, 1)
    line = of_class(root, "line", "s0", "d0")[0]  # the other is the legend's
    corners = [tuple(map(float, c.split())) for c in re.split("[ML]", line.attrib["d"])[1:]]
    placed = list(marks(root, 0).values())
    assert corners == placed
    for point, (x, y) in zip(one.points, placed, strict=True):
        assert x == pytest.approx(x_of(point.x), abs=3 * ROUNDED)
        assert y == pytest.approx(y_of(point.y or 0), abs=3 * ROUNDED)
    for point, whisker in zip(one.points, of_class(root, "whisker"), strict=True):
        first, last = re.match(r"M\S+ ([\d.]+)h6m-3 0V([\d.]+)", whisker.attrib["d"]).groups()  # type: ignore[union-attr]
        assert float(first) == pytest.approx(y_of(point.low or 0), abs=3 * ROUNDED)
        assert float(last) == pytest.approx(y_of(point.high or 0), abs=3 * ROUNDED)


def test_given_ticks_are_the_ticks() -> None:
    one = Series("mine", [Point(2, 1.0), Point(33, 2.0)])
    root = read(
        lines([one], across="", up="", log=True, ticks=[(33, "b"), (2, "a"), (math.nan, "c")], **TOLD)
    )
    found = {text_of(e): place(e)[0] for e in of_class(root, "tick") if e.attrib["text-anchor"] == "middle"}
    assert found == dict(zip("ab", (x for x, _ in marks(root, 0).values()), strict=True))


def test_ticks_that_would_collide_have_no_text() -> None:
    one = Series("mine", [Point(0, 1.0), Point(1, 2.0)])
    ticks = [(k / 200, f"tick {k}") for k in range(201)]
    root = read(lines([one], across="", up="", ticks=ticks, **TOLD))
    shown = [(place(e)[0], text_of(e)) for e in of_class(root, "tick") if e.attrib["text-anchor"] == "middle"]
    assert 2 <= len(shown) < 20
    for (x, text), (after, then) in pairwise(shown):
        assert x + wide(text) / 2 < after - wide(then) / 2


def test_a_map_has_one_scale_and_its_arrows_end_where_they_should() -> None:
    points = [(0.0, 0.0, 0), (1.0, 0.0, 11), (0.0, 1.0, 2), (0.25, -0.5, 2)]
    moves = {"CA+": [(0.0, 0.0, 1.0, 1.0), (0.5, 0.5, 0.5, 0.5)], "QA+": [(1.0, 0.0, 0.0, 1.0)]}
    root = read(scatter(points, moves, names=["cat", "", "dog"], **TOLD))
    x_of, y_of = ruler(root, 0), ruler(root, 1)
    assert x_of(1) - x_of(0) == pytest.approx(y_of(0) - y_of(1), rel=0.01)
    groups = [e for e in root if re.fullmatch(r"c\d", e.get("class", ""))]
    assert [(e.attrib["class"], e.findtext("title")) for e in groups] == [
        ("c0", "cat"), ("c2", "dog"), ("c1", "class 11"),
    ]  # fmt: skip
    found = [place(e) for group in groups for e in group if e.tag != "title"]
    wanted = [points[0], points[2], points[3], points[1]]
    for (x, y), (a, b, _) in zip(found, wanted, strict=True):
        assert x == pytest.approx(x_of(a), abs=3 * ROUNDED)
        assert y == pytest.approx(y_of(b), abs=3 * ROUNDED)
    arrows = of_class(root, "moves")
    assert [e.attrib["data-attack"] for e in arrows] == ["CA+", "QA+"]
    for group in arrows:
        path = group.find("path")
        assert path is not None
        assert path.attrib["class"] == "move"
        shafts = re.findall(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)", path.attrib["d"])
        for shaft, (a, b, c, d) in zip(shafts, moves[group.attrib["data-attack"]], strict=True):
            for got, want in zip(map(float, shaft), (x_of(a), y_of(b), x_of(c), y_of(d)), strict=True):
                assert got == pytest.approx(want, abs=3 * ROUNDED)
    assert [text_of(e) for e in of_class(of_class(root, "legend")[0], "label")] == ["cat", "dog"]


def test_a_radar_stands_at_its_values() -> None:
    one = Series("mine", [Point(k, value) for k, value in enumerate((100.0, 0.0, 50.0, 120.0))])
    root = read(radar(["a", "b", "c", "d"], [one], **TOLD))
    top, middle, below, left = marks(root, 0).values()
    cx, cy = middle
    radius = cy - top[1]
    assert top[0] == cx == below[0]
    assert below[1] - cy == pytest.approx(radius / 2, abs=2 * ROUNDED)
    assert cx - left[0] == pytest.approx(radius, abs=2 * ROUNDED), "120 stands at 100"
    assert "mine, d: 120" in marks(root, 0)
    assert len(of_class(root, "area")) == 1
    names = {text_of(e): place(e) for e in of_class(root, "label")}
    assert names["d"][0] < cx - radius < cx + radius < names["b"][0]
    assert names["a"][1] < cy - radius < cy + radius < names["c"][1]


def test_a_radar_with_a_gap_is_not_filled() -> None:
    one = Series("mine", [Point(0, 10), Point(1, 20), Point(2, math.nan), Point(3, 30), Point(4, None)])
    root = read(radar(list("abcde"), [one], **TOLD))
    assert not of_class(root, "area")
    assert len(marks(root, 0)) == 3
    assert of_class(root, "line")[0].attrib["d"].count("M") == 1, "only a and b are neighbours"


@pytest.mark.parametrize("count", [3, 4, 7, 10, 15, 24, 40])
def test_names_around_a_radar_do_not_collide(count: int) -> None:
    rows = [f"a long name of term {k}" for k in range(count)]
    root = read(radar(rows, [Series("x", [Point(k, 50) for k in range(count)])], **TOLD))
    boxes = []
    for label in of_class(root, "label"):
        if "tick" in label.attrib["class"] or label in list(of_class(root, "legend")[0]):
            continue
        (x, y), width = (
            place(label),
            wide(label.findall("title")[0].tail or "" if len(label) else text_of(label)),
        )
        start = {"start": x, "middle": x - width / 2, "end": x - width}[label.attrib["text-anchor"]]
        assert start >= 0
        assert start + width <= 640
        boxes.append((start, start + width, y))
    assert len(boxes) == count
    for k, (a, b, y) in enumerate(boxes):
        assert all(b <= c or d <= a or abs(y - z) >= 12 for c, d, z in boxes[:k])


def test_names_that_crowd_are_spread() -> None:
    turns = [(math.sin(2 * math.pi * k / 40), -math.cos(2 * math.pi * k / 40)) for k in range(40)]
    right = spread(turns, 156, 15)[1:20]
    assert all(b - a >= 15 - 1e-9 for a, b in pairwise(right))
    assert right[9] == pytest.approx(0, abs=1e-9)


def all_plots(text: str, key: str = "plot") -> list[str]:
    series = [Series(text, [Point(k, 10.0 * k, 5, 50, note=text) for k in range(3)])]
    told: dict[str, Any] = {"title": text, "about": text, "key": key}
    rows = [text, f"{text}2", f"{text}3"]
    return [
        dots(rows, series, unit=text, **told),
        lines(series, across=text, up=text, ticks=[(1, text)], **told),
        scatter([(0, 0, 0), (1, 1, 1)], {text: [(0, 0, 1, 1)]}, names=[text], **told),
        radar(rows, series, **told),
        dots([], [], **told),
    ]


def test_no_text_can_say_anything_in_a_page() -> None:
    for plot in all_plots(HOSTILE):
        root = read(plot)  # knows all elements and attributes
        for part in ("<script", "\x1b", "\x00", "\ud800", "\uffff", "\u202e"):
            assert part not in plot
        shown = root.findtext("title") or ""
        assert shown.startswith("<script>alert(1)</script> \"a\" 'b' & &amp; ]]> \\x1b[2J \\x00")
        plot.encode()
        assert "]]>" not in plot


def test_every_kind_has_its_class_and_ids_of_its_own() -> None:
    plots = [plot for key in ("a", "b") for plot in all_plots("x", key)]
    kinds = [read(plot).attrib["class"] for plot in plots[:5]]
    assert kinds == ["plot dots", "plot lines", "plot scatter", "plot radar", "plot empty"]
    assert {i.partition("-")[0] for p in plots[:5] for i in re.findall(r' id="([^"]+)"', p)} == {"a"}
    assert plots[:5] == all_plots("x", "a"), "the same content gives the same text"


@pytest.mark.parametrize("key", ["", "1a", "a b", 'a"b', "ä"])
def test_a_key_is_an_id(key: str) -> None:
    with pytest.raises(UserError, match=r"^a plot's key is a letter and then letters, digits, - or _, not "):
        all_plots("x", key)


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf, 1e301, None])
def test_what_is_no_number_is_left_out(nothing: float | None) -> None:
    points = [Point(0, 1.0), Point(1, nothing), Point(2, 3.0, nothing, nothing), Point(3, 4.0, nothing, 5.0)]
    root = read(dots(list("abcd"), [Series("x", points)], **TOLD))
    assert list(marks(root, 0)) == ["x, a: 1", "x, c: 3", "x, d: 4 (4 to 5)"]
    assert len(of_class(root, "whisker")) == 1
    root = read(lines([Series("x", points)], across="k", up="", **TOLD))
    assert list(marks(root, 0)) == ["x, k 0: 1", "x, k 2: 3", "x, k 3: 4 (4 to 5)"]
    assert re.sub("[^ML]", "", of_class(root, "line")[0].attrib["d"]) == "MML", "a gap, then on"
    assert len(marks(read(radar(list("abcd"), [Series("x", points)], **TOLD)), 0)) == 3
    if nothing is not None:
        map_ = read(scatter([(0, nothing, 1), (0, 1, 2)], {"A": [(0, 0, nothing, 1)]}, **TOLD))
        assert not of_class(map_, "c1")
        assert not of_class(map_, "move")
    for empty in (
        dots(["a"], [Series("x", [Point(0, nothing)])], **TOLD),
        lines([Series("x", [Point(0, nothing)])], across="", up="", **TOLD),
        radar(list("abc"), [Series("x", [Point(0, nothing)])], **TOLD),
        radar(list("ab"), [Series("x", [Point(0, 1.0)])], **TOLD),
        scatter([], {"A": []}, **TOLD),
        lines([], across="", up="", **TOLD),
    ):
        assert [text_of(e) for e in of_class(read(empty), "label")] == ["nothing to show"]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (50, 50), (-3, -3), (1e300, 1e300), (-1e300, 1e300), (0, 5e-324), (1e16, 1e16 + 2),
     (0, 1e-7), (0.1, 0.3), (3, 97), (-1, 1e9), (999999, 1000001), (1e-300, 2e-300)],
)  # fmt: skip
def test_ticks_are_even_and_cover_the_values(low: float, high: float) -> None:
    ticks = nice(low, high)
    steps = {f"{b - a:.6e}" for a, b in pairwise(ticks)}
    assert len(steps) == 1
    assert re.match(r"[125]\.000000e|9\.99999.e|1\.99999.e|4\.99999.e", steps.pop())
    assert 3 <= len(ticks) <= 9
    slack = 1e-9 * (ticks[1] - ticks[0]) + 1e-15 * abs(high)  # what a place of one decimal cannot show
    assert ticks[0] <= low + slack
    assert high <= ticks[-1] + slack
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(texts)
    for text, tick in zip(texts, ticks, strict=True):
        assert float(text.replace("−", "-")) == pytest.approx(
            tick, rel=1e-9, abs=1e-9 * (ticks[1] - ticks[0])
        )


@pytest.mark.parametrize(("low", "high"), [(1, 1), (3, 9), (1e-300, 1e300), (0.2, 0.5), (2, 33)])
def test_doublings_cover_the_values(low: float, high: float) -> None:
    powers = [value for value, _ in doublings(low, high)]
    assert 2 <= len(powers) <= 10
    assert powers[0] <= low
    assert high <= powers[-1]
    assert all(math.log2(value).is_integer() for value in powers)


@pytest.mark.parametrize(
    "values", [[(5.0, 7.0)], [(1.0, 0.0), (2.0, 0.0)], [(1e300, -1e300), (-1e300, 1e300)]]
)
def test_few_or_huge_values_have_a_plain_axis(values: Sequence[tuple[float, float]]) -> None:
    root = read(lines([Series("x", [Point(x, y) for x, y in values])], across="", up="", **TOLD))
    assert len(marks(root, 0)) == len(values)
    read(scatter([(x, y, 0) for x, y in values], {}, **TOLD))
    read(dots(["a"], [Series("x", [Point(0, y) for _, y in values])], **TOLD))
    one = Series("x", [Point(abs(x), 1.0) for x, _ in values])
    read(lines([one], across="", up="", log=True, **TOLD))
    read(lines([one], across="", up="", log=True, ticks=[(abs(values[0][0]), "a")], **TOLD))


def test_values_beyond_the_span_make_the_axis_longer() -> None:
    root = read(dots(["a"], [Series("x", [Point(0, 130.0, -20.0, 140.0)])], **TOLD))
    shown = [float(text_of(e).replace("−", "-")) for e in of_class(root, "tick")]
    assert min(shown) <= -20
    assert max(shown) >= 140
    root = read(lines([Series("x", [Point(0, 5.0)])], across="", up="", span=(0, 100), **TOLD))
    shown = [float(text_of(e)) for e in of_class(root, "tick") if e.attrib["text-anchor"] == "end"]
    assert (min(shown), max(shown)) == (0, 100)


def test_an_interval_that_just_passes_an_end_adds_one_tick() -> None:
    assert nice(-2, 100) == [-20, 0, 20, 40, 60, 80, 100]


def test_many_series_with_long_names_are_told_apart() -> None:
    series = [Series(f"network {k:02} {'x' * 50}", [Point(0, k), Point(1, 2 * k)]) for k in range(14)]
    root = read(lines(series, across="", up="", **TOLD))
    (legend,) = of_class(root, "legend")
    labels = [e for e in legend if e.tag == "text"]
    assert [e.findtext("title") for e in labels] == [one.name for one in series]
    shown = [e[0].tail or "" for e in labels]
    assert len(set(shown)) == 14
    assert all("…" in text and place(e)[0] + wide(text) <= 640 for e, text in zip(labels, shown, strict=True))
    places = [place(e) for e in labels]
    assert len(set(places)) == 14
    looks = {
        (e.attrib["class"], re.sub(r"[\d.-]+", "", e.get("d", e.tag)))
        for e in legend
        if "mark" in e.attrib.get("class", "")
    }
    assert len(looks) == 14


def test_names_that_differ_in_their_middle_alone_stay_longer() -> None:
    series = [Series(f"{'a' * 25}{k}{'b' * 25}", [Point(0, k)]) for k in range(2)]
    (legend,) = of_class(read(lines(series, across="", up="", **TOLD)), "legend")
    shown = [e for e in legend if e.tag == "text"]
    assert len({e[0].tail if len(e) else e.text for e in shown}) == 2


def test_text_is_shortened_in_its_middle() -> None:
    assert fit("abcdefghijklmnopqrstuvwxyz", 1) == "…"
    for width in range(20, 200, 7):
        short = fit("abcdefghijklmnopqrstuvwxyz", width)
        assert wide(short) <= width
        first, _, last = short.partition("…")
        assert 0 <= len(first) - len(last) <= 1 or short == "abcdefghijklmnopqrstuvwxyz"


def test_a_long_line_has_few_large_marks_and_tells_every_value() -> None:
    root = read(lines([Series("x", [Point(k, k % 7) for k in range(150)])], across="", up="", **TOLD))
    assert len(marks(root, 0)) == 150
    assert len(of_class(root, "mark", "s0")) == 10 + 1  # and the legend's


def test_a_map_of_a_thousand_points_is_small() -> None:
    drawn = np.random.default_rng(0)
    for classes in (list(range(10)), [0], [1], [2], [3], [4], [5]):
        points = [(drawn.normal(0, 1), drawn.normal(0, 1), classes[k % len(classes)]) for k in range(1000)]
        moves = {
            term: [(*p[:2], drawn.normal(0, 1), drawn.normal(0, 1)) for p in points[:20]] for term in TERMS
        }
        text = scatter(points, moves, names=["a name"] * 10, **TOLD)
        read(text)
        assert len(text.encode()) < 60_000


def test_many_classes_have_no_legend() -> None:
    points = [(k, k, k) for k in range(21)]
    names = [f"bird {k}" for k in range(21)]
    assert not of_class(read(scatter(points, {}, names=names, **TOLD)), "legend")
    assert of_class(read(scatter(points[:20], {}, names=names, **TOLD)), "legend")


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^0 cannot be shown on a logarithmic axis: give values above 0, or log=False$"
    ):
        lines([Series("x", [Point(0, 1.0)])], across="", up="", log=True, **TOLD)
    for row in (-1, 2, 0.5):
        told = f"^a point of series 'x' is in row {row}, but there are 2 rows: count them from 0$"
        with pytest.raises(UserError, match=told):
            dots(["a", "b"], [Series("x", [Point(row, 1.0)])], **TOLD)
    with pytest.raises(UserError, match=r"^a radar shows at most 6 series, not 7: choose some, or use dots$"):
        radar(list("abc"), [Series("x", [])] * 7, **TOLD)
    with pytest.raises(UserError, match=r"^a radar shows at most 40 rows, not 41: choose some, or use dots$"):
        radar(["a"] * 41, [], **TOLD)
