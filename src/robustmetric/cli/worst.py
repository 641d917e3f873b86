"""The worst case on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from robustmetric.evaluation import Record
from robustmetric.evaluation.record import AttackShare, GoalScore


def show_suite(console: Console, records: Sequence[Record], rows: Sequence[str] | None = None) -> None:
    """Print the worst case of each goal, of records that have a suite; of a single one also who broke what.

    Several stand side by side where they fit, else one below the other. `rows` names the records; by default
    they have the names of their networks.
    """
    rows = rows or [record.network.name for record in records]
    named = [(row, record) for row, record in zip(rows, records, strict=True) if record.suite is not None]
    together = _together(named)
    if len(named) > 1 and _width(console, together) <= console.width:
        console.print(together)
    else:
        for row, record in named:
            console.print(_table(row, record))
    for row, record in named:
        console.print(_costs(row, record), highlight=False, soft_wrap=not console.is_terminal)
    if len(records) == 1 and named:
        console.print(_attempts(records[0]))


def _goals(record: Record) -> dict[str, GoalScore]:
    return {} if record.suite is None else record.suite.goals


def _width(console: Console, table: Table) -> int:
    return table.__rich_measure__(console, console.options.update(max_width=10**4)).maximum


def _together(named: Sequence[tuple[str, Record]]) -> Table:
    """Put the worst cases of several records side by side, each with its interval."""
    table = _titled("worst case, with its 95 % interval")
    for row, _ in named:
        table.add_column(row, justify="right")
    for name in dict.fromkeys(name for _, record in named for name in _goals(record)):
        cells, heading = [], name
        for _, record in named:
            if (goal := _goals(record).get(name)) is None:
                cells.append("-")
                continue
            column = record.goal_column(name)
            heading = column.heading
            cells.append(f"{column.show(goal.value)} ({column.show(goal.low)} to {column.show(goal.high)})")
        table.add_row(heading, *cells)
    return table


def _table(row: str, record: Record) -> Table:
    """List the goals of one record, so that the usual ones fit on 80 columns."""
    table = _titled(f"worst case of {row}")
    for name in ("before", "worst", "95 %", "suite alone"):
        table.add_column(name, justify="right")
    for name, goal in _goals(record).items():
        column = record.goal_column(name)
        interval = f"{column.show(goal.low)} to {column.show(goal.high)}"
        figures = (column.show(goal.before), column.show(goal.value), interval, column.show(goal.alone))
        table.add_row(column.heading, *figures)
    return table


def _titled(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="")
    table.add_column("goal", overflow="fold")
    return table


def _costs(row: str, record: Record) -> str:
    assert record.suite is not None  # noqa: S101
    spent, whole = record.suite.forward, record.suite.undropped
    return (
        f"{row}: {record.settings.suite}; {spent:,} passes, {100 * spent / max(1, whole):.0f} % of the "
        f"{whole:,} it takes if no query drops out"
    )


def _attempts(record: Record) -> Table:
    """List by goal the attacks that broke anything, each with the share that it was the first to break."""
    table = Table(box=None)
    table.add_column("goal and its attacks", overflow="fold")
    for name in ("broke first", "passes"):
        table.add_column(name, justify="right")
    for name, goal in _goals(record).items():
        table.add_row(name, "", f"{goal.forward:,}")
        for attempt in goal.attacks:
            if attempt.broke:
                passes = "" if attempt.search is None else f"{attempt.forward:,}"
                table.add_row(f"  {_called(attempt)}", f"{attempt.broke:.1f} %", passes)
        idle = [attempt.forward for attempt in goal.attacks if not attempt.broke and attempt.forward]
        if idle:
            table.add_row(f"  {len(idle)} more", "0.0 %", f"{sum(idle):,}")
    return table


def _called(attempt: AttackShare) -> str:
    return attempt.attack if attempt.search is None else f"{attempt.attack} by {attempt.search}"
