"""What the plots of `report/svg.py` are put together from: numbers, text, scales, ticks, marks, legends."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from robustmetric.errors import UserError, brief, is_number
from robustmetric.text import printable

WIDTH = 640
"""The width of every viewBox: at so many pixels of the page, a unit is a pixel."""
SIZE = 12
"""The height of text, in units."""
RIGHT = WIDTH - 16.0
"""Where plots end at the right."""
HUGE = 1e300
"""Values beyond are left out, as NaN is: their differences are no numbers."""
_SHAPES = 6
_TINY = 1e-290
_NARROW = frozenset("iljtfrI.,:;|!'`()[]{}/\\ -·")
_BROAD = frozenset("mwMW@%&…—→")
_GAP = 14  # between entries of a legend
_LINE = 20  # of a legend
_FAINT = {"grid": 0.15, "axis": 0.6}


class Scale(NamedTuple):
    """A map from values to units of the plot: `low` is at `start`, `high` at `end`; by log2 if `log`.

    >>> Scale(0.0, 100.0, 40.0, 240.0)(25.0), Scale(1.0, 16.0, 0.0, 100.0, log=True)(2.0)
    (90.0, 25.0)
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return where a `value` is."""
        low, high, at = (math.log2(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def known(value: object) -> bool:
    """Return whether a `value` can be shown: a finite number that is not beyond `HUGE`.

    >>> known(1.5), known(None), known(math.nan), known(1e301)
    (True, False, False, False)
    """
    return is_number(value) and abs(float(value)) <= HUGE  # type: ignore[arg-type]


def safe(text: str) -> str:
    r"""Return `text` for elements and attributes of XML and HTML, with control characters made visible.

    >>> print(safe('<b a="1">&\x1b'))
    &lt;b a=&quot;1&quot;&gt;&amp;\x1b
    """
    return html.escape(_plain(text))


def _plain(text: str) -> str:
    """Make visible what steers, and what XML cannot hold; ends of lines and tabs are spaces."""
    text = re.sub(r"[\t\n]", " ", printable(text))
    return re.sub("[\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def units(value: float) -> str:
    """Return a position with at most one decimal.

    >>> units(3.0), units(-0.04), units(12.345)
    ('3', '0', '12.3')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def exact(value: float) -> str:
    """Return a `value` with ten digits, for what is shown on hovering.

    >>> exact(53.900000000000006), exact(-2)
    ('53.9', '−2')
    """
    return f"{float(value):.10g}".replace("-", "−")


def wide(text: str) -> float:
    """Return about how wide `text` is in a usual sans-serif font, rather too much than too little.

    >>> wide("ill") < wide("abc") < wide("MWM")
    True
    """
    total = 0.0
    for letter in text:
        if unicodedata.combining(letter):
            continue
        if letter in _BROAD or unicodedata.east_asian_width(letter) in "WF":
            total += 1.0
        else:
            total += 0.4 if letter in _NARROW else 0.72 if letter.isupper() else 0.63
    return total * SIZE


def fit(text: str, width: float) -> str:
    """Return `text` as it fits into a `width`: of what is longer, the middle is left out.

    >>> fit("cub-hm-lga-ics", 200), fit("cub-hm-lga-ics", 60)
    ('cub-hm-lga-ics', 'cub-…ics')
    """
    text = _plain(text)
    if wide(text) <= width:
        return text
    for kept in range(min(len(text) - 1, int(3 * width / SIZE)), 1, -1):
        shorter = f"{text[: -(-kept // 2)]}…{text[len(text) - kept // 2 :]}"
        if wide(shorter) <= width:
            return shorter
    return "…"


def fit_all(names: Sequence[str], width: float, most: float) -> list[str]:
    """Return `names` as they fit into a `width`, or into `most` if they could not be told apart.

    >>> fit_all(["network-a-of-mine", "network-b-of-mine"], 60, 200)
    ['network-a-of-mine', 'network-b-of-mine']
    """
    found = [fit(name, width) for name in names]
    return found if len(set(found)) == len(set(names)) else [fit(name, most) for name in names]


