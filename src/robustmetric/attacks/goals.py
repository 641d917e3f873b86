"""The goals of the worst-case suite, with objectives that aim at the score they are judged by.

misrank, shift, promote, demote and translocate are judged by the definitions, whatever the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, Appraisal, Attack, Target
from robustmetric.attacks.columns import DISTANCE, Column
from robustmetric.attacks.draws import Draws, choose, choose_near
from robustmetric.attacks.margin import SLACK, kth_nearest, rank_hinge, rivals, smooth_margin
from robustmetric.attacks.plain import EmbeddingShift
from robustmetric.errors import UserError, number, whole
from robustmetric.gallery import Gallery, Queries, away_from, count_mates, count_nearer, hit_at_1, nearest
from robustmetric.registry import changed_options, lookup, with_options
from robustmetric.sphere import pair_distance
from robustmetric.squares import distances, keys_of, positions_of, square_distance


@dataclass(frozen=True, kw_only=True)
class Goal(Attack):
    """What a worst-case attack wants: one column, judged by the definitions, and several objectives for it.

    `by` is the objective, None for the usual one. With the `side` query the image that is perturbed queries,
    with candidate it is ranked.
    """

    family: ClassVar[str]
    better: ClassVar[Literal["higher", "lower"]]
    """What is reported: the share of answers that are kept, or of successes."""
    by_query: ClassVar[tuple[str, ...]]
    """Its objectives for the side query, the usual one first."""
    sides: ClassVar[tuple[str, ...]] = ("query", "candidate")
    numbered: ClassVar[bool] = False
    """Whether `by` may be the number of a class as well."""
    says_same: ClassVar[tuple[str, ...]] = ()
    """Columns of other attacks that say the same, if no option is changed."""
    strict = True

    by: str | int | None = None
    side: str = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        lookup("side", self.side, dict.fromkeys(self.sides))
        if self.by is not None and self.by not in self.objectives:
            if self.numbered and self.side == "query":
                known = " or ".join(map(repr, self.objectives))
                whole("by", self.by, 1, why=f"the number of a wrong class, 1 for the nearest, if not {known}")
            else:
                known = ", ".join(map(repr, self.objectives))
                raise UserError(f"{self.family} has no objective by={self.by!r}; it has: {known}")

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of its objectives, the usual one first."""
        return self.by_query if self.side == "query" else ("margin",)

    @property
    def how(self) -> str | int:
        """The objective that it goes by."""
        return self.objectives[0] if self.by is None else self.by

    @property
    def name(self) -> str:  # type: ignore[override]
        """Its name with the options that are not the usual ones."""
        return self._name_without()

    @property
    def columns(self) -> tuple[Column, ...]:  # type: ignore[override]
        """Its one column."""
        return (Column(self.name, self.better, success_value=0.0 if self.better == "higher" else 100.0),)

    @property
    def perturbs(self) -> str:  # type: ignore[override]
        """The side of the perturbed image."""
        return self.side

    @property
    def same_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        """Columns of other attacks that say the same of a query, by the definitions."""
        return self.says_same if self.drawn_as == self.family else ()

    @property
    def drawn_as(self) -> str:
        """The name without the objective, unless that has targets of its own."""
        return self._name_without("tau", *(["by"] if isinstance(self.by, str) else []))

    def _name_without(self, *but: str) -> str:
        changed = changed_options(self, *but)
        return with_options(self.family, {k: changed[k] for k in ("k", "side", "tau", "by") if k in changed})

    def attempts(self, targets: int) -> tuple[Attack, ...]:
        """Return attacks with the same aim, one for each of its objectives."""
        return tuple(replace(self, by=None if by == self.objectives[0] else by) for by in self.objectives)

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return how far (B,) the perturbed image is from what is wanted; see `appraise`."""
        return self.appraise(z, target, queries, gallery)[0]


def surely_nearer(x: Tensor, y: Tensor, place: Tensor) -> Tensor:
    """Return which of `x` (B, D) are nearer to their `place` (B, D) than `y` (B, D), beyond rounding: (B,).

    >>> surely_nearer(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[0.8, 0.6]]))
    tensor([True])
    """
    return (x.detach() * place).sum(1) > (y * place).sum(1) + SLACK


@ATTACKS.register("misrank")
@dataclass(frozen=True, kw_only=True)
class Misrank(Goal):
    """Bring any image of another class to the front; reported is R@1.

    The objective is a soft margin of temperature `tau` between other classes and the query's own. With `by`
    "margin" it is that between the nearest of each, and with a number n that to the n-th nearest wrong class.

    With the `side` candidate an image of the gallery is perturbed: it is to become the first in the ranking
    of an image of another class, the nearest of 8 that find one of their own. Reported is its R@1.

    >>> [attack.name for attack in Misrank().attempts(2)]
    ['misrank', "misrank(by='margin')", 'misrank(by=1)', 'misrank(by=2)']
    """

    family = "misrank"
    better = "higher"
    by_query = ("smooth", "margin")
    numbered = True
    says_same = ("ES:R", "LTM", "GTM")

    tau: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        number("tau", self.tau, 0, 2, open_low=True, why="it is a distance on the unit sphere")

    def attempts(self, targets: int) -> tuple[Attack, ...]:
        """Return both margins, and attacks on each of the `targets` nearest wrong classes."""
        classes = range(1, targets + 1) if self.side == "query" else ()
        return (*super().attempts(targets), *(replace(self, by=n) for n in classes))

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the nearest image of the class that is aimed at, (B, 1), or none, (B, 0).

        Of a candidate it is the image in whose ranking it is to be the first, and who is first there: (B, 2).
        """
        if not isinstance(self.how, str):
            return nearest_wrong(queries, gallery, self.how)
        if self.side == "query":
            return super().select(queries, gallery, draws=draws)

        def makes_sense(rows: Tensor, asked: Tensor) -> Tensor:
            first, kind = _first_of(asked, queries.own[rows], gallery), gallery.labels[asked]
            # Where there are fewer of other classes, what was left out comes after them.
            return (gallery.labels[first] == kind) & (kind != queries.labels[rows])

        count = min(TRIED, len(gallery))
        pool = nearest(queries.z, gallery, count, queries.any_camera, other_than=queries.labels)
        asked = _first_that(pool, makes_sense)
        return torch.stack([asked, _first_of(asked, queries.own, gallery)], dim=1)

    def appraise(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Appraisal:
        """Return the margin (B,), and which queries (B,) surely have an image of another class in front."""
        if self.side == "candidate":
            asked, first = target.index.T
            q, rival = gallery.z[asked], gallery.z[first]
            gap = pair_distance(away_from(z, q), q) - pair_distance(rival, q)
            # Where an image of another class is first in there without any attack, it need not be won.
            return gap, surely_nearer(z, rival, q) & (gallery.labels[first] == gallery.labels[asked])
        if self.how == "smooth":
            return smooth_margin(z, queries, gallery, self.tau)
        aimed = gallery.labels[target.index[:, 0]] if target.index.shape[1] else None
        found = rivals(z, queries, gallery, aimed)
        right, wrong = gallery.z[found.right], gallery.z[found.wrong]
        gap = pair_distance(away_from(z, wrong), wrong) - pair_distance(away_from(z, right), right)
        return torch.where(found.answered, gap, 0.0 * gap), found.misranked

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return whether the nearest image is still of the class, as 100 or 0."""
        if self.side == "query":
            return {self.name: hit_at_1(z, queries, gallery)}
        asked, first = _as_queries(target.index[:, 0], gallery), target.index[:, 1]
        level, rival = square_distance(z, asked.z), square_distance(asked.z, gallery.z[first])
        # Ties go to the lower position; what is no image of the gallery comes last.
        ahead = (level < rival) | ((level == rival) & (queries.own >= 0) & (queries.own < first))
        hit = 100.0 * ((gallery.labels[first] == asked.labels) & ~ahead)
        return {self.name: hit.where(count_mates(asked, gallery) > 0, torch.nan)}


TRIED = 8
"""So many images near to a candidate are looked at for one that its attack makes sense for."""


def _first_that(pool: Tensor, fits: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the first entry of each row of a `pool` (B, W) that `fits`, or else the first of all: (B,).

    `fits` is given some rows (R,) with an entry of each (R,), and returns (R,) bools.
    """
    chosen, left = pool[:, 0].clone(), torch.arange(len(pool), device=pool.device)
    for column in pool.T:
        if len(left) == 0:
            break
        fit = fits(left, column[left])
        chosen[left[fit]] = column[left[fit]]
        left = left[~fit]
    return chosen


def _first_of(index: Tensor, candidate: Tensor, gallery: Gallery) -> Tensor:
    """Return the first image in the ranking of images `index` (B,), without a candidate (B,): (B,)."""
    asked = _as_queries(index, gallery)
    found = nearest(asked.z, gallery, 2, asked)
    return torch.where(found[:, 0] == candidate, found[:, 1], found[:, 0])


def _as_queries(index: Tensor, gallery: Gallery) -> Queries:
    """Return images `index` (B,) of the gallery as queries."""
    cameras = None if gallery.cameras is None else gallery.cameras[index]
    return Queries(gallery.z[index], gallery.labels[index], index, cameras)


def nearest_wrong(queries: Queries, gallery: Gallery, place: int) -> Tensor:
    """Return the nearest image of the wrong class that is the `place`-th nearest: (B, 1) positions.

    The distance of a class is that of its nearest image in the `gallery` to one of the `queries`. Where there
    are fewer wrong classes, it is the farthest of them; where there is none, the first image.

    >>> z, labels = torch.eye(6), torch.tensor([0, 0, 1, 1, 2, 2])
    >>> queries = Queries(torch.tensor([[0.8, 0, 0.5, 0, 0, 0.3]]), labels[:1], torch.tensor([0]))
    >>> nearest_wrong(queries, Gallery(z, labels), 1), nearest_wrong(queries, Gallery(z, labels), 2)
    (tensor([[2]]), tensor([[5]]))
    """
    kinds, of_class = gallery.labels.unique(return_inverse=True)
    # Of each class the key of its nearest image, which is the one to return: see `keys_of`.
    none = torch.iinfo(torch.long).max
    first = torch.full((len(queries), len(kinds)), none, device=queries.z.device)
    for block in gallery.blocks():
        square = distances(queries.z, gallery.z[block])
        keys = keys_of(square, torch.arange(block.start, block.stop, device=square.device))
        first.scatter_reduce_(1, of_class[block].expand_as(keys), keys, "amin")
    own = kinds == queries.labels[:, None]
    ordered = first.masked_fill(own, none).sort(dim=1).values
    wrong = (len(kinds) - own.sum(1))[:, None]
    chosen = positions_of(ordered.gather(1, (wrong - 1).clamp(0, place - 1)))
    return torch.where(wrong > 0, chosen, 0)


@ATTACKS.register("shift")
@dataclass(frozen=True, kw_only=True)
class Shift(EmbeddingShift):
    """Move the embedding as far as possible; reported is the distance, and there is always more to want."""

    name = "shift"
    columns = (Column("shift", "lower", DISTANCE),)
    same_columns = ("ES:D",)
    strict = True

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the distance from the benign embedding."""
        return {"shift": pair_distance(z.double(), queries.z.double())}


@dataclass(frozen=True, kw_only=True)
class _Placed(Goal):
    """A goal that is reached when an image enters, or leaves, the first places of a ranking.

    By "margin" it goes by the distance of the image less that of the one at the last of these places, by
    "distance" by the first alone, and by "hinge" by all images that it has to pass. A candidate's rivals do
    not move: there all of these are one.
    """

    enters: ClassVar[bool]  # whether the image is wanted in there, or out
    by_query = ("margin", "distance", "hinge")
    by_camera: ClassVar[bool] = False

    k: int | None = None  # the number of places; None is 1 % of the images

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None or type(self).k is not None:
            whole("k", self.k, 1)

    def places(self, images: int) -> int:
        """Return how many places of a gallery of N `images` count: `k`, or 1 % of them."""
        return -(-images // 100) if self.k is None else self.k

    def counts(self, images: int) -> dict[str, int]:
        """Return the number of places that count in a gallery of N `images`."""
        return {"k": self.places(images)}

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Return the targets; of a candidate with who has the last place that counts, (B, 1)."""
        if self.side == "query":
            return Target(index)
        asked, count = index[:, 0], self.places(len(gallery))
        place = kth_nearest(gallery.z[asked], gallery, count, queries.any_camera, asked)
        return Target(index, place[:, None])

    def appraise(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Appraisal:
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
        by_distance = self.how == "distance"
        value = sign * dist if by_distance else rank_hinge(z, target.index, [sign], gallery, queries)
        there = torch.zeros(len(z), dtype=torch.bool, device=z.device)
        rows = self._hopeful(z, index, queries, gallery)
        if len(rows):
            last = self._last_place(z[rows], index[rows], queries[rows], gallery)
            there[rows] = self._there(goal[rows], gallery.z[last], z[rows])
        return value, there

    def _last_place(self, z: Tensor, index: Tensor, queries: Queries, gallery: Gallery) -> Tensor:
        """Return who has the last place that counts (B,), without the queries and their targets (B,)."""
        return kth_nearest(z.detach(), gallery, self.places(len(gallery)), self._asked(queries), index)

    def _asked(self, queries: Queries) -> Queries:
        return queries if self.by_camera else queries.any_camera

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
        place = gallery.z[index] if self.side == "candidate" else z
        nearer, tied = count_nearer(place, level, gallery, self._asked(queries), index)
        inside = nearer + tied / 2 <= self.places(len(gallery)) - 1
        reported = inside if self.enters == (self.better == "lower") else ~inside
        return {self.name: 100.0 * reported.double()}


@ATTACKS.register("promote")
@dataclass(frozen=True, kw_only=True)
class Promote(_Placed):
    """Bring a random image into the first `k` of the ranking; reported is how often that succeeds.

    With the `side` candidate the image itself is perturbed, and a random image of the gallery queries.

    >>> Promote(k=10).name, Promote(side="candidate").columns[0].heading
    ('promote(k=10)', "promote(side='candidate') ↓")
    """

    family = "promote"
    better = "lower"
    enters = True
    # The distance leads farther than a margin to what moves as well.
    by_query = ("distance", "hinge", "margin")

    k: int | None = 4

    def attempts(self, targets: int) -> tuple[Attack, ...]:
        """Return all but the margin, which finds nothing that the others do not."""
        return super().attempts(targets)[:2]

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

    family = "demote"
    better = "lower"
    enters = False

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return one of the images near to the query: (B, 1)."""
        if self.side == "candidate":
            pool = nearest(queries.z, gallery, min(TRIED, len(gallery) - 1), queries.any_camera)
            pool = pool.gather(1, draws.uniform(pool.shape[1]).argsort(dim=1).to(pool.device))

            def has_it(rows: Tensor, asked: Tensor) -> Tensor:
                some, place = queries[rows], gallery.z[asked]
                level = square_distance(some.z, place)
                nearer, tied = count_nearer(place, level, gallery, some.any_camera, asked)
                return nearer + tied / 2 <= self.places(len(gallery)) - 1

            return _first_that(pool, has_it)[:, None]
        return choose_near(draws.uniform(1), queries, gallery, self.places(len(gallery)), strict=True)


@ATTACKS.register("translocate")
@dataclass(frozen=True, kw_only=True)
class Translocate(_Placed):
    """Push the first image of the ranking out of the first `k`; reported is how often it stays.

    >>> Translocate().name, Translocate(k=10).columns[0].heading
    ('translocate', 'translocate(k=10) ↑')
    """

    family = "translocate"
    better = "higher"
    sides = ("query",)  # for a candidate it would be demote
    says_same = ("GTT",)
    enters = False
    by_camera = True

    k: int | None = 4

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the first image of the ranking: (B, 1)."""
        return nearest(queries.z, gallery, 1, queries)
