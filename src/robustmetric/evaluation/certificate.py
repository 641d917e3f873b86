"""The certificate: what is known of a smoothed network's R@1 under perturbations, as JSON and arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from robustmetric.errors import UserError
from robustmetric.evaluation.bounds import largest_radius
from robustmetric.evaluation.certify_plan import CertifyPlan
from robustmetric.evaluation.document import Document, Format, FrozenModel, Number
from robustmetric.evaluation.ers import Values
from robustmetric.evaluation.intervals import Score, intervals
from robustmetric.evaluation.record import DataEntry, NetworkEntry, QueryCounts

SCHEMA: Literal["robustmetric/certificate/1"] = "robustmetric/certificate/1"


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

    >>> Certificate.model_fields["schema_"].default
    'robustmetric/certificate/1'
    """

    schema_: Literal["robustmetric/certificate/1"] = Field(SCHEMA, alias="schema")
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
        low = _text(bound.certified)
        between = (
            f"is at least {low}" if bound.upper is None else f"lies between {low} and {_text(bound.upper)}"
        )
        return (
            f"the true R@1 of the smoothed network on these queries under L2 perturbations of at most "
            f"{bound.radius:g} "
            f"{between}, with probability 1 − {self.settings.alpha:g} for each query and bound"
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
        raise UserError(
            f"none of the {len(hit)} queries has an image of its class to find: give more queries",
            parameter="queries",
        )
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
