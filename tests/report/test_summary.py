"""What the seeds of a row come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from robustmetric.experiments.outcome import Outcome
from robustmetric.report.summary import scores_of, summarise
from tests.helpers.records import a_record


def made(r1: float | None = None, *, collapsed: str | None = None) -> Outcome:
    """The outcome of a cell with this R@1, or without a record."""
    record = None if r1 is None else a_record({"R@1": r1}, why=collapsed or "")
    return Outcome(Path("cell"), record, collapsed=collapsed)


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
