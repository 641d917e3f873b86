"""What every attack on a ranking is: what a query aims at, what is minimised, what is reported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from robustmetric.attacks.columns import Column, from_lowered_rank, from_raised_rank
from robustmetric.attacks.draws import Draws, choose, choose_near
from robustmetric.attacks.gallery import Gallery, Queries, check_count, nearest
from robustmetric.registry import Registry, lookup, registry

Protocol = Literal["strict", "reference"]
"""By the definitions, or as published figures were made, where the two differ."""


@dataclass(frozen=True, eq=False)
class Target:
    """What each query's perturbation aims at: positions `index` (B, W) in the gallery.

    `extra` (B, …) is what an objective needs besides, computed once and not in each step.

    >>> Target(torch.tensor([[3], [4]]))[torch.tensor([1])].index
    tensor([[4]])
    """

    index: Tensor
    extra: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Target:
        return Target(self.index[rows], None if self.extra is None else self.extra[rows])

    def to(self, device: torch.device) -> Target:
        """Return the same on a `device`."""
        return Target(self.index.to(device), None if self.extra is None else self.extra.to(device))


@dataclass(frozen=True, kw_only=True)
class RankingAttack(ABC):
    """An attack on a ranking, without state: what a query aims at, what is minimised, what is reported.

    A new attack is a class with a name, its columns and three methods: `select`, `objective` and `measure`.
    The `protocol` strict follows the definitions; reference is what published figures were made with, where
    the two differ. All values are for each query by itself: B queries with embeddings (B, D) are perturbed
    together.

    >>> from robustmetric.distance import pair_distance
    >>> from robustmetric.attacks import DISTANCE
    >>> class Blend(RankingAttack):
    ...     name = "blend"
    ...     columns = (Column("blend", "higher", DISTANCE),)
    ...     def select(self, queries, gallery, *, draws):
    ...         return choose(draws.uniform(1), gallery, queries.own, strict=True)
    ...     def objective(self, z, target, queries, gallery):
    ...         return pair_distance(z, (gallery.z[target.index[:, 0]] + queries.z) / 2)
    ...     def measure(self, z, target, queries, gallery):
    ...         return {"blend": self.objective(z, target, queries, gallery)}
    >>> Blend()
    Blend(protocol='strict')
    """

    protocol: Protocol = "strict"

    def __post_init__(self) -> None:
        lookup("protocol", self.protocol, dict.fromkeys(get_args(Protocol)))

    @property
    @abstractmethod
    def name(self) -> str:
        """The paper's name for it."""

    @property
    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """What it reports: the columns that `measure` returns, all of them and in their order."""

    def check_fits(self, images: int) -> None:
        """Refuse a gallery with too few `images`, N, to find the targets in."""
        return

    @abstractmethod
    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return what each of B `queries` aims at: (B, W) positions in the `gallery`; W may be 0.

        Random numbers come from `draws`, which has a stream of its own for each query.
        """

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Return what the objective needs in each step, prepared once for B `queries`.

        They aim at the positions `index` (B, W) in the `gallery`.
        """
        return Target(index)

    @abstractmethod
    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return (B,) values, to be minimised over the perturbed queries' embeddings `z` (B, D).

        `queries` has the benign embeddings, `target` what they aim at in the `gallery`.
        """

    def appraise(
        self, z: Tensor, target: Target, queries: Queries, gallery: Gallery
    ) -> tuple[Tensor, Tensor | None]:
        """Return the objective (B,), and which queries (B,) are surely where the attack wants them.

        `z` (B, D) are the embeddings of the `queries` now, `target` is what they aim at in the `gallery`. In
        doubt a query is not: the search goes on with it. None is of an attack that always wants more, as
        those do without a column that has a `lost`.
        """
        value = self.objective(z, target, queries, gallery)
        with torch.no_grad():
            return value, self.lost(self.measure(z, target, queries, gallery)) if self.can_win else None

    def lost(self, values: dict[str, Tensor]) -> Tensor:
        """Return which queries (B,) are where the attack wants them, by their `values` (B,) by column."""
        won = [values[column.name] == column.lost for column in self.columns if column.lost is not None]
        return torch.stack(won).all(0)

    @property
    def can_win(self) -> bool:
        """Whether there is an end to what it wants of a query: a column with a value that is `lost`."""
        return any(column.lost is not None for column in self.columns)

    @property
    def perturbs(self) -> str:
        """What the perturbed image is: "query", or a "candidate" that is ranked for the images it aims at."""
        return "query"

    @property
    def drawn_as(self) -> str:
        """The name that targets are drawn by: attacks of one such name have the same targets."""
        return self.name

    def ways(self, targets: int) -> tuple[RankingAttack, ...]:
        """Return attacks that want the same, each by an objective of its own: `targets` of them by class."""
        return (self,)

    @abstractmethod
    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the (B,) values of each column by name, for embeddings `z` (B, D); NaN if undefined.

        `queries` has the benign embeddings, `target` what they aim at in the `gallery`.
        """

    def start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        """Return where the search begins, with numbers from `draws`; None at the `images` (B, C, H, W)."""
        return None

    @property
    def read_early(self) -> tuple[str, ...]:
        """Names of values that are read one step before the last."""
        return ()

    @property
    def strict(self) -> bool:
        """Whether the definitions are followed to the letter."""
        return self.protocol == "strict"

    def myself(self, queries: Queries, gallery: Gallery) -> Tensor:
        """Return the position (B,) of `queries` in the `gallery`: by index, for the reference by distance."""
        return queries.own if self.strict else nearest(queries.z, gallery, 1)[:, 0]


