"""The sheet of an attack: pictures are those of the images; right and wrong differ in more than colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from PIL._util import DeferredError
from torch import nn

from robustmetric.attacks import PGD, Column, Gallery, Queries, attack
from robustmetric.evaluation import Data, NetworkView, Threat, run_attack
from robustmetric.evaluation.attack import embed_all
from robustmetric.perturb import Budget
from robustmetric.report import sheet
from robustmetric.report.pictures import rendered
from robustmetric.report.sheet import BLUE, GREEN, RED, Album, draw_sheet, thumbnail
from robustmetric.report.shots import Ranked, Shot, take_shots
from tests.helpers.pixels import blown_up, places_of

WHITE = (255, 255, 255)


def a_scene(shape: tuple[int, int, int], apart: bool = False) -> NetworkView:
    """Noise of three classes as seen by a network that only flattens it."""
    noise = torch.Generator().manual_seed(7)
    images = torch.rand(20 if apart else 12, *shape, generator=noise)
    labels, own = torch.arange(len(images)) % 3, torch.arange(len(images))
    z = embed_all(nn.Flatten(), images, own, batch=len(own))
    if not apart:
        return NetworkView(nn.Flatten(), images, Queries(z, labels, own), Gallery(z, labels))
    asked, ranked = Queries(z[:8], labels[:8], torch.full((8,), -1)), Gallery(z[8:], labels[8:])
    return NetworkView(nn.Flatten(), images[:8], asked, ranked, images[8:])


def shots_of(
    view: NetworkView, name: str, numbers: Sequence[int], k: int = 5, eps: float = 0.1
) -> list[Shot]:
    goal, threat, queries = attack(name), Threat(Budget(eps, eps / 2, steps=3), PGD()), torch.tensor(numbers)
    return take_shots(view, goal, queries, run_attack(view, goal, queries, threat), k)


def album(
    view: NetworkView, files: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> Album:
    """The images of a scene, with names."""
    gallery = None if view.ranked is None else Data(view.ranked, view.gallery.labels)
    data = Data(view.images, view.queries.labels, gallery=gallery, files=files, classes=classes)
    return Album(view, data)


def a_shot(view: NetworkView, number: int = 0, change: float = 0.0, **entries: Any) -> Shot:
    """A query whose ranking is as it is said to be."""
    image = view.images[torch.tensor([number])][0] * 0.5
    found = (Ranked(1, 0.25, False), Ranked(3, 0.5, True))
    usual: dict[str, Any] = {"targets": (), "before": found, "after": found[::-1], "place": (2, 1)}
    values = {"GTM": (100.0, 0.0)}
    return Shot("GTM", number, image, image + change, values=values, **{**usual, **entries})


def drawn(
    shots: Sequence[Shot], view: NetworkView, columns: Sequence[Column] | None = None, **names: Any
) -> Image.Image:
    return draw_sheet(shots, album(view, **names), columns or [Column("GTM", "higher")], title="a title")


def rgb(colour: str) -> tuple[int, ...]:
    return ImageColor.getrgb(colour)


def frame(
    whole: Image.Image, place: tuple[int, int], size: tuple[int, int], away: int
) -> list[tuple[int, ...]]:
    """The pixels of the line around a picture that is so far away."""
    (x, y), (width, height) = place, size
    left, top, right, bottom = x - away, y - away, x + width + away - 1, y + height + away - 1
    across = [(column, line) for column in range(left, right + 1) for line in (top, bottom)]
    down = [(column, line) for line in range(top, bottom + 1) for column in (left, right)]
    return [whole.getpixel(point) for point in across + down]  # type: ignore[misc]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts that are drawn."""
    texts: list[str] = []
    original = ImageDraw.ImageDraw.text

    def noted(self: ImageDraw.ImageDraw, place: Any, text: str, *rest: Any, **options: Any) -> None:
        texts.append(text)
        original(self, place, text, *rest, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noted)
    return texts


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 20), (1, 5, 112), (3, 56, 57)])
def test_a_small_image_is_blown_up_by_a_whole_factor(shape: tuple[int, int, int]) -> None:
    image = a_scene(shape).images[torch.tensor([0])][0]
    assert np.array_equal(np.asarray(thumbnail(image).convert("RGB")), blown_up(image))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 224, 224), (112, 112)),
        ((3, 256, 128), (56, 112)),
        ((1, 113, 2), (2, 112)),
        ((1, 1, 500), (112, 1)),
    ],
)
def test_a_large_image_is_reduced(shape: tuple[int, int, int], size: tuple[int, int]) -> None:
    assert thumbnail(torch.full(shape, 0.2)).size == size
    assert set(np.asarray(thumbnail(torch.full(shape, 0.2))).flatten()) == {51}


