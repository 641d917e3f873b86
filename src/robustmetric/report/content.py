"""What the page of a report shows, ready for its template."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from robustmetric.attacks import Column
from robustmetric.evaluation import Check, Record
from robustmetric.evaluation.record import AttackShare
from robustmetric.report.downloads import records_json, scores_csv
from robustmetric.report.entries import Entry
from robustmetric.report.figures import plot_curves, plot_maps, plot_terms, plot_trainings
from robustmetric.report.pictures import Picture
from robustmetric.report.records import differing
from robustmetric.report.verdict import listed, verdict
from robustmetric.report.words import (
    CHECK_MEANINGS,
    COLUMN_MEANINGS,
    aim,
    citation,
    command,
    facts,
    goal_meaning,
)

_LONGEST = 90  # of a title with names in it


@dataclass(frozen=True)
class Cell:
    """A score of one record as the page shows it, and the `number` to sort by; `note` stands behind it."""

    text: str
    interval: str = ""
    before: str = ""
    number: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A score of all records: its `heading`, its `meaning`, and a cell for each record."""

    heading: str
    meaning: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Page:
    """What the template shows of `entries`, but for their pictures."""

    entries: tuple[Entry, ...]

    @property
    def named(self) -> dict[str, Record]:
        """The records by name."""
        return {entry.name: entry.record for entry in self.entries}

    @property
    def title(self) -> str:
        """The title of the page."""
        names = listed([*self.named])
        fits = len(self.entries) == 1 or len(names) <= _LONGEST
        return f"Robustness of {names if fits else f'{len(self.entries)} networks'}"

    @cached_property
    def verdict(self) -> tuple[str, str]:
        """Two sentences."""
        return verdict(self.named)

    @property
    def differing(self) -> dict[str, str]:
        """What the records differ in, and should not."""
        return differing(self.named)

    @property
    def facts(self) -> list[tuple[str, list[str]]]:
        """What was tested: a row for each kind of fact, a cell for each record."""
        each = [dict(facts(entry.record)) for entry in self.entries]
        kinds = dict.fromkeys(kind for one in each for kind in one)
        return [(kind, [one.get(kind, "-") for one in each]) for kind in kinds]

    @property
    def heads(self) -> list[tuple[str, list[tuple[str, Cell]]]]:
        """The first figures of each record: R@1, and the ERS and the worst case where they were measured."""
        return [(entry.name, _first_figures(entry.record)) for entry in self.entries]

    @property
    def scores(self) -> list[Row]:
        """All scores, in the paper's order."""
        records = [entry.record for entry in self.entries]
        rows = []
        for name in _in_order(records):
            column = next(record for record in records if name in record.columns()).column(name)
            cells = [_score(record, name) for record in records]
            rows.append(Row(column.heading, COLUMN_MEANINGS.get(name, ""), cells))
        return rows

    @property
    def worst(self) -> list[Row]:
        """The worst case of each goal of a suite."""
        suites = [entry.record.suite for entry in self.entries if entry.record.suite is not None]
        rows = []
        for name in dict.fromkeys(name for suite in suites for name in suite.goals):
            cells = [_goal(entry.record, name) for entry in self.entries]
            own = next(e.record for e in self.entries if e.record.suite and name in e.record.suite.goals)
            rows.append(Row(own.goal_column(name).heading, goal_meaning(name), cells))
        return rows

    @property
    def breakers(self) -> list[tuple[str, str, str, str]]:
        """Who broke what: record, goal, attack and share, of all that broke anything."""
        return [
            (entry.name, goal, _called(one), f"{one.broke:.1f} %")
            for entry in self.entries
            if entry.record.suite is not None
            for goal, score in entry.record.suite.goals.items()
            for one in score.attacks
            if one.broke
        ]

    @property
    def checks(self) -> list[tuple[int, Check]]:
        """All checks, with the place of their record."""
        return [(place, check) for place, entry in enumerate(self.entries) for check in entry.record.checks]

    @property
    def alarms(self) -> list[tuple[int, Check]]:
        """The checks that failed, and then those that warn."""
        return [pair for status in ("fail", "warn") for pair in self.checks if pair[1].status == status]

    @property
    def unchecked(self) -> list[str]:
        """The names of the records without checks but the one for a collapse."""
        return [entry.name for entry in self.entries if entry.record.unchecked]

    @property
    def chosen_on_test(self) -> list[str]:
        """The names of the records whose own images chose the weights."""
        return [e.name for e in self.entries if e.record.network.weights == "chosen on test images"]

    def meaning(self, check: Check) -> str:
        """Return what a warning of a `check` means."""
        return CHECK_MEANINGS.get(check.name, "")

    @cached_property
    def terms(self) -> Markup | None:
        """The plot of the terms of the ERS."""
        return plot_terms(self.entries)

    @cached_property
    def curves(self) -> list[Markup]:
        """Scores against ε and against steps."""
        return plot_curves(self.entries)

    @property
    def no_curves(self) -> list[tuple[str, str]]:
        """Points of curves that are left out: the name of the record, and why."""
        return [(entry.name, line) for entry in self.entries for line in entry.no_curves]

    @property
    def curve_queries(self) -> int:
        """How many queries a point of the curves attacked, at most."""
        return max((record.queries.count for e in self.entries for _, record in e.curves), default=0)

    @cached_property
    def maps(self) -> list[tuple[Entry, Markup]]:
        """The map of each record with pictures."""
        return plot_maps(self.entries)

    @property
    def moves(self) -> list[str]:
        """The attacks whose moves the maps show."""
        shown = (entry.pictures.map.moves for entry, _ in self.maps if entry.pictures is not None)
        return list(dict.fromkeys(attack for moves in shown for attack in moves))

    @cached_property
    def trainings(self) -> list[Markup]:
        """The courses of the trainings."""
        return plot_trainings(self.entries)

    @cached_property
    def cited(self) -> list[tuple[str, str, str]]:
        """The name, the citation and the command of each record."""
        found = []
        for entry in self.entries:
            run = (None, None) if entry.run is None else (entry.run.folder, entry.run.data)
            found.append((entry.name, citation(entry.name, entry.record), command(entry.record, *run)))
        return found

    @property
    def as_csv(self) -> str:
        """All scores as a table, as the address of a link."""
        return scores_csv(self.entries)

    @cached_property
    def as_json(self) -> str | None:
        """All records, as the address of a link."""
        return records_json(self.entries)

    @staticmethod
    def aim(picture: Picture) -> str:
        """Return what the attack of a `picture` wants."""
        return aim(picture.attack)

    @staticmethod
    def values(entry: Entry, picture: Picture) -> list[tuple[str, str, str]]:
        """Return the values of a `picture` of an `entry`: heading, before and after."""
        columns = {name: entry.record.column(name) for name in picture.values}
        return [
            (columns[name].heading, columns[name].show(before), columns[name].show(after))
            for name, (before, after) in picture.values.items()
        ]


