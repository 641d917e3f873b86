"""Reproduce the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from robustmetric.cli.app import app, exit_code, read_changes, stoppable
from robustmetric.cli.options import ADDRESS, ON, check_engine
from robustmetric.cli.progress import Decoding, Making, duration
from robustmetric.cli.terminal import Terminal, wide
from robustmetric.errors import UserError
from robustmetric.files import check_writable
from robustmetric.text import command_line

if TYPE_CHECKING:
    from robustmetric.experiments.cells import Job, Scale
    from robustmetric.experiments.estimate import Cost
    from robustmetric.experiments.findings import Finding
    from robustmetric.experiments.paper import Experiment

KEPT = "what is finished is kept: the same command resumes"


@app.command()
def reproduce(
    names: list[str] = typer.Argument(
        help="table1 to table11, figure1, figure6 to figure8, or all.", metavar="NAME..."
    ),
    data: list[str] = typer.Option([], help="Data set, instead of the paper's; several times for several."),
    root: list[str] = typer.Option(
        [],
        help="Where its files are: one for each --data in their order, or NAME=DIR for any data set.",
    ),
    weights: Path = typer.Option(None, help="Weights that trainings begin with, and that table1 measures."),
    epochs: int = typer.Option(None, help="Epochs of a training; by default the recipe's."),
    steps: int = typer.Option(32, help="η of the evaluation's attacks; that of a training is its cell's."),
    seeds: int = typer.Option(1, help="Trainings of each cell; several are shown as mean ± deviation."),
    queries: int = typer.Option(None, help="How many test images are attacked; by default all."),
    batches: int = typer.Option(1000, help="Batches that table1 looks at."),
    change: list[str] = typer.Option([], "--set", help="KEY=VALUE: change another entry of the recipes."),
    out: Path = typer.Option(Path("runs/reproduce"), help="Folder of the cells, tables and figures."),
    on: str = ON,
    address: str | None = ADDRESS,
    jobs: int = typer.Option(1, help="Cells that are made at the same time."),
    threads: int = typer.Option(None, help="Threads of each; by default the cores, shared out."),
    devices: int = typer.Option(None, help="Workers of a training; by default the published number."),
    accelerator: str = typer.Option("auto", help="auto, cpu, gpu or mps."),
    cache: Path = typer.Option(None, help="Where decoded images are kept."),
    skip_broken: bool = typer.Option(False, "--skip-broken", help="Leave out images that cannot be read."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the command of each cell that is missing, for any scheduler."
    ),
    cell: str | None = typer.Option(None, help="Make this cell alone, by its name, as --dry-run prints it."),
    parent: int | None = typer.Option(None, hidden=True),
) -> None:
    """Make the paper's tables and figures, and show them beside the published ones.

    Ctrl-C or SIGTERM stops it; the same command resumes.
    """
    from robustmetric.experiments.cells import counted
    from robustmetric.experiments.engine import end_with
    from robustmetric.experiments.findings import find
    from robustmetric.experiments.paper import experiment, experiment_names
    from robustmetric.training.code import files_beside
    from robustmetric.training.stops import Stopped
    from robustmetric.training.workers import is_first

    # A cell's command may be run from anywhere.
    out, here = out.expanduser().absolute(), Path.cwd()
    data = [str(files_beside({"data": name}, here)["data"]) for name in data]
    wanted = experiment_names() if "all" in names else list(dict.fromkeys(names))
    _check_counts(seeds=seeds, jobs=jobs, threads=threads)
    check_engine(on, address)
    shown = [experiment(name, data, range(seeds)) for name in wanted]
    scale = _scale(
        _roots(data, root),
        weights,
        change,
        epochs=epochs,
        steps=steps,
        queries=queries,
        batches=batches,
        devices=devices,
        cache=None if cache is None else cache.expanduser().absolute(),
        skip_broken=skip_broken,
        accelerator=accelerator,
    )
    given = {
        "--data": data, "--root": [f"{name}={path}" for name, path in scale.roots.items()],
        "--weights": scale.changes.get("weights"), "--epochs": epochs,
        "--steps": steps if steps != 32 else None, "--seeds": seeds if seeds > 1 else None,
        "--queries": queries, "--batches": batches if batches != 1000 else None,
        "--set": _written(scale, change),
        "--out": out, "--threads": threads, "--devices": devices,
        "--accelerator": accelerator if accelerator != "auto" else None,
        "--cache": scale.cache,
        "--skip-broken": skip_broken,
    }  # fmt: skip
    work = _Work.of(shown, scale, out, ["reproduce", *wanted, *_options(given)])
    if dry_run:
        for job in [work.named(cell)] if cell is not None else work.missing:
            typer.echo(command_line(["robustmetric", *job.command]))
        return
    console = wide()
    console.quiet = not is_first()
    failed: dict[str, str] = {}
    try:
        with stoppable(console, KEPT):
            if cell is not None:
                if parent is not None and is_first():
                    end_with(parent)
                _make_one(work.named(cell), threads, console, quiet=parent is not None)
            elif work.missing:
                failed = _make_all(work, console, on, address, jobs, threads)
    except Stopped as stopped:
        console.print(f"stopped by {stopped}; {KEPT}")
        raise typer.Exit(exit_code(str(stopped))) from None
    for table in shown if cell is None else ():
        told = scale.told(table.data, trains=table.kind != "samplers")
        told += f", {counted(seeds, 'seed')}" if seeds > 1 else ""
        _show(console, table, find(table, scale, out), told, out, _ending(table, scale))
    if failed:
        for label, why in failed.items():
            console.print(f"not made: {label}: {why}", markup=False, highlight=False, soft_wrap=True)
        raise UserError(f"{len(failed)} of {len(work.jobs)} cells were not made; {KEPT}")


@dataclass(frozen=True)
class _Work:
    """All cells that are asked for, and those that are missing."""

    out: Path
    jobs: list[Job]
    missing: list[Job]

    @classmethod
    def of(cls, shown: Sequence[Experiment], scale: Scale, out: Path, command: list[str]) -> _Work:
        """Look for the cells of tables and figures; refuse what does not belong to its cell."""
        from robustmetric.experiments.cells import Job, names_of
        from robustmetric.experiments.outcome import find_folders, read_outcome
        from robustmetric.experiments.sets import check_same

        tasks = names_of(scale, [task for table in shown for task in table.tasks])
        folders = find_folders(out, list(tasks))
        jobs = [Job(task, scale, folders[name], (*command, "--cell", name)) for name, task in tasks.items()]
        found = {job: read_outcome(job.task, scale, job.folder) for job in jobs}
        for name, root in scale.roots.items():
            check_same(name, root, [one for job, one in found.items() if one and job.task.data == name])
        return cls(out, jobs, [job for job in jobs if found[job] is None])

    def named(self, name: str) -> Job:
        """Find the cell of a name."""
        from robustmetric.registry import lookup

        return lookup("cell", name, {job.name: job for job in self.jobs})


def _make_one(job: Job, threads: int | None, console: Terminal, *, quiet: bool) -> None:
    """Make a cell in this process; `quiet` leaves it to the one that started it to say what came of it."""
    import torch

    from robustmetric.experiments.work import make

    if threads is not None:
        torch.set_num_threads(threads)
    outcome = make(job, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
    if outcome is not None and not quiet:
        console.print(f"{job.task.label}: {outcome}; in {job.folder}", highlight=False, soft_wrap=True)


def _make_all(
    work: _Work, console: Terminal, on: str, address: str | None, count: int, threads: int | None
) -> dict[str, str]:
    """Make what is missing; return why some could not be made, by what they are."""
    import torch

    from robustmetric.cluster import connect
    from robustmetric.data.stored import cores
    from robustmetric.experiments.engine import Room, run_here, run_local, run_ray
    from robustmetric.experiments.estimate import estimate
    from robustmetric.experiments.progress import Pace
    from robustmetric.experiments.sets import check_data
    from robustmetric.training.stops import Stopped

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    scale, missing = work.jobs[0].scale, work.missing
    for job in missing:
        check_writable(job.folder)
    for name in dict.fromkeys(job.task.data for job in missing):
        if lacks := check_data(name, scale.roots.get(name), scale.queries):
            say(f"careful: {lacks}")
    if on == "local":
        _ = scale.device  # refused now, if it is not there
    each = threads or max(1, cores() // count)
    with ExitStack() as leaving:
        if on == "ray":
            cluster = leaving.enter_context(connect(address))
            cluster.check_folder(work.out)
            room = Room.of(cluster, missing, count, threads)
            count, ended = room.at_once, run_ray(missing, cluster, room)
        elif count == 1:
            ended = run_here(missing, say)
        else:
            ended = run_local(missing, count, each)
        leaving.enter_context(closing(ended))
        torch.set_num_threads(each)
        decoding = leaving.enter_context(Decoding(console))
        costs = estimate([job.task for job in missing], scale, watch=decoding, report=say)
        _show_plan(console, work, costs, count)
        pace = Pace({job: costs[job.task] for job in missing}, count)
        leaving.enter_context(Making(console, pace))
        failed: dict[str, str] = {}
        for number, (job, error) in enumerate(ended, 1):
            pace.ended(job)
            if isinstance(error, Stopped):
                raise error
            if error is None:
                told = _told(job)
            else:
                known = isinstance(error, UserError | OSError)
                failed[job.task.label] = str(error) if known else f"{type(error).__name__}: {error}"
                told = f"failed: {failed[job.task.label]}"
            say(f"{number} of {len(missing)}: {job.task.label}: {told}")
    return failed


def _told(job: Job) -> str:
    """Say what became of a cell."""
    from robustmetric.experiments.outcome import read_outcome

    return str(read_outcome(job.task, job.scale, job.folder) or "not finished")


def _show_plan(console: Terminal, work: _Work, costs: dict[Any, Cost], count: int) -> None:
    """Show what is to be done and what it is expected to cost."""
    from robustmetric.experiments.cells import counted

    table = Table("to do", "training", "evaluation", box=None)
    for job in work.missing:
        cost = costs[job.task]
        table.add_row(job.task.label, duration(cost.train), duration(cost.evaluate) if cost.evaluate else "")
    console.print(table, highlight=False)
    whole = sum(costs[job.task].total for job in work.missing)
    there = len(work.jobs) - len(work.missing)
    console.print(
        f"{counted(len(work.missing), 'cell')} to make, {there} there already; about "
        f"{duration(whole / count)} {'in all' if count == 1 else f'with {count} at a time'}, from a few "
        "timed steps of each kind",
        highlight=False,
        soft_wrap=True,
    )


def _ending(table: Experiment, scale: Scale) -> str:
    """Say how the names of a table's files end: those of Table 1 tell the weights that are measured."""
    digest = scale.identity(table.tasks[0])["recipe"]["weights"] if table.kind == "samplers" else None
    return "" if digest is None else f"-weights-{digest[:8]}"


