"""The ERS against every published row."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from robustmetric.attacks import Protocol
from robustmetric.evaluation.ers import COLUMNS, ers, terms

PUBLISHED = Path(__file__).parents[1] / "golden" / "published.csv"
PROTOCOLS: tuple[Protocol, ...] = ("strict", "reference")

# What a unit of each score is worth in its term.
WORTH = {"CA+": 2, "CA-": -1, "QA+": 2, "QA-": -1, "TMA": -100, "ES:D": -50}
WORTH |= dict.fromkeys(("ES:R", "LTM", "GTM", "GTT"), 1)
# The score of a network that nothing moves.
UNMOVED = {"CA+": 50.0, "CA-": 0.0, "QA+": 50.0, "QA-": 0.0, "TMA": 0.0, "ES:D": 0.0}
UNMOVED |= dict.fromkeys(("ES:R", "LTM", "GTM", "GTT"), 100.0)


def complete_rows() -> list[dict[str, str]]:
    with PUBLISHED.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["ERS"] and all(row[name] for name in COLUMNS)]


def test_equals_the_published_ers_in_all_complete_rows() -> None:
    rows = complete_rows()
    assert len(rows) == 102
    worst = 0.0
    for row in rows:
        # A digit printed as d may have been anything within half of its last place; so may the ERS.
        doubt = 0.05
        for name in COLUMNS:
            half = 0.5 * 10.0 ** -len(row[name].partition(".")[2])
            doubt += half * abs(WORTH[name]) / 10
        scores = {name: float(row[name]) for name in COLUMNS}
        for protocol in PROTOCOLS:
            difference = abs(ers(scores, protocol=protocol) - float(row["ERS"]))
            assert difference <= doubt + 1e-9, (row, ers(scores, protocol=protocol))
            worst = max(worst, difference)
    assert worst <= 0.1 + 1e-9
    # Most of the rounding cancels: were a term off by a point in all rows, the ERS would be off by 0.1.
    mean = np.mean(
        [ers({n: float(r[n]) for n in COLUMNS}, protocol="reference") - float(r["ERS"]) for r in rows]
    )
    assert abs(mean) < 0.01


def test_a_network_that_nothing_moves_has_100_and_each_score_its_worth() -> None:
    assert [*COLUMNS] == [*UNMOVED]
    assert ers(UNMOVED) == ers(UNMOVED, protocol="reference") == 100
    for name in COLUMNS:
        less = {**UNMOVED, name: UNMOVED[name] - math.copysign(0.1, WORTH[name])}
        for protocol in PROTOCOLS:
            assert ers(less, protocol=protocol) == pytest.approx(100 - 0.1 * abs(WORTH[name]) / 10)
            found = terms(less, protocol=protocol)
            assert [n for n, v in found.items() if v != 100] == [name]


def test_strict_clamps_each_term_and_the_reference_none() -> None:
    far = {name: value + 30 * math.copysign(1, WORTH[name]) for name, value in UNMOVED.items()}
    assert ers(far) == 100
    assert ers(far, protocol="reference") == pytest.approx(
        100 + sum(30 * abs(worth) for worth in WORTH.values()) / 10
    )
    near = {name: value - 300 * math.copysign(1, WORTH[name]) for name, value in UNMOVED.items()}
    assert set(terms(near).values()) == {0.0}
    assert max(terms(near, protocol="reference").values()) < 0
    # The clamp is of each term and not of their mean: one that is too good does not make up for a bad one.
    one = {**UNMOVED, "ES:D": -2.0, "LTM": 0.0}
    assert ers(one) == pytest.approx(90)
    assert ers(one, protocol="reference") == pytest.approx(100)


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_score_is_an_error_that_names_it_and_its_attack(name: str) -> None:
    scores = {n: v for n, v in UNMOVED.items() if n != name}
    attack = "ES" if name.startswith("ES:") else name
    with pytest.raises(ValueError, match="the ERS needs all ten scores") as error:
        ers(scores)
    assert f"missing: {name}: run the attacks {attack} as well" in str(error.value)
