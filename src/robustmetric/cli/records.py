"""Records that commands put side by side: read, of one protocol, and each with a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from robustmetric.evaluation import Record, load_record
from robustmetric.validate import UserError


def load_records(paths: Sequence[Path]) -> list[Record]:
    """Read the records at `paths`; those of different protocols are refused."""
    records = [_loaded(path) for path in paths]
    protocols = {str(path): record.settings.protocol for path, record in zip(paths, records, strict=True)}
    if len(set(protocols.values())) > 1:
        told = ", ".join(f"{name} is {protocol}" for name, protocol in protocols.items())
        raise UserError(f"records of different protocols are never compared: {told}")
    return records


def _loaded(path: Path) -> Record:
    try:
        return load_record(path)
    except UserError as error:
        raise UserError(f"{error}; evaluate again, or leave {path} out") from None


def told_apart(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return `names`, with the part of the path behind those that repeat in which `paths` differ.

    >>> told_apart(["c2f2", "c2f2", "mine"], [Path("runs/a"), Path("runs/b"), Path("runs/c")])
    ['c2f2 (a)', 'c2f2 (b)', 'mine']
    """
    parts = [path.parts for path in paths]
    common = 0
    while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
        common += 1
    return [
        name if names.count(name) == 1 else f"{name} ({Path(*part[common:])})"
        for name, part in zip(names, parts, strict=True)
    ]
