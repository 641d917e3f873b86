"""Attacks by the rule of cameras against plain loops, and single precision where they search."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from robustmetric import sphere
from robustmetric.attacks import ATTACKS, Draws, Gallery, Queries, attack, hit_at_1, nearest
from robustmetric.gallery import count_mates, count_nearer, excluded
from tests.helpers.goals import GOALS, aimed, counted, square

pytestmark = pytest.mark.kernels

SEEN = ("ES", "LTM", "GTM", "GTT", "misrank", "translocate")  # which rank by the rule
EVERY = [*dict.fromkeys([*ATTACKS, *GOALS])]
BLIND = [name for name in EVERY if name.partition("(")[0] not in SEEN]


def cut(g: Gallery, chunk: int) -> Gallery:
    return Gallery(g.z, g.labels, chunk=chunk, cameras=g.cameras)


def test_the_rule_leaves_something_to_be_seen(asked: Queries, seen: Gallery) -> None:
    """The other tests say something only if there are queries of each kind."""
    left = [len(counted(i, asked, seen)) for i in range(18)]
    plain = [40 - int(own >= 0) for own in asked.own.tolist()]
    assert sum(a < b for a, b in zip(left, plain, strict=True)) > 9
    mates = [
        sum(int(seen.labels[p]) == int(asked.labels[i]) for p in counted(i, asked, seen)) for i in range(18)
    ]
    assert 0 in mates
    assert max(mates) > 3
    blind = Queries(asked.z, asked.labels, asked.own)
    assert sum(aimed(attack("GTT"), asked, seen)[:, 0] != aimed(attack("GTT"), blind, seen)[:, 0]) > 2


@pytest.mark.parametrize("chunk", [7, 8192])
def test_who_is_excluded_and_mates(chunk: int, asked: Queries, seen: Gallery) -> None:
    pieces, extra = cut(seen, chunk), (torch.arange(18) * 3) % 40
    found = torch.cat([excluded(asked, pieces, block) for block in pieces.blocks()], dim=1)
    more = torch.cat([excluded(asked, pieces, block, extra) for block in pieces.blocks()], dim=1)
    mates = count_mates(asked, pieces)
    free = count_mates(replace(asked, own=torch.full((18,), -1)), pieces)
    assert asked.cameras is not None
    assert seen.cameras is not None
    for i in range(18):
        own, label, camera = (int(t[i]) for t in (asked.own, asked.labels, asked.cameras))
        mine = [int(seen.labels[p]) == label and int(seen.cameras[p]) == camera for p in range(40)]
        assert found[i].tolist() == [p not in counted(i, asked, seen) for p in range(40)]
        assert more[i].nonzero()[:, 0].tolist() == sorted({*found[i].nonzero()[:, 0].tolist(), int(extra[i])})
        others = [p for p in counted(i, asked, seen) if int(seen.labels[p]) == label]
        assert int(mates[i]) == len(others)
        # A query that is not known to be in the gallery is left out of it by its camera all the same.
        assert int(free[i]) == len(others) + int(own >= 0 and not mine[own])


@pytest.mark.parametrize("chunk", [7, 8192])
@pytest.mark.parametrize("where", ["moved", "tied", "benign"])
def test_the_nearest_that_count(
    chunk: int, where: str, asked: Queries, seen: Gallery, moved: Tensor, tied: Tensor
) -> None:
    z = {"moved": moved, "tied": tied, "benign": asked.z}[where]
    pieces = cut(seen, chunk)
    found = nearest(z, pieces, 5, asked)
    level = torch.full((18,), 1.0)
    nearer, level_with = count_nearer(z, level, pieces, asked)
    hits = hit_at_1(z, asked, pieces)
    for i in range(18):
        far = sorted((square(z[i].tolist(), seen.z[p].tolist()), p) for p in counted(i, asked, seen))
        assert found[i].tolist() == [p for _, p in far[:5]]
        assert (int(nearer[i]), int(level_with[i])) == (
            sum(f < 1 for f, _ in far),
            sum(f == 1 for f, _ in far),
        )
        labels = [int(seen.labels[p]) == int(asked.labels[i]) for _, p in far]
        wanted = 100.0 * labels[0] if any(labels) else math.nan
        assert float(hits[i]) == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("name", BLIND)
def test_the_others_rank_the_whole_gallery(
    name: str, asked: Queries, seen: Gallery, gallery: Gallery, queries: Queries, tied: Tensor
) -> None:
    which = attack(name)
    index = aimed(which, asked, seen)
    assert torch.equal(index, aimed(which, queries, gallery))
    with_, without = (which.aim(index, q, g) for q, g in ((asked, seen), (queries, gallery)))
    assert torch.equal(
        which.objective(tied, with_, asked, seen), which.objective(tied, without, queries, gallery)
    )
    found = which.measure(tied, with_, asked, seen)
    for key, value in which.measure(tied, without, queries, gallery).items():
        assert torch.equal(found[key], value)


@pytest.mark.parametrize("name", EVERY)
def test_cameras_that_took_nothing_else_change_nothing(
    name: str, gallery: Gallery, queries: Queries, tied: Tensor
) -> None:
    lone = Gallery(gallery.z, gallery.labels, cameras=torch.arange(40))
    alone = Queries(queries.z, queries.labels, queries.own, torch.arange(40, 58))
    which, found = attack(name), []
    for q, g in ((alone, lone), (queries, gallery)):
        target = which.aim(aimed(which, q, g), q, g)
        values = [which.objective(tied, target, q, g), *which.measure(tied, target, q, g).values()]
        found.append(torch.stack(values))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


def test_some_of_the_queries_keep_their_cameras(asked: Queries, seen: Gallery, tied: Tensor) -> None:
    rows = torch.tensor([17, 2, 8, 0])
    whole = hit_at_1(tied, asked, seen)
    some = hit_at_1(tied[rows], asked[rows], seen)
    torch.testing.assert_close(some, whole[rows], rtol=0, atol=0, equal_nan=True)


# Single precision


class NoDouble(TorchDispatchMode):
    """Refuses whatever makes numbers in double precision, as Apple's GPUs do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{func} makes double precision")
        return found


