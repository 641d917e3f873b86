"""What cells will cost: from a few timed steps of each kind, before anything is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robustmetric.data.inputs import Watch
from robustmetric.defenses import Defense
from robustmetric.defenses.hardness import HardnessManipulation
from robustmetric.defenses.regular import Regular
from robustmetric.experiments.cells import Cell, Scale, Task
from robustmetric.perturb import frozen
from robustmetric.sphere import cross_distance, embed
from robustmetric.training.module import make_network
from robustmetric.training.parts import defense_of, steps_of
from robustmetric.training.recipe import Recipe
from robustmetric.training.sets import Sets, load_sets

_STEPS = 2  # that are timed of each kind, and iterations of PGD in each
_ON_GALLERY = 6 / 9  # of the attacks look at the whole gallery in each step
_BLOCK = 128  # queries that are perturbed together


class Cost(NamedTuple):
    """Seconds that a cell is expected to take: to `train` (or to measure) and to `evaluate`.

    `steps` are those of the training, `pieces` those of the evaluation.

    >>> Cost(60, 20).total
    80
    """

    train: float
    evaluate: float = 0.0
    steps: int = 0
    pieces: int = 1

    @property
    def total(self) -> float:
        """The seconds of both."""
        return self.train + self.evaluate


def estimate(
    tasks: Iterable[Task],
    scale: Scale,
    *,
    watch: Watch | None = None,
    report: Callable[[str], None] = print,
) -> dict[Task, Cost]:
    """Return what each of the `tasks` will cost on this machine at a `scale`.

    Steps of each kind (defense and η) are timed on the data set's own network and images, once for all seeds.
    Hardness Manipulation perturbs more and more triplets, and longer, as the network learns: a third of the
    way from its first step to the most that a step can cost is counted. `watch` is told, while images are
    decoded, the split, how many are done and how many there are; `report` if images are left out or damaged.
    """
    found: dict[Task, Cost] = {}
    kinds: dict[Task, Cost] = {}
    for some in _by_data(tasks).values():
        bench = _Bench.of(some[0], scale, watch, report)
        for task in some:
            kind = Cell(task.data, task.defense, task.steps) if isinstance(task, Cell) else task
            if kind not in kinds:
                kinds[kind] = bench.cost(kind)
            found[task] = kinds[kind]
    return found


def _by_data(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.data, []).append(task)
    return found


@dataclass(frozen=True, eq=False)
class _Bench:
    """A data set's network and a batch of its images, to time things with."""

    scale: Scale
    model: nn.Module
    sets: Sets
    batch: tuple[Tensor, Tensor]  # images and labels
    plain: float  # seconds of a step without attacks
    passing: float  # seconds of a block of queries forward and backward
    embedding: float  # seconds of all test images forward
    ranking: float  # seconds of a block's distances to the gallery, and their gradient

    @classmethod
    def of(cls, task: Task, scale: Scale, watch: Watch | None, report: Callable[[str], None]) -> _Bench:
        recipe = scale.recipe(task)
        device = scale.device
        model = make_network(recipe, device, lambda _: None).train()
        sets = load_sets(recipe, scale.cache, skip_broken=scale.skip_broken, watch=watch, report=report)
        images, labels = next(iter(sets.pairs(recipe)))
        batch = images.to(device), labels.to(device)
        tested = len(sets.score)
        asked = min(scale.queries or tested, _BLOCK)
        block = batch[0][torch.arange(asked) % len(images)]
        with frozen(model):
            z = embed(model, block).detach()
            gallery = nn.functional.normalize(torch.randn(tested, z.shape[1], device=device))
            passing = _seconds(lambda: _through(model, block))
            with torch.no_grad():
                embedding = _seconds(lambda: embed(model, block)) * tested / asked
            ranking = _seconds(lambda: _to_all(z, gallery))
        bench = cls(scale, model, sets, batch, 0.0, passing, embedding, ranking)
        regular = _defense(recipe, "N/A[R]", 1)
        return replace(bench, plain=_seconds(lambda: bench._step(regular)))

    def cost(self, task: Task) -> Cost:
        recipe = self.scale.recipe(task)
        if not isinstance(task, Cell):
            return Cost(self.scale.batches * self.embedding * len(self.batch[0]) / len(self.sets.score))
        steps = steps_of(recipe, len(self.sets.learn), self.scale.workers(task.data))
        asked = min(self.scale.queries or len(self.sets.score), len(self.sets.score))
        blocks = -(-asked // min(asked, _BLOCK))
        attack = self.scale.steps * (self.passing + _ON_GALLERY * self.ranking)
        return Cost(steps * self.step(recipe), self.embedding + 9 * blocks * attack, steps, 9 * blocks)

    def step(self, recipe: Recipe) -> float:
        """Return what a step of a training takes, from its first step and from two iterations of PGD."""
        method = _defense(recipe, recipe.defense, recipe.steps)
        if isinstance(method, Regular):
            return _seconds(lambda: self._step(method))
        if not isinstance(method, HardnessManipulation):
            return self._whole(recipe, recipe.defense)
        first = _seconds(lambda: self._step(method))
        # All triplets and all iterations: what a network would cost that has become robust.
        most = self._whole(recipe, f"HM[{method.name[3]},2]")
        return first + max(0.0, most - first) / 3

    def _whole(self, recipe: Recipe, name: str) -> float:
        """Return what a step takes that runs all its iterations."""
        few = _defense(recipe, name, _STEPS)
        iteration = (_seconds(lambda: self._step(few)) - self.plain) / _STEPS
        return self.plain + recipe.steps * max(0.0, iteration)

    def _step(self, method: Defense) -> None:
        self.model.zero_grad()
        method(self.model, *self.batch).loss.backward()


def _defense(recipe: Recipe, name: str, steps: int) -> Defense:
    return defense_of(recipe.model_copy(update={"defense": name, "steps": steps}))


def _through(model: nn.Module, images: Tensor) -> None:
    x = images.detach().requires_grad_()
    torch.autograd.grad(embed(model, x).sum(), x)


def _to_all(z: Tensor, gallery: Tensor) -> None:
    z = z.detach().requires_grad_()
    torch.autograd.grad(cross_distance(z, gallery).sum(), z)


def _seconds(act: Callable[[], object]) -> float:
    """Time an act: the fastest of a few, for the first warms up, and other programs disturb the rest."""
    taken = []
    for _ in range(_STEPS):
        _wait()
        begun = time.perf_counter()
        act()
        _wait()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
