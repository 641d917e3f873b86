"""Compare records."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from robustmetric.cli.app import app
from robustmetric.cli.show import show_scores, show_suite
from robustmetric.cli.terminal import styled, wide
from robustmetric.report.records import differing, load_records, told_apart


@app.command()
def compare(
    records: list[Path] = typer.Argument(help="Record files, or folders that hold one."),
) -> None:
    """Put records side by side."""
    console = wide()
    loaded = load_records(records)
    named = {str(path): record for path, record in zip(records, loaded, strict=True)}
    for what, told in differing(named).items():
        console.print(styled(("careful:", "yellow"), f" they differ in {what}: {told}"))
    rows = told_apart([record.network.name for record in loaded], records)
    show_scores(console, loaded, rows)
    show_suite(console, loaded, rows)
    table = Table("", "check", "", "what was found", box=None)
    for name, record in named.items():
        for check in record.checks:
            if check.status in ("warn", "fail"):
                table.add_row(name, check.name, check.status, check.says)
    if table.row_count:
        console.print(table)
