"""The pieces that an evaluation is made of: each knows its stage, its file and how it is made."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from robustmetric.attacks import RankingAttack, Search
from robustmetric.evaluation.checks import CHECKS, Check, Findings, run_check
from robustmetric.evaluation.plan import Plan, check_title
from robustmetric.evaluation.scene import Scene, attack_block, embed_all, join
from robustmetric.evaluation.staged import Piece, Stage, TensorPiece, Tensors, Tick, fetch, search_cost
from robustmetric.evaluation.store import Store
from robustmetric.evaluation.subject import Subject
from robustmetric.evaluation.suite import Attempt, run_ensemble
from robustmetric.evaluation.threat import Threat
from robustmetric.retrieval import nmi, rank

T = TypeVar("T")

_EMBEDDED = 1024  # images whose embeddings are kept together
_SUITE = 4  # batches of queries that the suite attacks together: what is left of them fills fewer
PER_QUERY = ("R@1", "R@2", "mAP", "mAP@R")


@dataclass(eq=False)
class Materials:
    """What pieces are made from: the subject, the plan, and the pieces that are finished."""

    subject: Subject
    plan: Plan
    store: Store = field(default_factory=Store)

    @cached_property
    def search(self) -> Search:
        """How perturbations are searched for."""
        return self.plan.search_on(self.subject.surrogate)

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers (Q,) of the images that are perturbed."""
        return self.plan.draw(len(self.subject.images))

    @cached_property
    def stages(self) -> tuple[Stage[Materials], ...]:
        """All pieces by stage, in the order of their making."""
        return _stages(self)

    @cached_property
    def scene(self) -> Scene:
        """The network under attack and its embeddings."""
        return self._scene(self.subject.model, "embed")

    @cached_property
    def other(self) -> Scene | None:
        """The surrogate and its embeddings, if there is one."""
        network = self.subject.surrogate
        return None if network is None else self._scene(network, "surrogate")

    @property
    def surrogate(self) -> Scene | None:
        """The network that perturbations are searched on, and its embeddings, if it is another one."""
        return None if self.search.network is None else self.other

    @cached_property
    def attempts(self) -> dict[str, tuple[Attempt, ...]]:
        """The attacks of the suite by goal: they know as much of the network as the search does."""
        suite, network = self.plan.worst_case, self.subject.surrogate
        if suite is None:
            return {}
        white = self.search.follows_gradient
        return {goal.name: suite.attempts(goal, surrogate=network, gradient=white) for goal in suite.wanted}

    @property
    def threat(self) -> Threat:
        """What an attacker may do."""
        return Threat(self.plan.budget, self.search, self.plan.seed, self.plan.batch)

    @property
    def suite_threat(self) -> Threat:
        """What an attacker of the suite may do, in steps of the suite."""
        suite = self.plan.worst_case
        steps = self.plan.steps if suite is None else suite.steps
        return replace(self.threat, budget=replace(self.plan.budget, steps=steps))

    def get(self, piece: Piece[Materials, T]) -> T:
        """Return what was made of a finished piece; one that was damaged since then is made anew."""
        return fetch(self.store, piece, self)

    def found(self, attack: RankingAttack) -> Tensors:
        """Return what an attack found for all queries: see `attack_block`."""
        return self._joined(attack.name)

    @cached_property
    def worst(self) -> dict[str, Tensors]:
        """What the suite made of all queries, by goal: see `run_ensemble`."""
        return {name: self._joined(SuitePiece.title(name)) for name in self.attempts}

    def _joined(self, name: str) -> Tensors:
        (stage,) = (stage for stage in self.stages if stage.name == name)
        return join([self.get(piece) for piece in stage.pieces])

    @property
    def retrieval(self) -> Tensors:
        """The values of the ranking without attacks, per query."""
        return self.get(RetrievalPiece())

    @property
    def checks(self) -> list[Check]:
        """What the checks found."""
        return [self.get(CheckPiece(name)) for name in self.plan.check_names]

    @cached_property
    def findings(self) -> Findings:
        """What checks work with."""
        return Findings(
            self.subject,
            self.plan,
            self.search,
            self.scene,
            self.surrogate,
            self.numbers,
            found={goal.name: self.found(goal) for goal in self.plan.goals},
            worst=self.worst,
            attempts=self.attempts,
            recall=float(self.retrieval["R@1"].mean()),
        )

    def _scene(self, model: nn.Module, kind: str) -> Scene:
        z = [self.get(piece)["z"] for piece in _embeddings(self.subject, kind)]
        return self.subject.scene(model, torch.cat(z))


