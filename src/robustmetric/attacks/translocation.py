"""GTT: drive the first image of the ranking out of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robustmetric.attacks.base import ATTACKS, RankingAttack, Target
from robustmetric.attacks.columns import Column, from_share
from robustmetric.attacks.draws import Draws
from robustmetric.attacks.gallery import Gallery, Queries, count_nearer, nearest
from robustmetric.attacks.hinge import rank_hinge
from robustmetric.squares import square_distance


@ATTACKS.register("GTT")
@dataclass(frozen=True, kw_only=True)
class GreedyTop1Translocation(RankingAttack):
    """Move the query's first image to the end of its ranking; reported is the share still in the top 4.

    >>> GreedyTop1Translocation().name
    'GTT'
    """

    @property
    def name(self) -> str:
        """GTT."""
        return "GTT"

    @property
    def columns(self) -> tuple[Column, ...]:
        """The share of queries whose first image stays in the top 4."""
        return (Column(self.name, "higher", term=from_share),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the first image of the ranking: (B, 1)."""
        return nearest(queries.z, gallery, 1, without=self.myself(queries, gallery), queries=queries)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean over images x of max(0, d(x̃, x) − d(x̃, t))."""
        return rank_hinge(z, target.index, [-1.0], gallery, queries.own if self.strict else None)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the image is still among the first four, with the middle rank where it is tied."""
        first = target.index[:, 0]
        own = self.myself(queries, gallery)
        level = square_distance(z, gallery.z[first])
        nearer, tied = count_nearer(z, level, gallery, [own, first], queries=queries)
        return {self.name: 100.0 * (nearer + tied / 2 <= 3 if self.strict else nearer <= 3).double()}
