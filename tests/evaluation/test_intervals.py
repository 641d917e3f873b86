"""Intervals against loops and against what chance does."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from robustmetric.evaluation.ers import COLUMNS, Values, ers, terms
from robustmetric.evaluation.intervals import exact_interval, intervals, query_weights
from tests.evaluation.test_ers import PROTOCOLS, UNMOVED


@given(st.integers(1, 80).flatmap(lambda of: st.tuples(st.integers(0, of), st.just(of))))
def test_intervals_of_counts_are_exact(case: tuple[int, int]) -> None:
    """At each end, what was seen or is farther off has the probability of a side, summed in fractions."""
    count, of = case

    def tail(share: float, seen: range) -> float:
        p = Fraction(share)
        return float(sum(math.comb(of, k) * p**k * (1 - p) ** (of - k) for k in seen))

    low, high = exact_interval(count, of)
    assert low == 0 if count == 0 else tail(low, range(count, of + 1)) == pytest.approx(0.025, rel=1e-9)
    assert high == 1 if count == of else tail(high, range(count + 1)) == pytest.approx(0.025, rel=1e-9)


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
