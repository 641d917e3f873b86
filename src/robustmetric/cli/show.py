"""Scores, checks and progress on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from robustmetric.robustness import COLUMNS, Record
from robustmetric.robustness.record import show

_CLEAN = ("R@1", "R@2", "mAP", "NMI")
_COLOURS = {"pass": "green", "warn": "yellow", "fail": "bold red", "not run": "dim"}


def show_scores(console: Console, records: Sequence[Record]) -> None:
    """Print scores in the paper's columns, a line for each record; in two tables where one is too wide."""
    measured = [n for n in (*COLUMNS, *_others(records)) if any(n in r.scores for r in records)]
    overall = ["ERS"] if any(r.ers for r in records) else []
    whole = [*_CLEAN, *measured, *overall]
    if not _fits(console, records, whole):
        console.print(_table(records, [*_CLEAN, *overall]))
        whole = measured
    while whole:
        count = len(whole)
        while count > 1 and not _fits(console, records, whole[:count]):
            count -= 1
        console.print(_table(records, whole[:count]))
        whole = whole[count:]
    for record in records:
        console.print(_summary(record), highlight=False)


def show_checks(console: Console, record: Record) -> None:
    """Print what the checks found."""
    if not record.checks:
        return
    table = Table("check", "", "figure", "what was found", "allowed", box=None, title_justify="left")
    for check in record.checks:
        colour = _COLOURS[check.status]
        table.add_row(
            check.name,
            f"[{colour}]{check.status}[/]",
            "" if check.figure is None else f"{check.figure:.3g}",
            escape(check.says),
            f"[dim]{escape(check.limit)}[/]",
        )
    console.print(table)


def arrow(name: str) -> str:
    """Name a score with the arrow that points to where it is better.

    >>> arrow("CA-"), arrow("R@1")
    ('CA− ↓', 'R@1 ↑')
    """
    column = COLUMNS.get(name)
    mark = "↑" if column is None and ":" not in name and not name.startswith("SP") else ""
    return f"{name.replace('-', '−') if column else name} {column.arrow if column else mark}".strip()


class Watch:
    """Progress of an evaluation: a bar for each attack on a terminal, else a line when one is done."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}
        self.done: set[str] = set()

    def __enter__(self) -> Watch:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is."""
        if stage not in self.tasks:
            self.tasks[stage] = self.bar.add_task(stage, total=total, completed=done)
        self.bar.update(self.tasks[stage], completed=done)
        if done == total and stage not in self.done and not self.console.is_terminal:
            self.console.print(f"{stage}: done", highlight=False)
        if done == total:
            self.done.add(stage)


def _fits(console: Console, records: Sequence[Record], names: Sequence[str]) -> bool:
    table = _table(records, names)
    return table.__rich_measure__(console, console.options.update(max_width=10**4)).maximum <= console.width


def _table(records: Sequence[Record], names: Sequence[str]) -> Table:
    table = Table("", *(arrow(n) for n in names))
    for record in records:
        table.add_row(escape(record.network.name), *(_cell(record, n) for n in names))
    if len(records) == 1 and any(n in records[0].scores for n in names):
        # Of the queries that were attacked, which need not be all.
        before = {n: s.before for n, s in records[0].scores.items()}
        cells = ("" if before.get(n) is None else f"[dim]{show(n, before[n])}[/]" for n in names)
        table.add_row("[dim]before the attack[/]", *cells)
    return table


def _cell(record: Record, name: str) -> str:
    if name == "ERS":
        if record.ers is None:
            return "-"
        return show(name, record["ERS"]) + ("" if record.ers.valid else " [bold red]invalid[/]")
    return show(name, record[name]) if name in {**record.retrieval, **record.scores} else "-"


def _summary(record: Record) -> str:
    asked = f"{record.queries.count} of {record.queries.of} images attacked"
    how = (
        f"{record.settings.protocol} protocol, ε = {255 * record.settings.eps:.3g}/255, "
        f"α = {255 * record.settings.alpha:.3g}/255, η = {record.settings.steps}, {record.settings.search}"
    )
    told = ""
    if record.ers is not None:
        interval = " to ".join("-" if v is None else f"{v:.1f}" for v in (record.ers.low, record.ers.high))
        told = f"ERS {show('ERS', record['ERS'])} ({interval}) at R@1 {record['R@1']:.1f}; "
    text = f"{record.network.name}: {told}{asked}; {escape(record.data.name)}; {how}"
    if record.ers is not None and not record.ers.valid:
        text += f"\n  [bold red]the ERS is not valid:[/] {escape(record.ers.why)}"
    return text.replace(record.network.name, escape(record.network.name), 1)


def _others(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(n for r in records for n in r.scores if n not in COLUMNS))
