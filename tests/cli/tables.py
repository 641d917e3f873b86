"""What commands print, read back, and the options that tests of several commands give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from robustmetric.evaluation import Record
from tests.helpers.command import cells

PAPER = "R@1 ↑,R@2 ↑,mAP ↑,NMI ↑,CA+ ↑,CA− ↓,QA+ ↑,QA− ↓,TMA ↓,ES:D ↓,ES:R ↑,LTM ↑,GTM ↑,GTT ↑,ERS ↑"
SMALL = ("--queries", "12", "--steps", "3", "--batch", "5")
DIGITS = ("--data", "digits")
OTHER: dict[str, Any] = {"dim": 12, "defense": "N/A[S]", "eps": 0.1}
ONE = ("--queries", "6", "--steps", "2", "--checks", "none", "--attacks", "CA+")


def scores_in(text: str) -> dict[str, dict[str, str]]:
    """Read the tables of scores: for each network, the cells by their heads."""
    found: dict[str, dict[str, str]] = {}
    first, head = "", list[str]()
    for line in text.splitlines():
        if line.startswith("┃"):
            first, *head = cells(line)
        elif line.startswith("│") and not first:
            name, *values = cells(line)
            found.setdefault(name, {}).update(zip(head, values, strict=True))
    return found


BEFORE = "before the attack"


def expected(record: Record) -> dict[str, dict[str, str]]:
    """What the paper's columns of a record must show, by row."""
    found, before = {}, {}
    for head in PAPER.split(","):
        name = head.split()[0].replace("−", "-")
        if name in {**record.retrieval, **record.scores}:
            found[head] = record.show(name)
            before[head] = (
                record.column(name).show(record.scores[name].before) if name in record.scores else ""
            )
    if record.ers is not None:
        found["ERS ↑"] = record.show("ERS") + ("" if record.ers.valid else " invalid")
        before["ERS ↑"] = ""
    return {record.network.name: found, BEFORE: before}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("record.json", "queries.safetensors")}
