"""The worst case in a record: what the suite left of each goal, and which attack did it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import Field
from torch import Tensor

from robustmetric.attacks import PERCENT, Attack, Column
from robustmetric.evaluation.document import FrozenModel, Number
from robustmetric.evaluation.ers import Values
from robustmetric.evaluation.intervals import Interval, Score, intervals
from robustmetric.evaluation.suite import BEFORE, Attempt, WorstCase
from robustmetric.perturb import Budget


class AttackShare(FrozenModel):
    """An attack of the suite, or one beside it, and the share of queries that it broke first."""

    attack: str = Field(description="the attack with its objective; before for what was lost without one")
    search: str | None = Field(
        default=None, description="how it was searched; null of an attack beside the suite"
    )
    broke: Number = Field(
        description="share of the queries, in %, that it was the first to break, or of a goal without an end "
        "the share that it moved the farthest"
    )
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


def build_suite(
    suite: WorstCase,
    worst: Mapping[str, Mapping[str, Tensor]],
    attempts: Mapping[str, Sequence[Attempt]],
    budget: Budget,
    after: Mapping[str, Values],
    attacks: Sequence[Attack],
    seed: int,
) -> tuple[Suite, dict[str, Tensor]]:
    """Return the scores of a `suite`, and its values (Q,) of each query by name.

    `worst` and `attempts` are its results and attacks by goal, within a `budget`. `after` has the values (Q,)
    of the columns of other `attacks`, which count where they say the same of a query as a goal. The intervals
    are drawn from a `seed`.
    """
    goals: dict[str, GoalScore] = {}
    arrays: dict[str, Tensor] = {}
    for goal in suite.wanted:
        found = worst[goal.name]
        beside = {
            column.name: after[column.name]
            for attack in attacks
            for column in attack.columns
            if attack.drawn_as == goal.drawn_as or column.name in goal.same_columns
        }
        goals[goal.name] = _score(goal, found, attempts[goal.name], budget, beside, seed)
        kept = {name: found[name] for name in ("before", "worst", "by", "change", "outside")}
        arrays |= {f"suite/{goal.name}/{name}": value for name, value in kept.items()}
    return Suite(goals=goals), arrays


def _score(
    goal: Attack,
    found: Mapping[str, Tensor],
    attempts: Sequence[Attempt],
    budget: Budget,
    beside: Mapping[str, Values],
    seed: int,
) -> GoalScore:
    column = goal.columns[0]
    counted = ~found["before"].isnan().numpy()
    alone, by = found["worst"].numpy()[counted], found["by"].numpy()[counted]
    worst, who = alone.copy(), by.copy()
    for k, values in enumerate(beside.values(), len(attempts)):
        gain = values[counted] - worst
        ahead = gain < 0 if column.better == "higher" else gain > 0
        worst, who = np.where(ahead, values[counted], worst), np.where(ahead, k, who)
    forward, backward = found["forward"].sum(0).tolist(), found["backward"].sum(0).tolist()
    count = int(counted.sum())
    done = np.full(count, True) if column.success_value is None else worst == column.success_value

    def share(number: int) -> float:
        return 100 * float(((who == number) & done).mean()) if count else math.nan

    attacks = [
        AttackShare(attack=a.attack.name, search=a.search.name, broke=share(k), forward=f, backward=b)
        for k, (a, f, b) in enumerate(zip(attempts, forward, backward, strict=True))
    ]
    attacks += [AttackShare(attack=name, broke=share(k)) for k, name in enumerate(beside, len(attempts))]
    if column.success_value is not None:
        attacks.insert(0, AttackShare(attack="before", broke=share(BEFORE)))
    return GoalScore(
        **_mean(worst, column, seed)._asdict(),
        before=_mean(found["before"].numpy()[counted], column, seed, resamples=1).value,
        alone=_mean(alone, column, seed, resamples=1).value,
        better=column.better,
        unit=column.unit.name,
        queries=count,
        attacks=attacks,
        forward=sum(forward),
        backward=sum(backward),
        undropped=count * sum(attempt.passes(budget) for attempt in attempts),
    )


def _mean(values: Values, column: Column, seed: int, resamples: int = 1000) -> Interval:
    """Average a column over queries, rounded as all scores of a record are."""
    if len(values) == 0:
        return Interval(math.nan, math.nan, math.nan)
    percent = [column.name] if column.unit == PERCENT else []
    return intervals({column.name: values}, seed=seed, resamples=resamples, percent=percent)[0][column.name]
