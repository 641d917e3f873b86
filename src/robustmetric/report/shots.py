"""What an attack did to single queries: the images, the targets, and the ranking before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robustmetric.attacks import Attack, Gallery, Queries
from robustmetric.evaluation.attack import AttackResult, NetworkView
from robustmetric.gallery import count_mates, exclude, excluded, nearest
from robustmetric.squares import distances, keys_of, square_distance


@dataclass(frozen=True)
class Ranked:
    """An image in a ranking: its `position` in the gallery, its `distance`, and whether it is `right`.

    Right is an image of the class of the one that queries. The position is −1 for the perturbed image itself,
    where that is ranked.
    """

    position: int
    distance: float
    right: bool

    @property
    def itself(self) -> bool:
        """Whether it is the perturbed image."""
        return self.position < 0


@dataclass(frozen=True, eq=False)
class Shot:
    """A query under an attack.

    `number` is that of the query, `image` and `perturbed` (C, H, W) are it before and after, `targets` the
    positions in the gallery that it aims at. `values` has each of the attack's columns, before and after.

    `before` and `after` are the first images of a ranking by the definitions, whatever the protocol. An image
    that queries has its own, and `place` is where the first of its class stands before and after, None if
    there is none. An image that is ranked for its targets stands instead of its original in the ranking of
    the first of them, `asker`, which is of all images, whatever their camera; `place` is its own, and where
    it is not among the first, it is the last of the list.
    """

    attack: str
    number: int
    image: Tensor
    perturbed: Tensor
    targets: tuple[int, ...]
    values: Mapping[str, tuple[float, float]]
    before: tuple[Ranked, ...]
    after: tuple[Ranked, ...]
    place: tuple[int | None, int | None]
    asker: int | None = None

    @property
    def change(self) -> float:
        """The largest change of a pixel."""
        return float((self.perturbed - self.image).abs().max())


@torch.no_grad()
def take_shots(
    view: NetworkView, attack: Attack, numbers: Tensor, outcome: AttackResult, k: int
) -> list[Shot]:
    """Return what an `attack` did to the queries with these `numbers` (B,), with the first `k` of rankings.

    `outcome` is what `run_attack` returned for them in this `view`.
    """
    images, queries = outcome.originals, view.asking(numbers)
    gallery = view.ranking_gallery
    where = gallery.z.device
    queries, index = queries.to(where), outcome.target.index.to(where)
    ranked = attack.perturbs == "candidate" and index.shape[1] > 0
    before, after = (
        _as_candidate(z, index[:, 0], queries, gallery, k) if ranked else _as_query(view, z, queries, k)
        for z in (queries.z, outcome.z.to(where))
    )
    return [
        Shot(
            attack.name,
            number,
            images[row].cpu(),
            outcome.images[row].detach().cpu(),
            tuple(index[row].tolist()),
            {
                c.name: (float(outcome.before[c.name][row]), float(outcome.after[c.name][row]))
                for c in attack.columns
            },
            before[row][0],
            after[row][0],
            (before[row][1], after[row][1]),
            int(index[row, 0]) if ranked else None,
        )
        for row, number in enumerate(numbers.tolist())
    ]


_Ranking = tuple[tuple[Ranked, ...], int | None]
"""The first images of a ranking, and the place that counts."""


def _as_query(view: NetworkView, z: Tensor, queries: Queries, k: int) -> list[_Ranking]:
    """Return the first k images for each query at z (B, D), and the place of the first of its class."""
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
    return [(tuple(first), places.get(row)) for row, first in enumerate(lists)]


def _as_candidate(z: Tensor, asker: Tensor, queries: Queries, gallery: Gallery, k: int) -> list[_Ranking]:
    """Return the first k images for each asker (B,), and the place of the candidate at z (B, D) there.

    It stands instead of its original, and where it is tied as that would; one that is none of the gallery's
    images comes behind them.
    """
    seat, labels = gallery.z[asker], gallery.labels[asker]
    asking = Queries(seat, labels, asker)  # all images count, whatever their camera
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
    itself = map(Ranked, [-1] * len(z), level.sqrt().tolist(), (queries.labels == labels).tolist())
    rankings = []
    for first, one, where in zip(lists, itself, place.tolist(), strict=True):
        del first[k - 1 :]
        first.insert(where - 1, one)
        rankings.append((tuple(first), where))
    return rankings


def _listed(z: Tensor, found: Tensor, hidden: Tensor, labels: Tensor, gallery: Gallery) -> list[list[Ranked]]:
    """Return images (B, K) in the rankings of z (B, D) of classes (B,), without the hidden ones (B, K)."""
    far = square_distance(z[:, None], gallery.z[found]).sqrt()
    right = gallery.labels[found] == labels[:, None]
    rows = zip(found.tolist(), far.tolist(), right.tolist(), hidden.tolist(), strict=True)
    return [[Ranked(*entry) for *entry, out in zip(*row, strict=True) if not out] for row in rows]
