"""A map of embeddings: images and moves in the plane of the two largest principal components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import FiniteFloat
from torch import Tensor, nn

from robustmetric.evaluation.document import FrozenModel

_POINTS = 400  # of a map, at most


class Map(FrozenModel):
    """Embeddings in the plane of their two largest principal components.

    `points` are some images of the gallery with their class's place in `classes`, `explained` the shares of
    the variance, and `moves` by attack where the pictured queries were and where they went.
    """

    points: list[tuple[FiniteFloat, FiniteFloat, int]]
    classes: list[str]
    explained: tuple[FiniteFloat, FiniteFloat]
    moves: dict[str, list[tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]]]


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
    some = z.cpu()[drawn].double()
    centre = some.mean(0)
    _, spread, axes = torch.linalg.svd(some - centre, full_matrices=False)
    axes, spread = axes[:2], spread.square() / spread.square().sum().clamp_min(1e-30)
    # The sign of a component is arbitrary: its largest entry is positive.
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    axes = nn.functional.pad(axes, (0, 0, 0, 2 - len(axes)))

    def flat(z: Tensor) -> list[tuple[float, float]]:
        """Return where points (N, D) are in the plane."""
        found = (z.cpu().double() - centre) @ axes.T
        return [(round(x, 4), round(y, 4)) for x, y in found.tolist()]

    present, place = labels.cpu()[drawn].unique(return_inverse=True)
    return Map(
        points=[(x, y, k) for (x, y), k in zip(flat(some), place.tolist(), strict=True)],
        classes=[str(label) if names is None else names[label] for label in present.tolist()],
        explained=tuple(round(share, 4) for share in (*spread.tolist(), 0.0)[:2]),
        moves={
            name: [(*a, *b) for a, b in zip(flat(before), flat(after), strict=True)]
            for name, (before, after) in moves.items()
        },
    )
