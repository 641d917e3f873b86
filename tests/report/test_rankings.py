"""What an attack did to single queries, against plain loops: lists, distances, places, values, targets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import Attack, Draws, Gallery, Queries, attack
from robustmetric.evaluation.attack import NetworkView
from robustmetric.report.rankings import ITSELF, Ranked, Ranking, rank_candidates, rank_for_queries
from tests.helpers import crowd, goals

pytestmark = pytest.mark.kernels

NAMES = ["ES", "CA-", "CA+(w=3)", "promote(side='candidate')"]

Listed = list[tuple[int, float, bool]]


class World(NamedTuple):
    """Queries, what they query, and where two attacks brought them: anywhere, and where there are ties."""

    queries: Queries
    gallery: Gallery
    moved: dict[str, Tensor]


def worlds() -> dict[str, World]:
    gallery = crowd.make_gallery()
    queries, seen = crowd.make_queries(gallery), crowd.make_seen(gallery)
    moved = crowd.make_moved(queries)
    ends = {"moved": moved, "tied": crowd.make_tied(queries, gallery, moved)}
    inside = Queries(gallery.z, gallery.labels, torch.arange(40))
    return {
        "own gallery": World(
            inside, gallery, {"moved": crowd.make_moved(inside), "tied": gallery.z.roll(3, 0)}
        ),
        "another gallery": World(queries, gallery, ends),
        "cameras": World(crowd.make_asked(queries, seen), replace(seen, chunk=7), ends),
    }


WORLDS = worlds()


def aimed(which: Attack, world: World, seed: int = 0) -> Tensor:
    draws = Draws(seed, which.drawn_as, range(len(world.queries)))
    return which.select(world.queries, world.gallery, draws=draws)


def rankings_of(
    which: Attack, world: World, z: Tensor, k: int, seed: int = 0
) -> list[tuple[int | None, Ranking]]:
    """Rank at z, where a search may have brought the queries, as the attack does; with who asks."""
    queries, gallery = world.queries, world.gallery
    if which.perturbs == "candidate":
        asker = aimed(which, world, seed)[:, 0]
        return list(zip(asker.tolist(), rank_candidates(asker, z, queries, gallery, k), strict=True))
    images = torch.zeros(len(queries), 1, 2, 2)
    view = NetworkView(nn.Flatten(), images, queries, gallery, images)
    return [(None, ranking) for ranking in rank_for_queries(view, z, queries, k)]


def as_query(z: Tensor, row: int, world: World, k: int) -> tuple[Listed, int | None]:
    """Rank what counts for a query by a loop; say where the first of its class is."""
    label = int(world.queries.labels[row])
    order = sorted(
        (goals.square(z.tolist(), world.gallery.z[p].tolist()), p)
        for p in goals.counted(row, world.queries, world.gallery)
    )
    ranked = [
        (p, math.dist(z.tolist(), world.gallery.z[p].tolist()), int(world.gallery.labels[p]) == label)
        for _, p in order
    ]
    places = [place for place, (_, _, right) in enumerate(ranked, 1) if right]
    return ranked[:k], min(places, default=None)


def as_candidate(z: Tensor, row: int, asker: int, world: World, k: int) -> tuple[Listed, int]:
    """Rank all images for an asker by a loop, the candidate at z instead of its original."""
    images, labels, own = world.gallery.z, world.gallery.labels, int(world.queries.own[row])
    seat, label = images[asker].tolist(), int(labels[asker])
    entries = [
        (goals.square(seat, images[p].tolist()), p, p, math.dist(seat, images[p].tolist()), int(labels[p]))
        for p in range(len(images))
        if p not in (asker, own)
    ]
    # In the place of its original where it is tied, and behind all others if it has none.
    order = own if own >= 0 else len(images)
    mine = goals.square(seat, z.tolist())
    entries.append((mine, order, -1, math.dist(seat, z.tolist()), int(world.queries.labels[row])))
    ranked = [(p, far, kind == label) for _, _, p, far, kind in sorted(entries)]
    (place,) = (place for place, (p, _, _) in enumerate(ranked, 1) if p == -1)
    return (ranked[:k] if place <= k else [*ranked[: k - 1], ranked[place - 1]]), place


def check(row: int, asker: int | None, found: Ranking, z: Tensor, world: World, k: int) -> None:
    """Compare a ranking with that of a loop in double precision."""
    wanted: Listed
    if asker is None:
        wanted, place = as_query(z, row, world, k)
    else:
        wanted, place = as_candidate(z, row, asker, world, k)
    assert found.place == place
    assert [(one.position, one.right) for one in found.first] == [(p, right) for p, _, right in wanted]
    # Squares are rounded to single precision, and so are their roots.
    assert [one.distance for one in found.first] == pytest.approx(
        [far for _, far, _ in wanted], rel=2e-7, abs=1e-9
    )


@pytest.mark.parametrize("k", [1, 5, 1000])
@pytest.mark.parametrize("end", ["benign", "moved", "tied"])
@pytest.mark.parametrize("title", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_lists_and_places_against_plain_loops(name: str, title: str, end: str, k: int) -> None:
    which, world = attack(name), WORLDS[title]
    z = {"benign": world.queries.z, **world.moved}[end]
    found = rankings_of(which, world, z, k)
    for row, (asker, ranking) in enumerate(found):
        check(row, asker, ranking, z[row], world, k)
    if k == 1000:
        own = world.queries.own >= 0
        every = [len(goals.counted(row, world.queries, world.gallery)) for row in range(len(own))]
        # An asker ranks all but itself, and a candidate instead of its original.
        wanted = every if name == "ES" else [39 + (not inside) for inside in own.tolist()]
        assert [len(ranking.first) for _, ranking in found] == wanted


def test_a_reference_s_candidate_may_ask_for_itself() -> None:
    """Its targets are drawn from all images: a perturbed image then stands in the ranking of its original."""
    which, world = attack("CA+", protocol="reference"), WORLDS["own gallery"]
    for z in (world.queries.z, world.moved["moved"]):
        every = [enumerate(rankings_of(which, world, z, 5, seed)) for seed in range(3)]
        own = [(row, asker, found) for one in every for row, (asker, found) in one if asker == row]
        assert own
        for row, asker, found in own:
            check(row, asker, found, z[row], world, 5)
            assert all(one.position != row for one in found.first)
            if z is world.queries.z:
                assert found.first[0] == Ranked(ITSELF, 0.0, True)
