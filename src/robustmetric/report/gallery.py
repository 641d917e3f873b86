"""The gallery of a report: which pictures it shows, as cards that hold their images, within its room."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from robustmetric.data.decode import decoded_or_reason, whole_images
from robustmetric.errors import UserError
from robustmetric.report.entries import Entry
from robustmetric.report.pictures import FOLDER, Picture

_KINDS = {b"\x89PNG": "png", b"RIFF": "webp"}
_LARGEST = 1_000_000  # bytes of a picture; those that are made have some thousand
_WHY = ("worst", "median", "random")


@dataclass(frozen=True)
class Shown:
    """A `picture` of an `entry`, the `place`-th one, its place in the `order`, and its `images` by file."""

    entry: Entry
    place: int
    picture: Picture
    order: int
    images: Mapping[str, str]


@dataclass(frozen=True)
class Gallery:
    """The `cards` of a page and the `attacks` they are of.

    `unreadable` says of each picture whose images are missing or damaged what is, and `left_out` counts those
    that there was no room for.

    >>> Gallery().cards
    ()
    """

    cards: Sequence[Markup] = ()
    attacks: Sequence[str] = ()
    unreadable: Sequence[str] = ()
    left_out: int = 0


def fill(entries: Sequence[Entry], room: int, draw: Callable[[Shown], Markup]) -> Gallery:
    """Return the pictures of `entries` as cards that `draw` makes, as many as `room` bytes hold.

    The worst of all come first. Those of one attack stand side by side.

    >>> fill([], 1000, lambda shown: Markup())
    Gallery(cards=(), attacks=(), unreadable=(), left_out=0)
    """
    wanted = list(_ordered(entries))
    known: dict[Path, str] = {}  # images of which cards have several
    cards: list[Markup] = []
    attacks: dict[str, None] = {}
    unreadable: list[str] = []
    for count, (place, picture) in enumerate(wanted):
        entry = entries[place]
        try:
            images = images_of(picture, entry.folder, known)
        except UserError as error:
            unreadable.append(str(error))
            continue
        card = draw(Shown(entry, place, picture, len(cards), images))
        room -= len(card.encode())
        if room < 0:
            return Gallery(tuple(cards), tuple(attacks), tuple(unreadable), len(wanted) - count)
        cards.append(card)
        attacks[picture.attack] = None
    return Gallery(tuple(cards), tuple(attacks), tuple(unreadable))


def _ordered(entries: Sequence[Entry]) -> Iterator[tuple[int, Picture]]:
    """Yield the place of its entry and each picture, in the order in which they are shown."""
    attacks: dict[str, int] = {}
    every: list[tuple[tuple[int, bool, int, int, int], int, Picture]] = []
    for place, entry in enumerate(entries):
        counts: dict[tuple[str, str], int] = {}
        for picture in entry.pictures.pictures if entry.pictures is not None else ():
            column = attacks.setdefault(picture.attack, len(attacks))
            row = counts[picture.why, picture.attack] = counts.get((picture.why, picture.attack), -1) + 1
            # A query says more at a glance than an image that is ranked for others.
            key = (_WHY.index(picture.why), picture.asker is not None, column, row, place)
            every.append((key, place, picture))
    for _, place, picture in sorted(every, key=lambda one: one[0]):
        yield place, picture


def images_of(picture: Picture, folder: Path, known: dict[Path, str] | None = None) -> dict[str, str]:
    """Return the images that a `picture` in the `folder` of a record shows, as addresses by their files.

    Those that were read are taken from `known`, and added to it. A `UserError` names one that is missing or
    damaged.
    """
    known = {} if known is None else known
    items = [picture.query, *picture.targets, *picture.before, *picture.after]
    items += [] if picture.asker is None else [picture.asker]
    found = {}
    for file in dict.fromkeys((picture.perturbed, picture.difference, *(item.image for item in items))):
        path = folder / FOLDER / file
        found[file] = known[path] = known.get(path) or _encoded(path)
    return found


def _encoded(path: Path) -> str:
    """Return the file of an image as an address."""
    try:
        content = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
    except OSError:
        raise UserError(f"{path} is missing") from None
    kind = _KINDS.get(content[:4])
    with whole_images():
        if kind is None or isinstance(decoded_or_reason(path, None, None, 3), str):
            raise UserError(f"{path} is damaged")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