def test_a_reduced_change_is_as_large_as_it_was() -> None:
    """Means of neighbours would hide noise: signs of ε would be grey."""
    signs = torch.rand(1, 224, 224, generator=torch.Generator().manual_seed(0)).round()
    assert set(np.asarray(thumbnail(signs, smooth=False)).flatten()) == {0, 255}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "apart"), [("GTM", False), ("ES", True), ("SP-QA+(m=2,keep=3)", False), ("misrank", True)]
)
def test_a_row_shows_the_images_as_they_are(name: str, apart: bool) -> None:
    view = a_scene((3, 8, 8), apart=apart)
    gallery = view.images if view.ranked is None else view.ranked
    shots = shots_of(view, name, [1, 4])
    whole = drawn(shots, view, attack(name).columns)
    change = max(float((shot.perturbed - shot.image).abs().max()) for shot in shots)
    factor = 1 if change == 0 else max(f for f in (1, 2, 5, 10, 20) if f * change < 0.501)
    assert factor in (1, 5, 10)  # of nothing, as it is at the goal, of 0.1, and of one step
    below = 0
    for shot in shots:
        wanted = [shot.image, shot.perturbed, (0.5 + factor * (shot.perturbed - shot.image)).clamp(0, 1)]
        wanted += [gallery[torch.tensor([k])][0] for k in shot.targets[:3]]
        wanted += [gallery[torch.tensor([one.position])][0] for one in (*shot.before, *shot.after)]
        x = 0
        rows = set()
        for image in wanted:
            x, y = min(
                place for place in places_of(whole, blown_up(image)) if place[0] > x and place[1] > below
            )
            rows.add(y)
        assert len(rows) == 1, "all in one row, in this order"
        below = rows.pop()


def test_right_and_wrong_differ_in_colour_frame_and_mark() -> None:
    view = a_scene((3, 8, 8))
    whole = drawn([a_shot(view)], view)
    marks: dict[bool, list[NDArray[np.bool_]]] = {True: [], False: []}
    for position, right in ((1, False), (3, True)):
        places = places_of(whole, blown_up(view.images[torch.tensor([position])][0]))
        assert len(places) == 2, "before and after"
        colour = rgb(GREEN if right else RED)
        for place in places:
            for away in (1, 2, 3):
                line = frame(whole, place, (112, 112), away)
                assert set(line) == ({colour} if right else {colour, WHITE})
                assert 0.4 < line.count(colour) / len(line) <= 1
            assert set(frame(whole, place, (112, 112), 5)) == {WHITE}
            (x, y) = place
            mark = np.asarray(whole.crop((x, y + 116, x + 14, y + 136))) == colour
            marks[right].append(mark.all(2))
            assert 15 < marks[right][-1].sum() < 120
    for right in (True, False):
        assert np.array_equal(marks[right][0], marks[right][1])
    # A cross reaches all four corners, a tick does not reach the upper left one.
    tick, cross = (mark[mark.any(1).nonzero()[0][0] :][:12] for mark in (marks[True][0], marks[False][0]))
    corners = [
        (slice(None, 5), slice(None, 5)),
        (slice(None, 5), slice(-5, None)),
        (slice(-5, None), slice(-5, None)),
    ]
    assert [bool(cross[corner].any()) for corner in corners] == [True, True, True]
    assert [bool(tick[corner].any()) for corner in corners] == [False, True, False]


