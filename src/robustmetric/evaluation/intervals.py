"""Intervals of 95 %: by a bootstrap over queries or pairs, and exact ones of counts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from robustmetric.attacks import Protocol
from robustmetric.evaluation.document import FrozenModel, Number
from robustmetric.evaluation.ers import COLUMNS, Values, terms


class Score(FrozenModel):
    """A mean over queries with its 95 % interval; `before` is that of the images as they were."""

    value: Number
    low: Number
    high: Number
    before: Number = None
    better: Literal["higher", "lower"] | None = Field(default=None, description="which way is more robust")
    unit: str | None = Field(default=None, description="what it is measured in: %, or a cosine or distance")


class Interval(NamedTuple):
    """A mean over queries and its 95 % interval: NaN where there is but one query."""

    value: float
    low: float
    high: float


def exact_interval(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of Clopper and Pearson for a share, of which `count` `of` so many were seen.

    Each side is wrong with a probability of at most 2.5 %, whatever the share.

    >>> [round(end, 4) for end in exact_interval(0, 100)]
    [0.0, 0.0362]
    """
    from scipy.special import betaincinv  # slow to import, and not needed to train

    side = (1 - 0.95) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, of - count + 1, side))
    high = 1.0 if count == of else float(betaincinv(count + 1, of - count, 1 - side))
    return low, high


def resampled(kinds: Sequence[NDArray[np.bool_]], seed: int, resamples: int = 1000) -> Iterator[Values]:
    """Yield how often (P,) each of P items is drawn with replacement, once for each of the `resamples`.

    As many of each kind are drawn as there are: `kinds` are masks (P,) that share out the items.
    """
    generator = np.random.default_rng(seed)
    for _ in range(resamples):
        often = np.zeros(len(kinds[0]))
        for kind in kinds:
            count = int(kind.sum())
            often[kind] = np.bincount(generator.integers(0, count, count), minlength=count)
        yield often


def bootstrap_interval(value: float, drawn: Values) -> Interval:
    """Return a `value` with the middle 95 % of those `drawn` (R,), widened to hold it; NaN without any.

    >>> bootstrap_interval(20, np.arange(41.0))
    Interval(value=20.0, low=1.0, high=39.0)
    """
    if np.isnan(value) or np.isnan(drawn).all():
        return Interval(float(value), np.nan, np.nan)
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(float(value), float(min(low, value)), float(max(high, value)))


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

    The bootstrap draws the same queries for all scores, since an easy query is easy for all attacks. A score
    without any value is NaN. If all values of a score in `percent` are 0, or all 100, no resample differs:
    its interval is the exact one of the share of queries that could be elsewhere.

    >>> scores, _, _ = intervals({"ES:R": np.array([100.0, 0.0] * 50)})
    >>> scores["ES:R"].value, 35 < scores["ES:R"].low < 50 < scores["ES:R"].high < 65
    (50.0, True)
    """
    table = np.stack(list(values.values()), axis=1)
    count = len(table)
    weights = np.stack([query_weights(column, group) for column in table.T], axis=1)
    weighted = weights * np.nan_to_num(table)
    # Weighted sums of equal values differ in their last digits.
    means = np.where(weights.any(0), weighted.sum(0), np.nan).round(9)
    drawn = np.full((resamples if count > 1 else 0, len(values)), np.nan)
    for row, often in zip(drawn, resampled([np.full(count, True)], seed, len(drawn)), strict=True):
        total = often @ weights
        # A draw without any query that has this score says nothing of it.
        np.divide(often @ weighted, total, out=row, where=total > 0)
    drawn = drawn.round(9)
    found = {name: bootstrap_interval(means[k], drawn[:, k]) for k, name in enumerate(values)}
    for name in percent if count > 1 else ():
        if (value := found[name].value) in (0.0, 100.0):
            # With a share p of queries elsewhere, the mean is at most 100·p away from this end.
            known = int(np.count_nonzero(~np.isnan(values[name])))
            low, high = exact_interval(known if value else 0, known)
            found[name] = Interval(value, 100 * low, 100 * high)
    if any(name not in values for name in COLUMNS):
        return found, None, {}
    each = terms({name: found[name].value for name in COLUMNS}, protocol=protocol)
    many = terms(dict(zip(values, drawn.T, strict=True)), protocol=protocol)
    overall = bootstrap_interval(float(np.mean(list(each.values()))), np.mean(list(many.values()), axis=0))
    return found, overall, {name: float(term) for name, term in each.items()}