@dataclass(frozen=True)
class EmbedPiece(TensorPiece[Materials]):
    """The embeddings of the k-th part of all images, by the network (embed) or by its surrogate."""

    stage: ClassVar[str] = "embed"  # type: ignore[misc]

    kind: str
    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.kind}-{self.number:05d}.safetensors"

    def make(self, materials: Materials, tick: Tick | None = None) -> Tensors:
        """Embed the images: z (B, D)."""
        subject = materials.subject
        model = subject.model if self.kind == "embed" else subject.surrogate
        assert model is not None  # noqa: S101
        part = self._part(subject)
        done = None if tick is None else partial(tick, of=len(part))
        return {"z": embed_all(model, subject.every, part, materials.plan.batch, done).cpu()}

    def cost(self, materials: Materials) -> int:
        """Return the number of its images."""
        return len(self._part(materials.subject))

    def _part(self, subject: Subject) -> Tensor:
        begin = self.number * _EMBEDDED
        return torch.arange(begin, min(begin + _EMBEDDED, len(subject.every)))


@dataclass(frozen=True)
class RetrievalPiece(TensorPiece[Materials]):
    """The ranking without attacks: values of each query that has an answer, and the NMI of the gallery."""

    stage: ClassVar[str] = "retrieval"  # type: ignore[misc]
    file: ClassVar[str] = "retrieval.safetensors"

    def make(self, materials: Materials, tick: Tick | None = None) -> Tensors:
        """Rank the gallery for every image."""
        scene = materials.scene
        queries, gallery = scene.queries, scene.gallery
        if materials.subject.gallery is None:
            found = rank(gallery.z, gallery.labels, cameras=gallery.cameras)
        else:
            found = scene.rank(queries.z, queries)
        return {
            "query": found.query.cpu(),
            "R@1": 100.0 * (found.first <= 1).cpu().double(),
            "R@2": 100.0 * (found.first <= 2).cpu().double(),
            "mAP": 100.0 * found.average_precision.cpu(),
            "mAP@R": 100.0 * found.average_precision_at_r.cpu(),
            "NMI": torch.tensor([100.0 * nmi(gallery.z, gallery.labels)], dtype=torch.float64),
            "left_out": torch.tensor([found.left_out]),
        }


@dataclass(frozen=True, eq=False)
class AttackPiece(TensorPiece[Materials]):
    """What an attack, the `place`-th of the plan, found for a block of queries."""

    attack: RankingAttack
    place: int
    block: int

    @property
    def stage(self) -> str:  # type: ignore[override]
        """The attack's name."""
        return self.attack.name

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"attack-{self.place:02d}-{self.block:05d}.safetensors"

    def make(self, materials: Materials, tick: Tick | None = None) -> Tensors:
        """Attack the block, and note what the checks will ask for."""
        return attack_block(
            materials.scene,
            self.attack,
            self._numbers(materials),
            materials.threat,
            surrogate=materials.surrogate,
            tick=tick,
        )

    def asks(self, materials: Materials) -> int:
        """Return how often the search will ask for the objective."""
        return materials.search.num_evaluations(materials.plan.budget)

    def cost(self, materials: Materials) -> int:
        """Return the passes of its search, and those that measure what was found, and that rounded."""
        return len(self._numbers(materials)) * (search_cost(materials.search, materials.plan.budget) + 2)

    def _numbers(self, materials: Materials) -> Tensor:
        size = materials.plan.batch
        return materials.numbers[self.block * size : (self.block + 1) * size]