def test_double_precision_is_noticed() -> None:
    with pytest.raises(TypeError, match="double precision"), NoDouble():
        sphere.cross_distance(torch.eye(2))
    z = torch.eye(2).requires_grad_()
    value = z.double().float().sum()
    with pytest.raises(TypeError, match="double precision"), NoDouble():
        torch.autograd.grad(value, z)


@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        *((name, "strict") for name in [*EVERY, "CA+(w=3)", "QA-(m=3)", "SP-QA+(m=3)"]),
        *((name, "reference") for name in ("CA-", "QA+", "ES", "LTM", "GTM", "GTT")),
    ],
)
def test_a_search_needs_no_double_precision(
    name: str,
    protocol: str,
    asked: Queries,
    seen: Gallery,
    moved: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Objective, gradient and what is prepared for them run on a device without it, where z is."""
    which = attack(name, protocol=protocol)
    g = Gallery(seen.z.float(), seen.labels, chunk=7, cameras=seen.cameras)
    q = Queries(asked.z.float(), asked.labels, asked.own, asked.cameras)
    index = which.select(q, g, draws=Draws(0, which.name, range(18)))
    wanted = which.objective(moved.float(), which.aim(index, q, g), q, g)
    monkeypatch.setattr(sphere, "wide_dtype", lambda _: torch.float32)
    z = moved.float().requires_grad_()
    with NoDouble():
        value = which.objective(z, which.aim(index, q, g), q, g)
        (slope,) = torch.autograd.grad(value.sum(), z)
        images = torch.rand(18, 1, 4, 4)
        start = which.start(images, draws=Draws(0, which.name, range(18)))
    assert (value.dtype, slope.dtype) == (torch.float32, torch.float32)
    assert start is None or start.dtype == torch.float32
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-3)
    assert slope.isfinite().all()
    assert slope.any()
