"""A network and what it makes of a data set, and a batch of its queries under attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from robustmetric.attacks import Attack, Draws, Gallery, Problem, Queries, Target
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.threat import Threat
from robustmetric.perturb import Norm, device_of, sizes
from robustmetric.retrieval import Ranking, rank
from robustmetric.sphere import embed


@dataclass(frozen=True, eq=False)
class NetworkView:
    """A frozen network, the images that may query with their embeddings, and the gallery that they query.

    `model` is the network, `images` (N, C, H, W) may query and `queries` has their embeddings (N, D).
    `gallery` is what they query; `ranked` are its images if they are others.

    >>> images, labels = torch.rand(6, 1, 2, 2), torch.arange(6) % 2
    >>> z = embed_all(nn.Flatten(), images, torch.arange(6), batch=6)
    >>> view = NetworkView(nn.Flatten(), images, Queries(z, labels, torch.arange(6)), Gallery(z, labels))
    >>> view.batch(torch.tensor([4]))[0].shape
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
    def ranking_gallery(self) -> Gallery:
        """The gallery where ranks are counted: on the CPU for Apple's GPUs, which lack double precision."""
        return self.gallery.to(torch.device("cpu") if self.device.type == "mps" else self.gallery.z.device)

    def aim(self, attack: Attack, queries: Queries, draws: Draws, index: Tensor | None = None) -> Target:
        """Choose what B `queries` of an `attack` aim at, with `draws`, and prepare it for the objective.

        It is `index` (B, W) if that is given.
        """
        where = self.ranking_gallery.z.device
        if index is None:
            index = attack.checked_select(queries.to(where), self.ranking_gallery, draws=draws)
        return attack.checked_aim(index.to(queries.z.device), queries, self.gallery)

    def measure(
        self, attack: Attack, z: Tensor, target: Target, queries: Queries, won: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what an `attack` measures on `queries` at `z` (B, D), aimed at `target`: (B,) by column.

        Those that are surely `won` (B,) are not looked at if all that is measured is whether they are.
        """
        where = self.ranking_gallery.z.device
        z, target, queries = z.to(where), target.to(where), queries.to(where)
        column = attack.columns[0]
        if won is None or column.success_value is None or len(attack.columns) > 1 or not won.any():
            return attack.checked_measure(z, target, queries, self.ranking_gallery)
        rest = (~won).to(where)
        values = torch.full((len(z),), column.success_value, dtype=torch.float64, device=where)
        if rest.any():
            found = attack.checked_measure(z[rest], target[rest], queries[rest], self.ranking_gallery)
            values[rest] = found[column.name].double()
        return {column.name: values}

    def rank(self, z: Tensor, queries: Queries) -> Ranking:
        """Rank the gallery for B `queries` with embeddings `z` (B, D)."""
        g, q = self.gallery, queries
        return rank(g.z, g.labels, z, q.labels, own=q.own, cameras=g.cameras, query_cameras=q.cameras)

    def batch(self, numbers: Tensor) -> tuple[Tensor, Queries]:
        """Return the images (B, C, H, W) of these `numbers` (B,) and what is known of them as queries."""
        return self.images[numbers].detach().to(self.device), self.asking(numbers)

    def asking(self, numbers: Tensor) -> Queries:
        """Return the queries with these `numbers` (B,), without a look at their images."""
        return self.queries[numbers.to(self.device)]

    def seen_by(self, model: nn.Module, batch: int) -> NetworkView:
        """Return the same images as another network, `model`, sees them, embedded `batch` at a time."""
        z = embed_all(model, self.images, torch.arange(len(self.images)), batch)
        ranked = z
        if self.ranked is not None:
            ranked = embed_all(model, self.ranked, torch.arange(len(self.ranked)), batch)
        return NetworkView(
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
class AttackResult:
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

    def changes(self, norm: Norm) -> dict[str, Tensor]:
        """Return by name the size (B,) of each change in a `norm`, and how far pixels leave [0, 1]."""
        images, originals = self.images.cpu().double(), self.originals.cpu().double()
        low, high = images.flatten(1).aminmax(dim=1)
        change = sizes(images - originals, norm)
        return {"change": change, "outside": torch.maximum(-low, high - 1)}


def run_attack(
    view: NetworkView,
    attack: Attack,
    numbers: Tensor,
    threat: Threat,
    *,
    stop: bool = True,
    surrogate: NetworkView | None = None,
    tick: Callable[[], None] | None = None,
    purpose: str | None = None,
    index: Tensor | None = None,
    clean: bool = True,
) -> AttackResult:
    """Run an `attack` on the queries of a `view` with these `numbers` (B,); call it inside `frozen(model)`.

    The search of the `threat` perturbs them, all in one batch, within its budget. Its random draws depend on
    the seed and on the `purpose`, by default the attack's name. Targets are those of the network under
    attack, or `index` (B, W). With a `surrogate`, its embeddings of the same images are what the search
    sees. The search lets a query go that is where the attack wants it, unless `stop` is False. `tick` is
    called after each evaluation of the objective. Unless it is `clean`, the images as they were are not
    measured.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(6, 1, 2, 2), torch.arange(6) % 2
    >>> z = embed_all(nn.Flatten(), images, torch.arange(6), batch=6)
    >>> view = NetworkView(nn.Flatten(), images, Queries(z, labels, torch.arange(6)), Gallery(z, labels))
    >>> threat = Threat(rm.Budget(eps=0.1, alpha=0.05, steps=4), rm.attacks.PGD())
    >>> result = run_attack(view, rm.attack("TMA"), torch.tensor([0, 3]), threat)
    >>> bool((result.after["TMA"] > result.before["TMA"]).all())
    True
    """
    images, queries = view.batch(numbers)
    listed = numbers.tolist()
    ground = surrogate or view
    seen = queries if surrogate is None else surrogate.asking(numbers)
    with torch.no_grad():
        target = view.aim(attack, queries, Draws(threat.seed, attack.drawn_as, listed), index)
        goal = target if surrogate is None else attack.checked_aim(target.index, seen, surrogate.gallery)
        first = attack.checked_objective(queries.z, target, queries, view.gallery)
    draws = Draws(threat.seed, purpose or f"{attack.name}/search", listed)
    best, early = first.clone(), seen.z.clone()
    forward = backward = 0

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        nonlocal forward, backward
        forward, backward = forward + len(x), backward + len(x) * x.requires_grad
        z = embed(ground.model, x)
        all_rows = len(rows) == len(seen)
        aims, asking = (goal, seen) if all_rows else (goal[rows], seen[rows])
        value, won = attack.checked_appraise(z, aims, asking, ground.gallery)
        if x.requires_grad:  # a step of the descent, and not a trial aside
            best[rows] = torch.minimum(best[rows], value.detach())
            early[rows] = z.detach()
        if won is not None and stop and surrogate is None:  # what wins on another network need not win here
            value = value.masked_fill(won, -torch.inf)
        if tick is not None:
            tick()
        return value

    start = attack.checked_start(images, draws=draws)
    moved = threat.search(Problem(images, objective, threat.budget, draws, start))
    with torch.no_grad():
        z = embed(view.model, moved)
        last, won = attack.checked_appraise(z, target, queries, view.gallery)
        after = view.measure(attack, z, target, queries, won)
        # Where the end of one descent counts: of several, or of trials, the point before is not known.
        if attack.read_early and surrogate is None and threat.search.keeps_last:
            sooner = view.measure(attack, early, target, queries)
            after |= {name: sooner[name] for name in attack.read_early}
        before = view.measure(attack, queries.z, target, queries) if clean else {}
    best = torch.minimum(best, last) if surrogate is None else last
    return AttackResult(
        moved, z, target, before, after, first, last, best, forward + len(moved), backward, images
    )


def attack_block(
    view: NetworkView,
    attack: Attack,
    numbers: Tensor,
    threat: Threat,
    *,
    surrogate: NetworkView | None = None,
    tick: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """Run an `attack` as `run_attack` does; return what is kept of it, by name, on the CPU.

    "number" (B,) are the queries and "target" (B, W) positions in the gallery. "before/X", "after/X" and
    "8-bit/X" (B,) are the values of each column X of the images as they were, perturbed, and rounded to 8
    bits; "objective/first", "objective/last" and "objective/best" (B,) those of the objective, "change" and
    "outside" (B,) the size of the change and how far pixels leave [0, 1].
    """
    result = run_attack(view, attack, numbers, threat, surrogate=surrogate, tick=tick)
    with torch.no_grad():
        z = embed(view.model, (result.images * 255).round() / 255)
        rounded = view.measure(attack, z, result.target, view.asking(numbers))
    values = {"before": result.before, "after": result.after, "8-bit": rounded}
    named = {
        "number": numbers,
        "target": result.target.index,
        "objective/first": result.first,
        "objective/last": result.last,
        "objective/best": result.best,
        **result.changes(threat.budget.norm),
        **{f"{when}/{name}": value for when, found in values.items() for name, value in found.items()},
    }
    # Copies, because safetensors rejects two names for one tensor.
    kept = {n: v.cpu().clone(memory_format=torch.contiguous_format) for n, v in named.items()}
    return {n: v.double() if v.is_floating_point() else v for n, v in kept.items()}
