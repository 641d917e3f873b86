"""ACT: anti-collapse triplets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robustmetric.defenses.base import Defense, Moved, Network, Step, embed_roles, spread
from robustmetric.distance import cross_distance, hardness, pair_distance
from robustmetric.losses import hinge
from robustmetric.perturb import frozen, pgd


class AntiCollapse(Defense):
    """Pull positive and negative together, leave the anchor, and learn to tell the two apart.

    >>> import robustmetric as rm
    >>> rm.defense("ACT[S]").name
    'ACT[S]'
    """

    family = "ACT"

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Mine, pull together, take the loss."""
        with frozen(network.model):
            with torch.no_grad():
                z = network(images)
            dist = cross_distance(z)
            source = self.source(dist, labels, generator=self.generator, dim=z.shape[1])
            x = images[source.stack()]

            def apart(x: Tensor, rows: Tensor) -> Tensor:
                p, n = network(x.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
                return pair_distance(p, n)

            x[:, 1:] = pgd(x[:, 1:], apart, self.budget)
        seen = embed_roles(network, images, source, Moved(torch.arange(len(x), device=x.device), x))
        reached = hardness(seen.role["a~"], seen.role["p~"], seen.role["n~"])
        loss = hinge(reached, self.margin)
        return seen.step(
            loss,
            {
                "loss/triplet": loss.item(),
                "hardness/source": source.hardness(dist).mean().item(),
                "hardness/destination": math.nan,
                "hardness/reached": reached.mean().item(),
                "perturbed": (x != images[source.stack()]).flatten(1).any(1).float().mean().item(),
                "spread": spread(dist),
            },
            source,
            labels,
        )
