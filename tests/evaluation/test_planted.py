"""Adversaries that are known to be there: the planted ones are, and the worst-case suite finds them."""

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
