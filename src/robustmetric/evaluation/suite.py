"""The worst-case suite: which goals an attacker has, and which attacks are tried for each, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from robustmetric.attacks import APGD, RankingAttack, Search, Square, Transfer, attack
from robustmetric.attacks.contract import checked_columns, checked_signatures
from robustmetric.attacks.gallery import check_count
from robustmetric.perturb import Budget
from robustmetric.registry import Registry, split_names, take_apart, unknown
from robustmetric.usercode import file_of
from robustmetric.validate import UserError

GOALS = (
    "misrank", "translocate", "promote", "demote", "shift", "misrank(side='candidate')",
    "promote(side='candidate')", "demote(side='candidate')",
)  # fmt: skip
"""What the suite tries unless goals are given."""

BESIDE = {"misrank": ("ES:R", "LTM", "GTM"), "translocate": ("GTT",), "shift": ("ES:D",)}
"""Columns of other attacks that say the same of a query as a goal does, if they follow the definitions."""


class Way(NamedTuple):
    """An attack of a goal's ensemble: its objective, how it is searched, and what its draws depend on."""

    attack: RankingAttack
    search: Search
    purpose: str

    @property
    def name(self) -> str:
        """What it is called in a record."""
        return f"{self.attack.name} by {self.search.name}"

    def passes(self, budget: Budget) -> int:
        """Return how many passes of a query it takes within a `budget`, if nothing drops out."""
        return self.search.asks(budget) + 1  # what is found is measured


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The suite: for each goal an ensemble of attacks, each on the queries that those before it left.

    `goals` are attacks by name, in one text, or as a list of names and attacks; None for all of `GOALS`. Each
    way to a goal is searched by `apgd` with `steps` steps, those of misrank at the `targets` nearest wrong
    classes too, then again `restarts` times from random points, then on the surrogate if there is one, and at
    last by `trials` random squares. `passes` is how many passes a query may cost for a goal at the most.

    >>> suite = WorstCase(goals="shift", steps=10)
    >>> [way.name for way in suite.ways(suite.wanted[0])]
    ['shift by apgd', 'shift by apgd(random_start=True)', 'shift by square']
    """

    goals: str | Sequence[str | RankingAttack] | None = None
    steps: int = 40
    restarts: int = 1
    targets: int = 5
    trials: int = 200
    passes: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "trials"):
            check_count(name, getattr(self, name))
        for name in ("restarts", "targets"):
            if getattr(self, name) != 0:
                check_count(name, getattr(self, name))
        if self.passes is not None:
            check_count("passes", self.passes)
        names = [goal.name for goal in self.wanted]
        if not names:
            raise UserError(f"no goals were given; the suite knows {', '.join(GOALS)}", parameter="suite")
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"a goal was given twice: {', '.join(sorted(twice))}", parameter="suite")

    @cached_property
    def wanted(self) -> tuple[RankingAttack, ...]:
        """The goals as attacks."""
        given = GOALS if self.goals is None else self.goals
        return tuple(map(_goal, split_names(given) if isinstance(given, str) else given))

    @property
    def name(self) -> str:
        """The suite as it is written on the command line."""
        changed: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default
        }
        if "goals" in changed:
            changed["goals"] = ",".join(goal.name for goal in self.wanted)
        inside = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        return f"worst-case({inside})" if inside else "worst-case"

    def ways(
        self, goal: RankingAttack, *, surrogate: nn.Module | None = None, gradient: bool = True
    ) -> tuple[Way, ...]:
        """Return the attacks for a `goal` in their order; without a `gradient` those that need none.

        A `surrogate` is a network that perturbations may come from.
        """
        every, plain = goal.ways(self.targets), goal.ways(0)
        found: list[tuple[RankingAttack, Search, int]] = []
        if gradient:
            found += [(way, APGD(), 0) for way in every]
            found += [(way, APGD(random_start=True), k) for k in range(1, self.restarts + 1) for way in plain]
        if surrogate is not None:
            found.append((goal, Transfer(surrogate=surrogate, search=APGD()), 0))
        found.append((goal, Square(trials=self.trials), 0))
        return tuple(Way(way, search, f"suite/{way.name}/{search.name}/{k}") for way, search, k in found)


SUITES: Registry[WorstCase] = Registry("suite", WorstCase)
SUITES.register("worst-case")(WorstCase)


def make_suite(given: object) -> WorstCase | None:
    """Make a suite of its name, such as ``"worst-case(steps=100)"``; None of "none" or None.

    >>> make_suite("none") is None, make_suite("worst-case(restarts=2)").restarts
    (True, 2)
    >>> make_suite("worstcase")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown suite 'worstcase' (did you mean 'worst-case'?); known: none, worst-case
    """
    if given is None or isinstance(given, WorstCase):
        return given
    if not isinstance(given, str):
        raise UserError(
            f"suite must be a text such as 'worst-case' or 'none', not {given!r}", parameter="suite"
        )
    if given.strip() == "none":
        return None
    if file_of(given) is None:
        name, _ = take_apart("suite", given)
        if name not in SUITES:
            raise UserError(unknown("suite", name, {"none": None, **SUITES}), parameter="suite")
    return SUITES.make(given)


def _goal(given: str | RankingAttack) -> RankingAttack:
    """Make a goal, by the definitions, and refuse what cannot be one."""
    goal = given
    if isinstance(given, str):
        try:
            goal = attack(given)
        except UserError as error:
            raise UserError(f"goal of the suite: {error}", parameter="suite") from None
    if not isinstance(goal, RankingAttack):
        raise UserError(
            f"{given!r} is no goal; give the name of an attack, or an object of a RankingAttack",
            parameter="suite",
        )
    checked_signatures(goal)
    if len(checked_columns(goal)) != 1 or goal.columns[0].better is None:
        raise UserError(
            f"{goal.name} cannot be a goal, for it does not report one column with a better direction: "
            f"known goals are {', '.join(GOALS)}",
            parameter="suite",
        )
    return goal
