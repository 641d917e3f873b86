"""An image set keeps what is known of each image with it, and refuses what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robustmetric.data.base import ImageSet, merged


def image_set(count: int, classes: str = "ab", **known: Any) -> ImageSet:
    files = tuple(Path(f"{classes}{row}.png") for row in range(count))
    return ImageSet("mine", "test", torch.arange(count) % len(classes), tuple(classes), files, **known)


def all_known(count: int, classes: str = "ab") -> ImageSet:
    return image_set(
        count,
        classes,
        boxes=np.arange(4 * count).reshape(count, 4),
        cameras=torch.arange(count) + 5,
        is_query=torch.arange(count) % 3 == 0,
        is_gallery=torch.arange(count) % 3 > 0,
        columns={"shop": tuple(f"shop {row}" for row in range(count))},
    )


def known(images: ImageSet, row: int) -> tuple[object, ...]:
    values = (images.cameras, images.is_query, images.is_gallery)
    return (
        images.classes[images.labels[row]],
        images.files and images.files[row],
        images.box(row),
        *(value if value is None else value[row].item() for value in values),
        {name: texts[row] for name, texts in images.columns.items()},
    )


@pytest.mark.parametrize("rows", [[4, 0, 0, 2], [], torch.tensor([1])])
def test_rows_are_taken_with_all_that_is_known(rows: Any) -> None:
    images = all_known(6)
    some = images.take(rows)
    assert [known(some, row) for row in range(len(some))] == [known(images, int(row)) for row in rows]
    assert (some.name, some.split, some.classes) == (images.name, images.split, images.classes)


def test_rows_of_pixels_are_taken() -> None:
    pixels = np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2, 1)
    images = ImageSet("mine", "test", torch.tensor([0, 0, 1]), ("a", "b"), pixels=pixels)
    some = images.take([2, 1])
    assert some.pixels is not None
    assert np.array_equal(some.pixels, pixels[[2, 1]])
    assert some.labels.tolist() == [1, 0]
    assert (some.files, some.boxes, some.cameras, some.columns) == (None, None, None, {})


def test_merging_keeps_what_is_known_and_fills_what_is_not() -> None:
    first, second = replace(image_set(2, "cb"), split="train"), all_known(4, "ab")
    both = merged([first, second])
    assert (both.split, both.classes) == ("all", ("a", "b", "c"))
    for row in range(2):
        label, file, *_ = known(first, row)
        assert known(both, row) == (label, file, None, None, True, True, {"shop": ""})
    for row in range(4):
        # A camera counts only where that of every image is known.
        expected = [*known(second, row)]
        expected[3] = None
        assert known(both, row + 2) == tuple(expected)
    assert [known(merged([second, second]), row)[3] for row in range(8)] == [5, 6, 7, 8] * 2


def test_merging_makes_up_nothing() -> None:
    both = merged([image_set(2), image_set(0)])
    assert (both.boxes, both.cameras, both.is_query, both.is_gallery, both.columns) == (None,) * 4 + ({},)
    assert len(both) == 2


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"boxes": np.zeros((2, 4), np.int64)}, r"boxes are \(2, 4\); expected \(3, 4\), one for each image"),
        ({"cameras": torch.zeros(2)}, r"cameras of mine \(test\) has 2 values for 3 images; each needs one"),
        ({"is_gallery": torch.zeros(0)}, "is_gallery of .* has 0 values"),
        ({"columns": {"shop": ("A",)}}, "shop of .* has 1 values"),
    ],
)
def test_what_does_not_fit_the_images_is_refused(known: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_set(3, **known)


def test_boxes_of_pixels_are_refused() -> None:
    pixels = np.zeros((1, 8, 8, 1), np.uint8)
    with pytest.raises(ValueError, match="boxes cut parts out of files; cut pixels that are in memory"):
        ImageSet("mine", "test", torch.tensor([0]), ("a",), pixels=pixels, boxes=np.array([[0, 0, 4, 4]]))
