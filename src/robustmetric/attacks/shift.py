"""ES: move an embedding as far as possible from where it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, RankingAttack, Target
from robustmetric.attacks.columns import DISTANCE, Column, from_distance, from_share
from robustmetric.attacks.draws import Draws
from robustmetric.attacks.gallery import Gallery, Queries, hit_at_1, nothing
from robustmetric.distance import padded_distance, pair_distance, reference_shift


@ATTACKS.register("ES")
@dataclass(frozen=True, kw_only=True)
class EmbeddingShift(RankingAttack):
    """Move the embedding away from the benign one; reported are the distance, ES:D, and R@1, ES:R.

    >>> EmbeddingShift(protocol="reference").read_early
    ('ES:D',)
    """

    @property
    def name(self) -> str:
        """ES."""
        return "ES"

    @property
    def columns(self) -> tuple[Column, ...]:
        """The distance from the benign embedding, and R@1."""
        return (
            # Embeddings rarely reach the other end of the sphere, whatever an attack may do.
            Column("ES:D", "lower", DISTANCE, from_distance, conclusive=False),
            Column("ES:R", "higher", term=from_share),
        )

    @property
    def read_early(self) -> tuple[str, ...]:
        """The reference reads the distance one step before the last."""
        return () if self.strict else ("ES:D",)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return no image: it aims at none, (B, 0)."""
        return nothing(queries)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return −d(φ(x̃), φ(x)); the reference measures otherwise, see `reference_shift`."""
        if self.strict:
            return -pair_distance(z, queries.z)
        return -reference_shift(z, queries.z)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the distance from the benign embedding, and whether the nearest image is of the class."""
        own = self.myself(queries, gallery)
        return {
            "ES:D": (pair_distance if self.strict else padded_distance)(z.double(), queries.z.double()),
            "ES:R": hit_at_1(z, queries, gallery, own, strict=self.strict),
        }

    def start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        """Return a point a little way off: at the image itself the gradient of the distance is zero."""
        if not self.strict:
            return None
        # Less would be lost in the rounding of the embeddings, which depends on the batch.
        tiny = max(1e-4, torch.finfo(images.dtype).eps)
        return images + tiny * draws.normal(*images.shape[1:]).to(images)