def _show(
    console: Terminal, table: Experiment, findings: Sequence[Finding], told: str, out: Path, ending: str
) -> None:
    """Print a table, or what a figure is made of, and write both to files."""
    from robustmetric.cli.sheets import show_sheet
    from robustmetric.experiments.cells import slug
    from robustmetric.report.plots import curves, hardness_histograms, save
    from robustmetric.report.sheet import write
    from robustmetric.report.tables import sheet, title_of

    made = sheet(table, findings, told)
    stem = out / f"{table.name}-{'-'.join(map(slug, table.data))}{ending}"
    show_sheet(console, made)
    files = write(made, stem)
    if table.kind == "curves":
        files += save(curves(table, findings, told), stem)
    for finding in findings if table.kind == "samplers" else ():
        for outcome in finding.outcomes[:1]:
            if outcome is not None and outcome.hardness is not None:
                place = stem.with_name(f"{table.name}-{slug(finding.row.data)}{ending}-histograms")
                files += save(hardness_histograms(outcome.hardness, title_of(table, told)), place)
    names = ", ".join(file.name for file in files)
    console.print(f"in {out}: {names}", highlight=False, soft_wrap=True)


def _roots(data: list[str], root: list[str]) -> dict[str, Path]:
    """Find out where the files of each data set are."""
    from robustmetric.data import DATA

    if len(set(data)) < len(data):
        raise UserError(f"a data set is given twice: {', '.join(data)}", parameter="data")
    found: dict[str, str] = {}
    unnamed = list(data)
    for text in root:
        name, equals, path = text.partition("=")
        if not (equals and (name in DATA or name in data)):
            if not unnamed:
                raise UserError(
                    f"which data set is in {text}? give --data for each --root, or write --root cub={text}",
                    parameter="root",
                )
            name, path = unnamed.pop(0), text
        if name in found:
            raise UserError(f"{name} has two roots, {found[name]} and {path}: give one", parameter="root")
        found[name] = path
    return {name: Path(path).expanduser().absolute() for name, path in found.items()}


def _scale(roots: dict[str, Path], weights: Path | None, change: list[str], **options: Any) -> Scale:
    from robustmetric.experiments.cells import Scale
    from robustmetric.training.code import files_beside

    changes = files_beside(read_changes(change), Path.cwd())
    if weights is not None:
        if "weights" in changes:
            raise UserError("weights: given by an option and by --set; leave one of them out")
        changes["weights"] = weights
    if changes.get("weights") is not None:
        changes["weights"] = Path(str(changes["weights"])).expanduser().absolute()
    return Scale(changes=changes, roots=roots, **options)


def _written(scale: Scale, change: list[str]) -> list[str]:
    """Write --set as it was given, but for files, which are named with their folders."""
    pairs = [pair.partition("=") for pair in change]
    own = {key: scale.changes[key] for key in ("model",) if key in scale.changes}
    return [f"{key}={own.get(key, value)}" for key, _, value in pairs if key != "weights"]


def _options(given: dict[str, Any]) -> list[str]:
    """Write options as they were given; those that were not are left out."""
    found: list[str] = []
    for option, value in given.items():
        if value is True:
            found.append(option)
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                found += [option, str(one)]
    return found


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}", parameter=name)
