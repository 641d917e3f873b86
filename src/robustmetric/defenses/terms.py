"""Terms beside the triplet loss of a defense that perturbs triplets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from robustmetric.defenses.base import Defense
from robustmetric.losses import ROLES, SEXTUPLET, SextupletTerm, Term, check_term, term_loss
from robustmetric.perturb import Budget
from robustmetric.triplets import Sampler
from robustmetric.validate import UserError


class TermDefense(Defense):
    """A defense whose loss takes `terms` on the images of its triplets before and after their perturbation.

    `source`, `budget`, `margin` and `seed` are those of every defense.

    >>> import robustmetric as rm
    >>> rm.defense("ACT[R]&L(a,p,n)").term_kinds
    ['L(a,p,n)']
    """

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
        """Refuse a `term` that is none, or that takes a role that the defense does not have."""
        check_term(term)
        if set(term.roles) <= set(cls.roles):
            return
        known = [
            SextupletTerm(kind).name for kind, (*roles, _) in ROLES.items() if set(roles) <= {*cls.roles}
        ]
        name = getattr(term, "name", type(term).__name__)
        raise UserError(
            f"{cls.lacks}, which {name} takes; possible are {', '.join(known)}, and terms of your own with "
            f"roles among {', '.join(cls.roles)}"
        )

    def describe(self) -> str:
        """Return the name from the names of the parts, with the terms."""
        return "&".join([self.before_terms(), *(getattr(t, "name", type(t).__name__) for t in self.terms)])

    def before_terms(self) -> str:
        """Return the name without the terms."""
        return super().describe()

    def add_terms(self, triplet: Tensor, found: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, a scalar, and its parts as they are logged.

        `triplet` is the loss on the perturbed triplets, `found` has the (T, D) embeddings of the roles.
        """
        loss, losses = triplet, {"loss/triplet": triplet.item()}
        seen = {role: z for role, z in found.items() if role in self.roles}
        for kind, term in zip(self.term_kinds, self.terms, strict=True):
            part = term_loss(term, seen, margin=self.margin)
            losses[f"loss/{kind}"] = losses.get(f"loss/{kind}", 0.0) + part.item()
            loss = loss + part
        return loss, losses
