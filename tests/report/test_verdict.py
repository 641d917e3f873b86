"""The verdict of a report: two sentences that are right for any records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from robustmetric.evaluation import Record
from robustmetric.report.verdict import verdict
from tests.helpers.records import GOAL, a_record, altered

MAY = "under attacks that may change each pixel by up to 8/255"


def check(name: str, status: str) -> dict[str, Any]:
    return {"name": name, "status": status, "figure": 0.0, "limit": "none", "says": "said"}


def checked(*pairs: tuple[str, str], **how: Any) -> Record:
    """A record whose checks ended so."""
    usual = [("collapse", "pass"), ("repeat", "pass"), ("budget", "pass")]
    return altered(a_record(**how), checks=[check(*pair) for pair in pairs or usual])


def of(*records: Record) -> tuple[str, str]:
    return verdict({record.network.name: record for record in records})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "at most 13.2 % survive all three of ES, LTM and GTM"),
        ({"scores": {"GTM": {"value": None}}}, "at most 13.2 % survive both ES and LTM"),
        ({"suite": {"goals": {"misrank": GOAL}}}, "7.4 % survive the worst case"),
        ({"suite": {"goals": {"translocate": GOAL}}}, "at most 13.2 % survive all three of ES, LTM and GTM"),
    ],
)
def test_one_network(changes: dict[str, Any], told: str) -> None:
    first, second = of(altered(checked(name="mine"), **changes))
    assert f"37.2 % of its queries; {told}, which may change each pixel by up to 8/255; ERS 33.5" in first
    assert second == "All 3 checks passed."


@pytest.mark.parametrize(
    ("ends", "apart"),
    [((34.6, 34.5), True), ((34.5, 34.5), False), ((30.0, 34.5), False), ((0.5, 0.0), True),
     ((None, 34.5), False), ((40.0, None), False)],
)  # fmt: skip
def test_intervals_decide_whether_two_are_apart(ends: tuple[float | None, float | None], apart: bool) -> None:
    better = altered(a_record({"ERS": 35.0}, name="better"), ers={"low": ends[0]})
    worse = altered(a_record(name="worse"), ers={"high": ends[1]})
    first, _ = of(worse, better)
    told = (
        f"better keeps its ranking better than worse {MAY}: "
        if apart
        else f"The intervals of better and worse overlap {MAY}: "
    )
    assert first.startswith(f"{told}ERS 35.0")


def test_a_collapsed_network_is_not_called_the_best() -> None:
    fallen = a_record({"ERS": 90.0}, name="fallen", why="all images lie in one direction.")
    first, second = of(fallen, a_record({"ERS": 40.0}, name="a"), a_record({"ERS": 20.0}, name="b"))
    assert first.startswith(f"a keeps its ranking better than b {MAY}: ERS 40.0")
    assert second.startswith("The ERS of fallen is not valid: all images lie in one direction; ")
    assert "ERS" not in of(fallen, altered(fallen, network={"name": "too"}))[0]


@pytest.mark.parametrize("unknown", [None, float("nan")])
def test_an_ers_that_is_not_known_is_not_ranked(unknown: float | None) -> None:
    odd = altered(a_record(name="odd"), ers={"value": unknown, "low": unknown, "high": unknown})
    first, _ = of(odd, a_record({"ERS": 40.0}, name="a"), a_record({"ERS": 20.0}, name="b"))
    assert first.startswith(f"a keeps its ranking better than b {MAY}")
    assert "ERS" not in of(odd)[0]


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"settings": {"eps": 0.1}}, False),
        ({"settings": {"search": "nes(samples=8)"}}, False),
        ({"data": {"sha256": "1" * 64}}, False),
        ({"queries": {"count": 8}}, False),
        ({"versions": {"torch": "9"}}, True),
        ({"settings": {"suite": "worst-case"}}, True),
    ],
)
def test_networks_that_were_not_tested_alike_are_not_ranked(changes: dict[str, Any], alike: bool) -> None:
    first, _ = of(a_record(name="a"), altered(a_record({"ERS": 60.0}, name="b"), **changes))
    assert first.startswith("b keeps its ranking better") == alike
    assert ("tested under different conditions, so do not compare: a R@1 37.2" in first) != alike


@pytest.mark.parametrize(
    ("checks", "told"),
    [
        ([("collapse", "pass"), ("last", "warn")], "Read these scores with care: the check “last” warned."),
        ([("last", "warn"), ("gradient", "fail")], "Do not trust these scores: the check “gradient” failed."),
        ([("collapse", "pass"), ("eps-1", "not run")], "No checks were run"),
        ([("collapse", "pass"), ("repeat", "pass"), ("eps-1", "not run")], "All 2 checks passed."),
    ],
)
def test_checks_decide_about_the_second_sentence(checks: Sequence[tuple[str, str]], told: str) -> None:
    assert of(checked(*checks))[1].startswith(told)


def test_checks_of_some_networks() -> None:
    warns = checked(("collapse", "pass"), ("last", "warn"), name="a")
    good, unchecked = checked(name="b"), checked(("collapse", "pass"), name="c")
    assert of(warns, good)[1] == "Read these scores with care: the check “last” (of a) warned."
    fails = checked(("gradient", "fail"), name="e")
    assert of(warns, unchecked, fails)[1] == (
        "Do not trust these scores: the check “gradient” (of e) failed; the scores of c were not checked."
    )
    assert of(good, unchecked)[1] == "The scores of c were not checked."
