"""Verify a network: whether it tells pairs of one class from others, by a threshold, and under attack."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robustmetric.attacks import Draws, Problem
from robustmetric.errors import UserError
from robustmetric.evaluation.attack import embed_all
from robustmetric.evaluation.data import Data, Subject, data_of
from robustmetric.evaluation.evaluate import search_cost
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.job import Job, Piece, Progress, Tensors, Tick, blocks
from robustmetric.evaluation.plan import plan_of
from robustmetric.evaluation.verified import FORMAT, Verification, entries_of
from robustmetric.evaluation.verify_pairs import Numbers, Pairs, Validation, VerifyPlan, split_pairs
from robustmetric.perturb import device_of, sizes
from robustmetric.sphere import embed, pair_distance, reference_shift

_TOGETHER = 256  # images whose embeddings are kept together
_ROUNDING = 1e-6  # of a pixel


def verify(
    model: nn.Module,
    images: Images | Data,
    labels: Tensor | None = None,
    *,
    pairs: Tensor | None = None,
    validation: Validation | None = None,
    name: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
    plan: VerifyPlan | None = None,
    **settings: Any,
) -> Verification:
    """Judge whether pairs of images are of one class by a threshold of their distance, and attack them.

    The threshold is chosen for a FAR on pairs that are not judged: those of the `validation` images, or else
    of half of the classes, while the other half is judged. An attack perturbs the first image of a pair: it
    drives same pairs apart (evasion) and different ones together (impersonation), as far as it can; the
    threshold stays.

    Args:
        model: Any module that maps images (N, C, H, W) in [0, 1] to vectors (N, D). It is held in evaluation
            mode, frozen, and restored afterwards.
        images: Images (N, C, H, W) in [0, 1], a tensor or anything that is indexed like one; or a `Data`: the
            second image of each pair is then of its gallery, no image makes a pair with itself, and none of
            one class and camera do.
        labels: Their classes (N,), unless they are a `Data`.
        pairs: Pairs (P, 2) to judge, as positions of images; without them some are drawn.
        validation: Images and their labels, or a `Data`, whose pairs choose the threshold.
        name: Name of the network in the document; by default that of its class.
        out: Folder for the document, `verification.json`, and the distances. Finished pieces stay there: the
            same call resumes after an interruption.
        progress: Called with a stage, how many of its pieces are done, and how many there are.
        report: Called with a line about what was found damaged in the folder.
        plan: How to verify; made of the `settings` unless it is given.
        settings: Entries of `VerifyPlan`: count, threshold, far, attack, eps, alpha, steps, search, seed and
            batch.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(40, 1, 8, 8), torch.arange(40) % 8
    >>> found = rm.verify(rm.model("c2f2", size=8), images, labels, count=40, steps=2)
    >>> found.pairs.same, found.pairs.different, found.both.tar.value <= found.clean.tar.value
    (20, 20, True)
    >>> "too few pairs for the target of 1 %" in found.headline[0]
    True

    """
    subject = Subject(model, data_of(images, labels), name=name)
    plan = plan_of(VerifyPlan, plan, settings)
    return Verifying(subject, plan, pairs, validation, out, progress, report).run()


class Verifying(Job[VerifyPlan, Verification]):
    """A verification in pieces: pairs of the data of `subject`, verified as `plan` says.

    `pairs` (P, 2) are judged, or some that are drawn, and those of the `validation` images choose the
    threshold, as `verify` has both. `out`, `progress` and `report` are those of every `Job`.

    >>> subject = Subject(nn.Flatten(), Data(torch.rand(20, 1, 8, 8), torch.arange(20) % 4))
    >>> verifying = Verifying(subject, VerifyPlan.make(count=8, attack=False))
    >>> list(verifying.stages), len(verifying.split.judged)
    (['embed'], 8)
    """

    form = FORMAT

    def __init__(
        self,
        subject: Subject,
        plan: VerifyPlan,
        pairs: Tensor | None = None,
        validation: Validation | None = None,
        out: str | Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self.given = pairs, validation
        super().__init__(subject, plan, out, progress, report)

    def prepare(self) -> None:
        """Refuse data without a ranking, and draw the pairs."""
        self.data.check()
        self.split = split_pairs(self.data, self.plan, *self.given)

    def describe(self) -> dict[str, Any]:
        """Return all that the document depends on, in JSON's types."""
        choose, judged = self.split.choose, self.split.judged.digest
        return {**super().describe(), "pairs": judged, "choosing": None if choose is None else choose.sha256}

    def probe(self) -> None:
        """Try the network on a batch, so that one that fails leaves no trace."""
        gradient = self.plan.attack and self.plan.searching.differentiates(self.subject.model)
        self.subject.probe(self.plan.batch, gradient=gradient)

    @cached_property
    def used(self) -> Numbers:
        """The positions (U,) of the images that are in a pair."""
        judged, choose = self.split.judged.places, self.split.choose
        return judged if choose is None else np.union1d(judged, choose.pairs.places)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces: parts of the images in pairs, and blocks of attacked pairs."""
        threat, used = self.plan.threat, torch.from_numpy(self.used)
        found = [*blocks("embed", 0, used, _TOGETHER, self._embed)]
        if self.plan.attack:
            rows, cost = torch.arange(len(self.split.judged)), search_cost(threat) + 1
            found += blocks(
                "attack", 1, rows, threat.batch, self._attack, cost=cost, parts=threat.evaluations
            )
        return tuple(found)

    def build(self) -> tuple[dict[str, Any], Tensors]:
        """Return what the document says of the scores, and the distances."""
        choosing = None if self.split.choose is None else self.distances(self.split.choose.pairs)
        attacked = self.attacked if self.plan.attack else None
        return entries_of(self.plan, self.split, self.clean, attacked, choosing)

    @cached_property
    def embedded(self) -> Tensor:
        """The embeddings (U, D) of the images that are in a pair."""
        return self.joined("embed")["z"]

    def rows(self, places: Numbers) -> Tensor:
        """Return the embeddings (P, D) of images at these `places`."""
        return self.embedded[torch.from_numpy(np.searchsorted(self.used, places))]

    def distances(self, pairs: Pairs) -> Tensor:
        """Return the distances (P,) of `pairs`, in double precision."""
        return pair_distance(self.rows(pairs.first).double(), self.rows(pairs.second).double())

    @cached_property
    def clean(self) -> Tensor:
        """The distances (P,) of the pairs that are judged."""
        return self.distances(self.split.judged)

    @cached_property
    def attacked(self) -> Tensor:
        """The same with the first image of each pair perturbed: farther if it is same, nearer if not."""
        same, found = torch.from_numpy(self.split.judged.same), self.joined("attack")["distance"]
        # Whoever attacks keeps the image as it is where no perturbation is better.
        return torch.where(same, torch.maximum(found, self.clean), torch.minimum(found, self.clean))

    def _embed(self, part: Tensor, tick: Tick) -> Tensors:
        return {"z": embed_all(self.subject.model, self.split.images, part, self.plan.batch, tick).cpu()}

    def _attack(self, numbers: Tensor, tick: Tick) -> Tensors:
        """Drive same pairs apart and different ones together: distance (B,) to the second image."""
        plan, model = self.plan, self.subject.model
        pairs, device = self.split.judged.take(numbers.numpy()), device_of(model)
        images = self.split.images[torch.from_numpy(pairs.first)].detach().to(device)
        aim = self.rows(pairs.second).to(device)
        same = torch.from_numpy(pairs.same).to(device)

        def objective(x: Tensor, rows: Tensor) -> Tensor:
            z, other = embed(model, x), aim[rows]
            tick()
            # Copies are as near as can be, where a plain distance has no gradient.
            return torch.where(same[rows], -reference_shift(z, other), pair_distance(z, other))

        draws = Draws(plan.seed, "verify", numbers.tolist())
        moved = plan.threat.search(Problem(images, objective, plan.threat.budget, draws))
        far = float(sizes(moved - images, "linf").max())
        low, high = (float(v) for v in moved.aminmax())
        if far > plan.eps + _ROUNDING or low < 0 or high > 1:
            told = f"search {plan.search!r} changed a pixel by {far:.4g}, to within [{low:.4g}, {high:.4g}]"
            raise UserError(f"{told}; eps is {plan.eps:.4g}, and pixels are in [0, 1]", parameter="search")
        with torch.no_grad():
            z = embed(model, moved)
        return {"distance": pair_distance(z.cpu().double(), aim.cpu().double())}
