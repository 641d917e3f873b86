"""Exact search: the order of every other ranking, whatever the product in float32 rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from robustmetric.squares import distances, square_distance
from robustmetric.vectors import Vectors, exact
from tests.vectors.conftest import unit


def by_hand(z: Tensor, queries: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """Sort all by squared distance and then by position."""
    places, squares = [], []
    for row in distances(queries, z).tolist():
        order = sorted(range(len(row)), key=lambda place: (row[place], place))[:k]
        places.append(order)
        squares.append([row[place] for place in order])
    return places, squares


def search(z: Tensor, queries: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    found = Vectors(z, [""] * len(z)).search(queries, k)
    # The root of a float32 and back: what is told is the distance, what is ranked by is its square.
    return found.position.tolist(), found.distance.tolist()


def same(z: Tensor, queries: Tensor, k: int) -> None:
    places, squares = by_hand(z, queries, k)
    found, told = search(z, queries, k)
    assert found == places
    assert told == np.sqrt(np.array(squares, np.float32)).tolist()


@pytest.fixture(params=[64, 1 << 22], ids=["blocks", "whole"], autouse=True)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Search a few vectors at a time, and all at once."""
    monkeypatch.setattr(exact, "_NUMBERS", request.param)


@pytest.mark.parametrize(("count", "dim", "queries", "k"), [(200, 8, 20, 5), (50, 3, 7, 50), (9, 1, 3, 4)])
def test_the_nearest_of_random_vectors(count: int, dim: int, queries: int, k: int) -> None:
    same(unit(count, dim), unit(queries, dim, seed=1), k)


def test_copies_are_ranked_by_position() -> None:
    z = unit(7, 5)[torch.randint(7, (120,), generator=torch.Generator().manual_seed(1))]
    same(z, unit(9, 5, seed=2), 30)
    same(z, z[:9], 30)


def test_all_vectors_in_one_place() -> None:
    z = unit(1, 6).expand(90, -1).clone()
    assert search(z, unit(3, 6, seed=1), 4)[0] == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("dim", [4, 300])
def test_what_float32_cannot_tell_apart_is_told_apart(dim: int) -> None:
    """Vectors that differ in their last bits: their products round to the same numbers, or to wrong ones."""
    generator = torch.Generator().manual_seed(0)
    z = unit(1, dim) + 1e-7 * torch.randn(300, dim, generator=generator)
    z = z / z.double().norm(dim=1, keepdim=True).float()
    queries = F.normalize(unit(1, dim) + 0.3 * unit(6, dim, seed=1))
    product = (queries @ z.T).argsort(dim=1, descending=True, stable=True)[:, :20].tolist()
    assert product != by_hand(z, queries, 20)[0], "the product alone would do here"
    same(z, queries, 20)


@pytest.mark.parametrize("step", [1, -1])
def test_vectors_in_the_order_of_their_distance(step: int) -> None:
    """Each block is nearer than all before it, or farther."""
    angle = torch.linspace(0, 3, 150)[::step] if step > 0 else torch.linspace(0, 3, 150).flip(0)
    z = torch.stack([angle.cos(), angle.sin()], 1)
    same(z, torch.tensor([[1.0, 0.0]]), 6)


def test_more_queries_than_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_ROWS", 4)
    same(unit(60, 4), unit(11, 4, seed=1), 3)


@pytest.mark.parametrize("dim", [1, 2, 17, 512])
def test_the_product_is_as_near_to_the_truth_as_is_said(dim: int) -> None:
    x, y = unit(200, dim), unit(200, dim, seed=1)
    y[:100] = x[:100]
    y[100:150] = -x[100:150]
    product = (x.numpy() @ y.numpy().T).astype(np.float64)
    truth = torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist").square().numpy()
    off = max(float((v.double().square().sum(1) - 1).abs().max()) for v in (x, y))
    assert np.abs(truth - (2 - 2 * product)).max() <= exact._bound(dim, 2 * off)


def test_few_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search costs a product and little more."""
    measured = 0

    def counted(x: Tensor, y: Tensor) -> Tensor:
        nonlocal measured
        measured += len(x)
        return square_distance(x, y)

    monkeypatch.setattr(exact, "_NUMBERS", 1 << 16)
    monkeypatch.setattr(exact, "square_distance", counted)
    search(unit(8000, 64), unit(10, 64, seed=1), 10)
    # In the b-th of 8 blocks 10/b are expected to be nearer than all before: 27 a query.
    assert 10 * 10 <= measured < 10 * 60
