"""HM: Hardness Manipulation, with the terms that make use of its sextuplets."""

from __future__ import annotations

from torch import Tensor

from robustmetric.defenses.base import DEFENSES, Network, Step, mean_over_workers
from robustmetric.defenses.terms import TermDefense
from robustmetric.destination import Destination
from robustmetric.perturb import Budget, frozen, pgd
from robustmetric.sphere import hardness
from robustmetric.triplets import Mined


@DEFENSES.register("HM")
@DEFENSES.register("min-max")
class HardnessManipulation(TermDefense):
    """Perturb each source triplet just until it reaches its destination hardness, and train on that.

    `source` is the sampler of the source triplets, `destination` the hardness they are to reach, and `terms`
    are added to the loss.
    """

    family = "HM"
    takes = ("source", "destination", "terms")

    destination: Destination

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Mine, perturb the triplets that are too easy, take the loss."""
        with frozen(network.model):
            mined = self.mine(network.look(images), labels)
            wanted = self.destination(mined, generator=self.generator)
            x = manipulate(network, images, mined, wanted, self.budget)
        easier = mined.hardness < wanted
        step = self.learn(network, images, mined, x, destination=wanted, perturbed=easier)
        if self.training:
            triplet = step.loss.new_tensor(step.logs["loss/triplet"])
            self.destination.update(mean_over_workers(triplet))
        return step


def manipulate(network: Network, images: Tensor, mined: Mined, wanted: Tensor, budget: Budget) -> Tensor:
    """Raise the hardness of `mined` triplets of (N, C, H, W) `images` to `wanted` (T,), within the `budget`.

    Return their images (T, 3, C, H, W). Only triplets that are easier are computed by the `network`, and each
    only until it gets there. Call it inside `frozen(network.model)`.
    """
    x = images[mined.triplets.stack()]
    rows = (mined.hardness < wanted).nonzero().squeeze(1)

    def shortfall(x: Tensor, active: Tensor) -> Tensor:
        a, p, n = network(x.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
        return (wanted[rows[active]] - hardness(a, p, n)).clamp_min(0).square()

    x[rows] = pgd(x[rows], shortfall, budget)
    return x
