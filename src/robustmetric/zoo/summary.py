"""What a record comes to, in sentences of a model card: what attacks leave, and how far to trust that."""

from __future__ import annotations

import math
from collections.abc import Mapping

from robustmetric.evaluation import Record
from robustmetric.report.verdict import (
    RECALLS,
    counts,
    finds,
    listed,
    may_change,
    verdict,
    with_interval,
)


def headline(name: str, folder: str, records: Mapping[str, Record]) -> str:
    """Return how often a network called `name` finds the right class, and what attacks leave of that.

    `folder` names the one of `records` that is told of. Where that has no worst case, that of another record
    counts if it is of the same images and the same ε; else the attacks of the ERS are named.
    """
    record = records[folder]
    told = f"{finds(name, record)}{_left(folder, records)}."
    if counts(record):
        told += f" The ERS is {with_interval(record)} of 100."
    return told


def trust(name: str, record: Record) -> str:
    """Return how far to trust the scores of a `record`, whose network is called `name`."""
    wrong = any(check.status in ("warn", "fail") for check in record.checks)
    if not record.unchecked or wrong or (record.ers is not None and not record.ers.valid):
        return verdict({name: record})[1]
    if any(check.name == "collapse" and check.status == "pass" for check in record.checks):
        return "Only collapse was checked, and passes. Nothing else says how far to trust these scores."
    return "No checks were run, so nothing says how far to trust these scores."


def _left(folder: str, records: Mapping[str, Record]) -> str:
    """Return what attacks leave of R@1, as the rest of a sentence."""
    record = records[folder]
    may = f"when an attacker may change {may_change(record)}"
    for other in (folder, *records):
        if _is_alike(record, records[other]) and (worst := _misrank(records[other])) is not None:
            where = "" if other == folder else f" ({other})"
            return f", and for {worst:.1f} % of those attacked in the worst case{where}, {may}"
    known = {attack: record[score] for score, attack in RECALLS.items() if score in record.scores}
    known = {attack: value for attack, value in known.items() if not math.isnan(value)}
    if not known:
        return ""
    of = f"the least of {listed([*known])}" if len(known) > 1 else next(iter(known))
    return (
        f", and for {min(known.values()):.1f} % of those attacked {may}. That is under the attacks of the "
        f"ERS ({of}); strong attacks may leave far less"
    )


def _misrank(record: Record) -> float | None:
    """Return the worst case of R@1 in %, if it was measured."""
    goal = None if record.suite is None else record.suite.goals.get("misrank")
    return None if goal is None or goal.value is None or math.isnan(goal.value) else goal.value


def _is_alike(one: Record, other: Record) -> bool:
    """Return whether the attacks of two records may do the same to the same images."""
    same = one.data.sha256 == other.data.sha256 and one.settings.norm == other.settings.norm
    return same and one.settings.eps == other.settings.eps
