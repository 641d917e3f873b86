from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from robustmetric.defenses import HardnessManipulation
from robustmetric.errors import UserError
from robustmetric.losses import ROLES as TABLE
from robustmetric.losses import TERMS, SextupletTerm, Term, triplet_loss

pytestmark = pytest.mark.kernels

ROLES = ("a", "p", "n", "a~", "p~", "n~")
WITHIN_A_CLASS = {"ICS": ("a", "a~", "p"), "L(a,a~,p~)": ("a", "a~", "p~"), "L(p,p~,a)": ("p", "p~", "a")}
ACROSS = {"L(a,a~,n~)": ("a", "a~", "n~"), "L(a,p,n~)": ("a", "p", "n~"), "L(a,p,n)": ("a", "p", "n")}
KINDS = WITHIN_A_CLASS | ACROSS


def sextuplet(count: int = 24, dim: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Embeddings of each role, benign and perturbed apart, so that hinges are on both sides of zero."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(6, count, dim, generator=generator, dtype=torch.float64)
    return dict(zip(ROLES, F.normalize(draw, dim=2), strict=True))


def distance(x: list[float], y: list[float]) -> float:
    return math.sqrt(sum((s - t) ** 2 for s, t in zip(x, y, strict=True)))


def hinges(*triplet: Tensor, margin: float) -> list[float]:
    """Compute d(a, p) − d(a, n) + margin triplet by triplet, without torch."""
    rows = zip(*(role.tolist() for role in triplet), strict=True)
    return [distance(a, p) - distance(a, n) + margin for a, p, n in rows]


def loop_loss(*triplet: Tensor, margin: float) -> float:
    values = [max(0.0, h) for h in hinges(*triplet, margin=margin)]
    return sum(values) / len(values)


# --- the triplet hinge ------------------------------------------------------------------------------------


@pytest.mark.parametrize("margin", [0.0, 0.2, 1.0, 2.0])
def test_triplet_loss_is_the_loop(margin: float) -> None:
    z = sextuplet()
    values = hinges(z["a"], z["p"], z["n"], margin=margin)
    assert max(values) > 0
    if margin <= 0.2:
        assert min(values) < 0  # a mean without the hinge would differ
    loss = triplet_loss(z["a"], z["p"], z["n"], margin)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(loop_loss(z["a"], z["p"], z["n"], margin=margin), rel=1e-12)


# --- the terms of a sextuplet -----------------------------------------------------------------------------


def test_the_terms_are_those_of_the_paper() -> None:
    assert TABLE == KINDS
    assert {kind: TERMS.make(kind) for kind in TERMS} == {kind: SextupletTerm(kind) for kind in KINDS}
    assert {kind: SextupletTerm(kind).roles for kind in KINDS} == KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weight", "margin", "gamma"), [(None, None, 0.2), (0.0, 0.0, 0.9), (0.05, 0.7, 0.2)]
)
def test_a_term_is_the_loop(kind: str, weight: float | None, margin: float | None, gamma: float) -> None:
    z = sextuplet()
    used = margin if margin is not None else (0.0 if kind in WITHIN_A_CLASS else gamma)
    wanted = (0.5 if weight is None else weight) * loop_loss(*(z[role] for role in KINDS[kind]), margin=used)
    found = SextupletTerm(kind, weight=weight, margin=margin)(z, margin=gamma)
    assert found.shape == ()
    assert found.item() == pytest.approx(wanted, rel=1e-12)
    assert (found.item() > 0) == (weight != 0)


# --- gradients --------------------------------------------------------------------------------------------

Loss = Callable[[dict[str, Tensor]], Tensor]


def hinge(margin: float) -> Loss:
    return lambda z: triplet_loss(z["a"], z["p"], z["n"], margin)


def weighted(kind: str, weight: float | None = None, margin: float | None = None) -> Loss:
    return lambda z: SextupletTerm(kind, weight, margin)(z, margin=0.2)


