"""Scores and checks on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from robustmetric.cli.terminal import styled
from robustmetric.evaluation import COLUMNS, Record
from robustmetric.report.records import data_of, eps_of

_CLEAN = ("R@1", "R@2", "mAP", "NMI")
_BESIDE = 120  # columns of a terminal on which what was found and what is allowed have room side by side
_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "not run": "dim"}


def show_scores(console: Console, records: Sequence[Record], rows: Sequence[str] | None = None) -> None:
    """Print scores in the paper's columns, a line for each record; in two tables where one is too wide.

    `rows` names the records; by default they have the names of their networks.
    """
    rows = rows or [record.network.name for record in records]
    measured = [n for n in (*COLUMNS, *_others(records)) if any(n in r.scores for r in records)]
    overall = ["ERS"] if any(r.ers for r in records) else []
    whole = [*_CLEAN, *measured, *overall]
    if not _fits(console, rows, records, whole):
        console.print(_table(rows, records, [*_CLEAN, *overall]))
        whole = measured
    while whole:
        count = len(whole)
        while count > 1 and not _fits(console, rows, records, whole[:count]):
            count -= 1
        console.print(_table(rows, records, whole[:count]))
        whole = whole[count:]
    for row, record in zip(rows, records, strict=True):
        console.print(_summary(row, record), highlight=False, soft_wrap=not console.is_terminal)


def show_checks(console: Console, record: Record) -> None:
    """Print what the checks found; what is allowed stands beside it, or below where that is too narrow."""
    if not record.checks:
        return
    beside = console.width >= _BESIDE
    table = Table("check", "", "figure", "what was found", box=None)
    table.columns[0].overflow = "fold"
    if beside:
        table.add_column("allowed")
    for check in record.checks:
        cells = [
            styled(check.name),
            styled((check.status, _COLOURS[check.status])),
            styled("" if check.figure is None else f"{check.figure:.3g}"),
        ]
        if beside:
            cells += [styled(check.says), styled((check.limit, "dim"))]
        else:
            cells.append(styled(check.says, (f"\nallowed: {check.limit}", "dim")))
        table.add_row(*cells)
    console.print(table)


def _fits(console: Console, rows: Sequence[str], records: Sequence[Record], names: Sequence[str]) -> bool:
    table = _table(rows, records, names)
    return table.__rich_measure__(console, console.options.update(max_width=10**4)).maximum <= console.width


def _table(rows: Sequence[str], records: Sequence[Record], names: Sequence[str]) -> Table:
    columns = [next((r for r in records if n in r.columns()), records[0]).column(n) for n in names]
    table = Table("", *(column.heading for column in columns))
    for row, record in zip(rows, records, strict=True):
        table.add_row(row, *(_cell(record, n) for n in names))
    if len(records) == 1 and any(n in records[0].scores for n in names):
        # Of the queries that were attacked, which need not be all.
        before = {n: s.before for n, s in records[0].scores.items()}
        cells = ("" if before.get(c.name) is None else c.show(before[c.name]) for c in columns)
        table.add_row("before the attack", *cells, style="dim")
    return table


def _cell(record: Record, name: str) -> Text:
    invalid = name == "ERS" and record.ers is not None and not record.ers.valid
    return styled(record.show(name), (" invalid" if invalid else "", "bold red"))


def _summary(row: str, record: Record) -> Text:
    asked = f"{record.queries.count} of {record.queries.of} images of {record.data.classes} classes attacked"
    how = (
        f"{record.settings.protocol} protocol, ε = {eps_of(record)}, "
        f"α = {255 * record.settings.alpha:.3g}/255, η = {record.settings.steps}, {record.settings.search}"
    )
    told = ""
    if record.ers is not None:
        interval = " to ".join("-" if v is None else f"{v:.1f}" for v in (record.ers.low, record.ers.high))
        told = f"ERS {record.show('ERS')} ({interval}) at R@1 {record.show('R@1')}; "
    text = f"{row}: {told}{asked}; {data_of(record)}; {how}"
    if record.data.gallery is not None:
        text += f"; searched in {record.data.gallery} images"
    if record.queries.left_out:
        text += (
            f"; {record.queries.left_out} queries have no image of their class to find: not in R@1, R@2, mAP"
        )
    if (weights := record.network.weights) is not None:
        text += f"; weights {weights}" if weights.startswith("chosen") else f"; {weights}"
    if record.data.cameras:
        text += "; images of a query's class and camera do not count"
    parts: list[str | tuple[str, str]] = [text]
    if record.network.weights == "chosen on test images":
        careful = " these images chose the weights, so R@1 is better than on others"
        parts += ["\n  ", ("careful:", "yellow"), careful]
    if record.ers is not None and not record.ers.valid:
        parts += ["\n  ", ("the ERS is not valid:", "bold red"), f" {record.ers.why}"]
    elif record.unchecked:
        told = " only collapse was looked for: --checks quick says how far to trust these scores"
        parts += ["\n  ", ("not checked:", "yellow"), told]
    return styled(*parts)


def _others(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(n for r in records for n in r.scores if n not in COLUMNS))
