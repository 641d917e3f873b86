"""Defenses that perturb images: the triplet loss and the terms added to it."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.defenses.base import Defense, Network, Step, triplet_logs
from robustmetric.errors import UserError, instance
from robustmetric.losses import SEXTUPLET, Term, hinge
from robustmetric.sphere import hardness
from robustmetric.triplets import Mined, Triplets
from robustmetric.usercode import split_options


class TermDefense(Defense):
    """A defense whose loss takes `terms` on the images of its triplets before and after their perturbation.

    >>> import robustmetric as rm
    >>> rm.defense("ACT[R]&L(a,p,n)").name
    'ACT[R]&L(a,p,n)'
    """

    takes: ClassVar[tuple[str, ...]] = ("source", "terms")
    roles: ClassVar[tuple[str, ...]] = SEXTUPLET
    """The roles that its triplets have."""

    @classmethod
    def check_roles(cls, term: Term) -> None:
        """Reject a `term` that is none, or that takes a role that the defense does not have."""
        name, roles = type(term).__name__, instance("a term", term, Term).roles
        listed = isinstance(roles, Collection) and not isinstance(roles, str)
        if not listed or not roles or not set(roles) <= set(SEXTUPLET):
            raise UserError(
                f"{name}.roles is {roles!r}; it must list some of {', '.join(SEXTUPLET)}, such as ('a', 'a~')"
            )
        if lacking := ", ".join(sorted(set(roles) - set(cls.roles))):
            kind, known = term.name or name, ", ".join(cls.roles)
            raise UserError(f"{cls.family} has no {lacking}, which {kind} takes; its terms take {known}")

    def learn(
        self,
        network: Network,
        images: Tensor,
        mined: Mined,
        x: Tensor,
        z: Tensor | None = None,
        *,
        source: Tensor | None = None,
        destination: Tensor | None = None,
        perturbed: Tensor,
    ) -> Step:
        """Return the step on perturbed images `x`: those of the `mined` triplets, (T, 3, C, H, W), in turn.

        Or `x` is the whole batch (N, C, H, W), perturbed, with its embeddings `z` (N, D). The `network`
        embeds the perturbed images as one batch and the benign `images` (N, C, H, W), where a term needs
        them, as another. `source` and `destination` are the hardness (T,) before the perturbation, by default
        as mined, and as wanted; `perturbed` says which triplets or images were changed.
        """
        labels, triplets = mined.batch.labels, mined.triplets
        if z is None:
            x, labels = x.flatten(0, 1), labels[triplets.stack().flatten()]
            z = network(x, learn=True)
            triplets = Triplets(*torch.arange(len(z), device=z.device).view(-1, 3).unbind(1))
        found = {f"{role}~": z.index_select(0, at) for role, at in zip("apn", triplets, strict=True)}
        reached = hardness(*found.values())
        loss = hinge(reached, self.margin)
        losses = {"loss/triplet": loss.item()}
        used = {role for term in self.terms for role in term.roles}
        if used & {*"apn"}:
            # DistributedDataParallel saw a pass already; another would write over the BatchNorm's buffers,
            # which the gradient of the first still needs. It waits for the gradients of both all the same.
            benign = network(images)
            roles = zip("apn", mined.triplets, strict=True)
            found |= {role: benign.index_select(0, at) for role, at in roles if role in used}
        seen = {role: found[role] for role in found if role in self.roles}
        for term in self.terms:
            part, kind = term(seen, margin=self.margin), f"loss/{_kind_of(term)}"
            losses[kind] = losses.get(kind, 0.0) + part.item()
            loss = loss + part
        source = mined.hardness if source is None else source
        share = perturbed.float().mean().item()
        logs = triplet_logs(mined, losses, source, destination, reached, perturbed=share)
        return Step(loss, logs, z, labels, triplets, x)


def _kind_of(term: Term) -> str:
    """Return what a term is logged as: its `kind`, else the name that it was found by, else its class."""
    found_by = split_options(term.written)[0].rpartition(":")[2]
    return str(getattr(term, "kind", "") or found_by or type(term).__name__)
