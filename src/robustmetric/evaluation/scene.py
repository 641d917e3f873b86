"""A network and what it makes of a data set, and a batch of its queries under attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from robustmetric.attacks import Draws, Gallery, Queries, RankingAttack, Search, Target
from robustmetric.attacks.contract import (
    checked_aim,
    checked_appraise,
    checked_measure,
    checked_objective,
    checked_search,
    checked_select,
    checked_start,
)
from robustmetric.attacks.search import Lowest
from robustmetric.distance import embed
from robustmetric.evaluation.images import Images
from robustmetric.perturb import Budget, device_of
from robustmetric.retrieval import Ranking, rank


@dataclass(frozen=True, eq=False)
class Scene:
    """A frozen network, the images that may query with their embeddings, and the gallery that they query.

    `model` is the network, `images` (N, C, H, W) may query and `queries` has their embeddings (N, D).
    `gallery` is what they query; `ranked` are its images if they are others.

    >>> images, labels = torch.rand(6, 1, 2, 2), torch.arange(6) % 2
    >>> z = embed_all(nn.Flatten(), images, torch.arange(6), batch=6)
    >>> scene = Scene(nn.Flatten(), images, Queries(z, labels, torch.arange(6)), Gallery(z, labels))
    >>> scene.batch(torch.tensor([4]))[0].shape
    torch.Size([1, 1, 2, 2])
    """

    model: nn.Module
    images: Images
    queries: Queries
    gallery: Gallery
    ranked: Images | None = None

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return device_of(self.model)

    @cached_property
    def judged(self) -> Gallery:
        """The gallery where ranks are counted: on the CPU for Apple's GPUs, which lack double precision."""
        return self.gallery.to(torch.device("cpu") if self.device.type == "mps" else self.gallery.z.device)

    def aim(
        self, attack: RankingAttack, queries: Queries, draws: Draws, index: Tensor | None = None
    ) -> Target:
        """Choose what B `queries` of an `attack` aim at, with `draws`, and prepare it for the objective.

        It is `index` (B, W) if that is given.
        """
        where = self.judged.z.device
        if index is None:
            index = checked_select(attack, queries.to(where), self.judged, draws=draws)
        return checked_aim(attack, index.to(queries.z.device), queries, self.gallery)

    def measure(
        self, attack: RankingAttack, z: Tensor, target: Target, queries: Queries, won: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what an `attack` measures on `queries` at `z` (B, D), aimed at `target`: (B,) by column.

        Those that are surely `won` (B,) are not looked at if all that is measured is whether they are.
        """
        where = self.judged.z.device
        z, target, queries = z.to(where), target.to(where), queries.to(where)
        column = attack.columns[0]
        if won is None or column.lost is None or len(attack.columns) > 1 or not won.any():
            return checked_measure(attack, z, target, queries, self.judged)
        rest = (~won).to(where)
        values = torch.full((len(z),), column.lost, dtype=torch.float64, device=where)
        if rest.any():
            found = checked_measure(attack, z[rest], target[rest], queries[rest], self.judged)
            values[rest] = found[column.name].double()
        return {column.name: values}

    def rank(self, z: Tensor, queries: Queries) -> Ranking:
        """Rank the gallery for B `queries` with embeddings `z` (B, D)."""
        gallery = self.gallery
        return rank(
            gallery.z,
            gallery.labels,
            z,
            queries.labels,
            own=queries.own,
            cameras=gallery.cameras,
            query_cameras=queries.cameras,
        )

    def batch(self, numbers: Tensor) -> tuple[Tensor, Queries]:
        """Return the images (B, C, H, W) of these `numbers` (B,) and what is known of them as queries."""
        return self.images[numbers].detach().to(self.device), self.asking(numbers)

    def asking(self, numbers: Tensor) -> Queries:
        """Return the queries with these `numbers` (B,), without a look at their images."""
        return self.queries[numbers.to(self.device)]

    def seen_by(self, model: nn.Module, batch: int) -> Scene:
        """Return the same images as another network, `model`, sees them, embedded `batch` at a time."""
        z = embed_all(model, self.images, torch.arange(len(self.images)), batch)
        ranked = z
        if self.ranked is not None:
            ranked = embed_all(model, self.ranked, torch.arange(len(self.ranked)), batch)
        return Scene(
            model, self.images, replace(self.queries, z=z), replace(self.gallery, z=ranked), self.ranked
        )


def embed_all(
    model: nn.Module, images: Images, numbers: Tensor, batch: int, done: Callable[[int], None] | None = None
) -> Tensor:
    """Embed the images of these numbers (B,), `batch` at a time: (B, D)."""
    found = []
    with torch.no_grad():
        for part in numbers.split(batch):
            found.append(embed(model, images[part].to(device_of(model))))
            if done is not None:
                done(len(part))
    return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of B queries, as `run_attack` returns it.

    `images` (B, C, H, W) are the perturbed ones, `z` (B, D) their embeddings and `target` what they aimed at.
    `before` and `after` have the values (B,) by column of the benign and the perturbed images. `first`,
    `last` and `best` are the objective (B,) of the network under attack at the image, at the perturbed image
    and at the best point on the way, where that is known. `forward` and `backward` count the images that went
    through a network, and back. `originals` (B, C, H, W) are the images as they were.
    """

    images: Tensor
    z: Tensor
    target: Target
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    first: Tensor
    last: Tensor
    best: Tensor
    forward: int
    backward: int
    originals: Tensor


class _SpentError(Exception):
    """A search has asked as often as it may."""


def run_attack(
    scene: Scene,
    attack: RankingAttack,
    numbers: Tensor,
    budget: Budget,
    search: Search,
    *,
    seed: int = 0,
    surrogate: Scene | None = None,
    tick: Callable[[], None] | None = None,
    purpose: str | None = None,
    most: int | None = None,
    index: Tensor | None = None,
    clean: bool = True,
) -> Outcome:
    """Run an `attack` on the queries of a `scene` with these `numbers` (B,); call it inside `frozen(model)`.

    The `search` perturbs them within the `budget`; random draws start at `seed`, and those of the search
    depend on its `purpose`, by default the attack's name. Targets are those of the network under attack. With
    a `surrogate`, its embeddings of the same images are what the search sees. A query that is lost to the
    attack is not searched any longer. `tick` is called each time that the search has been told the objective,
    and after `most` times it is stopped: the lowest point by then counts. `index` (B, W) are the targets if
    they are known already. Unless it is `clean`, the images as they were are not measured.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(6, 1, 2, 2), torch.arange(6) % 2
    >>> z = embed_all(nn.Flatten(), images, torch.arange(6), batch=6)
    >>> scene = Scene(nn.Flatten(), images, Queries(z, labels, torch.arange(6)), Gallery(z, labels))
    >>> budget = rm.Budget(eps=0.1, alpha=0.05, steps=4)
    >>> outcome = run_attack(scene, rm.attack("TMA"), torch.tensor([0, 3]), budget, rm.attacks.PGD())
    >>> bool((outcome.after["TMA"] > outcome.before["TMA"]).all())
    True
    """
    images, queries = scene.batch(numbers)
    listed = numbers.tolist()
    ground = surrogate or scene
    seen = queries if surrogate is None else surrogate.queries[numbers.to(surrogate.device)]
    with torch.no_grad():
        target = scene.aim(attack, queries, Draws(seed, attack.drawn_as, listed), index)
        goal = target if surrogate is None else checked_aim(attack, target.index, seen, surrogate.gallery)
        first = checked_objective(attack, queries.z, target, queries, scene.gallery)
    draws = Draws(seed, purpose or f"{attack.name}/search", listed)
    best, early, lowest = first.clone(), seen.z.clone(), Lowest(images)
    asked = forward = backward = 0

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        nonlocal asked, forward, backward
        if asked == most:
            raise _SpentError
        asked, forward, backward = asked + 1, forward + len(x), backward + len(x) * x.requires_grad
        z = embed(ground.model, x)
        all_rows = len(rows) == len(seen)
        aims, asking = (goal, seen) if all_rows else (goal[rows], seen[rows])
        value, won = checked_appraise(attack, z, aims, asking, ground.gallery)
        if x.requires_grad:  # a step of the descent, and not a trial beside it
            best[rows] = torch.minimum(best[rows], value.detach())
            early[rows] = z.detach()
        if won is not None and surrogate is None:  # what wins on another network need not win here
            value = value.masked_fill(won, -torch.inf)
        if most is not None:
            lowest.keep(x.detach(), value.detach(), rows)
        if tick is not None:
            tick()
        return value

    start = checked_start(attack, images, draws=draws)
    try:
        moved = checked_search(search, images, objective, budget, draws=draws, start=start)
    except _SpentError:
        moved = lowest.point
    with torch.no_grad():
        z = embed(scene.model, moved)
        last, won = checked_appraise(attack, z, target, queries, scene.gallery)
        after = scene.measure(attack, z, target, queries, won)
        # Where the end of one descent counts: of several, or of trials, the point before is not known.
        if attack.read_early and surrogate is None and search.keeps_last:
            sooner = scene.measure(attack, early, target, queries)
            after |= {name: sooner[name] for name in attack.read_early}
        before = scene.measure(attack, queries.z, target, queries) if clean else {}
    best = torch.minimum(best, last) if surrogate is None else last
    forward += len(moved)
    return Outcome(moved, z, target, before, after, first, last, best, forward, backward, images)
