"""Terms beside the triplet loss of a defense that perturbs triplets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.defenses.base import Defense, Network, Step
from robustmetric.defenses.notation import name_of
from robustmetric.losses import ROLES, SEXTUPLET, SextupletTerm, Term
from robustmetric.perturb import Budget
from robustmetric.triplets import Mined, Sampler, Triplets
from robustmetric.validate import UserError, instance


class TermDefense(Defense):
    """A defense whose loss takes `terms` on the images of its triplets before and after their perturbation.

    `source`, `budget`, `margin` and `seed` are those of every defense.

    >>> import robustmetric as rm
    >>> rm.defense("ACT[R]&L(a,p,n)").term_kinds
    ['L(a,p,n)']
    """

    takes: ClassVar[tuple[str, ...]] = ("source", "terms")
    roles: ClassVar[tuple[str, ...]] = SEXTUPLET
    """The roles that its triplets have."""
    lacks: ClassVar[str] = ""
    """Why it does not have the others."""

    def __init__(
        self,
        source: Sampler,
        terms: Sequence[Term] = (),
        *,
        budget: Budget,
        margin: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__(source, budget=budget, margin=margin, seed=seed)
        for term in terms:
            self.check_roles(term)
        self.terms = tuple(terms)
        self.term_kinds = [str(getattr(term, "kind", type(term).__name__)) for term in self.terms]
        used = {role for term in self.terms for role in term.roles}
        self._benign = [role for role in "apn" if role in used]

    @classmethod
    def check_roles(cls, term: Term) -> None:
        """Reject a `term` that is none, or that takes a role that the defense does not have."""
        name, roles = type(term).__name__, instance("a term", term, Term).roles
        listed = isinstance(roles, Collection) and not isinstance(roles, str)
        if not listed or not roles or not set(roles) <= set(SEXTUPLET):
            raise UserError(
                f"{name}.roles is {roles!r}; it must list some of {', '.join(SEXTUPLET)}, such as ('a', 'a~')"
            )
        if not set(roles) <= set(cls.roles):
            fit = (kind for kind, taken in ROLES.items() if set(taken) <= set(cls.roles))
            known = [name_of(SextupletTerm(kind)) for kind in fit]
            raise UserError(
                f"{cls.lacks}, which {name_of(term)} takes; possible are {', '.join(known)}, "
                f"and terms of your own with roles among {', '.join(cls.roles)}"
            )

    def embed_roles(self, network: Network, images: Tensor, mined: Mined, x: Tensor) -> dict[str, Tensor]:
        """Embed what the loss is taken on: (T, D) for each of a~, p~, n~ and for the benign roles of terms.

        The perturbed triplets `x` (T, 3, C, H, W) are one batch of the network, the benign `images`
        (N, C, H, W) another.
        """
        z = network(x.flatten(0, 1), learn=True).unflatten(0, (-1, 3))
        found = dict(zip(("a~", "p~", "n~"), z.unbind(1), strict=True))
        return found | self.embed_benign(network, images, mined.triplets)

    def embed_benign(self, network: Network, images: Tensor, triplets: Triplets) -> dict[str, Tensor]:
        """Embed the benign roles that terms take of `triplets` of (N, C, H, W) `images`: (T, D) for each."""
        if not self._benign:
            return {}
        # DistributedDataParallel saw a pass already; in another it would write over the BatchNorm's buffers,
        # which the gradient of the first still needs. It waits for the gradients of both all the same.
        z = network(images)
        return {role: z.index_select(0, triplets["apn".index(role)]) for role in self._benign}

    def add_terms(self, triplet: Tensor, found: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, a scalar, and its parts as they are logged.

        `triplet` is the loss on the perturbed triplets, `found` has the (T, D) embeddings of the roles.
        """
        loss, losses = triplet, {"loss/triplet": triplet.item()}
        seen = {role: z for role, z in found.items() if role in self.roles}
        for kind, term in zip(self.term_kinds, self.terms, strict=True):
            part = term(seen, margin=self.margin)
            losses[f"loss/{kind}"] = losses.get(f"loss/{kind}", 0.0) + part.item()
            loss = loss + part
        return loss, losses


def step_on_triplets(
    loss: Tensor, logs: dict[str, float], mined: Mined, x: Tensor, found: Mapping[str, Tensor]
) -> Step:
    """Return the step of a `loss` with its `logs`: its batch is the perturbed triplets `x` in turn.

    `x` (T, 3, C, H, W) are the `mined` triplets as they were perturbed, `found` has their (T, D) embeddings.
    """
    z = torch.stack([found[role] for role in ("a~", "p~", "n~")], dim=1).flatten(0, 1)
    labels = mined.batch.labels[mined.triplets.stack().flatten()]
    in_turn = torch.arange(len(z), device=z.device).view(-1, 3)
    return Step(loss, logs, z, labels, Triplets(*in_turn.unbind(1)), x.flatten(0, 1))
