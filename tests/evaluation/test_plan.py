"""The plan of an evaluation: what it refuses, tells apart, and makes of names and objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import DISTANCE, PGD, Column, EmbeddingShift, Problem, Search, Transfer
from robustmetric.errors import UserError
from robustmetric.evaluation import CHECKS, ERS_ATTACKS, CertifyPlan, Plan, Settings, VerifyPlan

FILE = """
from robustmetric.attacks import DISTANCE, Column, EmbeddingShift, PGD
from robustmetric.evaluation import Verdict

class Mine(EmbeddingShift):
    name = "mine"
    columns = (Column("mine:D", "lower", DISTANCE), Column("mine:R", "higher"))
    read_early = ()
    def __init__(self, k=1, protocol="strict"):
        super().__init__(protocol=protocol)
        self.k = k
    def measure(self, z, target, queries, gallery):
        return dict(zip(("mine:D", "mine:R"), super().measure(z, target, queries, gallery).values()))

class Jump(PGD):
    pass

def odd(findings, most=3):
    return Verdict("pass", 0, "", "")

def collapse(findings):
    return Verdict("pass", 0, "", "")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(FILE)
    return tmp_path / "own.py"


class Same(EmbeddingShift):
    name = "same"


class Stage(EmbeddingShift):
    name = "embed"


class Bare(EmbeddingShift):
    columns = ("ES:D",)  # type: ignore[assignment]


# What it refuses


