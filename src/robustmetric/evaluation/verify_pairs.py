"""The plan of a verification and its pairs: those that are judged, and those that choose a threshold."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from robustmetric.errors import UserError, describe
from robustmetric.evaluation.data import Data, Fingerprint, data_from
from robustmetric.evaluation.images import Images, Joined
from robustmetric.evaluation.plan import SearchPlan
from robustmetric.evaluation.threat import Threat
from robustmetric.labels import WHOLE
from robustmetric.perturb import Budget
from robustmetric.verification import check_far, check_kinds

FAR = 0.01
"""The FAR that a threshold is chosen for by default."""

SHARED = ("eps", "alpha", "steps", "search", "seed", "batch")
"""Settings that are those of an evaluation."""


class VerifyPlan(SearchPlan):
    """How a verification is done: all that it depends on besides the network, the data and given pairs.

    Make one with `VerifyPlan.make`, which checks all of it once.
    """

    count: int = Field(2000, ge=2, description="number of pairs to judge, half of them same")
    threshold: float | None = Field(None, ge=0, le=2, description="distance up to which a pair is same")
    far: float | None = Field(None, description="FAR that the threshold is chosen for, unless it is given")
    attack: bool = Field(True, description="whether the first image of each pair is attacked")
    eps: float = Field(8 / 255, ge=0, le=1, description="ε, the largest change of a pixel in [0, 1]")
    alpha: float = Field(3 / 255, gt=0, le=1, description="α, the size of a step")
    steps: int = Field(32, ge=1, description="η, the number of steps")
    search: str = Field("pgd", description="how perturbations are searched for: pgd, apgd, square")
    seed: int = Field(0, ge=0, lt=2**32, description="random seed")
    batch: int = Field(128, ge=1, description="number of pairs that are attacked together")

    @classmethod
    def make(cls, **settings: Any) -> VerifyPlan:
        """Make a plan of `settings`, some of its fields, and refuse what cannot be.

        >>> VerifyPlan.make(count=1)
        Traceback (most recent call last):
        ...
        robustmetric.UserError: count is 1: input should be greater than or equal to 2 (number of pairs to ...
        """
        plan = super().make(**settings)
        if plan.threshold is None:
            return plan.model_copy(update={"far": check_far(FAR if plan.far is None else plan.far)})
        if plan.far is not None:
            told = "a threshold is not chosen for a FAR: give one of threshold and far"
            raise UserError(told, parameter="far")
        return plan

    @property
    def threat(self) -> Threat:
        """The budget of a perturbation, and how it is searched for."""
        budget = Budget(eps=self.eps, alpha=self.alpha, steps=self.steps)
        return Threat(budget, self.searching, self.seed, self.batch)


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

    @property
    def places(self) -> Numbers:
        """The positions (U,) of all images in them, ascending."""
        return np.union1d(self.first, self.second)

    def take(self, rows: NDArray[np.bool_] | Numbers) -> Pairs:
        """Return the pairs of these `rows`."""
        return Pairs(self.first[rows], self.second[rows], self.same[rows])


@dataclass(frozen=True, eq=False)
class Pool:
    """N images with `labels` and `cameras` (N,), of which those at `first` make pairs with those at `second`.

    Images of one class and one camera make none. Where cameras are not known each image has its own, so that
    none makes a pair with itself.
    """

    labels: Numbers
    cameras: Numbers
    first: Numbers
    second: Numbers

    @classmethod
    def of(cls, labels: Tensor, cameras: Tensor | None = None) -> Pool:
        """Let all images make pairs with each other."""
        every = np.arange(len(labels))
        return cls(_numbers(labels), every if cameras is None else _numbers(cameras), every, every)

    @classmethod
    def of_data(cls, data: Data) -> Pool:
        """Let queries make pairs with ranked images; one that is both counts as the query alone."""
        labels, cameras = data.labels.cpu(), data.cameras
        if data.gallery is None:
            return cls.of(labels, cameras)
        if cameras is not None and data.ranked.cameras is not None:
            cameras = torch.cat([cameras.cpu(), data.ranked.cameras.cpu()])
        pool = cls.of(torch.cat([labels, data.ranked.labels.cpu()]), cameras)
        first, second = pool.first[: len(labels)], pool.second[len(labels) :].copy()
        own = _numbers(data.places)
        second[own[own >= 0]] = first[own >= 0]
        return replace(pool, first=first, second=second)

    def take(self, chosen: NDArray[np.bool_]) -> Pool:
        """Return the pool of the `chosen` images (N,)."""
        first, second = (side[chosen[side]] for side in (self.first, self.second))
        return replace(self, first=first, second=second)

    def pairs(self, first: Numbers, second: Numbers) -> Pairs:
        """Return the pairs of the images at `first` and `second` (P,)."""
        return Pairs(first, second, self.labels[first] == self.labels[second])

    def draw(self, count: int, *, same: bool, generator: np.random.Generator) -> Numbers:
        """Draw `count` pairs (2, P) of one kind, no two images twice; all of them if there are fewer.

        Sorted by class and camera, what makes a pair with an image is a block, its class or all images,
        without an excluded range: its camera or its class. So the pairs have numbers, and some are drawn.
        """
        label, camera = (np.unique(v, return_inverse=True)[1] for v in (self.labels, self.cameras))
        most = len(self.cameras)
        group = label * most + camera
        ranked = self.second[np.argsort(group[self.second], kind="stable")]
        ends = (label * most, group, group + 1, (label + 1) * most)
        low, begin, end, high = (np.searchsorted(group[ranked], at[self.first]) for at in ends)
        if not same:
            low, begin, end, high = 0 * low, low, high, 0 * low + len(ranked)
        size = high - low - (end - begin)
        last = size.cumsum()
        # Two images may be a pair in both orders.
        numbers = generator.choice(size.sum(), min(size.sum(), 2 * count), replace=False)
        row = np.searchsorted(last, numbers, side="right")
        low, end, high, after = low[row], end[row], high[row], numbers - (last - size)[row]
        found = np.stack([self.first[row], ranked[low + (end - low + after) % (high - low)]])
        low, high = np.sort(found, axis=0)
        _, once = np.unique(low * most + high, return_index=True)
        return found[:, np.sort(once)[:count]]


def draw(pool: Pool, count: int, seed: int, purpose: int) -> Pairs:
    """Draw `count` pairs, half of them same, none twice; fewer if there are fewer.

    Each is equally likely; one that two queries in the gallery make in both orders, twice as likely.

    >>> found = draw(Pool.of(torch.arange(6) % 2), 4, seed=0, purpose=JUDGED)
    >>> found.same.tolist(), bool((found.first != found.second).all())
    ([True, True, False, False], True)
    """
    generator = np.random.default_rng(np.random.SeedSequence([seed, purpose, 17]))
    same = pool.draw(count // 2, same=True, generator=generator)
    different = pool.draw(count - count // 2, same=False, generator=generator)
    return pool.pairs(*np.concatenate([same, different], axis=1))


@dataclass(frozen=True, eq=False)
class Choosing:
    """The pairs that choose the threshold, and where they are from: `source`.

    `classes` counts their classes, `sha256` is the digest of images, labels and pairs.
    """

    pairs: Pairs
    source: Source
    classes: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Split:
    """The pairs of some `images` that are `judged`, and those that `choose` unless a threshold is given.

    `classes` counts those that are judged, `left_out` given pairs of a class that is judged with one that
    chooses; `given` says whether the pairs were given.
    """

    images: Images
    judged: Pairs
    classes: int
    choose: Choosing | None
    given: bool
    left_out: int = 0


Validation = Data | tuple[Images, Tensor]
"""Images with their labels."""


def split_pairs(
    data: Data, plan: VerifyPlan, pairs: Tensor | None = None, validation: Validation | None = None
) -> Split:
    """Make the pairs of the `data` that are judged and, unless the `plan` has a threshold, those that choose.

    `pairs` (P, 2) are positions of images and of those that are ranked; without them some are drawn. The
    `validation` images choose if there are some: they come after those of the data. Else half of the classes
    do, drawn from the seed, and the other half is judged: no class is in both.
    """
    pool, images, count, seed = Pool.of_data(data), data.every, plan.count, plan.seed
    given = None if pairs is None else _given(pairs, pool)
    advice, choosing, left_out = "give images, or pairs, of which some are", None, 0
    if plan.threshold is not None or validation is not None:
        judged = draw(pool, count, seed, JUDGED) if given is None else given
        if plan.threshold is None and validation is not None:
            chosen = _validated(validation, data)
            other = Pool.of_data(chosen)
            choose, classes = draw(other, count, seed, CHOOSE), len(np.unique(other.labels))
            choosing = _choosing(choose, "validation images", classes, chosen.fingerprint, len(images))
            images = Joined(images, chosen.every)
    else:
        drawn = _draw_classes(pool, seed)
        apart = np.isin(pool.labels, drawn)
        if given is None:
            judged = draw(pool.take(~apart), count, seed, JUDGED)
            choose = draw(pool.take(apart), count, seed, CHOOSE)
        else:
            first, second = apart[given.first], apart[given.second]
            judged, choose = given.take(~first & ~second), given.take(first & second)
            left_out = len(given) - len(judged) - len(choose)
        advice += "; or validation images or the threshold, so that no classes are set apart to choose it"
        choosing = _choosing(choose, "other classes", len(drawn), data.fingerprint)
    check_kinds(judged.same, "judged pairs", advice, "pairs")
    classes = len(np.unique(pool.labels[judged.places]))
    return Split(images, judged, classes, choosing, given is not None, left_out)


def _given(pairs: Tensor, pool: Pool) -> Pairs:
    """Take pairs that were given."""
    if not isinstance(pairs, Tensor) or pairs.dtype not in WHOLE or pairs.ndim != 2 or pairs.shape[1] != 2:
        told = f"pairs must be a tensor (P, 2) of positions of two images, not {describe(pairs)}"
        raise UserError(told, parameter="pairs")
    sides = []
    for numbers, side in zip(_numbers(pairs).T, (pool.first, pool.second), strict=True):
        wrong = (numbers < 0) | (numbers >= len(side))
        if wrong.any():
            told = f"pairs hold the position {numbers[wrong][0]}, and there are {len(side)} images, from 0"
            raise UserError(told, parameter="pairs")
        sides.append(side[numbers])
    first, second = sides
    for place in np.flatnonzero(first == second):
        raise UserError(f"pair {place} is an image with itself: give two images", parameter="pairs")
    return pool.pairs(first, second)


def _draw_classes(pool: Pool, seed: int) -> Numbers:
    """Draw half of the classes that can make same pairs, and half of those that cannot."""
    used = np.concatenate([pool.first, pool.second])
    seen = np.unique(np.stack([pool.labels, pool.cameras])[:, used], axis=1)
    every, cameras = np.unique(seen[0], return_counts=True)
    first, second = (np.isin(every, pool.labels[side]) for side in (pool.first, pool.second))
    able = first & second & (cameras > 1)
    generator = np.random.default_rng(np.random.SeedSequence([seed, CLASSES, 17]))
    drawn = [generator.permutation(kind)[: len(kind) // 2] for kind in (every[able], every[~able])]
    return np.concatenate(drawn)


def _choosing(pairs: Pairs, source: Source, classes: int, mark: Fingerprint, begin: int = 0) -> Choosing:
    """Check the pairs that choose a threshold, of images with the fingerprint `mark` that `begin` there."""
    advice = "give more classes, validation images, or the threshold itself"
    check_kinds(pairs.same, "choosing pairs", advice, "threshold")
    sha256 = hashlib.sha256(f"{mark.sha256}/{pairs.digest}".encode()).hexdigest()
    moved = replace(pairs, first=pairs.first + begin, second=pairs.second + begin)
    return Choosing(moved, source, classes, sha256)


def _validated(validation: Validation, data: Data) -> Data:
    """Return validation images as data; refuse those that are of another size than the `data`."""
    chosen = data_from("validation", validation)
    chosen.check_sides()
    shape, wanted = chosen.fingerprint.shape, data.fingerprint.shape
    if shape != wanted:
        raise UserError(f"validation images have shape {shape}, those to judge {wanted}: resize them")
    return chosen


def _numbers(values: Tensor) -> Numbers:
    return values.detach().cpu().numpy().astype(np.int64)
