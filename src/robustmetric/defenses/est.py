"""EST: embedding-shifted triplets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from robustmetric.defenses.base import DEFENSES, Network, Step, changed
from robustmetric.defenses.terms import TermDefense
from robustmetric.perturb import frozen, pgd
from robustmetric.sphere import cross_distance, pair_distance, reference_shift


@DEFENSES.register("EST")
class EmbeddingShifted(TermDefense):
    """Move every image's embedding as far as it goes, then take the triplet loss on the moved batch.

    The first step leads away from a tiny random offset of the pixels; in the published training, of the
    embeddings: see `reference`.

    >>> import robustmetric as rm
    >>> rm.defense("EST[R]").name
    'EST[R]'
    """

    family = "EST"
    reference: bool = False
    """Whether the first step leads away from an offset of the embeddings, 1e-7·{−1, 0, 1} a coordinate."""

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Move the images, embed them, mine among them, take the loss."""
        with frozen(network.model):
            origin = network.look(images)
            moved = self.shift(network, images, origin)
        z = network(moved, learn=True)
        mined = self.mine(z, labels)
        source = mined.triplets.hardness(cross_distance(origin))
        return self.learn(network, images, mined, moved, z, source=source, perturbed=changed(moved, images))

    def shift(self, network: Network, images: Tensor, origin: Tensor) -> Tensor:
        """Return (N, C, H, W) `images` moved so that the `network` puts them as far as it can from `origin`.

        At `origin` (N, D) the gradient of the distance is zero: the descent begins a tiny offset away,
        drawn by the generator. Call it inside `frozen(network.model)`.
        """
        drawn: dict[str, Any] = {"generator": self.generator, "device": self.generator.device}
        if self.reference:
            off = 1e-7 * torch.randint(-1, 2, origin.shape, **drawn).to(origin)

            def published(x: Tensor, rows: Tensor) -> Tensor:
                return -reference_shift(network(x), origin[rows], off[rows])

            return pgd(images, published, self.budget)
        kind = images.device.type
        # Under autocast the network rounds the images: a smaller offset would be lost.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
        start = images + max(1e-7, torch.finfo(dtype).eps) * torch.randn(images.shape, **drawn).to(images)

        def nearness(x: Tensor, rows: Tensor) -> Tensor:
            return -pair_distance(network(x), origin[rows])

        return pgd(images, nearness, self.budget, start=start)
