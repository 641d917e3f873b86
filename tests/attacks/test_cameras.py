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
from tests.helpers.goals import GOALS, counted, square

pytestmark = pytest.mark.kernels

EVERY = [*dict.fromkeys([*ATTACKS, *GOALS])]


def cut(g: Gallery, chunk: int) -> Gallery:
    return Gallery(g.z, g.labels, chunk=chunk, cameras=g.cameras)


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
