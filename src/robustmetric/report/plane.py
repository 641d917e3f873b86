"""A map of embeddings: images and moves in the plane of the two largest principal components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import FiniteFloat
from torch import Tensor

from robustmetric.evaluation.document import Part

_POINTS = 400  # of a map, at most

Point = tuple[FiniteFloat, FiniteFloat, int]
Move = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class Map(Part):
    """Embeddings in the plane of their two largest principal components.

    `points` are some images of the gallery with their class's place in `classes`, `explained` the shares of
    the variance, and `moves` by attack where the pictured queries were and where they went.
    """

    points: list[Point]
    classes: list[str]
    explained: tuple[FiniteFloat, FiniteFloat]
    moves: dict[str, list[Move]]


class Plane(NamedTuple):
    """The plane through the `centre` (D,) of points along two `axes` (2, D), and their `shares` of variance.

    >>> plane = Plane.of(torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    >>> plane.shares, plane.flat(torch.tensor([[2.0, 5.0]]))
    ((0.9, 0.1), [(2.0, 5.0)])
    """

    centre: Tensor
    axes: Tensor
    shares: tuple[float, float]

    @classmethod
    def of(cls, z: Tensor) -> Plane:
        """Return the plane of the two largest principal components of points `z` (N, D).

        A component that points do not have, for want of points or of dimensions, is zero.
        """
        z = z.cpu().double()
        centre = z.mean(0)
        _, spread, axes = torch.linalg.svd(z - centre, full_matrices=False)
        found = min(2, len(axes))
        # The sign of a component is arbitrary: its largest entry is positive.
        largest = axes[:found].gather(1, axes[:found].abs().argmax(1, keepdim=True))
        two, shares = z.new_zeros(2, z.shape[1]), z.new_zeros(2)
        two[:found] = axes[:found] * largest.sign()
        shares[:found] = spread[:found].square() / spread.square().sum().clamp_min(1e-30)
        return cls(centre, two, (round(float(shares[0]), 4), round(float(shares[1]), 4)))

    def flat(self, z: Tensor) -> list[tuple[float, float]]:
        """Return where points `z` (N, D) are in the plane, to four digits."""
        found = (z.cpu().double() - self.centre) @ self.axes.T
        return [(round(x, 4), round(y, 4)) for x, y in found.tolist()]


def draw_map(
    z: Tensor,
    labels: Tensor,
    names: Sequence[str] | None,
    moves: Mapping[str, tuple[Tensor, Tensor]],
    *,
    seed: int,
) -> Map:
    """Return the map of a gallery of embeddings `z` (N, D) with `labels` (N,), at most 400 drawn by `seed`.

    `names` are those of the classes; without them they are numbers. `moves` by attack are the embeddings
    (Q, D) of queries before and after.

    >>> made = draw_map(torch.eye(3), torch.tensor([7, 7, 9]), None, {}, seed=0)
    >>> len(made.points), made.classes
    (3, ['7', '9'])
    """
    drawn = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[:_POINTS].sort().values
    some = z.cpu()[drawn]
    plane = Plane.of(some)
    present, place = labels.cpu()[drawn].unique(return_inverse=True)
    return Map(
        points=[(x, y, k) for (x, y), k in zip(plane.flat(some), place.tolist(), strict=True)],
        classes=[str(label) if names is None else names[label] for label in present.tolist()],
        explained=plane.shares,
        moves={
            name: [(*a, *b) for a, b in zip(plane.flat(before), plane.flat(after), strict=True)]
            for name, (before, after) in moves.items()
        },
    )
