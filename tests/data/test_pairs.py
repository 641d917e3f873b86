"""Batches of pairs: a partition of the data set, whatever the workers, the seed and the moment."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from robustmetric.data.pairs import (
    ImageArray,
    ImageLoader,
    PairLoader,
    draw_boxes,
    draw_pairs,
    epoch_order,
    jittered,
    zoomed,
)


@given(
    labels=st.lists(st.integers(0, 5), min_size=16, max_size=120),
    pairs=st.integers(4, 20),
    world=st.integers(1, 4),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 50),
)
@settings(max_examples=200)
def test_every_image_is_an_anchor_once_over_all_workers(
    labels: list[int], pairs: int, world: int, seed: int, epoch: int
) -> None:
    array = np.array(labels)
    steps = -(-len(labels) // (world * pairs))
    if len(labels) < 2 * steps * world:
        with pytest.raises(ValueError, match=f"{len(labels)} images are too few for {world} workers"):
            epoch_order(array, pairs=pairs, seed=seed, epoch=epoch, world=world)
        return
    orders = [
        epoch_order(array, pairs=pairs, seed=seed, epoch=epoch, rank=rank, world=world)
        for rank in range(world)
    ]
    anchors = [int(i) for order in orders for step in order.steps for i in order.pairs[step, 0]]
    assert sorted(anchors) == list(range(len(labels)))
    assert {len(order.steps) for order in orders} == {steps}
    sizes = {len(step) for order in orders for step in order.steps}
    assert max(sizes) <= pairs
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    for order in orders:
        assert np.array_equal(order.pairs, orders[0].pairs)
        for anchor, partner in order.pairs.tolist():
            assert labels[anchor] == labels[partner]
            assert (anchor == partner) == (labels.count(labels[anchor]) == 1)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    labels = np.repeat(np.arange(8), 10)

    def anchors(seed: int, epoch: int, pairs: int = 8) -> list[int]:
        order = epoch_order(labels, pairs=pairs, seed=seed, epoch=epoch)
        return [int(i) for step in order.steps for i in order.pairs[step, 0]]

    assert anchors(0, 0) == anchors(0, 0) == anchors(0, 0, pairs=16)
    assert anchors(0, 0) != anchors(0, 1)
    assert anchors(0, 1) != anchors(1, 0)


@pytest.mark.parametrize("itself", [False, True])
def test_partners_are_uniform_in_the_class_with_the_image_itself_by_the_reference_alone(itself: bool) -> None:
    labels = np.array([1, 0, 1, 1, 2, 1, 0])
    generator = np.random.default_rng(3)
    counts: Counter[tuple[int, int]] = Counter()
    for _ in range(3000):
        drawn = draw_pairs(labels, generator, itself=itself)
        assert sorted(drawn[:, 0]) == list(range(len(labels)))
        counts.update((int(a), int(p)) for a, p in drawn)
    # By a plain loop; image 4 is alone in its class.
    same = [(a, p) for a in range(7) for p in range(7) if labels[a] == labels[p]]
    allowed = [(a, p) for a, p in same if itself or a != p or a == 4]
    assert set(counts) == set(allowed)
    for size in (2, 4):
        among = [counts[a, p] for a, p in allowed if list(labels).count(labels[a]) == size]
        assert chisquare(among).pvalue > 1e-4


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_is_of_one_class_alone(seed: int) -> None:
    labels = np.repeat([0, 1], [36, 28])
    order = epoch_order(labels, pairs=4, seed=seed, epoch=0)
    for step in order.steps:
        assert len(set(labels[order.pairs[step, 0]])) == 2


def test_crops_and_flips_are_drawn_for_each_image() -> None:
    # Each pixel says where it comes from: row, column and image.
    n, size, crop = 40, 12, 7
    grid = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), axis=-1)
    pixels = np.zeros((n, size, size, 3), np.uint8)
    pixels[..., :2] = grid
    pixels[..., 2] = np.arange(n)[:, None, None]
    labels = torch.arange(8).repeat(5)
    loader = PairLoader(pixels, labels, pairs=8, seed=5, crop=crop, flip=True)
    corners, mirrored, seen = set(), [], []
    for images, classes in loader:
        assert images.shape[1:] == (3, crop, crop)
        whole = (images * 255).round().long()
        for image, label in zip(whole, classes, strict=True):
            index = int(image[2, 0, 0])
            seen.append(index)
            assert label == labels[index]
            rows, columns = image[0, :, 0], image[1, 0]
            flipped = bool(columns[0] > columns[-1])
            columns = columns.flip(0) if flipped else columns
            assert torch.equal(rows, torch.arange(crop) + rows[0])
            assert torch.equal(columns, torch.arange(crop) + columns[0])
            corners.add((int(rows[0]), int(columns[0])))
            mirrored.append(flipped)
    assert Counter(seen[::2]) == Counter(range(n))
    assert {row for row, _ in corners} == {column for _, column in corners} == set(range(size - crop + 1))
    assert 0.3 < np.mean(mirrored) < 0.7


# Zoom and jitter


def photos(count: int = 40, size: int = 12, channels: int = 3) -> tuple[np.ndarray, torch.Tensor]:
    shape = (count, size, size, channels)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8), torch.arange(8).repeat(5)


def shown(*epochs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.cat([images for epoch in epochs for images, _ in epoch])


def test_without_zoom_and_jitter_batches_are_as_they_ever_were() -> None:
    loader = PairLoader(*photos(), pairs=8, seed=5, crop=7, flip=True)
    whole = hashlib.sha256()
    for images, labels in [*loader, *loader]:
        whole.update(images.numpy().tobytes() + labels.numpy().tobytes())
    # Made before there were zoom and jitter.
    assert whole.hexdigest() == "ae7d6db07a6c3abb48614c97d101fd81f2bbbc9d96a75d99c39ba2f55cb99213"


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_is_that_of_a_plain_loop(channels: int) -> None:
    image = photos(channels=channels)[0][0]
    brightness, contrast, saturation = factors = np.array([1.3, 0.6, 1.7])
    weights = [0.299, 0.587, 0.114] if channels == 3 else [1.0]

    def grey(pixel: list[float]) -> float:
        return sum(w * v for w, v in zip(weights, pixel, strict=True))

    light = [[[v * brightness for v in pixel] for pixel in row] for row in image.astype(float).tolist()]
    mean = sum(grey(pixel) for row in light for pixel in row) / 144
    found = jittered(image, factors)
    assert found.dtype == np.uint8
    for y in range(12):
        for x in range(12):
            pixel = [mean + contrast * (v - mean) for v in light[y][x]]
            for c, value in enumerate(pixel):
                wanted = min(255, max(0, grey(pixel) + saturation * (value - grey(pixel))))
                assert abs(float(found[y, x, c]) - wanted) < 0.501
    assert np.array_equal(jittered(image, np.ones(3)), image)


def test_zoom_is_that_of_a_plain_loop() -> None:
    """A bilinear filter as wide as what becomes one pixel; what is beside the box counts at its edges."""
    image, box = photos()[0][0], np.array([2, 1, 11, 8])
    found = zoomed(image, box, (5, 5))

    def weights(begin: int, end: int, place: int) -> list[float]:
        scale = (end - begin) / 5
        center, support = begin + (place + 0.5) * scale, max(scale, 1)
        near = [max(0.0, 1 - abs(k + 0.5 - center) / support) for k in range(12)]
        return [one / sum(near) for one in near]

    for y in range(5):
        for x in range(5):
            down, right = weights(1, 8, y), weights(2, 11, x)
            wanted = sum(down[i] * right[k] * image[i, k].astype(float) for i in range(12) for k in range(12))
            assert np.abs(found[y, x] - wanted).max() <= 1.01  # rounded after each direction


@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    zoom=st.floats(0.001, 1),
    seed=st.integers(0, 1000),
)
def test_zoomed_parts_have_the_area_and_aspect_asked_for(
    size: tuple[int, int], zoom: float, seed: int
) -> None:
    left, top, right, bottom = draw_boxes((200,), size, zoom, np.random.default_rng(seed)).T
    height, width = bottom - top, right - left
    assert min(left.min(), top.min()) >= 0
    assert min(height.min(), width.min()) >= 1
    assert bottom.max() <= size[0]
    assert right.max() <= size[1]
    # Up to half a pixel of each side, and one at the least.
    assert ((height + 0.5) * (width + 0.5) >= zoom * size[0] * size[1] * (1 - 1e-9)).all()
    low, high = (height - 0.5) * size[1], (height + 0.5) * size[1]
    big = (height > 1) & (width > 1)
    assert (low / ((width + 0.5) * size[0]) <= 4 / 3 + 1e-9)[big].all()
    assert (high / ((width - 0.5) * size[0]) >= 3 / 4 - 1e-9)[big].all()


@pytest.mark.parametrize("crop", [7, None])
def test_zoom_and_jitter_depend_on_seed_epoch_and_slot_alone(crop: int | None) -> None:
    def loader(pairs: int = 8, seed: int = 1, **more: Any) -> PairLoader:
        return PairLoader(*photos(), pairs=pairs, seed=seed, crop=crop, zoom=0.3, jitter=0.5, **more)

    first, second = shown(loader()), shown(loader(progress=lambda: (1, 0)))
    assert first.shape == (80, 3, crop or 12, crop or 12)
    assert torch.equal(first, shown(loader(pairs=20)))
    assert torch.equal(second[48:], shown(loader(progress=lambda: (1, 3))))
    workers = [list(loader(pairs=4, rank=rank, world=2)) for rank in (0, 1)]
    assert torch.equal(shown(*([batch] for step in zip(*workers, strict=True) for batch in step)), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, shown(loader(seed=2)))
    levels = first * 255
    assert 0 <= float(levels.min()) <= float(levels.max()) <= 255
    assert torch.allclose(levels, levels.round(), atol=1e-4)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"pairs": 3}, "pairs must be a whole number of at least 4, not 3"),
        ({"crop": 13}, "a crop of 13 does not fit images of 12×12"),
        ({"zoom": 0.0}, r"zoom must be in \(0, 1\], not 0.0"),
        ({"jitter": -0.1}, r"jitter must be in \[0, 1\], not -0.1"),
    ],
)
def test_wrong_settings_are_refused(entries: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PairLoader(*photos(), **{"pairs": 8, "seed": 0, **entries})


# In their order


@pytest.mark.parametrize(
    ("shape", "crop"), [((7, 9, 8, 3), 5), ((7, 6, 6, 1), 6), ((7, 6, 6, 1), None), ((7, 7, 12, 3), None)]
)
def test_an_image_array_is_the_middle_in_floats(shape: tuple[int, ...], crop: int | None) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    images = ImageArray(pixels, crop)
    height, width = crop or shape[1], crop or shape[2]
    top, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    assert len(images) == 7
    found = images[torch.arange(7)]
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert found.shape == (7, shape[3], height, width)
    for i in range(7):
        for c in range(shape[3]):
            for y in range(height):
                for x in range(width):
                    wanted = np.float32(pixels[i, top + y, left + x, c]) / np.float32(255)
                    assert found[i, c, y, x].item() == wanted


def test_loaders_read_the_rows_that_they_are_given_alone(tmp_path: Path) -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (60, 6, 6, 1), dtype=np.uint8)
    labels = torch.arange(60) % 6
    rows = np.flatnonzero(np.random.default_rng(5).random(60) < 0.7)
    np.save(tmp_path / "pixels.npy", pixels)
    mapped = np.load(tmp_path / "pixels.npy", mmap_mode="r")
    settings = {"pairs": 8, "seed": 2, "crop": 4, "flip": True}
    # As if the others were not there at all.
    expected = list(PairLoader(pixels[rows], labels[rows], **settings))  # type: ignore[arg-type]
    loader = PairLoader(mapped, labels, rows=rows, **settings)  # type: ignore[arg-type]
    found = list(loader)
    assert len(found) == len(expected) == len(loader)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])
    scored = ImageLoader(mapped, labels, batch=16, rows=rows, crop=4)
    batches = list(scored)
    assert len(batches) == len(scored)
    assert torch.equal(torch.cat([images for images, _ in batches]), ImageArray(pixels[rows], 4)[:])
    assert torch.equal(torch.cat([labels for _, labels in batches]), labels[rows])
