"""Compare records: in a table, on a page, as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import typer

from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.show import show_sheet
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError
from robustmetric.evaluation import Record
from robustmetric.evaluation.record import RECORD
from robustmetric.experiments.cells import began, counted
from robustmetric.experiments.outcome import RESULT, read_result, run_of
from robustmetric.files import save
from robustmetric.locks import claimed
from robustmetric.report import plots
from robustmetric.report.page import make_page
from robustmetric.report.records import named_records, told_apart
from robustmetric.report.sheet import SUFFIXES, sheet_of_records
from robustmetric.training.folder import RunFolder, read_rows
from robustmetric.training.recipe import bare, read_file

Format = Literal["html", "md", "csv", "latex", "svg", "pdf", "png"]
WANTED = f"give a record ({RECORD}, or a folder that holds one), a run, or a cell of reproduce ({RESULT})"


@app.command()
def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RECORD...", help="Record files, runs, or cells of reproduce.")
    ],
    out: Annotated[Path | None, options.out("File of the page, table or plots.")] = None,
    to: Annotated[
        Format | None, options.option(options.OUTPUT, "Format of the file.", show_default="its suffix")
    ] = None,
    force: options.Force = False,
) -> None:
    """Compare records in a table, and write a page of HTML, a table or plots.

    Pictures of attacks are made by evaluate --report, and curves by evaluate --report --curves.
    """
    console = Terminal()
    kind = _format(out, to, force)
    found = Sources.of(paths)
    named = named_records(found.records)
    if named:
        table = sheet_of_records(named)
        show_sheet(console, table)
    elif kind not in ("svg", "pdf", "png"):
        raise UserError(f"there is no record in {', '.join(map(str, paths))}: {WANTED}")
    if out is None:
        return
    if kind == "html":
        parts: Mapping[str, bytes | str] = {"": make_page(found.records, console.say, out=out)}
    else:
        parts = {"": table.text(kind)} if kind in SUFFIXES else found.plots(named, kind)
    files = {out if len(parts) == 1 else out.with_stem(f"{out.stem}-{part}"): parts[part] for part in parts}
    with ExitStack() as claims:
        for file in files:
            claims.enter_context(claimed(file, "a report", force=force))
        for file, content in files.items():
            save(file, content)
            console.say(f"written: {file}")


def _format(out: Path | None, to: Format | None, force: bool) -> str:
    """Return the format that is asked for, html where it does not matter."""
    if out is None:
        if to is not None or force:
            raise UserError(f"{'--force' if to is None else '--to'} is for a file: give --out FILE")
        return "html"
    kind = to or {suffix: kind for kind, suffix in SUFFIXES.items()}.get(out.suffix) or out.suffix[1:]
    if kind not in get_args(Format):
        raise UserError(
            f"{out.suffix or out.name!r} is no format: give --to {'|'.join(get_args(Format))}", parameter="to"
        )
    return kind


class Sources(NamedTuple):
    """What paths hold: the places of records, what runs logged by their folders, and cells of samplers."""

    records: list[Path]
    runs: dict[Path, Sequence[Mapping[str, str]]]
    samplers: dict[Path, Mapping[str, Any]]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Sources:
        """Look for records, runs and cells at `paths`; each must hold something."""
        found = cls([], {}, {})
        for path in paths:
            for folder in sorted(file.parent for file in path.glob(f"*/{RESULT}")) or [path]:
                found._look(folder)
        return found

    def _look(self, path: Path) -> None:
        folder = path.parent if path.name == RESULT else path
        cell = read_result(folder) if folder.is_dir() else None
        if cell is not None and "hardness" in cell:
            self.samplers[folder] = cell
            return
        run = RunFolder(folder) if cell is None else run_of(folder)
        if run.exists and (rows := read_rows(run.metrics)):
            self.runs[run.path] = rows
        if cell is not None:
            self.records.extend(sorted(file.parent for file in run.path.glob(f"evaluation*/{RECORD}")))
        elif not run.exists or (run.evaluation / RECORD).is_file() or (folder / RECORD).is_file():
            self.records.append(path)
        elif run.path not in self.runs:
            raise UserError(f"the run {run.path} has logged nothing yet, and has no record: {WANTED}")

    def plots(self, named: Mapping[str, Record], kind: str) -> dict[str, bytes]:
        """Draw each plot in the format of a `kind`, by its name."""
        figures: dict[str, Any] = {}
        if self.runs:
            recipes = [bare(read_file(RunFolder(path).recipe_file)) for path in self.runs]
            names = told_apart([str(recipe.get("defense", "")) for recipe in recipes], [*self.runs])
            figures["training"] = plots.training(dict(zip(names, self.runs.values(), strict=True)))
        if named:
            figures["records"] = plots.records(named)
        for number, cell in enumerate(self.samplers.values(), 1):
            batches = counted(cell["identity"]["batches"], "batch", "batches")
            title = f"{cell['cell']}: hardness in {batches}, {began(cell.get('weights'))}"
            figures[f"hardness-{number}"] = plots.hardness_histograms(cell["hardness"], title)
        return {name: plots.drawn(figure, kind) for name, figure in figures.items()}
