"""LTM and GTM: make the first image of the ranking one of another class.

LTM: Wang et al., "Transferable, Controllable, and Inconspicuous Adversarial Attacks on Person
Re-identification With Deep Mis-Ranking", CVPR 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, RankingAttack, Target
from robustmetric.attacks.columns import Column, from_share
from robustmetric.attacks.draws import Draws
from robustmetric.attacks.gallery import (
    Gallery,
    Queries,
    away_from,
    hit_at_1,
    nearest,
    nothing,
    put,
    same_camera,
)
from robustmetric.distance import pair_distance


@ATTACKS.register("LTM")
@dataclass(frozen=True, kw_only=True)
class LearningToMisrank(RankingAttack):
    """Bring the farthest image of another class nearer than the nearest one of the query's; reported is R@1.

    >>> LearningToMisrank().name
    'LTM'
    """

    @property
    def name(self) -> str:
        """LTM."""
        return "LTM"

    @property
    def columns(self) -> tuple[Column, ...]:
        """R@1."""
        return (Column(self.name, "higher", term=from_share),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return no image: it aims at the classes, (B, 0)."""
        return nothing(queries)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return max(0, max over negatives n of d(x̃, n) − min over positives p of d(x̃, p))."""
        rows = torch.arange(len(z), device=z.device)
        with torch.no_grad():
            near = z.new_full((len(z),), -torch.inf)
            far = z.new_full((len(z),), torch.inf)
            positive, negative = torch.zeros_like(rows), torch.zeros_like(rows)
            for block in gallery.blocks():
                # On the unit sphere the farthest has the smallest product.
                product = z @ gallery.z[block].T
                same = gallery.labels[block] == queries.labels[:, None]
                low, place = product.masked_fill(same, torch.inf).min(1)
                negative = torch.where(low < far, place + block.start, negative)
                far = torch.minimum(low, far)
                product.masked_fill_(~same, -torch.inf)
                if self.strict:
                    put(product, rows, queries.own, block, -torch.inf)
                if (seen := same_camera(queries, gallery, block)) is not None:
                    product.masked_fill_(seen, -torch.inf)
                high, place = product.max(1)
                positive = torch.where(high > near, place + block.start, positive)
                near = torch.maximum(high, near)
            answered = near.isfinite() & far.isfinite()
        p = gallery.z[positive]
        gap = pair_distance(z, gallery.z[negative]) - pair_distance(away_from(z, p), p)
        return torch.where(answered, gap, 0.0).clamp_min(0)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the nearest image is still of the class, as 100 or 0."""
        own = self.myself(queries, gallery)
        return {self.name: hit_at_1(z, queries, gallery, own, strict=self.strict)}


@ATTACKS.register("GTM")
@dataclass(frozen=True, kw_only=True)
class GreedyTop1Misranking(RankingAttack):
    """Bring the embedding to the nearest image of another class; reported is R@1.

    >>> GreedyTop1Misranking().name
    'GTM'
    """

    @property
    def name(self) -> str:
        """GTM."""
        return "GTM"

    @property
    def columns(self) -> tuple[Column, ...]:
        """R@1."""
        # Near its target there are others, of the query's class too, whatever an attack may do.
        return (Column(self.name, "higher", term=from_share, conclusive=False),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the nearest image of another class: (B, 1)."""
        own = self.myself(queries, gallery)
        if self.strict:
            return nearest(queries.z, gallery, 1, without=own, other_than=queries.labels)
        # The reference leaves out the class of the first image in the ranking, and takes the position among
        # the images that are left for one in the gallery.
        first = gallery.labels[nearest(queries.z, gallery, 1, without=own)[:, 0]]
        found = nearest(queries.z, gallery, 1, without=own, other_than=first)
        before = torch.arange(len(gallery), device=found.device) < found
        return ((gallery.labels != first[:, None]) & before).sum(1, keepdim=True)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return d(x̃, u)."""
        u = gallery.z[target.index[:, 0]]
        return pair_distance(away_from(z, u), u)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the nearest image is still of the class, as 100 or 0."""
        own = self.myself(queries, gallery)
        return {self.name: hit_at_1(z, queries, gallery, own, strict=self.strict)}
