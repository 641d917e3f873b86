"""The worst-case suite: an ensemble of attacks for each goal, each attack on the queries that are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robustmetric.attacks import APGD, Attack, Draws, Search, Square, Transfer, attack
from robustmetric.errors import UserError, describe, instance, whole
from robustmetric.evaluation.attack import NetworkView, run_attack
from robustmetric.evaluation.identity import repeated, written
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget
from robustmetric.registry import Registry, changed_options, split_names, with_options

GOALS = (
    "misrank", "translocate", "promote", "demote", "shift", "misrank(side='candidate')",
    "promote(side='candidate')", "demote(side='candidate')",
)  # fmt: skip
"""What the suite tries unless goals are given."""

BEFORE = -1
"""Stands for no attack: a query that was lost before, or that no attack has changed."""


class Attempt(NamedTuple):
    """An attack of a goal's ensemble: its objective, how it is searched, and what its draws depend on."""

    attack: Attack
    search: Search
    purpose: str

    def passes(self, budget: Budget) -> int:
        """Return how many passes of a query it takes within a `budget`, if nothing drops out."""
        return self.search.num_evaluations(budget) + 1  # what is found is measured


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The suite: for each goal an ensemble of attacks, each on the queries that those before it left.

    `goals` are attacks by name, in one text, or as a list of names and attacks; None for all of `GOALS`. Each
    attempt at a goal is searched by `apgd` with `steps` steps, those of misrank at the `targets` nearest
    wrong classes too, then again `restarts` times from random points, then on the surrogate if there is one,
    and at last by `trials` random squares.

    >>> suite = WorstCase(goals="shift", steps=10)
    >>> [attempt.search.name for attempt in suite.attempts(suite.wanted[0])]
    ['apgd', 'apgd(random_start=True)', 'square']
    """

    goals: str | Sequence[str | Attack] | None = None
    steps: int = 40
    restarts: int = 1
    targets: int = 5
    trials: int = 200

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("trials", 1), ("restarts", 0), ("targets", 0)):
            whole(f"{name} of the suite", getattr(self, name), least)
        if not self.wanted:
            raise UserError(f"no goals were given; the suite knows {', '.join(GOALS)}")
        if twice := repeated(goal.name for goal in self.wanted):
            raise UserError(f"a goal was given twice: {twice}")

    @cached_property
    def wanted(self) -> tuple[Attack, ...]:
        """The goals as attacks."""
        return tuple(map(_goal, self._given))

    @property
    def _given(self) -> Sequence[str | Attack]:
        given = GOALS if self.goals is None else self.goals
        if isinstance(given, str):
            return split_names(given)
        if not isinstance(given, Sequence):
            raise UserError(f"goals of the suite must be names in one text, or a list, not {describe(given)}")
        return given

    @property
    def name(self) -> str:
        """The suite as it is written on the command line."""
        changed = changed_options(self)
        if "goals" in changed:
            changed["goals"] = ",".join(map(written, self._given, self.wanted))
        return with_options("worst-case", changed, ", ")

    def attempts(
        self, goal: Attack, *, surrogate: nn.Module | None = None, gradient: bool = True
    ) -> tuple[Attempt, ...]:
        """Return the attacks for a `goal` in their order; without a `gradient` those that need none.

        A `surrogate` is a network that perturbations may come from.
        """
        found: list[tuple[Attack, Search, int]] = []
        if gradient:
            found += [(each, APGD(), 0) for each in goal.attempts(self.targets)]
            for k in range(1, self.restarts + 1):
                found += [(each, APGD(random_start=True), k) for each in goal.attempts(0)]
        if surrogate is not None:
            found.append((goal, Transfer(surrogate=surrogate, search=APGD()), 0))
        found.append((goal, Square(trials=self.trials), 0))
        # Without the search's options: what is drawn for more trials continues what is drawn for fewer.
        return tuple(
            Attempt(each, search, f"suite/{each.name}/{type(search).__name__.lower()}/{k}")
            for each, search, k in found
        )


SUITES: Registry[WorstCase] = Registry("suite", WorstCase)
SUITES["worst-case"] = WorstCase


def make_suite(given: object) -> WorstCase | None:
    """Make a suite of its name, such as ``"worst-case(steps=100)"``; None of "none" or None.

    >>> make_suite("none") is None, make_suite("worst-case(restarts=2)").restarts
    (True, 2)
    """
    if given is None or isinstance(given, WorstCase):
        return given
    try:
        name = instance("suite", given, str, why="such as 'worst-case' or 'none'").strip()
        return None if name == "none" else SUITES.make(name)
    except UserError as error:
        error.parameter = "suite"
        raise


def _goal(given: str | Attack) -> Attack:
    """Make a goal, by the definitions, and reject what cannot be one."""
    try:
        goal = attack(given) if isinstance(given, str) else given
    except UserError as error:
        raise type(error)(f"goal of the suite: {error}") from None
    goal = instance("a goal", goal, Attack, why="give the name of an attack, or an instance")  # type: ignore[type-abstract]
    goal.check()
    if len(goal.columns) != 1 or goal.columns[0].better is None:
        raise UserError(
            f"{goal.name} cannot be a goal, for it does not report one column with a better direction: "
            f"known goals are {', '.join(GOALS)}"
        )
    return goal


def run_ensemble(
    view: NetworkView,
    goal: Attack,
    attempts: Sequence[Attempt],
    numbers: Tensor,
    threat: Threat,
    *,
    surrogate: NetworkView | None = None,
    tick: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """Attack queries of a `view` in all `attempts` at a `goal`, one after the other; return it by name.

    A query that is lost costs nothing more. The queries have these `numbers` (Q,). The budget, the seed and
    the batch are those of the `threat`; its search is not used. Attacks that transfer come from the
    `surrogate`. `tick` is called after each pass of a batch. Call it inside `frozen(model)`.

    "number" (Q,) are the queries, "before" (Q,) is the goal's column of the images as they were, "worst" (Q,)
    the worst that any attack left of it, and "by" (Q,) the attempt that did so, `BEFORE` for none. "change"
    (Q,) is the size of the change, "outside" (Q,) how far pixels leave [0, 1]. "forward" and "backward"
    (1, W) count the images that went through the network, and back, for each of W attempts.
    """
    column, before = goal.columns[0], torch.zeros(len(numbers), dtype=torch.float64)
    aimed = []
    for rows in torch.arange(len(numbers)).split(threat.batch):
        queries = view.asking(numbers[rows])
        with torch.no_grad():
            target = view.aim(goal, queries, Draws(threat.seed, goal.drawn_as, numbers[rows].tolist()))
            before[rows] = view.measure(goal, queries.z, target, queries)[column.name].cpu().double()
            aimed.append(target.index)
    index = torch.cat(aimed)
    worst, by = before.clone(), torch.full((len(numbers),), BEFORE)
    sizes = {name: torch.zeros(len(numbers), dtype=torch.float64) for name in ("change", "outside")}
    forward, backward = torch.zeros(2, 1, len(attempts), dtype=torch.long)
    for k, (each, search, purpose) in enumerate(attempts):
        left = ~before.isnan()
        if goal.can_win:
            left &= ~goal.succeeded({column.name: worst})
        for rows in left.nonzero()[:, 0].split(threat.batch) if left.any() else ():
            result = run_attack(
                view,
                each,
                numbers[rows],
                replace(threat, search=search),
                surrogate=surrogate if search.network is not None else None,
                tick=tick,
                purpose=purpose,
                index=index[rows.to(index.device)] if each.drawn_as == goal.drawn_as else None,
                clean=False,
            )
            forward[0, k] += result.forward
            backward[0, k] += result.backward
            reached = result.after[each.columns[0].name].cpu().double()
            worse = reached < worst[rows] if column.better == "higher" else reached > worst[rows]
            worst[rows[worse]], by[rows[worse]] = reached[worse], k
            for name, value in result.changes(threat.budget.norm).items():
                sizes[name][rows[worse]] = value.cpu()[worse]
    return {
        "number": numbers,
        "before": before,
        "worst": worst,
        "by": by,
        **sizes,
        "forward": forward.clone(),
        "backward": backward.clone(),
    }
