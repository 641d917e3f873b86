"""Records side by side: of one protocol, each with a name of its own, and the conditions they differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from robustmetric.errors import UserError
from robustmetric.evaluation import Certificate, Record, Settings, Verification, load_record


def named_records(paths: Sequence[Path]) -> dict[str, Record]:
    """Read the records at `paths`, each with a name of its own; those of different protocols are refused."""
    records = []
    for path in paths:
        try:
            records.append(load_record(path))
        except UserError as error:
            raise UserError(f"{error}; evaluate again, or leave {path} out") from None
    if len({record.settings.protocol for record in records}) > 1:
        found = zip(paths, records, strict=True)
        told = ", ".join(f"{path} is {record.settings.protocol}" for path, record in found)
        raise UserError(f"records of different protocols are never compared: {told}")
    names = told_apart([record.network.name.strip() or "network" for record in records], paths)
    return dict(zip(names, records, strict=True))


def told_apart(names: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return distinct names: those that repeat get the part in which the `paths` differ, or a number.

    >>> told_apart(["c2f2", "c2f2", "mine"], [Path("runs/a"), Path("runs/b"), Path("runs/c")])
    ['c2f2 (a)', 'c2f2 (b)', 'mine']
    >>> told_apart(["mine", "mine"], [Path("a"), Path("a")])
    ['mine (a)', 'mine (a) #2']
    """
    parts = [path.parts for path in paths]
    common = 0
    while parts and all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
        common += 1
    found: list[str] = []
    for name, part in zip(names, parts, strict=True):
        told = other = name if names.count(name) == 1 else f"{name} ({Path(*part[common:])})"
        number = 2
        while other in found:
            other, number = f"{told} #{number}", number + 1
        found.append(other)
    return found


def data_of(record: Record | Certificate | Verification) -> str:
    """Return the name of the data set of a `record`, and the size of its images."""
    return f"{record.data.name} {record.data.shape[1]}×{record.data.shape[2]}"


def eps_of(record: Record | Settings) -> str:
    """Return the ε of a `record` or of its settings, in levels of 255, or as a length of the norm L2.

    >>> eps_of(Settings(eps=0.2)), eps_of(Settings(eps=1.5, norm="l2", search="apgd"))
    ('51/255', '1.5 (L2)')
    """
    how = record.settings if isinstance(record, Record) else record
    return f"{255 * how.eps:.4g}/255" if how.norm == "linf" else f"{how.eps:.4g} (L2)"


def alpha_of(record: Record | Settings) -> str:
    """Return the α of a `record` or of its settings as `eps_of` returns its ε."""
    how = record.settings if isinstance(record, Record) else record
    return f"{255 * how.alpha:.4g}/255" if how.norm == "linf" else f"{how.alpha:.4g}"


def conditions(record: Record) -> dict[str, str]:
    """Return the conditions that the scores of a `record` were measured under: only equal ones compare."""
    how, asked, surrogate = record.settings, record.queries, record.network.surrogate
    return {
        "data": f"{data_of(record)}, {record.data.images} images of {record.data.classes} classes, "
        f"SHA-256 {record.data.sha256[:12]}",
        "ε": eps_of(record),
        "α": alpha_of(record),
        "η": str(how.steps),
        "suite": how.suite,
        "search": how.search,
        "surrogate": "none" if surrogate is None else f"SHA-256 {surrogate[:12]}",
        "queries": f"{asked.count} of {asked.of}, seed {how.seed}",
        "versions": ", ".join(f"{p} {record.versions.get(p)}" for p in ("robustmetric", "torch")),
    }


def differing(named: Mapping[str, Record]) -> dict[str, str]:
    """Return the conditions that `named` records differ in, and what each of them has."""
    found = {name: conditions(record) for name, record in named.items()}
    return {
        what: ", ".join(f"{name}: {each[what]}" for name, each in found.items())
        for what in next(iter(found.values()), {})
        if len({each[what] for each in found.values()}) > 1
    }
