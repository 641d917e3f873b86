"""EST: embedding-shifted triplets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robustmetric.defenses.base import DEFENSES, Network, Step, changed
from robustmetric.defenses.terms import TermDefense
from robustmetric.losses import Term
from robustmetric.perturb import Budget, frozen, pgd
from robustmetric.sphere import cross_distance, pair_distance, reference_shift
from robustmetric.triplets import Sampler


@DEFENSES.register("EST")
class EmbeddingShifted(TermDefense):
    """Move every image's embedding as far as it goes, then take the triplet loss on the moved batch.

    The first step leads away from a tiny random offset of the pixels; with `reference`, of the benign
    embeddings. `terms` are added to the loss; `source`, `budget`, `margin` and `seed` are those of every
    defense.

    >>> import robustmetric as rm
    >>> rm.defense("EST[R]").name
    'EST[R]'
    """

    family = "EST"

    def __init__(
        self,
        source: Sampler,
        terms: Sequence[Term] = (),
        *,
        budget: Budget,
        margin: float = 0.2,
        seed: int = 0,
        reference: bool = False,
    ) -> None:
        super().__init__(source, terms, budget=budget, margin=margin, seed=seed)
        self.reference = reference

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Move the images, embed them, mine among them, take the loss."""
        with frozen(network.model):
            origin = network.look(images)
            moved = shift(
                network, images, origin, self.budget, generator=self.generator, reference=self.reference
            )
        z = network(moved, learn=True)
        mined = self.mine(z, labels)
        source = mined.triplets.hardness(cross_distance(origin))
        return self.learn(network, images, mined, moved, z, source=source, perturbed=changed(moved, images))


def shift(
    network: Network,
    images: Tensor,
    origin: Tensor,
    budget: Budget,
    *,
    generator: torch.Generator,
    reference: bool = False,
) -> Tensor:
    """Return (N, C, H, W) `images` moved so that the network puts them as far as it can from `origin` (N, D).

    The `budget` says how far each may go. At the origin the gradient of the distance is zero: the descent
    begins a tiny offset of the pixels away, or, as in the `reference`, of the embeddings: 1e-7·{−1, 0, 1} a
    coordinate. The `generator` draws it. Call it inside `frozen(network.model)`.
    """
    if reference:
        sign = torch.randint(-1, 2, origin.shape, generator=generator, device=generator.device)
        off = 1e-7 * sign.to(origin)
        return pgd(images, lambda x, rows: -reference_shift(network(x), origin[rows], off[rows]), budget)
    kind = images.device.type
    # Under autocast the network rounds the images: a smaller offset would be lost.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
    tiny = max(1e-7, torch.finfo(dtype).eps)
    offset = torch.randn(images.shape, generator=generator, device=generator.device).to(images)

    def nearness(x: Tensor, rows: Tensor) -> Tensor:
        return -pair_distance(network(x), origin[rows])

    return pgd(images, nearness, budget, start=images + tiny * offset)
