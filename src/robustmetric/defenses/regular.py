"""N/A: regular training, no defense."""

from __future__ import annotations

from torch import Tensor

from robustmetric.defenses.base import DEFENSES, Defense, Network, Step, triplet_logs
from robustmetric.losses import hinge
from robustmetric.sphere import hardness


@DEFENSES.register("N/A")
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
        mined = self.mine(z, labels)
        found = hardness(*(z.index_select(0, role) for role in mined.triplets))
        loss = hinge(found, self.margin)
        logs = triplet_logs(mined, {"loss/triplet": loss.item()}, found, found, found, perturbed=0.0)
        return Step(loss, logs, z, labels, mined.triplets, images)
