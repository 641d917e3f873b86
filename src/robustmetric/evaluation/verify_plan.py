"""How a verification is done: how many pairs, the threshold, and how pairs are attacked."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from pydantic import Field, PrivateAttr

from robustmetric.attacks import Search
from robustmetric.evaluation.identity import options_of
from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.schema import Part
from robustmetric.perturb import Budget
from robustmetric.registry import unknown
from robustmetric.validate import UserError, is_number
from robustmetric.verification import check_far

FAR = 0.01
"""The FAR that a threshold is chosen for by default."""

SHARED = ("eps", "alpha", "steps", "search", "seed", "batch")
"""Settings that are those of an evaluation."""


class VerifyPlan(Part):
    """How a verification is done: all that it depends on besides the network, the images and given pairs.

    Make one with `VerifyPlan.make`, which checks all of it once.

    >>> VerifyPlan.make(far=1e-3).far, VerifyPlan.make().far, VerifyPlan.make(threshold=0.9).far
    (0.001, 0.01, None)
    """

    count: int = Field(2000, ge=2, description="pairs to judge, half of them same, drawn from the seed")
    threshold: float | None = Field(
        None, ge=0, le=2, description="distance up to which a pair is same; null to choose it on other pairs"
    )
    far: float | None = Field(
        None, gt=0, lt=1, description="FAR that the threshold is chosen for; null if the threshold is given"
    )
    attack: bool = Field(True, description="whether the first image of each pair is attacked")
    eps: float = Field(8 / 255, ge=0, le=1, description="ε, the largest change of a pixel in [0, 1]")
    alpha: float = Field(3 / 255, gt=0, le=1, description="α, the size of a step")
    steps: int = Field(32, ge=1, description="η, the number of steps")
    search: str = Field("pgd", description="how perturbations are searched for: pgd, apgd, square")
    seed: int = Field(0, ge=0, lt=2**32, description="starts every random draw")
    batch: int = Field(128, ge=1, description="pairs that are attacked together")

    _shared: Plan | None = PrivateAttr(None)  # knows a search of the user's own

    @classmethod
    def make(cls, **settings: Any) -> VerifyPlan:
        """Make a plan of `settings`, some of its fields, and refuse what cannot be.

        >>> VerifyPlan.make(count=1)
        Traceback (most recent call last):
        ...
        robustmetric.UserError: count must be a whole number of at least 2, not 1: half of the pairs are same
        """
        for name in settings:
            if name not in cls.model_fields:
                raise UserError(unknown("setting", name, cls.model_fields))
        given = {name: field.default for name, field in cls.model_fields.items()} | settings
        if not is_number(given["count"], Integral) or given["count"] < 2:
            raise UserError(
                f"count must be a whole number of at least 2, not {given['count']!r}: half of the pairs are "
                "same",
                parameter="count",
            )
        threshold = given["threshold"]
        if threshold is not None and not (is_number(threshold) and 0 <= threshold <= 2):
            raise UserError(
                f"threshold must be in [0, 2], not {threshold!r}: it is a distance on the unit sphere, the "
                "root of 2 − 2c for a cosine c",
                parameter="threshold",
            )
        if threshold is None:
            given["far"] = check_far(FAR if given["far"] is None else given["far"])
        elif given["far"] is not None:
            raise UserError(
                "a threshold that is given is not chosen for a FAR: give one of threshold and far",
                parameter="far",
            )
        if not isinstance(given["attack"], bool):
            raise UserError(f"attack must be True or False, not {given['attack']!r}", parameter="attack")
        shared = _shared_plan({name: given[name] for name in SHARED})
        if shared.transfers:
            raise UserError(
                f"search {shared.search!r} perturbs another network: give one of pgd, apgd, nes, spsa and "
                "square",
                parameter="search",
            )
        plan = cls(**given | {name: getattr(shared, name) for name in SHARED})
        plan._shared = shared
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VerifyPlan) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(tuple(self.model_dump().values()))

    @property
    def budget(self) -> Budget:
        """What a perturbation may cost."""
        return Budget(eps=self.eps, alpha=self.alpha, steps=self.steps)

    @property
    def searching(self) -> Search:
        """The search."""
        if self._shared is None:  # read from a document
            self._shared = _shared_plan({name: getattr(self, name) for name in SHARED})
        return self._shared.search_on()

    def describe(self) -> dict[str, Any]:
        """Return all that decides about the scores, in JSON's types."""
        options = options_of(self.searching) if self.attack else None
        return {"settings": self.model_dump(mode="json"), "options": options}


def _shared_plan(settings: dict[str, Any]) -> Plan:
    """Make the plan of an evaluation with these settings, which checks them."""
    return Plan.make(**settings, attacks=["ES"], checks="none")