@pytest.mark.parametrize(
    ("settings", "parameter", "told"),
    [
        ({"protocol": "loose"}, "protocol", "protocol is 'loose': input should be 'strict' or 'reference'"),
        ({"eps": 8}, "eps", r"\[0, 1\], not 8.0: .*8/255"),
        ({"eps": float("nan")}, "eps", "eps is nan"),
        ({"eps": "8/255"}, "eps", "eps is '8/255': give a number .*8/255"),
        ({"norm": "l2"}, "eps", "give the length"),
        ({"norm": "l1"}, "norm", "'linf' or 'l2'"),
        ({"norm": "l2", "eps": 1.0}, "search", "'pgd' has no budget of the norm l2; .*: apgd"),
        ({"alpha": 3}, "alpha", "alpha is 3: .*less than or equal to 1 .*size of a step"),
        ({"steps": 1.5}, "steps", "steps is 1.5: .*valid integer"),
        ({"steps": True}, "steps", "steps is True: give a whole number"),
        ({"search": "pgd(restarts=0)"}, "restarts", "at least 1, not 0"),
        ({"search": "pdg"}, None, "'pdg' .did you mean 'pgd'"),
        ({"search": 3}, "search", "search must be a Search, not 3: give its name"),
        ({"search": "transfer(transfer)"}, None, "transfer cannot stand in its own brackets"),
        ({"attacks": "ES"}, "attacks", r"attacks is 'ES'; give a list .*\['ES', 'GTM'\]"),
        ({"attacks": []}, "attacks", r"no attacks were given; the ERS takes CA\+"),
        ({"attacks": ["CA+", "CA+(w=1)"]}, "attacks", r"given twice: CA\+"),
        ({"attacks": ["ES", Same()]}, None, "two attacks report ES:D, ES:R"),
        ({"attacks": [Stage()]}, None, "cannot be called embed"),
        ({"attacks": [Bare()]}, None, "Bare.columns is .*; it must be a tuple of Columns"),
        ({"attacks": [EmbeddingShift]}, None, "not the class EmbeddingShift: give its name"),
        ({"attacks": ["ES", "EZ"]}, None, "'EZ' .did you mean 'ES'"),
        ({"attacks": [EmbeddingShift(protocol="reference")]}, "protocol", "ES follows another protocol"),
        ({"queries": 0}, "queries", "queries is 0: .*greater than or equal to 1"),
        ({"seed": 2**32}, "seed", "seed is 4294967296: .*less than 4294967296"),
        ({"seed": None}, "seed", "seed is None"),
        ({"suite": "wurst-case"}, "suite", "wurst-case"),
        ({"checks": None}, "checks", "checks is None"),
        ({"checks": ""}, None, "known: full, none, quick"),
        ({"checks": "full,colapse"}, None, "'colapse' .did you mean 'collapse'"),
        ({"step": 3}, "step", "unknown setting 'step' .did you mean 'steps'.*known: alpha, attacks"),
    ],
)
def test_each_field_is_checked(settings: dict[str, Any], parameter: str | None, told: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        Plan.make(**settings)
    assert refused.value.parameter == parameter


def test_a_check_of_a_file_cannot_take_the_name_of_another(file: Path) -> None:
    with pytest.raises(
        UserError, match="two checks are called collapse: give one of them another"
    ) as refused:
        Plan.make(checks=f"none,{file}:collapse")
    assert refused.value.parameter == "checks"
    other = file.with_name("other.py")
    other.write_text(FILE)
    with pytest.raises(UserError, match="two checks are called odd"):
        Plan.make(checks=f"none,{file}:odd,{other}:odd")
    twice = Plan.make(checks=f"none,{file}:odd,{file}:odd,{file}:odd(most=2)")
    assert twice.check_names == ["collapse", f"{file}:odd", f"{file}:odd(most=2)"]
    with pytest.raises(UserError, match="has no option 'least'; its options: most"):
        Plan.make(checks=f"none,{file}:odd(least=2)")


# What it holds


def test_the_defaults_are_those_of_the_protocol() -> None:
    plan = Plan.make()
    how = plan.settings
    assert (how.protocol, how.queries, how.checks, how.suite) == ("strict", None, "quick", "none")
    assert (how.attacks, how.search) == (ERS_ATTACKS, "pgd")
    assert plan.threat.budget == how.budget == rm.Budget(eps=8 / 255, alpha=3 / 255, steps=32)
    assert (plan.threat.seed, plan.threat.batch, plan.suite) == (0, 128, None)


def test_numbers_of_numpy_are_plain_afterwards() -> None:
    plan = Plan.make(eps=np.float32(0.5), steps=np.int64(3), queries=np.int32(4), batch=np.uint8(7)).settings
    assert [type(v) for v in (plan.eps, plan.steps, plan.queries, plan.batch)] == [float, int, int, int]


def test_settings_come_back_from_a_record() -> None:
    given: dict[str, Any] = {"attacks": ["CA+(w=3)", "ES"], "search": "nes(samples=3)", "queries": 5}
    plan = Plan.make(**given, protocol="reference")
    read = Settings.model_validate_json(plan.settings.model_dump_json())
    assert read == plan.settings != Plan.make(**given).settings
    again = Plan.make(**read.model_dump())
    assert again.differences(plan) == []
    assert (again.attacks, again.threat, again.columns) == (plan.attacks, plan.threat, plan.columns)
    assert {goal.protocol for goal in again.attacks} == {"reference"}


@pytest.mark.parametrize(
    ("checks", "wanted"),
    [
        ("none", [0]), ("quick", [0, 1]), ("full", [0, 1, 2]),
    ],
)  # fmt: skip
def test_a_set_of_checks_holds_those_below_it(checks: str, wanted: list[int]) -> None:
    levels = {name: check.level for name, check in CHECKS.items()}  # type: ignore[attr-defined]
    plan = Plan.make(checks=checks, suite="worst-case")
    assert plan.check_names == [name for name, level in levels.items() if level in wanted]
    assert plan.level == checks
    alone = Plan.make(checks=checks).check_names
    assert alone == [name for name in plan.check_names if name != "masked"], "it is of the suite"


def test_checks_by_name_come_behind_the_set(file: Path) -> None:
    plan = Plan.make(checks=f"quick, steps, collapse, {file}:odd(most=2)")
    assert plan.settings.checks == "quick,steps,collapse,own.py:odd(most=2)", "folders are left out"
    quick = Plan.make(checks="quick").check_names
    assert plan.check_names == [*quick, "steps", f"{file}:odd(most=2)"]
    assert plan.level == "quick"
    assert rm.register("check", "mine")(lambda findings: None) is not None
    assert "mine" not in Plan.make(checks="full").check_names, "it was not asked for"
    assert Plan.make(checks="none,mine").check_names == ["collapse", "mine"]


# Queries


def test_queries_are_drawn_from_the_seed() -> None:
    for seed in (0, 7):
        drawn = Plan.make(queries=5, seed=seed).draw(30)
        order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
        assert drawn.tolist() == sorted(order[:5].tolist())
    assert Plan.make().draw(4).tolist() == [0, 1, 2, 3]


# Differences


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"protocol": "reference"}, "protocol was 'strict', is 'reference'"),
        ({"eps": 0.5}, "eps was 0.03137254901960784, is 0.5"),
        ({"alpha": 0.5}, "alpha was 0.011764705882352941, is 0.5"),
        ({"steps": 9}, "steps was 32, is 9"),
        ({"search": "pgd(restarts=2)"}, "search was 'pgd', is 'pgd(restarts=2)'"),
        ({"attacks": ["ES"]}, "attacks was ['CA+', "),
        ({"norm": "l2", "search": "apgd", "eps": 0.5}, "norm was 'linf', is 'l2'"),
        ({"suite": "worst-case(steps=9)"}, "suite was 'none', is 'worst-case(steps=9)'"),
        ({"queries": 9}, "queries was None, is 9"),
        ({"seed": 9}, "seed was 0, is 9"),
        ({"batch": 9}, "batch was 128, is 9"),
        ({"checks": "full"}, "checks was 'quick', is 'full'"),
    ],
)
def test_each_setting_is_told_apart(change: dict[str, Any], told: str) -> None:
    usual, other = Plan.make(), Plan.make(**change)
    assert any(text.startswith(told) for text in other.differences(usual))
    assert usual.differences(usual) == []
    if "protocol" not in change:  # which its attacks follow
        assert usual.changed(**change).differences(other) == []


