"""Threat: what an attacker may do, and how it is searched."""

from __future__ import annotations

from dataclasses import dataclass

from robustmetric.attacks import Search
from robustmetric.perturb import Budget


@dataclass(frozen=True)
class Threat:
    """What a perturbation may cost and how it is searched, from a random `seed`, `batch` queries together."""

    budget: Budget
    search: Search
    seed: int = 0
    batch: int = 128
