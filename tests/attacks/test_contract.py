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
    columns: tuple[Column, ...] = (Column("a", "higher"), Column("b", None))
    read_early: tuple[str, ...] = ()
    perturbs: str = "query"
    returns: Callable[[Tensor], Any]

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        return self.returns(queries.own)  # type: ignore[no-any-return]

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        return self.returns(index)  # type: ignore[no-any-return]

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        return self.returns(z)  # type: ignore[no-any-return]

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        return self.returns(z)  # type: ignore[no-any-return]

    def start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        return self.returns(images)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Measuring(Mine):
    """An attack whose `measure` returns `values`."""

    values: dict[str, Tensor]

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        return self.values


@dataclass(frozen=True, kw_only=True)
class Ending(Mine):
    """An attack with an end, whose `appraise` returns what it is told to."""

    columns: tuple[Column, ...] = (Column("a", "higher", success_value=0.0),)

    def appraise(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Any:
        return self.returns(z)


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
        ("aim", lambda index: index, f"int64 of shape ({B}, 1)", "Target(index)"),
        ("objective", lambda z: z.sum(1, keepdim=True), f"float64 of shape ({B}, 1)", "finite floats"),
        ("objective", lambda z: z.sum(1).detach(), "values without a gradient", "finite floats"),
        ("objective", lambda z: z.sum(1) / 0, "NaN or infinity", "finite floats"),
        ("appraise", lambda z: z.sum(1), f"float64 of shape ({B},)", "and which queries"),
        ("appraise", lambda z: (z.sum(1), z[1:, 0] > 0), f"bool of shape ({B - 1},)", f"({B},) bools"),
        ("measure", lambda z: None, "None", "a dict of its columns, a, b"),
        ("measure", lambda z: {"a": z.sum(1)}, "columns a", "a dict of its columns, a, b"),
        ("measure", lambda z: {"a": z.sum(1), "b": z.sum(1) / 0}, "infinity for b", "NaN where undefined"),
        ("start", lambda x: x[1:], "float32 of shape (2, 1, 2, 2)", "None, or finite floats of shape (3, 1"),
    ],
)
def test_what_a_method_returns(
    method: str, returns: Any, got: str, wanted: str, queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    mine = (Ending if method == "appraise" else Mine)(returns=returns)
    z, target = moved.clone().requires_grad_(), Target(queries.own[:, None])
    calls: dict[str, Callable[[], object]] = {
        "select": lambda: mine.checked_select(queries, gallery, draws=draws()),
        "aim": lambda: mine.checked_aim(queries.own[:, None], queries, gallery),
        "objective": lambda: mine.checked_objective(z, target, queries, gallery),
        "appraise": lambda: mine.checked_appraise(z, target, queries, gallery),
        "measure": lambda: mine.checked_measure(z, target, queries, gallery),
        "start": lambda: mine.checked_start(torch.rand(3, 1, 2, 2), draws=draws()),
    }
    with pytest.raises(UserError) as error:
        calls[method]()
    before, after = str(error.value).split("; it must return ", 1)
    assert before.startswith(f"{type(mine).__name__}.{method} returned")
    assert got in before
    assert wanted in after


def test_what_is_measured_says_who_has_succeeded(queries: Queries, gallery: Gallery, moved: Tensor) -> None:
    z, target = moved.clone().requires_grad_(), Target(queries.own[:, None])
    with pytest.raises(UserError, match=r"^Mine\.objective returned float64"):
        Mine(returns=lambda z: z).checked_appraise(z, target, queries, gallery)
    value, won = Mine(returns=lambda z: z.sum(1)).checked_appraise(z, target, queries, gallery)
    assert won is None
    values = {"a": z.detach().sum(1), "b": (torch.arange(B) % 2).double()}
    columns = (Column("a", None), Column("b", None, success_value=1.0))
    ends = Measuring(returns=lambda z: z.sum(1), columns=columns, values=values)
    again, won = ends.checked_appraise(z, target, queries, gallery)
    assert torch.equal(again, value)
    assert won is not None
    assert torch.equal(won, values["b"] == 1)


def test_without_an_end_nobody_succeeds(queries: Queries, gallery: Gallery, moved: Tensor) -> None:
    endless = Ending(returns=lambda z: (z.sum(1), z[:, 0] > 0), columns=(Column("a", "higher"),))
    with pytest.raises(UserError, match=r"^Ending\.appraise .* give a column a success_value"):
        endless.checked_appraise(moved, Target(queries.own[:, None]), queries, gallery)


def test_an_objective_needs_no_gradient_where_none_is_asked_for(
    queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    mine, target = Mine(returns=lambda z: z.detach().sum(1)), Target(queries.own[:, None])
    mine.checked_objective(moved, target, queries, gallery)
    with torch.no_grad():
        mine.checked_objective(moved.clone().requires_grad_(), target, queries, gallery)


def test_a_broken_network_is_not_the_attack_s_fault(queries: Queries, gallery: Gallery) -> None:
    z, target = torch.full_like(queries.z, torch.nan), Target(queries.own[:, None])
    assert Mine(returns=lambda z: z.sum(1)).checked_objective(z, target, queries, gallery).isnan().all()


def test_what_is_measured_comes_in_the_order_of_the_columns(
    queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    mine = Mine(returns=lambda z: {"b": z.sum(1), "a": torch.full((B,), torch.nan)})
    found = mine.checked_measure(moved, Target(queries.own[:, None]), queries, gallery)
    assert list(found) == ["a", "b"]
    assert found["a"].isnan().all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"columns": ()}, r"columns is \(\); it must be a tuple of Columns"),
        ({"columns": Column("a", None)}, r"columns is Column\(.*; it must be a tuple"),
        ({"columns": (Column("a", None), Column("a", "higher"))}, "columns is .* of different names"),
        ({"read_early": ("c",)}, r"read_early is \('c',\); it must be names of its columns: a, b"),
        ({"perturbs": "gallery"}, "perturbs is 'gallery'; it must be 'query' or 'candidate'"),
    ],
)
def test_what_an_attack_declares(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=rf"^Mine\.{told}"):
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


def test_what_a_search_returns_is_detached() -> None:
    images = torch.rand(3, 1, 2, 2)
    x = images.clone().requires_grad_()
    found = Own(returns=lambda _: 2 * x)(Problem(images, lambda x, rows: x.sum(1), BUDGET, draws()))
    assert found.equal(2 * images)
    assert not found.requires_grad
