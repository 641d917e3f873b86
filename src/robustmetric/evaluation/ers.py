"""The Empirical Robustness Score: ten scores under attack as one, and how far to trust a mean of queries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from robustmetric.attacks import Column, Protocol, attack
from robustmetric.validate import UserError
from robustmetric.verification import exact_interval

Values = NDArray[np.float64]


ERS_ATTACKS = ("CA+", "CA-", "QA+", "QA-", "TMA", "ES", "LTM", "GTM", "GTT")
"""The attacks of the Empirical Robustness Score, in the paper's order."""

_ATTACK_OF = {column: name for name in ERS_ATTACKS for column in attack(name).columns}

COLUMNS: dict[str, Column] = {column.name: column for column in _ATTACK_OF}
"""The ten scores in the paper's order. Ranks and shares are in %, TMA is a cosine, ES:D a distance."""


def terms(scores: Mapping[str, float | Values], *, protocol: Protocol = "strict") -> dict[str, Values]:
    """Return the ten terms of the ERS from `scores` by column, each at most 100 if nothing moves.

    The `protocol` strict keeps them in [0, 100].

    >>> {k: float(v) for k, v in terms(dict.fromkeys(COLUMNS, 60.0) | {"TMA": 0.75, "ES:D": 1.5}).items()}
    {'CA+': 100.0, 'CA-': 40.0, 'QA+': 100.0, 'QA-': 40.0, 'TMA': 25.0, 'ES:D': 25.0, 'ES:R': 60.0, ...}
    """
    if missing := [name for name in COLUMNS if name not in scores]:
        raise UserError(
            f"the ERS needs all ten scores; missing: {', '.join(missing)}: run the attacks "
            f"{', '.join(dict.fromkeys(_ATTACK_OF[COLUMNS[name]] for name in missing))} as well"
        )
    values = {
        name: column.term(np.asarray(scores[name], float))
        for name, column in COLUMNS.items()
        if column.term is not None
    }
    return {n: v.clip(0, 100) for n, v in values.items()} if protocol == "strict" else values


def ers(scores: Mapping[str, float], *, protocol: Protocol = "strict") -> float:
    """Return the Empirical Robustness Score of `scores` by column; higher is more robust.

    It is the mean of the ten terms, which the `protocol` strict keeps in [0, 100].

    >>> vulnerable = {"CA+": 0.0, "CA-": 100.0, "QA+": 0.0, "QA-": 99.9, "TMA": 0.883, "ES:D": 1.762}
    >>> round(ers(vulnerable | {"ES:R": 0.0, "LTM": 0.0, "GTM": 14.1, "GTT": 0.0}), 1)
    3.8
    """
    return float(np.mean(list(terms(scores, protocol=protocol).values())))


def query_weights(values: Values, group: int | None) -> Values:
    """Weigh (Q,) queries so that the weighted sum is the score: equally, or as a mean of means of `group`.

    A query whose value is NaN has no weight.

    >>> query_weights(np.array([1.0, np.nan, 3.0]), None).tolist()
    [0.5, 0.0, 0.5]
    >>> query_weights(np.array([1.0, 2.0, 3.0]), 2).tolist()
    [0.25, 0.25, 0.5]
    """
    counted = ~np.isnan(values)
    batch = np.arange(len(values)) // (group or max(1, len(values)))
    size = np.bincount(batch[counted], minlength=batch.max(initial=0) + 1)
    weights: Values = np.where(counted, 1 / np.maximum(size[batch], 1), 0.0)
    return weights / max(1, int(np.count_nonzero(size)))


class Interval(NamedTuple):
    """A mean over queries and its 95 % interval: NaN where there is but one query."""

    value: float
    low: float
    high: float


def intervals(
    values: Mapping[str, Values],
    *,
    group: int | None = None,
    protocol: Protocol = "strict",
    seed: int = 0,
    resamples: int = 1000,
    percent: Collection[str] = (),
) -> tuple[dict[str, Interval], Interval | None, dict[str, float]]:
    """Average per-query values (Q,) by name, with intervals; and the ERS and its terms if all ten are there.

    The bootstrap draws queries with replacement, the same for all scores, since an easy query is easy for all
    attacks. A score without any value is NaN. Of those that are `percent`, all values may be 0, or all 100:
    then no resample differs, and the interval is that of the share of queries that could be elsewhere.

    >>> scores, _, _ = intervals({"ES:R": np.array([100.0, 0.0] * 50)})
    >>> scores["ES:R"].value, 35 < scores["ES:R"].low < 50 < scores["ES:R"].high < 65
    (50.0, True)
    >>> scores, _, _ = intervals({"ES:R": np.zeros(100)}, percent=["ES:R"])
    >>> round(scores["ES:R"].high, 2)
    3.62
    """
    names, count = list(values), len(next(iter(values.values())))
    weights = np.stack([query_weights(values[n], group) for n in names], axis=1)
    table = np.nan_to_num(np.stack([values[n] for n in names], axis=1))
    # Weighted sums of equal values differ in their last digits.
    means = np.where(weights.any(0), (weights * table).sum(0), np.nan).round(9)
    if count > 1:
        drawn = _resampled(weights, table, np.random.default_rng(seed), resamples, count).round(9)
    else:
        drawn = np.full((1, len(names)), np.nan)
    found = {n: _interval(means[k], drawn[:, k]) for k, n in enumerate(names)}
    for name in percent if count > 1 else ():
        found[name] = _exact_at_ends(found[name], int(np.count_nonzero(~np.isnan(values[name]))))
    if any(name not in names for name in COLUMNS):
        return found, None, {}
    each = terms({n: found[n].value for n in COLUMNS}, protocol=protocol)
    many = terms({n: drawn[:, names.index(n)] for n in COLUMNS}, protocol=protocol)
    overall = np.mean(list(each.values()))
    return (
        found,
        _interval(float(overall), np.mean(list(many.values()), axis=0)),
        {n: float(v) for n, v in each.items()},
    )


def _resampled(
    weights: Values, table: Values, generator: np.random.Generator, resamples: int, count: int
) -> Values:
    """Average the (Q, K) table over `resamples` draws of queries with replacement: (resamples, K)."""
    drawn = np.empty((resamples, table.shape[1]))
    for k in range(resamples):
        often = np.bincount(generator.integers(0, count, count), minlength=count)
        total = often @ weights
        # A draw without any query that has this score says nothing of it.
        drawn[k] = np.divide(
            often @ (weights * table), total, out=np.full_like(total, np.nan), where=total > 0
        )
    return drawn


def _interval(value: float, drawn: Values) -> Interval:
    if np.isnan(value) or np.isnan(drawn).all():
        return Interval(float(value), np.nan, np.nan)
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(float(value), float(min(low, value)), float(max(high, value)))


def _exact_at_ends(interval: Interval, count: int) -> Interval:
    """Widen the interval of a mean of `count` values in [0, 100] that are all at the same end of it.

    With a share p of queries elsewhere, the mean is at most 100·p away from that end.
    """
    if interval.value not in (0.0, 100.0):
        return interval
    low, high = exact_interval(count if interval.value else 0, count)
    return Interval(interval.value, 100 * low, 100 * high)