LOSSES: dict[str, tuple[tuple[str, str, str], float, Loss]] = {
    "triplet": (("a", "p", "n"), 0.2, hinge(0.2)),
    "triplet, margin 0": (("a", "p", "n"), 0.0, hinge(0.0)),
    **{kind: (roles, 0.0, weighted(kind)) for kind, roles in WITHIN_A_CLASS.items()},
    **{kind: (roles, 0.2, weighted(kind)) for kind, roles in ACROSS.items()},
    "ICS, λ and γ given": (KINDS["ICS"], 0.3, weighted("ICS", 0.05, 0.3)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_finite_differences_through_the_sphere(name: str) -> None:
    roles, margin, loss = LOSSES[name]
    z = sextuplet(count=8, seed=1)
    values = hinges(*(z[role] for role in roles), margin=margin)
    # Both sides of the hinge are there and none is so near to its kink that a difference would straddle it.
    assert max(values) > 0 > min(values)
    assert min(map(abs, values)) > 1e-3
    scale = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
    raw = tuple((z[role] * s).requires_grad_() for role, s in zip(ROLES, scale, strict=True))

    def on_the_sphere(*raw: Tensor) -> Tensor:
        return loss(dict(zip(ROLES, (F.normalize(x, dim=1) for x in raw), strict=True)))

    assert torch.autograd.gradcheck(on_the_sphere, raw)
    gradients = torch.autograd.grad(on_the_sphere(*raw), raw, allow_unused=True)
    used = {role for role, gradient in zip(ROLES, gradients, strict=True) if gradient is not None}
    assert used == set(roles)
    assert all(gradient.abs().sum() > 0 for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [None, 0.0])
def test_an_anchor_that_did_not_move_costs_nothing(dtype: torch.dtype, margin: float | None) -> None:
    z = sextuplet()
    same = {"a": z["a"].to(dtype), "a~": z["a"].to(dtype).clone(), "p": z["p"].to(dtype)}
    for x in same.values():
        x.requires_grad_()
    loss = SextupletTerm("ICS", margin=margin)(same, margin=0.2)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, list(same.values())):
        assert torch.equal(gradient, torch.zeros_like(gradient))


# --- names and errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (SextupletTerm(), "ICS"),
        (SextupletTerm("ICS", weight=0.05), "ICS(λ=0.05)"),
        (SextupletTerm("ICS", margin=0.2), "ICS(γ=0.2)"),
        (SextupletTerm("ICS", weight=1, margin=0), "ICS(λ=1.0,γ=0.0)"),
        (SextupletTerm("L(a,a~,p~)"), "L(a,\u00e3,p\u0303)"),
        (SextupletTerm("L(p,p~,a)", weight=0.1), "L(p,p\u0303,a,λ=0.1)"),
        (SextupletTerm("L(a,a~,n~)"), "L(a,\u00e3,\u00f1)"),
        (SextupletTerm("L(a,p,n~)", margin=0.1), "L(a,p,\u00f1,γ=0.1)"),
        (SextupletTerm("L(a,p,n)"), "L(a,p,n)"),
    ],
)
def test_the_name_is_the_papers(term: SextupletTerm, name: str) -> None:
    assert str(term) == name


def test_a_kind_and_its_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match=r"^unknown sextuplet term 'ics' \(did you mean 'ICS'"):
        SextupletTerm("ics")
    with pytest.raises(ValueError, match=r"^λ of ICS must be a number of at least 0, not nan$"):
        SextupletTerm("ICS", weight=math.nan)
    with pytest.raises(ValueError, match=r"^γ of ICS must be a number of at least 0, not -0.1$"):
        SextupletTerm("ICS", margin=-0.1)


# --- terms of one's own -----------------------------------------------------------------------------------


class Mine(Term):
    """A term that returns what it was made with."""

    roles: Any = ("a", "a~")

    def __init__(self, returned: Any = 0.0) -> None:
        self.returned = returned

    def loss(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        found: Tensor = self.returned
        return found


@pytest.mark.parametrize("roles", [(), ("a", "b"), "a", None, ("a", 1)])
def test_a_term_names_roles_of_the_sextuplet(roles: Any) -> None:
    term = Mine()
    HardnessManipulation.check_roles(term)
    term.roles = roles
    with pytest.raises(UserError, match=r"Mine\.roles is .*a, p, n, a~, p~, n~") as error:
        HardnessManipulation.check_roles(term)
    assert repr(roles) in str(error.value)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (0.5, "the loss 0.5; it must be a scalar"),
        (torch.zeros(3), r"the loss float32 of shape \(3,\); it must be a scalar.*mean\(\)"),
        (torch.tensor(1), r"the loss int64 of shape \(\); it must be a scalar floating-point"),
        (torch.tensor(math.nan), "the loss nan; it must be a number"),
        (torch.tensor(math.inf), "the loss inf; it must be a number"),
    ],
)
def test_a_term_must_return_a_scalar(returned: Any, says: str) -> None:
    with pytest.raises(UserError, match=r"Mine\.loss returned " + says):
        Mine(returned)(sextuplet(), margin=0.2)
