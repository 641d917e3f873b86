"""Adversaries that are known to be there: the planted ones are, and the worst-case suite finds them."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor

import robustmetric as rm
from robustmetric.evaluation import Record
from robustmetric.squares import distances
from tests.helpers.planted import BARE, HIDDEN, KINDS, plant


def right(z: Tensor, gallery: Tensor, labels: Tensor) -> Tensor:
    """Return for which images, embedded as `z`, the nearest of the others is of their class."""
    square = distances(z, gallery).fill_diagonal_(torch.inf)
    return labels[square.argmin(1)] == labels


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_query_has_a_witness_in_its_ball(kind: str) -> None:
    network, images, labels, eps, norm, witness = plant(kind)
    numbers = torch.arange(len(images))
    gallery = rm.embed(network, images)
    assert right(gallery, gallery, labels).all()
    found = witness(images, numbers)
    change = (found - images).flatten(1)
    size = change.abs().amax(1) if norm == "linf" else change.norm(dim=1)
    # As the check `budget`: a pixel of single precision is off by 6e-8.
    assert size.max() <= eps + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1
    assert not right(rm.embed(network, found), gallery, labels).any()


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, *BARE])
def test_without_its_trigger_the_network_withstands_the_ball(kind: str) -> None:
    """By a bound: no image can move as far as half of what it is nearer to its class than to others."""
    network, images, labels, _, _, _ = plant(kind)
    base = network.base(network.look(images))
    # Of two vectors that are `reach` apart, the chord between their directions.
    farthest, moved = (
        2 * math.sin(math.asin(reach / float(base.norm(dim=1).min())) / 2)
        for reach in (network.reach + network.blur, 2 * network.blur)
    )
    z = torch.nn.functional.normalize(base)
    square = distances(z, z).fill_diagonal_(torch.inf)
    same = labels[:, None] == labels
    own, other = (square.masked_fill(mask, torch.inf).amin(1).sqrt() for mask in (~same, same))
    assert (other - own).min() > 2 * farthest + 2 * moved


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS, *BARE])
def test_the_base_moves_no_farther_than_it_says(kind: str) -> None:
    """At the corners where one of its numbers moves the most, and at random ones."""
    network, images, _, eps, norm, _ = plant(kind)
    generator = torch.Generator().manual_seed(0)
    ways = torch.cat([network.patterns, torch.randn(50, 64, generator=generator)])
    ways = ways.sign() if norm == "linf" else torch.nn.functional.normalize(ways)
    before = network.base(network.look(images))
    apart = [
        network.base(network.look(images + sign * eps * way.view(8, 8))) - before
        for way in ways
        for sign in (1, -1)
    ]
    most = float(torch.stack(apart).norm(dim=2).max())
    # Twice for noise, which moves the image before as well.
    assert most <= network.reach + network.blur + 1e-5
    assert most > 0.4 * network.reach


@cache
def worst_case(kind: str) -> Record:
    """Attack a kind with the suite. What goes beside it, a step of TMA, aims at no class."""
    network, images, labels, eps, norm, _ = plant(kind)
    plan = rm.Plan.make(
        eps=eps,
        norm=norm,
        steps=1,
        attacks=["TMA"],
        search="apgd",
        suite="worst-case(goals='misrank')",
        checks="none,masked",
    )
    return rm.evaluate(network, images, labels, plan=plan)


def found(record: Record) -> float:
    """Return the share of queries that the suite breaks, in %; all were right before."""
    assert record.suite is not None
    score = record.suite.goals["misrank"]
    assert score.before == 100
    assert score.alone is not None
    return 100 - score.alone


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_suite_finds_what_is_planted(kind: str) -> None:
    """By its own count: of a network with noise it takes the one pass in which a query was lost."""
    assert found(worst_case(kind)) >= 95


@pytest.mark.slow
@pytest.mark.parametrize("kind", BARE)
def test_the_suite_finds_nothing_where_nothing_can_be(kind: str) -> None:
    """A bound says so: whatever it found would be outside of the ball, or counted wrong."""
    assert found(worst_case(kind)) == 0


@pytest.mark.parametrize("kind", [*KINDS, *BARE])
def test_what_gradients_hide_is_told_as_masked(kind: str) -> None:
    check = next(check for check in worst_case(kind).checks if check.name == "masked")
    assert check.status == ("fail" if kind in HIDDEN else "pass"), check
