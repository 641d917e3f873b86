"""What the page of a report shows, ready for its template."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from robustmetric.evaluation import Check, Record
from robustmetric.evaluation.pictures import FOLDER, Picture
from robustmetric.report.entries import Entry
from robustmetric.report.figures import plot_curves, plot_maps, plot_terms, plot_trainings
from robustmetric.report.records import differing
from robustmetric.report.words import (
    CHECK_MEANINGS,
    COLUMN_MEANINGS,
    citation,
    command,
    facts,
    verdict,
)
from robustmetric.validate import UserError, printable, spreadsheet_text

MOST_PICTURES = 5_000_000  # bytes of picture files in a page; base64 makes a third more of them
_KINDS = {".png": "image/png", ".webp": "image/webp"}


@dataclass(frozen=True)
class Cell:
    """A score of one record as the page shows it, and the `number` to sort by."""

    text: str
    interval: str = ""
    before: str = ""
    number: float | None = None


@dataclass(frozen=True)
class Page:
    """What the template shows."""

    entries: tuple[Entry, ...]
    missing: list[str] = field(default_factory=list)

    @property
    def named(self) -> dict[str, Record]:
        """The records by name."""
        return {entry.name: entry.record for entry in self.entries}

    @property
    def title(self) -> str:
        """The title of the page."""
        return f"Robustness of {self.entries[0].name}" if len(self.entries) == 1 else "Robustness compared"

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
    def heads(self) -> list[tuple[str, list[Cell]]]:
        """R@1 and the ERS of each record."""
        return [(entry.name, [self._cell(entry.record, n) for n in ("R@1", "ERS")]) for entry in self.entries]

    @property
    def scores(self) -> list[tuple[str, str, list[Cell]]]:
        """A row for each score: its heading, what it is, and a cell for each record."""
        records = [entry.record for entry in self.entries]
        names = list(dict.fromkeys(name for record in records for name in record.columns()))
        rows = []
        for name in names:
            column = next(record for record in records if name in record.columns()).column(name)
            cells = [self._cell(record, name) for record in records]
            rows.append((column.heading, COLUMN_MEANINGS.get(name, ""), cells))
        return rows

    @staticmethod
    def _cell(record: Record, name: str) -> Cell:
        if name not in record.columns():
            return Cell("-")
        column = record.column(name)
        low: float | None
        high: float | None
        if name == "ERS" and record.ers is not None:
            low, high, before = record.ers.low, record.ers.high, None
        else:
            score = {**record.retrieval, **record.scores}[name]
            low, high, before = score.low, score.high, score.before
        interval = "" if low is None or high is None else f"{column.show(low)} to {column.show(high)}"
        text = record.show(name)
        if name == "ERS" and record.ers is not None and not record.ers.valid:
            text += " not valid"
        return Cell(text, interval, "" if before is None else column.show(before), record[name])

    @property
    def worst(self) -> list[tuple[str, list[Cell]]]:
        """A row for each goal of a suite, a cell for each record."""
        goals = dict.fromkeys(
            name for e in self.entries if e.record.suite is not None for name in e.record.suite.goals
        )
        rows = []
        for name in goals:
            cells, heading = [], name
            for entry in self.entries:
                suite = entry.record.suite
                if suite is None or name not in suite.goals:
                    cells.append(Cell("-"))
                    continue
                goal, column = suite.goals[name], entry.record.goal_column(name)
                heading = column.heading
                interval = f"{column.show(goal.low)} to {column.show(goal.high)}"
                cells.append(Cell(column.show(goal.value), interval, column.show(goal.before), goal.value))
            rows.append((heading, cells))
        return rows

    @property
    def breakers(self) -> list[tuple[str, str, str, str]]:
        """Who broke what: record, goal, attack and share, of all that broke anything."""
        return [
            (
                entry.name,
                goal,
                one.attack if one.search is None else f"{one.attack} by {one.search}",
                _share(one),
            )
            for entry in self.entries
            if entry.record.suite is not None
            for goal, score in entry.record.suite.goals.items()
            for one in score.attacks
            if one.broke
        ]

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All checks, with the name of their record."""
        return [(entry.name, check) for entry in self.entries for check in entry.record.checks]

    @property
    def alarms(self) -> list[tuple[str, Check]]:
        """The checks that failed, and those that warn."""
        found = [(name, check) for name, check in self.checks if check.status in ("fail", "warn")]
        return sorted(found, key=lambda pair: pair[1].status)

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
    def maps(self) -> list[tuple[Entry, Markup, list[str]]]:
        """The map of each record with pictures, and the attacks whose moves it shows."""
        return plot_maps(self.entries)

    @cached_property
    def trainings(self) -> list[Markup]:
        """The courses of the trainings."""
        return plot_trainings(self.entries)

    @cached_property
    def shots(self) -> list[tuple[Entry, Picture, dict[str, str]]]:
        """The pictures to show, with the data of their images by file, as many as the page may hold."""
        left, found = MOST_PICTURES, []
        every = [
            (entry, picture)
            for entry in self.entries
            if entry.pictures
            for picture in entry.pictures.pictures
        ]
        order = {"worst": 0, "median": 1, "random": 2}
        # A query says more at a glance than an image that is ranked for others.
        for entry, picture in sorted(every, key=lambda p: (order[p[1].why], p[1].asker is not None)):
            files = list(_files(picture))
            try:
                images = {file: _encoded(entry.folder / FOLDER / file) for file in dict.fromkeys(files)}
            except (OSError, UserError) as error:
                self.missing.append(printable(str(error)))
                continue
            left -= sum(len(images[file]) for file in files) * 3 // 4
            if left < 0:
                break
            found.append((entry, picture, images))
        return found

    @property
    def not_shown(self) -> int:
        """How many pictures the page has no room for, or no files of."""
        return sum(len(entry.pictures.pictures) for entry in self.entries if entry.pictures) - len(self.shots)

    @property
    def attacks(self) -> list[str]:
        """The attacks that pictures are of."""
        return list(dict.fromkeys(picture.attack for _, picture, _ in self.shots))

    def values(self, entry: Entry, picture: Picture) -> list[tuple[str, str, str]]:
        """Return the values of a `picture` of an `entry`: heading, before and after."""
        columns = {name: entry.record.column(name) for name in picture.values}
        return [
            (columns[name].heading, columns[name].show(before), columns[name].show(after))
            for name, (before, after) in picture.values.items()
        ]

    @property
    def cited(self) -> list[tuple[str, str, str]]:
        """The name, the citation and the command of each record."""
        return [(e.name, citation(e.name, e.record), command(e.record, e.run)) for e in self.entries]

    @property
    def as_csv(self) -> str:
        """All scores as a table, as the content of a link."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(("network", "score", "value", "low", "high", "before", "better", "unit"))
        for entry in self.entries:
            for row in _figures(entry.record):
                writer.writerow([spreadsheet_text(printable(entry.name)), *row])
        return _link("text/csv", text.getvalue())

    @property
    def as_json(self) -> str:
        """All records, as the content of a link."""
        records = [entry.record.model_dump(mode="json", by_alias=True) for entry in self.entries]
        return _link("application/json", json.dumps(records, indent=1, ensure_ascii=True))


def _share(one: Any) -> str:
    return f"{one.broke:.1f} %"


def _files(picture: Picture) -> Iterator[str]:
    """Yield the image files that a picture shows, as often as it does."""
    yield from (picture.query.image, picture.perturbed, picture.difference)
    yield from (item.image for item in (*picture.targets, *picture.before, *picture.after))
    if picture.asker is not None:
        yield picture.asker.image


def _encoded(path: Path) -> str:
    """Return a picture's file as the address of an image."""
    kind = _KINDS.get(path.suffix)
    if kind is None or path.parent.name != FOLDER or path.name != Path(path.name).name:
        raise UserError(f"{path} is no picture")
    content = path.read_bytes()
    if not content.startswith((b"\x89PNG\r\n\x1a\n", b"RIFF")):
        raise UserError(f"{path} is no picture, it is damaged")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _figures(record: Record) -> Iterator[tuple[Any, ...]]:
    """Yield the scores of a record as rows of a table."""
    for name, score in {**record.retrieval, **record.scores}.items():
        unit = record.column(name).unit.name
        better = record.column(name).better or ""
        yield (
            spreadsheet_text(name),
            *_numbers(score.value, score.low, score.high, score.before),
            better,
            unit,
        )
    if record.ers is not None:
        ers = record.ers
        yield ("ERS", *_numbers(ers.value, ers.low, ers.high, None), "higher", "%")
    for name, goal in ({} if record.suite is None else record.suite.goals).items():
        figures = _numbers(goal.value, goal.low, goal.high, goal.before)
        yield (spreadsheet_text(f"worst case {name}"), *figures, goal.better, goal.unit)


def _numbers(*values: float | None) -> tuple[object, ...]:
    return tuple("" if value is None else value for value in values)


def _link(kind: str, text: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
