"""The map of embeddings: the plane of two components, against numpy's decompositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from robustmetric.report.plane import Map, draw_map

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


def points_of(z: Tensor) -> tuple[Map, Doubles]:
    """Draw a map of points (N, D), and return where they are (N, 2)."""
    found = draw_map(z, torch.arange(len(z)), None, {}, seed=0)
    return found, np.array([point[:2] for point in found.points])


@pytest.mark.parametrize(("images", "dim"), [(50, 8), (9, 40), (400, 2), (3, 3)])
def test_shares_and_coordinates_against_numpy(images: int, dim: int) -> None:
    z = cloud(images, dim)
    made, found = points_of(z)
    centre, axes, shares = by_eigh(z.double().numpy())
    assert made.explained == pytest.approx(shares, abs=ROUNDED)
    # The largest entry of a component is positive.
    axes *= np.sign(np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], axis=1))
    assert np.abs(found - (z.double().numpy() - centre) @ axes.T).max() <= ROUNDED


def test_points_without_a_second_component_lie_on_a_line() -> None:
    for z in (torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.0, 0.0, 2**0.5], [0.0, 2**0.5, 0.0]])):
        made, found = points_of(z)
        assert made.explained == (1.0, 0.0)
        assert np.abs(found).tolist() == [[1, 0], [1, 0]]
    made, found = points_of(torch.tensor([[0.6, 0.8]]))
    assert (made.explained, found.tolist()) == ((0.0, 0.0), [[0.0, 0.0]])


def test_a_network_that_has_collapsed_has_no_plane() -> None:
    made = draw_map(torch.ones(6, 3), torch.arange(6) % 2, None, {}, seed=0)
    assert made.explained == (0.0, 0.0)
    assert {point[:2] for point in made.points} == {(0.0, 0.0)}


def test_a_map_has_images_with_their_classes_and_moves() -> None:
    z, labels = cloud(12, 5), torch.tensor([4, 1, 4, 1, 9, 9, 4, 4, 1, 9, 1, 4])
    before, after = z[[2, 7]], cloud(2, 5, seed=3)
    names = [f"kind {k}" for k in range(10)]
    made = draw_map(z, labels, names, {"ES": (before, after), "TMA": (before[:1], z[4:5])}, seed=0)
    assert made.classes == ["kind 1", "kind 4", "kind 9"]
    assert [made.classes[k] for _, _, k in made.points] == [f"kind {k}" for k in labels.tolist()]
    # A query is where the image is, and an arrow ends where the target is.
    assert [move[:2] for move in made.moves["ES"]] == [made.points[2][:2], made.points[7][:2]]
    assert made.moves["TMA"] == [(*made.points[2][:2], *made.points[4][:2])]
    assert draw_map(z, labels, None, {}, seed=0).classes == ["1", "4", "9"]


def test_of_many_images_four_hundred_are_drawn() -> None:
    z, labels = cloud(1000, 4), torch.arange(1000)
    one, same, other = (draw_map(z, labels, None, {}, seed=seed) for seed in (0, 0, 1))
    assert one == same != other
    assert len(one.points) == len({*one.classes}) == 400
    drawn = [int(name) for name in one.classes]
    assert drawn == sorted(drawn)
    assert [point[:2] for point in one.points] == [tuple(xy) for xy in points_of(z[drawn])[1].tolist()]
    assert Map.model_validate_json(one.model_dump_json()) == one
