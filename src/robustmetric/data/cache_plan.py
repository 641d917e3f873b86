"""What a cache is made from, what it is called, and how a finished one is opened."""

from __future__ import annotations

import glob
import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from numpy.lib import format as npy

from robustmetric.data.base import Box, ImageSet
from robustmetric.data.decode import Channels, Fit, Size
from robustmetric.data.stored import BLOCK, Stored
from robustmetric.files import digest_of_entries

FORMAT = 1  # of the cache: raised when the same files would give other pixels
MARK = 16  # bytes of a mark, which stands for an image's file, its box and the shape of its row

Row = tuple[int, int, int]  # height, width, channels of an image in the cache


class Source(NamedTuple):
    """Where one image comes from: the file as it is now, and the box of it that counts, if not all."""

    file: Path
    box: Box | None
    length: int
    modified: int


class Finished(NamedTuple):
    """A cache that was completed: its pixels, the marks of its rows, and what was left out and why.

    `fault` says what is wrong with it by now, if anything; rows that are damaged have no mark.
    """

    pixels: Stored
    marks: list[bytes | None]
    skipped: dict[int, str]
    fault: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a cache is made from, and where it goes."""

    folder: Path
    stem: str  # the same for all caches of one data set, split, size, fit and channels
    key: str
    sources: tuple[Source, ...]
    description: dict[str, object]
    size: Size | None
    channels: Channels
    fit: Fit

    @classmethod
    def of(
        cls, images: ImageSet, folder: Path, size: Size | None, channels: Channels, fit: Fit = "squeeze"
    ) -> Plan:
        """Plan the cache of these images."""
        sources = tuple(_sources(images))
        description: dict[str, object] = {
            "format": FORMAT,
            "name": images.name,
            "split": images.split,
            "size": size and list(size),
            "channels": channels,
        }
        other = fit if size and fit != "squeeze" else ""
        if other:  # caches of before said nothing of it
            description["fit"] = other
        rows = [[str(file), *stat, *(box or ())] for file, box, *stat in sources]
        shown = f"{size[0]}x{size[1]}{other}" if size else "original"
        stem = re.sub(r"[^\w.-]", "_", f"{images.name}-{images.split}-{shown}x{channels}")
        key = _digest({**description, "files": rows}).hex()
        return cls(folder, stem, key, sources, description, size, channels, fit)

    @property
    def pixels(self) -> Path:
        """The finished pixels."""
        return self.folder / f"{self.stem}-{self.key}.npy"

    @property
    def about(self) -> Path:
        """What is in them."""
        return self.pixels.with_suffix(".json")

    def working(self, kind: Literal["pixels", "marks", "lock"]) -> Path:
        """Name a file that builds work on; without the key, so that a repaired file redoes itself alone."""
        return self.folder / (f"{self.stem}.lock" if kind == "lock" else f"{self.stem}.{kind}.partial")

    def marks(self, row: Row) -> list[bytes]:
        """Return, for each image, the mark of a row of this shape decoded from its file as it is now."""
        return [
            _digest([FORMAT, row, str(file), stat, *([box] if box else [])])
            for file, box, *stat in self.sources
        ]

    def finished(self) -> Iterator[Path]:
        """Find the files of all finished caches of this data set, split, size, fit and channels."""
        for path in self.folder.glob(f"{glob.escape(self.stem)}-{'[0-9a-f]' * 2 * MARK}.*"):
            if path.suffix in (".npy", ".json"):
                yield path

    def stale(self) -> list[Path]:
        """Find the finished files of other keys."""
        return [path for path in self.finished() if path.stem != self.pixels.stem]

    def opened(self) -> Finished | None:
        """Open the cache if it is there and whole."""
        try:
            found = opened(self.pixels)
        except LostError:
            return None
        if found is None or found.fault is not None:
            return None
        return found if len(found.pixels) + len(found.skipped) == len(self.sources) else None


class LostError(Exception):
    """Says of a finished cache why nothing of it can be used."""


def opened(pixels: Path) -> Finished | None:
    """Open a finished cache by the file of its pixels, and check all of it; None if it is not there."""
    if not pixels.exists():
        return None
    try:
        about = _about(pixels)
        count, *row = (int(length) for length in about["shape"])
        skipped = {int(entry["row"]): str(entry["reason"]) for entry in about["skipped"]}
        marks = bytes.fromhex(about["marks"])
        blocks = [bytes.fromhex(text) for text in about["digests"]["sha256"]]
        start = start_of_file((count, *row))
        found = Stored(pixels, (count, *row), len(start), blocks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "its .json is damaged"
        raise LostError(f"cannot be used ({reason})") from None
    damaged = found.damaged(blocks)
    lost = {row for block in damaged for row in range(block * BLOCK, min((block + 1) * BLOCK, count))}
    whole = not damaged and found.is_all_behind(start)
    return Finished(
        found,
        [None if k in lost else marks[k * MARK : (k + 1) * MARK] for k in range(count)],
        skipped,
        None if whole else f"is damaged: {len(lost):,} of its {count:,} images are decoded again",
    )


def _about(pixels: Path) -> dict[str, Any]:
    """Read what is said of a cache, if it can be vouched for."""
    about: dict[str, Any] = json.loads(pixels.with_suffix(".json").read_text(encoding="utf-8"))
    seal = about.pop("sha256", None)
    if seal is None and "digests" not in about:
        raise LostError("was made before there were digests in caches")
    if seal != digest_of_entries(about):
        raise LostError("cannot be used (its .json is damaged)")
    if about["key"] != pixels.stem[-2 * MARK :] or about["digests"]["rows"] != BLOCK:
        raise LostError("cannot be used (its .json is that of another)")
    return about


def start_of_file(shape: tuple[int, ...]) -> bytes:
    """Return the start of a .npy file; its length does not depend on the number of rows."""
    start = io.BytesIO()
    npy.write_array_header_1_0(start, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return start.getvalue()


def _sources(images: ImageSet) -> Iterator[Source]:
    for index, file in enumerate(images.files or ()):
        yield Source(file, images.box(index), *_stat(file))


def _stat(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:
        return -1, -1  # decoding it will say why
    return stat.st_size, stat.st_mtime_ns


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=MARK).digest()
