"""Margins, and who is nearest, against plain loops: ties, cameras, blocks, and what is not kept."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from robustmetric.attacks import Gallery, Queries, margin
from robustmetric.attacks.goals import surely_nearer
from robustmetric.attacks.margin import SLACK, kth_nearest, rivals, smooth_margin
from tests.helpers.goals import counted

pytestmark = pytest.mark.kernels


def cosine(x: Tensor, y: Tensor) -> float:
    return math.fsum(a * b for a, b in zip(x.tolist(), y.tolist(), strict=True))


@pytest.mark.parametrize("chunk", [1, 7, 8192])
@pytest.mark.parametrize("aims", [False, True])
def test_rivals_against_a_plain_loop(
    aims: bool, chunk: int, asked: Queries, seen: Gallery, moved: Tensor
) -> None:
    # Some aim at a class that is not there.
    aimed = torch.arange(18) % 7 if aims else None
    found = rivals(moved, asked, replace(seen, chunk=chunk), aimed)
    kinds, nobody = seen.labels.tolist(), 0
    for i in range(18):
        label = int(asked.labels[i])
        near = {p: cosine(moved[i], seen.z[p]) for p in range(40)}
        mates = [near[p] for p in counted(i, asked, seen) if kinds[p] == label]
        others = [near[p] for p in range(40) if kinds[p] != label]
        goals = others if aimed is None else [near[p] for p in near if kinds[p] == aimed[i] != label]
        assert float(found.right_cosine[i]) == pytest.approx(max(mates, default=-math.inf), abs=1e-12)
        assert float(found.wrong_cosine[i]) == pytest.approx(max(goals, default=-math.inf), abs=1e-12)
        assert float(found.any_wrong[i]) == pytest.approx(max(others), abs=1e-12)
        assert bool(found.answered[i]) == (bool(mates) and bool(goals))
        nobody += not found.answered[i]
        if mates:
            assert near[int(found.right[i])] == pytest.approx(max(mates), abs=1e-12)
            assert int(found.right[i]) in counted(i, asked, seen)
            assert kinds[int(found.right[i])] == label
        if goals:
            assert near[int(found.wrong[i])] == pytest.approx(max(goals), abs=1e-12)
            assert kinds[int(found.wrong[i])] != label
        assert bool(found.misranked[i]) == bool(mates and goals and max(others) > max(mates) + SLACK)
    assert 0 < nobody < 18


@pytest.mark.parametrize("chunk", [1, 7, 8192])
@pytest.mark.parametrize("k", [1, 2, 9, 30])
@pytest.mark.parametrize("cameras", [False, True])
def test_the_kth_nearest_against_a_plain_loop(
    k: int, chunk: int, cameras: bool, asked: Queries, seen: Gallery, moved: Tensor
) -> None:
    other = (torch.arange(18) * 3) % 40
    asking = asked if cameras else asked.any_camera
    place, value = kth_nearest(moved, replace(seen, chunk=chunk), k, asking, other)
    for i in range(18):
        left = counted(i, asked, seen) if cameras else [p for p in range(40) if p != int(asked.own[i])]
        near = {p: cosine(moved[i], seen.z[p]) for p in left if p != int(other[i])}
        wanted = sorted(near.values(), reverse=True)[k - 1] if len(near) >= k else -math.inf
        assert float(value[i]) == pytest.approx(wanted, abs=1e-12)
        if len(near) >= k:
            assert near[int(place[i])] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("tau", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("chunk", [7, 8192])
def test_the_smooth_margin_has_the_gradient_of_its_value(
    tau: float, chunk: int, asked: Queries, seen: Gallery, moved: Tensor
) -> None:
    cut = replace(seen, chunk=chunk)
    leaf = moved.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: smooth_margin(z, asked, cut, tau)[0], (leaf,), atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_what_is_too_much_to_keep_is_computed_anew(
    chunk: int, asked: Queries, seen: Gallery, moved: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, weights = replace(seen, chunk=chunk), torch.arange(1.0, 19.0, dtype=torch.float64)
    passes, real = [], margin._distances

    def noted(*args: Any) -> Any:
        passes.append(1)
        return real(*args)

    monkeypatch.setattr(margin, "_distances", noted)

    def computed() -> tuple[Tensor, Tensor, Tensor]:
        leaf = moved.clone().requires_grad_()
        value, near = smooth_margin(leaf, asked, cut, 0.05)
        return value.detach(), near, torch.autograd.grad((weights * value).sum(), leaf)[0]

    monkeypatch.setattr(margin, "_KEPT", 18 * 40)
    kept = computed()
    assert len(passes) == 1
    monkeypatch.setattr(margin, "_KEPT", 18 * 40 - 1)
    torch.testing.assert_close(computed(), kept, rtol=0, atol=0)
    assert len(passes) == 3


def test_a_smooth_margin_is_sharp_where_the_temperature_is_low(
    asked: Queries, seen: Gallery, moved: Tensor
) -> None:
    """Of m distances the soft minimum lies below the least, by τ · log m at most."""
    found = rivals(moved, asked, seen)
    gap = (2 - 2 * found.wrong_cosine).sqrt() - (2 - 2 * found.right_cosine).sqrt()
    for tau in (0.5, 0.05, 0.005):
        value, _ = smooth_margin(moved, asked, seen, tau)
        assert (value - gap)[found.answered].abs().max() <= tau * math.log(40)
        assert not value[~found.answered].any()


def test_single_precision_keeps_the_smooth_margin_of_a_copy(gallery: Gallery, queries: Queries) -> None:
    """A copy's square is 1e-7 off: the distance may come out as 1e-3 and not as 0, and no number breaks."""
    single, q = replace(gallery, z=gallery.z.float()), replace(queries, z=queries.z.float())
    leaf = q.z.clone().requires_grad_()
    value, near = smooth_margin(leaf, q, single, 0.05)
    wanted, exactly = smooth_margin(queries.z, queries, gallery, 0.05)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(value.double(), wanted, rtol=0, atol=2e-3)
    assert slope.isfinite().all()
    assert torch.equal(near, exactly)


def test_what_is_surely_nearer_is_told_by_cosines() -> None:
    place = torch.tensor([[1.0, 0.0]])

    def at(cosine: float) -> Tensor:
        return torch.tensor([[cosine, math.sqrt(1 - cosine**2)]])

    assert surely_nearer(at(0.9), at(0.9 - 1.1 * SLACK), place)
    assert not surely_nearer(at(0.9), at(0.9 - 0.9 * SLACK), place)
    assert not surely_nearer(at(0.5), at(0.9), place)
    assert not surely_nearer(at(1.0), at(1 - 0.5 * SLACK), place), "distances of 0 and 0.01"
    assert not surely_nearer(at(0.9).requires_grad_(), at(0.5), place).requires_grad
