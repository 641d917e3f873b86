"""The document of a verification: what a threshold does to pairs, before and after an attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from robustmetric.evaluation.data import Data
from robustmetric.evaluation.document import Document, Format, Number, Part
from robustmetric.evaluation.ers import Values
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.intervals import exact_interval
from robustmetric.evaluation.record import DataEntry, NetworkEntry, Score
from robustmetric.evaluation.verify_pairs import Numbers, Pairs, Split
from robustmetric.evaluation.verify_plan import VerifyPlan
from robustmetric.verification import FARS, Roc, pairs_for, roc, unresolved

SCHEMA: Literal["robustmetric/verification/1"] = "robustmetric/verification/1"
CONDITIONS = ("clean", "evasion", "impersonation", "both")
"""The images as they are, same pairs driven apart, different pairs driven together, and both."""

FEW = 10
"""Classes that a threshold should be chosen on at least."""

_RESAMPLES = 1000
_BETTER = {"tar": "higher", "far": "lower", "auc": "higher", "eer": "lower"}


class Judged(Protocol):
    """The pairs of a verification and their distances."""

    plan: VerifyPlan
    data: Data
    split: Split

    @property
    def clean(self) -> Tensor:
        """The distances (P,) of the pairs that are judged."""

    @property
    def attacked(self) -> Tensor:
        """The same under attack."""

    @property
    def sources(self) -> tuple[tuple[Images, Numbers], ...]:
        """The images of the pairs that are judged and of those that choose."""

    def distances(self, pairs: Pairs, source: int = 0) -> Tensor:
        """Return the distances (P,) of `pairs` of a `source`."""


class PairCounts(Part):
    """The pairs that were judged."""

    same: int
    different: int
    images: int = Field(description="images in them")
    classes: int = Field(description="classes of those images")
    source: Literal["drawn", "given"]
    left_out: int = Field(description="given pairs of a class that is judged with one that chose")
    sha256: str = Field(description="of the positions of both images and of what they are, in order")


class Threshold(Part):
    """The distance up to which a pair is accepted as same, and the pairs that chose it."""

    value: float
    source: Literal["validation images", "other classes", "given"]
    same: int | None = Field(None, description="same pairs that chose it")
    different: int | None = Field(None, description="different pairs that chose it")
    classes: int | None = Field(None, description="classes of those pairs")
    tar: Number = Field(None, description="TAR of those pairs, in %")
    far: Number = Field(None, description="FAR of those pairs, in %")
    sha256: str | None = Field(None, description="of their images, labels and positions")


class Rates(Part):
    """What the threshold does to the pairs, and how well any would do, in %."""

    tar: Score = Field(description="same pairs that are accepted")
    far: Score = Field(description="different pairs that are accepted")
    auc: Score = Field(description="same pairs that are nearer than different ones; as near counts half")
    eer: Score = Field(description="the FAR of the threshold at which as many same pairs are refused")


class Point(Part):
    """TAR at the largest threshold with a FAR of at most `far`, read off the clean pairs that are judged."""

    far: float
    threshold: Number = None
    tar: Score | None = Field(None, description="null where the pairs do not resolve the FAR")
    evaded: Number = Field(None, description="TAR at this threshold under evasion, in %")
    impersonated: Number = Field(None, description="FAR at this threshold under impersonation, in %")
    why: str = Field("", description="why there is no TAR")


class Verification(Document):
    """How well a network tells same pairs from different ones, and what is left of that under attack.

    `schema` names the format. `network` and `data` say what was verified, `settings` how. `pairs` counts the
    pairs that were judged, none of which chose the `threshold`. `clean` is what became of them as they are,
    `evasion` with same pairs driven apart, `impersonation` with different pairs driven together, `both` with
    both; these are null without an attack. `points` have TAR at some FAR. `notes` say in sentences what to
    mind, `versions` what computed it, and `arrays` names the file of the distances. `sha256` is the digest of
    all the rest.

    >>> Verification.model_fields["schema_"].default
    'robustmetric/verification/1'
    """

    schema_: Literal["robustmetric/verification/1"] = Field(SCHEMA, alias="schema")
    network: NetworkEntry
    data: DataEntry
    settings: VerifyPlan
    pairs: PairCounts
    threshold: Threshold
    clean: Rates
    evasion: Rates | None
    impersonation: Rates | None
    both: Rates | None
    points: list[Point]
    notes: list[str]
    versions: dict[str, str]

    @property
    def conditions(self) -> dict[str, Rates]:
        """The rates by condition, as far as they were measured."""
        found = {name: getattr(self, name) for name in CONDITIONS}
        return {name: rates for name, rates in found.items() if rates is not None}

    @property
    def headline(self) -> list[str]:
        """TAR and FAR at the threshold with their intervals, before and after an attack; the threshold."""
        threshold, settings, cosine = self.threshold, self.settings, 1 - self.threshold.value**2 / 2
        target, chose = "", "as given"
        if settings.far is not None:
            few = min(threshold.different or 0, self.pairs.different) < pairs_for(settings.far)
            target = f", {'too few pairs for the' if few else 'for a'} target of {100 * settings.far:g} %"
            chose = (
                f"chosen on {threshold.same:,} same and {threshold.different:,} different pairs of "
                f"{threshold.classes:,} classes, {threshold.source}"
            )
        lines = [
            f"TAR {_text(self.clean.tar)} at FAR {_text(self.clean.far)}{target}",
            f"accepted up to a distance of {threshold.value:.4f}, a cosine of {cosine:.4f}, {chose}",
        ]
        if self.both is not None:
            lines[1:1] = [
                f"attacked: TAR {_text(self.both.tar)}, FAR {_text(self.both.far)}, by {settings.search}, "
                f"ε = {255 * settings.eps:.4g}/255, α = {255 * settings.alpha:.3g}/255, η = {settings.steps}"
            ]
        return lines

    def __str__(self) -> str:
        return "\n".join([*self.headline, *self.notes])


def _text(score: Score) -> str:
    return f"{score.value:.1f} % [{score.low:.1f}, {score.high:.1f}]"


FORMAT = Format(
    Verification, "verification", SCHEMA, "verification.json", "verification",
    work="verification", command="verify", done="verified",
)  # fmt: skip
"""How verifications are written and read."""


def load_verification(path: str | Path) -> Verification:
    """Read a verification from `path`: its JSON file or the folder that it is in; a damaged one is refused.

    >>> load_verification("nowhere")
    Traceback (most recent call last):
    ...
    FileNotFoundError: there is no verification nowhere; give a verification.json, or a folder that holds one
    """
    return FORMAT.read(path)


def entries_of(materials: Judged) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the entries of the document, and the distances by pair."""
    plan, split, data = materials.plan, materials.split, materials.data
    judged, same = split.judged, split.judged.same
    arrays = {
        "first": torch.from_numpy(judged.first),
        "second": torch.from_numpy(judged.second),
        "same": torch.from_numpy(same),
        "distance": materials.clean,
    }
    threshold, chose = _threshold(materials)
    arrays |= chose
    clean = materials.clean.numpy()
    tables = {"clean": clean}
    if plan.attack:
        arrays["attacked"] = materials.attacked
        moved = materials.attacked.numpy()
        tables |= {
            "evasion": np.where(same, moved, clean),
            "impersonation": np.where(same, clean, moved),
            "both": moved,
        }
    counts = {name: Counts(distances, same) for name, distances in tables.items()}
    drawn, tars = _drawn(counts, plan.seed)
    found = _rates(counts, threshold["value"], drawn)
    used = np.unique(np.concatenate([judged.first, judged.second]))
    labels = data.labels.cpu()
    if data.gallery is not None:
        labels = torch.cat([labels, data.ranked.labels.cpu()])
    made: dict[str, Any] = {
        "settings": plan,
        "pairs": {
            "same": int(same.sum()),
            "different": int((~same).sum()),
            "images": len(used),
            "classes": len(labels[torch.from_numpy(used)].unique()),
            "source": "given" if split.given else "drawn",
            "left_out": split.left_out,
            "sha256": judged.digest,
        },
        "threshold": threshold,
        **{name: found.get(name) for name in CONDITIONS},
        "points": _points(counts, tars),
        "notes": list(_notes(materials, threshold, found["clean"])),
    }
    return made, arrays


