"""What records come to, in two sentences: how robust the networks are, and how far to trust that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from robustmetric.evaluation import Record
from robustmetric.report.records import differing, eps_of

_HARMLESS = {"suite", "versions"}  # conditions in which records may differ and their ERS still compare
_NAMED = 4  # networks of a sentence; of more, only how many there are

RECALLS = {"ES:R": "ES", "LTM": "LTM", "GTM": "GTM"}
"""The scores of the ERS that are R@1 under an attack, and the attacks."""


def verdict(named: Mapping[str, Record]) -> tuple[str, str]:
    """Return what `named` records come to: how robust their networks are, and how far to trust that."""
    first = _alone(*next(iter(named.items()))) if len(named) == 1 else _beside(named)
    return first, _trust(named)


def listed(words: Sequence[str]) -> str:
    """Return `words` as they are listed in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def with_interval(record: Record) -> str:
    """Return the ERS of a `record` with its interval, if that is known."""
    low, high = (None, None) if record.ers is None else (record.ers.low, record.ers.high)
    return record.show("ERS") + ("" if low is None or high is None else f" ({low:.1f} to {high:.1f})")


def finds(name: str, record: Record) -> str:
    """Return how often the network of a `record`, called `name`, finds the right class, to go on from."""
    if record.show("R@1") == "-":
        return f"No query of {name} has an image of its class to find"
    return f"{name} finds an image of the right class first for {record.show('R@1')} % of its queries"


def survivors(record: Record) -> str:
    """Return how many queries of a `record` survive the worst case, or all of ES, LTM and GTM.

    A query survives if an image of its class still comes first. Empty if nothing of this was measured.
    """
    worst = None if record.suite is None else record.suite.goals.get("misrank")
    if worst is not None and worst.value is not None:
        return f"{worst.value:.1f} % survive the worst case"
    known = {name: record[score] for score, name in RECALLS.items() if score in record.scores}
    known = {name: value for name, value in known.items() if not math.isnan(value)}
    if not known:
        return ""
    # Each attack breaks other queries: what survives all of them is no more than the least.
    least, most = min(known.values()), "at most " if len(known) > 1 else ""
    every = {1: "", 2: "both ", 3: "all three of "}[len(known)]
    return f"{most if least > 0 else ''}{least:.1f} % survive {every}{listed([*known])}"


def counts(record: Record) -> bool:
    """Return whether a `record` has an ERS that says something."""
    return record.ers is not None and record.ers.valid and not math.isnan(record["ERS"])


def may_change(record: Record) -> str:
    """Return what the attacks of a `record` may change, as the end of a sentence."""
    if record.settings.norm == "linf":
        return f"each pixel by up to {eps_of(record)}"
    return f"an image by a length of up to {record.settings.eps:.4g}"


def _alone(name: str, record: Record) -> str:
    told = finds(name, record)
    if left := survivors(record):
        told += f"; {left}, which may change {may_change(record)}"
    return f"{told}; ERS {with_interval(record)} of 100." if counts(record) else f"{told}."


def _beside(named: Mapping[str, Record]) -> str:
    if differing(named).keys() - _HARMLESS:
        return f"These networks were tested under different conditions, so do not compare: {_each(named)}."
    scored = sorted((pair for pair in named.items() if counts(pair[1])), key=lambda pair: -pair[1]["ERS"])
    if len(scored) < 2:
        return f"Queries that find an image of the right class first: {_each(named)}."
    (best, top), (second, other) = scored[:2]
    low, high = (None, None) if top.ers is None or other.ers is None else (top.ers.low, other.ers.high)
    if low is None or high is None or low <= high:
        told = f"The intervals of {best} and {second} overlap"
    elif len(scored) == 2:
        told = f"{best} keeps its ranking better than {second}"
    else:
        told = f"Of {len(scored)} networks {best} keeps its ranking best, before {second}"
    both = [f"ERS {with_interval(one)} at R@1 {one.show('R@1')}" for one in (top, other)]
    return f"{told} under attacks that may change {may_change(top)}: {both[0]} against {both[1]}."


def _each(named: Mapping[str, Record]) -> str:
    told = []
    for name, record in named.items():
        ers = f", ERS {with_interval(record)}" if counts(record) else ""
        told.append(f"{name} R@1 {record.show('R@1')}{ers}")
    return "; ".join([*told[:_NAMED], *([f"{len(told) - _NAMED} more below"] if len(told) > _NAMED else [])])


def _trust(named: Mapping[str, Record]) -> str:
    """Return what is not valid, what failed, else what warns, and whose scores were not checked."""
    told = []
    broken = {n: {c.name for c in r.checks if c.status == "fail"} - {"collapse"} for n, r in named.items()}
    invalid = {
        name: record.ers.why.rstrip(".")
        for name, record in named.items()
        if record.ers is not None and not record.ers.valid and not broken[name]
    }
    if invalid:
        why = "; ".join(dict.fromkeys(invalid.values()))
        told.append(f"the ERS of {listed([*invalid])} is not valid: {why}")
    others = {name: record for name, record in named.items() if name not in invalid}
    if failed := _checks(others, "fail", len(named)):
        told.append(f"do not trust these scores: {failed} failed")
    elif warned := _checks(others, "warn", len(named)):
        told.append(f"read these scores with care: {warned} warned")
    unchecked = [name for name, record in others.items() if record.unchecked]
    if not told and len(unchecked) == len(named):
        return "No checks were run, so nothing says how far to trust these scores."
    if unchecked:
        told.append(f"the scores of {listed(unchecked)} were not checked")
    elif not told:
        count = sum(check.status == "pass" for record in named.values() for check in record.checks)
        told.append(f"all {count} checks passed")
    sentence = "; ".join(told)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _checks(named: Mapping[str, Record], status: str, of: int) -> str:
    """Return which checks of `named` records, some of so many, ended with a `status`; empty if none did."""
    found: dict[str, list[str]] = {}
    for name, record in named.items():
        for check in (check for check in record.checks if check.status == status):
            found.setdefault(check.name, []).append(name)
    told = [f"“{c}”" if len(names) == of else f"“{c}” (of {listed(names)})" for c, names in found.items()]
    return f"the check{'s' * (len(told) > 1)} {listed(told)}" if told else ""