def _in_order(records: Sequence[Record]) -> list[str]:
    """Return the names of all scores of records: those of retrieval, those of attacks, and the ERS."""
    each = [record.columns() for record in records]
    last = ["ERS"] if any("ERS" in names for names in each) else []
    clean = [name for record in records for name in record.retrieval]
    return list(dict.fromkeys([*clean, *(n for names in each for n in names if n not in last), *last]))


def _first_figures(record: Record) -> list[tuple[str, Cell]]:
    found = [("R@1", _score(record, "R@1"))]
    if record.ers is not None:
        found.append(("ERS", _score(record, "ERS")))
    if record.suite is not None and "misrank" in record.suite.goals:
        found.append(("R@1, worst case", _goal(record, "misrank")))
    return found


def _score(record: Record, name: str) -> Cell:
    """Return a score of a record, or its ERS."""
    if name not in record.columns():
        return Cell("-")
    column = record.column(name)
    if name == "ERS" and record.ers is not None:
        note = "" if record.ers.valid else "not valid"
        return _cell(column, record.ers.value, (record.ers.low, record.ers.high), note=note)
    score = {**record.retrieval, **record.scores}[name]
    return _cell(column, score.value, (score.low, score.high), score.before)


def _goal(record: Record, name: str) -> Cell:
    """Return the worst case of a goal of a record."""
    if record.suite is None or name not in record.suite.goals:
        return Cell("-")
    goal = record.suite.goals[name]
    return _cell(record.goal_column(name), goal.value, (goal.low, goal.high), goal.before)


def _cell(
    column: Column,
    value: float | None,
    ends: tuple[float | None, float | None],
    before: float | None = None,
    note: str = "",
) -> Cell:
    shown = [column.show(end) for end in ends]
    return Cell(
        column.show(value),
        "" if "-" in shown else " to ".join(shown),
        "" if before is None else column.show(before),
        None if value is None or math.isnan(value) else value,
        note,
    )


def _called(attempt: AttackShare) -> str:
    return attempt.attack if attempt.search is None else f"{attempt.attack} by {attempt.search}"
