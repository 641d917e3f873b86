"""Pairs of images to verify: drawn by a seed so that each is equally likely, or given, and which choose.

Images are sorted by class and camera. Then the images that make a pair with one of them, of its class and
another camera or of another class, are one or two stretches of the sorted ones: all pairs have a number, and
drawing numbers without repetition draws pairs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from robustmetric.evaluation.data import Data
from robustmetric.evaluation.images import Images
from robustmetric.labels import WHOLE, check_labels
from robustmetric.validate import UserError

Numbers = NDArray[np.int64]
Source = Literal["validation images", "other classes"]
"""Where the pairs are from that choose a threshold."""

JUDGED, CHOOSE, CLASSES = range(3)  # what is drawn from a seed


@dataclass(frozen=True, eq=False)
class Pairs:
    """P pairs: `first` and `second` (P,) are positions in the same images, `same` (P,) says what they are.

    >>> Pairs(np.array([0, 1]), np.array([2, 2]), np.array([True, False])).digest[:8]
    '2a68a424'
    """

    first: Numbers
    second: Numbers
    same: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def digest(self) -> str:
        """The SHA-256 of all positions and flags."""
        whole = np.stack([self.first, self.second, self.same.astype(np.int64)])
        return hashlib.sha256(whole.astype("<i8").tobytes()).hexdigest()

    def take(self, rows: NDArray[np.bool_] | Numbers) -> Pairs:
        """Return the pairs of these `rows`."""
        return Pairs(self.first[rows], self.second[rows], self.same[rows])


@dataclass(frozen=True, eq=False)
class Side:
    """N images that pairs are made of: their `labels` and `cameras` (N,), and `places` (N,) of them all."""

    labels: Numbers
    cameras: Numbers | None
    places: Numbers

    @classmethod
    def of(cls, labels: Tensor, cameras: Tensor | None, begin: int = 0) -> Side:
        """Take images that stand from a position on."""
        seen = None if cameras is None else _numbers(cameras)
        return cls(_numbers(labels), seen, np.arange(begin, begin + len(labels)))

    def take(self, rows: NDArray[np.bool_]) -> Side:
        """Return some of the images."""
        return Side(
            self.labels[rows], None if self.cameras is None else self.cameras[rows], self.places[rows]
        )


@dataclass(frozen=True, eq=False)
class Stretches:
    """For each of N images the sorted others that make a pair with it: two stretches, one may be empty.

    `begin` (2, N) are where they begin and `length` (2, N) how long they are; `first` (N,) and `second` (M,)
    are the places of the images, in order.
    """

    begin: Numbers
    length: Numbers
    first: Numbers
    second: Numbers

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return int(self.length.sum())

    def pairs(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the places of both images of the pairs with these `numbers`."""
        ends = self.length.sum(0).cumsum()
        image = np.searchsorted(ends, numbers, side="right")
        left = numbers - (ends[image] - self.length.sum(0)[image])
        later = (left >= self.length[0, image]).astype(np.int64)
        partner = self.begin[later, image] + left - later * self.length[0, image]
        return self.first[image], self.second[partner]


def stretches(asks: Side, others: Side | None) -> tuple[Stretches, Stretches]:
    """Return all pairs that are same and all that are different, of `asks` with `others` or among themselves.

    An image makes no pair with itself. Where cameras are known, images of one class and one camera make none.

    >>> labels = torch.tensor([0, 0, 1, 0])
    >>> same, different = stretches(Side.of(labels, None), None)
    >>> same.count, different.count
    (3, 3)
    """
    alone = others is None
    ranked = asks if others is None else others
    order = np.lexsort((ranked.places, *(() if ranked.cameras is None else (ranked.cameras,)), ranked.labels))
    sorted_labels, second = ranked.labels[order], ranked.places[order]
    if alone:
        asks = Side(sorted_labels, None if asks.cameras is None else asks.cameras[order], second)
    low, high = (np.searchsorted(sorted_labels, asks.labels, side=side) for side in ("left", "right"))
    if asks.cameras is None or ranked.cameras is None:
        # The image itself, if it is there.
        place = {int(p): k for k, p in enumerate(second)}
        own = np.array([place.get(int(p), -1) for p in asks.places], np.int64)
        block, end = np.where(own >= 0, own, low), np.where(own >= 0, own + 1, low)
    else:
        kinds, both = np.unique(np.concatenate([ranked.cameras, asks.cameras]), return_inverse=True)
        theirs, mine = both[: len(order)][order], both[len(order) :]
        known = np.unique(np.concatenate([sorted_labels, asks.labels]), return_inverse=True)[1]
        keys = known[: len(order)] * len(kinds) + theirs
        wanted = known[len(order) :] * len(kinds) + mine
        block, end = (np.searchsorted(keys, wanted, side=side) for side in ("left", "right"))
    zero = np.zeros_like(low)
    # Among themselves each pair counts once: with the image that is later.
    same = Stretches(
        np.stack([low, end]), np.stack([zero if alone else block - low, high - end]), asks.places, second
    )
    different = Stretches(
        np.stack([zero, high]),
        np.stack([zero if alone else low, len(order) - high]),
        asks.places,
        second,
    )
    return same, different


