"""How a verification is done: how many pairs, the threshold, and how pairs are attacked."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from robustmetric.errors import UserError
from robustmetric.evaluation.plan import SearchPlan
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget
from robustmetric.verification import check_far

FAR = 0.01
"""The FAR that a threshold is chosen for by default."""

SHARED = ("eps", "alpha", "steps", "search", "seed", "batch")
"""Settings that are those of an evaluation."""


class VerifyPlan(SearchPlan):
    """How a verification is done: all that it depends on besides the network, the data and given pairs.

    Make one with `VerifyPlan.make`, which checks all of it once.

    >>> VerifyPlan.make(far=1e-3).far, VerifyPlan.make().far, VerifyPlan.make(threshold=0.9).far
    (0.001, 0.01, None)
    """

    count: int = Field(2000, ge=2, description="number of pairs to judge, half of them same")
    threshold: float | None = Field(
        None,
        ge=0,
        le=2,
        description="distance up to which a pair is same, √(2 − 2c) for a cosine c; null to choose it",
    )
    far: float | None = Field(
        None, description="FAR that the threshold is chosen for; null if the threshold is given"
    )
    attack: bool = Field(True, description="whether the first image of each pair is attacked")
    eps: float = Field(8 / 255, ge=0, le=1, description="ε, the largest change of a pixel in [0, 1]")
    alpha: float = Field(3 / 255, gt=0, le=1, description="α, the size of a step")
    steps: int = Field(32, ge=1, description="η, the number of steps")
    search: str = Field("pgd", description="how perturbations are searched for: pgd, apgd, square")
    seed: int = Field(0, ge=0, lt=2**32, description="random seed")
    batch: int = Field(128, ge=1, description="number of pairs that are attacked together")

    @classmethod
    def make(cls, **settings: Any) -> VerifyPlan:
        """Make a plan of `settings`, some of its fields, and refuse what cannot be.

        >>> VerifyPlan.make(count=1)
        Traceback (most recent call last):
        ...
        robustmetric.UserError: count is 1: input should be greater than or equal to 2 (number of pairs to ...
        """
        plan = super().make(**settings)
        if plan.threshold is None:
            return plan.model_copy(update={"far": check_far(FAR if plan.far is None else plan.far)})
        if plan.far is not None:
            raise UserError(
                "a threshold that is given is not chosen for a FAR: give one of threshold and far",
                parameter="far",
            )
        return plan

    @property
    def threat(self) -> Threat:
        """The budget of a perturbation, and how it is searched for."""
        budget = Budget(eps=self.eps, alpha=self.alpha, steps=self.steps)
        return Threat(budget, self.searching, self.seed, self.batch)
