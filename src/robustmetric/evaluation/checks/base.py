"""What a check is: a function of what an evaluation found, and the verdict that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from robustmetric.attacks import Attack, Column, Draws, Queries, Search, Target
from robustmetric.errors import UserError
from robustmetric.evaluation.attack import NetworkView, run_attack
from robustmetric.evaluation.data import Fingerprint, Subject
from robustmetric.evaluation.document import FrozenModel, Number
from robustmetric.evaluation.plan import Plan, check_title
from robustmetric.evaluation.suite import Attempt
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget
from robustmetric.registry import Registry, registry

Status = Literal["pass", "warn", "fail", "not run"]


class Verdict(NamedTuple):
    """What a check found.

    `status` is how that is judged: "pass", "warn", "fail" or "not run". `figure` is what was found, `limit`
    what is allowed, and `says` a sentence about it.

    >>> Verdict("pass", 0, "none", "no copies").status
    'pass'
    """

    status: Status
    figure: float
    limit: str
    says: str


class Check(FrozenModel):
    """A check of whether the scores can be trusted: its `name`, and what it found.

    `status` is how that is judged, `figure` what was found, `limit` what is allowed, and `says` a sentence
    about it.

    >>> Check(name="copies", status="pass", figure=0, limit="none", says="no copies").status
    'pass'
    """

    name: str
    status: Status
    figure: Number
    limit: str
    says: str


class Measured(NamedTuple):
    """What attacked queries reached: (S,) values by column, and the objective (S,)."""

    values: dict[str, Tensor]
    objective: Tensor


@dataclass(frozen=True, eq=False)
class Findings:
    """What checks work with: the network and its data, how it was attacked, and what was found.

    `subject` is the network with its images, `plan` and `search` are how it was attacked. `view` is the
    network with its embeddings, `surrogate` the one that perturbations come from, if it is another. `found`
    has tensors of each attack, such as ``found["ES"]["after/ES:R"]`` (Q,), in the order of the queries'
    `numbers` (Q,): see `attack_block`. `recall` is R@1 in percent. `worst` has those of the suite by goal,
    see `run_ensemble`, and `attempts` are its attacks.

    >>> def drop(findings: Findings) -> Verdict:
    ...     lost = findings.recall - float(findings.found["ES"]["after/ES:R"].nanmean())
    ...     return Verdict("pass" if lost < 50 else "warn", lost, "50 points", f"ES costs {lost:.0f} points")
    """

    subject: Subject
    plan: Plan
    search: Search
    view: NetworkView
    surrogate: NetworkView | None
    numbers: Tensor
    found: Mapping[str, Mapping[str, Tensor]]
    recall: float
    worst: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    attempts: Mapping[str, Sequence[Attempt]] = field(default_factory=dict)

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """The attacks that were run."""
        return self.plan.attacks

    def goal_column(self, name: str) -> Column:
        """Return the column of the suite's goal `name`."""
        suite = self.plan.suite
        assert suite is not None  # noqa: S101
        return next(goal.columns[0] for goal in suite.wanted if goal.name == name)

    @property
    def budget(self) -> Budget:
        """What a perturbation may cost."""
        return self.plan.threat.budget

    @property
    def fingerprint(self) -> Fingerprint:
        """What a first pass over the images found."""
        return self.subject.data.fingerprint

    def sample(self, most: int) -> Tensor:
        """Return positions (S,) of at most `most` queries, drawn from the seed, ascending."""
        generator = torch.Generator().manual_seed(self.plan.threat.seed + 1)
        return torch.randperm(len(self.numbers), generator=generator)[:most].sort().values

    @property
    def some(self) -> Tensor:
        """The positions of the queries that attacks are repeated on: 64, or 256 for all checks."""
        return self.sample(256 if self.plan.level == "full" else 64)

    def again(
        self,
        attack: Attack,
        positions: Tensor,
        budget: Budget | None = None,
        search: Search | None = None,
        *,
        batch: int | None = None,
        surrogate: NetworkView | None = None,
    ) -> Measured:
        """Run an `attack` again on the queries at these `positions` (S,).

        A `budget`, `search`, `batch` or `surrogate` replaces that of the plan.
        """
        usual = self.plan.threat
        surrogate = surrogate or (self.surrogate if search is None else None)
        threat = Threat(budget or usual.budget, search or self.search, usual.seed, batch or usual.batch)
        parts = [
            run_attack(self.view, attack, numbers, threat, surrogate=surrogate)
            for numbers in self.numbers[positions].split(threat.batch)
        ]
        values = {n: torch.cat([p.after[n] for p in parts]).cpu().double() for n in parts[0].after}
        return Measured(values, torch.cat([p.last for p in parts]).cpu().double())

    def measured(self, attack: Attack, positions: Tensor) -> Measured:
        """Return what an `attack` of the plan found for queries at `positions` (S,), as `again` does."""
        found = self.found[attack.name]
        values = {column.name: found[f"after/{column.name}"][positions] for column in attack.columns}
        return Measured(values, found["objective/last"][positions])

    def aimed(self, attack: Attack, numbers: Tensor) -> tuple[Tensor, Queries, Target]:
        """Return the images of these `numbers` (B,), as queries too, and what an `attack` aims at."""
        images, queries = self.view.batch(numbers)
        draws = Draws(self.plan.threat.seed, attack.drawn_as, numbers.tolist())
        with torch.no_grad():
            return images, queries, self.view.aim(attack, queries, draws)


