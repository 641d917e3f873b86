"""Records of given scores, without an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robustmetric.evaluation import COLUMNS, Check, Plan, Record, ers, terms
from robustmetric.evaluation.record import FORMAT, failures
from tests.conftest import GOLDEN

CLEAN = ("R@1", "R@2", "mAP", "NMI")
SCORES: dict[str, float] = {
    **dict(zip(CLEAN, (37.2, 47.8, 21.4, 48.4), strict=True)),
    **dict(zip(COLUMNS, (12.9, 40.9, 14.7, 33.7, 0.806, 0.487, 17.1, 13.2, 26.3, 2.3), strict=True)),
}
"""The paper's HM[S,LGA]&ICS with η = 8 on CUB, whose ERS is 33.5."""
GOAL: dict[str, Any] = {
    "value": 7.4, "low": 4.3, "high": 10.6, "before": 98.4, "alone": 7.9, "better": "higher", "unit": "%",
    "queries": 9, "forward": 9, "backward": 9, "undropped": 9, "attacks": [],
}  # fmt: skip
"""A goal of the worst case."""


def a_record(
    changes: Mapping[str, float] | None = None,
    *,
    width: float = 1.0,
    name: str = "c2f2 HM[S,LGA]&ICS",
    data: str = "digits",
    protocol: str = "reference",
    why: str = "",
    attacks: bool = True,
) -> Record:
    """Make a record of the paper's scores with some `changes`; intervals reach `width` points to both sides.

    `why` says why its ERS is not valid.
    """
    scores = {**SCORES, **(changes or {})}
    each: dict[str, dict[str, float | None]] = {
        n: {"value": v, "low": v - width / p, "high": v + width / p}
        for n, v in scores.items()
        for p in [COLUMNS[n].unit.points if n in COLUMNS else 1]
    }
    each["NMI"] |= {"low": None, "high": None}
    ten = {n: {**each[n], "better": c.better, "unit": c.unit.name} for n, c in COLUMNS.items()}
    found = {n: float(v) for n, v in terms(scores, protocol="reference").items()}
    value = scores.get("ERS", ers(scores, protocol="reference"))
    overall = {"value": value, "low": value - width, "high": value + width, "terms": found}
    return FORMAT.make(
        {
            "network": {"name": name, "parameters": 1, "sha256": "0" * 64, "weights": "last weights"},
            "data": {"name": data, "images": 9, "classes": 3, "shape": [1, 8, 8], "sha256": "0" * 64},
            "settings": Plan.make(protocol=protocol, checks="none").settings,
            "queries": {"count": 9, "of": 9, "left_out": 0},
            "retrieval": {n: each[n] for n in CLEAN},
            "scores": ten if attacks else {},
            "ers": {**overall, "valid": not why, "why": why} if attacks else None,
            "checks": [Check(name="collapse", status="pass", figure=0, limit="none", says="none")],
            "versions": {"robustmetric": "0", "torch": "0"},
        },
        b"",
    )


def altered(record: Record, **entries: Any) -> Record:
    """Return a record with some entries changed, those of objects one by one, and its digest.

    Its ERS is not valid if a check failed.
    """
    content = _merged(record.model_dump(mode="json", by_alias=True), entries)
    made = Record(**{**content, "sha256": None})
    if made.ers is not None and (why := failures(made.checks)):
        made = made.model_copy(update={"ers": made.ers.model_copy(update={"valid": False, "why": why})})
    return made.sealed()


def golden(name: str) -> Record:
    """Read a golden record, with what records tell today: how columns are read, and a digest."""
    content = json.loads((GOLDEN / "records" / name / "record.json").read_text(encoding="utf-8"))
    for column in Plan.make(**content["settings"]).columns.values():
        content["scores"][column.name] |= {"better": column.better, "unit": column.unit.name}
    return Record(**content).sealed()


def _merged(before: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = {k for k, v in changes.items() if isinstance(v, dict) and isinstance(before.get(k), dict)}
    return {**before, **changes, **{k: _merged(before[k], changes[k]) for k in both}}


def written(record: Record, folder: Path) -> Path:
    """Write a record into a folder of its own, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record.model_dump(mode="json", by_alias=True))
    (folder / "record.json").write_text(text, encoding="utf-8")
    return folder
