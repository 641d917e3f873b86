"""The document of a verification: what a threshold does to pairs, before and after an attack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from robustmetric.evaluation.document import Document, Format, FrozenModel, Number
from robustmetric.evaluation.ers import Values
from robustmetric.evaluation.intervals import Interval, Score, bootstrap_interval, exact_interval, resampled
from robustmetric.evaluation.record import DataEntry, NetworkEntry
from robustmetric.evaluation.verify_pairs import Choosing, Split, VerifyPlan
from robustmetric.verification import FARS, Roc, pairs_for, roc, weighted_roc

CONDITIONS = ("clean", "evasion", "impersonation", "both")
"""The images as they are, same pairs driven apart, different pairs driven together, and both."""

FEW = 10
"""Classes that a threshold should be chosen on at least."""

_BETTER: dict[str, Any] = {"tar": "higher", "far": "lower", "auc": "higher", "eer": "lower"}


class PairCounts(FrozenModel):
    """The pairs that were judged."""

    same: int
    different: int
    images: int = Field(description="images in them")
    classes: int = Field(description="classes of those images")
    source: Literal["drawn", "given"]
    left_out: int = Field(description="given pairs of a class that is judged with one that chose")
    sha256: str = Field(description="of the positions of both images and of what they are, in order")


class Threshold(FrozenModel):
    """The distance up to which a pair is accepted as same, and the pairs that chose it."""

    value: float
    source: Literal["validation images", "other classes", "given"]
    same: int | None = Field(default=None, description="same pairs that chose it")
    different: int | None = Field(default=None, description="different pairs that chose it")
    classes: int | None = Field(default=None, description="classes of those pairs")
    tar: Number = Field(default=None, description="TAR of those pairs, in %")
    far: Number = Field(default=None, description="FAR of those pairs, in %")
    sha256: str | None = Field(default=None, description="of their images, labels and positions")


class Rates(FrozenModel):
    """What the threshold does to the pairs, and how well any would do, in %."""

    tar: Score = Field(description="same pairs that are accepted")
    far: Score = Field(description="different pairs that are accepted")
    auc: Score = Field(description="same pairs that are nearer than different ones; as near counts half")
    eer: Score = Field(description="the FAR of the threshold at which as many same pairs are refused")


class Point(FrozenModel):
    """TAR at the largest threshold with a FAR of at most `far`, read off the clean pairs that are judged."""

    far: float
    threshold: Number = None
    tar: Score | None = Field(default=None, description="null where the pairs do not resolve the FAR")
    evaded: Number = Field(default=None, description="TAR at this threshold under evasion, in %")
    impersonated: Number = Field(default=None, description="FAR at this threshold under impersonation, in %")
    why: str = Field(default="", description="why there is no TAR")


class Verification(Document):
    """How well a network tells same pairs from different ones, and what is left of that under attack.

    `schema` names the format. `network` and `data` say what was verified, `settings` how. `pairs` counts the
    pairs that were judged, none of which chose the `threshold`. `clean` is what became of them as they are,
    `evasion` with same pairs driven apart, `impersonation` with different pairs driven together, `both` with
    both; these are null without an attack. `points` have TAR at some FAR. `notes` say in sentences what to
    mind, `versions` what computed it, and `arrays` names the file of the distances. `sha256` is the digest of
    all the rest.
    """

    schema_: Literal["robustmetric/verification/1"] = Field("robustmetric/verification/1", alias="schema")
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


FORMAT = Format(Verification, "verification", inside="verification", work="verification", command="verify")
"""How verifications are written and read."""


def load_verification(path: str | Path) -> Verification:
    """Read a verification from `path`: its JSON file or the folder it is in; a damaged one is refused."""
    return FORMAT.read(path)


def entries_of(
    plan: VerifyPlan, split: Split, clean: Tensor, attacked: Tensor | None, choosing: Tensor | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the entries of the document, and the distances by pair.

    `clean` and `attacked` (P,) are the distances of the pairs of the `split` that are judged, `choosing` (C,)
    those of the pairs that choose.
    """
    judged, same = split.judged, split.judged.same
    threshold, chose = _threshold(plan, split.choose, choosing)
    arrays = {
        "first": torch.from_numpy(judged.first),
        "second": torch.from_numpy(judged.second),
        "same": torch.from_numpy(same),
        "distance": clean,
        **chose,
    }
    tables = {"clean": clean.numpy()}
    if attacked is not None:
        arrays["attacked"], moved = attacked, attacked.numpy()
        tables |= {
            "evasion": np.where(same, moved, tables["clean"]),
            "impersonation": np.where(same, tables["clean"], moved),
            "both": moved,
        }
    curves = {name: weighted_roc(distances, same) for name, distances in tables.items()}
    whole = {name: curve(np.ones(len(same))) for name, curve in curves.items()}
    # The same resamples of pairs for all conditions.
    drawn: dict[str, list[list[float]]] = {name: [] for name in curves}
    for often in resampled([same, ~same], plan.seed):
        for name, curve in curves.items():
            drawn[name].append(_resampled(curve(often), name))
    tables = {name: np.array(rows).T for name, rows in drawn.items()}
    rates: dict[str, Rates] = {}
    for name, roc_of in whole.items():
        rates[name] = _rates(roc_of, threshold.value, tables[name], rates.get("clean"))
    entries: dict[str, Any] = {
        "settings": plan,
        "pairs": {
            "same": int(same.sum()),
            "different": int((~same).sum()),
            "images": len(judged.places),
            "classes": split.classes,
            "source": "given" if split.given else "drawn",
            "left_out": split.left_out,
            "sha256": judged.digest,
        },
        "threshold": threshold,
        **{name: rates.get(name) for name in CONDITIONS},
        "points": [_point(far, whole, values) for far, values in zip(FARS, tables["clean"][2:], strict=True)],
        "notes": list(_notes(plan, split, clean, threshold, rates["clean"])),
    }
    return entries, arrays