CHECKS: Registry[Verdict] = registry("check")
"""Every check by name: a function from `Findings` to a `Verdict`."""

Run = TypeVar("Run", bound=Callable[..., Verdict])


def check(
    name: str, level: int, *, suite: bool = False, steps: int = 0, again: int = 0
) -> Callable[[Run], Run]:
    """Register a check: of level 0 always run, of 1 unless the set is none, of 2 with all checks.

    One of a `suite` is run only where there is one. On some queries it takes about so many passes, `steps`,
    for each attack, and runs all of them `again` so often.
    """

    def add(run: Run) -> Run:
        run.level, run.suite = level, suite  # type: ignore[attr-defined]
        run.steps, run.again = steps, again  # type: ignore[attr-defined]
        return CHECKS.register(name)(run)

    return add


def run_check(name: str, findings: Findings) -> Check:
    """Run a check by its name; of a `file.py:function` the function's name stays.

    >>> run_check("colapse", None)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown check 'colapse' (did you mean 'collapse'?); known: 8-bit, ...
    """
    verdict = CHECKS.bind(name)(findings)
    wanted = "it must return a Verdict(status, figure, limit, says)"
    if not isinstance(verdict, Verdict):
        raise UserError(f"the check {name!r} returned a {type(verdict).__name__}; {wanted}")
    try:
        return Check(name=check_title(name), **verdict._asdict())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"the check {name!r} returned the {place} {first['input']!r}: {first['msg']}; {wanted}"
        ) from None


def beats(other: Tensor, ours: Tensor) -> bool:
    """Return whether objectives (S,) are lower on the mean, by more than two standard errors; S is not 1.

    >>> beats(torch.tensor([0.0, 0.1]), torch.tensor([1.0, 1.1])), beats(torch.zeros(2), torch.zeros(2))
    (True, False)
    """
    gain = ours - other
    if len(gain) < 2:
        return False
    error = float(gain.std(correction=0)) / len(gain) ** 0.5
    return bool(gain.mean() > 2 * error + 1e-6)


def shorter(budget: Budget, steps: int) -> Budget:
    """Return a `budget` with at most `steps` steps.

    >>> shorter(Budget(eps=0.1, alpha=0.01, steps=32), 8).steps
    8
    """
    return budget if budget.steps <= steps else replace(budget, steps=steps)


def moved(column: Column, before: Tensor, after: Tensor) -> float:
    """By how many points of 100 the mean of a column moved; a query without a value counts in neither.

    >>> from robustmetric.attacks import DISTANCE
    >>> moved(Column("D", "lower", DISTANCE), torch.tensor([0.0, 1.0]), torch.tensor([0.5, torch.nan]))
    25.0
    """
    change = (after - before).double()
    change = change[~change.isnan()]
    return float(change.mean()) * column.unit.points if len(change) else 0.0


def point(queries: int) -> float:
    """Return a point of 100, or what one query is worth if that is more.

    >>> round(point(10)), round(point(1000))
    (10, 1)
    """
    return max(1.0, 100 / queries) + 1e-9
