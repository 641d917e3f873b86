"""Losses: the triplet hinge, intra-class structure and the other terms of a sextuplet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from robustmetric.distance import hardness
from robustmetric.registry import lookup, parameters
from robustmetric.validate import UserError, is_number


def triplet_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 0.2) -> Tensor:
    """Mean of max(0, d(a, p) − d(a, n) + margin) over triplets of embeddings: three (T, D) to a scalar.

    >>> import torch
    >>> a, p, n = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    >>> triplet_loss(a, p, n)
    tensor(1.6142)
    """
    return hinge(hardness(anchor, positive, negative), margin)


def hinge(hardness: Tensor, margin: float) -> Tensor:
    """Mean of max(0, H + margin) over the hardness (T,) of triplets.

    >>> import torch
    >>> hinge(torch.tensor([-0.5, 0.1]), 0.2)
    tensor(0.1500)
    """
    return (hardness + margin).clamp_min(0).mean()


class Roles(NamedTuple):
    """The anchor, positive and negative of a term, and whether all three are of one class."""

    anchor: str
    positive: str
    negative: str
    intra_class: bool


# a, p, n benign; ã, p̃, ñ (written with a tilde behind) perturbed.
TERMS: dict[str, Roles] = {
    "ICS": Roles("a", "a~", "p", True),
    "L(a,a~,p~)": Roles("a", "a~", "p~", True),
    "L(p,p~,a)": Roles("p", "p~", "a", True),
    "L(a,a~,n~)": Roles("a", "a~", "n~", False),
    "L(a,p,n~)": Roles("a", "p", "n~", False),
    "L(a,p,n)": Roles("a", "p", "n", False),
}


@dataclass(frozen=True)
class SextupletTerm:
    """A weighted triplet loss within the sextuplet (a, p, n, ã, p̃, ñ), added to the adversarial loss.

    "ICS" is intra-class structure, L(a, ã, p); the paper's supplement names the others: L(a,ã,p̃),
    L(p,p̃,a), L(a,ã,ñ), L(a,p,ñ) and L(a,p,n), which mixes in regular training. The weight λ is 0.5 unless
    given; the margin is 0 within a class and the defense's γ otherwise.

    >>> SextupletTerm("ICS", weight=0.05).name
    'ICS(λ=0.05)'
    """

    kind: str = "ICS"
    weight: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        lookup("sextuplet term", self.kind, TERMS)
        for symbol, value in (("λ", self.weight), ("γ", self.margin)):
            if value is not None and not (is_number(value) and value >= 0):
                raise UserError(f"{symbol} of {self.kind} must be a number of at least 0, not {value}")

    @property
    def roles(self) -> Roles:
        """Which of the six embeddings the term takes."""
        return TERMS[self.kind]

    @property
    def name(self) -> str:
        """The term as it is written in a defense's name."""
        kind = self.kind.replace("a~", "ã").replace("n~", "ñ").replace("~", "\u0303")
        listed = parameters(λ=self.weight, γ=self.margin)
        if not listed:
            return kind
        return f"{kind[:-1]},{listed})" if kind.endswith(")") else f"{kind}({listed})"

    def __call__(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        """Return the weighted term, a scalar, from the (T, D) embeddings of each role; `margin` is γ."""
        anchor, positive, negative, intra_class = self.roles
        default = 0.0 if intra_class else margin
        loss = triplet_loss(
            embeddings[anchor],
            embeddings[positive],
            embeddings[negative],
            margin=default if self.margin is None else self.margin,
        )
        return (0.5 if self.weight is None else self.weight) * loss