def step_of(low: float, high: float, count: int = 5) -> float:
    """Return 1, 2 or 5 times a power of ten, of which about `count` lie between `low` and `high`.

    >>> step_of(0, 100), step_of(0, 1.7)
    (20.0, 0.5)
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * part for part in (1, 2, 5, 10) if power * part >= 0.75 * rough)


def apart(low: float, high: float) -> tuple[float, float]:
    """Return `low` and `high` as an axis can show them: further apart if they are about the same.

    >>> apart(3, 4), apart(50, 50), apart(0, 0)
    ((3.0, 4.0), (45.0, 55.0), (0.0, 1.0))
    """
    low, high = float(low), float(high)
    most = max(abs(low), abs(high))
    if most < _TINY:
        return 0.0, 1.0
    return (low, high) if high - low > 1e-9 * most else (low - 0.1 * most, high + 0.1 * most)


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` even ticks that cover all from `low` to `high`.

    >>> nice(3, 97), nice(50, 50)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [44.0, 46.0, 48.0, 50.0, 52.0, 54.0, 56.0])
    """
    low, high = apart(low, high)
    step = step_of(low, high, count)
    return [k * step for k in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return even `ticks` as text, with as many decimals as they need.

    >>> tick_texts([-0.5, 0.0, 0.5]), tick_texts([0.0, 2e6, 4e6])
    (['−0.5', '0.0', '0.5'], ['0', '2e6', '4e6'])
    """
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(ticks[0]) or 1.0
    most = max(map(abs, ticks))
    order = math.floor(math.log10(step) + 1e-6)
    if most < 1e6 and order >= -4:
        texts = [f"{tick:.{max(0, -order)}f}" for tick in ticks]
    else:
        digits = max(0, math.floor(math.log10(most) + 1e-6) - order)
        texts = ["0" if abs(tick) < step / 2 else f"{tick:.{digits}e}" for tick in ticks]
    return [re.sub(r"e([+-])0*", lambda e: "e" + e[1].strip("+"), t).replace("-", "−") for t in texts]


def doublings(low: float, high: float) -> list[tuple[float, str]]:
    """Return powers of two, with their text, that cover all from `low` to `high`.

    >>> doublings(3, 9), doublings(0.2, 0.5)
    ([(2.0, '2'), (4.0, '4'), (8.0, '8'), (16.0, '16')], [(0.125, '0.125'), (0.25, '0.25'), (0.5, '0.5')])
    """
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    last = max(last, first + 1)
    each = max(1, math.ceil((last - first) / 8))
    powers = [2.0**k for k in range(first, last + each, each)]
    return [(p, f"{p:.0f}" if 1 <= p < 1e6 else f"{p:.3g}".replace("-", "−")) for p in powers]


def word(
    x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "label", width: float = WIDTH
) -> str:
    """Return `text` at a place, vertically centred; what is wider than `width` has its whole in a title.

    `anchor` is the point of the text at `x`: start, middle or end; `kind` are its classes.

    >>> word(10, 20, "R@1", anchor="end")
    '<text class="label" x="10" y="24.2" text-anchor="end">R@1</text>'
    """
    shown = fit(text, width)
    whole = "" if shown == _plain(text) else f"<title>{safe(text)}</title>"
    place = f'x="{units(x)}" y="{units(y + 0.35 * SIZE)}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{whole}{safe(shown)}</text>'


def mark(number: int, x: float, y: float, size: float, *, kind: str = "", told: str = "") -> str:
    """Return the mark of a series' `number` at a place: a circle, a square or another shape.

    A path begins with the place. Colours repeat after 6 series; the shapes go on by one then, so that 36
    series look different. `size` is the radius, `kind` are the classes, `told` is shown on hovering.

    >>> mark(1, 10, 20, 3, kind="mark s1", told="A: 3")
    '<path class="mark s1" d="M10 20m-2.5-2.5h5v5h-5z"><title>A: 3</title></path>'
    """
    named = f' class="{kind}"' if kind else ""
    shape = (number + number // _SHAPES) % _SHAPES
    if shape == 0:
        tag, where = "circle", f'cx="{units(x)}" cy="{units(y)}" r="{units(size)}"'
    else:
        tag, where = "path", f'd="M{units(x)} {units(y)}{_outline(shape, size)}"'
    return f"<{tag}{named} {where}" + (f"><title>{safe(told)}</title></{tag}>" if told else "/>")


def _outline(shape: int, size: float) -> str:
    """Return a shape of about the area of a circle of that `size`, from its centre, in relative steps."""
    half, broad, tall = (units(part * size) for part in (5 / 6, 7 / 6, 4 / 3))
    side, base, height = (units(2 * part * size) for part in (5 / 6, 7 / 6, 1))
    return {
        1: f"m-{half}-{half}h{side}v{side}h-{side}z",
        2: f"m0-{tall}l{broad} {height}h-{base}z",
        3: f"m0-{tall}l{tall} {tall}-{tall} {tall}-{tall}-{tall}z",
        4: f"m0 {tall}l{broad}-{height}h-{base}z",
        5: f"m-{broad}-{broad}h{base}l-{base} {base}h{base}z",
    }[shape]


def looks(number: int) -> tuple[str, str]:
    """Return the classes for the colour and the dashes of a series' `number`; dashes change as shapes do.

    >>> looks(0), looks(7)
    (('s0', 'd0'), ('s1', 'd2'))
    """
    return f"s{number % _SHAPES}", f"d{(number + number // _SHAPES) % _SHAPES}"


def legend(
    entries: Sequence[tuple[int, str]], top: float, *, left: float, kind: str = "s", line: bool = False
) -> tuple[str, float]:
    """Return a legend in even columns from `left` and `top` on, and its height.

    `entries` are numbers of series, or of classes if `kind` is "c", with their names; `line` shows a line,
    too. Entries without a name are left out.

    >>> legend([(0, "")], 10, left=0)
    ('', 0.0)
    """
    entries = [(number, name) for number, name in entries if name]
    if not entries:
        return "", 0.0
    room, sample = WIDTH - 8 - left, 34 if line else 18
    names = [name for _, name in entries]
    texts = fit_all(names, room / 2 - sample - _GAP, room - sample)
    column = max(map(wide, texts)) + sample + _GAP
    columns = max(1, min(len(entries), int((room + _GAP) / column)))
    made = ['<g class="legend">']
    for place, ((number, name), text) in enumerate(zip(entries, texts, strict=True)):
        x, y = left + place % columns * column, top + (place // columns + 0.5) * _LINE
        own = looks(number)[0] if kind == "s" else f"c{number % 10}"
        if line:
            made.append(stroke(f"M{units(x)} {units(y)}h26", f"line {own} {looks(number)[1]}", width=1.8))
        made.append(mark(number, x + sample / 2 - 4, y, 4, kind=f"mark {own}"))
        made.append(word(x + sample, y, name, anchor="start", width=wide(text)))
    made.append("</g>")
    return "".join(made), -(-len(entries) // columns) * _LINE + 6.0


def stroke(path: str, kind: str, *, width: float = 1.0) -> str:
    """Return a line along a `path`, of a `width`, with the classes `kind`; grids and axes are faint.

    >>> stroke("M0 0h8", "grid")
    '<path class="grid" d="M0 0h8" fill="none" stroke="currentColor" stroke-opacity="0.15"/>'
    """
    how = f' stroke-width="{units(width)}"' if width != 1 else ""
    how += f' stroke-opacity="{_FAINT[kind]}"' if kind in _FAINT else ""
    return f'<path class="{kind}" d="{path}" fill="none" stroke="currentColor"{how}/>'


def across_ticks(scale: Scale, ticks: Sequence[tuple[float, str]], top: float, bottom: float) -> str:
    """Return lines at `ticks` from `top` to `bottom`, and below their texts, but for those that collide.

    >>> across_ticks(Scale(0, 1, 0, 100), [(0.5, "half")], 0, 10).count("half")
    1
    """
    made, end = [], -math.inf
    lines = "".join(f"M{units(scale(value))} {units(top)}V{units(bottom)}" for value, _ in ticks)
    for value, text in ticks:
        x, half = scale(value), wide(text) / 2
        if x - half > end + 4:
            made.append(word(x, bottom + 13, text, kind="label tick"))
            end = x + half
    return stroke(lines, "grid") + "".join(made)


def whole(parts: Sequence[str], height: float, *, kind: str, title: str, about: str, key: str) -> str:
    """Return the svg of `parts`: its `height`, class (`kind`), `title`, what it is `about`, and its `key`.

    >>> whole([], 40, kind="dots", title="Terms", about="See the table.", key="a b")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: a plot's key is a letter and then letters, digits, - or _, not 'a b'
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key):
        told = "a plot's key is a letter and then letters, digits, - or _"
        raise UserError(f"{told}, not {brief(key)}", parameter="key")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot {kind}" viewBox="0 0 {WIDTH} {units(height)}" '
        f'role="img" aria-labelledby="{key}-title" aria-describedby="{key}-about" '
        f'font-size="{SIZE}" fill="currentColor">'
        f'<title id="{key}-title">{safe(title)}</title><desc id="{key}-about">{safe(about)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def spread(turns: Sequence[tuple[float, float]], outer: float, gap: float) -> list[float]:
    """Return how far below the centre names stand, those of a side at least `gap` apart.

    `turns` are the sine and cosine of each, (right, down), `outer` is how far out they stand.

    >>> spread([(0.0, -1.0), (0.1, -0.99), (1.0, 0.0)], 100, 15)
    [-104.0, -89.0, 0.0]
    """
    places = [outer * dy + math.copysign(4, dy) * (abs(dx) < 1e-6) for dx, dy in turns]
    for side in (1, -1):
        down = sorted((k for k, (dx, _) in enumerate(turns) if side * dx > 1e-6), key=lambda k: places[k])
        least = float(gap - outer - 4)
        for k in down:
            places[k] = max(places[k], least)
            least = places[k] + gap
        most = outer + 4 - gap
        for k in reversed(down):
            places[k] = min(places[k], most)
            most = places[k] - gap
    return places


