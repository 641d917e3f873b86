"""The threat: how far an attacker may go, and how a perturbation is searched for."""

from __future__ import annotations

from dataclasses import dataclass

from robustmetric.attacks import Search
from robustmetric.perturb import Budget


@dataclass(frozen=True)
class Threat:
    """What an attacker may do: a `budget` for each perturbation and a `search` that finds it.

    `seed` is the random seed. `batch` images are perturbed together, which changes no score.
    """

    budget: Budget
    search: Search
    seed: int = 0
    batch: int = 128

    @property
    def evaluations(self) -> int:
        """The evaluations of the objective that the search takes for each image."""
        return self.search.num_evaluations(self.budget)
