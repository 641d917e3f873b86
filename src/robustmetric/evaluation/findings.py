"""What an evaluation found so far: embeddings, what attacks made of the queries, and attacks made again."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robustmetric.attacks import Attack, Draws, Queries, Search, Target
from robustmetric.errors import UserError
from robustmetric.evaluation.attack import NetworkView, run_attack
from robustmetric.evaluation.data import Data
from robustmetric.evaluation.job import Job, Tensors
from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.record import FORMAT, Record
from robustmetric.evaluation.suite import Attempt
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget


class Measured(NamedTuple):
    """What attacked queries reached: (S,) values by column, and the objective (S,)."""

    values: dict[str, Tensor]
    objective: Tensor


class Findings(Job[Plan, Record]):
    """What an evaluation found, from its finished pieces, and what checks of it work with.

    `subject` is the network with its images, `plan` and `threat` are how it is attacked, `numbers` (Q,) the
    images that query.

    >>> def drop(findings: Findings) -> Verdict:
    ...     lost = findings.recall - float(findings.found["ES"]["after/ES:R"].nanmean())
    ...     return Verdict("pass" if lost < 50 else "warn", lost, "50 points", f"ES costs {lost:.0f} points")
    """

    form = FORMAT

    def prepare(self) -> None:
        """Refuse a plan that does not fit the data, and draw the queries."""
        plan, subject = self.plan, self.subject
        self.threat = replace(plan.threat, search=plan.search_on(subject.surrogate))
        if subject.surrogate is None:
            self.subject = replace(subject, surrogate=self.threat.search.network)
        self.data.check(plan.settings.queries)
        _check_fits(plan, self.data)
        self.numbers = plan.draw(len(self.data.images))

    @cached_property
    def attempts(self) -> dict[str, tuple[Attempt, ...]]:
        """The attacks of the suite by goal: they know as much of the network as the search does."""
        suite, network, white = self.plan.suite, self.subject.surrogate, self.threat.search.follows_gradient
        return {
            g.name: suite.attempts(g, surrogate=network, gradient=white) for g in self.plan.goals if suite
        }

    @property
    def suite_threat(self) -> Threat:
        """The threat in steps of the suite."""
        steps = self.threat.budget.steps if self.plan.suite is None else self.plan.suite.steps
        return replace(self.threat, budget=replace(self.threat.budget, steps=steps))

    @cached_property
    def view(self) -> NetworkView:
        """The network under attack and its embeddings."""
        return self._view(self.subject.model, "embed-")

    @cached_property
    def other(self) -> NetworkView | None:
        """The surrogate and its embeddings, if there is one."""
        network = self.subject.surrogate
        return None if network is None else self._view(network, "surrogate-")

    @cached_property
    def surrogate(self) -> NetworkView | None:
        """The network that perturbations are searched on, and its embeddings, if it is another one."""
        return None if self.threat.search.network is None else self.other

    @cached_property
    def found(self) -> dict[str, Tensors]:
        """Tensors of each attack, such as ``found["ES"]["after/ES:R"]`` (Q,): see `attack_block`."""
        return {goal.name: self.joined(goal.name) for goal in self.plan.attacks}

    @cached_property
    def worst(self) -> dict[str, Tensors]:
        """What the suite made of all queries, by goal: see `run_ensemble`."""
        return {goal.name: self.joined(f"worst {goal.name}") for goal in self.plan.goals}

    @cached_property
    def recall(self) -> float:
        """R@1 in percent."""
        return float(self.joined("retrieval")["R@1"].mean())

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """The attacks that were run."""
        return self.plan.attacks

    @property
    def search(self) -> Search:
        """How perturbations are searched for."""
        return self.threat.search

    @property
    def budget(self) -> Budget:
        """What a perturbation may cost."""
        return self.threat.budget

    def sample(self, most: int) -> Tensor:
        """Return positions (S,) of at most `most` queries, drawn from the seed, ascending."""
        generator = torch.Generator().manual_seed(self.threat.seed + 1)
        return torch.randperm(len(self.numbers), generator=generator)[:most].sort().values

    @property
    def some(self) -> Tensor:
        """The positions of the queries that attacks are repeated on: 64, or 256 for all checks."""
        return self.sample(256 if self.plan.level == "full" else 64)

    def again(
        self, attack: Attack, positions: Tensor, *, surrogate: NetworkView | None = None, **changes: Any
    ) -> Measured:
        """Run an `attack` again on the queries at these `positions` (S,).

        `changes` are those of the threat: another budget, batch or search, which may have a `surrogate`.
        """
        threat = replace(self.threat, **changes)
        surrogate = surrogate if "search" in changes else self.surrogate
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
        draws = Draws(self.threat.seed, attack.drawn_as, numbers.tolist())
        with torch.no_grad():
            return images, queries, self.view.aim(attack, queries, draws)

    def _view(self, model: nn.Module, kind: str) -> NetworkView:
        z = [self.get(piece)["z"] for piece in self.stages["embed"] if piece.file.startswith(kind)]
        return self.subject.view(model, torch.cat(z))


def _check_fits(plan: Plan, data: Data) -> None:
    """Refuse a plan that does not go with the data."""
    apart = data.cameras is not None or data.gallery is not None
    if apart and plan.settings.protocol == "reference":
        told = "the reference protocol knows no cameras and no gallery"
        raise UserError(f"{told}: use the strict protocol, or leave them out", parameter="protocol")
    for attack in plan.attacks:
        attack.check_fits(len(data.ranked.labels))
    for goal in plan.goals:
        try:
            goal.check_fits(len(data.ranked.labels))
        except UserError as error:
            raise UserError(f"goal {goal.name} of the suite: {error}", parameter="suite") from None