def _threshold(materials: Judged) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the threshold that is given, or choose it; return with it the distances that chose."""
    plan, choose = materials.plan, materials.split.choose
    if plan.far is None or choose is None:
        return {"value": plan.threshold, "source": "given"}, {}
    distance = materials.distances(choose.pairs, len(materials.sources) - 1)
    same = torch.from_numpy(choose.pairs.same)
    at = roc(distance, same).choose(plan.far)
    told = {
        "value": at.threshold,
        "source": choose.source,
        "same": int(same.sum()),
        "different": int((~same).sum()),
        "classes": choose.classes,
        "tar": round(100 * at.tar, 9),
        "far": round(100 * at.far, 9),
        "sha256": choose.sha256,
    }
    return told, {"choose/distance": distance, "choose/same": same}


class Counts:
    """Pairs with `distances` (P,), counted by distance, each as often as is asked.

    `same` (P,) says what they are.
    """

    def __init__(self, distances: Values, same: NDArray[np.bool_]) -> None:
        self.levels, self.place = np.unique(distances, return_inverse=True)
        self.same = same

    def roc(self, often: Values | None = None) -> Roc:
        """Return the ROC of the pairs, each `often` (P,) so many times; once by default."""
        counts = []
        for kind in (self.same, ~self.same):
            times = None if often is None else often[kind]
            counts.append(np.bincount(self.place[kind], times, len(self.levels)).astype(np.int64))
        return Roc(self.levels, *counts)


def _drawn(counts: Mapping[str, Counts], seed: int) -> tuple[dict[str, Values], Values]:
    """Draw pairs with replacement, as many of each kind as there are, the same ones for all conditions.

    Return AUC and EER of each condition (R, 2), and TAR at each FAR (R, F), NaN where it is unresolved.
    """
    generator = np.random.default_rng(seed)
    same = counts["clean"].same
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in counts}
    points = []
    for _ in range(_RESAMPLES):
        often = np.zeros(len(same))
        for kind in (same, ~same):
            count = int(kind.sum())
            often[kind] = np.bincount(generator.integers(0, count, count), minlength=count)
        curves = {name: counted.roc(often) for name, counted in counts.items()}
        for name, curve in curves.items():
            measured[name].append((curve.auc, curve.eer))
        found = (curves["clean"].at_far(far) for far in FARS)
        points.append([np.nan if at is None else at.tar for at in found])
    return {name: np.array(rows) for name, rows in measured.items()}, np.array(points)


def _rates(
    counts: Mapping[str, Counts], threshold: float, drawn: Mapping[str, Values]
) -> dict[str, dict[str, Any]]:
    """Return the rates of each condition: exact intervals of what is counted, else by what was `drawn`."""
    found: dict[str, dict[str, Any]] = {}
    for name, counted in counts.items():
        curve, (aucs, eers) = counted.roc(), drawn[name].T
        at, same, different = curve.at(threshold), int(curve.accepted[-1]), int(curve.mistaken[-1])
        ends = {
            "tar": (at.tar, exact_interval(round(at.tar * same), same)),
            "far": (at.far, exact_interval(round(at.far * different), different)),
            "auc": (curve.auc, _ends(aucs)),
            "eer": (curve.eer, _ends(eers)),
        }
        found[name] = {key: _score(value, interval, key) for key, (value, interval) in ends.items()}
        if name != "clean":
            for key, score in found[name].items():
                score["before"] = found["clean"][key]["value"]
    return found


def _ends(drawn: Values) -> tuple[float, float]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def _score(value: float, ends: tuple[float, float], key: str) -> dict[str, Any]:
    """Describe a share as a score in %; an interval holds its value."""
    shown = {"value": value, "low": min(ends[0], value), "high": max(ends[1], value)}
    return {
        **{name: round(100 * share, 9) for name, share in shown.items()},
        "better": _BETTER[key],
        "unit": "%",
    }


def _points(counts: Mapping[str, Counts], drawn: Values) -> list[dict[str, Any]]:
    """Return TAR at each FAR, with intervals by what was `drawn`, and what an attack leaves there."""
    clean, points = counts["clean"].roc(), []
    for k, far in enumerate(FARS):
        at = clean.at_far(far)
        if at is None:
            points.append({"far": far, "why": unresolved(far, int(clean.mistaken[-1]))})
            continue
        point: dict[str, Any] = {
            "far": far,
            "threshold": at.threshold,
            "tar": _score(at.tar, _ends(drawn[:, k]), "tar"),
        }
        if "both" in counts:
            moved = counts["both"].roc().at(at.threshold)
            point |= {"evaded": round(100 * moved.tar, 9), "impersonated": round(100 * moved.far, 9)}
        points.append(point)
    return points


def _notes(materials: Judged, threshold: Mapping[str, Any], clean: Mapping[str, Any]) -> Iterator[str]:
    """Say what a reader has to mind."""
    plan, split = materials.plan, materials.split
    same, different = int(split.judged.same.sum()), int((~split.judged.same).sum())
    if plan.far is not None:
        least, chose = pairs_for(plan.far), threshold["different"]
        if min(chose, different) < least:
            yield (
                f"a FAR of {plan.far:g} takes at least {least:,} different pairs to choose the threshold and "
                f"as many to measure it, and there are {chose:,} and {different:,}: draw a count of "
                f"{2 * least:,} from enough images, or list more pairs"
            )
        if chose < least:
            yield "the threshold is the strictest: none of the different pairs that chose it is accepted"
        if threshold["tar"] == 0:
            yield "the threshold accepts none of the same pairs that chose it: different pairs are nearer"
        if clean["far"]["low"] > 100 * plan.far:
            yield (
                f"the FAR is above its target of {100 * plan.far:g} %: the pairs that chose the threshold "
                "are easier than those judged; choose it on more classes, or on more like these"
            )
    used = len(np.union1d(split.judged.first, split.judged.second))
    if used < 2 * (same + different):
        yield (
            f"{same + different:,} pairs share {used:,} images: intervals take pairs as independent, and "
            "other images, above all those of other classes, may differ by more"
        )
    if not split.given and same + different < plan.count:
        yield f"there are {same:,} same and {different:,} different pairs to judge, not {plan.count:,} in all"
    if split.left_out:
        yield (
            f"{split.left_out:,} given pairs are of a class that is judged with one that chose the threshold "
            "and are left out: give validation images, or the threshold, to judge all"
        )
    if (classes := threshold.get("classes")) is not None and classes < FEW:
        yield f"the threshold was chosen on {classes} classes: another few may choose another one"
    distances = materials.clean
    if bool((distances == distances[0]).all()):
        yield "all pairs are equally far apart: the network tells nothing apart, it has collapsed"
