"""Compare records."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from robustmetric.cli.app import app
from robustmetric.cli.records import load_records, told_apart
from robustmetric.cli.show import data_of, eps_of, show_scores
from robustmetric.cli.terminal import styled, wide
from robustmetric.cli.worst import show_suite
from robustmetric.evaluation import Record


@app.command()
def compare(
    records: list[Path] = typer.Argument(help="Record files, or folders that hold one."),
) -> None:
    """Put records side by side."""
    console = wide()
    loaded = load_records(records)
    named = {str(path): record for path, record in zip(records, loaded, strict=True)}
    conditions = {name: _conditions(record) for name, record in named.items()}
    for what in _conditions(loaded[0]):
        if len({c[what] for c in conditions.values()}) > 1:
            told = ", ".join(f"{name}: {c[what]}" for name, c in conditions.items())
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


def _conditions(record: Record) -> dict[str, str]:
    """Say under which conditions scores were measured; only equal ones can be compared."""
    how, asked, surrogate = record.settings, record.queries, record.network.surrogate
    return {
        "data": f"{data_of(record)}, {record.data.images} images of {record.data.classes} classes, "
        f"SHA-256 {record.data.sha256[:12]}",
        "ε": eps_of(record.settings),
        "α": f"{255 * how.alpha:.4g}/255",
        "η": str(how.steps),
        "suite": how.suite,
        "search": how.search,
        "surrogate": "none" if surrogate is None else f"SHA-256 {surrogate[:12]}",
        "queries": f"{asked.count} of {asked.of}, seed {how.seed}",
        "versions": ", ".join(f"{p} {record.versions.get(p)}" for p in ("robustmetric", "torch")),
    }
