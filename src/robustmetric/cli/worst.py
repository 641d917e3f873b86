"""The worst case on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from robustmetric.cli.terminal import styled
from robustmetric.evaluation import Record
from robustmetric.evaluation.worst import Broke


def show_suite(console: Console, records: Sequence[Record], rows: Sequence[str] | None = None) -> None:
    """Print the worst case of each goal, a line for each record that has a suite; of one also who broke what.

    `rows` names the records; by default they have the names of their networks.
    """
    rows = rows or [record.network.name for record in records]
    for row, record in zip(rows, records, strict=True):
        if record.suite is None:
            continue
        console.print(_table(row, record))
        spent, whole = record.suite.forward, record.suite.undropped
        console.print(
            f"{row}: {record.settings.suite}; {spent:,} passes, {100 * spent / max(1, whole):.0f} % of the "
            f"{whole:,} it takes if no query drops out",
            highlight=False,
            soft_wrap=not console.is_terminal,
        )
    if len(records) == 1 and records[0].suite is not None:
        console.print(_attempts(records[0]))


def _table(row: str, record: Record) -> Table:
    assert record.suite is not None  # noqa: S101
    table = Table(title=f"worst case of {row}", title_justify="left", title_style="")
    for name in ("goal", "before", "worst case", "95 %", "suite alone"):
        table.add_column(name, justify="left" if name == "goal" else "right")
    for name, goal in record.suite.goals.items():
        column = record.goal_column(name)
        interval = f"{column.show(goal.low)} to {column.show(goal.high)}"
        figures = (column.show(goal.before), column.show(goal.value), interval, column.show(goal.alone))
        table.add_row(column.heading, *figures)
    return table


def _attempts(record: Record) -> Table:
    """List the attacks that broke anything, with the share of queries that each was the first to break."""
    assert record.suite is not None  # noqa: S101
    table = Table("goal", "attack", "search", "broke first", "passes", box=None)
    for name, goal in record.suite.goals.items():
        for attempt in filter(_counts, goal.attacks):
            table.add_row(
                name,
                attempt.attack,
                attempt.search or "",
                styled(f"{attempt.broke or 0:.1f} %"),
                f"{attempt.forward:,}" if attempt.search else "",
            )
    return table


def _counts(attempt: Broke) -> bool:
    return bool(attempt.broke) or attempt.forward > 0
