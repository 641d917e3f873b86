"""The plan of a certification and its certificate: what is known of R@1 under perturbations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from robustmetric.errors import UserError, brief, fraction, is_number
from robustmetric.evaluation.bounds import largest_radius, least_samples
from robustmetric.evaluation.document import Document, Format, FrozenModel, Number
from robustmetric.evaluation.ers import Values
from robustmetric.evaluation.intervals import Score, intervals
from robustmetric.evaluation.plan import SearchPlan
from robustmetric.evaluation.record import DataEntry, NetworkEntry, QueryCounts
from robustmetric.evaluation.smoothing import MOST_SIGMA
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Budget, Norm


class CertifyPlan(SearchPlan):
    """How a certification is done: all that it depends on besides the network and the data.

    Make one with `CertifyPlan.make`, which checks all of it once.
    """

    norm: ClassVar[Norm] = "l2"

    sigma: float = Field(gt=0, le=MOST_SIGMA, description="σ, the deviation of the noise on pixels in [0, 1]")
    radii: tuple[float, ...] = Field(min_length=1, description="lengths (L2) of perturbations, ascending")
    samples: int = Field(1000, ge=2, description="number of noisy images that a query is judged with")
    choose: int = Field(100, ge=1, description="number of others, which choose what it is compared with")
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
            told = f"samples is {plan.samples}, and nothing can be certified with fewer than {least}"
            raise UserError(f"{told} where alpha is {plan.alpha:g}: better give 1,000", parameter="samples")
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
        told = f"radii must be positive numbers in ascending order such as 0.25,0.5,1, not {brief(given)}"
        raise UserError(f"{told}: they are lengths (L2) of perturbations", parameter="radii")
    return tuple(float(r) for r in found)  # type: ignore[arg-type]


class Bound(FrozenModel):
    """What is known of R@1 under perturbations of a radius, in % of queries, as `certify` returns it."""

    radius: float = Field(description="the length (L2) of a perturbation of pixels in [0, 1]")
    certified: Score = Field(description="queries whose nearest image is of their class, whatever is done")
    attacked: Score | None = Field(description="queries that were not misranked, by the estimate")
    upper: Score | None = Field(description="queries that were not misranked for sure: no less than R@1")


class Certificate(Document):
    """What is certain of the smoothed network's R@1 under perturbations of at most some radii (L2).

    `schema` names the format. `network` and `data` say what was certified, `settings` how, and `queries`
    counts the images that queried. `recall` is R@1 of the smoothed network, as estimated; `abstained` is the
    share of queries that the estimate ranks right and that are certified at no radius, `wrong` the share that
    it ranks wrong. `radius` is the mean of the certified radii, 0 of those queries, and `median` their
    median; `limit` is the largest that the number of samples allows. `bounds` are those of each radius,
    `versions` say what computed them, and `arrays` names the file of per-query values. `sha256` is the digest
    of all the rest.
    """

    schema_: Literal["robustmetric/certificate/1"] = Field("robustmetric/certificate/1", alias="schema")
    network: NetworkEntry
    data: DataEntry
    settings: CertifyPlan
    queries: QueryCounts
    recall: Score
    abstained: Score
    wrong: Score
    radius: Score
    median: Number
    limit: Number
    bounds: list[Bound]
    versions: dict[str, str]

    def at(self, radius: float) -> Bound:
        """Return the bounds at a `radius` of the settings."""
        for bound in self.bounds:
            if bound.radius == radius:
                return bound
        known = ", ".join(f"{bound.radius:g}" for bound in self.bounds)
        raise UserError(f"nothing was certified at the radius {radius!r}; known: {known}", parameter="radii")

    def says(self, bound: Bound) -> str:
        """Say in a sentence what a `bound` is worth."""
        between = f"is at least {_text(bound.certified)}"
        if bound.upper is not None:
            between = f"lies between {_text(bound.certified)} and {_text(bound.upper)}"
        return (
            "the true R@1 of the smoothed network on these queries under L2 perturbations of at most "
            f"{bound.radius:g} {between}, with probability 1 − {self.settings.alpha:g} for each of them"
        )

    def __str__(self) -> str:
        lines = [
            f"R@1 {_text(self.recall)}  abstained {_text(self.abstained)}  wrong {_text(self.wrong)}  "
            f"mean radius {_text(self.radius, 3)}"
        ]
        for bound in self.bounds:
            told = f"radius {bound.radius:g}: certified R@1 {_text(bound.certified)}"
            if bound.attacked is not None and bound.upper is not None:
                told += f", attacked R@1 {_text(bound.attacked)}, at most {_text(bound.upper)}"
            lines.append(told)
        return "\n".join(lines)


def _text(score: Score, digits: int = 1) -> str:
    return "-" if score.value is None else f"{score.value:.{digits}f}"


FORMAT = Format(Certificate, "certificate", inside="certificate", work="certification", command="certify")
"""How certificates are written and read."""


def load_certificate(path: str | Path) -> Certificate:
    """Read a certificate from `path`: its JSON file or the folder that it is in; a damaged one is refused."""
    return FORMAT.read(path)


def entries_of(arrays: dict[str, Tensor], plan: CertifyPlan, images: int, others: int) -> dict[str, Any]:
    """Return the entries of a certificate from per-query `arrays` (Q, …), of so many `images` that may query.

    Every query has at least `others` images of another class to be told from.
    """
    values, hit = per_query(arrays, plan), arrays["hit"]
    if hit.isnan().all():
        told = f"none of the {len(hit)} queries has an image of its class to find: give more queries"
        raise UserError(told, parameter="queries")
    found = intervals(values, seed=plan.seed, percent=values.keys() - {"radius"})[0]

    def score(name: str, better: str = "higher", unit: str = "%") -> dict[str, Any] | None:
        return {**found[name]._asdict(), "better": better, "unit": unit} if name in found else None

    return {
        "settings": plan,
        "queries": {"count": len(hit), "of": images, "left_out": int(hit.isnan().sum())},
        "recall": score("recall"),
        "abstained": score("abstained", "lower"),
        "wrong": score("wrong", "lower"),
        "radius": score("radius", unit="L2"),
        "median": float(np.nanmedian(values["radius"])),
        "limit": largest_radius(plan.sigma, plan.samples, plan.alpha, others),
        "bounds": [
            {"radius": radius, **{name: score(f"{name}/{k}") for name in ("certified", "attacked", "upper")}}
            for k, radius in enumerate(plan.radii)
        ],
    }


def per_query(arrays: dict[str, Tensor], plan: CertifyPlan) -> dict[str, Values]:
    """Return what is averaged, (Q,) by name: percent of queries, NaN of those without an answer to find."""
    hit, radius = arrays["hit"], arrays["radius"]
    asked = ~hit.isnan()

    def share(true: Tensor) -> Values:
        found: Values = (100.0 * true.double()).where(asked, torch.nan).numpy()
        return found

    values = {
        "recall": share(hit > 0),
        "abstained": share((hit > 0) & ~(radius > 0)),
        "wrong": share(~(hit > 0)),
        "radius": radius.numpy(),
    }
    for k, length in enumerate(plan.radii):
        values[f"certified/{k}"] = share(radius > length)  # at the radius itself the margin may be zero
        if plan.attack:
            values[f"attacked/{k}"] = share(arrays["attacked"][:, k] > 0)
            values[f"upper/{k}"] = share(~(arrays["broken"][:, k] > 0))
    return values
