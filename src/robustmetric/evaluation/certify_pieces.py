"""The pieces of a certification: the gallery as the smoothed network sees it, and blocks of queries.

Noise comes from a stream for each image and purpose. That of the gallery is another one than that of the
queries, so that the vectors that a query is compared with do not depend on the samples that it is judged
with: else the bounds would not hold. For the same reason other samples choose which images are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from robustmetric.attacks import Draws, Misrank, make_search
from robustmetric.distance import ROUNDING, BrokenEmbeddingsError, embed
from robustmetric.evaluation.certify_plan import CertifyPlan
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.radius import Samples, sure_radius
from robustmetric.evaluation.scene import Scene, run_attack
from robustmetric.evaluation.smoothing import (
    Moments,
    Smoothed,
    lower_bound,
    mean_of,
    noisy_embeddings,
)
from robustmetric.evaluation.staged import Stage, TensorPiece, Tensors, Tick, fetch, search_cost
from robustmetric.evaluation.store import Store
from robustmetric.evaluation.subject import Subject
from robustmetric.evaluation.threat import Threat
from robustmetric.gallery import excluded
from robustmetric.perturb import device_of

_RANKED = 256  # images of the gallery that are kept together
_QUERIES = 8  # queries that are kept together: each is embedded a thousand times


class Sides(NamedTuple):
    """Positions in the gallery of what counts for a query: `mates` of its class, and `others`."""

    mates: Tensor
    others: Tensor


class Judged(NamedTuple):
    """What samples say of an image: whether it `hit`, and how surely it is right, or wrong.

    `mate` and `rival` are the nearest images of its class and of others, by samples of their own. `right` is
    a lower bound of the margin by which the mate is nearer than every image of another class, `wrong` of that
    by which the rival is nearer than every image of its class. `radius` is how far the mate stays nearer, by
    the distribution of the margins too; NaN if that was not asked for.
    """

    mate: int
    rival: int
    hit: bool
    right: float
    wrong: float
    radius: float


@dataclass(eq=False)
class CertifyMaterials:
    """What pieces are made from: the subject, the plan, and the pieces that are finished."""

    subject: Subject
    plan: CertifyPlan
    store: Store = field(default_factory=Store)

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers (Q,) of the images that query."""
        return self.plan.draw(len(self.subject.images))

    @property
    def ranked(self) -> Images:
        """The images that are ranked."""
        return self.subject.images if self.subject.gallery is None else self.subject.gallery[0]

    @cached_property
    def stages(self) -> tuple[Stage[CertifyMaterials], ...]:
        """All pieces by stage, in the order of their making."""
        ranked = range(-(-len(self.ranked) // _RANKED))
        blocks = range(-(-len(self.numbers) // _QUERIES))
        stages = (
            Stage[CertifyMaterials](RankedPiece.stage, 0, tuple(map(RankedPiece, ranked))),
            Stage[CertifyMaterials](CertifyPiece.stage, 1, tuple(map(CertifyPiece, blocks))),
        )
        if not self.plan.attack:
            return stages
        return (*stages, Stage(AttackedPiece.stage, 2, tuple(map(AttackedPiece, blocks))))

    @cached_property
    def vectors(self) -> Tensor:
        """The gallery (N, D) as the smoothed network sees it, on the unit sphere in double precision."""
        return torch.cat([fetch(self.store, piece, self)["v"] for piece in self.stages[0].pieces])

    def joined(self, stage: int) -> Tensors:
        """Return what the pieces of a stage found, for all queries."""
        parts = [fetch(self.store, piece, self) for piece in self.stages[stage].pieces]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def sides(self, number: int) -> Sides:
        """Say which images count for a query: not itself, and none of its class and camera."""
        query = self.subject.as_queries(torch.empty(len(self.subject.images), 0))[torch.tensor([number])]
        gallery = self.subject.as_gallery(self.vectors)
        counts = ~excluded(query, gallery, slice(0, len(gallery)))[0]
        same = gallery.labels == query.labels
        return Sides((same & counts).nonzero()[:, 0], (~same & counts).nonzero()[:, 0])

    def judge(
        self, image: Tensor, number: int, purpose: str = "certify", *, how_far: bool = True
    ) -> Judged | None:
        """Judge the ranking of an image (C, H, W) as that of a query; None if it has no answer to find.

        All its samples are in memory if `how_far` is asked, which needs their distribution.
        """
        plan, (mates, others) = self.plan, self.sides(number)
        if len(mates) == 0:
            return None
        near = self.vectors @ mean_of(self.samples(image, number, f"{purpose}/choose", plan.choose))
        mate = int(mates[near[mates].argmax()])
        if len(others) == 0:  # nothing can be wrong, as far as anything could be certified
            return Judged(mate, -1, True, 1.0, -1.0, plan.limit)
        rival = int(others[near[others].argmax()])
        parts, radius = self.samples(image, number, f"{purpose}/judge", plan.samples), math.nan
        if how_far:
            samples = Samples.of(parts, plan.samples)
            seen, ways = samples.moments, (self.vectors[mate], self.vectors[others])
            radius = sure_radius(samples, *ways, sigma=plan.sigma, alpha=plan.alpha)
        else:
            seen = Moments.of(parts)
        near = self.vectors @ seen.mean
        return Judged(
            mate,
            rival,
            bool(near[mates].max() > near[others].max()),
            self._bound(seen, mate, others, plan.alpha / 2),  # the other half is for the distribution
            self._bound(seen, rival, mates, plan.alpha),
            radius,
        )

    def _bound(self, seen: Moments, anchor: int, rivals: Tensor, alpha: float) -> float:
        mean, variance = seen.margins(self.vectors[anchor], self.vectors[rivals])
        return float(lower_bound(mean, variance, seen.count, alpha).min())

    def samples(self, image: Tensor, number: int, purpose: str, count: int) -> Iterator[Tensor]:
        """Embed an image (C, H, W) so often with noise of the stream of a number and a purpose."""
        plan = self.plan
        return noisy_embeddings(
            self.subject.model,
            image,
            sigma=plan.sigma,
            draws=Draws(plan.seed, purpose, [number]),
            samples=count,
            batch=plan.batch,
        )

    def block(self, number: int) -> Tensor:
        """Return the numbers (B,) of the queries of a block."""
        return self.numbers[number * _QUERIES : (number + 1) * _QUERIES]


@dataclass(frozen=True)
class RankedPiece(TensorPiece[CertifyMaterials]):
    """The k-th part of the gallery as the smoothed network sees it: v (B, D)."""

    stage: ClassVar[str] = "embed"  # type: ignore[misc]

    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"ranked-{self.number:05d}.safetensors"

    def cost(self, materials: CertifyMaterials) -> int:
        """Return the number of noisy images."""
        images = min(_RANKED, len(materials.ranked) - self.number * _RANKED)
        return images * materials.plan.gallery_samples

    def make(self, materials: CertifyMaterials, tick: Tick | None = None) -> Tensors:
        """Average the embeddings of each image over noise of its own."""
        plan, images = materials.plan, materials.ranked
        begin = self.number * _RANKED
        part = range(begin, min(begin + _RANKED, len(images)))
        found = []
        for position in part:
            image = images[torch.tensor([position])][0]
            mean = mean_of(materials.samples(image, position, "certify/gallery", plan.gallery_samples))
            length = torch.linalg.vector_norm(mean)
            if length < ROUNDING:
                raise BrokenEmbeddingsError(
                    f"the mean of {plan.gallery_samples} noisy embeddings of image {position} is zero and "
                    f"has no direction: sigma {plan.sigma:g} is too much for this network; give a lower one"
                )
            found.append(mean / length)
            if tick is not None:
                tick(of=len(part))
        return {"v": torch.stack(found)}


@dataclass(frozen=True)
class CertifyPiece(TensorPiece[CertifyMaterials]):
    """How far the rankings of a block of queries are certain."""

    stage: ClassVar[str] = "certify"  # type: ignore[misc]

    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"certify-{self.number:05d}.safetensors"

    def cost(self, materials: CertifyMaterials) -> int:
        """Return the number of noisy images."""
        return len(materials.block(self.number)) * (materials.plan.choose + materials.plan.samples)

    def make(self, materials: CertifyMaterials, tick: Tick | None = None) -> Tensors:
        """Judge the queries as they are; one without an answer to find is NaN."""
        numbers = materials.block(self.number)
        images = materials.subject.images[numbers]
        rows = []
        for image, number in zip(images, numbers.tolist(), strict=True):
            rows.append(_row(materials.judge(image, number)))
            if tick is not None:
                tick(of=len(numbers))
        mate, rival, hit, right, wrong, radius = torch.tensor(rows, dtype=torch.float64).unbind(1)
        return {
            "number": numbers.clone(),
            "mate": mate.long(),
            "rival": rival.long(),
            "hit": hit.clone(),
            "right": right.clone(),
            "wrong": wrong.clone(),
            "radius": radius.clone(),
        }


@dataclass(frozen=True)
class AttackedPiece(TensorPiece[CertifyMaterials]):
    """What attacks of each radius make of a block of queries: (B, R) values."""

    stage: ClassVar[str] = "attack"  # type: ignore[misc]

    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"attacked-{self.number:05d}.safetensors"

    def asks(self, materials: CertifyMaterials) -> int:
        """Return how often the search will ask for the objective, of all radii."""
        plan = materials.plan
        search = make_search(plan.search)
        return sum(search.num_evaluations(plan.budget(radius)) for radius in plan.radii)

    def cost(self, materials: CertifyMaterials) -> int:
        """Return the noisy images of its searches, and of judging what they found."""
        plan, search = materials.plan, make_search(materials.plan.search)
        searched = sum(search_cost(search, plan.budget(radius)) for radius in plan.radii)
        judged = len(plan.radii) * (plan.choose + plan.samples)
        return len(materials.block(self.number)) * (searched * plan.attack_samples + judged)

    def make(self, materials: CertifyMaterials, tick: Tick | None = None) -> Tensors:
        """Attack the queries radius by radius; one that is wrong for sure is left alone from then on.

        What a smaller perturbation reached, a larger one may reach too: so it counts for all larger radii.
        """
        plan = materials.plan
        clean = fetch(materials.store, CertifyPiece(self.number), materials)
        hit, wrong = clean["hit"].clone(), clean["wrong"].clone()
        found: dict[str, list[Tensor]] = {"attacked": [], "broken": [], "change": []}
        for radius in plan.radii:
            change = torch.full_like(hit, torch.nan)
            open_ = (~hit.isnan() & ~(wrong > 0)).nonzero()[:, 0]
            if len(open_):
                numbers = clean["number"][open_]
                before = materials.subject.images[numbers]
                after = attacked(materials, numbers, radius, tick).to(before.device)
                change[open_] = (after - before).double().flatten(1).norm(dim=1).cpu()
                for row, image, number in zip(open_.tolist(), after, numbers.tolist(), strict=True):
                    judged = materials.judge(image, number, f"certify/attack/{radius!r}", how_far=False)
                    assert judged is not None  # noqa: S101
                    hit[row] = torch.minimum(hit[row], hit.new_tensor(100.0 * judged.hit))
                    wrong[row] = torch.maximum(wrong[row], wrong.new_tensor(judged.wrong))
            found["attacked"].append(hit.clone())
            found["broken"].append(wrong.clone())
            found["change"].append(change)
        return {name: torch.stack(columns, dim=1) for name, columns in found.items()}


def attacked(materials: CertifyMaterials, numbers: Tensor, radius: float, tick: Tick | None = None) -> Tensor:
    """Return the images (B, C, H, W) of queries, moved by at most a radius (L2) so that they are misranked.

    The search sees the smoothed network with a few fixed noises, in the gallery that is certified.
    """
    plan = materials.plan
    scene = smoothed_scene(materials, numbers)
    threat = Threat(plan.budget(radius), make_search(plan.search), plan.seed, plan.batch)
    # Past the boundary, for what is found is judged with other noise.
    return run_attack(scene, Misrank(), numbers, threat, stop=False, tick=tick).images


def smoothed_scene(materials: CertifyMaterials, numbers: Tensor) -> Scene:
    """Return the scene of the smoothed network with few noises; of queries, these alone are embedded."""
    subject, plan = materials.subject, materials.plan
    device = device_of(subject.model)
    model = Smoothed(subject.model, plan.sigma, plan.attack_samples, plan.seed, chunk=plan.batch).to(device)
    with torch.no_grad():
        z = embed(model, subject.images[numbers].to(device))
    asked = z.new_full((len(subject.images), z.shape[1]), torch.nan)
    asked[numbers.to(device)] = z
    return subject.scene(model, asked, materials.vectors.to(device, z.dtype))


def _row(judged: Judged | None) -> list[float]:
    if judged is None:
        return [-1, -1, torch.nan, torch.nan, torch.nan, torch.nan]
    mate, rival, hit, right, wrong, radius = judged
    return [mate, rival, 100.0 * hit, right, wrong, radius]
