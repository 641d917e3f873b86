"""Reproduce the paper's tables and figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from robustmetric.cli.app import app, exit_code, read_changes, stoppable
from robustmetric.cli.options import ADDRESS, ON, check_engine
from robustmetric.cli.progress import Progress
from robustmetric.cli.sheets import show_sheet
from robustmetric.cli.terminal import wide
from robustmetric.data import DATA
from robustmetric.errors import UserError
from robustmetric.experiments.cells import Scale, counted, slug
from robustmetric.experiments.engine import run
from robustmetric.experiments.findings import Finding, find
from robustmetric.experiments.outcome import find_jobs, read_outcome
from robustmetric.experiments.paper import Experiment, experiment, experiment_names
from robustmetric.experiments.sets import check_same
from robustmetric.files import save
from robustmetric.registry import lookup
from robustmetric.report import plots
from robustmetric.report.tables import sheet, title_of
from robustmetric.text import command_line
from robustmetric.training.stops import Stopped

KEPT = "what is finished is kept: the same command resumes"
Name = Enum("Name", {name: name for name in (*experiment_names(), "all")})  # type: ignore[misc]
Format = Enum("Format", {name: name for name in ("md", "csv", "latex", "svg", "pdf", "png")})  # type: ignore[misc]

image, network, attack, output, machine = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Images", "Network", "Attack", "Output", "Machine")
)


@app.command()
def reproduce(
    names: list[Name] = typer.Argument(help="Tables and figures of the paper."),
    data: list[str] = image([], help="Data set, in place of the paper's; may be repeated."),
    root: list[str] = image([], help="Dataset directory: one for each --data, or NAME=DIR."),
    cache: Path = image(None, help="Directory of decoded images."),
    skip_broken: bool = image(False, "--skip-broken", help="Leave out images that cannot be read."),
    weights: Path = network(None, help="Weights that trainings begin with, and that table1 measures."),
    epochs: int = network(None, help="Number of epochs; by default the recipe's."),
    seeds: int = network(1, min=1, help="Trainings of each cell; several are shown as mean ± deviation."),
    change: list[str] = network([], "--set", help="KEY=VALUE: change another entry of the recipes."),
    steps: int = attack(32, help="η of the evaluation's attacks."),
    queries: int = attack(None, help="Number of images that are attacked; by default all."),
    batches: int = attack(1000, help="Number of batches that table1 looks at."),
    out: Path = output(Path("runs/reproduce"), "--out", "-o", help="Folder of cells and tables."),
    to: list[Format] = output([], help="Format of tables and figures; may be repeated; by default all."),
    dry_run: bool = output(False, "--dry-run", help="Print the command of each missing cell."),
    cell: str = output(None, help="Make this cell alone; --dry-run prints the names."),
    on: str = ON,
    address: str | None = ADDRESS,
    jobs: int = machine(1, min=1, help="Number of cells that are made at the same time."),
    threads: int = machine(None, min=1, help="Threads of each cell; by default the cores, shared."),
    devices: int = machine(None, help="Workers of a training; by default as many as published."),
    device: Literal["auto", "cpu", "cuda", "mps"] = machine("auto", help="Device of each worker."),
) -> None:
    """Make the paper's tables and figures, and show them next to the published ones.

    Ctrl-C or SIGTERM stops it; the same command resumes.
    """
    check_engine(on, address)
    chosen = dict.fromkeys(name.value for name in names)
    wanted = experiment_names() if "all" in chosen else chosen
    shown = [experiment(name, list(dict.fromkeys(data)), range(seeds)) for name in wanted]
    changes = read_changes(change)
    if weights is not None:
        changes["weights"] = weights.expanduser().absolute()
    size = (epochs, changes, steps, queries, batches, devices)
    scale = Scale(*size, skip_broken, _roots(data, root), cache, device)
    found = find_jobs([task for table in shown for task in table.tasks], scale, out)
    check_same(scale, found)
    missing = [job for job, outcome in found.items() if outcome is None]
    if cell is not None:
        missing = [lookup("cell", cell, {job.folder.name: job for job in found})]
    if dry_run:
        command = ["robustmetric", *(word for word in sys.argv[1:] if word != "--dry-run"), "--cell"]
        for job in missing:
            typer.echo(command_line([*command, job.folder.name]))
        return
    console, failed = wide(), list[str]()
    try:
        with stoppable(console, KEPT), Progress(console) as progress:
            options: dict[str, Any] = {"on": on, "address": address, "count": jobs, "threads": threads}
            options |= {"report": progress.say, "watch": progress if console.is_terminal else None}
            for done, (job, error) in enumerate(run(missing, out, **options), 1):
                told = str(read_outcome(job.task, scale, job.folder) if error is None else error)
                if error is not None:
                    told = told if isinstance(error, UserError) else f"{type(error).__name__}: {told}"
                    failed.append(f"not made: {job.task.label}: {told}")
                progress.say(f"{done} of {len(missing)}: {job.task.label}: {told}")
                progress.update("cells", done, len(missing))
    except Stopped as stopped:
        console.print(f"stopped by {stopped}; {KEPT}")
        raise typer.Exit(exit_code(str(stopped))) from None
    for table in [] if cell else shown:
        told = scale.told(table.data, trains=table.kind != "samplers")
        told += f", {counted(seeds, 'seed')}" if seeds > 1 else ""
        findings = find(table, scale, out)
        show_sheet(console, sheet(table, findings, told))
        files = _write(table, findings, told, scale, out, [name.value for name in to or Format])
        told = ", ".join(file.name for file in files)
        console.print(f"in {out}: {told}", highlight=False, soft_wrap=True)
    for line in failed:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise UserError(f"{len(failed)} of {len(found)} cells were not made; {KEPT}")


def _write(
    table: Experiment, findings: Sequence[Finding], told: str, scale: Scale, out: Path, formats: Sequence[str]
) -> list[Path]:
    """Write a table or a figure in some formats; return the files."""
    made, files = sheet(table, findings, told), []
    weights = scale.identity(table.tasks[0])["recipe"]["weights"] if table.kind == "samplers" else None
    stem = f"{table.name}-{'-'.join(map(slug, table.data))}" + (f"-weights-{weights[:8]}" if weights else "")
    texts = {"md": ("md", made.markdown), "csv": ("csv", made.csv), "latex": ("tex", made.latex)}
    for suffix, text in (texts[name] for name in formats if name in texts):
        files.append(out / f"{stem}.{suffix}")
        save(files[-1], text())
    drawn = {stem: plots.curves(table, findings, told)} if table.kind == "curves" else {}
    for finding in findings if table.kind == "samplers" else ():
        if (first := finding.outcomes[0]) is not None and first.hardness is not None:
            place = stem.replace("-".join(map(slug, table.data)), slug(finding.row.data), 1)
            drawn[f"{place}-histograms"] = plots.hardness_histograms(first.hardness, title_of(table, told))
    for name, figure in drawn.items():
        files += plots.save(figure, out / name, [name for name in formats if name in plots.FORMATS])
    return files


def _roots(data: list[str], root: list[str]) -> dict[str, Path]:
    """Return the directory of each data set."""
    found: dict[str, Path] = {}
    unnamed = iter(data)
    for text in root:
        name, _, path = text.partition("=")
        if name not in DATA and name not in data:
            name, path = next(unnamed, ""), text
        if not name or name in found:
            told = f"give one root for each data set, as NAME=DIR or in the order of --data: {text}"
            raise UserError(told, parameter="root")
        found[name] = Path(path).expanduser().absolute()
    return found