def test_every_setting_is_tested_above() -> None:
    (mark,) = [m for m in test_each_setting_is_told_apart.pytestmark if m.name == "parametrize"]
    assert {name for change, _ in mark.args[1] for name in change} == {*Settings.model_fields}


def test_a_name_and_its_object_are_the_same_plan() -> None:
    named = Plan.make(attacks=["ES"], search="pgd(restarts=2)")
    assert Plan.make(attacks=[EmbeddingShift()], search=PGD(restarts=2)).differences(named) == []


# Parts of one's own


@dataclass(frozen=True, kw_only=True)
class Still(Search):
    """A search that does nothing."""

    follows_gradient = False

    def minimise(self, problem: Problem) -> Tensor:
        return problem.images


def test_attacks_of_ones_own_as_objects_and_from_a_file(file: Path) -> None:
    plan, many = (Plan.make(attacks=["ES", f"{file}:Mine(k={k})"]) for k in (2, 3))
    assert plan.settings.attacks == ("ES", "own.py:Mine(k=2)"), "folders are left out"
    assert plan.attacks[1].k == 2  # type: ignore[attr-defined]
    assert plan.columns["mine:D"] == Column("mine:D", "lower", DISTANCE)
    assert list(plan.columns) == ["ES:D", "ES:R", "mine:D", "mine:R"]
    assert many.differences(plan)[0].startswith("attacks was ['ES', 'own.py:Mine(k=2)'], is")
    # Options that no name tells are told as well.
    few, more = (Plan.make(attacks=[each.attacks[1]]) for each in (plan, many))
    assert few.settings.attacks == more.settings.attacks == ("mine",)
    assert more.differences(few) == ["options.attacks.mine.k was '2', is '3'"]
    (reference,) = Plan.make(attacks=[f"{file}:Mine"], protocol="reference").attacks
    assert reference.protocol == "reference", "it takes the plan's"
    with pytest.raises(UserError, match=r"mine.* follows another protocol than reference"):
        few.changed(protocol="reference")


def test_other_code_is_another_plan(file: Path) -> None:
    how: dict[str, Any] = {
        "attacks": [f"{file}:Mine"],
        "search": f"{file}:Jump",
        "checks": f"none,{file}:odd",
    }
    before = Plan.make(**how)
    assert Plan.make(**how).differences(before) == []
    file.write_text(file.read_text().replace("self.k = k", "self.k = k + 0"))
    assert any(
        text.startswith("options.attacks.mine.code was") for text in Plan.make(**how).differences(before)
    )


