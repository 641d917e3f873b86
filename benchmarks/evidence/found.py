"""What was measured so far: records by their network, differences of seeds, and what is missing."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy import stats

from benchmarks.evidence.plan import (
    NETWORKS,
    RESULTS,
    SAMPLERS,
    SMALL,
    Kind,
    Network,
    Samplers,
    tasks,
)
from robustmetric.evaluation import Record, load_record
from robustmetric.experiments.outcome import read_result
from robustmetric.experiments.published import Published, published
from robustmetric.report.summary import record_scores


@cache
def record_of(network: Network, kind: Kind) -> Record | None:
    """Return a record of a network, None if it is not made yet."""
    file = network.record(kind)
    return load_record(file) if file.is_file() else None


@cache
def hardness_of(samplers: Samplers) -> Mapping[str, Any] | None:
    """Return what was measured of Table 1, None if it is not made yet."""
    found = read_result(samplers.result.parent)
    return None if found is None else found["hardness"]


def log_of(network: Network) -> list[dict[str, str]]:
    """Return the rows of what a training logged."""
    with (RESULTS / network.name / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published_of(network: Network) -> Published | None:
    """Return what was published for a training of its η; the published ones had eight epochs."""
    training = (0, network.data, network.defense, network.steps)
    return next((r for r in published() if (r.table, r.data, r.defense, r.steps) == training), None)


class Missing(NamedTuple):
    """A gap: `where` and `what` it is, the `kind` of record, and the `seed`, if it has several."""

    where: str
    what: str
    kind: str = ""
    seed: str = ""


def planned() -> int:
    """Return how many records and measurements there are to make."""
    return len(list(tasks())) + len(SAMPLERS)


def missing() -> list[Missing]:
    """Return what is not made yet, one for each record and measurement."""
    lacks = [
        Missing(
            f"{network.data}, {network.length}",
            network.title,
            kind,
            "" if network.kept else str(network.seed),
        )
        for network, kind in tasks()
        if record_of(network, kind) is None
    ]
    return lacks + [
        Missing(f"Table 1 on {one.data}", one.label) for one in SAMPLERS if hardness_of(one) is None
    ]


def measured() -> list[Network]:
    """Return the networks that have a record."""
    return [n for n in NETWORKS if record_of(n, "reference") or record_of(n, "strict")]


@dataclass(frozen=True)
class Value:
    """Which figure of a network is meant: `name` of its record of a `kind`, shown as `title`."""

    title: str
    kind: Kind
    name: str
    digits: int = 1
    lower: bool = False  # is better
    relative: bool = False  # to the distance of two images

    def of(self, network: Network) -> float | None:
        """Return the figure, None if it is not measured yet or is the ERS of a network that collapsed."""
        record = record_of(network, self.kind)
        if record is None:
            return None
        if self.name == "ERS" and record.ers is not None and not record.ers.valid:
            return None
        found = record[self.name] / self._unit(record)
        return None if math.isnan(found) else found

    def ends(self, network: Network) -> tuple[float, float] | None:
        """Return the ends of the figure's interval of 95 % over the queries."""
        record = record_of(network, self.kind)
        if record is None:
            return None
        goals = record.suite.goals if record.suite is not None else {}
        score, unit = goals.get(self.name) or record_scores(record).get(self.name), self._unit(record)
        if score is None or score.low is None or score.high is None:
            return None
        return score.low / unit, score.high / unit

    def _unit(self, record: Record) -> float:
        """Return what the figure is divided by: 1, or the distance of two images."""
        if not self.relative:
            return 1.0
        cosine = next(check.figure for check in record.checks if check.name == "collapse")
        return math.nan if cosine is None else math.sqrt(2 * (1 - cosine))  # of the mean square

    def show(self, network: Network, *, interval: bool = False) -> str:
        """Return the figure as text, with its interval if that is asked for; a dash if it is missing."""
        value, ends = self.of(network), self.ends(network)
        if value is None:
            return "–" if record_of(network, self.kind) is None else "not valid"
        shown = self.write(value)
        return f"{shown} [{self.write(ends[0])}, {self.write(ends[1])}]" if interval and ends else shown

    def write(self, value: float) -> str:
        """Return a value of this figure as text."""
        return f"{value:.{self.digits}f}"


RECALL = Value("R@1", "reference", "R@1")
ERS = Value("ERS, reference", "reference", "ERS")
LESS = Value(f"ERS, ε = {SMALL}/255", "small", "ERS")
STRICT = Value("ERS, strict", "strict", "ERS")
WORST = Value("R@1, worst case", "strict", "misrank")
SHIFT = Value("shift, worst case ↓", "strict", "shift", digits=2, lower=True)
RELATIVE = Value("relative shift, worst case ↓", "strict", "shift", digits=2, lower=True, relative=True)
LESS_WORST = Value(f"R@1, worst case, ε = {SMALL}/255", "small-strict", "misrank")
CLAIMED = (RECALL, ERS, STRICT, WORST, SHIFT, RELATIVE, LESS_WORST)
"""The figures that the central claim is about, and those that test it."""


@dataclass(frozen=True)
class Difference:
    """The difference of paired values: its `mean`, and the ends of the interval of 95 % by Student's t."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Difference:
        """Return the mean of first minus second values; with one pair there is no interval."""
        found = [a - b for a, b in pairs]
        mean = fmean(found)
        if len(found) < 2:
            return cls(mean, math.nan, math.nan)
        half = float(stats.t.ppf(0.975, len(found) - 1)) * stdev(found) / math.sqrt(len(found))
        return cls(mean, mean - half, mean + half)

    @property
    def verdict(self) -> str:
        """Say whether the first values are higher; nothing without an interval, or with one of no width."""
        if math.isnan(self.low) or self.low == self.high:
            return ""
        return "higher" if self.low > 0 else "lower" if self.high < 0 else "not clearly different"

    def show(self, digits: int = 1) -> str:
        """Return the difference as text, with its interval if it has one."""
        mean, low, high = (f"{end:+.{digits}f}" for end in (self.mean, self.low, self.high))
        if self.low == self.high == 0:
            return "none"
        return mean if math.isnan(self.low) else f"{mean} [{low}, {high}]"


def compare(value: Value, ours: Sequence[Network], others: Sequence[Network]) -> Difference | None:
    """Compare networks pair by pair, those of the same seed; None if no pair is measured."""
    pairs = [(value.of(a), value.of(b)) for a, b in zip(ours, others, strict=True)]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Difference.of(whole) if whole else None
