"""Small plots as text of SVG, to stand within a page of HTML: dots, lines, maps and radars.

Colours come from the page. An svg has no style and no colour but currentColor, so that it can be seen without
any rules, and takes the colour of the text then. These classes exist:

- `plot` and one of `dots`, `lines`, `scatter`, `radar`, `empty`: the svg itself
- `s0` to `s5`: marks, lines, areas and whiskers of series 0 to 5, again from `s0` on for more
- `c0` to `c9`: groups of points of class k, `c{k % 10}`
- `mark`: marks of series and legends; `line`: lines, with `d0` to `d5` for their dashes; `area`: filled ones
- `whisker`: intervals; `moves`: groups of arrows, with `data-attack`; `move`: the arrows
- `axis`, `grid`, `band` (behind every other row), `legend`
- `label`: all text; also `tick` on ticks' and `name` on names of axes

Rules set `color` for `s…` and `c…`, as all of it is drawn in currentColor, and `stroke-dasharray` for `d…`.
An svg is as wide as what it stands in; at 640 pixels text has 12.

What is not a number (None, NaN, infinite, beyond 1e300) is left out. If nothing is left, the svg says
"nothing to show": a report is written though one figure is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from robustmetric.errors import UserError, brief
from robustmetric.report import svg_axes as draw
from robustmetric.report.svg_axes import RIGHT, WIDTH, Scale, known, safe, stroke, units, wide, word

_CLASSES = 20  # of a legend
_MARKS = 40  # of a line; of a longer one, ten are large and the others are hidden in it
_MOST_SERIES, _FEWEST_ROWS, _MOST_ROWS = 6, 3, 40  # of a radar


class Point(NamedTuple):
    """A value `y` at `x`, its interval from `low` to `high`, and a `note` shown on hovering.

    >>> Point(0, 53.9, 51.2, 56.6).note
    ''
    """

    x: float
    y: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""


class Series(NamedTuple):
    """Points that belong together under a `name`: its `points`.

    >>> Series("c2f2 N/A[R]", [Point(0, 53.9)]).name
    'c2f2 N/A[R]'
    """

    name: str
    points: Sequence[Point]


def dots(
    rows: Sequence[str],
    series: Sequence[Series],
    *,
    title: str,
    about: str,
    key: str,
    span: tuple[float, float] = (0.0, 100.0),
    unit: str = "",
) -> str:
    """Return a plot of dots with intervals: a row for each of `rows`, in it a mark for each of `series`.

    A point's x is the number of its row. The axis shows `span`, and more if values lie beyond; `unit` stands
    below it and behind values. `title` is the plot's name, `about` says what it shows, and `key` begins its
    ids: another one for each plot of a page.

    >>> text = dots(["CA+"], [Series("mine", [Point(0, 31.5, 28, 35)])], title="T", about="A", key="terms")
    >>> "<title>mine, CA+: 31.5 (28 to 35)</title>" in text
    True
    """
    found = [_known(one, rows) for one in series]
    ends = [end for points in found for point in points for end in _ends(point)]
    if not ends:
        return _nothing(title, about, key)
    names = draw.fit_all(rows, 180, 300)
    left = max(map(wide, names)) + 20
    each = 10.0 * (len(series) - 1) + 22  # the height of a row
    ticks = draw.nice(*_around(ends, span))
    top, bottom = 6.0, 6.0 + each * len(rows)
    scale = Scale(ticks[0], ticks[-1], left + 8, RIGHT - 4)
    parts = [
        f'<rect class="band" x="0" y="{units(top + each * k)}" width="{WIDTH}" height="{units(each)}" '
        f'rx="3" fill-opacity="0.05"/>'
        for k in range(0, len(rows), 2)
    ]
    parts.append(draw.across_ticks(scale, list(zip(ticks, draw.tick_texts(ticks), strict=True)), top, bottom))
    for k, (name, shown) in enumerate(zip(rows, names, strict=True)):
        parts.append(word(left - 10, top + each * (k + 0.5), name, anchor="end", width=wide(shown)))
    for number, (one, points) in enumerate(zip(series, found, strict=True)):
        own, _ = draw.looks(number)
        for point in points:
            y = top + each * (point.x + 0.5) + 10 * (number - (len(series) - 1) / 2)
            if (between := _between(point)) is not None:
                first, last = (units(scale(end)) for end in between)
                path = f"M{first} {units(y - 3)}v6m0-3H{last}m0-3v6"
                parts.append(stroke(path, f"whisker {own}", width=1.5))
            told = _told(f"{one.name}, {rows[int(point.x)]}", point, unit)
            parts.append(draw.mark(number, scale(_y(point)), y, 4.2, kind=f"mark {own}", told=told))
    height = bottom + 26
    if unit:
        parts.append(word((left + RIGHT) / 2, height + 6, unit, kind="label name", width=WIDTH - left))
        height += 20
    return _below(parts, list(enumerate(s.name for s in series)), height, left=left, kind="dots",
                  title=title, about=about, key=key)  # fmt: skip


def lines(
    series: Sequence[Series],
    *,
    title: str,
    about: str,
    key: str,
    across: str,
    up: str,
    span: tuple[float, float] | None = None,
    log: bool = False,
    ticks: Sequence[tuple[float, str]] | None = None,
) -> str:
    """Return a plot of lines with marks and intervals, one for each of `series`, and a legend below.

    A line goes through its points in their order, and has a gap where a value is not known. `across` and `up`
    are the names of the axes of x and y. The axis of y shows `span`, and more if values lie beyond. By `log`
    x is shown by its log2. `ticks` are values of x with their texts; None makes even ones, or powers of two.
    `title`, `about` and `key` are as in `dots`.

    >>> one = Series("mine", [Point(1, 20.0), Point(2, 31.5)])
    >>> text = lines([one], title="T", about="A", key="cost", across="cost", up="ERS", log=True)
    >>> "<title>mine, cost 2: 31.5</title>" in text
    True
    """
    found = [_known(one) for one in series]
    xs = [point.x for points in found for point in points]
    if not xs:
        return _nothing(title, about, key)
    ticks = None if ticks is None else sorted(tick for tick in ticks if known(tick[0]))
    xs += [value for value, _ in ticks or ()]
    if log and min(xs) <= 0:
        raise UserError(
            f"{draw.exact(min(xs))} cannot be shown on a logarithmic axis: give values above 0, or log=False"
        )
    rise = draw.nice(*_around([end for points in found for point in points for end in _ends(point)], span))
    texts = draw.tick_texts(rise)
    left, top, bottom = max(map(wide, texts)) + 14, 30.0, 290.0
    low, high = min(xs), max(xs)
    if log:
        ticks = ticks or draw.doublings(low, high)
        low, high = min(low, ticks[0][0]), max(high, ticks[-1][0])
        low, high = (low / 2, high * 2) if low == high else (low, high)
    elif ticks:
        low, high = draw.apart(low, high)
    else:
        even = draw.nice(low, high, 6)
        ticks, low, high = list(zip(even, draw.tick_texts(even), strict=True)), even[0], even[-1]
    x_of = Scale(low, high, left + 14, RIGHT - 14, log)
    y_of = Scale(rise[0], rise[-1], bottom, top)
    parts = [draw.across_ticks(x_of, ticks, top, bottom)]
    parts.append(stroke("".join(f"M{units(left)} {units(y_of(t))}H{units(RIGHT)}" for t in rise), "grid"))
    parts += [
        word(left - 8, y_of(t), s, anchor="end", kind="label tick") for t, s in zip(rise, texts, strict=True)
    ]
    parts.append(stroke(f"M{units(left)} {units(bottom)}H{units(RIGHT)}", "axis"))
    parts.append(word(4, 11, up, anchor="start", kind="label name", width=WIDTH - 8))
    parts.append(word((left + RIGHT) / 2, bottom + 33, across, kind="label name", width=WIDTH - left))
    whiskers, marks = [], []
    for number, (one, points) in enumerate(zip(series, found, strict=True)):
        own, dashes = draw.looks(number)
        path = "".join(
            f"{'ML'[joined]}{units(x_of(point.x))} {units(y_of(_y(point)))}"
            for point, joined in _joined(one.points)
        )
        parts.append(stroke(path, f"line {own} {dashes}", width=1.8) if path else "")
        for place, point in enumerate(points):
            x = x_of(point.x)
            if (between := _between(point)) is not None:
                first, last = (units(y_of(end)) for end in between)
                path = f"M{units(x - 3)} {first}h6m-3 0V{last}m-3 0h6"
                whiskers.append(stroke(path, f"whisker {own}", width=1.5))
            told = _told(f"{one.name}, {across} {draw.exact(point.x)}", point)
            large = len(points) <= _MARKS or place % (len(points) // 10) == 0
            size, kind = (4.2, f"mark {own}") if large else (1.5, own)
            marks.append(draw.mark(number, x, y_of(_y(point)), size, kind=kind, told=told))
    parts += whiskers + marks
    return _below(parts, list(enumerate(s.name for s in series)), bottom + 46, left=left, kind="lines",
                  title=title, about=about, key=key, line=True)  # fmt: skip


def scatter(
    points: Sequence[tuple[float, float, int]],
    moves: Mapping[str, Sequence[tuple[float, float, float, float]]],
    *,
    title: str,
    about: str,
    key: str,
    names: Sequence[str] = (),
) -> str:
    """Return a map: points of classes, and arrows from where they were to where an attack moved them.

    `points` are x, y and the class's number; `moves` are x and y before, x and y after, by the attack's name.
    Both axes have the same scale. The points of a class are a group, whose title is the class, and the arrows
    of an attack are one, `<g class="moves" data-attack="NAME">`, of a single path. `names` are those of the
    classes by their number, for the legend, which is left out for more than 20 classes. `title`, `about` and
    `key` are as in `dots`.

    >>> text = scatter([(0.1, 0.2, 3)], {"CA+": [(0.1, 0.2, 0.5, 0.4)]}, title="T", about="A", key="map")
    >>> '<g class="moves" data-attack="CA+">' in text, '<g class="c3">' in text
    (True, True)
    """
    kept = [point for point in points if all(map(known, point))]
    arrows = {name: [m for m in found if all(map(known, m))] for name, found in moves.items()}
    ends = [(m[k], m[k + 1]) for found in arrows.values() for m in found for k in (0, 2)]
    ends += [(x, y) for x, y, _ in kept]
    if not ends:
        return _nothing(title, about, key)
    x_of, y_of, left, bottom = draw.alike([x for x, _ in ends], [y for _, y in ends])
    step = draw.step_of(x_of.low, x_of.high, 7)  # of both axes
    right, up = (
        [k * step for k in range(math.ceil(axis.low / step), math.floor(axis.high / step) + 1)]
        for axis in (x_of, y_of)
    )
    parts = [draw.across_ticks(x_of, list(zip(right, draw.tick_texts(right), strict=True)), y_of.end, bottom)]
    parts.append(stroke("".join(f"M{units(left)} {units(y_of(y))}H{units(RIGHT)}" for y in up), "grid"))
    for y, text in zip(up, draw.tick_texts(up), strict=True):
        parts.append(word(left - 8, y_of(y), text, anchor="end", kind="label tick", width=left - 8))
    classes = sorted({int(number) for _, _, number in kept})
    named = {k: names[k] if 0 <= k < len(names) else "" for k in classes}
    for k in classes:
        parts.append(f'<g class="c{k % 10}"><title>{safe(named[k] or f"class {k}")}</title>')
        parts += [draw.mark(k, x_of(x), y_of(y), 3) for x, y, number in kept if number == k]
        parts.append("</g>")
    shown = [(k, named[k]) for k in classes] if len(classes) <= _CLASSES else []
    for name, found in arrows.items():
        path = "".join(draw.arrow(x_of(m[0]), y_of(m[1]), x_of(m[2]), y_of(m[3])) for m in found)
        parts.append(f'<g class="moves" data-attack="{safe(name)}"><title>{safe(name)}</title>')
        parts += [stroke(path, "move", width=1.2) if path else "", "</g>"]
    return _below(parts, shown, bottom + 26, left=left, kind="scatter",
                  title=title, about=about, key=key, points="c")  # fmt: skip


def radar(rows: Sequence[str], series: Sequence[Series], *, title: str, about: str, key: str) -> str:
    """Return a radar of values from 0 to 100, one spoke for each of `rows`, from the top on to the right.

    There are 3 to 40 rows (of fewer there is nothing to show) and up to 6 `series`; a point's x is the number
    of its row. A series that has all rows is filled lightly; another has gaps. A value beyond 0 or 100 stands
    there. `title`, `about` and `key` are as in `dots`.

    >>> one = Series("mine", [Point(k, 10.0 * k) for k in range(3)])
    >>> text = radar(["CA+", "QA+", "TMA"], [one], title="T", about="A", key="radar")
    >>> "<title>mine, TMA: 20</title>" in text
    True
    """
    if len(series) > _MOST_SERIES:
        raise UserError(
            f"a radar shows at most {_MOST_SERIES} series, not {len(series)}: choose some, or use dots"
        )
    if len(rows) > _MOST_ROWS:
        raise UserError(f"a radar shows at most {_MOST_ROWS} rows, not {len(rows)}: choose some, or use dots")
    found = [_known(one, rows) for one in series]
    if len(rows) < _FEWEST_ROWS or not any(found):
        return _nothing(title, about, key)
    count, gap, cx = len(rows), 15.0, WIDTH / 2
    outer = max(156.0, ((count // 2 + 1) * gap - 8) / 2)  # where the names stand
    radius, cy = outer - 12, outer + 18
    turns = [(math.sin(2 * math.pi * k / count), -math.cos(2 * math.pi * k / count)) for k in range(count)]

    def at(row: int, value: float) -> tuple[float, float]:
        out = radius * min(max(value, 0.0), 100.0) / 100
        return cx + out * turns[row][0], cy + out * turns[row][1]

    def through(places: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{units(x)} {units(y)}" for x, y in places)

    rings = [through([at(k, value) for k in range(count)]) + "z" for value in (20, 40, 60, 80, 100)]
    spokes = [through([(cx, cy), at(k, 100)]) for k in range(count)]
    parts = [stroke("".join(rings + spokes), "grid")]
    for k, (dx, y) in enumerate(zip((dx for dx, _ in turns), draw.spread(turns, outer, gap), strict=True)):
        side = 0 if abs(dx) < 1e-6 else math.copysign(1, dx)
        x = cx + side * max(abs(dx) * outer, math.sqrt(max(0.0, outer**2 - y**2)))
        anchor = "middle" if side == 0 else "start" if side > 0 else "end"
        parts.append(
            word(x, cy + y, rows[k], anchor=anchor, width=WIDTH / 2 - abs(x - cx) - 4 if side else 200)
        )
    for v in (20, 40, 60, 80, 100):
        parts.append(word(cx - 5, cy - radius * v / 100, str(v), anchor="end", kind="label tick"))
    marks = []
    for number, (one, points) in enumerate(zip(series, found, strict=True)):
        (own, dashes), by_row = draw.looks(number), {int(point.x): point for point in points}
        places = {row: at(row, _y(point)) for row, point in sorted(by_row.items())}
        if len(places) == count:
            path = through(list(places.values())) + "z"
            parts.append(f'<path class="area {own}" d="{path}" fill-opacity="0.08"/>')
        else:
            pairs = [(row, (row + 1) % count) for row in places if (row + 1) % count in places]
            path = "".join(through([places[a], places[b]]) for a, b in pairs)
        marks.append(stroke(path, f"line {own} {dashes}", width=1.8) if path else "")
        for row, (x, y) in places.items():
            told = _told(f"{one.name}, {rows[row]}", by_row[row])
            marks.append(draw.mark(number, x, y, 3.6, kind=f"mark {own}", told=told))
    parts += marks
    return _below(parts, list(enumerate(s.name for s in series)), cy + outer + 22, left=40, kind="radar",
                  title=title, about=about, key=key, line=True)  # fmt: skip


def _known(series: Series, rows: Sequence[str] | None = None) -> list[Point]:
    """Return the points that can be shown; refuse one whose row does not exist."""
    found = [point for point in series.points if known(point.x) and known(point.y)]
    for point in found:
        if rows is not None and point.x not in range(len(rows)):
            told = f"a point of series {brief(series.name)} is in row {point.x}"
            raise UserError(f"{told}, but there are {len(rows)} rows: count them from 0")
    return found


def _joined(points: Sequence[Point]) -> list[tuple[Point, bool]]:
    """Return the points that can be shown, each with whether a line comes from the one before."""
    able = [known(point.x) and known(point.y) for point in points]
    return [(point, k > 0 and able[k - 1]) for k, point in enumerate(points) if able[k]]


def _y(point: Point) -> float:
    return 0.0 if point.y is None else float(point.y)


def _between(point: Point) -> tuple[float, float] | None:
    """Return a point's interval, which begins or ends at its value if one end is not known."""
    if not known(point.low) and not known(point.high):
        return None
    low, high = (
        (float(end) if end is not None and known(end) else _y(point)) for end in (point.low, point.high)
    )
    return low, high


