"""The suite: its attacks and their order, its name, goals of one's own, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import Attack, Column, Draws, Gallery, Queries, Target, attack
from robustmetric.errors import UserError
from robustmetric.evaluation import Plan, Record, load_arrays, load_record
from robustmetric.evaluation.suite import GOALS, WorstCase, make_suite

Evaluated = Callable[..., Record]


# Attacks and names


@pytest.mark.parametrize("restarts", [0, 1, 3])
@pytest.mark.parametrize("targets", [0, 2])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("surrogate", [None, nn.Flatten()])
def test_the_attacks_of_each_goal(
    restarts: int, targets: int, gradient: bool, surrogate: nn.Module | None
) -> None:
    suite = WorstCase(restarts=restarts, targets=targets, trials=7)
    for goal in suite.wanted:
        ways = suite.attempts(goal, surrogate=surrogate, gradient=gradient)
        names = [f"{way.attack.name} by {way.search.name}" for way in ways]
        plain = {"misrank": 2, "translocate": 3, "promote": 2, "demote": 3}.get(goal.name, 1)
        classes = targets if goal.name == "misrank" else 0
        white = plain * (1 + restarts) + classes if gradient else 0
        assert len(ways) == white + (surrogate is not None) + 1
        assert all("by apgd" in name for name in names[:white])
        assert names[-1] == f"{goal.name} by square(trials=7)"
        assert (f"{goal.name} by transfer(apgd)" in names) == (surrogate is not None)
        # Each draws by itself, and all but those at single classes have the goal's targets.
        assert len({way.purpose for way in ways}) == len(ways)
        single = [way for way in ways if isinstance(getattr(way.attack, "by", None), int)]
        assert {way.attack.drawn_as for way in ways if way not in single} == {goal.drawn_as}
        assert {way.attack.columns[0].success_value for way in ways} == {goal.columns[0].success_value}


def test_what_is_drawn_does_not_depend_on_how_much_is_asked_for() -> None:
    small, large = WorstCase(trials=5, restarts=1, steps=3), WorstCase(trials=500, restarts=3, targets=9)
    for goal in small.wanted:
        few, many = ([way.purpose for way in suite.attempts(goal)] for suite in (small, large))
        assert {*few} <= {*many}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"goals": "shift"},
        {"goals": GOALS},
        {"goals": ["misrank(by='margin',side='query')", "promote(k=9, side='candidate')"]},
        {"steps": 100, "restarts": 0, "targets": 0, "trials": 3},
    ],
)
def test_a_suite_is_made_again_of_its_name(options: dict[str, Any]) -> None:
    suite = WorstCase(**options)
    again = make_suite(suite.name)
    assert again is not None
    assert (again.name, again.wanted) == (suite.name, suite.wanted)
    assert Plan.make(suite=suite).settings == Plan.make(suite=suite.name).settings
    assert (suite.name == "worst-case") == (not options)


def test_none_and_objects() -> None:
    assert make_suite(None) is make_suite(" none ") is None
    suite = WorstCase(steps=3)
    assert make_suite(suite) is suite
    assert Plan.make().settings.suite == Plan.make(suite=None).settings.suite == "none"
    assert Plan.make(suite="worst-case").differences(Plan.make())


def test_columns_that_say_the_same() -> None:
    wanted = {"misrank": {"ES:R", "LTM", "GTM"}, "translocate": {"GTT"}, "shift": {"ES:D"}}
    assert {goal: {*attack(goal).same_columns} for goal in GOALS if attack(goal).same_columns} == wanted
    # The objective is no part of what is measured, and the place is.
    assert "LTM" in attack("misrank(tau=0.2, by='margin')").same_columns
    assert attack("translocate(k=5)").same_columns == attack("misrank(by=1)").same_columns == ()


# What is refused


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (5, "suite must be a str, not 5: such as 'worst-case' or 'none'"),
        ("worstcase", r"unknown suite 'worstcase' \(did you mean 'worst-case'\?\)"),
        ("worst-case(step=3)", "suite 'worst-case' .*'step'; its options: goals, steps"),
        ("worst-case(steps=0)", "steps of the suite must be a whole number of at least 1, not 0"),
        (
            "worst-case(goals='misrnk')",
            r"goal of the suite: unknown attack 'misrnk' \(did you mean 'misrank'",
        ),
        ("worst-case(goals='shift, misrank,shift')", "a goal was given twice: shift"),
        ("worst-case(goals='ES')", "ES cannot be a goal, .* one column .*: known goals are misrank, trans"),
        ("worst-case(goals='')", "no goals were given; the suite knows misrank, "),
        ("worst-case(goals=7)", "goals of the suite must be names in one text, or a list, not 7"),
        ("worst-case(goals=[7])", "a goal must be an Attack, not 7: give the name of an attack"),
        (
            "worst-case(goals='promote(k=39)')",
            r"promote\(k=39\) of the suite: k is 39, too many .* at most 38",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    given: object, told: str, evaluated: Evaluated, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        evaluated(suite=given, out=tmp_path / "out")
    assert caught.value.parameter == "suite"
    assert not (tmp_path / "out").exists()


# Goals of one's own


@dataclass(frozen=True, kw_only=True)
class Mine(Attack):
    """Push the first coordinate up: in steps of 5 % of the way, or all the way."""

    name: ClassVar[str] = "mine"
    ends: bool = True

    @property
    def columns(self) -> tuple[Column, ...]:  # type: ignore[override]
        return (Column("mine", "higher", success_value=0.0 if self.ends else None),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        return torch.empty(len(queries), 0, dtype=torch.long)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        return queries.z[:, 0] - z[:, 0]

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        way = (z[:, 0] - queries.z[:, 0]).double()
        return {"mine": 5 * (20 - (way / 0.005).floor()).clamp(0, 20)}


SMALL: dict[str, Any] = {"steps": 6, "trials": 20}
FEW: dict[str, Any] = {"attacks": ["ES"], "queries": 20, "eps": 12 / 255}


def test_a_goal_of_ones_own_as_an_object(evaluated: Evaluated, tmp_path: Path) -> None:
    suite = WorstCase(goals=["misrank", Mine()], **SMALL)
    record = evaluated(suite=suite, out=tmp_path / "out", **FEW)
    assert record.suite is not None
    goal = record.suite.goals["mine"]
    worst = load_arrays(tmp_path / "out")["suite/mine/worst"]
    assert record["mine"] == goal.value == pytest.approx(float(worst.mean()))
    assert goal.before == 100
    assert record.goal_column("mine") == Column("mine", "higher")
    assert [broke.attack for broke in goal.attacks] == ["before", "mine", "mine", "mine"]
    # Some queries are moved and not lost: nobody has broken those.
    lost = 100 * float((worst == 0).double().mean())
    assert 0 < lost < 100
    assert ((worst > 0) & (worst < 100)).any()
    assert sum(broke.broke or 0 for broke in goal.attacks) == pytest.approx(lost)
    assert goal.forward < goal.undropped
    assert load_record(tmp_path / "out") == record


def test_a_goal_without_an_end_is_never_dropped(evaluated: Evaluated) -> None:
    record = evaluated(suite=WorstCase(goals=[Mine(ends=False)], **SMALL), **FEW)
    assert record.suite is not None
    goal = record.suite.goals["mine"]
    assert goal.forward == goal.undropped
    assert [broke.attack for broke in goal.attacks] == ["mine"] * 3
    assert sum(broke.broke or 0 for broke in goal.attacks) == pytest.approx(100)


def test_a_goal_in_a_file(evaluated: Evaluated, tmp_path: Path) -> None:
    code = Path(__file__).read_text().partition("# Goals of one's own\n")[2].partition("SMALL:")[0]
    head = "from dataclasses import dataclass\nimport torch\nfrom robustmetric.attacks import *\n"
    (tmp_path / "own.py").write_text(head + code.replace(": Tensor", "").replace("Tensor]", "object]"))
    how = f"goals='{tmp_path}/own.py:Mine(ends=True)',steps=6,trials=20"
    record = evaluated(suite=f"worst-case({how})", out=tmp_path / "out", **FEW)
    assert record["mine"] == evaluated(suite=WorstCase(goals=[Mine()], **SMALL), **FEW)["mine"]
    # Without the folder, which is another one elsewhere.
    assert record.settings.suite == "worst-case(goals='own.py:Mine(ends=True)', steps=6, trials=20)"
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text().replace("0.005", "0.006"))
    with pytest.raises(UserError, match=r"holds another evaluation: suite\.mine\.code was"):
        evaluated(suite=f"worst-case({how})", out=tmp_path / "out", **FEW)