def test_a_changed_plan_keeps_parts_of_ones_own_and_their_names(file: Path) -> None:
    own = {"attacks": ["ES", f"{file}:Mine(k=2)"], "search": f"{file}:Jump", "checks": f"none,{file}:odd"}
    plan = Plan.make(**own)
    assert plan.changed(attacks=plan.attacks).settings.attacks == ("ES", "mine")
    assert plan.changed(steps=3).differences(Plan.make(**own, steps=3)) == []
    assert plan.changed(steps=3).check_names == plan.check_names
    for wrong in ({"step": 3}, {"steps": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            plan.changed(**wrong)


def test_searches_of_ones_own(file: Path) -> None:
    still = Still()
    assert (
        Plan.make(search=still).search_on() is Plan.make(search=still).changed(steps=3).search_on() is still
    )
    assert Plan.make(search=still).settings.search == "still"
    plan = Plan.make(search=f"{file}:Jump(restarts=2)")
    assert plan.settings.search == "own.py:Jump(restarts=2)"
    assert (type(plan.search_on()).__name__, plan.search_on().name) == ("Jump", "jump(restarts=2)")


def test_a_transfer_by_name_takes_its_surrogate_later(file: Path) -> None:
    network = nn.Flatten()
    for text, inside in (
        ("transfer", "pgd"),
        ("transfer(nes(samples=2))", "nes(samples=2)"),
        (f"transfer({file}:Jump)", "own.py:Jump"),
    ):
        plan = Plan.make(search=text)
        assert plan.settings.search == f"transfer({inside})"
        assert plan.transfers
        assert plan.search_on(network).network is network
        with pytest.raises(UserError, match="needs a surrogate") as refused:
            plan.search_on()
        assert refused.value.parameter == "surrogate"


def test_a_search_takes_no_surrogate_that_is_not_its_own() -> None:
    network, other = nn.Flatten(), nn.Flatten()
    transfer = Plan.make(search=Transfer(surrogate=network))
    assert transfer.search_on().network is network
    assert transfer.search_on(network).network is network
    for plan in (transfer, Plan.make(search=PGD()), Plan.make(search="nes")):
        with pytest.raises(UserError, match="surrogate") as refused:
            plan.search_on(other)
        assert refused.value.parameter == "surrogate"


X, Y = torch.rand(20, 1, 4, 4), torch.arange(20) % 4


@pytest.mark.parametrize(
    ("ask", "plan", "settings"),
    [
        (rm.evaluate, Plan.make(), {"steps": 3}),
        (rm.certify, CertifyPlan.make(sigma=0.1), {"sigma": 0.5}),
        (rm.verify, VerifyPlan.make(), {"count": 8}),
    ],
)
def test_a_plan_is_given_alone(ask: Any, plan: object, settings: dict[str, Any]) -> None:
    with pytest.raises(rm.UserError, match=f"a plan and {next(iter(settings))} are given"):
        ask(nn.Flatten(), X, Y, plan=plan, **settings)
    with pytest.raises(rm.UserError, match=f"plan must be a {type(plan).__name__}, not 3"):
        ask(nn.Flatten(), X, Y, plan=3)


@pytest.mark.parametrize(
    ("make", "wrong", "told"),
    [
        (VerifyPlan.make, {"count": "10"}, "count is '10': give a whole number"),
        (CertifyPlan.make, {"sigma": 0.1, "attack": "no"}, "attack is 'no': give True or False"),
        (CertifyPlan.make, {"sigma": "0.1"}, "sigma is '0.1': give a number"),
        (CertifyPlan.make, {"sigma": 0.1, "search": "pgd"}, "'pgd' has no budget of the norm l2"),
        (VerifyPlan.make, {"search": "transfer"}, r"'transfer\(pgd\)' perturbs another network"),
    ],
)
def test_a_flag_or_a_text_is_no_number(make: Any, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(rm.UserError, match=told):
        make(**wrong)
