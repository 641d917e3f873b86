"""Losses: the triplet hinge, intra-class structure and the other terms of a sextuplet."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from robustmetric.distance import BrokenEmbeddingsError, hardness
from robustmetric.registry import Registry, lookup, registry
from robustmetric.validate import UserError, check_signature, is_number, parameters


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


class Roles(NamedTuple):
    """The `anchor`, `positive` and `negative` of a term; `intra_class` says if all three are of one class.

    >>> ROLES["ICS"]
    Roles(anchor='a', positive='a~', negative='p', intra_class=True)
    """

    anchor: str
    positive: str
    negative: str
    intra_class: bool


ROLES: dict[str, Roles] = {
    "ICS": Roles("a", "a~", "p", True),
    "L(a,a~,p~)": Roles("a", "a~", "p~", True),
    "L(p,p~,a)": Roles("p", "p~", "a", True),
    "L(a,a~,n~)": Roles("a", "a~", "n~", False),
    "L(a,p,n~)": Roles("a", "p", "n~", False),
    "L(a,p,n)": Roles("a", "p", "n", False),
}
"""The paper's terms; a, p, n are benign, ã, p̃, ñ (written with a tilde behind) perturbed."""

SEXTUPLET = ("a", "p", "n", "a~", "p~", "n~")
"""The six roles that a term may take."""


class Term(Protocol):
    """Something to add to the loss of HM, EST or ACT, from the sextuplet (a, p, n, ã, p̃, ñ); ACT has no ã.

    A term of your own is found by a name in ``HM[S,LGA]&name`` once it is registered with
    ``robustmetric.register("term", name)``. If it has a `kind`, it is logged as ``loss/KIND``; else by the
    name it is registered or defined under.

    >>> class Pull:
    ...     roles = ("a", "a~")
    ...     def __call__(self, embeddings, *, margin):
    ...         return (embeddings["a"] - embeddings["a~"]).square().sum(1).mean()
    >>> check_term(Pull())
    """

    @property
    def roles(self) -> Collection[str]:
        """Which of a, p, n, a~, p~ and n~ it takes."""
        ...

    def __call__(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        """Return the term, a scalar, from the (T, D) `embeddings` of its roles; `margin` is γ."""
        ...


TERMS: Registry[Term] = registry("term")
"""The terms that may stand behind & in a defense's name."""


def check_term(term: object) -> None:
    """Refuse a `term` that cannot be called or does not name its roles.

    >>> check_term(0.5)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: a term must be an object with roles that is called with (embeddings, *, ...
    """
    if isinstance(term, type) or not callable(term) or not hasattr(term, "roles"):
        raise UserError(
            f"a term must be an object with roles that is called with (embeddings, *, margin), such as "
            f"SextupletTerm, not a {type(term).__name__}"
        )
    call = term.forward if isinstance(term, nn.Module) else term
    check_signature(f"{type(term).__name__}.__call__", call, "embeddings, *, margin")
    roles = term.roles
    listed = isinstance(roles, Collection) and not isinstance(roles, str)
    if not listed or not roles or any(role not in SEXTUPLET for role in roles):
        raise UserError(
            f"{type(term).__name__}.roles is {roles!r}; it must list some of {', '.join(SEXTUPLET)}, such as "
            "('a', 'a~')"
        )


def term_loss(term: Term, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
    """Return a `term` of the (T, D) `embeddings` of each role; `margin` is γ. All but a scalar is refused.

    >>> import torch
    >>> embeddings = {"a": torch.eye(2), "a~": -torch.eye(2), "p": torch.eye(2)}
    >>> term_loss(SextupletTerm("ICS"), embeddings, margin=0.2)
    tensor(1.)
    """
    found = term(embeddings, margin=margin)
    check_loss(f"{type(term).__name__}.__call__", found)
    return found


def check_loss(who: str, loss: object) -> None:
    """Refuse a `loss` that is no scalar of torch or no number; `who` is the method that returned it.

    >>> import torch
    >>> check_loss("Mine.step", torch.ones(2))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: Mine.step returned a loss of torch.float32 of shape (2,); it must be a scalar ...
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.ndim > 0:
        found = f"that is a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            found = f"of {loss.dtype} of shape {tuple(loss.shape)}"
        raise UserError(
            f"{who} returned a loss {found}; it must be a scalar floating-point tensor: take its mean()"
        )
    if not loss.isfinite():
        raise BrokenEmbeddingsError(
            f"{who} returned the loss {loss.item()}; it must be a number: look for a square root, logarithm "
            "or division whose value or gradient is infinite, or lower the learning rate"
        )


@dataclass(frozen=True)
class SextupletTerm:
    """A weighted triplet loss within the sextuplet (a, p, n, ã, p̃, ñ), added to the adversarial loss.

    "ICS" is intra-class structure, L(a, ã, p); the paper's supplement names the others: L(a,ã,p̃),
    L(p,p̃,a), L(a,ã,ñ), L(a,p,ñ) and L(a,p,n), which mixes in regular training. `kind` is one of
    these; `weight` is λ, 0.5 unless given; `margin` is by default 0 within a class, else the defense's γ.

    >>> SextupletTerm("ICS", weight=0.05).name
    'ICS(λ=0.05)'
    """

    kind: str = "ICS"
    weight: float | None = None
    margin: float | None = None

    def __post_init__(self) -> None:
        lookup("sextuplet term", self.kind, ROLES)
        for symbol, value in (("λ", self.weight), ("γ", self.margin)):
            if value is not None and not (is_number(value) and value >= 0):
                raise UserError(f"{symbol} of {self.kind} must be a number of at least 0, not {value}")

    @property
    def roles(self) -> tuple[str, str, str]:
        """The anchor, positive and negative of the term."""
        return ROLES[self.kind][:3]

    @property
    def name(self) -> str:
        """The term as it is written in a defense's name."""
        kind = self.kind.replace("a~", "ã").replace("n~", "ñ").replace("~", "\u0303")
        listed = parameters(λ=self.weight, γ=self.margin)
        if not listed:
            return kind
        return f"{kind[:-1]},{listed})" if kind.endswith(")") else f"{kind}({listed})"

    def __call__(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        """Return the weighted term, a scalar, from the (T, D) `embeddings` of its roles; `margin` is γ."""
        anchor, positive, negative, intra_class = ROLES[self.kind]
        default = 0.0 if intra_class else margin
        loss = triplet_loss(
            embeddings[anchor],
            embeddings[positive],
            embeddings[negative],
            margin=default if self.margin is None else self.margin,
        )
        return (0.5 if self.weight is None else self.weight) * loss


for _kind in ROLES:
    TERMS.register(_kind, kind=_kind)(SextupletTerm)
