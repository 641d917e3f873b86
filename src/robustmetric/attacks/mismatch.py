"""TMA: make an image look like another one to the network.

Tolias et al., "Targeted Mismatch Adversarial Attack", ICCV 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robustmetric.attacks.base import ATTACKS, RankingAttack, Target
from robustmetric.attacks.columns import COSINE, Column, from_cosine
from robustmetric.attacks.draws import Draws, choose
from robustmetric.attacks.gallery import Gallery, Queries, away_from


@ATTACKS.register("TMA")
@dataclass(frozen=True, kw_only=True)
class TargetedMismatch(RankingAttack):
    """Bring the embedding to that of a random image; reported is the cosine that is reached.

    >>> TargetedMismatch()
    TargetedMismatch(protocol='strict')
    """

    @property
    def name(self) -> str:
        """TMA."""
        return "TMA"

    @property
    def columns(self) -> tuple[Column, ...]:
        """The cosine to the target."""
        return (Column(self.name, "lower", COSINE, from_cosine),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return one image at random: (B, 1)."""
        return choose(draws.uniform(1), gallery, self.myself(queries, gallery), strict=self.strict)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return 1 − cos(x̃, t)."""
        t = gallery.z[target.index[:, 0]]
        return 1 - (away_from(z, t) * t).sum(1)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the cosine of the perturbed image and its target."""
        return {self.name: (z.double() * gallery.z[target.index[:, 0]].double()).sum(1)}
