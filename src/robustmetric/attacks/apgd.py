"""Adaptive PGD: steps that shorten where they no longer help, momentum, and the best point kept.

Croce and Hein, "Reliable Evaluation of Adversarial Robustness with an Ensemble of Diverse Parameter-free
Attacks", ICML 2020; here for objectives of single queries, and no query costs more than it needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.search import SEARCHES, Lowest, Problem, Search, random_start
from robustmetric.errors import UserError, instance, whole
from robustmetric.perturb import (
    Budget,
    Norm,
    Objective,
    directions,
    project,
    spread,
    steepness,
    value_and_slope,
)

MOMENTUM = 0.75
"""The share of a step that follows the gradient; the rest keeps the direction of the step before."""

ENOUGH = 0.75
"""The share of the steps between two checkpoints that must have helped, or the next ones are half as long."""


def checkpoints(steps: int) -> list[int]:
    """Return after which of `steps` steps it is looked whether they still help.

    The first is after 22 % of them; from one to the next it is 3 % less than before, but at least 6 %.

    >>> checkpoints(100)[:5]
    [22, 41, 57, 70, 80]
    """
    # In whole percent: fractions would round up from one processor to the next.
    before, now, found = 0, 22, []
    while now < 100:
        found.append(math.ceil(now * steps / 100))
        before, now = now, now + max(now - before - 3, 6)
    return sorted({step for step in found if step < steps})


@SEARCHES.register("apgd")
@dataclass(frozen=True, kw_only=True)
class APGD(Search):
    """Adaptive projected gradient descent: η is the number of steps, and α plays no part.

    The first step is 2ε long. At each of the `checkpoints` a query whose last steps did not help goes back to
    its best point, and on from there with steps of half the length. The best point on the way is what counts.
    With `restarts` the search is repeated from random points; with `random_start` the first one begins at
    random as well. A query that is where it is wanted drops out at once.

    >>> from robustmetric.attacks import make_search
    >>> make_search("apgd(restarts=2)")
    APGD(restarts=2, random_start=False)
    """

    restarts: int = 1
    random_start: bool = False

    follows_gradient = True
    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")

    def __post_init__(self) -> None:
        whole("restarts", self.restarts, 1)
        instance("random_start", self.random_start, bool)

    def num_evaluations(self, budget: Budget) -> int:
        """Return the evaluations within a `budget`: at each start, and after each step."""
        return self.restarts * (budget.steps + 1)

    def minimise(self, problem: Problem) -> Tensor:
        """Return the perturbed images (B, C, H, W) of a `problem`."""
        images, budget = problem.images, problem.budget
        lowest = Lowest(images)
        for k in range(self.restarts):
            rows = (lowest.value > -torch.inf).nonzero()[:, 0]
            if len(rows) == 0:
                break
            around = images[rows]
            if k or self.random_start:
                begin = random_start(around, budget, problem.draws, rows)
            else:
                begin = around if problem.start is None else problem.start[rows]
            _descend(around, begin, rows, problem.objective, budget, lowest)
        return lowest.point


@dataclass
class _Rows:
    """The rows that still move: where each is, was and may go, and how its steps fare."""

    rows: Tensor
    around: Tensor
    point: Tensor
    before: Tensor
    value: Tensor
    slope: Tensor
    length: Tensor
    fresh: Tensor  # whether it has no momentum: in the first step, and after a return to the best point
    # Its best point, with the value and slope there.
    best: Tensor
    least: Tensor
    best_slope: Tensor
    # Since the last checkpoint: steps that helped, the length then, the least value then.
    helped: Tensor
    old_length: Tensor
    old_least: Tensor

    def pick(self, alive: Tensor) -> None:
        """Keep some rows."""
        if alive.all():
            return
        for name, value in vars(self).items():
            setattr(self, name, value[alive])


def _descend(
    around: Tensor, begin: Tensor, rows: Tensor, objective: Objective, budget: Budget, lowest: Lowest
) -> None:
    """Descend once from a point (R, …), the start of some rows (R,); `lowest` keeps the best on the way."""
    if torch.is_inference_mode_enabled():
        raise UserError("inference mode leaves no gradient to follow: use torch.no_grad() instead")
    objective = lowest.watch(objective)
    point = project(begin, around, budget.eps, budget.norm)
    value, slope = value_and_slope(objective, point, rows)
    length = torch.full_like(value, 2 * budget.eps, dtype=point.dtype)
    one = _Rows(
        rows, around, point, point, value, slope, length, torch.ones_like(rows, dtype=torch.bool),
        point, value, slope, torch.zeros_like(value), length, value,
    )  # fmt: skip
    looks, last = checkpoints(budget.steps), 0
    for step in range(1, budget.steps + 1):
        # A row that has arrived is done, and one without slope and momentum would stay where it is.
        still = (steepness(one.slope) == 0) & (one.point == one.before).flatten(1).all(1)
        one.pick((one.value > -torch.inf) & ~still)
        if len(one.rows) == 0:
            return
        _step(one, budget)
        if step < budget.steps:
            value, one.slope = value_and_slope(objective, one.point, one.rows)
        else:
            with torch.no_grad():
                value = objective(one.point, one.rows)
        one.helped = one.helped + (value < one.value)
        one.value = value
        better = value < one.least
        one.least = torch.where(better, value, one.least)
        one.best = torch.where(spread(better, one.best), one.point, one.best)
        one.best_slope = torch.where(spread(better, one.best), one.slope, one.best_slope)
        if step in looks:
            _look(one, step - last)
            last = step


def _step(one: _Rows, budget: Budget) -> None:
    """Go on by a step, with momentum from the one before."""
    way = directions(one.slope, budget.norm) * spread(one.length, one.slope)
    ahead = project(one.point - way, one.around, budget.eps, budget.norm)
    both = one.point + MOMENTUM * (ahead - one.point) + (1 - MOMENTUM) * (one.point - one.before)
    moved = project(both, one.around, budget.eps, budget.norm)
    moved = torch.where(spread(one.fresh, moved), ahead, moved)
    one.before, one.point, one.fresh = one.point, moved, torch.zeros_like(one.fresh)


def _look(one: _Rows, steps: int) -> None:
    """Halve the steps of rows that made no progress since the last look; bring them to their best point."""
    few = one.helped < ENOUGH * steps
    stuck = (one.length == one.old_length) & (one.least == one.old_least)
    halve = few | stuck
    one.old_length, one.old_least = one.length, one.least
    one.length = torch.where(halve, one.length / 2, one.length)
    one.fresh = halve
    wide = spread(halve, one.point)
    one.before = torch.where(wide, one.best, one.before)
    one.point = torch.where(wide, one.best, one.point)
    one.slope = torch.where(wide, one.best_slope, one.slope)
    one.value = torch.where(halve, one.least, one.value)
    one.helped = torch.zeros_like(one.helped)
