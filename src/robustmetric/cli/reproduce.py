"""Reproduce the paper's tables and figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from robustmetric.cli.app import app, exit_code, read_changes, stoppable
from robustmetric.cli.options import ADDRESS, ON, check_engine
from robustmetric.cli.progress import Progress
from robustmetric.cli.terminal import Terminal, wide
from robustmetric.errors import UserError, whole
from robustmetric.files import save as write_text
from robustmetric.text import command_line

if TYPE_CHECKING:
    from robustmetric.experiments.cells import Scale
    from robustmetric.experiments.paper import Experiment

KEPT = "what is finished is kept: the same command resumes"
_NAMES = (*(f"table{k}" for k in range(1, 12)), *(f"figure{k}" for k in (1, 6, 7, 8)), "all")
Name = Enum("Name", {name: name for name in _NAMES})  # type: ignore[misc]
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
    seeds: int = network(1, help="Trainings of each cell; several are shown as mean ± deviation."),
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
    jobs: int = machine(1, help="Number of cells that are made at the same time."),
    threads: int = machine(None, help="Threads of each cell; by default the cores, shared."),
    devices: int = machine(None, help="Workers of a training; by default as many as published."),
    device: Literal["auto", "cpu", "cuda", "mps"] = machine("auto", help="Device of each worker."),
) -> None:
    """Make the paper's tables and figures, and show them next to the published ones.

    Ctrl-C or SIGTERM stops it; the same command resumes.
    """
    from robustmetric.experiments.cells import Scale, counted
    from robustmetric.experiments.engine import run
    from robustmetric.experiments.outcome import find_jobs, read_outcome
    from robustmetric.experiments.paper import experiment, experiment_names
    from robustmetric.experiments.sets import check_same
    from robustmetric.registry import lookup
    from robustmetric.training.stops import Stopped

    for option, value in {"seeds": seeds, "jobs": jobs, "threads": threads}.items():
        if value is not None:
            whole(option, value, least=1)
    check_engine(on, address)
    chosen = dict.fromkeys(name.value for name in names)
    wanted = experiment_names() if "all" in chosen else list(chosen)
    shown = [experiment(name, data, range(seeds)) for name in wanted]
    changes = read_changes(change)
    if weights is not None:
        changes["weights"] = weights.expanduser().absolute()
    measured = (epochs, changes, steps, queries, batches, devices)
    scale = Scale(*measured, skip_broken, _roots(data, root), cache, device)
    tasks = [task for table in shown for task in table.tasks]
    found = find_jobs(tasks, scale, out)
    for name, folder in scale.roots.items():
        check_same(name, folder, [one for job, one in found.items() if one and job.task.data == name])
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
            watch = progress if console.is_terminal else None
            options: dict[str, Any] = {"on": on, "address": address, "count": jobs, "threads": threads}
            ended = run(missing, out, **options, report=progress.say, watch=watch) if missing else ()
            for done, (job, error) in enumerate(ended, 1):
                told = str(read_outcome(job.task, scale, job.folder)) if error is None else _why(error)
                progress.say(f"{done} of {len(missing)}: {job.task.label}: {told}")
                progress.update("cells", done, len(missing))
                if error is not None:
                    failed.append(f"not made: {job.task.label}: {told}")
    except Stopped as stopped:
        console.print(f"stopped by {stopped}; {KEPT}")
        raise typer.Exit(exit_code(str(stopped))) from None
    for table in [] if cell else shown:
        told = scale.told(table.data, trains=table.kind != "samplers")
        _show(console, table, scale, told + (f", {counted(seeds, 'seed')}" if seeds > 1 else ""), out, to)
    for line in failed:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise UserError(f"{len(failed)} of {len(found)} cells were not made; {KEPT}")


def _show(
    console: Terminal, table: Experiment, scale: Scale, told: str, out: Path, to: Sequence[Format]
) -> None:
    """Print a table, or the points of a figure, and write both to files."""
    from robustmetric.cli.sheets import show_sheet
    from robustmetric.experiments.cells import slug
    from robustmetric.experiments.findings import find
    from robustmetric.report.plots import FORMATS, curves, hardness_histograms, save
    from robustmetric.report.tables import sheet, title_of

    findings = find(table, scale, out)
    made = sheet(table, findings, told)
    stem = out / f"{table.name}-{'-'.join(map(slug, table.data))}"
    if table.kind == "samplers" and (digest := scale.identity(table.tasks[0])["recipe"]["weights"]):
        stem = stem.with_name(f"{stem.name}-weights-{digest[:8]}")
    show_sheet(console, made)
    wanted = [name.value for name in to or Format]
    texts = {"md": ("md", made.markdown), "csv": ("csv", made.csv), "latex": ("tex", made.latex)}
    files = []
    for ending, text in (texts[name] for name in wanted if name in texts):
        files.append(stem.with_name(f"{stem.name}.{ending}"))
        write_text(files[-1], text())
    plots = [name for name in wanted if name in FORMATS]
    if table.kind == "curves":
        files += save(curves(table, findings, told), stem, plots)
    for finding in findings if table.kind == "samplers" else ():
        if (first := finding.outcomes[0]) is not None and first.hardness is not None:
            place = stem.with_name(f"{table.name}-{slug(finding.row.data)}-histograms")
            files += save(hardness_histograms(first.hardness, title_of(table, told)), place, plots)
    names = ", ".join(file.name for file in files)
    console.print(f"in {out}: {names}", highlight=False, soft_wrap=True)


def _why(error: Exception) -> str:
    known = isinstance(error, UserError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def _roots(data: list[str], root: list[str]) -> dict[str, Path]:
    """Return the directory of each data set."""
    from robustmetric.data import DATA

    found: dict[str, Path] = {}
    unnamed = list(data)
    for text in root:
        name, equals, path = text.partition("=")
        if not (equals and (name in DATA or name in data)):
            if not unnamed:
                told = f"give --data for each --root, or write --root cub={text}"
                raise UserError(f"which data set is in {text}? {told}", parameter="root")
            name, path = unnamed.pop(0), text
        if name in found:
            raise UserError(f"{name} has two roots, {found[name]} and {path}: give one", parameter="root")
        found[name] = Path(path).expanduser().absolute()
    return found
