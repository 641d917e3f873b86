"""Scores, checks, the worst case and tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from robustmetric.cli.terminal import Cell, Terminal, styled
from robustmetric.evaluation import COLUMNS, Certificate, Record, Verification
from robustmetric.evaluation.intervals import Score
from robustmetric.report.records import alpha_of, data_of, eps_of
from robustmetric.report.sheet import Sheet

_CLEAN = ("R@1", "R@2", "mAP", "NMI")
_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "not run": "dim"}
CAREFUL = "these images chose the weights, so the scores are better than on others"


def show_scores(console: Terminal, records: Sequence[Record], rows: Sequence[str] | None = None) -> None:
    """Print scores, a row for each record: those without attacks and the ERS, then each attack's.

    `rows` names the records; by default they have the names of their networks.
    """
    rows = rows or [record.network.name for record in records]
    others = [n for record in records for n in record.scores if n not in COLUMNS]
    overall = ["ERS"] if any(record.ers for record in records) else []
    measured = [n for n in dict.fromkeys([*COLUMNS, *others]) if any(n in r.scores for r in records)]
    names = [*_CLEAN, *overall, *measured]
    columns = [next((r for r in records if n in r.columns()), records[0]).column(n) for n in names]
    cells: list[list[Cell]] = [
        [row, *(_score(record, n) for n in names)] for row, record in zip(rows, records, strict=True)
    ]
    if len(records) == 1 and measured:
        # Of the queries that were attacked, which need not be all.
        before = {n: score.before for n, score in records[0].scores.items()}
        shown = ("" if before.get(c.name) is None else c.show(before[c.name]) for c in columns)
        cells.append(["before the attack", *shown])
    console.table(["", *(column.heading for column in columns)], cells)
    for row, record in zip(rows, records, strict=True):
        console.say(_summary(row, record))


def show_checks(console: Terminal, record: Record) -> None:
    """Print what the checks of a record found, and what they allow."""
    rows: list[list[Cell]] = [
        [
            check.name,
            styled((check.status, _COLOURS[check.status])),
            "" if check.figure is None else f"{check.figure:.3g}",
            styled(check.says, (f"\nallowed: {check.limit}", "dim")),
        ]
        for check in record.checks
    ]
    if rows:
        console.table(["check", "", "figure", "result"], rows, keys=4)


def show_suite(console: Terminal, records: Sequence[Record], rows: Sequence[str] | None = None) -> None:
    """Print the worst case of each goal of the suite; of a single record also which attack broke what."""
    rows = rows or [record.network.name for record in records]
    found = [(row, r, r.suite) for row, r in zip(rows, records, strict=True) if r.suite is not None]
    goals: list[list[str]] = []
    for row, record, suite in found:
        for name, goal in suite.goals.items():
            column = record.goal_column(name)
            before, worst, low, high, alone = map(
                column.show, (goal.before, goal.value, goal.low, goal.high, goal.alone)
            )
            goals.append([row, column.heading, before, worst, f"{low} to {high}", alone])
    if goals:
        console.table(["worst case", "goal", "before", "worst", "95 %", "suite alone"], goals, keys=2)
    for row, record, suite in found:
        console.say(
            f"{row}: {record.settings.suite}; {suite.forward:,} passes, "
            f"{100 * suite.forward / max(1, suite.undropped):.0f} % of the {suite.undropped:,} "
            "it takes if no query drops out"
        )
    if len(records) == 1 and found:
        console.table(["goal and its attacks", "broke first", "passes"], _attempts(records[0]))


def interval(score: Score) -> str:
    """Show the interval of a score in nine letters at most."""
    ends = ("-" if end is None else f"{end:.1f}" for end in (score.low, score.high))
    return "–".join(end.replace("100.0", "100") for end in ends)


def show_weights(console: Terminal, document: Certificate | Verification) -> None:
    """Warn if the images that are tested chose the weights, or if there were none."""
    if document.network.weights == "chosen on test images":
        console.say(styled(("careful:", "yellow"), f" {CAREFUL}"))
    elif document.network.weights == "no weights were given":
        console.say("no weights were given: the network is as it was made")


def _score(record: Record, name: str) -> Cell:
    invalid = name == "ERS" and record.ers is not None and not record.ers.valid
    return styled(record.show(name), (" invalid" if invalid else "", "bold red"))


def _summary(row: str, record: Record) -> Cell:
    settings, queries, weights = record.settings, record.queries, record.network.weights
    parts = [f"{row}:"]
    if record.ers is not None:
        ends = " to ".join("-" if v is None else f"{v:.1f}" for v in (record.ers.low, record.ers.high))
        parts[0] += f" ERS {record.show('ERS')} ({ends}) at R@1 {record.show('R@1')}"
    parts += [
        f"{queries.count} of {queries.of} images of {record.data.classes} classes attacked",
        data_of(record),
        f"{settings.protocol} protocol, ε = {eps_of(record)}, α = {alpha_of(record)}, η = {settings.steps}, "
        f"{settings.search}",
    ]
    if record.data.gallery is not None:
        parts.append(f"searched in {record.data.gallery} images")
    if queries.left_out:
        parts.append(f"{queries.left_out} queries have no image of their class to find: not in R@1, R@2, mAP")
    if weights is not None:
        parts.append(f"weights {weights}" if weights.startswith("chosen") else weights)
    if record.data.cameras:
        parts.append("images of a query's class and camera do not count")
    told: list[str | tuple[str, str]] = ["; ".join(parts).replace(":; ", ": ", 1)]
    if weights == "chosen on test images":
        told += ["\n  ", ("careful:", "yellow"), f" {CAREFUL}"]
    if record.ers is not None and not record.ers.valid:
        told += ["\n  ", ("the ERS is not valid:", "bold red"), f" {record.ers.why}"]
    elif record.unchecked:
        told += ["\n  ", ("not checked:", "yellow"), " only a collapse was: take --checks quick"]
    return styled(*told)


def _attempts(record: Record) -> list[list[str]]:
    """List by goal the attacks that broke anything, each with the share that it was the first to break."""
    rows = []
    for name, goal in record.suite.goals.items() if record.suite is not None else ():
        rows.append([name, "", f"{goal.forward:,}"])
        for one in goal.attacks:
            if one.broke:
                called = one.attack if one.search is None else f"{one.attack} by {one.search}"
                passes = "" if one.search is None else f"{one.forward:,}"
                rows.append([f"  {called}", f"{one.broke:.1f} %", passes])
        idle = [one.forward for one in goal.attacks if not one.broke and one.forward]
        if idle:
            rows.append([f"  {len(idle)} more", "0.0 %", f"{sum(idle):,}"])
    return rows


def show_sheet(console: Terminal, sheet: Sheet) -> None:
    """Print a table with its title and notes; columns that do not fit follow in further tables."""
    console.print(styled((sheet.title, "bold")))
    console.table(sheet.headers, sheet.texts, keys=len(sheet.headers) - len(sheet.columns))
    for note in sheet.notes:
        console.say(styled((note, "dim")))
