"""How a verification is done: how many pairs, the threshold, and how pairs are attacked."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PrivateAttr

from robustmetric.errors import UserError
from robustmetric.evaluation.document import FrozenModel, validated
from robustmetric.evaluation.identity import options_of
from robustmetric.evaluation.plan import DEFAULTS, Plan
from robustmetric.evaluation.threat import Threat
from robustmetric.verification import check_far

FAR = 0.01
"""The FAR that a threshold is chosen for by default."""

SHARED = ("eps", "alpha", "steps", "search", "seed", "batch")
"""Settings that are those of an evaluation."""


class VerifyPlan(FrozenModel):
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

    _threat: Threat | None = PrivateAttr(None)  # has the search if it is the user's own

    @classmethod
    def make(cls, **settings: Any) -> VerifyPlan:
        """Make a plan of `settings`, some of its fields, and refuse what cannot be.

        >>> VerifyPlan.make(count=1)
        Traceback (most recent call last):
        ...
        robustmetric.UserError: count is 1: input should be greater than or equal to 2 (number of pairs to ...
        """
        shared = Plan.make(**{n: settings.get(n, DEFAULTS[n]) for n in SHARED}, attacks=["ES"], checks="none")
        if shared.transfers:
            raise UserError(
                f"search {shared.settings.search!r} perturbs another network: give one of pgd, apgd, nes, "
                "spsa and square",
                parameter="search",
            )
        plan = validated(cls, "setting", settings | {name: getattr(shared.settings, name) for name in SHARED})
        if plan.threshold is None:
            plan = plan.model_copy(update={"far": check_far(FAR if plan.far is None else plan.far)})
        elif plan.far is not None:
            raise UserError(
                "a threshold that is given is not chosen for a FAR: give one of threshold and far",
                parameter="far",
            )
        plan._threat = shared.threat
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VerifyPlan) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(tuple(self.model_dump().values()))

    @property
    def threat(self) -> Threat:
        """The budget of a perturbation, and how it is searched for."""
        return self._threat or VerifyPlan.make(**self.model_dump()).threat

    def describe(self) -> dict[str, Any]:
        """Return all that decides the scores, in JSON's types."""
        options = options_of(self.threat.search) if self.attack else None
        return {"settings": self.model_dump(mode="json"), "options": options}
