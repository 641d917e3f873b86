"""EST: embedding-shifted triplets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robustmetric.defenses.base import Defense, Network, Step, spread
from robustmetric.distance import cross_distance, hardness, pair_distance
from robustmetric.losses import hinge
from robustmetric.perturb import Budget, frozen, pgd


class EmbeddingShifted(Defense):
    """Move every image's embedding as far as it goes, then take the triplet loss on the moved batch.

    >>> import robustmetric as rm
    >>> rm.defense("EST[R]").name
    'EST[R]'
    """

    family = "EST"

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Move the images, embed them, mine among them, take the loss."""
        with frozen(network.model):
            with torch.no_grad():
                origin = network(images)
            moved = shift(network, images, origin, self.budget, generator=self.generator)
        z = network(moved, learn=True)
        dist = cross_distance(z.detach())
        triplets = self.source(dist, labels, generator=self.generator, dim=z.shape[1])
        a, p, n = (z.index_select(0, role) for role in triplets)
        reached = hardness(a, p, n)
        loss = hinge(reached, self.margin)
        return Step(
            loss,
            {
                "loss/triplet": loss.item(),
                "hardness/source": triplets.hardness(cross_distance(origin)).mean().item(),
                "hardness/destination": math.nan,
                "hardness/reached": reached.mean().item(),
                "perturbed": (moved != images).flatten(1).any(1).float().mean().item(),
                "spread": spread(dist),
            },
            z,
            labels,
            triplets,
            moved,
        )


def shift(
    network: Network, images: Tensor, origin: Tensor, budget: Budget, *, generator: torch.Generator
) -> Tensor:
    """Move (N, C, H, W) images so that their embeddings are as far as possible from `origin` (N, D).

    At the origin the gradient of the distance is zero: the descent begins a tiny random offset away. Call
    it inside `frozen(network.model)`.
    """
    kind = images.device.type
    # Under autocast the network rounds the images: a smaller offset would be lost.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else images.dtype
    tiny = max(1e-7, torch.finfo(dtype).eps)
    offset = torch.randn(images.shape, generator=generator, device=generator.device).to(images)

    def nearness(x: Tensor, rows: Tensor) -> Tensor:
        return -pair_distance(network(x), origin[rows])

    return pgd(images, nearness, budget, start=images + tiny * offset)
