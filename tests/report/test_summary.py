"""What the seeds of a row come to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from robustmetric.experiments.outcome import Outcome
from robustmetric.report.summary import SCORES, Estimate, hardness_of, scores_of, summarise
from tests.helpers.records import SCORES as PAPER
from tests.helpers.records import a_record


def made(r1: float | None = None, *, collapsed: str | None = None) -> Outcome:
    """The outcome of a cell with this R@1, or without a record."""
    record = None if r1 is None else a_record({"R@1": r1}, why=collapsed or "")
    return Outcome(Path("cell"), record, collapsed=collapsed)


def test_one_seed_keeps_the_values_and_intervals_of_its_record() -> None:
    found = summarise([Outcome(Path("cell"), a_record(width=2.0))], scores_of)
    assert list(found.estimates) == list(SCORES)
    assert found.estimates["R@1"] == Estimate(37.2, 35.2, 39.2)
    assert found.estimates["TMA"] == Estimate(0.806, 0.806 - 0.02, 0.806 + 0.02)
    assert found.estimates["NMI"] == Estimate(48.4)  # the NMI has no interval
    assert found.estimates["ERS"].value == pytest.approx(33.455)
    assert {name: found.estimates[name].value for name in PAPER} == PAPER


def test_several_seeds_are_their_mean_and_deviation() -> None:
    values = [30.0, 33.0, 39.0]
    found = summarise([made(value) for value in values], scores_of).estimates["R@1"]
    mean = sum(values) / 3
    assert found.value == pytest.approx(mean)
    assert found.deviation == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in values) / 2))
    assert found.low is None
    assert found.spread == (found.deviation, found.deviation)


@pytest.mark.parametrize(
    ("outcomes", "r1", "label", "word"),
    [
        ([None], None, "ours", "not run"),
        ([made(collapsed="fell")], None, "ours", "collapse"),
        ([made(0.8, collapsed="fell")], 0.8, "ours, collapsed", None),
        ([None, None], None, "ours", "not run"),
        ([Outcome(Path("cell"), hardness={})], None, "ours", None),  # a dash stands in each column
        ([made(30.0), None], 30.0, "ours, 1 of 2 seeds", None),
        # Those that collapsed are counted, not averaged, unless all did.
        ([made(30.0), made(0.8, collapsed="fell"), made(32.0)], 31.0, "ours, 3 seeds, 1 collapsed", None),
        ([made(collapsed="fell"), made(30.0), None], 30.0, "ours, 2 of 3 seeds, 1 collapsed", None),
        ([made(0.8, collapsed="a"), made(1.0, collapsed="b")], 0.9, "ours, 2 seeds, collapsed", None),
        ([made(collapsed="a"), made(collapsed="a")], None, "ours, 2 seeds", "collapse"),
    ],
)
def test_seeds_that_collapsed_or_are_missing(
    outcomes: list[Outcome | None], r1: float | None, label: str, word: str | None
) -> None:
    found = summarise(outcomes, scores_of)
    assert (found.label, found.word) == (label, word)
    assert ("R@1" in found.estimates) == (r1 is not None)
    if r1 is not None:
        assert found.estimates["R@1"].value == pytest.approx(r1)


def test_samplers_have_estimates_of_a_statistic() -> None:
    cells: list[Outcome | None] = [
        Outcome(
            Path("a"), hardness={"R": {"mean": -0.1, "variance": 0.1}, "H": {"mean": 0.1, "variance": 0.2}}
        ),
        Outcome(
            Path("b"), hardness={"R": {"mean": -0.3, "variance": 0.3}, "H": {"mean": 0.1, "variance": 0.2}}
        ),
    ]
    found = summarise(cells, hardness_of("mean")).estimates
    assert found["R"].value == pytest.approx(-0.2)
    assert found["R"].deviation == pytest.approx(math.sqrt(0.02))
    assert found["H"] == Estimate(0.1, deviation=0.0)
    assert summarise(cells, hardness_of("variance")).estimates["R"].value == pytest.approx(0.2)
