"""What an attack did to single queries, against plain loops: lists, distances, places, values, targets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import ATTACKS, PGD, Attack, Draws, Gallery, Queries, Target, attack
from robustmetric.evaluation import AttackResult, Threat
from robustmetric.evaluation.attack import NetworkView, embed_all, run_attack
from robustmetric.perturb import Budget
from robustmetric.report.shots import Ranked, Shot, take_shots
from tests.evaluation.conftest import make_network
from tests.helpers import crowd, goals

pytestmark = pytest.mark.kernels

SIDES = ["misrank(side='candidate')", "promote(side='candidate')", "demote(k=7,side='candidate')"]
EVERY = [*ATTACKS, *SIDES, "CA+(w=3)", "QA-(m=3)", "SP-QA+(m=3)", "misrank(by=2)"]

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


def shots_of(which: Attack, world: World, z: Tensor, k: int, seed: int = 0) -> list[Shot]:
    """Take shots of all queries, as if a search had brought them to z."""
    queries, gallery = world.queries, world.gallery
    images = torch.arange(2 * len(queries) * 4).view(2, -1, 1, 2, 2) / (8.0 * len(queries))
    target = which.aim(aimed(which, world, seed), queries, gallery)
    before, after = (which.measure(x, target, queries, gallery) for x in (queries.z, z))
    none = torch.zeros(len(queries))
    outcome = AttackResult(images[1], z, target, before, after, none, none, none, 0, 0, images[0])
    view = NetworkView(nn.Flatten(), images[0], queries, gallery, images[0])
    found = take_shots(view, which, torch.arange(len(queries)), outcome, k)
    for number, shot in enumerate(found):
        assert (shot.attack, shot.number) == (which.name, number)
        assert torch.equal(shot.image, images[0, number])
        assert torch.equal(shot.perturbed, images[1, number])
        for column, values in shot.values.items():
            wanted = [float(before[column][number]), float(after[column][number])]
            assert values == pytest.approx(wanted, abs=0, nan_ok=True)
        # All pixels are half of the range apart.
        assert shot.change == 0.5
    return found


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


def check_lists(shot: Shot, ends: tuple[Tensor, Tensor], world: World, k: int) -> None:
    """Compare the lists and the places of a shot with those of loops in double precision."""
    for z, found, place in zip(ends, (shot.before, shot.after), shot.place, strict=True):
        if shot.asker is None:
            wanted, expected = as_query(z, shot.number, world, k)
        else:
            wanted, expected = as_candidate(z, shot.number, shot.asker, world, k)
        assert place == expected
        assert [(entry.position, entry.right) for entry in found] == [(p, right) for p, _, right in wanted]
        # Squares are rounded to single precision, and so are their roots.
        away = [far for _, far, _ in wanted]
        assert [entry.distance for entry in found] == pytest.approx(away, rel=2e-7, abs=1e-9)
        assert [entry.itself for entry in found] == [p == -1 for p, _, _ in wanted]


@pytest.mark.parametrize("title", WORLDS)
@pytest.mark.parametrize("name", EVERY)
def test_lists_and_places_against_plain_loops(name: str, title: str) -> None:
    which, world, k = attack(name), WORLDS[title], 5
    z = world.moved["tied"]
    index = aimed(which, world)
    for shot in shots_of(which, world, z, k):
        row = shot.number
        assert shot.targets == tuple(index[row].tolist())
        assert shot.asker == (shot.targets[0] if name[:2] == "CA" or "candidate" in name else None)
        check_lists(shot, (world.queries.z[row], z[row]), world, k)
        assert len(shot.before) == len(shot.after) == k


@pytest.mark.parametrize("k", [1, 39, 1000])
@pytest.mark.parametrize("title", WORLDS)
@pytest.mark.parametrize("name", ["ES", "CA-"])
def test_lists_of_any_length(name: str, title: str, k: int) -> None:
    """One image may be all that is asked for, or more than there are."""
    which, world = attack(name), WORLDS[title]
    shots = shots_of(which, world, world.moved["tied"], k)
    for shot in shots:
        ends = (world.queries.z[shot.number], world.moved["tied"][shot.number])
        check_lists(shot, ends, world, k)
    if k == 1000:
        own = world.queries.own >= 0
        every = [len(goals.counted(row, world.queries, world.gallery)) for row in range(len(own))]
        # An asker ranks all but itself, and a candidate instead of its original.
        wanted = every if name == "ES" else [39 + (not inside) for inside in own.tolist()]
        assert [len(shot.before) for shot in shots] == wanted


def test_the_worlds_hold_what_can_be_told_wrongly() -> None:
    """Queries without mates, ties with a candidate on both of its sides, candidates in front and beyond."""
    unanswered = [
        sum(shot.place == (None, None) for shot in shots_of(attack("ES"), world, world.moved["moved"], 5))
        for world in WORLDS.values()
    ]
    assert unanswered == [1, 2, 6]
    world = WORLDS["own gallery"]
    shots = [
        shot for seed in range(3) for shot in shots_of(attack("CA+"), world, world.moved["tied"], 40, seed)
    ]
    ties = {
        (one.itself, other.itself)
        for shot in shots
        for one, other in zip(shot.after, shot.after[1:], strict=False)
        if one.distance == other.distance
    }
    assert {(True, False), (False, True)} <= ties
    places = [shot.place[1] or 0 for shot in shots]
    assert min(places) == 1
    assert max(places) == 39


def test_no_query_has_a_mate() -> None:
    world, numbers = WORLDS["another gallery"], torch.tensor([6, 17])
    which = attack("ES")
    queries, some = world.queries, world.queries[numbers]
    assert [int(label) for label in some.labels] == [5, 9]
    target = Target(aimed(which, world)[numbers])
    values = which.measure(some.z, target, some, world.gallery)
    none = torch.zeros(2)
    blank = torch.zeros(2, 1, 2, 2)
    outcome = AttackResult(blank, some.z, target, values, values, none, none, none, 0, 0, blank)
    view = NetworkView(
        nn.Flatten(), torch.zeros(18, 1, 2, 2), queries, world.gallery, torch.zeros(40, 1, 2, 2)
    )
    shots = take_shots(view, which, numbers, outcome, 3)
    assert [(shot.number, shot.place) for shot in shots] == [(6, (None, None)), (17, (None, None))]
    assert not any(entry.right for shot in shots for entry in shot.before)
    assert all(math.isnan(value) for shot in shots for value in shot.values["ES:R"])


def test_a_reference_s_candidate_may_ask_for_itself() -> None:
    """Its targets are drawn from all images: a perturbed image then stands in the ranking of its original."""
    which, world = attack("CA+", protocol="reference"), WORLDS["own gallery"]
    z = world.moved["moved"]
    shots = [shot for seed in range(3) for shot in shots_of(which, world, z, 5, seed)]
    own = [shot for shot in shots if shot.asker == shot.number]
    assert own
    for shot in own:
        check_lists(shot, (world.queries.z[shot.number], z[shot.number]), world, 5)
        assert shot.before[0] == Ranked(-1, 0.0, True)
        assert all(entry.position != shot.number for entry in (*shot.before, *shot.after))


def test_a_candidate_without_targets_is_shown_as_a_query() -> None:
    class Away(type(attack("ES"))):  # type: ignore[misc]
        name, perturbs = "away", "candidate"

    world = WORLDS["own gallery"]
    shots, usual = (shots_of(which, world, world.moved["moved"], 3) for which in (Away(), attack("ES")))
    assert [shot.asker for shot in shots] == [None] * 40
    assert [(s.before, s.after, s.place) for s in shots] == [(s.before, s.after, s.place) for s in usual]


@pytest.mark.parametrize("name", ["ES", "CA+", "QA+(m=2)", "GTT", "misrank", "promote(side='candidate')"])
def test_shots_of_a_search(name: str, images: Tensor, labels: Tensor) -> None:
    """From the images to the lists: what the network makes of the perturbed images is what is shown."""
    network, which, numbers = make_network().double(), attack(name), torch.tensor([31, 4, 17])
    images, everyone = images.double(), torch.arange(40)
    z = embed_all(network, images, everyone, 16)
    view = NetworkView(network, images, Queries(z, labels, everyone), Gallery(z, labels))
    found = run_attack(view, which, numbers, Threat(Budget(eps=0.1, alpha=0.03, steps=4), PGD()))
    shots = take_shots(view, which, numbers, found, 5)
    world = World(view.queries, view.gallery, {})
    assert [shot.number for shot in shots] == numbers.tolist()
    with torch.no_grad():
        ends = nn.functional.normalize(network(torch.stack([shot.perturbed for shot in shots])))
    assert max(shot.change for shot in shots) > 0  # what is won already is left alone
    for shot, end in zip(shots, ends, strict=True):
        assert torch.equal(shot.image, images[shot.number])
        assert shot.change <= 0.1 + 1e-12
        check_lists(shot, (z[shot.number], end), world, 5)
        assert {*shot.values} == {column.name for column in which.columns}
