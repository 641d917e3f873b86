"""Records with what stands beside them: pictures, curves, the course of their training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from robustmetric.evaluation import Record
from robustmetric.evaluation.curves import CurvePoint, load_curves
from robustmetric.evaluation.pictures import FOLDER, Pictures, load_pictures
from robustmetric.evaluation.record import FORMAT
from robustmetric.report.records import load_records, told_apart
from robustmetric.training.runs import RunFolder
from robustmetric.training.table import read_rows
from robustmetric.validate import UserError


@dataclass(frozen=True)
class Entry:
    """A `record` with what stands beside it in its `folder`, and its `name` on the page.

    `pictures` are None where there are none, and `no_pictures` says why. `curves` are records at other
    budgets, and `no_curves` says which were left out. `training` are the rows that the training logged, and
    `run` is the folder of the run.
    """

    name: str
    folder: Path
    record: Record
    pictures: Pictures | None = None
    no_pictures: str = ""
    curves: Sequence[tuple[CurvePoint, Record]] = ()
    no_curves: Sequence[str] = ()
    training: Sequence[Mapping[str, str]] = ()
    run: str | None = None

    @property
    def key(self) -> str:
        """A short name that is safe in the page's identifiers."""
        return hashlib.sha256(f"{self.name} {self.folder}".encode()).hexdigest()[:8]


def gather(paths: Sequence[Path], names: Sequence[str] | None = None) -> list[Entry]:
    """Read the records at `paths`, and what stands beside them; `names` are what the page calls them.

    >>> gather([])
    []
    """
    records = load_records(paths)
    titles = names or told_apart([record.network.name for record in records], paths)
    return [
        _entry(name, FORMAT.find(path).parent, record)
        for name, path, record in zip(titles, paths, records, strict=True)
    ]


def _entry(name: str, folder: Path, record: Record) -> Entry:
    pictures, why = None, ""
    try:
        pictures = load_pictures(folder, record)
    except FileNotFoundError:
        why = "no pictures were made: run the same evaluate command with --report FILE"
    except UserError as error:
        why = f"{error}; remove the folder {FOLDER} and run evaluate with --report FILE again"
    run = RunFolder(folder.parent)
    left_out: list[str] = []
    return Entry(
        name,
        folder,
        record,
        pictures,
        why,
        tuple(load_curves(folder, record, left_out.append)),
        left_out,
        (read_rows(run.metrics) or ()) if run.exists and run.metrics.is_file() else (),
        str(run.path) if run.exists else None,
    )
