"""Batches of pairs: a partition of the data set, whatever the workers, the seed and the moment."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from robustmetric.data.pairs import PairLoader, draw_pairs, epoch_order


@given(
    labels=st.lists(st.integers(0, 5), min_size=16, max_size=120),
    pairs=st.integers(4, 20),
    world=st.integers(1, 4),
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 50),
)
@settings(deadline=None, max_examples=200)
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


def test_partners_are_uniform_among_the_others_of_the_class() -> None:
    labels = np.array([1, 0, 1, 1, 2, 1, 0])
    generator = np.random.default_rng(3)
    counts = Counter(
        (int(a), int(p)) for _ in range(3000) for a, p in draw_pairs(labels, generator) if labels[a] == 1
    )
    ones = [0, 2, 3, 5]
    assert set(counts) == {(a, p) for a in ones for p in ones if a != p}
    assert chisquare(list(counts.values())).pvalue > 1e-4


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


def test_goes_on_from_where_it_is_told() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 1), dtype=np.uint8)
    labels = torch.arange(8).repeat(5)
    whole = PairLoader(pixels, labels, pairs=8, seed=1, crop=4, flip=True)
    first, second = list(whole), list(whole)
    assert len(first) == len(second) == len(whole) == 5
    assert not torch.equal(first[0].images, second[0].images)
    later = PairLoader(pixels, labels, pairs=8, seed=1, crop=4, flip=True, progress=lambda: (1, 3))
    rest = list(later)
    assert len(rest) == 2
    for mine, other in zip(rest, second[3:], strict=True):
        assert torch.equal(mine.images, other.images)
        assert torch.equal(mine.labels, other.labels)


def test_wrong_settings_are_refused() -> None:
    pixels, labels = np.zeros((8, 6, 6, 1), np.uint8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="a batch needs at least 4 pairs, not 3"):
        PairLoader(pixels, labels, pairs=3, seed=0)
    with pytest.raises(ValueError, match="a crop of 7 does not fit images of 6×6"):
        PairLoader(pixels, labels, pairs=4, seed=0, crop=7)
