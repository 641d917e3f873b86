"""Records and pictures whose every text tries to be something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from robustmetric.evaluation import Plan, Record
from robustmetric.report.pictures import PICTURES
from tests.helpers.pictured import pictured, seal
from tests.helpers.records import GOAL, a_record, altered, written

HOSTILE = (
    "=1+1 <script>alert(1)</script> \"a\" 'b' &amp; & </style></title></textarea> "
    "<img src=x onerror=alert(1)> <!-- {{ 7 * 7 }} javascript:alert(1) \x1b[2J\x07 \u202e\u2066 ]]> "
    "<a href='javascript:alert(1)'>x</a>"
)
"""Text that is only text."""


def hostile(place: str) -> str:
    """The text with the name of its place behind it."""
    return f"{HOSTILE} {place}"


def hostile_record(**how: Any) -> Record:
    """A record with the text wherever a record has any."""
    score = {"value": 1.0, "low": 0.5, "high": 2.0, "before": 3.0, "better": None, "unit": hostile("unit")}
    broke = [{"attack": hostile("breaker"), "search": hostile("by"), "broke": 9.0}]
    goal = {**GOAL, "unit": hostile("unit"), "attacks": broke}
    said = {"name": hostile("check"), "figure": 1.0, "limit": hostile("limit"), "says": hostile("says")}
    checks = [{**said, "status": status} for status in ("warn", "pass")]
    settings = Plan.make(checks="none").settings.model_dump(mode="json") | {
        "attacks": [hostile("attack")], "search": hostile("search"), "suite": hostile("suite"),
    }  # fmt: skip
    return altered(
        a_record(name=hostile("network"), data=hostile("data"), **how),
        network={"weights": hostile("weights")},
        scores={hostile("column"): score},
        suite={"goals": {hostile("goal"): goal}},
        checks=checks,
        settings=settings,
        versions={hostile("package"): hostile("version")},
    )


def write_hostile(folder: Path) -> Path:
    """Write such a record with pictures whose names, classes and attacks are such texts as well."""
    record = hostile_record()
    written(record, folder)
    pictured(folder, record, ["ES"])
    content = json.loads((folder / PICTURES).read_text(encoding="utf-8"))
    for picture in content["pictures"]:
        picture["attack"] = hostile("attack")
        items = [picture["query"], *picture["targets"], *picture["before"], *picture["after"]]
        picture["asker"] = dict(picture["targets"][0]) if picture["why"] == "median" else None
        for item in (*items, *([picture["asker"]] if picture["asker"] else [])):
            item["name"], item["label"] = hostile("file"), hostile("class")
        picture["values"] = [[hostile("column"), "1.0", "2.0"]]
    shown = content["map"]
    shown["classes"] = [hostile(f"class {k}") for k in range(3)]
    shown["moves"] = {hostile("attack"): [[0.0, 0.0, 0.5, 0.5]]}
    seal(folder, content)
    return folder
