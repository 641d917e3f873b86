"""A sheet of pictures: what an attack did to single queries, and what is found before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from robustmetric.attacks import Column
from robustmetric.evaluation.attack import NetworkView
from robustmetric.evaluation.data import Data
from robustmetric.report.pictures import amplified, nice_factor, rendered
from robustmetric.report.shots import Ranked, Shot
from robustmetric.report.style import COLOURS, GREY
from robustmetric.text import one_line, shortened

ROWS = 32
"""So many queries are on a sheet."""
SIDE = 112
"""Pixels of the longer side of a picture, at most."""
TARGETS = 3
"""So many targets of a query are shown."""

BLUE, RED, GREEN = COLOURS[:3]
_PALE = "#e4e4e4"
_FRAME = 3  # pixels around a picture
_PITCH = SIDE + 16  # from a picture to the next
_GROUP = 20  # more of them between groups
_MARGIN = 18
_LINE = 16
# What the font of Pillow without FreeType lacks.
_PLAIN = str.maketrans({"→": "->", "−": "-", "…": "..", "ε": "eps", "α": "alpha", "↑": "", "↓": ""})

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def thumbnail(image: Tensor, *, smooth: bool = True) -> Image.Image:
    """Return the picture of an `image` (C, H, W) with a longer side of at most 112 pixels.

    A small one is blown up by a whole factor, pixel by pixel. A large one is reduced: `smooth`, or by leaving
    out pixels, which shows how much a noise changes single ones.

    >>> thumbnail(torch.ones(1, 28, 20)).size, thumbnail(torch.ones(1, 224, 112)).size
    ((80, 112), (56, 112))
    """
    whole = rendered(image)
    longest = max(whole.size)
    if longest <= SIDE:
        factor = SIDE // longest
        return whole.resize((whole.width * factor, whole.height * factor), Image.Resampling.NEAREST)
    width, height = (max(1, round(length * SIDE / longest)) for length in whole.size)
    return whole.resize((width, height), Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST)


@dataclass(frozen=True, eq=False)
class Album:
    """The images of a `view` with the names of their `classes`, and of their files as an `origin` has them.

    >>> from robustmetric.attacks import Gallery, Queries
    >>> z, labels = torch.eye(6), torch.arange(6) % 2
    >>> view = NetworkView(torch.nn.Flatten(), torch.rand(6, 1, 2, 3), Queries(z, labels, torch.arange(6)),
    ...     Gallery(z, labels))
    >>> album = Album(view, Data(view.images, labels, classes=("cat", "dog")))
    >>> album.class_of(3), album.ranked_class(4), album.ranked_name(4), album.ranked_file(4)
    ('dog', 'cat', 'image 4', None)
    """

    view: NetworkView
    data: Data

    @cached_property
    def _labels(self) -> tuple[list[int], list[int]]:
        return self.view.queries.labels.tolist(), self.view.gallery.labels.tolist()

    def _class(self, label: int) -> str:
        return str(label) if self.data.classes is None else self.data.classes[label]

    def class_of(self, number: int) -> str:
        """Return the class of the query `number`."""
        return self._class(self._labels[0][number])

    def ranked_class(self, position: int) -> str:
        """Return the class of the image at a `position` in the gallery."""
        return self._class(self._labels[1][position])

    def ranked_name(self, position: int) -> str:
        """Return what the image at a `position` in the gallery is called: its file, or its number."""
        return self.data.called(position, gallery=self.view.ranked is not None)

    def ranked_file(self, position: int) -> str | None:
        """Return the file of the image at a `position` in the gallery, if it has one."""
        files = self.data.ranked.files
        return None if files is None else files[position]

    def ranked_images(self, positions: Sequence[int]) -> dict[int, Tensor]:
        """Return the images (C, H, W) at these `positions` in the gallery."""
        images = self.view.images if self.view.ranked is None else self.view.ranked
        distinct = sorted(set(positions))
        if not distinct:
            return {}
        return dict(zip(distinct, images[torch.tensor(distinct)].detach().cpu(), strict=True))


def draw_sheet(shots: Sequence[Shot], album: Album, columns: Sequence[Column], *, title: str) -> Image.Image:
    """Draw what an attack did: a row of pictures for each of the first 32 of the `shots`.

    A row has the image, the perturbed one, the change amplified by one factor for all, up to three targets,
    and the first images of the ranking before and after. Those of the class that is asked for have a solid
    frame and a tick, others a dashed frame and a cross. `album` has the gallery and all names, `columns` say
    how the attack's values are written, and the `title` stands above.

    >>> from robustmetric.attacks import Gallery, Queries
    >>> z, labels = torch.eye(6), torch.arange(6) % 2
    >>> view = NetworkView(torch.nn.Flatten(), torch.rand(6, 1, 2, 3), Queries(z, labels, torch.arange(6)),
    ...     Gallery(z, labels))
    >>> found = (Ranked(1, 0.5, False), Ranked(2, 0.6, True))
    >>> image, values = view.images[0], {"GTM": (0.0, 0.0)}
    >>> shot = Shot("GTM", 0, image, image + 0.1, (1,), values, found, found, (2, 2))
    >>> album = Album(view, Data(view.images, labels))
    >>> sheet = draw_sheet([shot], album, [Column("GTM", "higher")], title="GTM")
    >>> sheet.mode, sheet.width > 8 * 112
    ('RGB', True)
    """
    return _Sheet(shots, album, columns, title).draw()


def left_out(count: int) -> str:
    """Return the words for a `count` of queries that are not shown.

    >>> left_out(1), left_out(2)
    ('1 more query is left out', '2 more queries are left out')
    """
    return "1 more query is left out" if count == 1 else f"{count} more queries are left out"


@dataclass(frozen=True)
class _Cell:
    """A picture with lines below it: a mark of whether it is `right`, its class in bold, a `tag` in blue."""

    picture: Image.Image
    kind: str = ""
    lines: tuple[str, ...] = ()
    distance: float | None = None
    right: bool = False
    tag: str = ""


class _Sheet:
    """The layout: groups of pictures from left to right, rows from top to bottom."""

    def __init__(self, shots: Sequence[Shot], album: Album, columns: Sequence[Column], title: str) -> None:
        self.shots, self.rest = shots[:ROWS], len(shots) - len(shots[:ROWS])
        self.album, self.columns = album, columns
        self.factor = nice_factor(max(shot.change for shot in self.shots))
        targets = min(TARGETS, max(len(shot.targets) for shot in self.shots))
        found = max(len(ranking) for shot in self.shots for ranking in (shot.before, shot.after))
        sizes = [3, targets, found, found]
        # Where the pictures of each group stand.
        self.groups: list[list[int]] = []
        x = _MARGIN
        for size in sizes:
            self.groups.append([x + _PITCH * k for k in range(size)])
            x += _PITCH * size + _GROUP * bool(size)
        self.width = x - _GROUP - (_PITCH - SIDE) + _MARGIN
        self.height = thumbnail(self.shots[0].image).height
        self.facts = [list(self._facts(shot)) for shot in self.shots]
        self.title = _lines(title.split(" "), self.width - 2 * _MARGIN, _font(16, bold=True), " ")

    def draw(self) -> Image.Image:
        """Draw all rows below the title and the headings."""
        above = _LINE * max(map(len, self.facts)) + 12
        row = above + self.height + 2 * _FRAME + 4 * _LINE + 14
        top = _MARGIN + 22 * len(self.title) + 2 * _LINE + 8
        height = top + row * len(self.shots) + _LINE * bool(self.rest) + _MARGIN
        self.sheet = Image.new("RGB", (self.width, height), "white")
        self.ink = ImageDraw.Draw(self.sheet)
        self._head()
        for shot, facts in zip(self.shots, self.facts, strict=True):
            self.ink.line((_MARGIN, top, self.width - _MARGIN, top), fill=_PALE)
            self._write((_MARGIN, top + 6), SIDE, f"image {shot.number}", bold=True)
            for number, line in enumerate(facts):
                self._write((self._lists, top + 6 + _LINE * number), self._room(self._lists), line)
            for places, cells in zip(self.groups, self._cells(shot), strict=True):
                for x, cell in zip(places, cells, strict=False):
                    self._cell((x, top + above + _FRAME), cell)
            top += row
        if self.rest:
            self._write((_MARGIN, top), self._room(_MARGIN), f"{left_out(self.rest)} here", bold=True)
        return self.sheet

    @property
    def _lists(self) -> int:
        return self.groups[2][0]

    def _room(self, x: int) -> int:
        """Return how many pixels are left to the right of x."""
        return self.width - _MARGIN - x

    def _head(self) -> None:
        """Write the title, what frames mean, and what the columns are."""
        y = _MARGIN
        for line in self.title:
            self._write((_MARGIN, y), self._room(_MARGIN), line, size=16, bold=True)
            y += 22
        asks = "the image"
        if self.shots[0].asker is not None:
            asks = "the target" if len(self.groups[1]) == 1 else "the first target"
        told = (
            f"solid frame and tick: of the class of {asks}; dashed frame and cross: of another class; "
            "below them: distance, class, image"
        )
        self._write((_MARGIN, y), self._room(_MARGIN), told, fill=GREY)
        y += _LINE + 2
        for x, name in zip(self.groups[0], ("image", "perturbed", f"change × {self.factor:g}"), strict=True):
            self._write((x, y), _PITCH, name, bold=True)
        names = (
            "target" if len(self.groups[1]) == 1 else "targets",
            f"nearest to {asks} before",
            f"nearest to {asks} after",
        )
        for places, name in zip(self.groups[1:], names, strict=True):
            if places:
                self._write((places[0], y), _PITCH * len(places), name, bold=True)

    def _facts(self, shot: Shot) -> Iterator[str]:
        """Yield lines with the attack's values and the place, before and after."""
        parts = []
        for column in self.columns:
            before, after = shot.values[column.name]
            parts.append(f"{column.heading}  {column.show(before)} → {column.show(after)}")
        places = " → ".join("-" if place is None else str(place) for place in shot.place)
        what = "place of the first right image" if shot.asker is None else "place of the image"
        parts.append(f"{what}  {places}")
        yield from _lines(parts, self._room(self._lists), _font(12), "      ")

    def _cells(self, shot: Shot) -> tuple[list[_Cell], ...]:
        """Return the groups of pictures in a row."""
        album, shown = self.album, shot.targets[:TARGETS]
        found = [*shot.before, *shot.after]
        images = album.ranked_images([*shown, *(one.position for one in found if not one.itself)])
        change = thumbnail(amplified(shot.image, shot.perturbed, self.factor), smooth=False)
        named = (album.data.files[shot.number],) if album.data.files else ()
        query = [
            _Cell(thumbnail(shot.image), album.class_of(shot.number), named),
            _Cell(thumbnail(shot.perturbed)),
            _Cell(change, lines=(f"at most {255 * shot.change:.1f}/255",)),
        ]
        targets = []
        for number, position in enumerate(shown):
            more = len(shot.targets) - TARGETS if number == TARGETS - 1 else 0
            lines = [album.ranked_name(position)] + [f"and {more} more"] * (more > 0)
            tag = "asks" if number == 0 and shot.asker is not None else ""
            kind = album.ranked_class(position)
            targets.append(_Cell(thumbnail(images[position]), kind, tuple(lines), tag=tag))

        def listed(ranking: Sequence[Ranked], own: Tensor, place: int | None) -> list[_Cell]:
            cells = []
            for one in ranking:
                if one.itself:
                    kind, lines = album.class_of(shot.number), (f"place {place}",)
                    cell = _Cell(thumbnail(own), kind, lines, tag="this image")
                else:
                    tag = "target" if one.position in shot.targets else ""
                    names = (album.ranked_class(one.position), (album.ranked_name(one.position),))
                    cell = _Cell(thumbnail(images[one.position]), *names, tag=tag)
                cells.append(replace(cell, distance=one.distance, right=one.right))
            return cells

        before, after = shot.place
        lists = listed(shot.before, shot.image, before), listed(shot.after, shot.perturbed, after)
        return query, targets, *lists

    def _cell(self, place: tuple[int, int], cell: _Cell) -> None:
        """Draw a picture with its frame, its mark and its lines."""
        (x, y), (width, height) = place, cell.picture.size
        self.sheet.paste(cell.picture, place)
        box = (x - _FRAME, y - _FRAME, x + width + _FRAME - 1, y + height + _FRAME - 1)
        if cell.distance is None:
            self.ink.rectangle((x - 1, y - 1, x + width, y + height), outline=_PALE)
        elif cell.right:
            self.ink.rectangle(box, outline=GREEN, width=_FRAME)
        else:
            _dashed(self.ink, box)
        if cell.tag:
            self.ink.rectangle((box[0] - 3, box[1] - 3, box[2] + 3, box[3] + 3), outline=BLUE, width=2)
        y += height + _FRAME + 5
        if cell.distance is not None:
            mark = _mark(cell.right)
            self.sheet.paste(GREEN if cell.right else RED, (x, y), mark)
            self._write((x + mark.width + 4, y), SIDE - mark.width - 4, f"{cell.distance:.3f}")
            y += _LINE
        if cell.kind:
            self._write((x, y), SIDE, cell.kind, bold=True)
            y += _LINE
        for line in cell.lines:
            self._write((x, y), SIDE, line)
            y += _LINE
        self._write((x, y), SIDE, cell.tag, fill=BLUE, bold=True)

    def _write(
        self,
        place: tuple[int, int],
        width: int,
        text: str,
        *,
        fill: str = "black",
        size: int = 12,
        bold: bool = False,
    ) -> None:
        """Write a line that is `width` pixels long at most, and nowhere else."""
        font = _font(size, bold)
        brief = shortened(one_line(text), lambda t: len(t) <= 500)  # for more there is no room anywhere
        shown = shortened(brief, lambda t: _length(t, font) <= width)
        mask = Image.new("L", (width, size + 6))
        ImageDraw.Draw(mask).text((0, 0), _letters(shown, font), 255, font)
        self.sheet.paste(fill, place, mask)


