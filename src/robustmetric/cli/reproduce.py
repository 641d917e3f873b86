"""Reproduce the paper's tables and figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from robustmetric.cli import options
from robustmetric.cli.app import RESUME, app, exit_code, read_changes
from robustmetric.cli.options import ATTACK, IMAGES, MACHINE, NETWORK, OUTPUT, option
from robustmetric.cli.progress import Progress
from robustmetric.cli.show import show_sheet
from robustmetric.cli.terminal import Terminal
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
from robustmetric.report.sheet import SUFFIXES
from robustmetric.report.tables import sheet, title_of
from robustmetric.text import command_line
from robustmetric.training.stops import Stopped

Name = Enum("Name", {name: name for name in (*experiment_names(), "all")})  # type: ignore[misc]
Format = Enum("Format", {name: name for name in ("md", "csv", "latex", "svg", "pdf", "png")})  # type: ignore[misc]
FORMATS = list(Format)


@app.command()
def reproduce(
    names: Annotated[list[Name], typer.Argument(help="Tables and figures of the paper.")],
    data: Annotated[list[str], option(IMAGES, "Data set in place of the paper's; may be repeated.")] = [],  # noqa: B006
    root: Annotated[list[str], option(IMAGES, "Dataset directory of each --data, or NAME=DIR.")] = [],  # noqa: B006
    cache: options.Cache = None,
    skip_broken: options.SkipBroken = False,
    weights: Annotated[Path | None, option(NETWORK, "Initial weights; table1 measures them.")] = None,
    epochs: Annotated[int | None, option(NETWORK, "Number of epochs.", show_default="the recipe's")] = None,
    seeds: Annotated[int, option(NETWORK, "Trainings of each cell.", min=1)] = 1,
    change: Annotated[
        list[str], option(NETWORK, "KEY=VALUE: change another entry of the recipes.", "--set")
    ] = [],  # noqa: B006
    steps: Annotated[int, option(ATTACK, "η, the number of steps of the evaluation.")] = 32,
    queries: Annotated[int | None, option(ATTACK, "Number of images attacked.", show_default="all")] = None,
    batches: Annotated[int, option(ATTACK, "Number of batches that table1 looks at.")] = 1000,
    out: Annotated[Path, options.out("Folder of cells, tables and figures.")] = Path("runs/reproduce"),
    to: Annotated[list[Format], option(OUTPUT, "Format of tables and figures; may be repeated.")] = FORMATS,
    dry_run: Annotated[bool, option(OUTPUT, "Print the command of each missing cell.", "--dry-run")] = False,
    cell: Annotated[str | None, option(OUTPUT, "Make this cell alone.")] = None,
    on: options.On = "local",
    address: options.Address = None,
    jobs: Annotated[int, option(MACHINE, "Number of cells that are made at the same time.", min=1)] = 1,
    threads: Annotated[int | None, option(MACHINE, "Threads of each cell.", min=1)] = None,
    devices: Annotated[
        int | None, option(MACHINE, "Workers of a training.", show_default="published")
    ] = None,
    device: options.Device = "auto",
) -> None:
    """Make the paper's tables and figures, and show them next to the published ones.

    The same command resumes what was stopped.
    """
    options.check_address(on, address)
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
    console, failed = Terminal(), list[str]()
    how: dict[str, Any] = {"on": on, "address": address, "count": jobs, "threads": threads}
    try:
        with Progress(console) as progress:
            watch = progress if console.is_terminal else None
            made = run(missing, out, **how, report=progress.say, watch=watch)
            for done, (job, error) in enumerate(made, 1):
                told = str(read_outcome(job.task, scale, job.folder) if error is None else error)
                if error is not None:
                    told = told if isinstance(error, UserError) else f"{type(error).__name__}: {told}"
                    failed.append(f"not made: {job.task.label}: {told}")
                progress.say(f"{done} of {len(missing)}: {job.task.label}: {told}")
                progress.update("cells", done, len(missing))
    except Stopped as stopped:
        console.say(RESUME)
        raise typer.Exit(exit_code(str(stopped))) from None
    for table in [] if cell else shown:
        told = scale.told(table.data, trains=table.kind != "samplers")
        told += f", {counted(seeds, 'seed')}" if seeds > 1 else ""
        findings = find(table, scale, out)
        show_sheet(console, sheet(table, findings, told))
        files = _write(table, findings, told, scale, out, [name.value for name in to])
        console.say(f"in {out}: {', '.join(file.name for file in files)}")
    for line in failed:
        console.say(line)
    if failed:
        raise UserError(f"{len(failed)} of {len(found)} cells were not made; run the same command again")


def _write(
    table: Experiment, findings: Sequence[Finding], told: str, scale: Scale, out: Path, formats: Sequence[str]
) -> list[Path]:
    """Write a table or a figure in some formats; return the files."""
    made, files = sheet(table, findings, told), []
    weights = scale.identity(table.tasks[0])["recipe"]["weights"] if table.kind == "samplers" else None
    stem = f"{table.name}-{'-'.join(map(slug, table.data))}" + (f"-weights-{weights[:8]}" if weights else "")
    for kind in (name for name in formats if name in SUFFIXES):
        files.append(out / f"{stem}{SUFFIXES[kind]}")
        save(files[-1], made.text(kind))
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
