"""Attacks, searches and checks of the user's own: what is made of their columns, and of a broken contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import robustmetric as rm
from robustmetric.attacks import DISTANCE, PGD, Column, EmbeddingShift, Gallery, Queries, Target
from robustmetric.errors import UserError
from robustmetric.evaluation import ERS_ATTACKS, Check, Findings, Verdict
from robustmetric.perturb import Budget
from tests.evaluation.conftest import Evaluated, Tiny, check_of


class MyShift(EmbeddingShift):
    """ES under another name."""

    name = "MY"
    columns = (Column("MY:D", "lower", DISTANCE),)
    read_early = ()

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        return {"MY:D": super().measure(z, target, queries, gallery)["ES:D"]}


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


def test_a_column_of_ones_own_is_described_in_the_record(evaluated: Evaluated) -> None:
    record = evaluated(attacks=["ES", MyShift()])
    assert record["MY:D"] == pytest.approx(record["ES:D"], rel=0.2)
    assert record.column("MY:D") == Column("MY:D", "lower", DISTANCE)
    assert record.show("MY:D") == f"{record['MY:D']:.3f}"
    assert record.columns()[-1] == "MY:D"
    assert record.ers is None


@pytest.mark.slow
def test_the_ers_with_an_attack_of_ones_own_is_marked(evaluated: Evaluated) -> None:
    """One that reports under a name of the ten does not pass for it."""

    class Mine(EmbeddingShift):
        pass

    others = [name for name in ERS_ATTACKS if name != "ES"]
    plain, marked = (evaluated(attacks=[*others, es], steps=1, queries=2).ers for es in ("ES", Mine()))
    assert plain is not None
    assert marked is not None
    assert (plain.valid, marked.valid, marked.value) == (True, False, plain.value)
    assert "ES:D, ES:R" in marked.why


@pytest.mark.parametrize("status", ["warn", "fail"])
def test_a_failed_check_makes_the_ers_invalid_and_a_warning_does_not(
    status: Any, evaluated: Evaluated
) -> None:
    rm.register("check", "bad")(lambda findings: Verdict(status, 1, "none", "bad"))
    overall = evaluated(steps=1, queries=2, checks="none,bad").ers
    assert overall is not None
    assert (overall.valid, "bad" in overall.why) == (status == "warn", status == "fail")


# Checks of the user's own


@pytest.mark.parametrize(
    ("verdict", "got"),
    [
        (None, "returned a NoneType"),
        (("pass", 0, "", ""), "returned a tuple"),
        (Verdict("fine", 0, "", ""), "status: .*'pass', 'warn'"),  # type: ignore[arg-type]
    ],
)
def test_a_check_that_breaks_its_contract(verdict: Any, got: str, evaluated: Evaluated) -> None:
    rm.register("check", "odd")(lambda findings: verdict)
    with pytest.raises(UserError, match=rf"check 'odd' .*{got}") as told:
        evaluated(attacks=["ES"], queries=4, checks="none,odd")
    assert told.match(r"Verdict\(status, figure, limit, says\)")


def test_a_check_sees_what_was_found(tiny: Tiny) -> None:
    seen: list[Findings] = []

    @rm.register("check", "look")
    def look(findings: Findings) -> Verdict:
        seen.append(findings)
        return Verdict("pass", 0, "", "")

    evaluation = tiny(attacks=["ES", "GTM"], queries=20, batch=8, checks="none,look")
    record = evaluation.run()
    (findings,) = seen
    assert list(findings.found) == ["ES", "GTM"]
    assert torch.equal(findings.found["ES"]["number"], findings.numbers)
    assert torch.equal(findings.numbers, evaluation.plan.draw(40))
    assert float(findings.found["GTM"]["after/GTM"].mean()) == pytest.approx(record["GTM"])
    assert findings.recall == pytest.approx(record["R@1"])


def test_a_check_of_ones_own_has_options_and_may_attack_again(evaluated: Evaluated) -> None:
    @rm.register("check", "again")
    def again(findings: Findings, times: int = 1) -> Verdict:
        (attack,) = findings.attacks
        budget = Budget(eps=times * findings.budget.eps, alpha=0.1, steps=4)
        moved = findings.again(attack, findings.some, budget=budget, search=PGD())
        return Verdict("pass", float(moved.values["ES:D"].mean()), "", "")

    how: dict[str, Any] = {"eps": 0.1, "alpha": 0.1, "steps": 4, "attacks": ["ES"], "queries": 8}
    record = evaluated(**how, checks="none,again,again(times=3)")
    once, thrice = (check_of(record, name).figure or 0 for name in ("again", "again(times=3)"))
    assert once == pytest.approx(record["ES:D"])
    assert thrice > 1.5 * once


def test_a_figure_that_json_has_no_word_for_is_null(evaluated: Evaluated, tmp_path: Path) -> None:
    rm.register("check", "far")(lambda findings: Verdict("warn", float("inf"), 'η ≤ 3 "or"', "ε\nµ [bold]"))
    record = evaluated(attacks=["ES"], queries=4, checks="none,far", out=tmp_path)
    check = Check(name="far", status="warn", figure=None, limit='η ≤ 3 "or"', says="ε\nµ [bold]")
    assert check_of(record, "far") == check
    assert rm.load_record(tmp_path) == record
