"""N/A: regular training, no defense."""

from __future__ import annotations

from torch import Tensor

from robustmetric.defenses.base import Defense, Network, Step
from robustmetric.distance import cross_distance, hardness
from robustmetric.losses import triplet_loss


class Regular(Defense):
    """The triplet loss on benign triplets.

    >>> import robustmetric as rm
    >>> rm.defense("N/A[R]").name
    'N/A[R]'
    """

    family = "N/A"

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Embed the batch once, mine in it, take the loss."""
        z = network(images)
        triplets = self.source(cross_distance(z.detach()), labels, generator=self.generator, dim=z.shape[1])
        a, p, n = (z.index_select(0, role) for role in triplets)
        loss = triplet_loss(a, p, n, self.margin)
        reached = hardness(a, p, n).mean().item()
        return Step(
            loss,
            {
                "loss/triplet": loss.item(),
                "hardness/source": reached,
                "hardness/destination": reached,
                "hardness/reached": reached,
                "perturbed": 0.0,
            },
        )
