"""Losses: the triplet hinge, intra-class structure and the other terms of a sextuplet."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from robustmetric.errors import UserError, describe, number
from robustmetric.registry import Part, Registry, lookup, registry, with_symbols
from robustmetric.sphere import BrokenEmbeddingsError, hardness


def triplet_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 0.2) -> Tensor:
    """Return the mean of max(0, d(a, p) − d(a, n) + margin) over triplets, a scalar.

    `anchor`, `positive` and `negative` are their (T, D) embeddings, `margin` is γ.

    >>> import torch
    >>> a, p, n = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    >>> triplet_loss(a, p, n)
    tensor(1.6142)
    """
    return hinge(hardness(anchor, positive, negative), margin)


def hinge(hardness: Tensor, margin: float) -> Tensor:
    """Return the mean of max(0, H + margin) over the `hardness` (T,) of triplets; `margin` is γ.

    >>> import torch
    >>> hinge(torch.tensor([-0.5, 0.1]), 0.2)
    tensor(0.1500)
    """
    return (hardness + margin).clamp_min(0).mean()


ROLES: dict[str, tuple[str, str, str]] = {
    "ICS": ("a", "a~", "p"),
    "L(a,a~,p~)": ("a", "a~", "p~"),
    "L(p,p~,a)": ("p", "p~", "a"),
    "L(a,a~,n~)": ("a", "a~", "n~"),
    "L(a,p,n~)": ("a", "p", "n~"),
    "L(a,p,n)": ("a", "p", "n"),
}
"""Anchor, positive and negative of the paper's terms: a, p, n are benign, a~, p~, n~ (ã, p̃, ñ) perturbed."""

SEXTUPLET = ("a", "p", "n", "a~", "p~", "n~")
"""The six roles that a term may take."""


class Term(Part):
    """Something to add to the loss of HM, EST or ACT, from the sextuplet (a, p, n, ã, p̃, ñ); ACT has no ã.

    A subclass lists its `roles` and implements `loss`. It is found by a name in ``HM[S,LGA]&name`` once it is
    registered with ``robustmetric.register("term", name)``. It is logged as ``loss/KIND`` if it has a `kind`,
    else by the name it is registered or defined under.

    >>> class Pull(Term):
    ...     roles = ("a", "a~")
    ...     def loss(self, embeddings, *, margin):
    ...         return (embeddings["a"] - embeddings["a~"]).square().sum(1).mean()
    """

    signatures = ("loss(embeddings, *, margin)",)
    roles: Collection[str] = ()
    """Which of a, p, n, a~, p~ and n~ it takes."""

    def loss(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        """Return the term, a scalar, from the (T, D) `embeddings` of its roles; `margin` is γ."""
        raise UserError(f"the term {type(self).__name__} must implement loss(embeddings, *, margin)")

    def __call__(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        """Return the `loss` of the (T, D) `embeddings` with the `margin`; reject all but a finite scalar."""
        return check_loss(f"{type(self).__name__}.loss", self.loss(embeddings, margin=margin))


TERMS: Registry[Term] = registry("term", Term)
"""The terms that may follow & in a defense's name."""


def check_loss(who: str, loss: object) -> Tensor:
    """Return a `loss`; reject all but a finite scalar. `who` is the method that returned it.

    >>> import torch
    >>> check_loss("Mine.step", torch.ones(2))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: Mine.step returned the loss float32 of shape (2,); it must be a scalar floating...
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.ndim > 0:
        raise UserError(
            f"{who} returned the loss {describe(loss)}; it must be a scalar floating-point tensor: take its "
            "mean()"
        )
    if not loss.isfinite():
        raise BrokenEmbeddingsError(
            f"{who} returned the loss {loss.item()}; it must be a number: look for a square root, logarithm "
            "or division whose value or gradient is infinite, or lower the learning rate"
        )
    return loss


@dataclass(frozen=True)
class SextupletTerm(Term):
    """A weighted triplet loss within the sextuplet (a, p, n, ã, p̃, ñ), added to the adversarial loss.

    "ICS" is intra-class structure, L(a, ã, p); the paper's supplement names the others: L(a,ã,p̃),
    L(p,p̃,a), L(a,ã,ñ), L(a,p,ñ) and L(a,p,n), which mixes in regular training. `kind` is one of
    these; `weight` is λ, 0.5 unless given; `margin` is by default 0 within a class, else the defense's γ.
    """

    kind: str = "ICS"
    weight: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        lookup("sextuplet term", self.kind, ROLES)
        for symbol, value in (("λ", self.weight), ("γ", self.margin)):
            if value is not None:
                number(f"{symbol} of {self.kind}", value, 0)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The paper's name of its kind, with λ and γ if they are given."""
        kind = unicodedata.normalize("NFC", self.kind.replace("~", "\u0303"))
        return with_symbols(kind, λ=self.weight, γ=self.margin)

    @property
    def roles(self) -> tuple[str, str, str]:  # type: ignore[override]
        """The anchor, positive and negative of the term."""
        return ROLES[self.kind]

    def loss(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        """Return the weighted term, a scalar, from the (T, D) `embeddings` of its roles; `margin` is γ."""
        anchor, positive, negative = self.roles
        default = margin if negative in ("n", "n~") else 0.0  # 0 within a class
        used = default if self.margin is None else self.margin
        loss = triplet_loss(embeddings[anchor], embeddings[positive], embeddings[negative], used)
        return (0.5 if self.weight is None else self.weight) * loss


for _kind in ROLES:
    TERMS.register(_kind, kind=_kind)(SextupletTerm)
