"""N/A: regular training, no defense."""

from __future__ import annotations

from torch import Tensor

from robustmetric.defenses.base import Defense, Network, Step, spread
from robustmetric.distance import cross_distance, hardness
from robustmetric.losses import hinge


class Regular(Defense):
    """The triplet loss on benign triplets.

    >>> import robustmetric as rm
    >>> rm.defense("N/A[R]").name
    'N/A[R]'
    """

    family = "N/A"

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Embed the batch once, mine in it, take the loss."""
        z = network(images, learn=True)
        dist = cross_distance(z.detach())
        triplets = self.source(dist, labels, generator=self.generator, dim=z.shape[1])
        a, p, n = (z.index_select(0, role) for role in triplets)
        found = hardness(a, p, n)
        loss, reached = hinge(found, self.margin), found.mean().item()
        return Step(
            loss,
            {
                "loss/triplet": loss.item(),
                "hardness/source": reached,
                "hardness/destination": reached,
                "hardness/reached": reached,
                "perturbed": 0.0,
                "spread": spread(dist),
            },
            z,
            labels,
            triplets,
            images,
        )
