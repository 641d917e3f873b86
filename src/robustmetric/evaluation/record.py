"""The record of an evaluation: everything it depended on and found, as one JSON file and per-query arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import Tensor

from robustmetric.attacks import COSINE, DISTANCE, PERCENT, Column, Unit
from robustmetric.evaluation.document import Document, Format, FrozenModel, Number
from robustmetric.evaluation.ers import COLUMNS
from robustmetric.evaluation.intervals import Score
from robustmetric.evaluation.plan import Settings

RECORD = "record.json"


class NetworkEntry(FrozenModel):
    """The network that was attacked."""

    name: str
    parameters: int
    sha256: str = Field(description="of all names, types, shapes and values of its state")
    surrogate: str | None = Field(None, description="the same digest of the network that attacks came from")
    weights: str | None = Field(None, description="how its weights were chosen, as far as that is known")


class DataEntry(FrozenModel):
    """The images that were queried and ranked."""

    name: str
    images: int = Field(description="images that query, and are ranked unless a gallery is")
    gallery: int | None = Field(None, description="images of a gallery of its own")
    classes: int
    shape: list[int] = Field(min_length=3, max_length=3, description="channels, height, width")
    sha256: str = Field(description="of all labels and of the pixels in single precision")
    cameras: bool = Field(False, description="whether images of a query's class and camera do not count")
    skipped: list[str] = Field([], description="files that were left out because they could not be read")


class QueryCounts(FrozenModel):
    """The images that were perturbed."""

    count: int
    of: int
    left_out: int = Field(description="images whose class has no other, without an answer to find")


class Ers(FrozenModel):
    """The Empirical Robustness Score and its ten terms; to be read beside R@1."""

    value: Number
    low: Number
    high: Number
    terms: dict[str, Number]
    valid: bool
    why: str = Field("", description="why it is not valid")


class AttackShare(FrozenModel):
    """An attack of the suite, or one beside it, and the share of queries that it broke first."""

    attack: str = Field(description="the attack with its objective; before for what was lost without one")
    search: str | None = Field(default=None, description="its search; null of an attack beside the suite")
    broke: Number = Field(description="share of queries, in %, that it broke first, or moved the farthest")
    forward: int = Field(default=0, description="images that it sent through the network")
    backward: int = Field(default=0, description="images that it sent back through it, for gradients")


class GoalScore(Score):
    """The worst case of a goal: the mean over queries of the worst that any attack left, with its interval.

    `value`, `low` and `high` count the attacks beside the suite too, `alone` those of the suite only.
    """

    alone: Number = Field(description="the value by the attacks of the suite alone")
    queries: int = Field(description="queries that the goal concerns")
    attacks: list[AttackShare] = Field(description="who broke which share, in the order of the attempts")
    forward: int = Field(description="images that all attacks sent through the network")
    backward: int = Field(description="images that all attacks sent back through it")
    undropped: int = Field(description="images that would have gone through if no query dropped out")


class Suite(FrozenModel):
    """The worst-case suite: its goals by name."""

    goals: dict[str, GoalScore]

    @property
    def forward(self) -> int:
        """Images that went through the network for all goals."""
        return sum(goal.forward for goal in self.goals.values())

    @property
    def undropped(self) -> int:
        """Images that would have gone through it if no query dropped out."""
        return sum(goal.undropped for goal in self.goals.values())


Status = Literal["pass", "warn", "fail", "not run"]


class Check(FrozenModel):
    """A check of whether the scores can be trusted: its `name`, and what it found.

    `status` is how that is judged, `figure` what was found, `limit` what is allowed, and `says` a sentence
    about it.
    """

    name: str
    status: Status
    figure: Number
    limit: str
    says: str


class Record(Document):
    """The scores of a network on a data set, with all they depend on.

    `record["R@1"]`, `record["ERS"]`, `record["CA+"]` are single values. Ranks and shares are in %; TMA is a
    cosine, ES:D a distance.

    `schema` names the format. `network` and `data` say what was evaluated, `settings` are the plan, and
    `queries` counts the images that were perturbed. `retrieval` has the scores without attacks, `scores`
    those under attack and `ers` their summary, if all its columns were measured. `suite` has the worst case
    of each goal, if the suite was run: `record["misrank"]` is a value of it. `checks` say how far to trust
    all this, `versions` what computed it, and `arrays` names the file of per-query values. `sha256` is the
    digest of all the rest: a record that was damaged, or changed by hand, is not read.
    """

    schema_: Literal["robustmetric/record/1"] = Field("robustmetric/record/1", alias="schema")
    network: NetworkEntry
    data: DataEntry
    settings: Settings
    queries: QueryCounts
    retrieval: dict[str, Score]
    scores: dict[str, Score]
    ers: Ers | None
    suite: Suite | None = None
    checks: list[Check]
    versions: dict[str, str]

    def __getitem__(self, name: str) -> float:
        if name == "ERS" and self.ers is not None:
            return _number(self.ers.value)
        known: dict[str, Score] = {**self.retrieval, **self.scores}
        if self.suite is not None:
            known = {**self.suite.goals, **known}
        if name not in known:
            names = [*known, *(["ERS"] if self.ers is not None else [])]
            raise KeyError(f"{name!r} was not measured; measured: {', '.join(names)}")
        return _number(known[name].value)

    def __str__(self) -> str:
        lines = ["  ".join(f"{name} {self.show(name)}" for name in self.columns())]
        if self.suite is not None:
            worst = [f"{n} {self.goal_column(n).show(goal.value)}" for n, goal in self.suite.goals.items()]
            lines.append(f"worst case: {'  '.join(worst)}")
        if self.ers is not None and not self.ers.valid:
            lines.append(f"the ERS is not valid: {self.ers.why}")
        lines += [f"{c.name}: {c.status}: {c.says}" for c in self.checks if c.status in ("warn", "fail")]
        run = [c.status for c in self.checks if c.status != "not run"]
        told = "only collapse was checked" if run else "no checks were run"
        if not self.unchecked:
            told = f"{run.count('pass')} of {len(run)} checks passed"
        return "\n".join([*lines, told])

    @property
    def unchecked(self) -> bool:
        """Whether no checks were run but the one for a collapse, which always is."""
        return not any(check.name != "collapse" and check.status != "not run" for check in self.checks)

    def columns(self) -> list[str]:
        """Return the names of what was measured, in the paper's order."""
        ours = [name for name in COLUMNS if name in self.scores]
        others = [name for name in self.scores if name not in COLUMNS]
        return [*self.retrieval, *ours, *others, *(["ERS"] if self.ers is not None else [])]

    def column(self, name: str) -> Column:
        """Return how the measured value `name` is to be read: which way is better, in which unit.

        Without attacks, and over all of them, all values are in percent and higher ones are better.
        """
        if name not in self.scores:
            return Column(name, "higher")
        return _column(name, self.scores[name])

    def goal_column(self, name: str) -> Column:
        """Return how the worst case of the goal `name` is to be read."""
        if self.suite is None or name not in self.suite.goals:
            raise KeyError(f"{name!r} was no goal of a suite")
        return _column(name, self.suite.goals[name])

    def show(self, name: str) -> str:
        """Return the measured value `name` as text with the paper's digits; "-" if it was not measured."""
        return self.column(name).show(self[name] if name in self.columns() else None)


def _column(name: str, score: Score) -> Column:
    units = {unit.name: unit for unit in (PERCENT, COSINE, DISTANCE)}
    return Column(name, score.better, units.get(score.unit or "", Unit(score.unit or "", 1, 3)))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def failures(checks: Sequence[Check]) -> str:
    """Return why an ERS with these `checks` is not valid: which of them failed. A warning is no failure."""
    failed = {check.name: check for check in checks if check.status == "fail"}
    told = [failed.pop("collapse").says] if "collapse" in failed else []
    if failed:
        told.append(f"the check{'s' * (len(failed) > 1)} {' and '.join(failed)} failed")
    return "; ".join(told)


FORMAT = Format(Record, "record", inside="evaluation", work="evaluation", command="evaluate")
"""How records are written and read."""


def load_record(path: str | Path) -> Record:
    """Read a record from `path`: its JSON file or the folder that it is in; a damaged one is refused."""
    return FORMAT.read(path)


def load_arrays(path: str | Path) -> dict[str, Tensor]:
    """Read the per-query arrays (Q, …) beside the record at `path`; a file that was changed is refused."""
    return FORMAT.read_arrays(path)
