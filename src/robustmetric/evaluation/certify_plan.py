"""How a certification is done: the noise, how many samples of it, the radii, and the attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from robustmetric.errors import UserError, brief, fraction, is_number
from robustmetric.evaluation.bounds import largest_radius, least_samples
from robustmetric.evaluation.plan import SearchPlan
from robustmetric.evaluation.smoothing import MOST_SIGMA
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, Norm


class CertifyPlan(SearchPlan):
    """How a certification is done: all that it depends on besides the network and the data.

    Make one with `CertifyPlan.make`, which checks all of it once.

    >>> plan = CertifyPlan.make(sigma=0.25)
    >>> plan.radii, plan.samples
    ((0.0625, 0.125, 0.25), 1000)
    """

    norm: ClassVar[Norm] = "l2"

    sigma: float = Field(gt=0, le=MOST_SIGMA, description="σ, the deviation of the noise on pixels in [0, 1]")
    radii: tuple[float, ...] = Field(
        min_length=1, description="lengths of perturbations (L2) to certify and to attack with, ascending"
    )
    samples: int = Field(1000, ge=2, description="number of noisy images that a query is judged with")
    choose: int = Field(
        100, ge=1, description="number of others, which choose the images it is compared with"
    )
    gallery_samples: int = Field(100, ge=1, description="number of noisy images of each image that is ranked")
    alpha: float = Field(0.001, gt=0, lt=0.5, description="failure probability per certificate")
    queries: int | None = Field(None, ge=1, description="number of images that query; null for all")
    seed: int = Field(0, ge=0, lt=2**32, description="random seed")
    batch: int = Field(128, ge=1, description="number of noisy images that are embedded together")
    attack: bool = Field(True, description="whether queries are attacked, for the upper bounds")
    attack_samples: int = Field(16, ge=1, description="number of noises that an attack sees the network with")
    steps: int = Field(32, ge=1, description="number of steps of an attack")
    search: str = Field("apgd", description="how perturbations are searched for: apgd, apgd(restarts=5)")

    @classmethod
    def make(cls, **settings: Any) -> CertifyPlan:
        """Make a plan of `settings`, some of its fields, and refuse what cannot be.

        `sigma` has to be given; `radii` are by default a quarter of it, half of it and all of it.

        >>> CertifyPlan.make(sigma=0.25, samples=10)
        Traceback (most recent call last):
        ...
        robustmetric.UserError: samples is 10, and nothing can be certified with fewer than 15 where alpha...
        """
        sigma: Any = settings.get("sigma")
        if (radii := settings.pop("radii", None)) is not None:
            settings["radii"] = _radii(radii)
        elif is_number(sigma):
            settings["radii"] = (sigma / 4, sigma / 2, sigma)
        plan = super().make(**settings)
        if plan.samples < (least := least_samples(plan.alpha)):
            raise UserError(
                f"samples is {plan.samples}, and nothing can be certified with fewer than {least} where "
                f"alpha is {plan.alpha:g}: give at least {least}, better 1,000",
                parameter="samples",
            )
        return plan

    @property
    def limit(self) -> float:
        """The largest radius that so many samples can certify at all, of a gallery with one negative."""
        return largest_radius(self.sigma, self.samples, self.alpha)

    def threat(self, radius: float) -> Threat:
        """Return the threat of perturbations of less than this `radius` (L2), whatever is rounded."""
        budget = Budget(eps=radius * (1 - 1e-5), alpha=min(1.0, radius / 4), steps=self.steps, norm="l2")
        return Threat(budget, self.searching, self.seed, self.batch)


def _radii(given: object) -> tuple[float, ...]:
    """Read radii from numbers or a text such as 0.25,0.5."""
    parts = given.split(",") if isinstance(given, str) else given
    if not isinstance(parts, Sequence) or not parts:
        parts = [given]
    found = [fraction(part) for part in parts]
    if not all(is_number(r) and r > 0 for r in found) or found != sorted(set(found)):  # type: ignore[operator,type-var]
        raise UserError(
            f"radii must be positive numbers in ascending order such as 0.25,0.5,1, not {brief(given)}: they "
            "are lengths of perturbations (L2) of pixels in [0, 1]",
            parameter="radii",
        )
    return tuple(float(r) for r in found)  # type: ignore[arg-type]
