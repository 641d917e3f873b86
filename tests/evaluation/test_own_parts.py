"""Attacks, searches and checks of the user's own: what is made of their columns, and of a broken contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import (
    DISTANCE,
    PGD,
    Column,
    EmbeddingShift,
    Gallery,
    Problem,
    Queries,
    RankingAttack,
    Search,
    Target,
)
from robustmetric.evaluation import Check, Findings, Plan, Record, Verdict
from robustmetric.perturb import Budget
from robustmetric.validate import UserError

Evaluated = Callable[..., Record]


class MyShift(EmbeddingShift):
    """ES under another name."""

    name = "MY"
    columns = (Column("MY:D", "lower", DISTANCE),)
    read_early = ()

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        return {"MY:D": super().measure(z, target, queries, gallery)["ES:D"]}


def check_of(record: Record, name: str) -> Check:
    return next(check for check in record.checks if check.name == name)


# Columns


def test_a_column_of_ones_own_is_seen_by_the_checks(evaluated: Evaluated) -> None:
    # Two short steps of many: twice as many move the distance by far.
    how = {"eps": 0.3, "alpha": 0.01, "steps": 2, "checks": "none,steps"}
    ours, theirs = evaluated(attacks=[MyShift()], **how), evaluated(attacks=["ES"], **how)
    mine, usual = check_of(ours, "steps"), check_of(theirs, "steps")
    assert (usual.status, mine.status) == ("warn", "warn")
    assert "MY:D" in mine.says
    assert mine.figure is not None
    assert mine.figure > 2
    doubled = evaluated(attacks=[MyShift()], **{**how, "steps": 4, "checks": "none"})
    assert mine.figure == pytest.approx(50 * (doubled["MY:D"] - ours["MY:D"]), rel=1e-6)


@pytest.mark.parametrize("name", ["eps-0", "8-bit", "eps-sweep"])
def test_other_checks_see_it_too(name: str, evaluated: Evaluated) -> None:
    class Moves(MyShift):
        """Reports another value whenever it is asked, so that nothing repeats."""

        calls = [0]  # noqa: RUF012 (shared on purpose)

        def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
            self.calls[0] += 1
            return {"MY:D": torch.full((len(z),), 0.5 * self.calls[0] * (-1) ** (name == "eps-sweep"))}

    record = evaluated(attacks=[Moves()], queries=8, checks=f"none,{name}")
    check = check_of(record, name)
    assert check.status in ("warn", "fail")
    assert "MY:D" in check.says


def test_a_column_of_ones_own_is_described_in_the_record(evaluated: Evaluated) -> None:
    record = evaluated(attacks=["ES", MyShift()])
    assert record["MY:D"] == pytest.approx(record["ES:D"], rel=0.2)
    assert record.column("MY:D") == Column("MY:D", "lower", DISTANCE)
    assert record.show("MY:D") == f"{record['MY:D']:.3f}"
    assert record.columns()[-1] == "MY:D"
    assert record.ers is None


def test_a_column_without_a_better_side_is_judged_by_no_sweep(evaluated: Evaluated) -> None:
    class Neither(MyShift):
        columns = (Column("MY:D", None, DISTANCE),)

    record = evaluated(attacks=[Neither()], checks="none,eps-sweep")
    assert check_of(record, "eps-sweep").status == "not run"


# Broken contracts


def broken(method: str, result: Callable[..., Any]) -> RankingAttack:
    kind = type("Mine", (MyShift,), {method: lambda self, *given, **more: result(*given, **more)})
    attack = kind()
    assert isinstance(attack, RankingAttack)
    return attack


@pytest.mark.parametrize(
    ("method", "result", "got", "wanted"),
    [
        ("select", lambda queries, gallery, draws: None, "returned None", r"integers of shape \(16, W\)"),
        ("select", lambda queries, gallery, draws: queries.own, r"int64 of shape \(16,\)", "a row for each"),
        ("select", lambda queries, gallery, draws: queries.z, "float32 of shape", "integers"),
        ("select", lambda queries, gallery, draws: queries.own[:, None] - 1, "from -1", "from 0 to 39"),
        ("aim", lambda index, queries, gallery: index, "returned int64", "a Target"),
        ("objective", lambda z, *_: z.sum(), r"float32 of shape \(\)", r"finite floats of shape \(16,\)"),
        ("objective", lambda z, *_: z.sum(1).detach(), "without a gradient", "computed from z by torch"),
        ("objective", lambda z, *_: z.sum(1) / 0, "NaN or infinity", "finite"),
        ("measure", lambda z, *_: z[:, 0], "returned float32", "a dict of its columns, MY:D"),
        ("measure", lambda z, *_: {}, "the names of nothing", "MY:D"),
        ("measure", lambda z, *_: {"MY:D": z}, r"shape \(16, 16\) for MY:D", r"floats of shape \(16,\)"),
        ("measure", lambda z, *_: {"MY:D": z[:, 0] / 0}, "infinity for MY:D", "NaN where undefined"),
        ("start", lambda images, draws: images[:1], r"shape \(1, 1, 6, 6\)", r"None, or .* \(16, 1, 6, 6\)"),
    ],
)
def test_an_attack_that_breaks_its_contract(
    method: str,
    result: Callable[..., Any],
    got: str,
    wanted: str,
    images: Tensor,
    labels: Tensor,
    network: nn.Module,
) -> None:
    with pytest.raises(UserError, match=rf"Mine\.{method} returned .*; it must return .*{wanted}") as told:
        rm.evaluate(network, images, labels, attacks=[broken(method, result)], batch=16, checks="none")
    assert told.match(got)


@dataclass(frozen=True, kw_only=True)
class Odd(Search):
    """A search that returns whatever it is told to."""

    way: Callable[[Tensor], Any]
    follows_gradient = False

    def minimise(self, problem: Problem) -> Tensor:
        found: Tensor = self.way(problem.images)
        return found


@pytest.mark.parametrize(
    ("way", "got"),
    [
        (lambda images: None, "returned None"),
        (lambda images: images[1:], r"float32 of shape \(15, 1, 6, 6\)"),
        (lambda images: images.long(), "int64"),
        (lambda images: images / 0, "with NaN or infinity"),
    ],
)
def test_a_search_that_breaks_its_contract(
    way: Callable[[Tensor], Any], got: str, images: Tensor, labels: Tensor, network: nn.Module
) -> None:
    with pytest.raises(UserError, match=r"Odd\.minimise .*finite floats of shape \(16, 1, 6, 6\)") as told:
        rm.evaluate(network, images, labels, attacks=["ES"], search=Odd(way=way), batch=16, checks="none")
    assert told.match(got)


def test_a_search_that_does_not_say_whether_it_follows_gradients() -> None:
    class Mute(Search):
        def minimise(self, problem: Problem) -> Tensor:
            return problem.images

    with pytest.raises(TypeError, match="follows_gradient"):
        Mute()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("verdict", "got"),
    [
        (None, "returned a NoneType"),
        (True, "returned a bool"),
        (("pass", 0, "", ""), "returned a tuple"),
        (Verdict("fine", 0, "", ""), "the status 'fine': .*'pass', 'warn'"),  # type: ignore[arg-type]
        (Verdict("pass", "many", "", ""), "the figure 'many'"),  # type: ignore[arg-type]
    ],
)
def test_a_check_that_breaks_its_contract(
    verdict: Any, got: str, images: Tensor, labels: Tensor, network: nn.Module
) -> None:
    @rm.register("check", "odd")
    def odd(findings: Findings) -> Any:
        return verdict

    with pytest.raises(UserError, match=rf"check 'odd' .*{got}") as told:
        rm.evaluate(network, images, labels, attacks=["ES"], queries=4, checks="none,odd")
    assert told.match(r"Verdict\(status, figure, limit, says\)")


def test_a_check_of_ones_own_has_options_and_may_attack_again(
    images: Tensor, labels: Tensor, network: nn.Module
) -> None:
    @rm.register("check", "again")
    def again(findings: Findings, times: int = 1) -> Verdict:
        (attack,) = findings.attacks
        budget = Budget(eps=times * findings.budget.eps, alpha=0.1, steps=4)
        moved = findings.again(attack, findings.some, budget, PGD())
        return Verdict("pass", float(moved.values["ES:D"].mean()), "", "")

    how: dict[str, Any] = {"eps": 0.1, "alpha": 0.1, "steps": 4, "attacks": ["ES"], "queries": 8}
    record = rm.evaluate(network, images, labels, **how, checks="none,again,again(times=3)")
    once, thrice = (check_of(record, name).figure or 0 for name in ("again", "again(times=3)"))
    assert once == pytest.approx(record["ES:D"])
    assert thrice > 1.5 * once


def test_a_figure_that_json_has_no_word_for_is_null(
    images: Tensor, labels: Tensor, network: nn.Module, tmp_path: Path
) -> None:
    @rm.register("check", "far")
    def far(findings: Findings) -> Verdict:
        return Verdict("warn", float("inf"), "", "too far")

    record = rm.evaluate(
        network, images, labels, attacks=["ES"], queries=4, checks="none,far", out=tmp_path / "out"
    )
    assert check_of(record, "far").figure is None
    assert rm.load_record(tmp_path / "out") == record


# Plans


def test_a_plan_is_taken_in_the_place_of_its_settings(
    images: Tensor, labels: Tensor, network: nn.Module
) -> None:
    how: dict[str, Any] = {"steps": 2, "attacks": ["ES"], "queries": 4, "checks": "none"}
    plan = Plan.make(**how)
    record = rm.evaluate(network, images, labels, plan=plan)
    assert record.settings == plan
    assert record == rm.evaluate(network, images, labels, **how)
    with pytest.raises(UserError, match="a plan and steps are given; give the plan alone, or its settings"):
        rm.evaluate(network, images, labels, plan=plan, steps=2)
    with pytest.raises(UserError, match=r"unknown setting 'stepz' .did you mean 'steps'"):
        rm.evaluate(network, images, labels, stepz=2)
