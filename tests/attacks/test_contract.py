"""What a user's attack or search returns wrongly is told: class, method, what came and what must be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from robustmetric.attacks.contract import (
    checked_aim,
    checked_appraise,
    checked_columns,
    checked_measure,
    checked_objective,
    checked_search,
    checked_select,
    checked_start,
)
from torch import Tensor, nn

from robustmetric import UserError
from robustmetric.attacks import (
    ATTACKS,
    PGD,
    Column,
    Draws,
    Gallery,
    Problem,
    Queries,
    RankingAttack,
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
class Mine(RankingAttack):
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
class Own(Search):
    """A search that returns what it is told to."""

    follows_gradient: ClassVar[bool] = False
    returns: Callable[[Tensor], Any]

    def __call__(self, images: Tensor, *args: Any, **more: Any) -> Tensor:
        return self.returns(images)  # type: ignore[no-any-return]


def told(error: pytest.ExceptionInfo[UserError], method: str, got: str, wanted: str) -> None:
    text = str(error.value)
    assert text.startswith(method), text
    before, after = text.split("; it must ", 1)
    assert got in before, text
    assert wanted in after, text


def draws() -> Draws:
    return Draws(0, "mine", range(B))


@pytest.mark.parametrize("name", [*dict.fromkeys([*ATTACKS, *GOALS]), "CA+(w=3)", "SP-QA-(m=2)"])
def test_what_is_built_in_keeps_the_contract_and_passes_unchanged(
    name: str, queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    made = attack(name)
    assert checked_columns(made) == made.columns
    index = checked_select(made, queries, gallery, draws=draws())
    assert index.equal(made.select(queries, gallery, draws=draws()))
    target = checked_aim(made, index, queries, gallery)
    z = moved.clone().requires_grad_()
    value = checked_objective(made, z, target, queries, gallery)
    assert value.equal(made.objective(z, target, queries, gallery))
    assert value.requires_grad
    both = checked_appraise(made, z, target, queries, gallery)
    assert both[0].equal(value)
    assert (both[1] is not None) is made.can_win
    with torch.no_grad():
        assert checked_objective(made, z, target, queries, gallery).equal(value)
        measured = checked_measure(made, z, target, queries, gallery)
        again = made.measure(z, target, queries, gallery)
    assert list(measured) == list(again)
    for column in measured:
        torch.testing.assert_close(measured[column], again[column], rtol=0, atol=0, equal_nan=True)
    images = torch.rand(B, 1, 2, 2)
    start, plain = checked_start(made, images, draws=draws()), made.start(images, draws=draws())
    assert (start is None and plain is None) or (
        start is not None and plain is not None and start.equal(plain)
    )


@pytest.mark.parametrize(
    ("returns", "got"),
    [
        (lambda own: None, "None"),
        (lambda own: own.tolist(), "a list"),
        (lambda own: own, f"int64 of shape ({B},)"),
        (lambda own: own[1:, None], f"int64 of shape ({B - 1}, 1)"),
        (lambda own: own[:, None].float(), f"float32 of shape ({B}, 1)"),
        (lambda own: own[:, None] >= 0, f"bool of shape ({B}, 1)"),
        (lambda own: own[:, None], "positions from -1 to 39"),
        (lambda own: torch.full((B, 2), N), "positions from 40 to 40"),
    ],
)
def test_select(returns: Any, got: str, queries: Queries, gallery: Gallery) -> None:
    with pytest.raises(UserError) as error:
        checked_select(Mine(returns=returns), queries, gallery, draws=draws())
    told(error, "Mine.select returned", got, f"integers of shape ({B}, W)")
    told(error, "Mine.select", "", f"from 0 to {N - 1}")


def test_a_query_may_aim_at_nothing(queries: Queries, gallery: Gallery) -> None:
    mine = Mine(returns=lambda own: torch.empty(len(own), 0, dtype=torch.int32))
    assert checked_select(mine, queries, gallery, draws=draws()).shape == (B, 0)


def test_aim(queries: Queries, gallery: Gallery) -> None:
    with pytest.raises(UserError) as error:
        checked_aim(Mine(returns=lambda index: index), queries.own[:, None], queries, gallery)
    told(error, "Mine.aim returned", f"int64 of shape ({B}, 1)", "Target(index)")


@pytest.mark.parametrize(
    ("returns", "got"),
    [
        (lambda z: 0.0, "a float"),
        (lambda z: z.sum(), "float64 of shape ()"),
        (lambda z: z.sum(1, keepdim=True), f"float64 of shape ({B}, 1)"),
        (lambda z: z.sum(1) > 0, f"bool of shape ({B},)"),
        (lambda z: z.sum(1).detach(), "values without a gradient"),
        (lambda z: z.sum(1) / 0, "NaN or infinity"),
        (lambda z: z.sum(1).log(), "NaN or infinity"),
    ],
)
def test_objective(returns: Any, got: str, queries: Queries, gallery: Gallery, moved: Tensor) -> None:
    z, target = moved.clone().requires_grad_(), Target(queries.own[:, None])
    with pytest.raises(UserError) as error:
        checked_objective(Mine(returns=returns), z, target, queries, gallery)
    told(error, "Mine.objective returned", got, f"finite floats of shape ({B},)")


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


@pytest.mark.parametrize(
    ("returns", "got", "wanted"),
    [
        (lambda z: z.sum(1), f"float64 of shape ({B},)", "the values, and which queries are lost"),
        (lambda z: (z.sum(1),), "a tuple", "the values, and which queries are lost"),
        (lambda z: (z.sum(1), None, None), "a tuple", "the values, and which queries are lost"),
        (lambda z: (z, None), f"float64 of shape ({B}, 4)", f"finite floats of shape ({B},)"),
        (lambda z: (z.sum(1).detach(), None), "values without a gradient", f"finite floats of shape ({B},)"),
        (lambda z: (z.sum(1) / 0, None), "NaN or infinity", f"finite floats of shape ({B},)"),
        (lambda z: (z.sum(1), True), "a bool", f"beside the values None, or bools of shape ({B},)"),
        (lambda z: (z.sum(1), z.sum(1)), f"float64 of shape ({B},)", f"None, or bools of shape ({B},)"),
        (lambda z: (z.sum(1), z[1:, 0] > 0), f"bool of shape ({B - 1},)", f"None, or bools of shape ({B},)"),
    ],
)
def test_appraise(
    returns: Any, got: str, wanted: str, queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    z, target = moved.clone().requires_grad_(), Target(queries.own[:, None])
    with pytest.raises(UserError) as error:
        checked_appraise(Ending(returns=returns), z, target, queries, gallery)
    told(error, "Ending.appraise returned", got, wanted)


def test_an_attack_with_an_objective_alone_is_told_of_that(
    queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    z, target = moved.clone().requires_grad_(), Target(queries.own[:, None])
    with pytest.raises(UserError, match=r"^Mine\.objective returned float64"):
        checked_appraise(Mine(returns=lambda z: z), z, target, queries, gallery)
    value, near = checked_appraise(Mine(returns=lambda z: z.sum(1)), z, target, queries, gallery)
    assert near is None
    # With a column that has an end, what is measured says who is lost, unless the attack says it itself.
    values = {"a": z.detach().sum(1), "b": (torch.arange(B) % 2).double()}
    ends = Measuring(
        returns=lambda z: z.sum(1),
        columns=(Column("a", None), Column("b", None, success_value=1.0)),
        values=values,
    )
    again, near = checked_appraise(ends, z, target, queries, gallery)
    assert torch.equal(again, value)
    assert near is not None
    assert torch.equal(near, values["b"] == 1)


def test_who_has_no_end_has_nobody_lost(queries: Queries, gallery: Gallery, moved: Tensor) -> None:
    endless = Ending(returns=lambda z: (z.sum(1), z[:, 0] > 0), columns=(Column("a", "higher"),))
    with pytest.raises(UserError) as error:
        checked_appraise(endless, moved, Target(queries.own[:, None]), queries, gallery)
    told(error, "Ending.appraise returned", "which queries are lost", "None there, or give a column a lost")


def test_an_objective_needs_no_gradient_where_none_is_asked_for(
    queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    mine, target = Mine(returns=lambda z: z.detach().sum(1)), Target(queries.own[:, None])
    checked_objective(mine, moved, target, queries, gallery)
    with torch.no_grad():
        checked_objective(mine, moved.clone().requires_grad_(), target, queries, gallery)


def test_a_broken_network_is_not_the_attack_s_fault(queries: Queries, gallery: Gallery) -> None:
    z, target = torch.full_like(queries.z, torch.nan), Target(queries.own[:, None])
    assert checked_objective(Mine(returns=lambda z: z.sum(1)), z, target, queries, gallery).isnan().all()


@pytest.mark.parametrize(
    ("returns", "got"),
    [
        (lambda z: None, "None"),
        (lambda z: z.sum(1), f"float64 of shape ({B},)"),
        (lambda z: {}, "the names of nothing"),
        (lambda z: {"a": z.sum(1)}, "the names a"),
        (lambda z: {"a": z.sum(1), "b": z.sum(1), "c": z.sum(1)}, "the names a, b, c"),
        (lambda z: {"a": z.sum(1), "b": 3.0}, "a float for b"),
        (lambda z: {"a": z.sum(1), "b": z}, f"float64 of shape ({B}, 4) for b"),
        (lambda z: {"a": z.sum(1) > 0, "b": z.sum(1)}, f"bool of shape ({B},) for a"),
        (lambda z: {"a": z.sum(1), "b": z.sum(1) / 0}, "infinity for b"),
    ],
)
def test_measure(returns: Any, got: str, queries: Queries, gallery: Gallery, moved: Tensor) -> None:
    with pytest.raises(UserError) as error:
        checked_measure(Mine(returns=returns), moved, Target(queries.own[:, None]), queries, gallery)
    told(error, "Mine.measure returned", got, f"its columns, a, b, each with floats of shape ({B},)")


def test_what_is_measured_comes_in_the_order_of_the_columns(
    queries: Queries, gallery: Gallery, moved: Tensor
) -> None:
    mine = Mine(returns=lambda z: {"b": z.sum(1), "a": torch.full((B,), torch.nan)})
    found = checked_measure(mine, moved, Target(queries.own[:, None]), queries, gallery)
    assert list(found) == ["a", "b"]
    assert found["a"].isnan().all()


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"columns": ()}, "()"),
        ({"columns": "away"}, "'away'"),
        ({"columns": ("away",)}, "('away',)"),
        ({"columns": (Column("a", None), Column("a", "higher"))}, "the names a, a"),
        ({"read_early": ("c",)}, "'c'"),
        ({"perturbs": "gallery"}, "'gallery'"),
    ],
)
def test_columns(change: dict[str, Any], got: str) -> None:
    with pytest.raises(UserError) as error:
        checked_columns(Mine(returns=lambda z: z, **change))
    (method,) = change
    wanted = {"columns": "Column", "read_early": "its columns: a, b", "perturbs": "'query' or 'candidate'"}
    told(error, f"Mine.{method} is", got, wanted[method])


IMAGES = [
    (lambda x: x.tolist(), "a list"),
    (lambda x: x[1:], "float32 of shape (2, 1, 2, 2)"),
    (lambda x: x.flatten(1), "float32 of shape (3, 4)"),
    (lambda x: (255 * x).byte(), "uint8 of shape (3, 1, 2, 2)"),
    (lambda x: x / 0, "with NaN or infinity"),
]


@pytest.mark.parametrize(("returns", "got"), IMAGES)
def test_start(returns: Any, got: str) -> None:
    with pytest.raises(UserError) as error:
        checked_start(Mine(returns=returns), torch.rand(3, 1, 2, 2), draws=draws())
    told(error, "Mine.start returned", got, "None, or finite floats of shape (3, 1, 2, 2)")


@pytest.mark.parametrize(("returns", "got"), [*IMAGES, (lambda x: None, "None")])
@pytest.mark.parametrize("carried", [False, True])
def test_search(returns: Any, got: str, carried: bool) -> None:
    search: Search = Own(returns=returns)
    search = Transfer(surrogate=nn.Flatten(), search=search) if carried else search
    with pytest.raises(UserError) as error:
        checked_search(search, torch.rand(3, 1, 2, 2), lambda x, rows: x.sum(1), BUDGET, draws=draws())
    told(error, "Own.__call__ returned", got, "finite floats of shape (3, 1, 2, 2)")


def test_a_search_that_keeps_the_contract_is_asked_as_it_is() -> None:
    images, start = torch.rand(3, 1, 2, 2), torch.rand(3, 1, 2, 2)
    x = images.clone().requires_grad_()
    found = checked_search(
        Own(returns=lambda _: 2 * x), images, lambda x, rows: x.sum(1), BUDGET, draws=draws()
    )
    assert found.equal(2 * images)
    assert not found.requires_grad

    def lower(x: Tensor, rows: Tensor) -> Tensor:
        return x.square().sum((1, 2, 3))

    moved = checked_search(PGD(), images, lower, BUDGET, draws=draws(), start=start)
    assert moved.equal(PGD()(Problem(images, lower, BUDGET, draws(), start)))
