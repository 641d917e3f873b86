"""TMA, ES, LTM, GTM and GTT: the attacks of the ERS without options.

TMA: Tolias et al., "Targeted Mismatch Adversarial Attack", ICCV 2019. LTM: Wang et al., "Transferable,
Controllable, and Inconspicuous Adversarial Attacks on Person Re-identification With Deep Mis-Ranking", CVPR
2020.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, Attack, Target
from robustmetric.attacks.columns import COSINE, DISTANCE, Column, from_cosine, from_distance, from_share
from robustmetric.attacks.draws import Draws, choose
from robustmetric.attacks.margin import rank_hinge, rivals
from robustmetric.gallery import Gallery, Queries, away_from, count_nearer, hit_at_1, nearest
from robustmetric.sphere import padded_distance, pair_distance, reference_shift
from robustmetric.squares import square_distance


@ATTACKS.register("TMA")
@dataclass(frozen=True, kw_only=True)
class TargetedMismatch(Attack):
    """Bring the embedding to that of a random image; reported is the cosine that is reached."""

    name = "TMA"
    columns = (Column("TMA", "lower", COSINE, from_cosine),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return one image at random: (B, 1)."""
        own = self.asking(queries, gallery).own
        return choose(draws.uniform(1), gallery, own, strict=self.strict)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return 1 − cos(x̃, t)."""
        t = gallery.z[target.index[:, 0]]
        return 1 - (away_from(z, t) * t).sum(1)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the cosine of the perturbed image and its target."""
        return {"TMA": (z.double() * gallery.z[target.index[:, 0]].double()).sum(1)}


@ATTACKS.register("ES")
@dataclass(frozen=True, kw_only=True)
class EmbeddingShift(Attack):
    """Move the embedding away from the benign one; reported are the distance, ES:D, and R@1, ES:R."""

    name = "ES"
    columns: ClassVar[tuple[Column, ...]] = (
        # Embeddings rarely reach the other end of the sphere, whatever an attack may do.
        Column("ES:D", "lower", DISTANCE, from_distance, conclusive=False),
        Column("ES:R", "higher", term=from_share),
    )

    @property
    def read_early(self) -> tuple[str, ...]:  # type: ignore[override]
        """The reference reads the distance one step before the last."""
        return () if self.strict else ("ES:D",)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return −d(φ(x̃), φ(x)); the reference measures otherwise, see `reference_shift`."""
        return -(pair_distance if self.strict else reference_shift)(z, queries.z)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the distance from the benign embedding, and whether the nearest image is of the class."""
        return {
            "ES:D": (pair_distance if self.strict else padded_distance)(z.double(), queries.z.double()),
            "ES:R": hit_at_1(z, self.asking(queries, gallery), gallery, strict=self.strict),
        }

    def start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        """Return a point a little way off: at the image itself the gradient of the distance is zero."""
        if not self.strict:
            return None
        # Less would be lost in the rounding of the embeddings, which depends on the batch.
        tiny = max(1e-4, torch.finfo(images.dtype).eps)
        return images + tiny * draws.normal(*images.shape[1:]).to(images)


@ATTACKS.register("LTM")
@dataclass(frozen=True, kw_only=True)
class LearningToMisrank(Attack):
    """Bring the farthest image of another class nearer than the nearest of the query's; reported is R@1."""

    name = "LTM"
    columns = (Column("LTM", "higher", term=from_share),)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return max(0, max over negatives n of d(x̃, n) − min over positives p of d(x̃, p))."""
        # The reference leaves the image itself among its positives.
        asking = queries if self.strict else replace(queries, own=torch.full_like(queries.own, -1))
        found = rivals(z, asking, gallery, farthest=True)
        p, n = gallery.z[found.right], gallery.z[found.wrong]
        gap = pair_distance(z, n) - pair_distance(away_from(z, p), p)
        return torch.where(found.answered, gap, 0.0).clamp_min(0)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the nearest image is still of the class, as 100 or 0."""
        return {"LTM": hit_at_1(z, self.asking(queries, gallery), gallery, strict=self.strict)}


@ATTACKS.register("GTM")
@dataclass(frozen=True, kw_only=True)
class GreedyTop1Misranking(Attack):
    """Bring the embedding to the nearest image of another class; reported is R@1."""

    name = "GTM"
    # Near its target there are others, of the query's class too, whatever an attack may do.
    columns = (Column("GTM", "higher", term=from_share, conclusive=False),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the nearest image of another class: (B, 1)."""
        asking = self.asking(queries, gallery).any_camera
        if self.strict:
            return nearest(queries.z, gallery, 1, asking, other_than=queries.labels)
        # The reference leaves out the class of the first image in the ranking, and takes the position among
        # the images that are left for one in the gallery.
        first = gallery.labels[nearest(queries.z, gallery, 1, asking)[:, 0]]
        found = nearest(queries.z, gallery, 1, asking, other_than=first)
        before = torch.arange(len(gallery), device=found.device) < found
        return ((gallery.labels != first[:, None]) & before).sum(1, keepdim=True)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return d(x̃, u)."""
        u = gallery.z[target.index[:, 0]]
        return pair_distance(away_from(z, u), u)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the nearest image is still of the class, as 100 or 0."""
        return {"GTM": hit_at_1(z, self.asking(queries, gallery), gallery, strict=self.strict)}


@ATTACKS.register("GTT")
@dataclass(frozen=True, kw_only=True)
class GreedyTop1Translocation(Attack):
    """Move the query's first image to the end of its ranking; reported is the share still in the top 4."""

    name = "GTT"
    columns = (Column("GTT", "higher", term=from_share),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the first image of the ranking: (B, 1)."""
        return nearest(queries.z, gallery, 1, self.asking(queries, gallery))

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the mean over images x of max(0, d(x̃, x) − d(x̃, t))."""
        return rank_hinge(z, target.index, [-1.0], gallery, queries if self.strict else None)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the image is still among the first four, with the middle rank where it is tied."""
        first = target.index[:, 0]
        level = square_distance(z, gallery.z[first])
        nearer, tied = count_nearer(z, level, gallery, self.asking(queries, gallery), first)
        return {"GTT": 100.0 * (nearer + tied / 2 <= 3 if self.strict else nearer <= 3).double()}
