"""Figures of a data set against hand counts, and the contact sheet pixel by pixel."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from rich.console import Console

from robustmetric.data import ImageSet, load
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
GREY, RED = (236, 236, 236), (200, 40, 40)


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


def text_of(description: Description) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as capture:
        console.print(show(description))
    return capture.get()


# Figures


def test_cub_is_counted(make_cub: Maker, tmp_path: Path) -> None:
    found = describe(load("cub", make_cub(tmp_path, (3, 2, 5, 2, 2))))
    # Three of five classes train; the fixture writes 20 wide and 16 high.
    assert (found.name, found.split, found.images, found.classes) == ("cub", "train", 10, 3)
    assert (found.smallest, found.median, found.largest) == (2, 3.0, 5)
    assert (found.looked_at, found.sizes, found.modes) == (10, {(20, 16): 10}, {"RGB": 10})
    assert found.unreadable == ()


def test_the_median_of_two_classes_lies_between(make_sop: Maker, tmp_path: Path) -> None:
    found = describe(load("sop", make_sop(tmp_path), "test"))
    assert (found.split, found.images, found.smallest, found.median, found.largest) == ("test", 5, 2, 2.5, 3)


def test_pixels_are_counted_without_files(make_idx: Maker, tmp_path: Path) -> None:
    found = describe(load("mnist", make_idx(tmp_path, [3, 3, 3, 7])))
    assert (found.images, found.smallest, found.largest) == (4, 1, 3)
    assert (found.sizes, found.modes) == ({(28, 28): 4}, {"L": 4})


def test_sizes_and_modes_come_most_common_first(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{i}.png", size, (0, 0, 0)) for i, size in enumerate([(9, 5), (5, 9), (5, 9)])]
    Image.new("L", (3, 4)).save(tmp_path / "grey.png")
    Image.new("CMYK", (3, 4)).save(tmp_path / "print.jpg")
    found = describe(
        image_set([*files, tmp_path / "grey.png", tmp_path / "print.jpg"], [0, 0, 0, 0, 0], "all")
    )
    assert list(found.sizes.items()) == [((3, 4), 2), ((5, 9), 2), ((9, 5), 1)]
    assert list(found.modes.items()) == [("RGB", 3), ("CMYK", 1), ("L", 1)]


def test_only_the_first_headers_are_read(make_folder: Maker, tmp_path: Path) -> None:
    images = load("folder", make_folder(tmp_path, {"a": 6, "b": 2}))
    found = describe(images, headers=4)
    assert (found.images, found.looked_at, found.sizes) == (6, 4, {(20, 16): 4})
    assert describe(images, headers=None).looked_at == 6
    assert "width×height (of the first 4)" in text_of(found)
    with pytest.raises(ValueError, match="headers is 0; expected at least 1, or None for all files"):
        describe(images, headers=0)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_nothing_is_decoded(
    suffix: str, make_folder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = load("folder", make_folder(tmp_path, {"a": 2, "b": 2}, suffix=suffix))

    def refuse(self: object) -> None:
        pytest.fail("an image was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert describe(images).sizes == {(20, 16): 2}


def test_sizes_are_of_upright_images(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in ("turned.jpg", "turned.png"):
        Image.new("RGB", (20, 16)).save(tmp_path / name, exif=turned)
    found = describe(image_set([tmp_path / "turned.jpg", tmp_path / "turned.png"], [0, 0], "all"))
    assert found.sizes == {(16, 20): 2}


def test_files_that_are_no_images_are_named(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"a[b]": 3, "c": 2})
    (root / "a[b]" / "0.png").write_bytes(b"")
    (root / "a[b]" / "2.png").write_text("no image")
    found = describe(load("folder", root))
    assert found.images == 3
    assert found.sizes == {(20, 16): 1}
    assert found.unreadable == (root / "a[b]" / "0.png", root / "a[b]" / "2.png")
    text = text_of(found)
    assert "not readable: 2" in text
    assert "a[b]/0.png" in text


def test_the_table_shows_the_figures() -> None:
    sizes = {(width, 10): 20 - width for width in range(1, 9)}
    bad = tuple(Path(f"{i}.png") for i in range(7))
    text = text_of(Description("mine", "test", 61234, 1200, 2, 51.5, 1300, 2000, sizes, {"L": 5}, bad))
    for part in (
        "mine, test",
        "61,234",
        "1,200",
        "2 to 1,300, median 51.5",
        "1×10 (19), 2×10 (18), 3×10 (17), 4×10 (16), 5×10 (15), 3 others",
        "modes (of the first 2,000)",
        "not readable: 7",
        "and 2 more",
    ):
        assert part in text
    assert "5.png" not in text


def test_queries_cameras_and_boxes_are_told(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{i}.png", (20, 16), (i, i, i)) for i in range(4)]
    images = replace(
        image_set(files, [0, 0, 1, 1], "a", "b"),
        cameras=torch.tensor([3, 7, 7, 3]),
        is_query=torch.tensor([True, False, False, False]),
        boxes=np.array([[0, 0, 0, 0], [1, 2, 6, 9], [1, 2, 6, 9], [0, 0, 20, 16]]),
    )
    found = describe(images)
    assert (found.queries, found.gallery, found.cameras, found.boxes) == (1, None, 2, 3)
    assert found.sizes == {(5, 7): 2, (20, 16): 2}
    rows = [line.split("│")[1:3] for line in text_of(found).splitlines() if "│" in line]
    shown = {name.strip(): value.strip() for name, value in rows}
    assert (shown["queries, gallery"], shown["cameras"], shown["with a box"]) == ("1, 4", "2", "3")


def test_what_is_not_known_is_not_told() -> None:
    text = text_of(describe(load("digits")))
    assert not any(word in text for word in ("queries", "gallery", "cameras", "box"))


def test_a_validation_split_is_described(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"train/a": 2, "val/b": 3, "test/c": 2})
    text = text_of(describe(load("folder", root, "validation")))
    assert "folder, validation" in text


# The typical size


def test_the_typical_size_is_the_median(tmp_path: Path) -> None:
    sizes = [(10, 40), (30, 30), (90, 10), (300, 300), (64, 64)]
    files = [plain(tmp_path / f"{i}.png", size, (0, 0, 0)) for i, size in enumerate(sizes)]
    # The square roots of the areas are 20, 30, 30, 300 and 64.
    assert typical_size(image_set(files, [0] * 5, "a")) == 30
    assert typical_size(image_set(files[3:], [0] * 2, "a")) == 182
    boxes = np.array([[0, 0, 0, 0], [0, 0, 5, 5], [2, 2, 9, 9], [0, 0, 7, 7], [0, 0, 6, 6]])
    assert typical_size(replace(image_set(files, [0] * 5, "a"), boxes=boxes)) == 7


def test_the_typical_size_of_pixels_is_their_own(make_idx: Maker, tmp_path: Path) -> None:
    assert typical_size(load("mnist", make_idx(tmp_path, [1, 1]))) == 28


def test_the_typical_size_looks_at_few_files_from_the_whole_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (
        plain(tmp_path / "s.png", (10, 10), (0, 0, 0)),
        plain(tmp_path / "l.png", (50, 50), (0, 0, 0)),
    )
    files = [small] * 400 + [large] * 600
    opened: list[Path] = []
    original = Image.open

    def counted(file: Path, **options: Any) -> Image.Image:
        opened.append(file)
        return original(file, **options)

    monkeypatch.setattr(Image, "open", counted)
    assert typical_size(image_set(files, [0] * 1000, "a")) == 50
    assert opened == [small] * 80 + [large] * 120


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


def test_the_aspect_is_kept(tmp_path: Path) -> None:
    files = [
        plain(tmp_path / "wide.png", (80, 20), (1, 2, 3)),
        plain(tmp_path / "thin.png", (1, 99), (1, 2, 3)),
    ]
    sheet = contact_sheet(image_set(files, [0, 0], "all"), columns=2, cell=CELL)
    wide, thin = (np.asarray(cell_at(sheet, 0, column)) for column in range(2))
    assert (wide[15:25] == (1, 2, 3)).all()
    assert (wide[:15] == GREY).all()
    assert (wide[25:] == GREY).all()
    assert (thin[:, 19] == (1, 2, 3)).all()
    assert (np.delete(thin, 19, axis=1) == GREY).all()


def test_the_sheet_shows_boxes(tmp_path: Path) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[5:10, 10:20] = (9, 99, 199)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    images = image_set([tmp_path / "a.png"] * 3, [0, 0, 0], "all")
    boxes = np.array([[10, 5, 20, 10], [0, 0, 0, 0], [10, 5, 31, 10]])
    sheet = contact_sheet(replace(images, boxes=boxes), columns=3, cell=CELL)
    assert colours(cell_at(sheet, 0, 0)) == {(9, 99, 199), GREY}
    assert (0, 0, 0) in colours(cell_at(sheet, 0, 1))
    assert colours(cell_at(sheet, 0, 2)) == {GREY, RED}  # it does not fit


def test_small_images_are_enlarged_pixel_by_pixel() -> None:
    pixels = np.array([[[[0], [50]], [[100], [200]]]], np.uint8)
    images = ImageSet("mine", "train", torch.tensor([0]), ("all",), pixels=pixels)
    cell = np.asarray(cell_at(contact_sheet(images, columns=1, cell=CELL), 0, 0))
    assert (cell == np.kron(pixels[0, :, :, 0], np.ones((20, 20), np.uint8))[..., None]).all()


def test_colour_pixels_keep_their_colour() -> None:
    pixels = np.full((1, 4, 4, 3), (10, 20, 30), np.uint8)
    images = ImageSet("mine", "train", torch.tensor([0]), ("all",), pixels=pixels)
    assert colours(cell_at(contact_sheet(images, columns=1, cell=CELL), 0, 0)) == {(10, 20, 30)}


def test_broken_images_are_crossed_out(make_folder: Maker, tmp_path: Path) -> None:
    root = make_folder(tmp_path, {"a": 4, "b": 2})
    whole = (root / "a" / "0.png").read_bytes()
    (root / "a" / "0.png").write_bytes(whole[: len(whole) // 2])
    (root / "a" / "1.png").write_bytes(b"")
    (root / "a" / "2.png").write_text("no image")
    sheet = contact_sheet(load("folder", root), columns=4, cell=CELL)
    for column in range(3):
        cell = np.asarray(cell_at(sheet, 0, column))
        assert colours(cell_at(sheet, 0, column)) == {GREY, RED}
        assert (cell[range(CELL), range(CELL)] == RED).all()
        assert (cell[range(CELL), range(CELL - 1, -1, -1)] == RED).all()
    assert len(colours(cell_at(sheet, 0, 3))) > 100  # the noise of the whole one


def test_truncated_images_are_crossed_out_even_if_pillow_was_told_to_fill_them(
    make_folder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(tmp_path, {"a": 2, "b": 2}, suffix=".jpg")
    whole = (root / "a" / "0.jpg").read_bytes()
    (root / "a" / "0.jpg").write_bytes(whole[:-100])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    sheet = contact_sheet(load("folder", root), columns=2, cell=CELL)
    assert colours(cell_at(sheet, 0, 0)) == {GREY, RED}
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_the_seed_alone_decides_what_is_drawn() -> None:
    digits = load("digits")
    first = contact_sheet(digits, columns=3, rows=3, cell=16, seed=1)
    assert first.tobytes() == contact_sheet(digits, columns=3, rows=3, cell=16, seed=1).tobytes()
    assert first.tobytes() != contact_sheet(digits, columns=3, rows=3, cell=16, seed=2).tobytes()


def test_a_row_shows_images_of_its_class_once_each() -> None:
    digits = load("digits")
    assert digits.pixels is not None
    sheet = contact_sheet(digits, columns=9, rows=10, cell=8, seed=3)
    place = {
        image.tobytes(): label for image, label in zip(digits.pixels, digits.labels.tolist(), strict=True)
    }
    for row in range(10):
        cells = [np.asarray(cell_at(sheet, row, column, 8).convert("L")).tobytes() for column in range(9)]
        assert [place[cell] for cell in cells] == [row] * 9
        assert len(set(cells)) == 9


def test_names_are_written_above_their_rows(tmp_path: Path) -> None:
    files = [plain(tmp_path / f"{i}.png", (8, 8), (0, 0, 0)) for i in range(3)]

    def strips(*classes: str) -> list[Image.Image]:
        sheet = contact_sheet(image_set(files, [0, 1, 2], *classes), columns=3, cell=CELL)
        tops = [TITLE + row * (NAME + CELL + GAP) for row in range(3)]
        # The margins are free, but for a letter's soft edge.
        for left in (0, sheet.width - GAP + 1):
            assert colours(sheet.crop((left, 0, left + GAP - 1, sheet.height))) == {(255, 255, 255)}
        return [sheet.crop((0, top, sheet.width, top + NAME)) for top in tops]

    cat, nothing, long = strips("cat", "", "a name that is far too long for\nthe sheet" * 5)
    assert len(colours(cat)) > 2
    assert colours(nothing) == {(255, 255, 255)}
    assert len(colours(long)) > 2
    again, other, _ = strips("cat", "猫", "x")
    assert again.tobytes() == cat.tobytes()
    assert other.tobytes() != cat.tobytes()


@pytest.mark.parametrize("name", ["columns", "rows", "cell"])
def test_a_sheet_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; a contact sheet needs at least 1"):
        contact_sheet(load("digits"), **{name: 0})


def test_a_sheet_of_one_pixel_cells_is_drawn() -> None:
    assert contact_sheet(load("digits"), columns=1, rows=1, cell=1).size == (13, 63)


def test_a_sheet_is_saved_as_png(make_cars: Maker, tmp_path: Path) -> None:
    sheet = contact_sheet(load("cars", make_cars(tmp_path / "cars")), columns=3, cell=CELL)
    sheet.save(tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", sheet.size)
