"""What became of a cell: read from its folder, and refused if it is of something else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robustmetric import __version__
from robustmetric.errors import UserError
from robustmetric.evaluation.identity import differences
from robustmetric.evaluation.record import RECORD, Record, load_record
from robustmetric.experiments.cells import Job, Scale, Task
from robustmetric.files import DamagedError, load_entries, save
from robustmetric.training.folder import RunFolder

RESULT = "cell.json"
"""The file in a cell's folder that says what it is, and what came of it if that is no record."""


@dataclass(frozen=True)
class Outcome:
    """What a finished cell in `folder` came to: a `record`, a collapse, or the hardness of the samplers.

    `collapsed` says how the network collapsed; it has no record where nothing could be scored. `hardness` has
    the statistics by sampler.
    """

    folder: Path
    record: Record | None = None
    collapsed: str | None = None
    hardness: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if self.record is not None:
            careful = "" if self.collapsed is None else f" ({self.collapsed})"
            return f"R@1 {self.record.show('R@1')}, ERS {self.record.show('ERS')}{careful}"
        if self.collapsed is not None:
            return f"collapse: {self.collapsed}"
        return ", ".join(f"{name} {found['mean']:.3f}" for name, found in (self.hardness or {}).items())


def find_folders(out: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return where the cells of these `names` are in `out`: in it, or in a folder of it.

    A cell that is in neither is to be made in `out` itself. Records of several machines are put together by
    copying their folders into `out`; a cell that is there twice, with different results, is refused.

    >>> find_folders(Path("nowhere"), ["digits-NA-R-seed0-0a1b2c3d"])
    {'digits-NA-R-seed0-0a1b2c3d': PosixPath('nowhere/digits-NA-R-seed0-0a1b2c3d')}
    """
    places = [out, *sorted(p for p in _folders(out) if p.name not in names)]
    found: dict[str, Path] = {}
    for name in names:
        there = [place / name for place in places if (place / name).is_dir()]
        there = [folder for folder in there if _result(folder)] or there
        if any(_result(folder) != _result(there[0]) for folder in there):
            raise UserError(
                f"there are {len(there)} records for one cell: {', '.join(map(str, there))}; keep one, and "
                "move the others away",
                parameter="out",
            )
        found[name] = there[0] if there else out / name
    return found


def find_jobs(tasks: Iterable[Task], scale: Scale, out: Path) -> dict[Job, Outcome | None]:
    """Return the job of each different cell among `tasks`, with its outcome if it is finished in `out`."""
    names = {scale.name(task): task for task in dict.fromkeys(tasks)}
    folders = find_folders(out, list(names))
    jobs = [Job(task, scale, folders[name]) for name, task in names.items()]
    return {job: read_outcome(job.task, scale, job.folder) for job in jobs}


def _result(folder: Path) -> dict[str, Any]:
    """Return what a cell came to, as its description says; nothing if it is not finished."""
    about = read_result(folder) or {}
    return {key: about[key] for key in ("records", "collapsed", "hardness") if about.get(key)}


def _folders(out: Path) -> Iterator[Path]:
    if out.is_dir():
        yield from (path for path in out.iterdir() if path.is_dir())


def read_outcome(task: Task, scale: Scale, folder: Path) -> Outcome | None:
    """Return what a cell in `folder` came to, None if it is not finished; refuse what is not of this cell."""
    about, place = read_result(folder), evaluation_of(folder, scale)
    if about is None:
        if (place / RECORD).exists():
            raise _stranger(folder, [f"it has no {RESULT}, which says what its record is of"])
        return None
    now = json.loads(json.dumps(described(task, scale)))
    if wrong := differences({key: about.get(key) for key in now}, now):
        raise _stranger(folder, wrong)
    if about.get("hardness") or about.get("collapsed"):
        return Outcome(folder, collapsed=about.get("collapsed"), hardness=about.get("hardness"))
    made = about.get("records", {}).get(place.name)
    if made is None or not (place / RECORD).exists():
        return None
    try:
        record = load_record(place)
    except UserError as error:
        raise UserError(f"{error}; move {folder} away, and run the same command again") from None
    if record.sha256 != made:
        raise _stranger(folder, [f"its {RECORD} is another one than was made"])
    return Outcome(
        folder, record, record.ers.why if record.ers is not None and not record.ers.valid else None
    )


def evaluation_of(folder: Path, scale: Scale) -> Path:
    """Return where the cell in `folder` is evaluated at a `scale`: another one does not train it again.

    >>> evaluation_of(Path("cell"), Scale()), evaluation_of(Path("cell"), Scale(queries=500))
    (PosixPath('cell/run/evaluation'), PosixPath('cell/run/evaluation-500-32'))
    """
    usual = run_of(folder).evaluation
    if (scale.queries, scale.steps) == (None, Scale.steps):
        return usual
    return usual.with_name(f"{usual.name}-{scale.queries or 'all'}-{scale.steps}")


def run_of(folder: Path) -> RunFolder:
    """Return the run of the cell in `folder`.

    >>> run_of(Path("cell"))
    RunFolder('cell/run')
    """
    return RunFolder(folder / "run")


def described(task: Task, scale: Scale) -> dict[str, Any]:
    """Return what a cell's folder says of it: what its result depends on, and the version that made it."""
    return {"cell": task.label, "identity": scale.identity(task), "version": __version__}


def write_result(task: Task, scale: Scale, folder: Path, **result: Any) -> None:
    """Write down what a cell in `folder` is, and its `result`; what was written before is kept."""
    before = read_result(folder) or {}
    if "records" in result:
        result["records"] = {**before.get("records", {}), **result["records"]}
    folder.mkdir(parents=True, exist_ok=True)
    save(
        folder / RESULT,
        json.dumps({**before, **described(task, scale), **result}, indent=1, ensure_ascii=False),
    )


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return what the cell in `folder` says of itself; None if it holds none. A damaged one is refused.

    >>> read_result(Path("nowhere"))
    """
    try:
        return load_entries(folder / RESULT, sealed=False) if (folder / RESULT).exists() else None
    except DamagedError as error:
        raise DamagedError(f"{error}; move {folder} away, and run the same command again") from None


def _stranger(folder: Path, wrong: Sequence[str]) -> UserError:
    return UserError(
        f"{folder} does not belong to its cell: {'; '.join(wrong)}; move it away, and run the same command "
        "again",
        parameter="out",
    )
