"""The worst-case suite: which goals an attacker has, and which attacks are tried for each, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

from torch import nn

from robustmetric.attacks import APGD, RankingAttack, Search, Square, Transfer, attack
from robustmetric.attacks.contract import checked_columns, checked_signatures
from robustmetric.attacks.goals import Misrank
from robustmetric.evaluation.identity import code_of
from robustmetric.perturb import Budget
from robustmetric.registry import Registry, lookup, split_names, take_apart
from robustmetric.usercode import file_of, without_folder
from robustmetric.validate import UserError, is_number

GOALS = (
    "misrank", "translocate", "promote", "demote", "shift", "misrank(side='candidate')",
    "promote(side='candidate')", "demote(side='candidate')",
)  # fmt: skip
"""What the suite tries unless goals are given."""

_BESIDE = {"misrank": ("ES:R", "LTM", "GTM"), "translocate": ("GTT",), "shift": ("ES:D",)}


def says_the_same(goal: RankingAttack, attack: RankingAttack) -> list[str]:
    """Return the columns of an `attack`, by the definitions, that say of a query what the `goal` does.

    >>> [says_the_same(attack("misrank(tau=0.1)"), attack(name)) for name in ("ES", "GTM", "GTT")]
    [['ES:R'], ['GTM'], []]
    """
    usual = replace(goal, tau=Misrank.tau) if isinstance(goal, Misrank) else goal  # it tells no score
    if attack.drawn_as == goal.drawn_as:
        return [column.name for column in attack.columns]
    return [column.name for column in attack.columns if column.name in _BESIDE.get(usual.drawn_as, ())]


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
        for name, least in (("steps", 1), ("trials", 1), ("restarts", 0), ("targets", 0), ("passes", 1)):
            given = getattr(self, name)
            if not (is_number(given, Integral) and given >= least) and (name, given) != ("passes", None):
                raise UserError(
                    f"{name} of the suite must be a whole number of at least {least}, not {given!r}",
                    parameter="suite",
                )
        names = [goal.name for goal in self.wanted]
        if not names:
            raise UserError(f"no goals were given; the suite knows {', '.join(GOALS)}", parameter="suite")
        if twice := {name for name in names if names.count(name) > 1}:
            raise UserError(f"a goal was given twice: {', '.join(sorted(twice))}", parameter="suite")

    @cached_property
    def wanted(self) -> tuple[RankingAttack, ...]:
        """The goals as attacks."""
        return tuple(map(_goal, self._given))

    @property
    def _given(self) -> Sequence[str | RankingAttack]:
        given = GOALS if self.goals is None else self.goals
        if isinstance(given, str):
            return split_names(given)
        if not isinstance(given, Sequence):
            raise UserError(
                f"goals of the suite must be names in one text, or a list, not {given!r}", parameter="suite"
            )
        return given

    @property
    def name(self) -> str:
        """The suite as it is written on the command line."""
        changed: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default
        }
        if "goals" in changed:
            changed["goals"] = ",".join(map(_written, self._given, self.wanted))
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
        # Without the search's options: what is drawn for more trials goes on from what is drawn for fewer.
        kinds = [type(search).__name__.lower() for _, search, _ in found]
        return tuple(
            Way(way, search, f"suite/{way.name}/{kind}/{k}")
            for (way, search, k), kind in zip(found, kinds, strict=True)
        )


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
    try:
        if file_of(given) is None:
            name, _ = take_apart("suite", given)
            lookup("suite", name, {"none": None, **SUITES})
        return SUITES.make(given)
    except UserError as error:
        error.parameter = "suite"
        raise


def _written(given: str | RankingAttack, goal: RankingAttack) -> str:
    """Write a goal down: in one spelling, or as it was given, without the folder, if it is the user's own."""
    own = isinstance(given, str) and code_of(type(goal)) is not None
    return without_folder(str(given)) if own else goal.name


def _goal(given: str | RankingAttack) -> RankingAttack:
    """Make a goal, by the definitions, and refuse what cannot be one."""
    goal = given
    if isinstance(given, str):
        try:
            goal = attack(given)
        except UserError as error:
            raise type(error)(f"goal of the suite: {error}", parameter="suite") from None
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
