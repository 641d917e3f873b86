"""ACT: anti-collapse triplets."""

from __future__ import annotations

import torch
from torch import Tensor

from robustmetric.defenses.base import DEFENSES, Network, Step, share_changed, triplet_logs
from robustmetric.defenses.terms import TermDefense, step_on_triplets
from robustmetric.distance import hardness, pair_distance
from robustmetric.losses import hinge
from robustmetric.perturb import frozen, pgd


@DEFENSES.register("ACT")
class AntiCollapse(TermDefense):
    """Pull positive and negative together, leave the anchor, and learn to tell the two apart.

    A term sees the anchor, which is not perturbed, as a, and the others as p, n, p̃ and ñ.

    >>> import robustmetric as rm
    >>> rm.defense("ACT[S]").name
    'ACT[S]'
    """

    family = "ACT"
    roles = ("a", "p", "n", "p~", "n~")
    lacks = "ACT leaves the anchor as it is: there is no ã"

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Mine, pull together, take the loss."""
        with frozen(network.model):
            with torch.no_grad():
                z = network(images)
            mined = self.mine(z, labels)
            x = images[mined.triplets.stack()]

            def apart(x: Tensor, rows: Tensor) -> Tensor:
                p, n = network(x.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
                return pair_distance(p, n)

            x[:, 1:] = pgd(x[:, 1:], apart, self.budget)
        found = self.embed_roles(network, images, mined, x)
        reached = hardness(found["a~"], found["p~"], found["n~"])
        loss, losses = self.add_terms(hinge(reached, self.margin), found)
        logs = triplet_logs(
            mined,
            losses,
            source=mined.hardness,
            reached=reached,
            perturbed=share_changed(x, images[mined.triplets.stack()]),
        )
        return step_on_triplets(loss, logs, mined, x, found)
