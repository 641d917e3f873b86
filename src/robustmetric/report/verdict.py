"""What records come to, in two sentences: how robust the networks are, and how far to trust that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from robustmetric.evaluation import Record
from robustmetric.report.records import differing, eps_of

_HARMLESS = ("suite", "versions")  # conditions in which records may differ and their ERS still compare
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
    low, high = _interval(record)
    return record.show("ERS") + ("" if low is None or high is None else f" ({low:.1f} to {high:.1f})")


def finds(name: str, record: Record) -> str:
    """Return how often the network of a `record`, called `name`, finds the right class, to go on from."""
    if record.show("R@1") == "-":
        return f"No query of {name} has an image of its class to find"
    return f"{name} finds an image of the right class first for {record.show('R@1')} % of its queries"


def _alone(name: str, record: Record) -> str:
    told = finds(name, record)
    kept = _kept(record)
    if kept is not None:
        worst = record.suite is not None and "misrank" in record.suite.goals
        simple = listed([attack for score, attack in RECALLS.items() if score in record.scores])
        how = "in the worst case, when an attacker" if worst else f"under {simple}, which"
        told += f", and for {kept:.1f} % of those attacked {how} may change {may_change(record)}"
    if counts(record):
        told += f"{': ' if kept is not None else ', with '}ERS {with_interval(record)} of 100"
    return f"{told}."


def _beside(named: Mapping[str, Record]) -> str:
    if differing(named).keys() - set(_HARMLESS):
        return f"These networks were not tested alike, so that their scores do not compare: {_each(named)}."
    scored = sorted((pair for pair in named.items() if counts(pair[1])), key=lambda pair: -pair[1]["ERS"])
    if len(scored) < 2:
        return f"Shares of queries that find an image of the right class first: {_each(named)}."
    (best, top), (second, other) = scored[:2]
    ahead = f"ERS {with_interval(top)} at R@1 {top.show('R@1')}"
    behind = f"ERS {with_interval(other)} at R@1 {other.show('R@1')}"
    low, high = _interval(top)[0], _interval(other)[1]
    if low is None or high is None or low <= high:
        told = f"{best} and {second} are not told apart by the intervals of their ERS under attacks"
    elif len(scored) == 2:
        told = f"{best} keeps its ranking better than {second} under attacks"
    else:
        told = f"Of {len(scored)} networks {best} keeps its ranking best, before {second}, under attacks"
    return f"{told} that may change {may_change(top)}: {ahead}, against {behind}."


def _each(named: Mapping[str, Record]) -> str:
    told = [f"{name} {_scores(record)}" for name, record in named.items()]
    rest = [f"{len(told) - _NAMED} more below"] if len(told) > _NAMED else []
    return "; ".join([*told[:_NAMED], *rest])


def _scores(record: Record) -> str:
    kept = _kept(record)
    told = f"R@1 {record.show('R@1')}"
    if kept is not None:
        told += f", {kept:.1f} under attack"
    return f"{told}, ERS {with_interval(record)}" if counts(record) else told


def _trust(named: Mapping[str, Record]) -> str:
    """Return what failed, else what warns, and whose scores were not checked, in a sentence."""
    failed = [n for n, r in named.items() if {c.name for c in r.checks if c.status == "fail"} - {"collapse"}]
    invalid = {name: record.ers.why for name, record in named.items() if record.ers and not record.ers.valid}
    fallen = {name: why.rstrip(".") for name, why in invalid.items() if name not in failed}
    told = []
    if fallen:
        why = "; ".join(dict.fromkeys(fallen.values()))
        told.append(f"the ERS of {listed([*fallen])} is not valid: {why}")
    others = {name: record for name, record in named.items() if name not in fallen}
    alarm = _alarm(others, "fail", len(named)) or _alarm(others, "warn", len(named))
    if alarm:
        told.append(alarm)
    if without := [name for name in failed if name in invalid]:
        told[-1] += (
            f", so the ERS{'' if len(without) == len(named) else f' of {listed(without)}'} is not valid"
        )
    unchecked = [name for name, record in others.items() if record.unchecked]
    if not told and len(unchecked) == len(named):
        return "No checks were run, so nothing says how far to trust these scores."
    if unchecked:
        told.append(f"the scores of {listed(unchecked)} were not checked")
    if not fallen and not alarm:
        count = sum(c.status == "pass" for n, r in named.items() if n not in unchecked for c in r.checks)
        of = "of the others " if unchecked else ""
        told.append(f"{of}all {count} checks of whether to trust these scores passed")
    sentence = "; ".join(told)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _alarm(named: Mapping[str, Record], status: str, of: int) -> str:
    """Return which checks of `named` records, some of so many, ended with a `status`; empty if none did."""
    found: dict[str, list[str]] = {}
    for name, record in named.items():
        for check in (check for check in record.checks if check.status == status):
            found.setdefault(check.name, []).append(name)
    if not found:
        return ""
    told = [
        f"“{check}”" if len(names) == of else f"“{check}” (of {listed(names)})"
        for check, names in found.items()
    ]
    which = f"the check {told[0]}" if len(told) == 1 else f"the checks {listed(told)}"
    if status == "fail":
        return f"do not trust these scores: {which} failed"
    return f"read these scores with care: {which} {'warns' if len(told) == 1 else 'warn'}"


def counts(record: Record) -> bool:
    """Return whether a `record` has an ERS that says something."""
    return record.ers is not None and record.ers.valid and not math.isnan(record["ERS"])


def _interval(record: Record) -> tuple[float | None, float | None]:
    return (None, None) if record.ers is None else (record.ers.low, record.ers.high)


def _kept(record: Record) -> float | None:
    """Return R@1 under the strongest attack that was run, in %."""
    known = [record[name] for name in RECALLS if name in record.scores]
    if record.suite is not None and "misrank" in record.suite.goals:
        known.append(record["misrank"])
    return min((value for value in known if not math.isnan(value)), default=None)


def may_change(record: Record) -> str:
    """Return what the attacks of a `record` may change, as the end of a sentence."""
    if record.settings.norm == "linf":
        return f"each pixel by up to {eps_of(record)}"
    return f"an image by a length of up to {record.settings.eps:.4g}"
