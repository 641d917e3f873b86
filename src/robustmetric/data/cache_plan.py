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
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from robustmetric.data.base import Box, ImageSet
from robustmetric.data.decode import Channels, Size

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
    """A cache that is complete: its pixels, mapped, the marks of its rows, and what was left out and why."""

    pixels: NDArray[np.uint8]
    marks: list[bytes]
    skipped: dict[int, str]


@dataclass(frozen=True)
class Plan:
    """What a cache is made from, and where it goes."""

    folder: Path
    stem: str  # the same for all caches of one data set, split, size and channels
    key: str
    sources: tuple[Source, ...]
    description: dict[str, object]
    size: Size | None
    channels: Channels

    @classmethod
    def of(cls, images: ImageSet, folder: Path, size: Size | None, channels: Channels) -> Plan:
        """Plan the cache of these images."""
        sources = tuple(_sources(images))
        description: dict[str, object] = {
            "format": FORMAT,
            "name": images.name,
            "split": images.split,
            "size": size and list(size),
            "channels": channels,
        }
        rows = [[str(file), *stat, *(box or ())] for file, box, *stat in sources]
        shown = f"{size[0]}x{size[1]}" if size else "original"
        stem = re.sub(r"[^\w.-]", "_", f"{images.name}-{images.split}-{shown}x{channels}")
        return cls(
            folder, stem, _digest({**description, "files": rows}).hex(), sources, description, size, channels
        )

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
        """Find the files of all finished caches of this data set, split, size and channels."""
        for path in self.folder.glob(f"{glob.escape(self.stem)}-{'[0-9a-f]' * 2 * MARK}.*"):
            if path.suffix in (".npy", ".json"):
                yield path

    def stale(self) -> list[Path]:
        """Find the finished files of other keys."""
        return [path for path in self.finished() if path.stem != self.pixels.stem]

    def opened(self) -> Finished | None:
        """Open the cache if it is there and whole."""
        found = opened(self.pixels)
        return found if found and len(found.pixels) + len(found.skipped) == len(self.sources) else None


def opened(pixels: Path) -> Finished | None:
    """Open a finished cache by the file of its pixels; None if it is not there, or damaged."""
    try:
        about = json.loads(pixels.with_suffix(".json").read_text(encoding="utf-8"))
        skipped = {int(entry["row"]): str(entry["reason"]) for entry in about["skipped"]}
        marks = bytes.fromhex(about["marks"])
        mapped: NDArray[np.uint8] = npy.open_memmap(pixels, mode="r")
        whole = pixels.stat().st_size == len(start_of_file(mapped.shape)) + mapped.nbytes
        if whole and mapped.dtype == np.uint8 and list(mapped.shape) == about["shape"]:
            rows = [marks[place : place + MARK] for place in range(0, len(marks), MARK)]
            return Finished(mapped, rows, skipped) if len(rows) == len(mapped) else None
    except (OSError, ValueError, KeyError, TypeError):  # either way it is built anew
        pass
    return None


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
