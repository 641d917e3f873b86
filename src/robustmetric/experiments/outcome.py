"""What became of a cell: read from its folder, and refused if it is of something else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robustmetric import __version__
from robustmetric.evaluation.identity import differences
from robustmetric.evaluation.record import Record, load_record
from robustmetric.evaluation.store import RECORD
from robustmetric.experiments.cells import Cell, Scale, Task
from robustmetric.files import DamagedError, digest_of_entries, write_atomically, writing
from robustmetric.training.runs import RunFolder
from robustmetric.validate import UserError

RESULT = "cell.json"
"""The file in a cell's folder that says what it is, and what came of it if that is no record."""


@dataclass(frozen=True)
class Outcome:
    """What a finished cell in `folder` came to: a `record`, a collapse, or the hardness of the samplers.

    `collapsed` says how the training collapsed. `hardness` has mean, variance and histogram by sampler.
    `seconds` are those that it took, as far as that is known.
    """

    folder: Path
    record: Record | None = None
    collapsed: str | None = None
    hardness: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] | None = None

    def __str__(self) -> str:
        if self.record is not None and self.collapsed is None:
            return f"R@1 {self.record.show('R@1')}, ERS {self.record.show('ERS')}"
        if self.collapsed is not None:
            return f"collapse: {self.collapsed}"
        return ", ".join(f"{name} {found['mean']:.3f}" for name, found in (self.hardness or {}).items())


def find_folders(out: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return where the cells of these `names` are in `out`: in it, or in a folder of it.

    A cell that is in neither is to be made in `out` itself. Records of several machines are put together by
    copying their folders into `out`; a cell that is finished twice is refused.

    >>> find_folders(Path("nowhere"), ["digits-NA-R-seed0-0a1b2c3d"])
    {'digits-NA-R-seed0-0a1b2c3d': PosixPath('nowhere/digits-NA-R-seed0-0a1b2c3d')}
    """
    places = [out, *sorted(p for p in _folders(out) if p.name not in names)]
    found: dict[str, Path] = {}
    for name in names:
        there = [place / name for place in places if (place / name).is_dir()]
        there = [folder for folder in there if _finished(folder)] or there
        if len(there) > 1:
            raise UserError(
                f"there are {len(there)} records for one cell: {', '.join(map(str, there))}; keep one, and "
                "move the others away",
                parameter="out",
            )
        found[name] = there[0] if there else out / name
    return found


def _finished(folder: Path) -> bool:
    return (run_of(folder).evaluation / RECORD).exists() or not {"collapsed", "hardness"}.isdisjoint(
        read_result(folder) or ()
    )


def _folders(out: Path) -> Iterator[Path]:
    if out.is_dir():
        yield from (path for path in out.iterdir() if path.is_dir())


def read_outcome(task: Task, scale: Scale, folder: Path) -> Outcome | None:
    """Return what a cell in `folder` came to, None if it is not finished; refuse what is not of this cell."""
    about = read_result(folder)
    if about is None:
        if (run_of(folder).evaluation / RECORD).exists():
            raise _stranger(folder, [f"it has no {RESULT}, which says what its record is of"])
        return None
    now = json.loads(json.dumps(described(task, scale)))
    if wrong := differences({key: about.get(key) for key in now}, now):
        raise _stranger(folder, wrong)
    if "collapsed" in about or "hardness" in about:
        return Outcome(
            folder,
            collapsed=about.get("collapsed"),
            hardness=about.get("hardness"),
            seconds=about.get("seconds"),
        )
    if not isinstance(task, Cell):
        return None
    run = run_of(folder)
    if not (run.evaluation / RECORD).exists():
        return None
    record = load_record(run.evaluation)
    if wrong := list(_foreign(task, scale, run, record)):
        raise _stranger(folder, wrong)
    collapsed = None
    if record.ers is not None and not record.ers.valid:
        collapsed = record.ers.why
    return Outcome(folder, record, collapsed=collapsed, seconds=about.get("seconds"))


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
    """Write down what a cell in `folder` is, and its `result` if that is no record.

    What was written before is kept; `seconds` are added to those of earlier starts.
    """
    before = read_result(folder) or {}
    spent = dict(before.get("seconds", {}))
    for what, seconds in result.pop("seconds", {}).items():
        spent[what] = round(spent.get(what, 0.0) + seconds, 1)
    content = {**before, **described(task, scale), **result, "seconds": spent}
    text = json.dumps({**content, "sha256": digest_of_entries(content)}, indent=1, ensure_ascii=False)
    with writing(folder / RESULT, "then run the same command again: what is finished is kept"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RESULT, lambda file: file.write(f"{text}\n".encode()))


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return what the cell in `folder` says of itself; None if it holds none. A damaged one is refused.

    >>> read_result(Path("nowhere"))
    """
    return _read(folder / RESULT)


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.pop("sha256", None) != digest_of_entries(found):
        raise DamagedError(
            f"{file} is damaged, or was changed by hand: its digest does not match; move {file.parent} away, "
            "and run the same command again"
        )
    return found


def _foreign(task: Cell, scale: Scale, run: RunFolder, record: Record) -> Iterator[str]:
    """Say in what a record is not that of a cell: its settings, the weights, the version."""
    wanted = scale.plan(task)
    yield from record.settings.differences(wanted)
    if record.versions.get("robustmetric") != __version__:
        yield f"the version was {record.versions.get('robustmetric')}, is {__version__}"
    if record.network.weights != "last weights":
        yield f"the weights are {record.network.weights}, not the last ones"
    if not run.exists:
        yield f"it has no {run.recipe_file.name}"


def _stranger(folder: Path, wrong: Sequence[str]) -> UserError:
    return UserError(
        f"{folder} does not belong to its cell: {'; '.join(wrong)}; move it away, and run the same command "
        "again",
        parameter="out",
    )