ATTACKS: Registry[RankingAttack] = registry("attack", RankingAttack)


@dataclass(frozen=True, kw_only=True)
class SignedAttack(RankingAttack):
    """An attack that raises (+) random targets, or lowers (−) targets among the 1 % nearest.

    The number of targets is the field that `letter` names.
    """

    family: ClassVar[str]
    letter: ClassVar[str]

    sign: str

    def __post_init__(self) -> None:
        super().__post_init__()
        sign_of(self.sign)
        check_count(self.letter, self.count)

    @property
    def count(self) -> int:
        """The number of targets of a query."""
        count: int = getattr(self, self.letter)
        return count

    @property
    def name(self) -> str:
        """The family and the sign, with the number of targets unless it is 1."""
        given = {self.letter: self.count} if self.count != 1 else {}
        return with_options(self.family + self.sign, **given)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The rank of the targets, in %: high where raising them failed, low where lowering them did."""
        if self.sign == "+":
            return (Column(self.name, "higher", term=from_raised_rank),)
        return (Column(self.name, "lower", term=from_lowered_rank),)

    def check_fits(self, images: int) -> None:
        """Refuse a gallery with too few `images`, N, to find the targets in."""
        check_count(self.letter, self.count, images)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return the targets: (B, W) positions in the gallery."""
        self.check_fits(len(gallery))
        own, uniform = self.myself(queries, gallery), draws.uniform(self.count)
        if self.sign == "+":
            return choose(uniform, gallery, own, strict=self.strict)
        return choose_near(uniform, queries, gallery, own, strict=self.strict)


def sign_of(sign: str) -> float:
    """Return 1 for the `sign` "+" and −1 for "-".

    >>> sign_of("-")
    -1.0
    """
    return lookup("sign", sign, {"+": 1.0, "-": -1.0})


def with_options(name: str, **options: float | str | None) -> str:
    """Return an attack's `name` with the `options` that are given, as it is read back.

    >>> with_options("CA+", w=None), with_options("SP-QA+", m=2, xi=0.5)
    ('CA+', 'SP-QA+(m=2,xi=0.5)')
    """
    given = ",".join(f"{key}={value!r}" for key, value in options.items() if value is not None)
    return f"{name}({given})" if given else name
