"""Chance: a stream of random numbers for each query, and targets that are drawn with it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from robustmetric.gallery import Gallery, Queries, nearest


class Draws:
    """Random numbers for B queries, from one stream each.

    `numbers` are those of the queries. A query's stream depends on the `seed`, the `purpose` and the query's
    number alone: not on the batch it is in, the order of the queries or the worker.

    >>> one, all_ = Draws(0, "CA+", [7]), Draws(0, "CA+", [5, 6, 7])
    >>> bool(one.uniform(2)[0].equal(all_.uniform(2)[2]))
    True
    """

    def __init__(self, seed: int, purpose: str, numbers: Sequence[int]) -> None:
        self._streams = [np.random.Generator(np.random.Philox(_key(seed, purpose, n))) for n in numbers]

    def uniform(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        """Return (B, *`shape`) numbers in [0, 1), or (R, *`shape`) for some `rows` (R,)."""
        return torch.from_numpy(np.stack([s.random(shape) for s in self._of(rows)]))

    def normal(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        """Return (B, *`shape`) numbers of mean 0 and deviation 1, or (R, *`shape`) for some `rows` (R,)."""
        return torch.from_numpy(np.stack([s.standard_normal(shape, np.float32) for s in self._of(rows)]))

    def signs(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        """Return (B, *`shape`) of −1 and 1, or (R, *`shape`) for some `rows` (R,)."""
        drawn = np.stack([s.integers(0, 2, shape, np.int8) for s in self._of(rows)])
        return torch.from_numpy(2 * drawn - 1).float()

    def _of(self, rows: Tensor | None) -> list[np.random.Generator]:
        return self._streams if rows is None else [self._streams[i] for i in rows.tolist()]


def _key(seed: int, purpose: str, number: int) -> np.random.SeedSequence:
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=16).digest()
    return np.random.SeedSequence(int.from_bytes(digest, "big"))


def distinct(uniform: Tensor, size: int) -> Tensor:
    """Return (B, W) different positions of `size`, each equally likely, by `uniform` (B, W) in [0, 1).

    >>> distinct(torch.tensor([[0.0, 0.0, 0.99]]), 4)
    tensor([[0, 1, 3]])
    """
    chosen = torch.empty(len(uniform), 0, dtype=torch.long)
    for k in range(uniform.shape[1]):
        # The k-th is one of those not chosen yet: step over the chosen ones in their order.
        position = (uniform[:, k] * (size - k)).long().clamp_max(size - k - 1)
        for taken in chosen.sort(dim=1).values.T:
            position += position >= taken
        chosen = torch.cat([chosen, position[:, None]], dim=1)
    return chosen


def choose(uniform: Tensor, gallery: Gallery, own: Tensor, *, strict: bool) -> Tensor:
    """Return (B, W) positions in the `gallery`, chosen by `uniform` (B, W) numbers in [0, 1).

    With `strict`, neither the query's `own` position (B,), −1 for none, nor any position twice.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> choose(torch.tensor([[0.0, 0.99]]), gallery, torch.tensor([0]), strict=True)
    tensor([[1, 4]])
    """
    uniform, size = uniform.to(torch.float64), len(gallery)
    if not strict:
        return (uniform * size).long().clamp_max(size - 1).to(own.device)
    inside = own.cpu()[:, None] >= 0
    position = torch.where(inside, distinct(uniform, size - 1), distinct(uniform, size))
    position += inside & (position >= own.cpu()[:, None])
    return position.to(own.device)


def choose_near(uniform: Tensor, queries: Queries, gallery: Gallery, count: int, *, strict: bool) -> Tensor:
    """Return (B, W) positions among the `count` nearest, at least W, chosen by `uniform` (B, W) in [0, 1).

    Of the `gallery` the `queries` themselves are left out. If `strict`, none is chosen twice.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> queries = Queries(gallery.z[:1], torch.tensor([0]), torch.tensor([0]))
    >>> choose_near(torch.tensor([[0.9]]), queries, gallery, 1, strict=True)
    tensor([[1]])
    """
    pool = nearest(queries.z, gallery, max(uniform.shape[1], count), queries.any_camera)
    if strict:
        place = distinct(uniform, pool.shape[1])
    else:
        place = (uniform * pool.shape[1]).long().clamp_max(pool.shape[1] - 1)
    return pool.gather(1, place.to(pool.device))
