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


def test_triplet_loss_has_the_papers_margin_unless_told() -> None:
    z = sextuplet()
    default = triplet_loss(z["a"], z["p"], z["n"])
    assert default.item() == triplet_loss(z["a"], z["p"], z["n"], 0.2).item()
    assert default.item() != triplet_loss(z["a"], z["p"], z["n"], 0.0).item()


def test_triplet_loss_is_zero_where_the_negative_is_far_enough() -> None:
    a = torch.tensor([[1.0, 0.0]], requires_grad=True)
    p, n = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    loss = triplet_loss(a, p, n, 1.9)
    loss.backward()
    assert loss.item() == 0
    assert a.grad is not None
    assert torch.equal(a.grad, torch.zeros(1, 2))


def test_triplet_loss_rises_with_each_part_as_it_should() -> None:
    a = torch.tensor([[1.0, 0.0]])
    near, far = torch.tensor([[0.8, 0.6]]), torch.tensor([[0.0, 1.0]])
    assert triplet_loss(a, far, near, 0.0) > 0
    assert triplet_loss(a, near, far, 0.0) == 0
    assert triplet_loss(a, far, near, 0.5) - triplet_loss(a, far, near, 0.0) == pytest.approx(0.5)


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


def test_a_term_is_intra_class_structure_unless_told() -> None:
    z = sextuplet()
    assert SextupletTerm() == SextupletTerm("ICS")
    assert SextupletTerm()(z, margin=0.2).item() == SextupletTerm("ICS", 0.5, 0.0)(z, margin=0.2).item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_term_needs_its_own_three_roles_alone(kind: str) -> None:
    z = sextuplet()
    own = {role: z[role] for role in KINDS[kind]}
    assert SextupletTerm(kind)(own, margin=0.2).item() == SextupletTerm(kind)(z, margin=0.2).item()


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


def on_circle(degrees: float) -> Tensor:
    angle = math.radians(degrees)
    return torch.tensor([[math.cos(angle), math.sin(angle)]], dtype=torch.float64)


def test_ics_pulls_the_perturbed_anchor_back_and_pushes_the_positive_off() -> None:
    # ã at 60° is farther from a at 0° than p at −30°: the hinge is active.
    z = {"a": on_circle(0), "a~": on_circle(60), "p": on_circle(-30)}
    for x in z.values():
        x.requires_grad_()
    before = SextupletTerm()(z, margin=0.2)
    gradient = dict(zip(z, torch.autograd.grad(before, list(z.values())), strict=True))
    assert before.item() > 0
    assert all(float(g.norm()) > 0 for g in gradient.values())

    a, moved, p = (z[role].detach() for role in ("a", "a~", "p"))
    # Of λ·(d(a, ã) − d(a, p)): λ times the unit vector from a to ã, and from p to a.
    torch.testing.assert_close(gradient["a~"], 0.5 * F.normalize(moved - a))
    torch.testing.assert_close(gradient["p"], 0.5 * F.normalize(a - p))
    torch.testing.assert_close(gradient["a"], -gradient["a~"] - gradient["p"])

    step = 1e-3
    assert torch.dist(a, moved - step * gradient["a~"]) < torch.dist(a, moved)
    assert torch.dist(a, p - step * gradient["p"]) > torch.dist(a, p)
    new_a = a - step * gradient["a"]
    assert torch.dist(new_a, moved) - torch.dist(new_a, p) < torch.dist(a, moved) - torch.dist(a, p)


def test_ics_leaves_a_perturbed_anchor_alone_that_is_nearer_than_the_positive() -> None:
    z = {"a": on_circle(0), "a~": on_circle(20), "p": on_circle(-30)}
    for x in z.values():
        x.requires_grad_()
    loss = SextupletTerm()(z, margin=0.2)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, list(z.values())):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_ics_gradient_is_that_of_the_active_triplets_alone() -> None:
    active, inactive = on_circle(60), on_circle(20)
    z = {
        "a": on_circle(0).repeat(2, 1),
        "a~": torch.cat([active, inactive]).requires_grad_(),
        "p": on_circle(-30).repeat(2, 1),
    }
    (gradient,) = torch.autograd.grad(SextupletTerm()(z, margin=0.2), [z["a~"]])
    assert gradient[0].abs().sum() > 0
    assert torch.equal(gradient[1], torch.zeros(2, dtype=torch.float64))


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


def test_three_equal_points_have_a_finite_gradient_with_and_without_margin() -> None:
    point = on_circle(10)
    for margin in (0.0, 0.2):
        z = {role: point.clone().requires_grad_() for role in ("a", "a~", "p")}
        loss = SextupletTerm("ICS", weight=1.0, margin=margin)(z, margin=0.2)
        assert loss.item() == pytest.approx(margin, abs=1e-15)
        for gradient in torch.autograd.grad(loss, list(z.values())):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_an_active_hinge_at_zero_distance_still_moves_the_positive() -> None:
    z = {"a": on_circle(0), "a~": on_circle(0), "p": on_circle(5)}
    for x in z.values():
        x.requires_grad_()
    loss = SextupletTerm("ICS", margin=0.5)(z, margin=0.2)
    moved, p = torch.autograd.grad(loss, [z["a~"], z["p"]])
    assert loss.item() > 0
    assert torch.equal(moved, torch.zeros_like(moved))
    assert p.abs().sum() > 0


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


@pytest.mark.parametrize(
    ("kind", "hint"), [("ics", "ICS"), ("L(a,p)", "L(a,p,n)"), ("L(a,p,m)", "L(a,p,n)"), ("nothing", None)]
)
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: str, hint: str | None) -> None:
    with pytest.raises(ValueError, match=r"^unknown sextuplet term") as error:
        SextupletTerm(kind)
    message = str(error.value)
    assert repr(kind) in message
    assert all(known in message for known in KINDS)
    assert (f"did you mean {hint!r}" in message) if hint else ("did you mean" not in message)


@pytest.mark.parametrize("value", [-0.1, -1e-9, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("symbol", "parameter"), [("λ", "weight"), ("γ", "margin")])
def test_a_weight_or_margin_must_be_a_number_of_at_least_zero(
    symbol: str, parameter: str, value: float
) -> None:
    given = {parameter: value}
    with pytest.raises(ValueError, match=rf"^{symbol} of ICS must be a number of at least 0, not {value}$"):
        SextupletTerm("ICS", **given)


def test_a_term_cannot_be_changed_afterwards() -> None:
    term = SextupletTerm("ICS", weight=0.05)
    with pytest.raises(AttributeError, match="weight"):
        term.weight = -1.0  # type: ignore[misc]
    assert term.weight == 0.05


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


def test_what_is_no_term_is_refused() -> None:
    wrong: Any
    for wrong in ("ICS", 0.5, Mine, lambda embeddings, margin: 0.0):
        with pytest.raises(UserError, match="a term must be a Term, not "):
            HardnessManipulation.check_roles(wrong)
    with pytest.raises(UserError, match=r"Before\.loss takes .*must take \(self, embeddings, \*, margin\)"):

        class Before(Term):
            def loss(self, embeddings: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
                return embeddings["a"].mean()


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
