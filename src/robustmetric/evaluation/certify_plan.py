"""How a certification is done: the noise, how many samples of it, the radii, and the attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field
from torch import Tensor

from robustmetric.attacks import Search, make_search
from robustmetric.attacks.search import bind
from robustmetric.evaluation.identity import options_of
from robustmetric.evaluation.plan import draw_queries
from robustmetric.evaluation.schema import Part
from robustmetric.evaluation.smoothing import check_sigma, check_whole, largest_radius, least_samples
from robustmetric.perturb import Budget
from robustmetric.registry import unknown
from robustmetric.validate import UserError, brief, fraction, is_number


class CertifyPlan(Part):
    """How a certification is done: all that it depends on besides the network and the images.

    Make one with `CertifyPlan.make`, which checks all of it once.

    >>> plan = CertifyPlan.make(sigma=0.25)
    >>> plan.radii, plan.samples
    ((0.0625, 0.125, 0.25), 1000)
    """

    sigma: float = Field(gt=0, description="σ, the deviation of the noise on pixels in [0, 1]")
    radii: tuple[float, ...] = Field(
        min_length=1, description="lengths of perturbations (L2) to certify and to attack with, ascending"
    )
    samples: int = Field(1000, ge=2, description="noisy images that a query is judged with")
    choose: int = Field(100, ge=1, description="others before, by which its nearest images are chosen")
    gallery_samples: int = Field(100, ge=1, description="noisy images of each image that is ranked")
    alpha: float = Field(
        0.001, gt=0, lt=0.5, description="the probability with which a bound of a query may fail"
    )
    queries: int | None = Field(None, ge=1, description="number of images that query; null for all")
    seed: int = Field(0, ge=0, lt=2**32, description="starts every random draw")
    batch: int = Field(128, ge=1, description="noisy images that are embedded together")
    attack: bool = Field(True, description="whether queries are attacked, for the upper bounds")
    attack_samples: int = Field(16, ge=1, description="noises that an attack sees the network with")
    steps: int = Field(32, ge=1, description="steps of an attack")
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
        for name in settings:
            if name not in cls.model_fields:
                raise UserError(unknown("setting", name, cls.model_fields))
        given = {n: f.default for n, f in cls.model_fields.items() if not f.is_required()} | settings
        given["sigma"] = check_sigma(given.get("sigma"))  # type: ignore[arg-type]
        given["radii"] = _radii(given.get("radii"), given["sigma"])
        alpha = given["alpha"]
        if not (is_number(alpha) and 0 < alpha < 0.5):
            raise UserError(
                f"alpha must be in (0, 0.5), not {alpha!r}: a bound fails with this probability",
                parameter="alpha",
            )
        for name in ("samples", "choose", "gallery_samples", "batch", "attack_samples", "steps"):
            given[name] = check_whole(name, given[name])
        if given["queries"] is not None:
            given["queries"] = check_whole("queries", given["queries"])
        if check_whole("seed", given["seed"], 0) >= 2**32:
            raise UserError(f"seed must be less than 2³², not {given['seed']}", parameter="seed")
        if not isinstance(given["attack"], bool):
            raise UserError(f"attack must be True or False, not {given['attack']!r}", parameter="attack")
        if given["samples"] < (least := least_samples(alpha)):
            raise UserError(
                f"samples is {given['samples']}, and nothing can be certified with fewer than {least} where "
                f"alpha is {alpha:g}: give at least {least}, better 1,000",
                parameter="samples",
            )
        if given["attack"]:
            given["search"] = _search(given["search"]).name
        return cls(**given)

    @property
    def limit(self) -> float:
        """The largest radius that so many samples can certify at all, of a gallery with one negative."""
        return largest_radius(self.sigma, self.samples, self.alpha)

    def budget(self, radius: float) -> Budget:
        """Return what a perturbation of less than this `radius` (L2) may cost, whatever is rounded."""
        return Budget(eps=radius * (1 - 1e-5), alpha=min(1.0, radius / 4), steps=self.steps, norm="l2")

    def draw(self, count: int) -> Tensor:
        """Return the numbers (Q,) of the queries, ascending: drawn from the seed, or all `count` of them."""
        return draw_queries(count, self.queries, self.seed)

    def describe(self) -> dict[str, Any]:
        """Return all that decides about the certificate, in JSON's types."""
        options = options_of(make_search(self.search)) if self.attack else None
        return {"settings": self.model_dump(mode="json"), "options": options}


def _radii(given: object, sigma: float) -> tuple[float, ...]:
    """Read radii from numbers or a text such as 0.25,0.5; by default they are multiples of sigma."""
    if given is None:
        return (sigma / 4, sigma / 2, sigma)
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


def _search(given: object) -> Search:
    """Make the search by its name; one that does not know the norm l2 is refused."""
    if not isinstance(given, str):
        raise UserError(f"search is {given!r}; give its name, such as apgd", parameter="search")
    search = bind(make_search(given), None)
    if "l2" not in search.norms:
        raise UserError(
            f"search {given!r} keeps to the budget of each pixel, and a radius is an L2 length: take apgd",
            parameter="search",
        )
    return search
