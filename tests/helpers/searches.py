"""A search of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from robustmetric.attacks import PGD, Problem


@dataclass(frozen=True, kw_only=True)
class Own(PGD):
    """A search of one's own that counts as a white-box attack: `way` does the work."""

    way: Callable[[Problem], Tensor]

    def minimise(self, problem: Problem) -> Tensor:
        return self.way(problem)

    @property
    def name(self) -> str:
        return "own"
