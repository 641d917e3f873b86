"""What became of a cell: read from its folder, and refused if it is of something else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robustmetric import __version__
from robustmetric.errors import UserError
from robustmetric.evaluation.identity import differences
from robustmetric.evaluation.record import RECORD, Record, load_record
from robustmetric.experiments.cells import Cell, Scale, Task
from robustmetric.files import DamagedError, digest_of_entries, write_atomically, writing
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import bare, read_file

RESULT = "cell.json"
"""The file in a cell's folder that says what it is, and what came of it if that is no record."""


@dataclass(frozen=True)
class Outcome:
    """What a finished cell in `folder` came to: a `record`, a collapse, or the hardness of the samplers.

    `collapsed` says how the network collapsed; it has no record where nothing could be scored. `hardness` has
    the statistics by sampler. `seconds` are those that it took, as far as that is known.
    """

    folder: Path
    record: Record | None = None
    collapsed: str | None = None
    hardness: Mapping[str, Any] | None = None
    seconds: Mapping[str, float] | None = None

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
    seconds = about.get("seconds")
    if about.get("hardness") or about.get("collapsed"):
        return Outcome(
            folder, collapsed=about.get("collapsed"), hardness=about.get("hardness"), seconds=seconds
        )
    made = about.get("records", {}).get(place.name)
    if not isinstance(task, Cell) or made is None or not (place / RECORD).exists():
        return None
    try:
        record = load_record(place)
    except UserError as error:
        raise UserError(f"{error}; move {folder} away, and run the same command again") from None
    if wrong := list(_foreign(task, scale, run_of(folder), record, made)):
        raise _stranger(folder, wrong)
    collapsed = record.ers.why if record.ers is not None and not record.ers.valid else None
    return Outcome(folder, record, collapsed=collapsed, seconds=seconds)


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
    """Write down what a cell in `folder` is, and its `result` if that is no record.

    What was written before is kept, `records` of other evaluations too; `seconds` are added to those of
    earlier starts.
    """
    before = read_result(folder) or {}
    if "records" in result:
        result["records"] = {**before.get("records", {}), **result["records"]}
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


def _foreign(task: Cell, scale: Scale, run: RunFolder, record: Record, made: str) -> Iterator[str]:
    """Say in what a record is not that of a cell: its settings, the weights, the version, the run."""
    wanted, found = scale.plan(task).settings, record.settings
    yield from differences(wanted.model_dump(mode="json"), found.model_dump(mode="json"))
    if record.versions.get("robustmetric") != __version__:
        yield f"the version was {record.versions.get('robustmetric')}, is {__version__}"
    if record.network.weights != "last weights":
        yield f"the weights are {record.network.weights}, not the last ones"
    if not run.exists:
        yield f"it has no {run.recipe_file.name}"
        return
    entries = [bare(read_file(run.recipe_file)), bare(scale.recipe(task).model_dump(mode="json"))]
    for entry in ("root", "weights"):  # which may lie elsewhere
        for one in entries:
            one.pop(entry, None)
    yield from differences(entries[0], json.loads(json.dumps(entries[1])))
    if record.sha256 != made:
        yield f"its {RECORD} is another one than was made"


def _stranger(folder: Path, wrong: Sequence[str]) -> UserError:
    return UserError(
        f"{folder} does not belong to its cell: {'; '.join(wrong)}; move it away, and run the same command "
        "again",
        parameter="out",
    )
