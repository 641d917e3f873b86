"""Who asks and who is ranked: images parted by their marks, and two sets put together by names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from robustmetric.data.cache import Pixels
from robustmetric.data.sides import Side, by_marks, of_two


def images(count: int, first: int = 0, **more: Any) -> Pixels:
    """Images that are told apart by their grey level, `first` and up, in two classes by turns."""
    pixels = np.zeros((count, 4, 4, 1), np.uint8)
    pixels += np.arange(first, first + count, dtype=np.uint8)[:, None, None, None]
    known: dict[str, Any] = {"labels": torch.arange(count) % 2, "classes": ("cat", "dog"), **more}
    return Pixels(pixels, **known)


def levels(side: Side) -> list[int]:
    shown = side.images[torch.arange(len(side.images))]
    assert shown.shape[1] == 1
    return [round(255 * float(image.mean())) for image in shown]


def marks(*flags: int) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.bool)


def test_without_marks_each_image_asks_and_is_ranked() -> None:
    every = marks(1, 1, 1, 1)
    cases: list[dict[str, Any]] = [{}, {"is_query": every}, {"is_query": every, "is_gallery": every}]
    for more in cases:
        sides = by_marks(images(4, cameras=torch.tensor([5, 5, 6, 7]), **more), files=["a", "b", "c", "d"])
        assert (sides.gallery, sides.own) == (None, None)
        assert levels(sides.queries) == [0, 1, 2, 3]
        assert sides.queries.labels.tolist() == [0, 1, 0, 1]
        assert sides.queries.cameras is not None
        assert sides.queries.cameras.tolist() == [5, 5, 6, 7]
        assert sides.queries.files == ["a", "b", "c", "d"]
        assert sides.classes == ("cat", "dog")


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=20))
@settings(max_examples=50)
def test_marks_part_the_images_as_a_loop_does(given_: list[tuple[bool, bool]]) -> None:
    asks, ranked = [ask for ask, _ in given_], [rank for _, rank in given_]
    count = len(given_)
    parted = images(
        count, is_query=marks(*asks), is_gallery=marks(*ranked), cameras=torch.arange(count) + 100
    )
    if not any(asks) or not any(ranked):
        with pytest.raises(
            ValueError, match=f"of {count} images {sum(asks)} are queries and {sum(ranked)} are"
        ):
            by_marks(parted)
        return
    sides = by_marks(parted, files=[f"{k}.png" for k in range(count)])
    if all(asks) and all(ranked):
        assert sides.gallery is None
        return
    assert sides.gallery is not None
    assert sides.own is not None
    for side, some in ((sides.queries, asks), (sides.gallery, ranked)):
        rows = [k for k in range(count) if some[k]]
        assert levels(side) == rows
        assert side.labels.tolist() == [k % 2 for k in rows]
        assert side.cameras is not None
        assert side.cameras.tolist() == [k + 100 for k in rows]
        assert side.files == [f"{k}.png" for k in rows]
    order = levels(sides.gallery)
    wanted = [order.index(k) if ranked[k] else -1 for k in levels(sides.queries)]
    assert sides.own.tolist() == wanted


def test_one_mark_alone_leaves_the_other_to_all() -> None:
    sides = by_marks(images(4, is_query=marks(0, 1, 0, 1)))
    assert sides.gallery is not None
    assert (levels(sides.queries), levels(sides.gallery)) == ([1, 3], [0, 1, 2, 3])
    assert sides.own is not None
    assert sides.own.tolist() == [1, 3]
    sides = by_marks(images(4, is_gallery=marks(0, 1, 0, 1)))
    assert sides.gallery is not None
    assert (levels(sides.queries), levels(sides.gallery)) == ([0, 1, 2, 3], [1, 3])
    assert sides.own is not None
    assert sides.own.tolist() == [-1, 0, -1, 1]
    assert (sides.queries.cameras, sides.queries.files, sides.gallery.files) == (None, None, None)


def test_both_sides_are_cropped() -> None:
    parted = by_marks(images(4, is_query=marks(1, 0, 0, 0)), 2)
    two = of_two(images(2), images(3), 2)
    for sides in (parted, two):
        assert sides.gallery is not None
        for side in (sides.queries, sides.gallery):
            assert side.images[torch.arange(1)].shape == (1, 1, 2, 2)


def test_marks_that_leave_a_side_empty_are_refused() -> None:
    says = (
        r"of 2 images 2 are queries and 0 are in the gallery; mark some as each \(is_query, is_gallery\), or "
        "leave the marks out"
    )
    with pytest.raises(ValueError, match=says):
        by_marks(images(2, is_gallery=marks(0, 0)))


def test_classes_of_two_sets_are_the_same_if_their_names_are() -> None:
    first = images(3, labels=torch.tensor([1, 0, 1]), classes=("dog", "emu"))
    second = images(4, 50, labels=torch.tensor([2, 0, 1, 2]), classes=("cat", "dog", "owl"))
    sides = of_two(first, second, files=["a", "b", "c"], gallery_files=["d", "e", "f", "g"])
    assert sides.gallery is not None
    assert sides.classes == ("cat", "dog", "emu", "owl")
    assert [sides.classes[k] for k in sides.queries.labels.tolist()] == ["emu", "dog", "emu"]
    assert [sides.classes[k] for k in sides.gallery.labels.tolist()] == ["owl", "cat", "dog", "owl"]
    assert (levels(sides.queries), levels(sides.gallery)) == ([0, 1, 2], [50, 51, 52, 53])
    assert (sides.queries.files, sides.gallery.files) == (["a", "b", "c"], ["d", "e", "f", "g"])
    assert sides.own is None
    assert (sides.queries.cameras, sides.gallery.cameras) == (None, None)


def test_cameras_of_two_tables_are_the_same_if_their_names_are() -> None:
    # Each table numbers its own cameras from 0: "door" is 0 in one and 1 in the other.
    first = images(2, cameras=torch.tensor([0, 1]), columns={"camera": ("door", "hall")})
    second = images(3, cameras=torch.tensor([1, 0, 2]), columns={"camera": ("door", "attic", "hall")})
    sides = of_two(first, second)
    assert sides.gallery is not None
    assert sides.queries.cameras is not None
    assert sides.gallery.cameras is not None
    door, hall = sides.queries.cameras.tolist()
    assert door != hall
    assert sides.gallery.cameras[[0, 2]].tolist() == [door, hall]
    assert int(sides.gallery.cameras[1]) not in (door, hall)


def test_cameras_with_numbers_of_their_own_keep_them() -> None:
    first, second = (images(2, cameras=torch.tensor(numbers)) for numbers in ([3, 1], [1, 6]))
    sides = of_two(first, second)
    assert sides.gallery is not None
    assert sides.queries.cameras is not None
    assert sides.gallery.cameras is not None
    assert (sides.queries.cameras.tolist(), sides.gallery.cameras.tolist()) == ([3, 1], [1, 6])


@pytest.mark.parametrize(("known", "unknown"), [("queries", "gallery"), ("gallery", "queries")])
def test_cameras_of_one_side_alone_are_refused(known: str, unknown: str) -> None:
    pair: dict[str, Any] = {known: images(2, cameras=torch.tensor([0, 1])), unknown: images(2)}
    says = f"the cameras of the {known} are known and those of the {unknown} are not: give both, or neither"
    with pytest.raises(ValueError, match=says):
        of_two(**pair)


def test_nothing_of_the_images_is_changed() -> None:
    given_ = images(
        3, cameras=torch.tensor([1, 0, 1]), columns={"camera": ("b", "a", "b")}, files=(Path("x"),) * 3
    )
    kept = (np.array(given_.pixels), given_.labels.clone(), torch.tensor([1, 0, 1]))
    by_marks(given_)
    of_two(given_, given_)
    assert np.array_equal(given_.pixels, kept[0])
    assert torch.equal(given_.labels, kept[1])
    assert given_.cameras is not None
    assert torch.equal(given_.cameras, kept[2])
