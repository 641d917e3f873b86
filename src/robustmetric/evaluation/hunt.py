"""Blocks of queries: one attack on all of them, or those of a goal in turn, each on what is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from robustmetric.attacks import Draws, RankingAttack, Search
from robustmetric.distance import embed
from robustmetric.evaluation.found import Found
from robustmetric.evaluation.scene import Scene, run_attack
from robustmetric.evaluation.suite import Way
from robustmetric.perturb import Budget, sizes

BEFORE = -1
"""Stands for no attack: a query that was lost before, or that no attack has changed."""


@dataclass(frozen=True, eq=False)
class Hunted:
    """What the attacks for a goal made of Q queries, in the order of their `number` (Q,).

    `before` (Q,) is the goal's column of the images as they were, `worst` (Q,) the worst that any attack left
    of it, and `by` (Q,) the attack that did so, `BEFORE` for none. `change` (Q,) is how far the image
    was moved for it, `outside` (Q,) how far pixels left [0, 1]. `forward` and `backward` (K, W) count the
    images that went through the network, and back, for each of K blocks and W attacks.

    >>> [field.name for field in fields(Hunted)][:4]
    ['number', 'before', 'worst', 'by']
    """

    number: Tensor
    before: Tensor
    worst: Tensor
    by: Tensor
    change: Tensor
    outside: Tensor
    forward: Tensor
    backward: Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Hunted:
        """Return what the method `tensors` wrote."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls)})

    @classmethod
    def join(cls, parts: Sequence[Hunted]) -> Hunted:
        """Return the queries of several `parts`, one part after the other."""
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def tensors(self) -> dict[str, Tensor]:
        """Return all as tensors by name, on the CPU."""
        return {f.name: getattr(self, f.name).cpu().contiguous() for f in fields(self)}


def strike(
    scene: Scene,
    attack: RankingAttack,
    numbers: Tensor,
    budget: Budget,
    search: Search,
    *,
    seed: int = 0,
    surrogate: Scene | None = None,
    tick: Callable[[], None] | None = None,
) -> Found:
    """Run an `attack` as `run_attack` does, and note what the checks will ask for."""
    outcome = run_attack(scene, attack, numbers, budget, search, seed=seed, surrogate=surrogate, tick=tick)
    with torch.no_grad():
        z = embed(scene.model, (outcome.images * 255).round() / 255)
        rounded = scene.measure(attack, z, outcome.target, scene.asking(numbers))
    return Found(
        number=numbers,
        target=outcome.target.index,
        before=outcome.before,
        after=outcome.after,
        rounded=rounded,
        first=outcome.first,
        last=outcome.last,
        best=outcome.best,
        change=sizes(outcome.images - outcome.originals, budget.norm),
        outside=_outside(outcome.images),
    )


def _outside(images: Tensor) -> Tensor:
    """Return how far (B,) pixels of images (B, …) leave [0, 1]."""
    low, high = (f(images.flatten(1), 1) for f in (torch.amin, torch.amax))
    return torch.maximum(-low, high - 1)


def hunt(
    scene: Scene,
    goal: RankingAttack,
    ways: Sequence[Way],
    numbers: Tensor,
    budget: Budget,
    *,
    batch: int,
    seed: int = 0,
    surrogate: Scene | None = None,
    passes: int | None = None,
    tick: Callable[[], None] | None = None,
) -> Hunted:
    """Attack queries of a `scene`, of these `numbers` (Q,), in all `ways` to a `goal`, one after the other.

    A query that is lost costs nothing more. They are perturbed within the `budget`, `batch` at a time, with
    draws from the `seed`; attacks that transfer come from the `surrogate`. Each may cost at most `passes`.
    `tick` is told of each pass of a batch. Call it inside `frozen(model)`.
    """
    column, found = goal.columns[0], torch.zeros(len(numbers), dtype=torch.float64)
    aimed = []
    for rows in torch.arange(len(numbers)).split(batch):
        queries = scene.asking(numbers[rows])
        with torch.no_grad():
            target = scene.aim(goal, queries, Draws(seed, goal.drawn_as, numbers[rows].tolist()))
            found[rows] = scene.measure(goal, queries.z, target, queries)[column.name].cpu().double()
            aimed.append(target.index)
    index = torch.cat(aimed)
    hunted = Hunted(
        number=numbers,
        before=found,
        worst=found.clone(),
        by=torch.full((len(numbers),), BEFORE),
        change=torch.zeros(len(numbers), dtype=torch.float64),
        outside=torch.zeros(len(numbers), dtype=torch.float64),
        forward=torch.zeros(1, len(ways), dtype=torch.long),
        backward=torch.zeros(1, len(ways), dtype=torch.long),
    )
    for k, (way, most) in enumerate(zip(ways, allowed(ways, budget, passes), strict=True)):
        open_ = ~found.isnan()
        if goal.can_win:
            open_ &= ~goal.lost({column.name: hunted.worst})
        if not open_.any() or most == 0:
            break
        for rows in open_.nonzero()[:, 0].split(batch):
            outcome = run_attack(
                scene,
                way.attack,
                numbers[rows],
                budget,
                way.search,
                seed=seed,
                surrogate=surrogate if way.search.network is not None else None,
                tick=tick,
                purpose=way.purpose,
                most=most - 1 if most < way.passes(budget) else None,  # one pass is to measure it
                index=index[rows.to(index.device)] if way.attack.drawn_as == goal.drawn_as else None,
                clean=False,
            )
            hunted.forward[0, k] += outcome.forward
            hunted.backward[0, k] += outcome.backward
            reached = outcome.after[way.attack.columns[0].name].cpu().double()
            worse = (
                reached < hunted.worst[rows] if column.better == "higher" else reached > hunted.worst[rows]
            )
            here, changed = worse.to(outcome.images.device), rows[worse]
            moved, images = outcome.images[here], outcome.originals[here]
            hunted.worst[changed], hunted.by[changed] = reached[worse], k
            hunted.change[changed] = sizes((moved - images).double(), budget.norm).cpu()
            hunted.outside[changed] = _outside(moved).double().cpu()
    return hunted


def allowed(ways: Sequence[Way], budget: Budget, passes: int | None) -> list[int]:
    """Return how many passes of a query each of the `ways` may take within a `budget`, of `passes` in all.

    One that is cut short is the last, and a point is searched before it is measured. What transfers is not
    cut: where the surrogate was fooled most by then says nothing of the network.

    >>> from robustmetric.evaluation.suite import WorstCase
    >>> ways, budget = WorstCase(trials=20).ways(WorstCase().wanted[4]), Budget(eps=0.1, alpha=0.1, steps=6)
    >>> allowed(ways, budget, None), allowed(ways, budget, 10), allowed(ways, budget, 9)
    ([8, 8, 22], [8, 2, 0], [8, 0, 0])
    """
    found, left = [], passes
    for way in ways:
        cost = way.passes(budget)
        if left is not None and left < cost:
            cost = 0 if left < 2 or way.search.network is not None else left
            left = cost
        found.append(cost)
        left = None if left is None else left - cost
    return found
