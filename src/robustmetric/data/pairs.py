"""Batches of pairs: every image is an anchor once an epoch, beside another image of its class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robustmetric.data.stored import Pictures
from robustmetric.labels import check_labels
from robustmetric.validate import UserError

_PART = 1 << 20  # bytes of images that are read at a time


class Batch(NamedTuple):
    """Images (2B, C, H, W) in [0, 1] as pairs [a0, p0, a1, p1, …], and their labels (2B,)."""

    images: Tensor
    labels: Tensor


class Order(NamedTuple):
    """An epoch of one worker: the slots (B,) that each step takes of the whole epoch's pairs (N, 2)."""

    steps: list[NDArray[np.int64]]
    pairs: NDArray[np.int64]


def random(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """Return a generator that depends on these numbers alone.

    >>> bool(random(0, 1, 0).integers(100) == random(0, 1, 0).integers(100))
    True
    """
    return np.random.default_rng(np.random.SeedSequence([seed, epoch, purpose]))


def draw_pairs(
    labels: NDArray[np.int64], generator: np.random.Generator, *, itself: bool = False
) -> NDArray[np.int64]:
    """Draw a partner for each image, another of its class, and shuffle: (N, 2) positions.

    The only image of its class is its own partner; with `itself`, any image may be.

    >>> draw_pairs(np.array([0, 1, 0]), np.random.default_rng(0)).tolist()
    [[2, 0], [0, 2], [1, 1]]
    """
    by_class = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[by_class], labels)
    size = np.bincount(labels)[labels]
    place = np.empty_like(by_class)
    place[by_class] = np.arange(len(labels))
    # One of the class, or of its size − 1 others, counted on from the image itself.
    least = 0 if itself else 1
    hop = least + (generator.random(len(labels)) * (size - least)).astype(np.int64)
    partner = by_class[first + (place - first + hop) % size]
    order = generator.permutation(len(labels))
    return np.stack([order, partner[order]], axis=1)