def draw(asks: Side, others: Side | None, count: int, seed: int, purpose: int) -> Pairs:
    """Draw `count` pairs, half of them same, each equally likely and none twice; fewer if there are fewer.

    >>> found = draw(Side.of(torch.arange(6) % 2, None), None, 4, seed=0, purpose=JUDGED)
    >>> found.same.tolist(), bool((found.first != found.second).all())
    ([True, True, False, False], True)
    """
    generator = np.random.default_rng(np.random.SeedSequence([seed, purpose, 17]))
    firsts, seconds, kinds = [], [], []
    for kind, wanted, every in zip(
        (True, False), (count // 2, count - count // 2), stretches(asks, others), strict=True
    ):
        numbers = generator.choice(every.count, min(wanted, every.count), replace=False)
        first, second = every.pairs(np.asarray(numbers, np.int64))
        if others is None:  # either may be the one that is perturbed
            swapped = generator.random(len(first)) < 0.5
            first, second = np.where(swapped, second, first), np.where(swapped, first, second)
        firsts.append(first)
        seconds.append(second)
        kinds.append(np.full(len(first), kind))
    return Pairs(np.concatenate(firsts), np.concatenate(seconds), np.concatenate(kinds))


@dataclass(frozen=True, eq=False)
class Choosing:
    """The pairs that choose the threshold, of `images`, and where they are from: `source`.

    `classes` counts their classes, `sha256` is the digest of images, labels and pairs.
    """

    images: Images
    pairs: Pairs
    source: Source
    classes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Split:
    """The pairs that are `judged`, and those that `choose` unless a threshold is given.

    `left_out` counts given pairs of a class that is judged with one that chooses; `given` says whether the
    pairs were given.
    """

    judged: Pairs
    choose: Choosing | None
    given: bool
    left_out: int = 0


Validation = Data | tuple[Images, Tensor]
"""Images with their labels."""


def split_pairs(
    data: Data,
    *,
    pairs: Tensor | None,
    validation: Validation | None,
    chosen: bool,
    count: int,
    seed: int,
) -> Split:
    """Make the pairs of the `data` that are judged and, if the threshold is `chosen`, those that choose it.

    `pairs` (P, 2) are positions of images and of those that are ranked; without them `count` are drawn. The
    `validation` images choose if there are some. Else half of the classes do, drawn from the `seed`, and the
    other half is judged: no class is in both.
    """
    total = len(data.images)
    asks = Side.of(data.labels, data.cameras)
    others = None
    if data.gallery is not None:
        others = Side.of(data.ranked.labels, data.ranked.cameras, total)
        own = data.places.cpu().numpy()
        # An image that is on both sides is one image.
        others.places[own[own >= 0]] = np.flatnonzero(own >= 0)
    given = None if pairs is None else _given(pairs, asks, others)
    if not chosen or validation is not None:
        judged = draw(asks, others, count, seed, JUDGED) if given is None else given
        choosing = None
        if chosen and validation is not None:
            choosing = _by_validation(validation, data, count, seed)
        return Split(_both(judged, "judged"), choosing, given is not None)
    apart = _chosen_classes(asks, others, seed)
    left_out = 0
    if given is None:
        parts = [
            [
                None if side is None else side.take(np.isin(side.labels, apart) == choosing)
                for side in (asks, others)
            ]
            for choosing in (False, True)
        ]
        judged, choose = (
            draw(first, second, count, seed, purpose)  # type: ignore[arg-type]
            for (first, second), purpose in zip(parts, (JUDGED, CHOOSE), strict=True)
        )
    else:
        label = np.empty(len(data.every), np.int64)
        for side in (asks, *(() if others is None else (others,))):
            label[side.places] = side.labels
        ours, theirs = (np.isin(label[places], apart) for places in (given.first, given.second))
        judged, choose = given.take(~ours & ~theirs), given.take(ours & theirs)
        left_out = len(given) - len(judged) - len(choose)
    judged, choose = _both(judged, "judged", apart=True), _both(choose, "choosing")
    sha256 = hashlib.sha256(f"{data.fingerprint.sha256}/{choose.digest}".encode()).hexdigest()
    made = Choosing(data.every, choose, "other classes", len(apart), sha256)
    return Split(judged, made, given is not None, left_out)


def _given(pairs: Tensor, asks: Side, others: Side | None) -> Pairs:
    """Take pairs that were given."""
    second = asks if others is None else others
    if not isinstance(pairs, Tensor) or pairs.dtype not in WHOLE or pairs.ndim != 2 or pairs.shape[1] != 2:
        found = (
            f"{pairs.dtype} of shape {tuple(pairs.shape)}"
            if isinstance(pairs, Tensor)
            else type(pairs).__name__
        )
        raise UserError(
            f"pairs must be a tensor (P, 2) of positions, of an image and of another one, not {found}",
            parameter="pairs",
        )
    numbers = _numbers(pairs)
    for column, side in ((0, asks), (1, second)):
        wrong = (numbers[:, column] < 0) | (numbers[:, column] >= len(side.labels))
        if wrong.any():
            raise UserError(
                f"pairs hold the position {int(numbers[wrong, column][0])}, and there are {len(side.labels)} "
                "images, counted from 0",
                parameter="pairs",
            )
    first, partner = asks.places[numbers[:, 0]], second.places[numbers[:, 1]]
    if (first == partner).any():
        place = int(np.flatnonzero(first == partner)[0])
        raise UserError(
            f"pair {place} is an image with itself, which tells nothing: give two images", parameter="pairs"
        )
    same = asks.labels[numbers[:, 0]] == second.labels[numbers[:, 1]]
    return Pairs(first, partner, same)


def _both(pairs: Pairs, what: str, *, apart: bool = False) -> Pairs:
    """Refuse pairs that are all same, or all different; some classes may be set apart from those judged."""
    same, different = int(pairs.same.sum()), int((~pairs.same).sum())
    if same and different:
        return pairs
    missing = "same" if not same else "different"
    advice = {
        "judged": f"give images, or pairs, of which some are {missing}",
        "choosing": "give more classes, validation images, or the threshold itself",
    }[what]
    if apart:
        advice += (
            "; or give validation images or the threshold, so that no classes are set apart to choose it"
        )
    raise UserError(
        f"none of the {len(pairs)} {what} pairs is {missing} ({_counted(pairs)}): {advice}",
        parameter="pairs" if what == "judged" else "threshold",
    )


def _counted(pairs: Pairs) -> str:
    return f"{int(pairs.same.sum())} same, {int((~pairs.same).sum())} different"


def _chosen_classes(asks: Side, others: Side | None, seed: int) -> Numbers:
    """Draw half of the classes, of those that can make same pairs and of those that cannot."""
    same, _ = stretches(asks, others)
    able = np.unique(asks.labels[np.isin(asks.places, same.first[same.length.sum(0) > 0])])
    every = np.unique(np.concatenate([asks.labels, *(() if others is None else (others.labels,))]))
    generator = np.random.default_rng(np.random.SeedSequence([seed, CLASSES, 17]))
    drawn = [generator.permutation(kind)[: len(kind) // 2] for kind in (able, np.setdiff1d(every, able))]
    return np.sort(np.concatenate(drawn))


def _by_validation(validation: Validation, data: Data, count: int, seed: int) -> Choosing:
    """Draw the pairs that choose of validation images."""
    chosen = validation if isinstance(validation, Data) else Data(*validation)
    check_labels(chosen.labels, len(chosen.images))
    mark = chosen.fingerprint
    if mark.shape != data.fingerprint.shape:
        raise UserError(
            f"validation images have shape {tuple(mark.shape)} and those that are judged "
            f"{tuple(data.fingerprint.shape)}: bring them to one size"
        )
    pairs = _both(draw(Side.of(chosen.labels, chosen.cameras), None, count, seed, CHOOSE), "choosing")
    sha256 = hashlib.sha256(f"{mark.sha256}/{pairs.digest}".encode()).hexdigest()
    return Choosing(chosen.images, pairs, "validation images", len(chosen.labels.unique()), sha256)


def _numbers(values: Tensor) -> Numbers:
    found: Numbers = values.detach().cpu().numpy().astype(np.int64)
    return found
