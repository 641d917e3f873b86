"""Certify a network: how far its R@1 is certain under perturbations, once it is smoothed by noise.

Noise comes from a stream for each image and purpose. That of the gallery is another one than that of the
queries, so that the vectors that a query is compared with do not depend on the samples that it is judged
with: otherwise the bounds would not hold. For the same reason other samples choose which images are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robustmetric.attacks import Draws, Misrank
from robustmetric.evaluation.attack import NetworkView, run_attack
from robustmetric.evaluation.bounds import Moments, Samples, lower_bound, mean_of, sure_radius
from robustmetric.evaluation.certificate import FORMAT, Certificate, CertifyPlan, entries_of
from robustmetric.evaluation.data import Data, Subject, data_of
from robustmetric.evaluation.evaluate import search_cost
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.job import Job, Piece, Progress, Tensors, Tick, blocks
from robustmetric.evaluation.plan import draw_queries, plan_of
from robustmetric.evaluation.smoothing import Smoothed, check_memory, check_noise, noisy_embeddings
from robustmetric.gallery import excluded
from robustmetric.perturb import device_of
from robustmetric.sphere import ROUNDING, BrokenEmbeddingsError, embed

_RANKED = 256  # images of the gallery that are kept together
_QUERIES = 8  # queries that are kept together: each is embedded a thousand times


def certify(
    model: nn.Module,
    images: Images | Data,
    labels: Tensor | None = None,
    *,
    name: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
    plan: CertifyPlan | None = None,
    **settings: Any,
) -> Certificate:
    """Certify R@1 of a network that is smoothed by noise, and attack it: the truth lies in between.

    The smoothed network ranks by the mean of the embeddings of an image with noise. How far from a query its
    nearest image is of its class for certain follows from that noise, whatever the network is: see
    `robustmetric.evaluation.bounds`. It is the setting of RetrievalGuard (Wu et al., ICML 2022, arXiv
    2206.11225) with a tighter bound. The gallery is taken as it is stored: embedded by the same network, with
    noise of its own. A query for which the samples do not suffice abstains.

    Args:
        model: Any module that maps images (N, C, H, W) to vectors (N, D). It is held in evaluation mode,
            frozen, and restored afterwards. It sees pixels with noise, some outside [0, 1].
        images: Images (N, C, H, W) in [0, 1]: a tensor or anything that is indexed like one, each of which
            queries all others; or a `Data`, which may have a gallery and cameras.
        labels: Their classes (N,), unless they are a `Data`.
        name: Name of the network in the certificate; by default that of its class.
        out: Folder for the certificate, `certificate.json`, and its per-query values. Finished pieces stay
            there: the same call resumes after an interruption.
        progress: Called with a stage, how many of its pieces are done, and how many there are.
        report: Called with a line about what was found damaged in the folder.
        plan: How to certify; made of the `settings` unless it is given.
        settings: Entries of `CertifyPlan`: sigma, which has no default, radii, samples, choose,
            gallery_samples, alpha, queries, seed, batch, attack, attack_samples, steps and search.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    >>> network = rm.model("c2f2", size=8)
    >>> found = rm.certify(network, images, labels, sigma=0.1, samples=100, queries=4, attack=False)
    >>> found.at(0.1).certified.value <= found.recall.value
    True

    """
    subject = Subject(model, data_of(images, labels), name=name)
    return Certification(subject, plan_of(CertifyPlan, plan, settings), out, progress, report).run()


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


class Certification(Job[CertifyPlan, Certificate]):
    """A certification in pieces: the network and data of `subject`, certified as `plan` says.

    `out`, `progress` and `report` are those of every `Job`.

    >>> subject = Subject(nn.Flatten(), Data(torch.rand(20, 1, 8, 8), torch.arange(20) % 4))
    >>> list(Certification(subject, CertifyPlan.make(sigma=0.25, attack=False)).stages)
    ['embed', 'certify']
    """

    form = FORMAT

    def prepare(self) -> None:
        """Refuse more queries than there are, and draw them."""
        self.data.check(self.plan.queries)
        self.numbers = draw_queries(len(self.data.images), self.plan.queries, self.plan.seed)

    def probe(self) -> None:
        """Try the network on a batch, and whether noise and samples fit: a failure leaves no trace."""
        plan, shape = self.plan, tuple(self.subject.batch(1).shape[1:])
        if plan.attack:
            check_noise(plan.attack_samples, shape, "attack_samples")
        check_noise(min(plan.batch, max(plan.samples, plan.choose, plan.gallery_samples)), shape, "batch")
        dim = self.subject.probe(plan.batch, gradient=plan.attack)
        # Single precision, and products with a direction in double.
        check_memory("samples", plan.samples, 4 * dim + 16, f"the embeddings of length {dim:,} of one query")

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces: parts of the gallery, and blocks of queries as they are and attacked."""
        plan, ranked = self.plan, torch.arange(len(self.data.ranked.images))
        judged = plan.choose + plan.samples
        found = [*blocks("embed", 0, ranked, _RANKED, self._rank, cost=plan.gallery_samples)]
        found += blocks("certify", 1, self.numbers, _QUERIES, self._certify, cost=judged)
        if plan.attack:
            threats = [plan.threat(radius) for radius in plan.radii]
            cost = sum(map(search_cost, threats)) * plan.attack_samples + len(threats) * judged
            evaluations = sum(threat.evaluations for threat in threats)
            found += blocks("attack", 2, self.numbers, _QUERIES, self._attack, cost=cost, parts=evaluations)
        return tuple(found)

    def build(self) -> tuple[dict[str, Any], Tensors]:
        """Return what the certificate says of the scores, and its per-query values."""
        arrays = self.judged | (self.joined("attack") if self.plan.attack else {})
        others = min(len(self.sides(number)[1]) for number in arrays["number"].tolist())
        return entries_of(arrays, self.plan, len(self.data.images), max(1, others)), arrays

    @cached_property
    def judged(self) -> Tensors:
        """What is known of the queries as they are, by name."""
        return self.joined("certify")

    @cached_property
    def vectors(self) -> Tensor:
        """The gallery (N, D) as the smoothed network sees it, on the unit sphere in double precision."""
        return self.joined("embed")["v"]

    def sides(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the positions of what counts for the query `number`: images of its class, and of others."""
        query = self.data.as_queries(torch.empty(len(self.data.images), 0))[torch.tensor([number])]
        gallery = self.data.as_gallery(self.vectors)
        counts = ~excluded(query, gallery, slice(0, len(gallery)))[0]
        same = gallery.labels == query.labels
        return (same & counts).nonzero()[:, 0], (~same & counts).nonzero()[:, 0]

    def judge(
        self, image: Tensor, number: int, purpose: str = "certify", *, how_far: bool = True
    ) -> Judged | None:
        """Judge the ranking of an `image` (C, H, W) as that of the query `number`; None if it has no answer.

        Its noise is of the stream (`number`, `purpose`). All its samples are in memory if `how_far` is
        asked, which needs their distribution.
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

    def samples(self, image: Tensor, number: int, purpose: str, count: int) -> Iterator[Tensor]:
        """Embed `count` noisy copies of an `image` (C, H, W), drawn from the stream (`number`, `purpose`)."""
        model, plan, draws = self.subject.model, self.plan, Draws(self.plan.seed, purpose, [number])
        how: dict[str, Any] = {"sigma": plan.sigma, "batch": plan.batch}
        return noisy_embeddings(model, image, draws=draws, samples=count, **how)

    def _bound(self, seen: Moments, anchor: int, rivals: Tensor, alpha: float) -> float:
        mean, variance = seen.margins(self.vectors[anchor], self.vectors[rivals])
        return float(lower_bound(mean, variance, seen.count, alpha).min())

    def _rank(self, part: Tensor, tick: Tick) -> Tensors:
        """Average the embeddings of each image over noise of its own: v (B, D)."""
        plan, found = self.plan, []
        for position in part.tolist():
            image = self.data.ranked.images[torch.tensor([position])][0]
            mean = mean_of(self.samples(image, position, "certify/gallery", plan.gallery_samples))
            length = torch.linalg.vector_norm(mean)
            if length < ROUNDING:
                told = f"the mean of {plan.gallery_samples} noisy embeddings of image {position} is zero"
                raise BrokenEmbeddingsError(f"{told}: give a lower sigma than {plan.sigma:g}")
            found.append(mean / length)
            tick()
        return {"v": torch.stack(found)}

    def _certify(self, numbers: Tensor, tick: Tick) -> Tensors:
        """Judge the queries as they are; one without an answer to find is NaN."""
        rows = []
        for image, number in zip(self.data.images[numbers], numbers.tolist(), strict=True):
            judged = self.judge(image, number) or Judged(-1, -1, False, math.nan, math.nan, math.nan)
            rows.append([math.nan if judged.mate < 0 else 100.0 * judged.hit, *judged])
            tick()
        hit, mate, rival, _, *bounds = torch.tensor(rows, dtype=torch.float64).unbind(1)
        found = {"number": numbers, "mate": mate.long(), "rival": rival.long(), "hit": hit}
        found |= dict(zip(("right", "wrong", "radius"), bounds, strict=True))
        return {name: value.clone() for name, value in found.items()}

    def _attack(self, numbers: Tensor, tick: Tick) -> Tensors:
        """Attack a block of queries radius by radius: (B, R); one that is wrong for sure is left alone then.

        What a smaller perturbation reached, a larger one may reach too: so it counts for all larger radii.
        """
        rows = torch.isin(self.judged["number"], numbers)
        hit, wrong = self.judged["hit"][rows], self.judged["wrong"][rows]
        found: dict[str, list[Tensor]] = {"attacked": [], "broken": [], "change": []}
        for radius in self.plan.radii:
            change = torch.full_like(hit, torch.nan)
            open_ = (~hit.isnan() & ~(wrong > 0)).nonzero()[:, 0]
            if len(open_):
                before = self.data.images[numbers[open_]]
                after = self.attacked(numbers[open_], radius, tick).to(before.device)
                change[open_] = (after - before).double().flatten(1).norm(dim=1).cpu()
                for row, image, number in zip(open_.tolist(), after, numbers[open_].tolist(), strict=True):
                    judged = self.judge(image, number, f"certify/attack/{radius!r}", how_far=False)
                    assert judged is not None  # noqa: S101
                    hit[row] = torch.minimum(hit[row], hit.new_tensor(100.0 * judged.hit))
                    wrong[row] = torch.maximum(wrong[row], wrong.new_tensor(judged.wrong))
            found["attacked"].append(hit.clone())
            found["broken"].append(wrong.clone())
            found["change"].append(change)
        return {name: torch.stack(columns, dim=1) for name, columns in found.items()}

    def attacked(self, numbers: Tensor, radius: float, tick: Tick | None = None) -> Tensor:
        """Return the images (B, C, H, W) of the queries `numbers`, moved by at most `radius` (L2).

        The search sees the smoothed network with a few fixed noises, in the gallery that is certified. It
        goes past the boundary, for what is found is judged with other noise. `tick` is that of `run_attack`.
        """
        threat = self.plan.threat(radius)
        return run_attack(self.view(numbers), Misrank(), numbers, threat, stop=False, tick=tick).images

    def view(self, numbers: Tensor) -> NetworkView:
        """Return the view of the smoothed network with few noises; of queries, `numbers` are embedded."""
        plan, device = self.plan, device_of(self.subject.model)
        model = Smoothed(self.subject.model, plan.sigma, plan.attack_samples, plan.seed, chunk=plan.batch)
        with torch.no_grad():
            z = embed(model.to(device), self.data.images[numbers].to(device))
        asked = z.new_full((len(self.data.images), z.shape[1]), torch.nan)
        asked[numbers.to(device)] = z
        return self.subject.view(model, asked, self.vectors.to(device, z.dtype))
