"""What a data set holds, in figures and as a sheet of pictures to look at before training on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from rich.table import Table
from rich.text import Text

from robustmetric.data.base import ImageSet, Split
from robustmetric.data.decode import decoded, open_image, upright_size, whole_images
from robustmetric.errors import UserError, shorten
from robustmetric.text import printable

Key = TypeVar("Key", str, tuple[int, int])

SAMPLE = 200  # files that tell the typical size
HEADERS = 2000  # files whose headers are read, unless told otherwise
LISTED = 5  # sizes or files that a table names

# The sheet, in pixels: a title, then for each class its name and below it a row of cells.
GAP = 6
TITLE = 34
NAME = 22
_PAPER, _CELL, _INK, _CROSS = "white", (236, 236, 236), (32, 32, 32), (200, 40, 40)


@dataclass(frozen=True)
class Description:
    """What one split of a data set holds.

    `smallest`, `median` and `largest` count the images of a class. `sizes` (width, height) and `modes`
    (Pillow's names) say how many of the `looked_at` first images have them, most common first; `unreadable`
    are those whose headers cannot be read. `queries` and `gallery` count the images that are searched for and
    searched, None where every image is both; `cameras` counts cameras, `boxes` the images of which a part is
    cut out.
    """

    name: str
    split: Split
    images: int
    classes: int
    smallest: int
    median: float
    largest: int
    looked_at: int
    sizes: dict[tuple[int, int], int]
    modes: dict[str, int]
    unreadable: tuple[Path, ...] = ()
    queries: int | None = None
    gallery: int | None = None
    cameras: int = 0
    boxes: int = 0


def describe(images: ImageSet, *, headers: int | None = HEADERS) -> Description:
    """Count the images, classes and sizes of a data set.

    Sizes and modes come from the headers of the first `headers` files (None: of all); nothing is decoded,
    so a truncated image is not noticed. Sizes are those of the upright image, or of its box.

    >>> from robustmetric.data import load
    >>> found = describe(load("digits"))
    >>> found.images, found.classes, found.sizes, found.modes
    (1000, 10, {(8, 8): 1000}, {'L': 1000})
    """
    if headers is not None and headers < 1:
        raise UserError(f"headers is {headers}; expected at least 1, or None for all files")
    sizes: Counter[tuple[int, int]] = Counter()
    modes: Counter[str] = Counter()
    unreadable: list[Path] = []
    if images.pixels is not None:
        looked_at, height, width, channels = images.pixels.shape
        sizes[width, height] = looked_at
        modes["L" if channels == 1 else "RGB"] = looked_at
    else:
        files = (images.files or ())[:headers]
        looked_at = len(files)
        with whole_images():
            for index, file in enumerate(files):
                try:
                    size, mode = _header(file)
                except Exception:  # damaged files make Pillow's readers raise nearly anything
                    unreadable.append(file)
                else:
                    sizes[_cut(images, index) or size] += 1
                    modes[mode] += 1
    counts = np.bincount(images.labels.numpy(), minlength=len(images.classes))
    return Description(
        name=images.name,
        split=images.split,
        images=len(images),
        classes=len(images.classes),
        smallest=int(counts.min(initial=len(images))),
        median=float(np.median(counts)) if len(counts) else 0.0,
        largest=int(counts.max(initial=0)),
        looked_at=looked_at,
        sizes=_most_common_first(sizes),
        modes=_most_common_first(modes),
        unreadable=tuple(unreadable),
        queries=None if images.is_query is None else int(images.is_query.sum()),
        gallery=None if images.is_gallery is None else int(images.is_gallery.sum()),
        cameras=0 if images.cameras is None else len(images.cameras.unique()),
        boxes=0 if images.boxes is None else int(images.boxes.any(axis=1).sum()),
    )


def typical_size(images: ImageSet) -> int:
    """Return the size that images of this set have: the median over images of sqrt(width * height), rounded.

    It comes from the headers of at most 200 files from the whole set, or from their boxes; files that cannot
    be read do not count.

    >>> from robustmetric.data import load
    >>> typical_size(load("digits"))
    8
    """
    if images.pixels is not None:
        return round(math.sqrt(math.prod(images.pixels.shape[1:3])))
    files = images.files or ()
    sample = np.linspace(0, len(files) - 1, min(len(files), SAMPLE)).round().astype(int).tolist()
    found: list[float] = []
    with whole_images():
        for index in sample:
            try:
                size = _cut(images, index) or _header(files[index])[0]
            except Exception:  # noqa: S112  damaged files make Pillow's readers raise nearly anything
                continue
            found.append(math.sqrt(math.prod(size)))
    if not found:
        raise UserError(
            f"none of {len(sample)} images of {images.name} ({images.split}) can be opened, so their size is "
            f"not known: {shorten([files[index] for index in sample])}; check that they are images"
        )
    return round(float(np.median(found)))


def show(description: Description) -> Table:
    """Lay a description out as a table for the terminal.

    >>> from robustmetric.data import load
    >>> show(describe(load("digits"))).row_count
    5
    """
    d = description
    table = Table(title=f"{d.name}, {d.split}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("images", f"{d.images:,}")
    table.add_row("classes", f"{d.classes:,}")
    if d.queries is not None or d.gallery is not None:
        queries, gallery = (d.images if count is None else count for count in (d.queries, d.gallery))
        table.add_row("queries, gallery", f"{queries:,}, {gallery:,}")
    if d.cameras:
        table.add_row("cameras", f"{d.cameras:,}")
    if d.boxes:
        table.add_row("with a box", f"{d.boxes:,}")
    table.add_row("images per class", f"{d.smallest:,} to {d.largest:,}, median {d.median:,g}")
    first = "" if d.looked_at == d.images else f" (of the first {d.looked_at:,})"
    sizes = {f"{width}×{height}": count for (width, height), count in d.sizes.items()}
    table.add_row(f"width×height{first}", _counted(sizes))
    table.add_row(f"modes{first}", _counted(d.modes))
    if d.unreadable:
        lines = [str(file) for file in d.unreadable[:LISTED]]
        if len(d.unreadable) > LISTED:
            lines.append(f"and {len(d.unreadable) - LISTED:,} more")
        # Text and not markup: a path may hold brackets.
        table.add_row(f"not readable: {len(d.unreadable):,}{first}", Text(printable("\n".join(lines))))
    return table


def contact_sheet(
    images: ImageSet, *, columns: int = 8, rows: int = 8, cell: int = 96, seed: int = 0
) -> Image.Image:
    """Draw a sheet of pictures: `rows` classes drawn by `seed`, each with its name and `columns` images.

    Images keep their aspect within a square of `cell` pixels and are decoded as for training; one that
    cannot be decoded is a crossed square. Classes come in their order, images in that of the data set.

    >>> from robustmetric.data import load
    >>> contact_sheet(load("digits"), columns=4, rows=2, cell=32).size
    (158, 154)
    """
    for name, value in (("columns", columns), ("rows", rows), ("cell", cell)):
        if value < 1:
            raise UserError(f"{name} is {value}; a contact sheet needs at least 1")
    drawn = _draw(images, columns, rows, np.random.default_rng(seed))
    width = GAP + columns * (cell + GAP)
    sheet = Image.new("RGB", (width, TITLE + len(drawn) * (NAME + cell + GAP)), _PAPER)
    pen = ImageDraw.Draw(sheet)
    title = f"{images.name}, {images.split}: {len(images):,} images, {len(images.classes):,} classes"
    _write(pen, title, GAP, TITLE, 16, width - 2 * GAP)
    with whole_images():
        for row, (label, indices) in enumerate(drawn):
            top = TITLE + row * (NAME + cell + GAP) + NAME
            _write(pen, images.classes[label], GAP, top, 13, width - 2 * GAP)
            for column, index in enumerate(indices):
                left = GAP + column * (cell + GAP)
                pen.rectangle((left, top, left + cell - 1, top + cell - 1), fill=_CELL)
                picture = _picture(images, index)
                if picture is None:
                    _cross(pen, left, top, cell)
                else:
                    small = _within(picture, cell)
                    place = left + (cell - small.width) // 2, top + (cell - small.height) // 2
                    sheet.paste(small, place)
    return sheet


def _header(file: Path) -> tuple[tuple[int, int], str]:
    """Read the size of the upright image, and its mode."""
    with open_image(file) as image:
        # Pillow would decode a PNG to look for EXIF behind the pixels.
        has_exif = image.format != "PNG" or "exif" in image.info
        return upright_size(image) if has_exif else image.size, image.mode


def _cut(images: ImageSet, index: int) -> tuple[int, int] | None:
    """Return width and height of an image's box, if it has one."""
    box = images.box(index)
    return box and (box[2] - box[0], box[3] - box[1])


def _most_common_first(counts: Counter[Key]) -> dict[Key, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _counted(counts: dict[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    parts = [f"{what} ({count:,})" for what, count in list(counts.items())[:LISTED]]
    rest = [f"{len(counts) - LISTED:,} others"] if len(counts) > LISTED else []
    return ", ".join(parts + rest)


def _draw(
    images: ImageSet, columns: int, rows: int, generator: np.random.Generator
) -> list[tuple[int, list[int]]]:
    """Draw classes and some positions of each."""
    labels: NDArray[np.int64] = images.labels.numpy()
    present = np.unique(labels)
    chosen = np.sort(generator.permutation(present)[:rows])
    return [
        (int(label), np.sort(generator.permutation(np.flatnonzero(labels == label))[:columns]).tolist())
        for label in chosen
    ]


def _picture(images: ImageSet, index: int) -> Image.Image | None:
    """Decode one image as RGB, or None if that fails."""
    if images.pixels is not None:
        pixels = images.pixels[index]
        return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).convert("RGB")
    files: Sequence[Path] = images.files or ()
    try:
        return Image.fromarray(decoded(files[index], images.box(index), None, 3))
    except MemoryError:
        raise
    except Exception:  # damaged files make Pillow's readers raise nearly anything
        return None


def _within(picture: Image.Image, cell: int) -> Image.Image:
    """Scale a picture so that its longer side is `cell`."""
    scale = cell / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    # Enlarged pixels stay what they are; anything else would show what is not in the data.
    return picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR)


def _cross(pen: ImageDraw.ImageDraw, left: int, top: int, cell: int) -> None:
    right, bottom = left + cell - 1, top + cell - 1
    pen.rectangle((left, top, right, bottom), outline=_CROSS)
    pen.line((left, top, right, bottom), fill=_CROSS)
    pen.line((left, bottom, right, top), fill=_CROSS)


def _write(pen: ImageDraw.ImageDraw, text: str, left: int, bottom: int, size: int, room: int) -> None:
    """Write one line that ends above `bottom`, cut short where there is no room."""
    font = ImageFont.load_default(size)
    text = line = " ".join(text.split())
    while line and pen.textlength(line, font=font) > room:
        text = text[:-1]
        line = f"{text.rstrip()}..." if text else ""
    # The font's height counts, not the text's own: names with and without descenders stand alike.
    pen.text((left, bottom - GAP // 2 - round(1.2 * size)), line, fill=_INK, font=font)
