"""misrank and shift: goals of a worst-case attack, with objectives that aim at the score they are judged by.

All goals are judged by the definitions, whatever the protocol of the attacks beside them. The goals that
concern places in a ranking are in `positions`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor

from robustmetric.attacks.base import ATTACKS, RankingAttack, Target, with_options
from robustmetric.attacks.columns import DISTANCE, Column
from robustmetric.attacks.draws import Draws
from robustmetric.attacks.gallery import (
    Gallery,
    Queries,
    away_from,
    check_count,
    count_mates,
    hit_at_1,
    nearest,
    nothing,
)
from robustmetric.attacks.margin import SLACK, rivals, smooth_margin
from robustmetric.attacks.shift import EmbeddingShift
from robustmetric.distance import pair_distance
from robustmetric.registry import lookup
from robustmetric.squares import distances, keys_of, positions_of, square_distance
from robustmetric.validate import UserError, is_number


@dataclass(frozen=True, kw_only=True)
class Goal(RankingAttack):
    """What a worst-case attack wants: one column, judged by the definitions, and several objectives for it.

    `by` is the objective, None for the usual one. With the `side` query the image that is perturbed queries,
    with candidate it is ranked.
    """

    family: ClassVar[str]

    by: str | int | None = None
    side: str = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        lookup("side", self.side, {"query": 0, "candidate": 0})
        if self.by is not None and self.by not in self.objectives:
            known = ", ".join(map(repr, self.objectives))
            more = self._more if self.side == "query" else ""
            raise UserError(f"{self.family} has no objective by={self.by!r}; it has: {known}{more}")

    @property
    @abstractmethod
    def objectives(self) -> tuple[str, ...]:
        """The names of its objectives, the usual one first."""

    _more: ClassVar[str] = ""

    @property
    def strict(self) -> bool:
        """Goals are judged by the definitions."""
        return True

    @property
    def name(self) -> str:
        """Its name with the options that are not the usual ones."""
        return with_options(self.family, **self._options(), by=self.by)

    @property
    def perturbs(self) -> str:
        """The side of the perturbed image."""
        return self.side

    @property
    def drawn_as(self) -> str:
        """The name without the objective, unless that has targets of its own."""
        return with_options(self.family, **self._options(), by=None if isinstance(self.by, str) else self.by)

    def _options(self) -> dict[str, float | str | None]:
        """Return the options besides the objective, None for usual ones."""
        return {"side": None if self.side == "query" else self.side}

    @property
    def how(self) -> str | int:
        """The objective that it goes by."""
        return self.objectives[0] if self.by is None else self.by

    def ways(self, targets: int) -> tuple[RankingAttack, ...]:
        """Return attacks that want the same, by each of its objectives."""
        return tuple(replace(self, by=None if by == self.objectives[0] else by) for by in self.objectives)


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

    >>> [attack.name for attack in Misrank().ways(2)]
    ['misrank', "misrank(by='margin')", 'misrank(by=1)', 'misrank(by=2)']
    """

    family: ClassVar[str] = "misrank"
    _more: ClassVar[str] = ", or the number of a wrong class, 1 for the nearest"

    tau: float = 0.05

    def __post_init__(self) -> None:
        if is_number(self.by, Integral) and self.side == "query":
            check_count("by", self.by)  # type: ignore[arg-type]
            replace(self, by=None)  # checks all the rest
        else:
            super().__post_init__()
        if not (is_number(self.tau) and 0 < self.tau <= 2):
            raise UserError(f"tau must be in (0, 2], not {self.tau!r}: it is a distance on the unit sphere")

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names of its objectives, the usual one first."""
        return ("smooth", "margin") if self.side == "query" else ("margin",)

    def _options(self) -> dict[str, float | str | None]:
        return {**super()._options(), "tau": None if self.tau == 0.05 else self.tau}

    @property
    def columns(self) -> tuple[Column, ...]:
        """R@1."""
        return (Column(self.name, "higher", lost=0.0),)

    def ways(self, targets: int) -> tuple[RankingAttack, ...]:
        """Return both margins, and attacks on each of the `targets` nearest wrong classes."""
        if self.side == "candidate":
            return super().ways(targets)
        return (*super().ways(targets), *(replace(self, by=n) for n in range(1, targets + 1)))

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the nearest image of the class that is aimed at, (B, 1), or none, (B, 0).

        Of a candidate it is the image in whose ranking it is to be the first, and who is first there: (B, 2).
        """
        if self.side == "candidate":
            asked = self._askers(queries, gallery)
            return torch.stack([asked, _first_of(asked, queries.own, gallery)], dim=1)
        return nothing(queries) if isinstance(self.how, str) else nearest_wrong(queries, gallery, self.how)

    def _askers(self, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the nearest image of another class whose first image is of its class: (B,)."""
        count = min(TRIED, len(gallery))
        pool = nearest(queries.z, gallery, count, without=queries.own, other_than=queries.labels)
        chosen, found = pool[:, 0].clone(), torch.zeros(len(pool), dtype=torch.bool, device=pool.device)
        for asked in pool.T:
            left = ~found
            first = _first_of(asked[left], queries.own[left], gallery)
            kind = gallery.labels[asked[left]]
            # Where there are fewer of other classes, what was left out comes behind them.
            found[left] = (gallery.labels[first] == kind) & (kind != queries.labels[left])
            chosen = torch.where(left & found, asked, chosen)
            if found.all():
                break
        return chosen

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the margin (B,) by which the nearest image of another class is farther than one of it."""
        return self.appraise(z, target, queries, gallery)[0]

    def appraise(
        self, z: Tensor, target: Target, queries: Queries, gallery: Gallery
    ) -> tuple[Tensor, Tensor | None]:
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
            return {self.name: hit_at_1(z, queries, gallery, queries.own, strict=True)}
        asked, first = _as_queries(target.index[:, 0], gallery), target.index[:, 1]
        level, rival = square_distance(z, asked.z), square_distance(asked.z, gallery.z[first])
        # Ties go to the lower position; what is no image of the gallery comes last.
        ahead = (level < rival) | ((level == rival) & (queries.own >= 0) & (queries.own < first))
        hit = 100.0 * ((gallery.labels[first] == asked.labels) & ~ahead)
        return {self.name: hit.where(count_mates(asked, gallery, asked.own) > 0, torch.nan)}


TRIED = 8
"""So many images near to a candidate are looked at for one that its attack makes sense for."""


def _first_of(index: Tensor, candidate: Tensor, gallery: Gallery) -> Tensor:
    """Return the first image in the ranking of images `index` (B,), without a candidate (B,): (B,)."""
    asked = _as_queries(index, gallery)
    found = nearest(asked.z, gallery, 2, without=asked.own, queries=asked)
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
    """Move the embedding as far as possible; reported is the distance, and there is always more to want.

    >>> Shift().columns[0].heading
    'shift ↓'
    """

    @property
    def name(self) -> str:
        """Its name, shift."""
        return "shift"

    @property
    def strict(self) -> bool:
        """Goals are judged by the definitions."""
        return True

    @property
    def columns(self) -> tuple[Column, ...]:
        """The distance from the benign embedding."""
        return (Column(self.name, "lower", DISTANCE),)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the distance from the benign embedding."""
        return {self.name: pair_distance(z.double(), queries.z.double())}
