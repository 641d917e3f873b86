"""The map of embeddings: the plane of two components, against numpy's decompositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from robustmetric.report.plane import Map, Plane, draw_map

pytestmark = pytest.mark.kernels

Doubles = NDArray[np.float64]
ROUNDED = 0.5e-4 + 1e-9  # four digits are kept


def cloud(images: int, dim: int, seed: int = 0) -> Tensor:
    """Points on the unit sphere that spread over every axis differently, in single precision."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(images, dim, generator=generator) * torch.linspace(2, 0.3, dim) + 0.2
    return torch.nn.functional.normalize(z)


def by_eigh(z: Doubles) -> tuple[Doubles, Doubles, list[float]]:
    """Return the centre, two components and their shares by the covariance."""
    centre = z.mean(0)
    values, vectors = np.linalg.eigh((z - centre).T @ (z - centre))
    order = np.argsort(values)[::-1][:2]
    return centre, vectors[:, order].T, [float(values[k] / values.sum()) for k in order]


@pytest.mark.parametrize(("images", "dim"), [(50, 8), (9, 40), (400, 2), (3, 3)])
def test_shares_and_coordinates_against_numpy(images: int, dim: int) -> None:
    z = cloud(images, dim)
    plane = Plane.of(z)
    centre, axes, shares = by_eigh(z.double().numpy())
    assert plane.shares == pytest.approx(shares, abs=ROUNDED)
    found = np.array(plane.flat(z))
    wanted = (z.double().numpy() - centre) @ axes.T
    for k in range(2):
        sign = np.sign(found[:, k] @ wanted[:, k])
        assert np.abs(found[:, k] - sign * wanted[:, k]).max() <= ROUNDED
    _, spread, right = np.linalg.svd(z.double().numpy() - centre, full_matrices=False)
    assert plane.shares == pytest.approx((spread**2 / (spread**2).sum())[:2], abs=ROUNDED)
    assert np.abs(np.abs((plane.axes.numpy() * right[:2]).sum(1)) - 1).max() < 1e-9


def test_the_largest_entry_of_a_component_is_positive() -> None:
    for seed in range(5):
        axes = Plane.of(cloud(30, 6, seed)).axes
        assert (axes.gather(1, axes.abs().argmax(1, keepdim=True)) > 0).all()


def test_points_of_one_dimension_lie_on_a_line() -> None:
    plane = Plane.of(torch.tensor([[1.0], [-1.0], [1.0], [1.0]]))
    assert plane.shares == (1.0, 0.0)
    assert plane.flat(torch.tensor([[1.0], [-1.0]])) == [(0.5, 0.0), (-1.5, 0.0)]


def test_two_points_lie_on_a_line_and_one_in_the_middle() -> None:
    two = Plane.of(torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    assert two.shares == (1.0, 0.0)
    (x, _), (other, _) = two.flat(torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    assert (abs(x), x + other) == (0.7071, 0.0)
    one = Plane.of(torch.tensor([[0.6, 0.8]]))
    assert one.shares == (0.0, 0.0)
    assert one.flat(torch.tensor([[0.6, 0.8]])) == [(0.0, 0.0)]


def test_a_network_that_has_collapsed_has_no_plane() -> None:
    made = draw_map(torch.ones(6, 3), torch.arange(6) % 2, None, {}, seed=0)
    assert made.explained == (0.0, 0.0)
    assert {point[:2] for point in made.points} == {(0.0, 0.0)}


def test_a_map_has_images_with_their_classes_and_moves() -> None:
    z, labels = cloud(12, 5), torch.tensor([4, 1, 4, 1, 9, 9, 4, 4, 1, 9, 1, 4])
    before, after = z[[2, 7]], cloud(2, 5, seed=3)
    names = [f"kind {k}" for k in range(10)]
    made = draw_map(z, labels, names, {"ES": (before, after), "TMA": (before[:1], z[4:5])}, seed=0)
    plane = Plane.of(z)
    assert made.classes == ["kind 1", "kind 4", "kind 9"]
    assert [made.classes[k] for _, _, k in made.points] == [f"kind {k}" for k in labels.tolist()]
    assert [point[:2] for point in made.points] == plane.flat(z)
    assert made.explained == plane.shares
    # A query is where the image is, and an arrow ends where the target is.
    assert [move[:2] for move in made.moves["ES"]] == [made.points[2][:2], made.points[7][:2]]
    assert [move[2:] for move in made.moves["ES"]] == plane.flat(after)
    assert made.moves["TMA"] == [(*made.points[2][:2], *made.points[4][:2])]
    assert draw_map(z, labels, None, {}, seed=0).classes == ["1", "4", "9"]


def test_of_many_images_four_hundred_are_drawn() -> None:
    z, labels = cloud(1000, 4), torch.arange(1000)
    one, same, other = (draw_map(z, labels, None, {}, seed=seed) for seed in (0, 0, 1))
    assert one == same != other
    assert len(one.points) == len({*one.classes}) == 400
    drawn = [int(name) for name in one.classes]
    assert drawn == sorted(drawn)
    plane = Plane.of(z[drawn])
    assert [point[:2] for point in one.points] == plane.flat(z[drawn])
    assert Map.model_validate_json(one.model_dump_json()) == one
