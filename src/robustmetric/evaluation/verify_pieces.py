"""The pieces of a verification: embeddings of the images in pairs, and blocks of attacked pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from robustmetric.attacks import Draws, Problem
from robustmetric.distance import embed, pair_distance, reference_shift
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.scene import embed_all
from robustmetric.evaluation.staged import Stage, TensorPiece, Tensors, Tick, fetch, search_cost
from robustmetric.evaluation.store import Store
from robustmetric.evaluation.subject import Subject
from robustmetric.evaluation.verify_pairs import Numbers, Pairs, Split
from robustmetric.evaluation.verify_plan import VerifyPlan
from robustmetric.perturb import device_of, sizes
from robustmetric.validate import UserError

_TOGETHER = 256  # images whose embeddings are kept together
_ROUNDING = 1e-6  # of a sum of two numbers in [0, 1] in single precision


@dataclass(eq=False)
class VerifyMaterials:
    """What pieces are made from: the subject, the plan, the pairs, and the pieces that are finished."""

    subject: Subject
    plan: VerifyPlan
    split: Split
    store: Store = field(default_factory=Store)

    @cached_property
    def sources(self) -> tuple[tuple[Images, Numbers], ...]:
        """The images of the pairs that are judged and of those that choose, with the places that are used."""
        judged, choose = self.split.judged, self.split.choose
        used = [judged.first, judged.second]
        if choose is None:
            return ((self.subject.every, np.unique(np.concatenate(used))),)
        theirs = [choose.pairs.first, choose.pairs.second]
        if choose.source == "other classes":  # of the same images
            return ((self.subject.every, np.unique(np.concatenate(used + theirs))),)
        return (
            (self.subject.every, np.unique(np.concatenate(used))),
            (choose.images, np.unique(np.concatenate(theirs))),
        )

    @cached_property
    def stages(self) -> tuple[Stage[VerifyMaterials], ...]:
        """All pieces by stage, in the order of their making."""
        parts = tuple(
            EmbedPiece(source, number)
            for source, (_, used) in enumerate(self.sources)
            for number in range(-(-len(used) // _TOGETHER))
        )
        embedding = Stage[VerifyMaterials](EmbedPiece.stage, 0, parts)
        if not self.plan.attack:
            return (embedding,)
        blocks = range(-(-len(self.split.judged) // self.plan.batch))
        return (embedding, Stage[VerifyMaterials](AttackPiece.stage, 1, tuple(map(AttackPiece, blocks))))

    @cached_property
    def embedded(self) -> tuple[Tensor, ...]:
        """The embeddings (U, D) of the images that are used, of each source."""
        found: list[list[Tensor]] = [[] for _ in self.sources]
        for piece in self.stages[0].pieces:
            found[piece.source].append(fetch(self.store, piece, self)["z"])  # type: ignore[attr-defined]
        return tuple(torch.cat(parts) for parts in found)

    def rows(self, source: int, places: Numbers) -> Tensor:
        """Return the embeddings (P, D) of images at these `places` of a `source`."""
        return self.embedded[source][torch.from_numpy(np.searchsorted(self.sources[source][1], places))]

    def distances(self, pairs: Pairs, source: int = 0) -> Tensor:
        """Return the distances (P,) of `pairs` of a `source`, in double precision."""
        return pair_distance(
            self.rows(source, pairs.first).double(), self.rows(source, pairs.second).double()
        )

    @cached_property
    def clean(self) -> Tensor:
        """The distances (P,) of the pairs that are judged."""
        return self.distances(self.split.judged)

    @cached_property
    def attacked(self) -> Tensor:
        """The same with the first image of each pair perturbed: farther if it is same, nearer if not."""
        parts = [fetch(self.store, piece, self)["distance"] for piece in self.stages[1].pieces]
        same, found = torch.from_numpy(self.split.judged.same), torch.cat(parts)
        # Whoever attacks keeps the image as it is where no perturbation is better.
        return torch.where(same, torch.maximum(found, self.clean), torch.minimum(found, self.clean))


@dataclass(frozen=True)
class EmbedPiece(TensorPiece[VerifyMaterials]):
    """The k-th part of the images in pairs: z (B, D)."""

    stage: ClassVar[str] = "embed"  # type: ignore[misc]

    source: int
    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"embed-{self.source}-{self.number:05d}.safetensors"

    def cost(self, materials: VerifyMaterials) -> int:
        """Return the number of its images."""
        return min(_TOGETHER, len(materials.sources[self.source][1]) - self.number * _TOGETHER)

    def make(self, materials: VerifyMaterials, tick: Tick | None = None) -> Tensors:
        """Embed the images as they are."""
        images, used = materials.sources[self.source]
        part = torch.from_numpy(used[self.number * _TOGETHER : (self.number + 1) * _TOGETHER])
        done = None if tick is None else lambda count: tick(count, of=len(part))
        return {"z": embed_all(materials.subject.model, images, part, materials.plan.batch, done).cpu()}


@dataclass(frozen=True)
class AttackPiece(TensorPiece[VerifyMaterials]):
    """A block of pairs, attacked: distance (B,) of the perturbed first image to the second one."""

    stage: ClassVar[str] = "attack"  # type: ignore[misc]

    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"attack-{self.number:05d}.safetensors"

    def asks(self, materials: VerifyMaterials) -> int:
        """Return how often the search will ask for the objective."""
        return materials.plan.searching.num_evaluations(materials.plan.budget)

    def cost(self, materials: VerifyMaterials) -> int:
        """Return the passes of its search."""
        plan = materials.plan
        pairs = min(plan.batch, len(materials.split.judged) - self.number * plan.batch)
        return pairs * (search_cost(plan.searching, plan.budget) + 1)

    def make(self, materials: VerifyMaterials, tick: Tick | None = None) -> Tensors:
        """Drive same pairs apart and different ones together, within the budget."""
        plan, model = materials.plan, materials.subject.model
        begin = self.number * plan.batch
        numbers = np.arange(begin, min(begin + plan.batch, len(materials.split.judged)))
        pairs, device = materials.split.judged.take(numbers), device_of(model)
        images = materials.subject.every[torch.from_numpy(pairs.first)].detach().to(device)
        aim = materials.rows(0, pairs.second).to(device)
        same = torch.from_numpy(pairs.same).to(device)

        def objective(x: Tensor, rows: Tensor) -> Tensor:
            z, other = embed(model, x), aim[rows]
            if tick is not None:
                tick()
            # Copies are as near as can be, where a plain distance has no gradient.
            return torch.where(same[rows], -reference_shift(z, other), pair_distance(z, other))

        draws = Draws(plan.seed, "verify", numbers.tolist())
        moved = plan.searching(Problem(images, objective, plan.budget, draws))
        far = float(sizes(moved - images, "linf").max())
        low, high = (float(v) for v in moved.aminmax())
        if far > plan.eps + _ROUNDING or low < 0 or high > 1:
            raise UserError(
                f"search {plan.search!r} changed a pixel by {far:.4g}, to within [{low:.4g}, {high:.4g}]; "
                f"eps is {plan.eps:.4g}, and pixels are in [0, 1]: it must keep to both",
                parameter="search",
            )
        with torch.no_grad():
            z = embed(model, moved)
        return {"distance": pair_distance(z.cpu().double(), aim.cpu().double())}
