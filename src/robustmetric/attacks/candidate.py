"""CA+ and CA−: move a candidate up or down in the rankings of chosen queries.

Zhou et al., "Adversarial Ranking Attack and Defense", ECCV 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, SignedAttack, Target, sign_of
from robustmetric.attacks.gallery import Gallery, Queries, away_from, count_nearer, normalised_rank, put
from robustmetric.distance import cross_distance, pair_distance
from robustmetric.squares import square_distance

# Up to so many distances are kept from step to step; more are computed anew in each, block by block.
_KEPT = 2**26


@ATTACKS.register("CA+", sign="+")
@ATTACKS.register("CA-", sign="-")
@dataclass(frozen=True, kw_only=True)
class CandidateAttack(SignedAttack):
    """The perturbed image is a candidate; `w` gallery images should rank it first (`sign` +) or last (−).

    These queries are drawn at random (+), or among the 1 % nearest to the image (−). Reported is the rank of
    the perturbed image, in % from first to last, as the mean over its queries.

    >>> CandidateAttack(sign="+"), CandidateAttack(sign="-", w=5).name
    (CandidateAttack(protocol='strict', sign='+', w=1), 'CA-(w=5)')
    """

    family: ClassVar[str] = "CA"
    letter: ClassVar[str] = "w"

    w: int = 1

    @property
    def perturbs(self) -> str:
        """The perturbed image is ranked."""
        return "candidate"

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Return with the targets how far all images are from them, (B, w, N), if that is not too much."""
        if index.numel() * len(gallery) > _KEPT:
            return Target(index)
        rivals = gallery.z.new_empty(*index.shape, len(gallery))
        for k, q in enumerate(index.T):
            for block in gallery.blocks():
                rivals[:, k, block] = self._rivals(q, block, queries, gallery)
        return Target(index, rivals)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean over images x of max(0, ±(d(q, x̃) − d(q, x))): how far x̃ is from first, or last."""
        sign = sign_of(self.sign)
        goal = gallery.z[target.index]
        dist = pair_distance(away_from(z[:, None], goal), goal)
        # The value of a sum of hinges in one variable, and its slope: how many are open.
        level = dist.detach()
        value, opened = torch.zeros_like(level), torch.zeros_like(level)
        for k, q in enumerate(target.index.T):
            for block in gallery.blocks():
                if target.extra is None:
                    rivals = self._rivals(q, block, queries, gallery)
                else:
                    rivals = target.extra[:, k, block]
                gap = level[:, k, None] - rivals if sign > 0 else rivals - level[:, k, None]
                value[:, k] += gap.clamp_min_(0).sum(1)
                opened[:, k] += gap.sign_().sum(1)
        ranked = torch.full_like(queries.own, len(gallery))
        if self.strict:
            ranked -= 1 + (queries.own >= 0).long()
        return ((value + sign * opened * (dist - level)) / ranked[:, None]).mean(1)

    @torch.no_grad()
    def _rivals(self, q: Tensor, block: slice, queries: Queries, gallery: Gallery) -> Tensor:
        """Return how far a block of n images is from those that query, `q` (B,): (B, n)."""
        rivals = cross_distance(gallery.z[q], gallery.z[block])
        if self.strict:
            # Neither the image that queries nor the candidate's original is a rival: their hinge never opens.
            rows, never = torch.arange(len(q), device=q.device), sign_of(self.sign) * torch.inf
            put(rivals, rows, q, block, never)
            put(rivals, rows, queries.own, block, never)
        return rivals

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the rank in % of the perturbed image among all that are ranked for the same query."""
        ranks = []
        for q in target.index.T:
            level = square_distance(z, gallery.z[q])
            if self.strict:
                ranks.append(normalised_rank(gallery.z[q], level, gallery, (queries.own, q)))
            else:
                nearer = count_nearer(gallery.z[q], level, gallery)[0]
                ranks.append((100 * nearer).float() / len(gallery))
        return {self.name: torch.stack(ranks).double().mean(0)}