def _threshold(
    plan: VerifyPlan, choose: Choosing | None, distance: Tensor | None
) -> tuple[Threshold, dict[str, Tensor]]:
    """Take the given threshold, or choose it by a `distance` (C,); return the distances that chose."""
    if plan.threshold is not None or plan.far is None or choose is None or distance is None:
        return Threshold(value=plan.threshold or 0.0, source="given"), {}
    same = torch.from_numpy(choose.pairs.same)
    at = roc(distance, same).choose_threshold(plan.far)
    threshold = Threshold(
        value=at.threshold,
        source=choose.source,
        same=int(same.sum()),
        different=int((~same).sum()),
        classes=choose.classes,
        tar=_percent(at.tar),
        far=_percent(at.far),
        sha256=choose.sha256,
    )
    return threshold, {"choose/distance": distance, "choose/same": same}


def _resampled(curve: Roc, condition: str) -> list[float]:
    """Return what is measured of a resample: AUC, EER and, of clean pairs, TAR at each FAR."""
    found = [curve.at_far(far) for far in FARS] if condition == "clean" else []
    return [curve.auc, curve.eer, *(np.nan if at is None else at.tar for at in found)]


def _rates(curve: Roc, threshold: float, drawn: Values, clean: Rates | None) -> Rates:
    """Return the rates of a condition: exact intervals of what is counted, else by what was `drawn`."""
    at, same, different = curve.at(threshold), int(curve.accepted[-1]), int(curve.mistaken[-1])
    shares = {
        "tar": Interval(at.tar, *exact_interval(round(at.tar * same), same)),
        "far": Interval(at.far, *exact_interval(round(at.far * different), different)),
        "auc": bootstrap_interval(curve.auc, drawn[0]),
        "eer": bootstrap_interval(curve.eer, drawn[1]),
    }
    before = {key: None if clean is None else getattr(clean, key).value for key in shares}
    return Rates(**{key: _score(share, key, before[key]) for key, share in shares.items()})


def _point(far: float, curves: Mapping[str, Roc], drawn: Values) -> Point:
    """Return TAR at a FAR, with an interval by what was `drawn` (R,), and what an attack leaves there."""
    at = curves["clean"].at_far(far)
    if at is None:
        least, different = pairs_for(far), int(curves["clean"].mistaken[-1])
        why = f"a FAR of {far:g} takes at least {least:,} different pairs, and there are {different:,}"
        return Point(far=far, why=why)
    moved = curves["both"].at(at.threshold) if "both" in curves else None
    return Point(
        far=far,
        threshold=at.threshold,
        tar=_score(bootstrap_interval(at.tar, drawn), "tar"),
        evaded=None if moved is None else _percent(moved.tar),
        impersonated=None if moved is None else _percent(moved.far),
    )


def _score(share: Interval, key: str, before: float | None = None) -> Score:
    """Describe a share as a score in %."""
    ends = {name: _percent(value) for name, value in share._asdict().items()}
    return Score(**ends, before=before, better=_BETTER[key], unit="%")


def _percent(share: float) -> float:
    return round(100 * share, 9)


def _notes(
    plan: VerifyPlan, split: Split, clean: Tensor, threshold: Threshold, rates: Rates
) -> Iterator[str]:
    """Say what a reader has to mind."""
    same, different = int(split.judged.same.sum()), int((~split.judged.same).sum())
    if plan.far is not None:
        least, chose = pairs_for(plan.far), threshold.different or 0
        if min(chose, different) < least:
            few = (
                f"a FAR of {plan.far:g} takes at least {least:,} different pairs to choose the threshold and "
            )
            few += f"to measure it, and there are {chose:,} and {different:,}: draw a count of {2 * least:,}"
            yield few
        if chose < least:
            yield "the threshold is the strictest: none of the different pairs that chose it is accepted"
        if threshold.tar == 0:
            yield "the threshold accepts none of the same pairs that chose it: different pairs are nearer"
        if (rates.far.low or 0) > 100 * plan.far:
            above = f"the FAR is above its target of {100 * plan.far:g} %: the pairs that chose the threshold"
            yield f"{above} are easier than those judged; choose it on more classes, or on more like these"
    if (used := len(split.judged.places)) < 2 * (same + different):
        shared = f"{same + different:,} pairs share {used:,} images: intervals take pairs as independent"
        yield f"{shared}, and images of other classes may differ by more"
    if not split.given and same + different < plan.count:
        yield f"there are {same:,} same and {different:,} different pairs to judge, not {plan.count:,} in all"
    if split.left_out:
        left = f"{split.left_out:,} given pairs of a class that is judged with one that chose are left out"
        yield f"{left}: give validation images, or the threshold, to judge all"
    if threshold.classes is not None and threshold.classes < FEW:
        yield f"the threshold was chosen on {threshold.classes} classes: another few may choose another one"
    if bool((clean == clean[0]).all()):
        yield "all pairs are equally far apart: the network tells nothing apart, it has collapsed"
