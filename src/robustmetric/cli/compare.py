"""Compare records."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from robustmetric.cli.app import app
from robustmetric.cli.show import data_of, show_scores
from robustmetric.cli.terminal import styled, wide
from robustmetric.evaluation import Record, load_record
from robustmetric.validate import UserError


@app.command()
def compare(
    records: list[Path] = typer.Argument(help="Record files, or folders that hold one."),
) -> None:
    """Put records side by side."""
    console = wide()
    loaded = [_loaded(path) for path in records]
    named = {str(path): record for path, record in zip(records, loaded, strict=True)}
    protocols = {name: record.settings.protocol for name, record in named.items()}
    if len(set(protocols.values())) > 1:
        told = ", ".join(f"{name} is {protocol}" for name, protocol in protocols.items())
        raise UserError(f"records of different protocols are never compared: {told}")
    conditions = {name: _conditions(record) for name, record in named.items()}
    for what in _conditions(loaded[0]):
        if len({c[what] for c in conditions.values()}) > 1:
            told = ", ".join(f"{name}: {c[what]}" for name, c in conditions.items())
            console.print(styled(("careful:", "yellow"), f" they differ in {what}: {told}"))
    show_scores(console, loaded, _row_names(records, loaded))
    table = Table("", "check", "", "what was found", box=None)
    for name, record in named.items():
        for check in record.checks:
            if check.status in ("warn", "fail"):
                table.add_row(name, check.name, check.status, check.says)
    if table.row_count:
        console.print(table)


def _loaded(path: Path) -> Record:
    try:
        return load_record(path)
    except UserError as error:
        raise UserError(f"{error}; evaluate again, or leave {path} out") from None


def _row_names(paths: list[Path], records: list[Record]) -> list[str]:
    """Name each record by its network, and by where its path differs from the others if names repeat."""
    parts = [path.parts for path in paths]
    common = 0
    while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
        common += 1
    names = [record.network.name for record in records]
    return [
        name if names.count(name) == 1 else f"{name} ({Path(*part[common:])})"
        for name, part in zip(names, parts, strict=True)
    ]


def _conditions(record: Record) -> dict[str, str]:
    """Say under which conditions scores were measured; only equal ones can be compared."""
    how, asked, surrogate = record.settings, record.queries, record.network.surrogate
    return {
        "data": f"{data_of(record)}, {record.data.images} images of {record.data.classes} classes, "
        f"SHA-256 {record.data.sha256[:12]}",
        "ε": f"{255 * how.eps:.4g}/255",
        "α": f"{255 * how.alpha:.4g}/255",
        "η": str(how.steps),
        "search": how.search + ("" if surrogate is None else f" from {surrogate[:12]}"),
        "queries": f"{asked.count} of {asked.of}, seed {how.seed}",
        "versions": ", ".join(f"{p} {record.versions.get(p)}" for p in ("robustmetric", "torch")),
    }
