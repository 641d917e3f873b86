"""What was published: every row of the paper's tables, and what the reference's page once gave for 28×28."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

FOLDER = resources.files("robustmetric.experiments") / "published"
"""The files that hold the figures."""


@dataclass(frozen=True)
class Published:
    """A published row: its `table` (0 where it is of no table), `data`, `defense` and η (`steps`).

    `scores` are its columns by name, as far as they were given; `collapsed` says that there are none, for the
    network collapsed. `steps` is None for regular training. `joined` marks a row whose ten scores under
    attack are of another training than its other scores.

    >>> row = published()[1]
    >>> row.table, row.data, row.defense, row.steps, row.scores["ERS"]
    (3, 'cub', 'ACT[R]', 2, 5.8)
    """

    table: int
    data: str
    defense: str
    steps: int | None
    scores: Mapping[str, float] = field(default_factory=dict)
    collapsed: bool = False
    joined: bool = False


@cache
def published() -> tuple[Published, ...]:
    """Return every row of Tables 3 to 11 in the paper's order, then those of the reference's page.

    >>> len(published())
    120
    """
    return (*_read("paper.csv"), *_read("robrank.csv"))


@cache
def published_hardness() -> dict[tuple[str, str], tuple[float, float]]:
    """Return mean and variance of the hardness, by data set and sampler: Table 1.

    >>> published_hardness()["cub", "S"]
    (-0.085, 0.00122)
    """
    with (FOLDER / "samplers.csv").open(encoding="utf-8") as file:
        return {
            (row["data"], row["sampler"]): (float(row["mean"]), float(row["variance"]))
            for row in csv.DictReader(file)
        }


def _read(name: str) -> list[Published]:
    with (FOLDER / name).open(encoding="utf-8") as file:
        return [_row(row) for row in csv.DictReader(file)]


def _row(row: dict[str, str]) -> Published:
    table, data, defense, steps, joined = (
        row.pop(key, "") for key in ("table", "data", "defense", "eta", "joined")
    )
    eta = int(steps) if steps else None
    collapsed = row["R@1"] == "collapse"
    scores = {} if collapsed else {name: float(value) for name, value in row.items() if value}
    return Published(int(table or 0), data, defense, eta, scores, collapsed, joined == "yes")