def alike(xs: Sequence[float], ys: Sequence[float]) -> tuple[Scale, Scale, float, float]:
    """Return scales of x and y, alike, around `xs` and `ys`, and where the plot begins and ends.

    >>> x_of, y_of, _, _ = alike([0.0, 1.0], [0.0, 2.0])
    >>> round(x_of(1.0) - x_of(0.0), 9) == round(y_of(0.0) - y_of(1.0), 9)
    True
    """
    left, top = 44.0, 8.0
    width, near = RIGHT - left, max(map(abs, (*xs, *ys)))
    middle = [min(v) / 2 + max(v) / 2 for v in (xs, ys)]
    broad, tall = (max(v) - min(v) for v in (xs, ys))
    if max(tall, broad) <= max(1e-9 * near, _TINY):
        broad = tall = 0.2 * near if near > _TINY else 1.0
    one = 1.1 * max(broad / width, tall / 460)  # of a unit of the plot
    height = min(460.0, max(240.0, 1.1 * tall / one))
    x_of, y_of = (
        (m - one * room / 2, m + one * room / 2) for m, room in zip(middle, (width, height), strict=True)
    )
    return Scale(*x_of, left, left + width), Scale(*y_of, top + height, top), left, top + height


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return an arrow as a path: a line, and a head of two strokes that is no longer than it.

    It goes from `x` and `y` to `to_x` and `to_y`.

    >>> arrow(0, 0, 10, 0)
    'M0 0L10 0l-5 2.5M10 0l-5-2.5'
    """
    length = math.hypot(to_x - x, to_y - y)
    path = f"M{units(x)} {units(y)}L{units(to_x)} {units(to_y)}"
    if length < 0.5:
        return path
    size = min(5.0, length / 2)
    back, aside = ((to_x - x) / length * size, (to_y - y) / length * size), 0.5
    first = units(-back[0] - aside * back[1]), units(-back[1] + aside * back[0])
    last = units(-back[0] + aside * back[1]), units(-back[1] - aside * back[0])
    return f"{path}l{first[0]} {first[1]}M{units(to_x)} {units(to_y)}l{last[0]} {last[1]}".replace(" -", "-")