def _ends(point: Point) -> tuple[float, ...]:
    return (_y(point), *(_between(point) or ()))


def _around(values: Sequence[float], span: tuple[float, float] | None) -> tuple[float, float]:
    shown = (*(span or ()), *values)
    return min(shown), max(shown)


def _told(what: str, point: Point, unit: str = "") -> str:
    """Return what is shown when the pointer is on a mark."""
    text = f"{what}: {draw.exact(_y(point))}{f' {unit}' if unit else ''}"
    if (between := _between(point)) is not None:
        text += f" ({draw.exact(between[0])} to {draw.exact(between[1])})"
    return f"{text}, {point.note}" if point.note else text


def _nothing(title: str, about: str, key: str) -> str:
    text = word(WIDTH / 2, 30, "nothing to show")
    return draw.whole([text], 60, kind="empty", title=title, about=about, key=key)


def _below(
    parts: Sequence[str],
    entries: Sequence[tuple[int, str]],
    height: float,
    *,
    left: float,
    kind: str,
    title: str,
    about: str,
    key: str,
    line: bool = False,
    points: str = "s",
) -> str:
    """Return the svg with its legend below."""
    text, more = draw.legend(entries, height + 4, left=left, kind=points, line=line)
    return draw.whole([*parts, text], height + 4 + more, kind=kind, title=title, about=about, key=key)
