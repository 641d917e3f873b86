"""What was measured: records by their network, figures of them, and differences of seeds."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from benchmarks.evidence.plan import (
    CHEAP,
    CLAIM,
    FEW,
    FULL,
    NETWORKS,
    OTHERS,
    RESULTS,
    SMALL,
    Kind,
    Network,
    Samplers,
    tasks,
)
from robustmetric.evaluation import Record, load_record
from robustmetric.evaluation.ers import COLUMNS, ers
from robustmetric.experiments.outcome import read_result
from robustmetric.experiments.published import Published, published
from robustmetric.report.summary import SCORES, record_scores
from robustmetric.report.verdict import listed

PAPER = ("R@1", "ERS")
"""The scores of the paper that differences stand beside."""
STEPS = {
    "hardness manipulation": ("ACT[R]", "HM[R,M]"),
    "softhard source triplets": ("HM[R,M]", "HM[S,M]"),
    "the gradual adversary": ("HM[S,M]", "HM[S,LGA]"),
    "intra-class structure": ("HM[S,LGA]", "HM[S,LGA]&ICS"),
    "the whole method": ("ACT[R]", "HM[S,LGA]&ICS"),
}
"""What is added to a training, and from which defense to which."""


@cache
def record_of(network: Network, kind: Kind) -> Record | None:
    """Return a record of a network, None if it is not made yet."""
    file = network.record(kind)
    return load_record(file) if file.is_file() else None


def record(network: Network, kind: Kind) -> Record:
    """Return a record of a network that is made."""
    found = record_of(network, kind)
    assert found is not None, f"{network.name} has no {kind} record"
    return found


def hardness_of(samplers: Samplers) -> Mapping[str, Any]:
    """Return what was measured of Table 1; nothing if it is not made yet."""
    found: Mapping[str, Any] = (read_result(samplers.result.parent) or {}).get("hardness", {})
    return found


@cache
def log_of(network: Network) -> list[dict[str, str]]:
    """Return the rows of what a training logged."""
    with (RESULTS / network.name / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(networks: Iterable[Network] = NETWORKS) -> list[Network]:
    """Return those `networks` that have a record."""
    return [n for n in networks if record_of(n, "reference") or record_of(n, "strict")]


def missing() -> list[tuple[Network, Kind]]:
    """Return the records that are not made yet."""
    return [(network, kind) for network, kind in tasks() if record_of(network, kind) is None]


def missing_lines() -> list[str]:
    """Say which records are not made yet, seeds and kinds together."""
    groups: dict[str, dict[Kind, list[int]]] = {}
    for network, kind in missing():
        where = f"{network.data}, {network.length}, {network.title}"
        groups.setdefault(where, {}).setdefault(kind, []).append(network.seed)
    told = {
        where: [f"{kind} (seed{'s' * (len(of) > 1)} {', '.join(map(str, of))})" for kind, of in kinds.items()]
        for where, kinds in groups.items()
    }
    return [f"- {where}: {'; '.join(kinds)}" for where, kinds in told.items()]


def published_of(network: Network) -> Published | None:
    """Return what was published for a training of its η; the published ones had eight epochs."""
    training = (0, network.data, network.defense, network.steps)
    return next((r for r in published() if (r.table, r.data, r.defense, r.steps) == training), None)


def printed(data: str, defense: str, name: str = "ERS") -> float:
    """Return a published score of 28×28 images."""
    return next(r.scores[name] for r in published() if (r.table, r.data, r.defense) == (0, data, defense))


def ers_of(row: Published) -> float:
    """Return the ERS of the ten scores under attack that were published."""
    return ers({name: row.scores[name] for name in COLUMNS}, protocol="reference")


def holds(ends: tuple[float, float], figure: float, digits: int = 1) -> bool:
    """Say whether an interval holds a `figure` that was rounded to so many `digits`."""
    half = 0.5 * 10.0**-digits
    return ends[0] - half <= figure <= ends[1] + half


def agreement(network: Network, *, within: bool) -> list[str]:
    """Return the published figures that are `within` our intervals, or outside, with both figures."""
    ours, told = record(network, "reference"), []
    theirs = published_of(network)
    for name, figure in theirs.scores.items() if theirs is not None else ():
        score, shown = record_scores(ours)[name], name.replace("-", "−")
        if score.low is None or score.high is None:
            continue
        if holds((score.low, score.high), figure, SCORES[name].unit.digits) == within:
            told.append(shown if within else f"{shown} ({ours.show(name)}, {SCORES[name].show(figure)})")
    return told


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
        if record is None or (self.name == "ERS" and record.ers is not None and not record.ers.valid):
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
        """Return what the figure is divided by: 1, or the root mean square of the distance of two images."""
        if not self.relative:
            return 1.0
        cosine = next(check.figure for check in record.checks if check.name == "collapse")
        return math.nan if cosine is None else math.sqrt(2 * (1 - cosine))

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

    def mean(self, networks: Iterable[Network]) -> str:
        """Return the mean of networks, and their number, as text."""
        found = [value for value in map(self.of, networks) if value is not None]
        return f"{self.write(fmean(found))} ({len(found)})" if found else "–"

    def change(self, before: Network, after: Network, then: Value | None = None) -> str:
        """Write a figure of two networks, or two figures of one, with the change."""
        last = then or self
        a, b = self.of(before), last.of(after)
        change = "" if a is None or b is None else minus(f" ({round(b, 1) - round(a, 1):+.1f})")
        return f"{self.show(before)} → {last.show(after)}{change}"


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
        mean, low, high = (minus(f"{end:+.{digits}f}") for end in (self.mean, self.low, self.high))
        if self.low == self.high == 0:
            return "none"
        return mean if math.isnan(self.low) else f"{mean} [{low}, {high}]"


def compare(value: Value, ours: Sequence[Network], others: Sequence[Network]) -> Difference | None:
    """Compare networks pair by pair, those of the same seed; None if no pair is measured."""
    pairs = [(value.of(a), value.of(b)) for a, b in zip(ours, others, strict=True)]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Difference.of(whole) if whole else None


def seeds_of(defense: str) -> list[Network]:
    """Return the one-epoch trainings of a defense."""
    return [network for network in (*CLAIM, *OTHERS) if network.defense == defense]


def added(value: Value, before: str, after: str) -> Difference | None:
    """Return by how much a defense is above the one `before`, seed by seed."""
    return compare(value, seeds_of(after), seeds_of(before))


def paper_change(before: str, after: str) -> list[float]:
    """Return by how much R@1 and ERS of two defenses differ in the paper, on CUB with the lower η."""
    those = {row.defense: row.scores for row in published() if (row.data, row.steps) == ("cub", CHEAP)}
    return [those[after][name] - those[before][name] for name in PAPER]


def verdict(before: str, after: str) -> str:
    """Say in which figures a defense is clearly better or worse than the one `before`."""
    groups = ["better in", "worse in", "not clearly different in", "nothing is left of either in"]
    found: dict[str, list[str]] = {group: [] for group in groups}
    for value in CLAIMED:
        if (difference := added(value, before, after)) is None:
            continue
        better = "lower" if value.lower else "higher"
        known = {"": groups[3], "not clearly different": groups[2], better: groups[0]}
        found[known.get(difference.verdict, groups[1])].append(f"*{value.title}*")
    return "; ".join(f"{group} {', '.join(titles)}" for group, titles in found.items() if titles)


def signs(number: int) -> str:
    """Say for which parts of the method the change of R@1 or ERS has the sign that it has in the paper."""
    ways: dict[str, list[str]] = {}
    for what, (before, after) in STEPS.items():
        ours, theirs = added((RECALL, ERS)[number], before, after), paper_change(before, after)[number]
        assert ours is not None
        sign = "the sign of the paper" if (ours.mean > 0) == (theirs > 0) else "the other sign"
        way = f"has {sign}" if ours.verdict in ("higher", "lower") else "is not clear"
        ways.setdefault(way, []).append(what)
    return "; ".join(f"{way} for {listed(those)}" for way, those in ways.items())


def kept(*, well: bool) -> list[str]:
    """Return the figures that few steps keep as `well` as the interval of many, or do not."""
    told = []
    for value in CLAIMED:
        few, many = value.of(FEW), value.of(FULL)
        if (
            few is None or many is None or not (value.lower or max(few, many) >= 1)
        ):  # nothing is left of either
            continue
        low, high = value.ends(FULL) or (many, many)
        if (few <= high if value.lower else few >= low) == well:
            told.append(f"*{value.title}* ({value.write(few)} and {value.write(many)})")
    return told


def terms(one: Record, other: Record, count: int) -> list[tuple[str, float, float]]:
    """Return the terms of the ERS that differ most between two records, with both values."""
    assert one.ers is not None
    assert other.ers is not None
    both = [(name, one.ers.terms[name] or 0.0, other.ers.terms[name] or 0.0) for name in other.ers.terms]
    return sorted(both, key=lambda term: -abs(term[1] - term[2]))[:count]


def logged(network: Network, *columns: str, epochs: int | None = None) -> float:
    """Return the mean of the sum of some columns of a training's log, of the first `epochs` or all."""
    rows = [row for row in log_of(network) if row[columns[0]]]
    rows = [row for row in rows if epochs is None or int(row["epoch"]) < epochs]
    return fmean(sum(float(row[column]) for column in columns) for row in rows)


def passes(network: Network, epochs: int | None = None) -> float:
    """Return the passes of an image, forward and backward, in millions, of the first `epochs` or all."""
    steps = int(log_of(network)[-1]["step"]) * (epochs or network.epochs) / network.epochs
    return logged(network, "images/forward", "images/backward", epochs=epochs) * steps / 1e6


def ordered(hardness: Mapping[str, Any]) -> str:
    """Write samplers in the order of their mean hardness; those that are within a thousandth by ≈."""
    means = {letter: found["mean"] for letter, found in hardness.items() if len(letter) == 1}
    names = sorted(means, key=lambda name: means[name])
    signs = [" ≈ " if means[b] - means[a] < 0.001 else " < " for a, b in pairwise(names)]
    return names[0] + "".join(sign + name for sign, name in zip(signs, names[1:], strict=True))


def squares(network: Network, kind: Kind, goal: str) -> float:
    """Return the share of queries, in %, that fell to the attack of a suite that uses no gradients."""
    suite = record(network, kind).suite
    assert suite is not None
    return sum(attack.broke or 0.0 for attack in suite.goals[goal].attacks if attack.search == "square")


def minus(text: str) -> str:
    """Return a text with its hyphens as minus signs."""
    return text.replace("-", "−")
