"""The first images of a ranking, before and after an attack, and the place that it is about."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from robustmetric.attacks import Gallery, Queries
from robustmetric.evaluation.attack import NetworkView
from robustmetric.gallery import count_mates, exclude, excluded, nearest
from robustmetric.squares import distances, keys_of, square_distance

ITSELF = -1
"""The position of the perturbed image, where that is ranked."""


class Ranked(NamedTuple):
    """An image in a ranking: its `position` in the gallery, its `distance`, whether its class is `right`."""

    position: int
    distance: float
    right: bool


class Ranking(NamedTuple):
    """The `first` images of a ranking, and the `place` that counts, None if there is none."""

    first: list[Ranked]
    place: int | None


def rank_for_queries(view: NetworkView, z: Tensor, queries: Queries, k: int) -> list[Ranking]:
    """Return the first `k` images for each query at `z` (B, D), and the place of the first of its class."""
    gallery = view.ranking_gallery
    found = nearest(z, gallery, min(k, len(gallery)), queries)
    # What does not count for a query comes last.
    hidden = excluded(queries, gallery, slice(0, len(gallery))).gather(1, found)
    places: dict[int, int] = {}
    if (count_mates(queries, gallery) > 0).any():
        here = view.gallery.z.device
        ranking = view.rank(z.to(here), queries.to(here))
        places = dict(zip(ranking.query.tolist(), ranking.first.tolist(), strict=True))
    lists = _listed(z, found, hidden, queries.labels, gallery)
    return [Ranking(first, places.get(row)) for row, first in enumerate(lists)]


def rank_candidates(asker: Tensor, z: Tensor, queries: Queries, gallery: Gallery, k: int) -> list[Ranking]:
    """Return the first `k` images for each `asker` (B,) of the gallery, and the place of the candidate there.

    The candidate, at `z` (B, D), replaces its original and is tied as that would be; one that is not in the
    gallery comes last among ties. Beyond the first k it is the last of the list. Images of all cameras count.
    """
    seat, labels = gallery.z[asker], gallery.labels[asker]
    asking = Queries(seat, labels, asker)
    level = square_distance(seat, z)
    own = keys_of(level, torch.where(queries.own < 0, len(gallery), queries.own))[:, None]
    place = torch.ones_like(asker)
    for block in gallery.blocks():
        square = distances(seat, gallery.z[block])
        exclude(square, torch.inf, asking, gallery, block, queries.own)
        place += (keys_of(square, torch.arange(block.start, block.stop, device=z.device)) < own).sum(1)
    found = nearest(seat, gallery, min(k, len(gallery)), asking)
    hidden = excluded(asking, gallery, slice(0, len(gallery)), queries.own).gather(1, found)
    lists = _listed(seat, found, hidden, labels, gallery)
    candidates = zip(level.sqrt().tolist(), (queries.labels == labels).tolist(), place.tolist(), strict=True)
    for first, (distance, right, where) in zip(lists, candidates, strict=True):
        del first[k - 1 :]
        first.insert(where - 1, Ranked(ITSELF, distance, right))
    return [Ranking(first, where) for first, where in zip(lists, place.tolist(), strict=True)]


def _listed(z: Tensor, found: Tensor, hidden: Tensor, labels: Tensor, gallery: Gallery) -> list[list[Ranked]]:
    """Return images (B, K) in the rankings of z (B, D) of classes (B,), without the hidden ones (B, K)."""
    far = square_distance(z[:, None], gallery.z[found]).sqrt()
    right = gallery.labels[found] == labels[:, None]
    rows = zip(found.tolist(), far.tolist(), right.tolist(), hidden.tolist(), strict=True)
    return [[Ranked(*entry) for *entry, out in zip(*row, strict=True) if not out] for row in rows]
