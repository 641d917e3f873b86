"""ACT: anti-collapse triplets."""

from __future__ import annotations

from torch import Tensor

from robustmetric.defenses.base import DEFENSES, Network, Step, changed
from robustmetric.defenses.terms import TermDefense
from robustmetric.perturb import frozen, pgd
from robustmetric.sphere import pair_distance


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

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Mine, pull together, take the loss."""
        with frozen(network.model):
            mined = self.mine(network.look(images), labels)
            x = images[mined.triplets.stack()]

            def apart(x: Tensor, rows: Tensor) -> Tensor:
                p, n = network(x.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
                return pair_distance(p, n)

            x[:, 1:] = pgd(x[:, 1:], apart, self.budget)
        perturbed = changed(x, images[mined.triplets.stack()])
        return self.learn(network, images, mined, x, perturbed=perturbed)
