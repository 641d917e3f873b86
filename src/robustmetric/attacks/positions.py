"""translocate, promote and demote: goals of a worst-case attack on places in a ranking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, RankingAttack, Target
from robustmetric.attacks.columns import Column
from robustmetric.attacks.draws import Draws, choose
from robustmetric.attacks.gallery import (
    Gallery,
    Queries,
    away_from,
    check_count,
    count_nearer,
    nearest,
)
from robustmetric.attacks.goals import TRIED, Goal, surely_nearer
from robustmetric.attacks.hinge import rank_hinge
from robustmetric.attacks.margin import SLACK, kth_nearest
from robustmetric.distance import pair_distance
from robustmetric.squares import square_distance
from robustmetric.validate import UserError


@dataclass(frozen=True, kw_only=True)
class _Placed(Goal):
    """A goal that is reached when an image enters, or leaves, the first places of a ranking.

    By "margin" it goes by the distance of the image less that of the one at the last of these places, by
    "distance" by the first alone, and by "hinge" by all images that it has to pass. A candidate's rivals do
    not move: there all of these are one.
    """

    enters: ClassVar[bool]  # whether the image is wanted in there, or out
    counts_inside: ClassVar[bool] = True  # whether it is reported as in there, or as out
    by_camera: ClassVar[bool] = False
    usual: ClassVar[int | None] = None  # the number of places unless it is given; None is 1 % of the images

    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None or self.usual is not None:
            check_count("k", self.k)  # type: ignore[arg-type]

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of its objectives, the usual one first."""
        return ("margin", "distance", "hinge") if self.side == "query" else ("margin",)

    def _options(self) -> dict[str, float | str | None]:
        return {"k": None if self.k == self.usual else self.k, **super()._options()}

    def places(self, images: int) -> int:
        """Return how many places of a gallery of N `images` count: `k`, or 1 % of them."""
        return -(-images // 100) if self.k is None else self.k

    def check_fits(self, images: int) -> None:
        """Refuse a gallery with too few `images`, N, to have so many places."""
        check_count("k", self.places(images), images)

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Return the targets; of a candidate with who has the last place that counts, (B, 1)."""
        if self.side == "query":
            return Target(index)
        asked, count = index[:, 0], self.places(len(gallery))
        place, _ = kth_nearest(gallery.z[asked], gallery, count, (asked, queries.own))
        return Target(index, place[:, None])

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return how far (B,) the image is from where it is wanted."""
        return self.appraise(z, target, queries, gallery)[0]

    def appraise(
        self, z: Tensor, target: Target, queries: Queries, gallery: Gallery
    ) -> tuple[Tensor, Tensor | None]:
        """Return how far (B,) the image is from where it is wanted, and which (B,) surely are there."""
        sign = 1.0 if self.enters else -1.0
        index = target.index[:, 0]
        goal = gallery.z[index]
        dist = pair_distance(away_from(z, goal), goal)
        if self.side == "candidate":
            assert target.extra is not None  # noqa: S101
            rival = gallery.z[target.extra[:, 0]]
            return sign * (dist - pair_distance(rival, goal)), self._there(z, rival, goal)
        if self.how == "margin":
            rival = gallery.z[self._last_place(z, index, queries, gallery)]
            return sign * (dist - pair_distance(away_from(z, rival), rival)), self._there(goal, rival, z)
        if self.how == "distance":
            value = sign * dist
        else:
            value = rank_hinge(z, target.index, [sign], gallery, queries.own)
        there = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        rows = self._hopeful(z, index, queries, gallery)
        if len(rows):
            last = self._last_place(z[rows], index[rows], queries[rows], gallery)
            there[rows] = self._there(goal[rows], gallery.z[last], z[rows])
        return value, there

    def _last_place(self, z: Tensor, index: Tensor, queries: Queries, gallery: Gallery) -> Tensor:
        """Return who has the last place that counts (B,), without the queries and their targets (B,)."""
        seen = queries if self.by_camera else None
        return kth_nearest(z.detach(), gallery, self.places(len(gallery)), (queries.own, index), seen)[0]

    def _there(self, image: Tensor, rival: Tensor, place: Tensor) -> Tensor:
        """Return which images are surely nearer to a place than a rival, or farther if they are to leave."""
        return surely_nearer(image, rival, place) if self.enters else surely_nearer(rival, image, place)

    @torch.no_grad()
    def _hopeful(self, z: Tensor, index: Tensor, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the rows (R,) whose target may be where it is wanted: it is not where some are ahead of it.

        A part of the gallery tells that of most images that are to enter.
        """
        rows = torch.arange(len(z), device=z.device)
        if not self.enters:
            return rows
        level = (z * gallery.z[index]).sum(1, keepdim=True) + SLACK
        ahead = (z @ gallery.sample.z.T > level).sum(1)
        ahead -= (gallery.in_sample(queries.own) >= 0).long()  # who may be counted, and ranks itself
        return rows[ahead < self.places(len(gallery))]

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the image is in the first places, or out of them, as 100 or 0."""
        index = target.index[:, 0]
        level = square_distance(z, gallery.z[index])
        if self.side == "candidate":
            nearer, tied = count_nearer(gallery.z[index], level, gallery, [index, queries.own])
        else:
            asked = queries if self.by_camera else None
            nearer, tied = count_nearer(z, level, gallery, [queries.own, index], queries=asked)
        inside = nearer + tied / 2 <= self.places(len(gallery)) - 1
        return {self.name: 100.0 * (inside if self.counts_inside else ~inside).double()}


@ATTACKS.register("promote")
@dataclass(frozen=True, kw_only=True)
class Promote(_Placed):
    """Bring a random image into the first `k` of the ranking; reported is how often that succeeds.

    With the `side` candidate the image itself is perturbed, and a random image of the gallery queries.

    >>> Promote(k=10).name, Promote(side="candidate").columns[0].heading
    ('promote(k=10)', "promote(side='candidate') ↓")
    """

    family: ClassVar[str] = "promote"
    enters: ClassVar[bool] = True

    usual: ClassVar[int | None] = 4

    k: int | None = usual

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of its objectives; the distance leads farther than a margin to what moves as well."""
        return ("distance", "hinge", "margin") if self.side == "query" else ("margin",)

    def ways(self, targets: int) -> tuple[RankingAttack, ...]:
        """Return attacks that want the same, but for the margin, which finds nothing that they do not."""
        return super().ways(targets)[:2]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The share of queries whose target gets to the front."""
        return (Column(self.name, "lower", lost=100.0),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return one image at random: (B, 1)."""
        return choose(draws.uniform(1), gallery, queries.own, strict=True)


@ATTACKS.register("demote")
@dataclass(frozen=True, kw_only=True)
class Demote(_Placed):
    """Drive an image out of the nearest 1 %, or the first `k`; reported is how often that succeeds.

    The image is drawn among these. With the `side` candidate it is perturbed itself, and one of the images
    near to it queries, one that has it among the nearest 1 % if there is such.

    >>> Demote().name, Demote(k=5, side="candidate").name
    ('demote', "demote(k=5,side='candidate')")
    """

    family: ClassVar[str] = "demote"
    enters: ClassVar[bool] = False
    counts_inside: ClassVar[bool] = False

    @property
    def columns(self) -> tuple[Column, ...]:
        """The share of queries whose target is driven out."""
        return (Column(self.name, "lower", lost=100.0),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return one of the images near to the query: (B, 1)."""
        if self.side == "candidate":
            return self._askers(queries, gallery, draws)
        count = self.places(len(gallery))
        pool = nearest(queries.z, gallery, count, without=queries.own)
        place = (draws.uniform(1) * count).long().clamp_max(count - 1)
        return pool.gather(1, place.to(pool.device))

    def _askers(self, queries: Queries, gallery: Gallery, draws: Draws) -> Tensor:
        """Return an image near to each candidate that has it in its first places: (B, 1)."""
        pool = nearest(queries.z, gallery, min(TRIED, len(gallery) - 1), without=queries.own)
        order = draws.uniform(pool.shape[1]).argsort(dim=1).to(pool.device)
        pool = pool.gather(1, order)
        chosen, found = pool[:, 0].clone(), torch.zeros(len(pool), dtype=torch.bool, device=pool.device)
        for column in pool.T:
            left = (~found).nonzero()[:, 0]
            if len(left) == 0:
                break
            asked = column[left]
            level = square_distance(queries.z[left], gallery.z[asked])
            nearer, tied = count_nearer(gallery.z[asked], level, gallery, [asked, queries.own[left]])
            fits = left[nearer + tied / 2 <= self.places(len(gallery)) - 1]
            chosen[fits], found[fits] = column[fits], True
        return chosen[:, None]


@ATTACKS.register("translocate")
@dataclass(frozen=True, kw_only=True)
class Translocate(_Placed):
    """Push the first image of the ranking out of the first `k`; reported is how often it stays.

    >>> Translocate().name, Translocate(k=10).columns[0].heading
    ('translocate', 'translocate(k=10) ↑')
    """

    family: ClassVar[str] = "translocate"
    enters: ClassVar[bool] = False
    by_camera: ClassVar[bool] = True

    usual: ClassVar[int | None] = 4

    k: int | None = usual

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side != "query":
            raise UserError(
                f"translocate is of the query's side alone: for a candidate write demote(k={self.k}, "
                "side='candidate')"
            )

    @property
    def columns(self) -> tuple[Column, ...]:
        """The share of queries whose first image stays in front."""
        return (Column(self.name, "higher", lost=0.0),)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the first image of the ranking: (B, 1)."""
        return nearest(queries.z, gallery, 1, without=queries.own, queries=queries)
