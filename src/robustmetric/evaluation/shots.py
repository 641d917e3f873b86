"""What an attack did to single queries: the images, the targets, and the ranking before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robustmetric.attacks import Gallery, Queries, RankingAttack
from robustmetric.attacks.gallery import count_mates, count_nearer, nearest
from robustmetric.evaluation.scene import Outcome, Scene
from robustmetric.squares import square_distance


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

    `before` and `after` are the first images of a ranking. An image that queries has its own, and `place` is
    where the first of its class stands before and after, None if there is none. An image that is ranked for
    its targets stands in the ranking of the first of them, `asker`, and `place` is its own.
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
def take_shots(scene: Scene, attack: RankingAttack, numbers: Tensor, outcome: Outcome, k: int) -> list[Shot]:
    """Return what an `attack` did to the queries with these `numbers` (B,), with the first `k` of rankings.

    `outcome` is what `run_attack` returned for them in this `scene`.

    >>> import robustmetric as rm
    >>> from robustmetric.evaluation.scene import embed_all, run_attack
    >>> images, labels = torch.rand(6, 1, 2, 2), torch.arange(6) % 2
    >>> z = embed_all(torch.nn.Flatten(), images, torch.arange(6), batch=6)
    >>> scene = Scene(torch.nn.Flatten(), images, Queries(z, labels, torch.arange(6)), Gallery(z, labels))
    >>> budget = rm.Budget(eps=0.1, alpha=0.05, steps=4)
    >>> found = run_attack(scene, rm.attack("ES"), torch.tensor([3]), budget, rm.attacks.PGD())
    >>> (shot,) = take_shots(scene, rm.attack("ES"), torch.tensor([3]), found, k=2)
    >>> shot.attack, shot.number, len(shot.before), sorted(shot.values)
    ('ES', 3, 2, ['ES:D', 'ES:R'])
    """
    images, queries = scene.batch(numbers)
    gallery = scene.judged
    where = gallery.z.device
    queries, index = queries.to(where), outcome.target.index.to(where)
    lists, places = [], []
    for z in (queries.z, outcome.z.to(where)):
        if attack.perturbs == "candidate":
            lists.append(_askers_lists(z, index[:, 0], queries, gallery, k))
            places.append(_own_places(z, index[:, 0], queries, gallery))
        else:
            lists.append(_own_lists(z, queries, gallery, k))
            places.append(_first_places(scene, z, queries))
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
            lists[0][row],
            lists[1][row],
            (places[0][row], places[1][row]),
            int(index[row, 0]) if attack.perturbs == "candidate" else None,
        )
        for row, number in enumerate(numbers.tolist())
    ]


def _own_lists(z: Tensor, queries: Queries, gallery: Gallery, k: int) -> list[tuple[Ranked, ...]]:
    """Return the first k images for each query at z (B, D)."""
    found = nearest(z, gallery, min(k, len(gallery) - 1), without=queries.own, queries=queries)
    far = square_distance(z[:, None], gallery.z[found]).sqrt()
    right = gallery.labels[found] == queries.labels[:, None]
    return [
        tuple(map(Ranked, *row)) for row in zip(found.tolist(), far.tolist(), right.tolist(), strict=True)
    ]


def _askers_lists(
    z: Tensor, asker: Tensor, queries: Queries, gallery: Gallery, k: int
) -> list[tuple[Ranked, ...]]:
    """Return the first k for each asker (B,), with the candidate at z (B, D) instead of its original."""
    seat = gallery.z[asker]
    found = nearest(seat, gallery, min(k + 1, len(gallery) - 1), without=asker)
    far = square_distance(seat[:, None], gallery.z[found]).sqrt().tolist()
    mine = square_distance(seat, z).sqrt().tolist()
    lists = []
    for row, own in enumerate(queries.own.tolist()):
        label = int(gallery.labels[asker[row]])
        others = [
            Ranked(position, distance, int(gallery.labels[position]) == label)
            for position, distance in zip(found[row].tolist(), far[row], strict=True)
            if position != own
        ]
        itself = Ranked(-1, mine[row], int(queries.labels[row]) == label)
        lists.append(tuple(sorted([*others, itself], key=lambda ranked: ranked.distance)[:k]))
    return lists


def _own_places(z: Tensor, asker: Tensor, queries: Queries, gallery: Gallery) -> list[int | None]:
    """Return the place (B,) of each candidate at z (B, D) in the ranking of its asker (B,)."""
    seat = gallery.z[asker]
    nearer, _ = count_nearer(seat, square_distance(seat, z), gallery, (asker, queries.own))
    return [1 + count for count in nearer.tolist()]


def _first_places(scene: Scene, z: Tensor, queries: Queries) -> list[int | None]:
    """Return where the first image of each query's class stands in its ranking at z (B, D)."""
    places: list[int | None] = [None] * len(z)
    if (count_mates(queries, scene.judged, queries.own) > 0).any():
        here = scene.gallery.z.device
        found = scene.rank(z.to(here), queries.to(here))
        for row, first in zip(found.query.tolist(), found.first.tolist(), strict=True):
            places[row] = first
    return places