@dataclass(frozen=True, eq=False)
class SuitePiece(TensorPiece[Materials]):
    """What the attacks of the suite for a goal, its `place`-th, made of a block of queries."""

    goal: RankingAttack
    place: int
    block: int

    @staticmethod
    def title(goal: str) -> str:
        """Return the name of the stage of a goal."""
        return f"worst {goal}"

    @property
    def stage(self) -> str:  # type: ignore[override]
        """The goal's name behind a word that no attack begins with."""
        return self.title(self.goal.name)

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"suite-{self.place:02d}-{self.block:05d}.safetensors"

    def make(self, materials: Materials, tick: Tick | None = None) -> Tensors:
        """Attack the block in all ways, each on the queries that are left."""
        return run_ensemble(
            materials.scene,
            self.goal,
            materials.attempts[self.goal.name],
            self._numbers(materials),
            materials.suite_threat,
            surrogate=materials.other,
            tick=tick,
        )

    def asks(self, materials: Materials) -> int:
        """Return how often the searches will ask for the objective, if nothing drops out."""
        attempts, budget = materials.attempts[self.goal.name], materials.suite_threat.budget
        return _SUITE * sum(attempt.search.num_evaluations(budget) for attempt in attempts)

    def cost(self, materials: Materials) -> int:
        """Return the passes of all searches, and those that measure what was found, if nothing drops out."""
        attempts, budget = materials.attempts[self.goal.name], materials.suite_threat.budget
        return len(self._numbers(materials)) * sum(search_cost(a.search, budget) + 1 for a in attempts)

    def _numbers(self, materials: Materials) -> Tensor:
        size = _SUITE * materials.plan.batch
        return materials.numbers[self.block * size : (self.block + 1) * size]


@dataclass(frozen=True)
class CheckPiece(Piece[Materials, Check]):
    """The verdict of a check, as JSON."""

    stage: ClassVar[str] = "checks"  # type: ignore[misc]

    name: str

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"check-{re.sub(r'[^A-Za-z0-9.+-]', '_', check_title(self.name))}.json"

    def make(self, materials: Materials, tick: Tick | None = None) -> Check:
        """Run the check."""
        return run_check(self.name, materials.findings)

    def cost(self, materials: Materials) -> int:
        """Return the passes of the attacks that it repeats."""
        run, plan = CHECKS.find(self.name)[0], materials.plan
        again = getattr(run, "again", 0) * search_cost(materials.search, plan.budget)
        queries = min(256 if plan.level == "full" else 64, len(materials.numbers))
        return queries * len(plan.goals) * (getattr(run, "steps", 0) + again)

    def encode(self, value: Check) -> bytes:
        """Write the verdict as JSON."""
        return json.dumps(value.model_dump(mode="json"), ensure_ascii=False).encode()

    def decode(self, content: bytes) -> Check:
        """Read the verdict."""
        try:
            return Check.model_validate_json(content)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from None


def _stages(materials: Materials) -> tuple[Stage[Materials], ...]:
    subject, plan = materials.subject, materials.plan
    embeddings = _embeddings(subject, "embed")
    if subject.surrogate is not None:
        embeddings += _embeddings(subject, "surrogate")
    blocks = range(-(-len(materials.numbers) // plan.batch))
    attacks = [
        Stage(goal.name, 1, tuple(AttackPiece(goal, k, block) for block in blocks))
        for k, goal in enumerate(plan.goals)
    ]
    suite = () if plan.worst_case is None else plan.worst_case.wanted
    shared = range(-(-len(materials.numbers) // (_SUITE * plan.batch)))
    hunts = [
        Stage(SuitePiece.title(goal.name), 1, tuple(SuitePiece(goal, k, block) for block in shared))
        for k, goal in enumerate(suite)
    ]
    # Attacks rank all images, and checks compare with all attacks.
    return (
        Stage(EmbedPiece.stage, 0, embeddings),
        Stage(RetrievalPiece.stage, 1, (RetrievalPiece(),)),
        *attacks,
        *hunts,
        Stage(CheckPiece.stage, 2, tuple(CheckPiece(name) for name in plan.check_names)),
    )


def _embeddings(subject: Subject, kind: str) -> tuple[EmbedPiece, ...]:
    return tuple(EmbedPiece(kind, k) for k in range(-(-len(subject.every) // _EMBEDDED)))
