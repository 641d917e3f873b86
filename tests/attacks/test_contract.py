"""What a user's attack or search returns wrongly is told: class, method, what came and what must be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from robustmetric import UserError
from robustmetric.attacks import (
    ATTACKS,
    Attack,
    Column,
    Draws,
    Gallery,
    Problem,
    Queries,
    Search,
    Target,
    Transfer,
    attack,
)
from robustmetric.perturb import Budget
from tests.helpers.goals import GOALS

BUDGET = Budget(eps=0.1, alpha=0.05, steps=2)
B, N = 18, 40  # of the fixtures: queries, and images in the gallery


@dataclass(frozen=True, kw_only=True)
class Mine(Attack):
    """An attack that returns what it is told to."""

    name: ClassVar[str] = "mine"
    columns: tuple[Column, ...] = (Column("a", "higher"), Column("b", None))  # type: ignore[misc]
    read_early: tuple[str, ...] = ()  # type: ignore[misc]
    perturbs: str = "query"  # type: ignore[misc]
    returns: Callable[[Tensor], Any]

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        return self.returns(queries.own)  # type: ignore[no-any-return]

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        return self.returns(z)  # type: ignore[no-any-return]

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        return self.returns(z)  # type: ignore[no-any-return]

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        return self.returns(index)  # type: ignore[no-any-return]

    def appraise(
        self, z: Tensor, target: Target, queries: Queries, gallery: Gallery
    ) -> tuple[Tensor, Tensor | None]:
        return self.returns(z)  # type: ignore[no-any-return]

    def start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        return self.returns(images)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Own(Search):
    """A search that returns what it is told to."""

    follows_gradient: ClassVar[bool] = False
    returns: Callable[[Tensor], Any]

    def minimise(self, problem: Problem) -> Tensor:
        return self.returns(problem.images)  # type: ignore[no-any-return]


def draws() -> Draws:
    return Draws(0, "mine", range(B))


@pytest.mark.parametrize("name", [*dict.fromkeys([*ATTACKS, *GOALS]), "CA+(w=3)", "SP-QA-(m=2)"])
def test_what_is_built_in_keeps_the_contract_and_passes_unchanged(
    name: str, queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    made = attack(name)
    made.check()
    index = made.checked_select(queries, gallery, draws=draws())
    assert index.equal(made.select(queries, gallery, draws=draws()))
    target = made.checked_aim(index, queries, gallery)
    z = moved.clone().requires_grad_()
    value = made.checked_objective(z, target, queries, gallery)
    assert value.equal(made.objective(z, target, queries, gallery))
    both = made.checked_appraise(z, target, queries, gallery)
    assert both[0].equal(value)
    assert (both[1] is not None) is made.can_win
    assert list(made.checked_measure(z, target, queries, gallery)) == [c.name for c in made.columns]


@pytest.mark.parametrize(
    ("method", "returns", "got", "wanted"),
    [
        ("select", lambda own: None, "None", f"shape ({B}, W)"),
        ("select", lambda own: own[1:, None], f"int64 of shape ({B - 1}, 1)", f"shape ({B}, W)"),
        ("select", lambda own: own[:, None] >= 0, f"bool of shape ({B}, 1)", "integers"),
        ("select", lambda own: own[:, None], "-1, -1", "positions in the gallery"),
        ("select", lambda own: torch.full((B, 2), N), "40, 40, 40, 40, 40 and 31 more", f"0 to {N - 1}"),
        ("aim", lambda index: index, "int64", "a Target"),
        ("appraise", lambda z: z.sum(1), "float64", "the values, and which queries succeeded"),
        ("appraise", lambda z: (z.sum(1), z), "float64", f"({B},) bools"),
        ("appraise", lambda z: (z.sum(1), z.sum(1) > 0), "bool", "a column has a success_value"),
        ("objective", lambda z: z.sum(1, keepdim=True), f"float64 of shape ({B}, 1)", "finite floats"),
        ("objective", lambda z: z.sum(1).detach(), "values without a gradient", "finite floats"),
        ("objective", lambda z: z.sum(1) / 0, "NaN or infinity", "finite floats"),
        ("measure", lambda z: None, "None", "a dict of a, b"),
        ("measure", lambda z: {"a": z.sum(1)}, "columns a", "a dict of a, b"),
        ("measure", lambda z: {"a": z.sum(1), "b": z.sum(1) / 0}, "infinity for b", "NaN where undefined"),
        ("start", lambda x: x[1:], "float32 of shape (2, 1, 2, 2)", "None, or finite floats of shape (3, 1"),
    ],
)
def test_what_a_method_returns(
    method: str, returns: Any, got: str, wanted: str, queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    mine = Mine(returns=returns)
    z, target = moved.clone().requires_grad_(), Target(queries.own[:, None])
    calls: dict[str, Callable[[], object]] = {
        "select": lambda: mine.checked_select(queries, gallery, draws=draws()),
        "aim": lambda: mine.checked_aim(queries.own[:, None], queries, gallery),
        "appraise": lambda: mine.checked_appraise(z, target, queries, gallery),
        "objective": lambda: mine.checked_objective(z, target, queries, gallery),
        "measure": lambda: mine.checked_measure(z, target, queries, gallery),
        "start": lambda: mine.checked_start(torch.rand(3, 1, 2, 2), draws=draws()),
    }
    with pytest.raises(UserError) as error:
        calls[method]()
    before, after = str(error.value).split("; it must return ", 1)
    assert before.startswith(f"Mine.{method} returned")
    assert got in before
    assert wanted in after


def test_what_may_be_returned(queries: Queries, gallery: Gallery, moved: Tensor) -> None:
    """Columns in any order, NaN, no gradient where none is asked for, and NaN of a broken network."""
    mine = Mine(returns=lambda z: {"b": z.sum(1), "a": torch.full((B,), torch.nan)})
    target = Target(queries.own[:, None])
    assert list(mine.checked_measure(moved, target, queries, gallery)) == ["a", "b"]
    detached = Mine(returns=lambda z: z.detach().sum(1))
    detached.checked_objective(moved, target, queries, gallery)
    with torch.no_grad():
        detached.checked_objective(moved.clone().requires_grad_(), target, queries, gallery)
    broken = torch.full_like(queries.z, torch.nan)
    assert detached.checked_objective(broken, target, queries, gallery).isnan().all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"columns": ()}, "columns"),
        ({"columns": Column("a", None)}, "columns"),
        ({"columns": (Column("a", None), Column("a", "higher"))}, "columns"),
        ({"columns": None}, "columns"),
        ({"read_early": ("c",)}, "read_early"),
        ({"perturbs": "gallery"}, "perturbs"),
    ],
)
def test_what_an_attack_declares(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=rf"^Mine\.{told} is .*; it must be"):
        Mine(returns=lambda z: z, **change).check()


@pytest.mark.parametrize(
    ("returns", "got"),
    [
        (lambda x: None, "None"),
        (lambda x: x.flatten(1), "float32 of shape (3, 4)"),
        (lambda x: (255 * x).byte(), "uint8 of shape (3, 1, 2, 2)"),
        (lambda x: x / 0, "with NaN or infinity"),
    ],
)
def test_what_a_search_returns(returns: Any, got: str) -> None:
    problem = Problem(torch.rand(3, 1, 2, 2), lambda x, rows: x.sum(1), BUDGET, draws())
    for search in (Own(returns=returns), Transfer(surrogate=nn.Flatten(), search=Own(returns=returns))):
        with pytest.raises(UserError) as error:
            search(problem)
        before, after = str(error.value).split("; it must return ", 1)
        assert before.startswith("Own.minimise returned")
        assert got in before
        assert "finite floats of shape (3, 1, 2, 2)" in after
    images = torch.rand(3, 1, 2, 2)
    x = images.clone().requires_grad_()
    assert not Own(returns=lambda _: 2 * x)(problem).requires_grad
    with pytest.raises(UserError, match="follows_gradient"):
        type("Silent", (Search,), {"minimise": Own.minimise})().check()