def epoch_order(
    labels: NDArray[np.int64],
    *,
    pairs: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
    itself: bool = False,
) -> Order:
    """Lay out an epoch: all workers take the same number of steps, and each image is an anchor once over all.

    Steps hold at most `pairs` pairs and differ by one at the most. A batch in which all anchors happen to
    be of one class, of which no triplet can be made, exchanges one with another batch. `itself` is that of
    `draw_pairs`.

    >>> order = epoch_order(np.array([0, 0, 1, 1, 2]), pairs=4, seed=0, epoch=0)
    >>> [len(step) for step in order.steps]
    [3, 2]
    """
    drawn = draw_pairs(labels, random(seed, epoch, 0), itself=itself)
    steps = -(-len(labels) // (world * pairs))
    if len(labels) < 2 * steps * world:
        raise UserError(f"{len(labels)} images are too few for {world} workers: each needs at least 2 a step")
    batches = np.array_split(np.arange(len(labels)), steps * world)
    batches = _mix(batches, labels[drawn[:, 0]])
    return Order(batches[rank::world], drawn)


def _mix(batches: list[NDArray[np.int64]], classes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Exchange an anchor of each batch of one class alone with the next batch that can spare another."""
    for i, mine in enumerate(batches):
        only = classes[mine[0]]
        if (classes[mine] != only).any():
            continue
        for k in range(1, len(batches)):
            other = batches[(i + k) % len(batches)]
            differs = np.flatnonzero(classes[other] != only)
            # The other batch gets an anchor of class `only` and must keep one that is not.
            if len(differs) > 1:
                mine[-1], other[differs[0]] = other[differs[0]], mine[-1]
                break
    return batches


class PairLoader:
    """Iterates over the batches of pairs of an epoch, from (N, H, W, C) pixels with 8 bits.

    Which batches, and which part of each image they show, depends on the seed, the epoch and the step alone.
    With `crop`, a square of this size is cut out at random; with `flip`, half of the images are mirrored.
    `rows` (R,) are the images to use, by default all; the others are never read. With `itself`, a pair may be
    an image twice, each time with a crop and a side of its own. `progress` says which
    (epoch, step) comes next; by default the loader counts by itself. The next batch is prepared while the
    current one is in use.

    >>> pixels, labels = np.zeros((8, 4, 4, 1), np.uint8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> loader = PairLoader(pixels, labels, pairs=4, seed=0)
    >>> [tuple(batch.images.shape) for batch in loader]
    [(8, 1, 4, 4), (8, 1, 4, 4)]
    """

    def __init__(
        self,
        pixels: Pictures,
        labels: Tensor,
        *,
        pairs: int,
        seed: int,
        rows: NDArray[np.int64] | None = None,
        crop: int | None = None,
        flip: bool = False,
        itself: bool = False,
        rank: int = 0,
        world: int = 1,
        progress: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        if pairs < 4:
            # An epoch's steps may be half as long as the longest; a triplet takes two pairs.
            raise UserError(f"a batch needs at least 4 pairs, not {pairs}")
        _check_crop(pixels, crop)
        self.pixels = pixels
        self.rows = np.arange(len(pixels)) if rows is None else rows
        check_labels(labels, len(pixels))
        self.labels = labels.numpy().astype(np.int64)[self.rows]
        self.pairs, self.seed, self.crop, self.flip = pairs, seed, crop, flip
        self.itself, self.rank, self.world = itself, rank, world
        self.progress = progress
        self._next = (0, 0)
        self.order(0)

    def order(self, epoch: int) -> Order:
        """Lay out an epoch for this worker."""
        return epoch_order(
            self.labels,
            pairs=self.pairs,
            seed=self.seed,
            epoch=epoch,
            rank=self.rank,
            world=self.world,
            itself=self.itself,
        )

    def __len__(self) -> int:
        return -(-len(self.labels) // (self.world * self.pairs))

    def __iter__(self) -> Iterator[Batch]:
        epoch, step = self._next if self.progress is None else self.progress()
        order = self.order(epoch)
        look = self._look(epoch)
        with ThreadPoolExecutor(1) as ahead:
            waiting = ahead.submit(self._batch, order, look, step) if step < len(order.steps) else None
            while waiting is not None:
                batch = waiting.result()
                step += 1
                waiting = ahead.submit(self._batch, order, look, step) if step < len(order.steps) else None
                self._next = (epoch, step) if waiting is not None else (epoch + 1, 0)
                yield batch

    def _look(self, epoch: int) -> NDArray[np.int64]:
        """Draw for each pair's two images the top and left of the crop and whether to mirror: (N, 2, 3)."""
        generator = random(self.seed, epoch, 1)
        height, width = self.pixels.shape[1:3]
        room = (height - (self.crop or height) + 1, width - (self.crop or width) + 1, 2 if self.flip else 1)
        return generator.integers(0, room, size=(len(self.labels), 2, 3))

    def _batch(self, order: Order, look: NDArray[np.int64], step: int) -> Batch:
        slots = order.steps[step]
        index, views = order.pairs[slots].reshape(-1), look[slots].reshape(-1, 3)
        height, width = (self.crop or s for s in self.pixels.shape[1:3])
        images = np.empty((len(index), height, width, self.pixels.shape[3]), np.uint8)
        whole = chain.from_iterable(rows for _, rows in _parts(self.pixels, self.rows[index]))
        for image, row, (top, left, mirrored) in zip(images, whole, views, strict=True):
            part = row[top : top + height, left : left + width]
            image[:] = part[:, ::-1] if mirrored else part
        return Batch(_floats(images), torch.from_numpy(self.labels[index]))


class ImageArray:
    """(N, H, W, C) pixels with 8 bits, indexed like a tensor (N, C, H, W) of images in [0, 1].

    Images are cut to the middle `crop` × `crop`, and converted when they are asked for. `rows` (R,) are the
    images to use, by default all.

    >>> images = ImageArray(np.full((5, 6, 6, 1), 255, np.uint8), crop=4)
    >>> len(images), images[torch.tensor([3, 1])].shape, float(images[torch.tensor([0])].max())
    (5, torch.Size([2, 1, 4, 4]), 1.0)
    """

    def __init__(
        self, pixels: Pictures, crop: int | None = None, rows: NDArray[np.int64] | None = None
    ) -> None:
        _check_crop(pixels, crop)
        self.pixels = pixels
        self.rows = np.arange(len(pixels)) if rows is None else rows
        height, width = pixels.shape[1:3]
        self._size = size = (crop or height, crop or width)
        top, left = ((whole - part) // 2 for whole, part in zip((height, width), size, strict=True))
        self._middle = np.s_[:, top : top + size[0], left : left + size[1]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        rows = self.rows[index if isinstance(index, slice) else index.numpy()]
        found = np.empty((len(rows), self.pixels.shape[3], *self._size), np.float32)
        for part, whole in _parts(self.pixels, rows):
            found[part] = whole[self._middle].transpose(0, 3, 1, 2)
        return torch.from_numpy(found).div_(255)


class ImageLoader:
    """Iterates over (N, H, W, C) pixels with 8 bits in their order, cut to the middle `crop` × `crop`.

    `rows` (R,) are the images to use, by default all. Draws nothing at random.

    >>> loader = ImageLoader(np.zeros((5, 6, 6, 1), np.uint8), torch.arange(5), batch=4, crop=4)
    >>> [tuple(batch.images.shape) for batch in loader]
    [(4, 1, 4, 4), (1, 1, 4, 4)]
    """

    def __init__(
        self,
        pixels: Pictures,
        labels: Tensor,
        *,
        batch: int,
        rows: NDArray[np.int64] | None = None,
        crop: int | None = None,
    ) -> None:
        self.images, self.batch = ImageArray(pixels, crop, rows), batch
        check_labels(labels, len(pixels))
        self.labels = labels[torch.from_numpy(self.images.rows)]

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        for begin in range(0, len(self.labels), self.batch):
            part = slice(begin, begin + self.batch)
            yield Batch(self.images[part], self.labels[part])


def _check_crop(pixels: Pictures, crop: int | None) -> None:
    height, width = pixels.shape[1:3]
    if crop is not None and not 1 <= crop <= min(height, width):
        raise UserError(
            f"a crop of {crop} does not fit images of {height}×{width}: give one size for both, or a crop of "
            f"at most {min(height, width)}",
            parameter="size",
        )


def _parts(pixels: Pictures, rows: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
    """Return whole images, some at a time: what is cut to size next is still in the processor's cache."""
    count = max(1, _PART // math.prod(pixels.shape[1:]))
    for begin in range(0, len(rows), count):
        part = slice(begin, begin + count)
        yield part, pixels[rows[part]]


def _floats(pixels: NDArray[np.uint8]) -> Tensor:
    """Turn (N, H, W, C) with 8 bits into (N, C, H, W) in [0, 1]."""
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32, order="C")).div_(255)
