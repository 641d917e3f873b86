"""Each destination against its formula, what it remembers, and what it refuses."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import robustmetric as rm
from robustmetric.destination import (
    Benign,
    Boosted,
    Constant,
    Destination,
    FollowsLoss,
    Gradual,
    OfMargin,
)
from robustmetric.sphere import cross_distance
from robustmetric.triplets import (
    Batch,
    Distance,
    Hardest,
    Mined,
    Random,
    Sampler,
    Semihard,
    Softhard,
    Triplets,
)

pytestmark = pytest.mark.kernels

GAMMA = 0.2
LABELS = torch.tensor([0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 3, 3])
SAMPLERS: list[Sampler] = [Random(), Semihard(), Softhard(), Distance(), Hardest()]


def distances(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    z = torch.randn(len(LABELS), 8, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return cross_distance(torch.nn.functional.normalize(z, dim=1))


class Plain(Sampler):
    """A sampler without an equality."""

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        return Random()(batch, generator=generator)


@dataclass(frozen=True)
class Equal(Plain):
    k: int = 1


class Named(Plain):
    name = "mine"


DIST = distances()
BATCH = Batch(DIST, LABELS, 8)
MINED = Mined.of(BATCH, Random(), torch.Generator().manual_seed(1))
SOURCE = MINED.triplets


def hardness_of(source: Triplets, dist: Tensor) -> list[float]:
    return [float(dist[a, p]) - float(dist[a, n]) for a, p, n in source.stack().tolist()]


def value(destination: Destination, *, seed: int = 0) -> list[float]:
    """What a destination gives the triplets of R."""
    g = torch.Generator().manual_seed(seed)
    found: Tensor = destination(MINED, generator=g)
    assert found.shape == SOURCE.anchor.shape
    assert found.dtype == DIST.dtype
    listed: list[float] = found.tolist()
    return listed


def everywhere(number: float) -> object:
    """That number for each triplet."""
    return pytest.approx([number] * len(SOURCE.anchor), abs=1e-6)


def hardest() -> list[float]:
    """H of each anchor of the batch of pairs with its nearest negative, by a loop."""
    found = []
    for a in range(0, len(LABELS), 2):
        nearest = min(float(DIST[a, n]) for n in range(len(LABELS)) if LABELS[n] != LABELS[a])
        found.append(float(DIST[a, a + 1]) - nearest)
    return found


# --- Values that follow the loss: before the first iteration, then for losses below, at and above u.

LOSSES = [0.0, 0.05, 0.13, 0.2, 0.7, 2.2, 3.1]


@pytest.mark.parametrize(
    ("destination", "formula"),
    [
        (Gradual(), lambda loss: -0.2 * min(0.2, loss) / 0.2),
        (Gradual(power=2), lambda loss: -0.2 * (min(0.2, loss) / 0.2) ** 2),
        (Gradual(power=0.5), lambda loss: -0.2 * (min(0.2, loss) / 0.2) ** 0.5),
        (Gradual(u=2.2), lambda loss: -0.2 * min(2.2, loss) / 2.2),
        (Gradual(u=0.1), lambda loss: -0.2 * min(0.1, loss) / 0.1),
        (Gradual(margin=0.7), lambda loss: -0.7 * min(0.7, loss) / 0.7),
        (Gradual(power=2, margin=0.7, u=2.2), lambda loss: -0.7 * (min(2.2, loss) / 2.2) ** 2),
        (Boosted(Constant(-0.1)), lambda loss: -0.1 + 0.1 * (1 - min(0.2, loss) / 0.2)),
        (Boosted(Constant(-0.1), xi=0.4), lambda loss: -0.1 + 0.4 * (1 - min(0.2, loss) / 0.2)),
        (Boosted(Constant(0), u=2.2), lambda loss: 0.1 * (1 - min(2.2, loss) / 2.2)),
        (Boosted(Constant(0), xi=-0.3, u=0.1), lambda loss: -0.3 * (1 - min(0.1, loss) / 0.1)),
        (Boosted(Constant(0), margin=0.7), lambda loss: 0.1 * (1 - min(0.7, loss) / 0.7)),
        (Constant(-2), lambda loss: -2),
        (OfMargin(-1.5, margin=0.3), lambda loss: -0.45),
        (
            Boosted(Boosted(Gradual(power=0.5), u=1.0)),
            lambda loss: (
                -0.2 * (min(0.2, loss) / 0.2) ** 0.5
                + 0.1 * (1 - min(1.0, loss) / 1.0)
                + 0.1 * (1 - min(0.2, loss) / 0.2)
            ),
        ),
    ],
    ids=lambda part: str(part) if isinstance(part, Destination) else "",
)
def test_follows_the_loss(destination: Destination, formula: Callable[[float], float]) -> None:
    destination = copy.deepcopy(destination)
    assert value(destination) == everywhere(formula(math.inf))  # ℓ̄ = 1 before the first iteration
    for loss in LOSSES:
        destination.update(torch.tensor(loss))
        assert value(destination) == everywhere(formula(loss))
        assert value(destination) == everywhere(formula(loss))  # asking changes nothing


def test_gb_over_samplers() -> None:
    base = hardest()
    destination = Boosted(Benign(Hardest()))
    assert value(destination) == pytest.approx(base, abs=1e-6)
    destination.update(torch.tensor(0.05))
    assert value(destination) == pytest.approx([h + 0.1 * 0.75 for h in base], abs=1e-6)
    destination = Boosted(Benign(Hardest()), xi=0.5, u=2.2)
    destination.update(torch.tensor(1.1))
    assert value(destination) == pytest.approx([h + 0.25 for h in base], abs=1e-6)

    of_m = Boosted(Benign(Semihard()))
    of_m.update(torch.tensor(0.1))
    drawn = Semihard()(BATCH, generator=torch.Generator().manual_seed(7))
    assert value(of_m, seed=7) == pytest.approx([h + 0.05 for h in hardness_of(drawn, DIST)], abs=1e-6)


# --- What is remembered.


@pytest.mark.parametrize(
    "make",
    [
        Gradual,
        lambda: Gradual(power=2, u=2.2),
        lambda: Boosted(Benign(Hardest())),
        lambda: Boosted(Gradual(u=1.0), xi=0.3),
    ],
)
def test_state_is_saved_and_restored(make: Callable[[], FollowsLoss]) -> None:
    before, fresh = make(), make()
    at_first = value(fresh)
    first_state = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    before.update(torch.tensor(0.07))
    fresh.load_state_dict(before.state_dict())
    assert fresh.previous_loss.item() == pytest.approx(0.07)
    assert value(fresh) == value(before) != at_first
    fresh.load_state_dict(first_state)  # and from before the first iteration
    assert value(fresh) == at_first


# --- The hardness of benign triplets.


@pytest.mark.parametrize("other", SAMPLERS, ids=str)
@pytest.mark.parametrize("labels", [LABELS, torch.tensor([0, 1, 0, 2, 1, 0, 3, 3, 2, 1, 1, 0])])
def test_another_sampler_keeps_the_anchors(other: Sampler, labels: Tensor) -> None:
    batch = Batch(DIST, labels, 8)
    mined = Mined.of(batch, Semihard(margin=0.3), torch.Generator().manual_seed(4))
    found = Benign(other)(mined, generator=torch.Generator().manual_seed(5))
    drawn = other(batch, generator=torch.Generator().manual_seed(5))
    assert torch.equal(found, drawn.hardness(DIST))
    for a, h in zip(mined.triplets.anchor.tolist(), found.tolist(), strict=True):
        mates = [p for p in range(len(labels)) if p != a and labels[p] == labels[a]]
        others = [n for n in range(len(labels)) if labels[n] != labels[a]]
        possible = [float(DIST[a, p]) - float(DIST[a, n]) for p in mates for n in others]
        assert min(abs(h - q) for q in possible) < 1e-6


# --- Names and errors.


@pytest.mark.parametrize(
    ("destination", "name"),
    [
        (Gradual(), "LGA"),
        (Gradual(power=2), "g2"),
        (Gradual(power=0.5, u=1), "g1/2(u=1.0)"),
        (Constant(2), "2"),
        (Constant(-0.25), "-0.25"),
        (OfMargin(-0.5), "-γ/2"),
        (OfMargin(1), "γ"),
        (OfMargin(-1.5), "-3γ/2"),
        (Benign(Softhard()), "S"),
        (Benign(Named()), "mine"),
        (Benign(Plain()), "Plain"),
        (Boosted(Benign(Semihard())), "gB(M)"),
        (Boosted(Gradual(u=2.2), xi=0.3, u=1.5), "gB(LGA(u=2.2),ξ=0.3,u=1.5)"),
    ],
)
def test_names(destination: Destination, name: str) -> None:
    assert str(destination) == name


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Constant(3), "must be in [-2, 2], not 3: the range of hardness"),
        (lambda: OfMargin(-20), "must be in [-2, 2], not -4.0"),
        (lambda: OfMargin(1, margin=0), "margin must be in (0, 2], not 0"),
        (lambda: Gradual(u=0), "u must be a number above 0, not 0: the loss is clipped at u (γ by default)"),
        (lambda: Boosted(Constant(0), xi=math.nan), "ξ must be a finite number, not nan"),
        (lambda: Gradual(power=3), "power must be one of 1 (LGA), 2 (g2) and 0.5 (g1/2), not 3"),
        (lambda: Boosted("LGA"), "base must be a Destination, not 'LGA'"),  # type: ignore[arg-type]
        (lambda: Benign("S"), "sampler must be a Sampler, not 'S'"),  # type: ignore[arg-type]
    ],
)
def test_refuses(make: Callable[[], Destination], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make()


def test_a_destination_needs_the_anchors_of_its_source() -> None:
    class Backwards(Sampler):
        def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
            return Triplets(*(role.flip(0) for role in Random()(batch, generator=generator)))

    with pytest.raises(rm.UserError, match="Random and Backwards drew triplets of other anchors"):
        Benign(Backwards())(MINED, generator=torch.Generator())


# --- Samplers and destinations of one's own.


@pytest.mark.parametrize(
    ("source", "other", "same"),
    [
        (Named(), Named(), False),
        (SAMPLERS[0], SAMPLERS[0], True),
        (Equal(2), Equal(2), True),
        (Equal(2), Equal(3), False),
        (Semihard(margin=0.3), Semihard(), False),
    ],
)
def test_equal_samplers_are_one(source: Sampler, other: Sampler, same: bool) -> None:
    """HM[X,X] takes the source's own hardness; another sampler draws."""
    g = torch.Generator().manual_seed(3)
    mined = Mined.of(BATCH, source, g)
    before, all_of_torch = g.get_state(), torch.get_rng_state()
    found = Benign(other)(mined, generator=g)
    assert torch.equal(g.get_state(), before) == same
    assert not same or torch.equal(found, mined.triplets.hardness(DIST))
    assert torch.equal(torch.get_rng_state(), all_of_torch)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (0.1, "returned 0.1 for 6 triplets; it must return a floating-point tensor of shape (6,)"),
        (torch.zeros(()), "returned float32 of shape ()"),
        (torch.zeros(6, 1), "returned float32 of shape (6, 1)"),
        (torch.zeros(6, dtype=torch.long), "returned int64 of shape (6,)"),
        (torch.full((6,), math.nan), "returned NaN or infinity"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda mine: mine, Boosted], ids=["alone", "in gB"])
def test_a_destination_must_return_hardness(
    wrap: Callable[[Destination], Destination], returned: Any, says: str
) -> None:
    class Mine(Destination):
        def hardness(self, mined: Mined, *, generator: torch.Generator) -> Tensor:
            found: Tensor = returned
            return found

    with pytest.raises(rm.UserError, match=re.escape(f"Mine.hardness {says}")):
        wrap(Mine())(MINED, generator=torch.Generator())
