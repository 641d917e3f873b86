"""CA+ and CA−: move a candidate up or down in the rankings of chosen queries.

Zhou et al., "Adversarial Ranking Attack and Defense", ECCV 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.base import (
    Gallery,
    Queries,
    SignedAttack,
    Target,
    count_nearer,
    normalised_rank,
    sign_of,
    square_distance,
)
from robustmetric.distance import cross_distance, pair_distance


@dataclass(frozen=True, kw_only=True)
class CandidateAttack(SignedAttack):
    """The perturbed image is a candidate; `w` gallery images query, and should rank it first (+) or last (−).

    The queries are drawn at random (+), or among the 1 % nearest to the image (−). Reported is the rank of
    the perturbed image, in % from first to last, as the mean over its queries.

    >>> CandidateAttack(sign="+"), CandidateAttack(sign="-", w=5).name
    (CandidateAttack(protocol='strict', sign='+', w=1), 'CA-(w=5)')
    """

    family: ClassVar[str] = "CA"
    letter: ClassVar[str] = "w"

    w: int = 1

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Measure once how far all images are from those that query: (B, w, N)."""
        flat = index.flatten()
        rivals = torch.cat([cross_distance(gallery.z[flat], gallery.z[b]) for b in gallery.blocks()], dim=1)
        rivals = rivals.view(*index.shape, len(gallery))
        if self.strict:
            # Neither the image that queries nor the candidate's original is a rival: their hinge never opens.
            never = sign_of(self.sign) * torch.inf
            rivals.scatter_(2, index[..., None], never)
            inside = queries.own >= 0
            rivals[inside, :, queries.own[inside]] = never
        return Target(index, rivals)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Mean over images x of max(0, ±(d(q, x̃) − d(q, x))): how far x̃ is from first, or last."""
        assert target.extra is not None  # noqa: S101
        sign = sign_of(self.sign)
        dist = pair_distance(z[:, None], gallery.z[target.index])
        gap = sign * (dist.detach()[..., None] - target.extra)
        ranked = torch.full_like(queries.own, len(gallery))
        if self.strict:
            ranked -= 1 + (queries.own >= 0).long()
        # The value of a sum of hinges in one variable, and its slope: how many are open.
        opened = (gap > 0).sum(2).to(z) / ranked[:, None]
        value = gap.clamp_min_(0).sum(2) / ranked[:, None]
        return (value + sign * opened * (dist - dist.detach())).mean(1)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Rank in % of the perturbed image among all that are ranked for the same query."""
        ranks = []
        for q in target.index.T:
            level = square_distance(z, gallery.z[q])
            if self.strict:
                ranks.append(normalised_rank(gallery.z[q], level, gallery, (queries.own, q)))
            else:
                ranks.append(100 * count_nearer(gallery.z[q], level, gallery)[0] / len(gallery))
        return {self.name: torch.stack(ranks).double().mean(0)}
