"""Figures of a data set against hand counts, and the contact sheet pixel by pixel."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from rich.console import Console

from robustmetric.data import ImageSet, load
from robustmetric.data import describe as describing
from robustmetric.data.describe import (
    GAP,
    NAME,
    TITLE,
    Description,
    contact_sheet,
    describe,
    show,
    typical_size,
)

Maker = Callable[..., Path]

CELL = 40
WHITE, RED = (255, 255, 255), (200, 40, 40)


def plain(path: Path, size: tuple[int, int], colour: tuple[int, int, int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def image_set(files: list[Path], labels: list[int], *classes: str) -> ImageSet:
    return ImageSet("mine", "train", torch.tensor(labels), classes, files=tuple(files))


def cell_at(sheet: Image.Image, row: int, column: int, cell: int = CELL) -> Image.Image:
    left, top = GAP + column * (cell + GAP), TITLE + row * (NAME + cell + GAP) + NAME
    return sheet.crop((left, top, left + cell, top + cell))


def colours(image: Image.Image) -> set[object]:
    return {colour for _, colour in image.getcolors(1 << 20) or ()}


def rows_of(description: Description) -> dict[str, str]:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(show(description))
    rows = [line.split("│")[1:3] for line in capture.get().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in rows}


# Figures


def test_all_that_is_known_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [plain(tmp_path / f"{i}.png", size, (0, 0, 0)) for i, size in enumerate([(9, 5), (5, 9), (5, 9)])]
    Image.new("RGB", (9, 5)).save(tmp_path / "turned.jpg", exif=turned)
    Image.new("L", (30, 40)).save(tmp_path / "grey.png")
    (tmp_path / "[bad].png").write_text("no image")
    files += [tmp_path / name for name in ("turned.jpg", "grey.png", "[bad].png", "beyond.png")]
    images = replace(
        image_set(files, [0, 0, 1, 1, 1, 1, 2], "a", "b", "c"),
        cameras=torch.tensor([3, 7, 7, 3, 3, 3, 3]),
        is_query=torch.arange(7) < 1,
        unread={".heic": 2},
        boxes=np.array([[0, 0, 0, 0]] * 4 + [[1, 2, 4, 6]] + [[0, 0, 0, 0]] * 2),
    )
    monkeypatch.setattr(describing, "HEADERS", 6)
    found = describe(images)
    assert list(found.sizes.items()) == [((9, 5), 3), ((4, 3), 1), ((5, 9), 1)]
    assert list(found.modes.items()) == [("RGB", 4), ("L", 1)]
    assert found.unreadable == (tmp_path / "[bad].png",)
    assert rows_of(found) == {
        "images": "7",
        "classes": "3",
        "queries, gallery": "1, 7",
        "cameras": "2",
        "with a box": "1",
        "files of other kinds": ".heic (2)",
        "images per class": "1 to 4, median 2",
        "width×height (of the first 6)": "5×9 (3), 3×4 (1), 9×5 (1)",
        "modes (of the first 6)": "RGB (4), L (1)",
        "not readable: 1 (of the first 6)": str(tmp_path / "[bad].png"),
    }


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_nothing_is_decoded(
    suffix: str, make_folder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = load("folder", make_folder(tmp_path, {"a": 2, "b": 2}, suffix=suffix))

    def refuse(self: object) -> None:
        pytest.fail("an image was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert describe(images).sizes == {(16, 20): 2}


# The typical size


def test_the_typical_size_is_the_median(tmp_path: Path) -> None:
    sizes = [(10, 40), (30, 30), (90, 10), (300, 300), (64, 64)]
    files = [plain(tmp_path / f"{i}.png", size, (0, 0, 0)) for i, size in enumerate(sizes)]
    # The square roots of the areas are 20, 30, 30, 300 and 64.
    assert typical_size(image_set(files, [0] * 5, "a")) == 30
    assert typical_size(image_set(files[3:], [0] * 2, "a")) == 182
    boxes = np.array([[0, 0, 0, 0], [0, 0, 5, 5], [2, 2, 9, 9], [0, 0, 7, 7], [0, 0, 6, 6]])
    assert typical_size(replace(image_set(files, [0] * 5, "a"), boxes=boxes)) == 7


def test_files_that_are_no_images_have_no_size(tmp_path: Path) -> None:
    good = plain(tmp_path / "good.png", (12, 12), (0, 0, 0))
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    assert typical_size(image_set([bad, good, tmp_path / "none.png"], [0] * 3, "a")) == 12
    with pytest.raises(
        ValueError, match=r"none of 1 images of mine \(train\) can be opened.*bad\.png; check"
    ):
        typical_size(image_set([bad], [0], "a"))
    with pytest.raises(ValueError, match="none of 0 images of mine"):
        typical_size(image_set([], [], "a"))


# The contact sheet


def test_each_class_has_a_row_with_its_images_in_order(tmp_path: Path) -> None:
    colour = {"a": [(255, 0, 0), (0, 255, 0)], "b": [(0, 0, 255), (9, 9, 9), (0, 99, 99)]}
    files = [plain(tmp_path / c / f"{i}.png", (8, 8), v) for c in "ab" for i, v in enumerate(colour[c])]
    sheet = contact_sheet(image_set(files, [0, 0, 1, 1, 1], "a", "b"), columns=3, rows=5, cell=CELL)
    assert sheet.size == (GAP + 3 * (CELL + GAP), TITLE + 2 * (NAME + CELL + GAP))
    for row, name in enumerate("ab"):
        for column, value in enumerate(colour[name]):
            assert colours(cell_at(sheet, row, column)) == {value}
    assert colours(cell_at(sheet, 0, 2)) == {(255, 255, 255)}  # a has two images


def test_the_sheet_shows_boxes(tmp_path: Path) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[5:10, 10:20] = (9, 99, 199)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    images = image_set([tmp_path / "a.png"] * 3, [0, 0, 0], "all")
    boxes = np.array([[10, 5, 20, 10], [0, 0, 0, 0], [10, 5, 31, 10]])
    sheet = contact_sheet(replace(images, boxes=boxes), columns=3, cell=CELL)
    assert colours(cell_at(sheet, 0, 0)) == {(9, 99, 199), WHITE}
    assert (0, 0, 0) in colours(cell_at(sheet, 0, 1))
    assert colours(cell_at(sheet, 0, 2)) == {WHITE, RED}  # it does not fit


def test_broken_images_are_crossed_out(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"a": 4, "b": 2})
    whole = (root / "a" / "0.png").read_bytes()
    (root / "a" / "0.png").write_bytes(whole[: len(whole) // 2])
    (root / "a" / "1.png").write_bytes(b"")
    (root / "a" / "2.png").write_text("no image")
    sheet = contact_sheet(load("folder", root), columns=4, cell=CELL)
    for column in range(3):
        cell = np.asarray(cell_at(sheet, 0, column))
        assert colours(cell_at(sheet, 0, column)) == {WHITE, RED}
        assert (cell[range(CELL), range(CELL)] == RED).all()
        assert (cell[range(CELL), range(CELL - 1, -1, -1)] == RED).all()
    assert len(colours(cell_at(sheet, 0, 3))) > 100  # the noise of the whole one
