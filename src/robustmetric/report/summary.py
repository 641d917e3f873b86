"""What the seeds of a row come to: one figure for each column, and how many of them collapsed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from robustmetric.attacks import Column
from robustmetric.evaluation import COLUMNS, Record
from robustmetric.evaluation.intervals import Score
from robustmetric.evaluation.record import Ers
from robustmetric.experiments.outcome import Outcome

SCORES: dict[str, Column] = {
    **{name: Column(name, "higher") for name in ("R@1", "R@2", "mAP", "NMI")},
    **COLUMNS,
    "ERS": Column("ERS", "higher"),
}
"""The columns of the paper's tables, in their order."""


@dataclass(frozen=True)
class Estimate:
    """A `value`: of one seed with its interval `low` to `high`, or a mean of several with its `deviation`."""

    value: float
    low: float | None = None
    high: float | None = None
    deviation: float | None = None

    @property
    def spread(self) -> tuple[float, float]:
        """How far the estimate may be too high and too low: by its deviation, else by its interval."""
        if self.deviation is not None:
            return self.deviation, self.deviation
        if self.low is None or self.high is None:
            return 0.0, 0.0
        return max(0.0, self.value - self.low), max(0.0, self.high - self.value)

    def show(self, column: Column, *, interval: bool = False) -> str:
        """Return the estimate as text with the digits of its `column`, with the deviation or `interval`.

        >>> Estimate(38.4, deviation=0.52).show(SCORES["R@1"])
        '38.4 ± 0.5'
        >>> Estimate(38.4, 36.1, 40.2).show(SCORES["R@1"], interval=True)
        '38.4 [36.1, 40.2]'
        """
        text = column.show(self.value)
        if self.deviation is not None:
            return f"{text} ± {column.show(self.deviation)}"
        if interval and self.low is not None and self.high is not None:
            return f"{text} [{column.show(self.low)}, {column.show(self.high)}]"
        return text


Reader = Callable[[Outcome], Mapping[str, Estimate]]


@dataclass(frozen=True)
class Summary:
    """What the cells of a row came to: `estimates` by column, of those that did not collapse if any did not.

    Of `seeds` cells `made` are finished, and `collapsed` of these collapsed; `why` says how.

    >>> Summary(seeds=3, made=2).label
    'ours, 2 of 3 seeds'
    """

    seeds: int
    made: int = 0
    collapsed: int = 0
    why: tuple[str, ...] = ()
    estimates: Mapping[str, Estimate] = field(default_factory=dict)

    @property
    def fallen(self) -> bool:
        """Whether there are cells, and all of them collapsed."""
        return 0 < self.made == self.collapsed

    @property
    def word(self) -> str | None:
        """What stands in the place of estimates where there are none."""
        if self.estimates:
            return None
        return "collapse" if self.fallen else None if self.made else "not run"

    @property
    def label(self) -> str:
        """What the line of the estimates is called: how many seeds, and how many of them collapsed."""
        parts = ["ours"]
        if self.seeds > 1 and self.made:
            parts.append(f"{'' if self.made == self.seeds else f'{self.made} of '}{self.seeds} seeds")
        if self.estimates and self.collapsed:
            parts.append("collapsed" if self.fallen else f"{self.collapsed} collapsed")
        return ", ".join(parts)


def summarise(outcomes: Sequence[Outcome | None], read: Reader) -> Summary:
    """Put the `outcomes` of a row's seeds together; `read` returns the estimates of one of them."""
    made = [outcome for outcome in outcomes if outcome is not None]
    fallen = [outcome for outcome in made if outcome.collapsed is not None]
    found = [read(outcome) for outcome in made if outcome.collapsed is None] or [*map(read, fallen)]
    names = dict.fromkeys(name for estimates in found for name in estimates)
    return Summary(
        seeds=len(outcomes),
        made=len(made),
        collapsed=len(fallen),
        why=tuple(dict.fromkeys(outcome.collapsed or "" for outcome in fallen)),
        estimates={name: _mean([one[name] for one in found if name in one]) for name in names},
    )


def scores_of(outcome: Outcome) -> dict[str, Estimate]:
    """Return the scores of an `outcome`'s record, those of the paper's columns that were measured."""
    return {} if outcome.record is None else record_scores(outcome.record)


def record_scores(record: Record) -> dict[str, Estimate]:
    """Return what a `record` has in the paper's columns, with intervals."""
    found = {name: score for name, (_, score) in figures_of(record).items() if name in SCORES}
    return {
        name: Estimate(value, _known(found[name].low), _known(found[name].high))
        for name in SCORES
        if name in found and (value := _known(found[name].value)) is not None
    }


def figures_of(record: Record) -> dict[str, tuple[Column, Score | Ers]]:
    """Return all figures of a `record` with their columns: scores in the paper's order, then worst cases."""
    known: dict[str, Score | Ers] = {**record.retrieval, **record.scores}
    if record.ers is not None:
        known["ERS"] = record.ers
    found = {name: (record.column(name), known[name]) for name in record.columns()}
    for name, goal in ({} if record.suite is None else record.suite.goals).items():
        column = record.goal_column(name)
        found[f"worst {name}"] = replace(column, name=f"worst {column.name}"), goal
    return found


def hardness_of(statistic: str) -> Reader:
    """Return the reader of a `statistic` of the hardness that each sampler draws, where it is known."""

    def read(outcome: Outcome) -> dict[str, Estimate]:
        found = {letter: about[statistic] for letter, about in (outcome.hardness or {}).items()}
        return {letter: Estimate(float(value)) for letter, value in found.items() if value is not None}

    return read


def terms_of(record: Record) -> dict[str, Estimate]:
    """Return the terms of the ERS that a `record` has, with intervals."""
    found: dict[str, Estimate] = {}
    for name, score in record_scores(record).items():
        if name not in COLUMNS or (term := COLUMNS[name].term) is None:
            continue
        ends = [float(term(end)) for end in (score.value, score.low, score.high) if end is not None]
        if record.settings.protocol == "strict":
            ends = [min(max(end, 0.0), 100.0) for end in ends]
        found[name] = Estimate(ends[0], min(ends), max(ends))
    return found


def _mean(found: Sequence[Estimate]) -> Estimate:
    if len(found) == 1:
        return found[0]
    values = [estimate.value for estimate in found]
    return Estimate(fmean(values), deviation=stdev(values))


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