@pytest.mark.parametrize(
    "name", ["CA+(w=3)", "CA-", "misrank(side='candidate')", "promote(side='candidate')"]
)
def test_a_candidate_stands_in_the_list_of_its_asker(name: str, written: list[str]) -> None:
    view = a_scene((3, 8, 8))
    (shot,) = shots_of(view, name, [5], k=4)
    whole = drawn([shot], view, attack(name).columns)
    assert sum(one.itself for one in shot.before) == sum(one.itself for one in shot.after) == 1
    assert written.count("this image") == 2
    assert f"place {shot.place[0]}" in written
    assert written.count("asks") == 1
    asks = "the target" if len(shot.targets) == 1 else "the first target"
    assert {f"nearest to {asks} before", f"nearest to {asks} after"} <= set(written)
    for image in (shot.image, shot.perturbed):
        place, listed = sorted(places_of(whole, blown_up(image)))
        assert set(frame(whole, listed, (112, 112), 6)) == {rgb(BLUE)}
        assert rgb(BLUE) not in frame(whole, place, (112, 112), 6)
    assert shot.asker is not None
    asker = min(places_of(whole, blown_up(view.images[torch.tensor([shot.asker])][0])))
    assert set(frame(whole, asker, (112, 112), 6)) == {rgb(BLUE)}


def test_a_target_that_is_found_is_marked(written: list[str]) -> None:
    view = a_scene((3, 8, 8))
    whole = drawn([a_shot(view, targets=(3, 7, 8, 9, 10))], view)
    assert written.count("target") == 2
    assert written.count("and 2 more") == 1
    first, *listed = sorted(places_of(whole, blown_up(view.images[torch.tensor([3])][0])))
    assert rgb(BLUE) not in frame(whole, first, (112, 112), 6)
    assert len(listed) == 2
    assert all(set(frame(whole, place, (112, 112), 6)) == {rgb(BLUE)} for place in listed)
    assert not places_of(whole, blown_up(view.images[torch.tensor([9])][0])), "the fourth"


def test_texts_say_what_was_done(written: list[str]) -> None:
    view = a_scene((3, 8, 8))
    columns = [Column("GTM", "higher"), Column("deep", None, unit=attack("TMA").columns[0].unit)]
    shot = a_shot(view, 4, targets=(2,), place=(None, 7))
    shot.values.update({"deep": (float("nan"), 0.25)})  # type: ignore[attr-defined]
    files = [f"dir/{k}.png" for k in range(12)]
    drawn([shot], view, columns, classes=("ant", "bee", "cow"), files=files)
    told = "place of the first right image  - → 7"
    assert f"GTM ↑  100.0 → 0.0      deep  - → 0.250      {told}" in written
    heads = ["image", "perturbed", "change × 1", "target"]
    heads += [f"nearest to the image {when}" for when in ("before", "after")]
    places = [written.index(head) for head in heads]
    assert places == sorted(places)
    assert written[0] == "a title"
    assert {"image 4", "bee", "dir/4.png", "cow", "dir/2.png", "at most 0.0/255"} <= set(written)
    lists = written[written.index("0.250") :]
    first, second = ["0.250", "bee", "dir/1.png", ""], ["0.500", "ant", "dir/3.png", ""]
    assert lists == [*first, *second, *second, *first], "below each: distance, class, file"


def test_images_without_files_are_numbered(written: list[str]) -> None:
    view = a_scene((3, 8, 8), apart=True)
    drawn([a_shot(view)], view)
    assert {"gallery image 1", "gallery image 3", "image 0"} <= set(written)


def test_many_values_take_more_lines(written: list[str]) -> None:
    view = a_scene((3, 8, 8))
    names = [f"a column with a long name, number {k}" for k in range(8)]
    shot = a_shot(view)
    shot.values.update(dict.fromkeys(names, (1.0, 2.0)))  # type: ignore[attr-defined]
    whole = drawn([shot], view, [Column(name, None) for name in names])
    assert whole.height > drawn([a_shot(view)], view).height
    lines = [text for text in written if "number" in text]
    assert len(lines) > 1
    assert all(sum(f"{name}  1.0 → 2.0" in line for line in lines) == 1 for name in names)


