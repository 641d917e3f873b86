"""Records side by side: read, of one protocol, each with a name of its own, and what they were made under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from robustmetric.errors import UserError
from robustmetric.evaluation import Certificate, Record, Settings, Verification, load_record


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
    while parts and all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
        common += 1
    return [
        name if names.count(name) == 1 else f"{name} ({Path(*part[common:])})"
        for name, part in zip(names, parts, strict=True)
    ]


def data_of(record: Record | Certificate | Verification) -> str:
    """Return the name of the data set of a `record`, and the size of its images."""
    return f"{record.data.name} {record.data.shape[1]}×{record.data.shape[2]}"


def eps_of(record: Record) -> str:
    """Return the ε of a `record`, in levels of 255, or as a length of the norm L2."""
    return eps_of_plan(record.settings)


def eps_of_plan(plan: Settings) -> str:
    """Return the ε of a `plan`, in levels of 255, or as a length of the norm L2.

    >>> eps_of_plan(Settings(eps=0.2)), eps_of_plan(Settings(eps=1.5, norm="l2", search="apgd"))
    ('51/255', '1.5 (L2)')
    """
    return f"{255 * plan.eps:.4g}/255" if plan.norm == "linf" else f"{plan.eps:.4g} (L2)"


def alpha_of(record: Record) -> str:
    """Return the α of a `record` as `eps_of` returns its ε."""
    return alpha_of_plan(record.settings)


def alpha_of_plan(plan: Settings) -> str:
    """Return the α of a `plan` as `eps_of_plan` returns its ε.

    >>> alpha_of_plan(Settings(alpha=3 / 255))
    '3/255'
    """
    return f"{255 * plan.alpha:.4g}/255" if plan.norm == "linf" else f"{plan.alpha:.4g}"


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
    """Return the conditions that `named` records differ in, and what each of them has.

    >>> differing({})
    {}
    """
    found = {name: conditions(record) for name, record in named.items()}
    kinds = next(iter(found.values()), {})
    return {
        what: ", ".join(f"{name}: {each[what]}" for name, each in found.items())
        for what in kinds
        if len({each[what] for each in found.values()}) > 1
    }
