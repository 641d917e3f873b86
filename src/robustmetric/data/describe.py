"""What a data set holds, in figures and as a sheet of pictures to look at before training on it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.table import Table
from rich.text import Text

from robustmetric.data.base import ImageSet
from robustmetric.data.decode import LONGEST, Size, decoded_or_reason, header, resized, whole_images
from robustmetric.errors import UserError, shorten, whole
from robustmetric.text import printable, shortened

SAMPLE = 200  # files that tell the typical size
HEADERS = 2000  # files whose headers are read
LISTED = 5  # sizes or files that a table names

# The sheet, in pixels: a title, then for each class its name and below it a row of cells.
GAP = 6
TITLE = 34
NAME = 22
_PAPER, _INK, _CROSS = "white", (32, 32, 32), (200, 40, 40)


@dataclass(frozen=True)
class Description:
    """One split of a data set, and what the headers of its first files say.

    `sizes` (height, width) and `modes` (Pillow's names) count the `looked_at` images that have them, most
    common first; `unreadable` are the files whose headers cannot be read.
    """

    images: ImageSet
    looked_at: int
    sizes: dict[Size, int]
    modes: dict[str, int]
    unreadable: tuple[Path, ...] = ()


def describe(images: ImageSet) -> Description:
    """Read the headers of the first 2000 files of a data set; nothing is decoded.

    Sizes are those of the upright image, or of its box.

    >>> from robustmetric.data import load
    >>> found = describe(load("digits"))
    >>> len(found.images), found.sizes, found.modes
    (1000, {(8, 8): 1000}, {'L': 1000})
    """
    if images.pixels is not None:
        count, height, width, channels = images.pixels.shape
        return Description(images, count, {(height, width): count}, {"L" if channels == 1 else "RGB": count})
    rows = range(min(len(images), HEADERS))
    headers = _headers(images, rows)
    readable = sorted(found for found in headers.values() if found is not None)
    sizes = dict(Counter(size for size, _ in readable).most_common())
    modes = dict(Counter(sorted(mode for _, mode in readable)).most_common())
    files = images.files or ()
    unreadable = tuple(files[row] for row, found in headers.items() if found is None)
    return Description(images, len(rows), sizes, modes, unreadable)


def typical_size(images: ImageSet) -> int:
    """Return the median over images of sqrt(width * height), rounded.

    It comes from the headers of at most 200 files of the whole set, or from their boxes; files that cannot be
    read do not count.
    """
    if images.pixels is not None:
        return round(math.sqrt(math.prod(images.pixels.shape[1:3])))
    rows = np.linspace(0, len(images) - 1, min(len(images), SAMPLE)).round().astype(int).tolist()
    headers = _headers(images, rows)
    found = [math.sqrt(math.prod(known[0])) for known in headers.values() if known]
    if not found:
        files = images.files or ()
        raise UserError(
            f"none of {len(rows)} images of {images.name} ({images.split}) can be opened, so their size is "
            f"not known: {shorten([files[row] for row in rows])}; check that they are images"
        )
    return round(float(np.median(found)))


def show(description: Description) -> Table:
    """Lay a description out as a table for the terminal."""
    d, images = description, description.images
    counts = np.bincount(images.labels.numpy(), minlength=len(images.classes))
    first = "" if d.looked_at == len(images) else f" (of the first {d.looked_at:,})"
    marks = (images.is_query, images.is_gallery)
    table = Table(title=f"{images.name}, {images.split}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("images", f"{len(images):,}")
    table.add_row("classes", f"{len(images.classes):,}")
    if any(mark is not None for mark in marks):
        shares = [f"{len(images) if mark is None else int(mark.sum()):,}" for mark in marks]
        table.add_row("queries, gallery", ", ".join(shares))
    if images.cameras is not None:
        table.add_row("cameras", f"{len(images.cameras.unique()):,}")
    if images.boxes is not None:
        table.add_row("with a box", f"{int(images.boxes.any(axis=1).sum()):,}")
    if images.unread:
        table.add_row("files of other kinds", _counted(dict(images.unread)))
    table.add_row(
        "images per class", f"{min(counts):,} to {max(counts):,}, median {float(np.median(counts)):,g}"
    )
    sizes = {f"{width}×{height}": count for (height, width), count in d.sizes.items()}
    for name, found in ((f"width×height{first}", sizes), (f"modes{first}", d.modes)):
        table.add_row(name, _counted(found) if len(found) != 1 else next(iter(found)))
    if d.unreadable:
        lines = [str(file) for file in d.unreadable[:LISTED]]
        more = [f"and {len(d.unreadable) - LISTED:,} more"] if len(d.unreadable) > LISTED else []
        # Text and not markup: a path may hold brackets.
        told = Text(printable("\n".join(lines + more)))
        table.add_row(f"not readable: {len(d.unreadable):,}{first}", told)
    return table


def contact_sheet(
    images: ImageSet, *, columns: int = 8, rows: int = 8, cell: int = 96, seed: int = 0
) -> Image.Image:
    """Draw a sheet of pictures: `rows` classes drawn by `seed`, each with its name and `columns` images.

    Images are padded to squares of `cell` pixels; one that cannot be decoded is a crossed square.
    """
    for name, value in (("columns", columns), ("rows", rows), ("cell", cell)):
        whole(name, value, 1, LONGEST)
    labels, generator = images.labels.numpy(), np.random.default_rng(seed)
    chosen = np.sort(generator.permutation(np.unique(labels))[:rows])
    width = GAP + columns * (cell + GAP)
    sheet = Image.new("RGB", (width, TITLE + len(chosen) * (NAME + cell + GAP)), _PAPER)
    pen = ImageDraw.Draw(sheet)
    title = f"{images.name}, {images.split}: {len(images):,} images, {len(images.classes):,} classes"
    _write(pen, title, TITLE, 16, width - 2 * GAP)
    with whole_images():
        for row, label in enumerate(chosen.tolist()):
            top = TITLE + row * (NAME + cell + GAP) + NAME
            _write(pen, images.classes[label], top, 13, width - 2 * GAP)
            drawn = np.sort(generator.permutation(np.flatnonzero(labels == label))[:columns])
            for column, index in enumerate(drawn.tolist()):
                left = GAP + column * (cell + GAP)
                picture = _picture(images, index, (cell, cell))
                if not isinstance(picture, str):
                    sheet.paste(Image.fromarray(picture), (left, top))
                else:
                    right, bottom = left + cell - 1, top + cell - 1
                    pen.rectangle((left, top, right, bottom), outline=_CROSS)
                    pen.line((left, top, right, bottom), fill=_CROSS)
                    pen.line((left, bottom, right, top), fill=_CROSS)
    return sheet


def _headers(images: ImageSet, rows: list[int] | range) -> dict[int, tuple[Size, str] | None]:
    """Return the size and mode of each of these images, None where the file cannot be read."""
    found: dict[int, tuple[Size, str] | None] = {}
    with whole_images():
        for row in rows:
            try:
                size, mode = header((images.files or ())[row])
            except Exception:  # damaged files make Pillow's readers raise nearly anything
                found[row] = None
            else:
                box = images.box(row)
                found[row] = ((box[3] - box[1], box[2] - box[0]) if box else size), mode
    return found


def _counted(counts: dict[str, int]) -> str:
    parts = [f"{what} ({count:,})" for what, count in list(counts.items())[:LISTED]]
    rest = [f"{len(counts) - LISTED:,} others"] if len(counts) > LISTED else []
    return ", ".join(parts + rest)


def _picture(images: ImageSet, index: int, size: Size) -> NDArray[np.uint8] | str:
    """Return one image (H, W, 3), padded to a size, or the reason why it cannot be read."""
    if images.pixels is None:
        return decoded_or_reason((images.files or ())[index], images.box(index), size, 3, "pad")
    pixels = images.pixels[index]
    return resized(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), size, 3, "pad")


def _write(pen: ImageDraw.ImageDraw, text: str, bottom: int, size: int, room: int) -> None:
    """Write one line that ends above `bottom`, shortened to fit."""
    font = ImageFont.load_default(size)
    line = shortened(" ".join(text.split()), lambda part: pen.textlength(part, font=font) <= room)
    # The font's height counts, not the text's own: names with and without descenders stand alike.
    pen.text((GAP, bottom - GAP // 2 - round(1.2 * size)), line, fill=_INK, font=font)