@lru_cache
def _font(size: int, bold: bool = False) -> Font:
    """Return the font of the plots, which comes with matplotlib; without it what Pillow has."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    try:
        try:
            return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)
        except OSError:
            return ImageFont.load_default(size=size)
    except ImportError:  # without FreeType
        return ImageFont.load_default()


def _letters(text: str, font: Font) -> str:
    """Return a text as a font can draw it: letters that it lacks are boxes, or "?" without FreeType."""
    if isinstance(font, ImageFont.FreeTypeFont):
        return text
    return text.translate(_PLAIN).encode("latin-1", "replace").decode("latin-1")


def _length(text: str, font: Font) -> float:
    return font.getlength(_letters(text, font))


def _lines(parts: Sequence[str], width: int, font: Font, between: str) -> list[str]:
    """Put parts behind each other, in as many lines as it takes."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}{between}{part}" if lines else part
        if lines and len(longer) <= 500 and _length(one_line(longer), font) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


@lru_cache
def _mark(right: bool) -> Image.Image:
    """Draw a tick, or a cross, four times as large, and reduce it."""
    mark = Image.new("L", (56, 56))
    ink = ImageDraw.Draw(mark)
    if right:
        ink.line([(6, 30), (22, 46), (50, 10)], fill=255, width=10, joint="curve")
    else:
        ink.line([(10, 10), (46, 46)], fill=255, width=10)
        ink.line([(46, 10), (10, 46)], fill=255, width=10)
    return mark.resize((14, 14), Image.Resampling.LANCZOS)


def _dashed(ink: ImageDraw.ImageDraw, box: tuple[int, int, int, int]) -> None:
    """Draw a dashed frame, as wide as a solid one."""
    left, top, right, bottom = box
    for begin in range(0, max(right - left, bottom - top) + 1, 10):
        across, down = min(left + begin + 5, right), min(top + begin + 5, bottom)
        if left + begin <= right:
            ink.rectangle((left + begin, top, across, top + _FRAME - 1), fill=RED)
            ink.rectangle((left + begin, bottom - _FRAME + 1, across, bottom), fill=RED)
        if top + begin <= bottom:
            ink.rectangle((left, top + begin, left + _FRAME - 1, down), fill=RED)
            ink.rectangle((right - _FRAME + 1, top + begin, right, down), fill=RED)
