"""Write reports."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from robustmetric.cli.app import app
from robustmetric.cli.terminal import wide
from robustmetric.report.page import write_report


@app.command()
def report(
    records: list[Path] = typer.Argument(help="Record files, or folders that hold one, such as runs."),
    out: Path = typer.Option(..., "--out", "-o", help="The file of the page."),
    force: bool = typer.Option(False, "--force", help="Overwrite the file if it is there."),
) -> None:
    """Write one page of HTML with the scores of records, side by side, and pictures of attacks.

    Pictures are made by evaluate --report, and curves by evaluate --report --curves.
    """
    console = wide()
    say = partial(console.print, highlight=False, soft_wrap=True)
    written = write_report(records, out, force=force, report=say)
    console.print(f"the report is {written}, {written.stat().st_size / 1e6:.1f} MB")
