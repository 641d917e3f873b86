"""Plot trainings, records and the hardness of samplers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from robustmetric.cli.app import app
from robustmetric.cli.terminal import wide
from robustmetric.errors import UserError
from robustmetric.evaluation.record import RECORD
from robustmetric.experiments.cells import began, counted
from robustmetric.experiments.outcome import RESULT, read_result, run_of
from robustmetric.files import DamagedError, check_writable
from robustmetric.report import plots
from robustmetric.report.records import load_records, told_apart
from robustmetric.report.style import check_formats
from robustmetric.training.folder import RunFolder, read_rows
from robustmetric.training.recipe import bare, read_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOLDER = "plots"
_WANTED = (
    f"give the folder of a run, a record ({RECORD} or a folder that holds one), or the folder of a cell of "
    f"reproduce ({RESULT})"
)


@app.command()
def plot(
    paths: list[Path] = typer.Argument(
        help="Folders of runs, records or folders that hold one, cells of reproduce."
    ),
    out: str = typer.Option(
        f"{_FOLDER}/", help="A folder, with / behind it if it is new, or how the files' names begin."
    ),
    formats: str = typer.Option(",".join(plots.FORMATS), "--format", help="svg, pdf and png, or some."),
) -> None:
    """Plot trainings, and records beside each other, as files for a paper."""
    wanted = check_formats([name for part in formats.split(",") if (name := part.strip().lower())])
    folder = out.endswith("/") or Path(out).is_dir()
    check_writable(Path(out) if folder else Path(out).parent)
    found = _Found()
    for path in paths:
        cells = sorted(file.parent for file in path.glob(f"*/{RESULT}")) if path.is_dir() else []
        for one in cells or [path]:
            found.look(one)
    made = dict(found.figures())
    console = wide()
    for name, figure in made.items():
        stem = Path(out, name) if folder else Path(out if len(made) == 1 else f"{out}-{name}")
        files = plots.save(figure, stem, wanted)
        console.print(f"{name}: {', '.join(map(str, files))}", highlight=False, soft_wrap=True)
    for why in found.left_out:
        console.print(f"left out: {why}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Found:
    """What is to be plotted: tables of runs, places of records, and what samplers' cells say, by path."""

    runs: dict[Path, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    records: list[Path] = field(default_factory=list)
    samplers: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def look(self, path: Path) -> None:
        """Find what there is at a path, which a user gave: perhaps several things, at least one."""
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}; {_WANTED}")
        folder = path.parent if path.name == RESULT else path
        cell = read_result(folder)
        if cell is not None and "hardness" in cell:
            self.samplers[folder] = cell
            return
        run = run_of(folder) if cell is not None else RunFolder(folder)
        rows: Sequence[Mapping[str, str]] = []
        try:
            rows = _logged(run) if run.exists else []
        except DamagedError as error:
            self.left_out.append(str(error))
        if rows:
            self.runs[run.path] = rows
        held = [run.path] if any((p / RECORD).is_file() for p in (run.path, run.evaluation)) else []
        if folder.is_file():
            held = [folder]
        elif cell is not None:
            held = sorted(file.parent for file in run.path.glob(f"evaluation*/{RECORD}"))
        self.records.extend(place for place in held if place not in self.records)
        if self.left_out and not rows and not held:
            raise DamagedError(self.left_out[-1])
        if run.exists and not rows and not held:
            raise UserError(f"the run {run.path} has logged nothing yet, and has no record; {_WANTED}")
        if not rows and not held:
            raise UserError(f"there is nothing to plot in {path}; {_WANTED}")

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Make the plots, each with the name of its files."""
        if self.runs:
            names = [_name(RunFolder(path)) for path in self.runs]
            labels = told_apart(names, list(self.runs))
            with self._unless_others():
                figure = plots.training(dict(zip(labels, self.runs.values(), strict=True)))
                yield "training", figure
        if self.records:
            loaded = load_records(self.records)
            labels = told_apart([record.network.name for record in loaded], self.records)
            yield "records", plots.records(dict(zip(labels, loaded, strict=True)))
        for number, cell in enumerate(self.samplers.values(), 1):
            batches = counted(cell["identity"]["batches"], "batch", "batches")
            title = f"{cell['cell']}: hardness in {batches}, {began(cell.get('weights'))}"
            name = "hardness" if len(self.samplers) == 1 else f"hardness-{number}"
            yield name, plots.hardness_histograms(cell["hardness"], title)

    @contextmanager
    def _unless_others(self) -> Iterator[None]:
        """Leave out what cannot be plotted inside, if there is something else to plot."""
        try:
            yield
        except UserError as error:
            if not self.records and not self.samplers:
                raise
            self.left_out.append(str(error))


def _logged(run: RunFolder) -> list[dict[str, str]]:
    if not run.metrics.is_file():
        return []
    rows = read_rows(run.metrics)
    if rows is None:
        raise DamagedError(f"{run.metrics} cannot be read as a table with a step in each row: restore it")
    return rows


def _name(run: RunFolder) -> str:
    """Name a run by its defense, without running any code that its recipe names."""
    return str(bare(read_file(run.recipe_file)).get("defense", run.path.name))
