"""Batches of pairs: each image is an anchor once an epoch, paired with another image of its class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from robustmetric.data.cache import Pictures
from robustmetric.errors import UserError, number, whole
from robustmetric.labels import check_labels

_PART = 1 << 20  # bytes of images that are read at a time


class Order(NamedTuple):
    """An epoch of one worker: the slots (B,) that each step takes of the whole epoch's pairs (N, 2)."""

    steps: list[NDArray[np.int64]]
    pairs: NDArray[np.int64]


class Look(NamedTuple):
    """How the two images of each of N pairs are shown in an epoch.

    `views` (N, 2, 3): top and left of the crop, and whether to mirror. `boxes` (N, 2, 4): left, top, right
    and bottom of what is zoomed in on, `factors` (N, 2, 3) of brightness, contrast and saturation; or None.
    """

    views: NDArray[np.int64]
    boxes: NDArray[np.int64] | None
    factors: NDArray[np.float64] | None


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


def draw_boxes(
    shape: tuple[int, ...], size: tuple[int, int], zoom: float, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Draw parts of images of a `size` (height, width): left, top, right and bottom, of a `shape` (…, 4).

    The share of the area is uniform from `zoom` to 1, the logarithm of the aspect, relative to that of the
    image, uniform from 3/4 to 4/3 as far as such a part fits, and so is the place.

    >>> draw_boxes((1,), (8, 8), 1.0, np.random.default_rng(0)).tolist()
    [[0, 0, 8, 8]]
    """
    area, aspect, x, y = generator.random((4, *shape))
    area = zoom + (1 - zoom) * area
    aspect = np.exp((2 * aspect - 1) * np.minimum(math.log(4 / 3), -np.log(area)))
    height, width = (
        np.maximum(1, np.rint(side * np.sqrt(part))).astype(np.int64)
        for side, part in zip(size, (area / aspect, area * aspect), strict=True)
    )
    top, left = (y * (size[0] - height + 1)).astype(np.int64), (x * (size[1] - width + 1)).astype(np.int64)
    return np.stack([left, top, left + width, top + height], axis=-1)


def zoomed(image: NDArray[np.uint8], box: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Bring the part of an `image` (H, W, C) in a `box` (left, top, right, bottom) to a `size`, as (h, w, C).

    >>> zoomed(np.eye(4, dtype=np.uint8)[..., None], np.array([1, 1, 3, 3]), (2, 2))[..., 0].tolist()
    [[1, 0], [0, 1]]
    """
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    edges = tuple(map(float, box))
    part = picture.resize(size[::-1], Image.Resampling.BILINEAR, edges)  # type: ignore[arg-type]
    return np.asarray(part).reshape(*size, -1)


def jittered(image: NDArray[np.uint8], factors: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Multiply brightness, contrast and saturation of an `image` (H, W, C) by three `factors`.

    >>> jittered(np.array([[[100], [200]]], np.uint8), np.array([1.1, 0.5, 1.0]))[..., 0].tolist()
    [[138, 192]]
    """
    brightness, contrast, saturation = factors.astype(np.float32)
    weights = np.array([1] if image.shape[2] == 1 else [0.299, 0.587, 0.114], np.float32)
    light = image.astype(np.float32) * brightness
    middle = (light @ weights).mean()
    light = middle + contrast * (light - middle)
    grey = (light @ weights)[..., None]
    found: NDArray[np.uint8] = np.rint(np.clip(grey + saturation * (light - grey), 0, 255)).astype(np.uint8)
    return found


class PairLoader:
    """Iterates over the batches of pairs of an epoch, from (N, H, W, C) pixels with 8 bits.

    A batch is the images (2B, C, H, W) in [0, 1] of pairs [a0, p0, a1, p1, …] and their labels (2B,).

    Which batches, and which part of each image they show, depends on the seed, the epoch and the step alone.
    With `crop`, a square of this size is cut out at random; with `flip`, half of the images are mirrored.
    With `zoom`, a random part of each image, at least this share of its area and with an aspect of 3/4 to 4/3
    of its own, is brought to that size instead. With `jitter`, brightness, contrast and saturation of each
    are multiplied by factors from 1 − jitter to 1 + jitter.
    `rows` (R,) are the images to use, by default all; the others are never read. With `itself`, a pair may be
    an image twice, each time with a crop and a side of its own. `progress` says which
    (epoch, step) comes next; by default the loader counts by itself. The next batch is prepared while the
    current one is in use.

    >>> pixels, labels = np.zeros((8, 4, 4, 1), np.uint8), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> loader = PairLoader(pixels, labels, pairs=4, seed=0)
    >>> [tuple(images.shape) for images, labels in loader]
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
        zoom: float | None = None,
        jitter: float = 0.0,
        rank: int = 0,
        world: int = 1,
        progress: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        # An epoch's steps may be half as long as the longest; a triplet takes two pairs.
        whole("pairs", pairs, 4)
        number("zoom", 1 if zoom is None else zoom, 0, 1, open_low=True, why="or None")
        number("jitter", jitter, 0, 1)
        _check_crop(pixels, crop)
        self.pixels = pixels
        self.rows = np.arange(len(pixels)) if rows is None else rows
        check_labels(labels, len(pixels))
        self.labels = labels.numpy().astype(np.int64)[self.rows]
        self.pairs, self.seed, self.crop, self.flip = pairs, seed, crop, flip
        self.zoom, self.jitter = zoom, jitter
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

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
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

    def _look(self, epoch: int) -> Look:
        """Draw how each pair's two images are shown; each purpose has a generator of its own."""
        generator = random(self.seed, epoch, 1)
        height, width = self.pixels.shape[1:3]
        room = (height - (self.crop or height) + 1, width - (self.crop or width) + 1, 2 if self.flip else 1)
        count = len(self.labels)
        views = generator.integers(0, room, size=(count, 2, 3))
        boxes = factors = None
        if self.zoom is not None:
            boxes = draw_boxes((count, 2), (height, width), self.zoom, random(self.seed, epoch, 2))
        if self.jitter:
            factors = 1 + self.jitter * random(self.seed, epoch, 3).uniform(-1, 1, (count, 2, 3))
        return Look(views, boxes, factors)

    def _batch(self, order: Order, look: Look, step: int) -> tuple[Tensor, Tensor]:
        slots = order.steps[step]
        index, views = order.pairs[slots].reshape(-1), look.views[slots].reshape(-1, 3)
        boxes = None if look.boxes is None else look.boxes[slots].reshape(-1, 4)
        factors = None if look.factors is None else look.factors[slots].reshape(-1, 3)
        height, width = (self.crop or s for s in self.pixels.shape[1:3])
        images = np.empty((len(index), height, width, self.pixels.shape[3]), np.uint8)
        rows_of = chain.from_iterable(rows for _, rows in _parts(self.pixels, self.rows[index]))
        for k, (row, (top, left, mirrored)) in enumerate(zip(rows_of, views, strict=True)):
            part = row[top : top + height, left : left + width]
            if boxes is not None:
                part = zoomed(row, boxes[k], (height, width))
            if factors is not None:
                part = jittered(part, factors[k])
            images[k] = part[:, ::-1] if mirrored else part
        floats = images.transpose(0, 3, 1, 2).astype(np.float32, order="C")
        return torch.from_numpy(floats).div_(255), torch.from_numpy(self.labels[index])


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
        top, left = ((all_ - part) // 2 for all_, part in zip((height, width), size, strict=True))
        self._middle = np.s_[:, top : top + size[0], left : left + size[1]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | slice, /) -> Tensor:
        rows = self.rows[index if isinstance(index, slice) else index.numpy()]
        found = np.empty((len(rows), self.pixels.shape[3], *self._size), np.float32)
        for part, pixels in _parts(self.pixels, rows):
            found[part] = pixels[self._middle].transpose(0, 3, 1, 2)
        return torch.from_numpy(found).div_(255)


class ImageLoader:
    """Iterates over (N, H, W, C) pixels with 8 bits in their order, cut to the middle `crop` × `crop`.

    A batch is images (B, C, H, W) in [0, 1] and their labels (B,). `rows` (R,) are the images to use, by
    default all. Draws nothing at random.

    >>> loader = ImageLoader(np.zeros((5, 6, 6, 1), np.uint8), torch.arange(5), batch=4, crop=4)
    >>> [tuple(images.shape) for images, labels in loader]
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

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, len(self.labels), self.batch):
            part = slice(begin, begin + self.batch)
            yield self.images[part], self.labels[part]


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
