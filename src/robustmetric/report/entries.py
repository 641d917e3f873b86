"""Records with what stands beside them: pictures, curves, the run that they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from robustmetric.errors import UserError
from robustmetric.evaluation import Record
from robustmetric.evaluation.record import FORMAT
from robustmetric.report.curves import CurvePoint, load_curves
from robustmetric.report.pictures import Pictures, load_pictures
from robustmetric.report.records import load_records, told_apart
from robustmetric.training.folder import RunFolder, read_rows

AGAIN = "run the same evaluate command again, with --report FILE"
"""What to do where pictures are missing."""


@dataclass(frozen=True)
class Trained:
    """The run that a record is of: its `folder`, the `data` it was trained on, and the `rows` it logged.

    >>> Trained("runs/mine").rows
    ()
    """

    folder: str
    data: str | None = None
    rows: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Entry:
    """A `record` with what stands beside it in its `folder`, and its `name` on the page.

    `pictures` are None where there are none, and `no_pictures` says why. `curves` are records at other
    budgets, and `no_curves` says which were left out. `run` is the run that the folder is in.
    """

    name: str
    folder: Path
    record: Record
    pictures: Pictures | None = None
    no_pictures: str = ""
    curves: Sequence[tuple[CurvePoint, Record]] = ()
    no_curves: Sequence[str] = ()
    run: Trained | None = None


def gather(paths: Sequence[Path]) -> list[Entry]:
    """Read the records at `paths`, and what stands beside them.

    >>> gather([])
    []
    """
    records = load_records(paths)
    known = [record.network.name if record.network.name.strip() else "network" for record in records]
    names = _numbered(told_apart(known, paths))
    return [
        _entry(name, FORMAT.find(path).parent, record)
        for name, path, record in zip(names, paths, records, strict=True)
    ]


def _numbered(names: Sequence[str]) -> list[str]:
    """Return names with a number behind those that are there already, as of a record that is given twice."""
    found: list[str] = []
    for name in names:
        other, number = name, 2
        while other in found:
            other, number = f"{name} #{number}", number + 1
        found.append(other)
    return found


def _entry(name: str, folder: Path, record: Record) -> Entry:
    pictures, no_pictures = None, ""
    try:
        pictures = load_pictures(folder, record)
    except FileNotFoundError:
        no_pictures = f"no pictures were made: {AGAIN}"
    except UserError as error:
        no_pictures = f"no pictures are shown, for {error}: {AGAIN}"
    left_out: list[str] = []
    curves = tuple(load_curves(folder, record, left_out.append))
    return Entry(name, folder, record, pictures, no_pictures, curves, left_out, _trained(folder, record))


def _trained(folder: Path, record: Record) -> Trained | None:
    """Return the run that a folder is in, if the record is of its network."""
    run = RunFolder(folder.parent if folder.name not in ("", "..") else folder / "..")
    if not run.exists:
        return None
    data: str | None = None
    try:
        data = run.recipe().data
        if run.name != record.network.name:
            return None
    except (OSError, UserError):  # a recipe with code that is not trusted, which is not needed here
        pass
    try:
        rows = read_rows(run.metrics) or ()
    except OSError:
        rows = ()
    return Trained(str(run.path), data, rows)