@pytest.mark.parametrize(
    ("changes", "factor"), [((0.1, 0.02), 5), ((0.02, 0.01), 20), ((0.0, 0.0), 1), ((0.25, 0.1), 2)]
)
def test_one_factor_for_all_rows(changes: tuple[float, float], factor: int, written: list[str]) -> None:
    view = a_scene((3, 8, 8))
    whole = drawn([a_shot(view, number, change) for number, change in enumerate(changes)], view)
    assert f"change × {factor}" in written
    for number, change in enumerate(changes):
        shot = a_shot(view, number, change)
        (x, y), *_ = places_of(whole, blown_up(shot.image))
        (right, _), *_ = (place for place in places_of(whole, blown_up(shot.perturbed)) if place[1] == y)
        step = right - x or sheet._PITCH
        found = np.asarray(whole.crop((x + 2 * step, y, x + 2 * step + 112, y + 112))).astype(float)
        # A level is rounded by 0.5 at most; that of float32 before may bring it to the other side.
        assert np.abs(found - min(255, 127.5 + 255 * factor * change)).max() <= 0.51


@pytest.mark.slow
@pytest.mark.parametrize("count", [32, 40])
def test_32_rows_at_most_and_what_is_left_out_is_said(count: int, written: list[str]) -> None:
    view = a_scene((3, 224, 224))
    whole = drawn([a_shot(view, k % 12, 0.1, targets=(1, 2, 3, 4)) for k in range(count)], view)
    assert whole.width <= 2200
    assert whole.height <= 32 * 240 + 140
    assert sum(text.startswith("at most") for text in written) == min(count, 32)
    told = [text for text in written if "left out" in text]
    assert told == ([f"{count - 32} more queries are left out here"] if count > 32 else [])


HOSTILE = (
    "", "\x1b[2J\n\ttwo lines\r\n", "漢字かな交じり文" * 20, "🦊" * 200, "e\u0301\u0316\u0317" * 100,
    "עברית.png", "\u202eabc", "\udcff\ud800", "\uffff\U0010ffff", "a" * 10**6, "ﷺ" * 99, "\u200d" * 99,
)  # fmt: skip


@pytest.fixture(params=["matplotlib", "pillow", "bitmap"])
def font(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Fonts of matplotlib, of Pillow where those are missing, and of Pillow without FreeType."""
    if request.param == "pillow":
        monkeypatch.setattr(mpl, "get_data_path", lambda: str(tmp_path))
    if request.param == "bitmap":
        monkeypatch.setattr(ImageFont, "core", DeferredError(ImportError("no FreeType")))
    sheet._font.cache_clear()
    yield str(request.param)
    sheet._font.cache_clear()


@pytest.mark.slow
def test_any_name_is_drawn_in_its_place(font: str) -> None:
    view = a_scene((3, 8, 8))
    shots = [a_shot(view, number, 0.01, targets=((2 * number) % 12,)) for number in range(12)]
    usual = drawn(shots, view, classes=("a", "b", "c"), files=["a"] * 12)
    whole = draw_sheet(
        shots,
        album(view, HOSTILE, (HOSTILE[1], HOSTILE[2], HOSTILE[9])),
        [Column("GTM", "higher")],
        title=" ".join(HOSTILE[1:9]) + HOSTILE[9],
    )
    assert whole.width == usual.width
    for image in (shots[0].image, shots[11].image, view.images[torch.tensor([1])][0]):
        there = [places_of(each, blown_up(image)) for each in (usual, whole)]
        assert len(there[0]) > 0
        assert [x for x, _ in there[0]] == [x for x, _ in there[1]]
        lower = {other - y for (_, y), (_, other) in zip(*there, strict=True)}
        assert len(lower) == 1, "by the lines of the title"


def test_the_same_shots_give_the_same_pixels() -> None:
    view = a_scene((3, 8, 8))
    first, second = (drawn(shots_of(view, "GTM", [0, 3]), view).tobytes() for _ in range(2))
    assert first == second


def test_images_of_other_channels_are_grey() -> None:
    image = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(np.asarray(rendered(image)), np.asarray(rendered(image.mean(0, keepdim=True))))
