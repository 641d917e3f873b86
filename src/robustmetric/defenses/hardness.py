"""HM: Hardness Manipulation, with the terms that make use of its sextuplets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robustmetric.defenses.base import Defense, Moved, Network, Step, embed_roles, mean_over_workers, spread
from robustmetric.destination import Destination, sampler_name
from robustmetric.distance import cross_distance, hardness
from robustmetric.losses import SextupletTerm, hinge
from robustmetric.perturb import Budget, frozen, pgd
from robustmetric.triplets import Sampler, Triplets
from robustmetric.validate import UserError


class HardnessManipulation(Defense):
    """Perturb each source triplet just until it reaches its destination hardness, and train on that.

    >>> import robustmetric as rm
    >>> rm.defense("HM[S,LGA]&ICS").destination
    Gradual(LGA)
    """

    family = "HM"

    def __init__(
        self,
        source: Sampler,
        destination: Destination,
        terms: Sequence[SextupletTerm] = (),
        *,
        budget: Budget,
        margin: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__(source, budget=budget, margin=margin, seed=seed)
        if not isinstance(destination, Destination) or not all(isinstance(t, SextupletTerm) for t in terms):
            raise UserError(
                f"HM takes a Destination and SextupletTerms, not {destination!r} and {terms!r}: rm.defense() "
                "makes them from a name such as HM[S,LGA]&ICS"
            )
        self.destination = destination
        self.terms = tuple(terms)
        used = {role for term in self.terms for role in term.roles[:3]}
        self._benign = [role for role in "apn" if role in used]

    @property
    def name(self) -> str:
        """HM with source and destination, and its terms."""
        manipulation = f"{self.family}[{sampler_name(self.source)},{self.destination.name}]"
        return "&".join([manipulation, *(term.name for term in self.terms)])

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Mine, perturb the triplets that are too easy, take the loss."""
        with frozen(network.model):
            with torch.no_grad():
                z = network(images)
            dist = cross_distance(z)
            source = self.source(dist, labels, generator=self.generator, dim=z.shape[1])
            wanted = self.destination(
                dist, labels, source, sampler=self.source, generator=self.generator, dim=z.shape[1]
            )
            if not torch.isfinite(wanted).all():
                raise UserError(f"the destination {self.destination.name} holds NaN or infinity: {wanted}")
            found = source.hardness(dist)
            moved = manipulate(network, images, source, found, wanted, self.budget)
        seen = embed_roles(network, images, source, moved, self._benign)
        reached = hardness(seen.role["a~"], seen.role["p~"], seen.role["n~"])
        loss = triplet = hinge(reached, self.margin)
        logs = {"loss/triplet": triplet.item()}
        for term in self.terms:
            part = term(seen.role, margin=self.margin)
            key = f"loss/{term.kind}"
            logs[key] = logs.get(key, 0.0) + part.item()
            loss = loss + part
        if self.training:
            self.destination.update(mean_over_workers(triplet.detach()))
        return seen.step(
            loss,
            {
                **logs,
                "hardness/source": found.mean().item(),
                "hardness/destination": wanted.mean().item(),
                "hardness/reached": reached.mean().item(),
                "perturbed": len(moved.rows) / len(found),
                "spread": spread(dist),
            },
            source,
            labels,
        )


def manipulate(
    network: Network, images: Tensor, source: Triplets, found: Tensor, wanted: Tensor, budget: Budget
) -> Moved:
    """Raise the hardness of the source triplets from `found` (T,) to `wanted` (T,), within the budget.

    Only triplets with found < wanted are computed, and each only until it gets there. Call it inside
    `frozen(network.model)`.
    """
    rows = (found < wanted).nonzero().squeeze(1)
    wanted = wanted[rows]

    def shortfall(x: Tensor, active: Tensor) -> Tensor:
        a, p, n = network(x.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
        return (wanted[active] - hardness(a, p, n)).clamp_min(0).square()

    return Moved(rows, pgd(images[source.stack()[rows]], shortfall, budget))
