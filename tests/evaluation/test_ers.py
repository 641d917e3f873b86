"""The ERS against every published row, and intervals against loops and against what chance does."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from robustmetric.attacks import ATTACKS, Protocol
from robustmetric.evaluation.ers import (
    COLUMNS,
    ERS_ATTACKS,
    Values,
    ers,
    intervals,
    query_weights,
    terms,
)

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
    for protocol in PROTOCOLS:
        with pytest.raises(ValueError, match="the ERS needs all ten scores; missing: ") as error:
            ers(scores, protocol=protocol)
        assert f"missing: {name}: run the attacks {attack} as well" in str(error.value)
    with pytest.raises(ValueError, match="missing: ES:D, ES:R, GTT: run the attacks ES, GTT as well"):
        ers({n: v for n, v in UNMOVED.items() if n[:2] != "ES" and n != "GTT"})


def test_the_attacks_of_the_ers_are_nine_that_exist() -> None:
    assert len(ERS_ATTACKS) == 9
    assert set(ERS_ATTACKS) < set(ATTACKS)


def test_points_are_what_a_term_changes_by() -> None:
    for name in ("TMA", "ES:D", "CA-", "LTM"):
        assert 0.3 * COLUMNS[name].unit.points == pytest.approx(0.3 * abs(WORTH[name]))
    # A rank is in % already.
    assert 0.3 * COLUMNS["CA+"].unit.points == 0.3


values_with_gaps = st.lists(st.one_of(st.floats(-100, 100), st.just(math.nan)), min_size=1, max_size=40)


@given(values=values_with_gaps, group=st.one_of(st.none(), st.integers(1, 50)))
@example(values=[1.0, math.nan, 3.0, 5.0], group=1)
@settings(max_examples=150)
def test_means_are_those_of_a_loop(values: list[float], group: int | None) -> None:
    batches = []
    for begin in range(0, len(values), group or len(values)):
        counted = [v for v in values[begin : begin + (group or len(values))] if not math.isnan(v)]
        if counted:
            batches.append(sum(counted) / len(counted))
    wanted = sum(batches) / len(batches) if batches else math.nan
    array = np.array(values)
    found = intervals({"LTM": array}, group=group, resamples=3)[0]["LTM"]
    assert found.value == pytest.approx(wanted, abs=1e-9, nan_ok=True)
    weights = query_weights(array, group)
    assert weights[np.isnan(array)].tolist() == [0] * int(np.isnan(array).sum())
    assert weights.sum() == pytest.approx(1 if batches else 0)
    if not batches:
        assert math.isnan(found.low)
        assert math.isnan(found.high)


def loop_interval(values: Values, group: int | None, seed: int, resamples: int) -> tuple[float, float]:
    """Bootstrap the plain way: draw queries, each with the weight that its batch gives it, and average."""
    generator = np.random.default_rng(seed)
    weights = query_weights(values, group)
    means = []
    for _ in range(resamples):
        total = weight = 0.0
        for i in generator.integers(0, len(values), len(values)):
            if not np.isnan(values[i]):
                total += weights[i] * values[i]
                weight += weights[i]
        means.append(total / weight)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@pytest.mark.parametrize("group", [None, 7])
def test_intervals_are_those_of_a_loop(group: int | None) -> None:
    values: Values = np.random.default_rng(1).normal(50, 20, 30)
    values[[3, 4, 17]] = np.nan
    found = intervals({"GTM": values, "LTM": values + 5}, group=group, seed=5, resamples=60)[0]
    wanted = loop_interval(values, group, 5, 60)
    assert (found["GTM"].low, found["GTM"].high) == pytest.approx(wanted)
    assert (found["LTM"].low, found["LTM"].high) == pytest.approx([v + 5 for v in wanted])


def test_an_interval_is_as_wide_as_chance_and_covers_the_truth() -> None:
    generator = np.random.default_rng(0)
    count, share, trials = 200, 0.3, 200
    covered, widths = 0, []
    for seed in range(trials):
        sample = np.where(generator.random(count) < share, 100.0, 0.0).astype(np.float64)
        found = intervals({"LTM": sample}, seed=seed, resamples=300)[0]["LTM"]
        assert found.low <= found.value <= found.high
        covered += found.low <= 100 * share <= found.high
        widths.append(found.high - found.low)
    # 0.95 of 200 with a standard error of 1.5 %; a bootstrap of shares covers a little less.
    assert 0.90 <= covered / trials <= 0.985
    wanted = 2 * 1.96 * 100 * math.sqrt(share * (1 - share) / count)
    assert np.mean(widths) == pytest.approx(wanted, rel=0.05)


def test_four_times_the_queries_halve_the_interval() -> None:
    sample = np.random.default_rng(0).normal(0, 1, 400)
    few, many = (intervals({"x": sample[:n]}, resamples=2000)[0]["x"] for n in (100, 400))
    ratio = (few.high - few.low) / (many.high - many.low)
    assert ratio == pytest.approx(2 * sample[:100].std() / sample.std(), rel=0.08)


def test_all_scores_are_resampled_with_the_same_queries() -> None:
    """Two scores of which one is low where the other is high: singly uncertain, certain in their sum."""
    easy = np.where(np.random.default_rng(0).random(100) < 0.4, 100.0, 0.0).astype(np.float64)
    table = {name: np.full(100, value) for name, value in UNMOVED.items()}
    table |= {"ES:R": easy, "LTM": 100 - easy}
    scores, overall, _ = intervals(table)
    assert overall is not None
    assert scores["ES:R"].high - scores["ES:R"].low > 10
    assert overall.value == pytest.approx(90)
    assert overall.high - overall.low < 1e-9
    # And the other way round: two that agree add up.
    _, twice, _ = intervals({**table, "LTM": easy})
    assert twice is not None
    assert twice.high - twice.low == pytest.approx((scores["ES:R"].high - scores["ES:R"].low) / 5)


def test_the_ers_of_intervals_is_that_of_the_means() -> None:
    generator = np.random.default_rng(2)
    table = {name: generator.uniform(0, 1, 50) * abs(value or 1) for name, value in UNMOVED.items()}
    for protocol in PROTOCOLS:
        scores, overall, each = intervals(table, protocol=protocol, group=20)
        assert overall is not None
        means = {name: scores[name].value for name in COLUMNS}
        assert overall.value == pytest.approx(ers(means, protocol=protocol))
        assert each == pytest.approx({n: float(v) for n, v in terms(means, protocol=protocol).items()})
        assert overall.low < overall.value < overall.high
    # One query's term may leave [0, 100]: strict clamps that of the mean.
    table["CA+"] = np.array([0.0, 90.0] * 25)
    _, _, each = intervals(table)
    assert each["CA+"] == pytest.approx(90)
    table["CA+"] = np.array([80.0, 90.0] * 25)
    _, overall, each = intervals(table)
    assert each["CA+"] == 100


def test_without_all_ten_there_is_no_ers_and_others_do_no_harm() -> None:
    table = {name: np.full(4, value) for name, value in UNMOVED.items()}
    assert intervals({n: v for n, v in table.items() if n != "TMA"})[1:] == (None, {})
    scores, overall, _ = intervals({"SP-QA+": np.arange(4.0), **table})
    assert overall is not None
    assert overall.value == 100
    assert scores["SP-QA+"].value == 1.5


def test_an_interval_repeats_with_its_seed_alone() -> None:
    table = {"LTM": np.random.default_rng(0).random(50)}
    assert intervals(table, seed=3) == intervals(table, seed=3)
    assert intervals(table, seed=3)[0]["LTM"][1:] != intervals(table, seed=4)[0]["LTM"][1:]


def test_an_interval_never_leaves_the_values_it_is_of() -> None:
    """Also if few queries have a value, so that some resamples draw none of them."""
    values = np.full(40, np.nan)
    values[:2] = [80.0, 90.0]
    found = intervals({"LTM": values})[0]["LTM"]
    assert found.value == 85
    assert 80 <= found.low <= found.high <= 90


@pytest.mark.parametrize("group", [None, 7, 128])
def test_equal_values_have_exactly_their_value_and_no_width(group: int | None) -> None:
    for count in range(2, 400):
        found = intervals({"ES:R": np.full(count, 100.0)}, group=group, resamples=20)[0]["ES:R"]
        assert found == (100.0, 100.0, 100.0), count


@pytest.mark.parametrize("group", [None, 7])
def test_where_all_are_at_an_end_the_interval_is_what_chance_could_hide(group: int | None) -> None:
    """With a share p of queries elsewhere, none of n is seen with probability (1 − p)ⁿ."""
    for count in (2, 30, 1000):
        values = np.concatenate([np.zeros(count), [np.nan]])
        found = intervals({"a": values, "b": 100 - values}, group=group, percent=["a", "b"], resamples=2)[0]
        most = 100 * (1 - 0.025 ** (1 / count))
        assert found["a"] == pytest.approx((0, 0, most), abs=1e-9)
        assert found["b"] == pytest.approx((100, 100 - most, 100), abs=1e-9)
    # A value that is not a share, or not at an end, has the interval of the bootstrap.
    table = {"ES:D": np.zeros(9), "ES:R": np.array([0.0, 100.0] * 5)[:9]}
    assert intervals(table, percent=["ES:R"])[0] == intervals(table)[0]


def test_one_query_has_no_interval() -> None:
    scores, overall, _ = intervals({name: np.array([0.5]) for name in COLUMNS})
    assert overall is not None
    for value, low, high in [*scores.values(), overall]:
        assert not np.isnan(value)
        assert np.isnan([low, high]).all()
