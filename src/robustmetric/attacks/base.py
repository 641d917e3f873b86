"""What every attack on a ranking shares: gallery, queries, targets, ranks, and chance a query at a time."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from robustmetric.attacks.columns import Column, from_lowered_rank, from_raised_rank
from robustmetric.distance import pair_distance
from robustmetric.registry import lookup
from robustmetric.squares import distances
from robustmetric.triplets import check_labels
from robustmetric.validate import UserError, is_number

Protocol = Literal["strict", "reference"]


@dataclass(frozen=True, eq=False)
class Gallery:
    """The images that are ranked: (N, D) embeddings on the unit sphere and (N,) classes, N at least 5.

    `cameras` (N,) took the images: those of a query's class and camera do not count for it. `chunk` images
    at a time are compared with the queries, which bounds the memory and changes no score.

    >>> len(Gallery(torch.eye(5), torch.tensor([0, 0, 1, 1, 1])))
    5
    """

    z: Tensor
    labels: Tensor
    chunk: int = 8192
    cameras: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.z) < 5:
            raise UserError(
                f"the gallery has {len(self.z)} images; give at least 5, for a top 4 besides the query"
            )
        check_labels(self.labels, len(self.z))
        check_count("chunk", self.chunk)

    def __len__(self) -> int:
        return len(self.z)

    @cached_property
    def square(self) -> Tensor:
        """Squared lengths (N,) of the embeddings: 1, but for rounding."""
        return self.z.square().sum(1)

    def to(self, device: torch.device) -> Gallery:
        """Move all to a device."""
        return move(self, device)

    def blocks(self) -> Iterator[slice]:
        """Cut the gallery into slices of `chunk` images."""
        for begin in range(0, len(self), self.chunk):
            yield slice(begin, min(begin + self.chunk, len(self)))


Held = TypeVar("Held", "Gallery", "Queries")


def move(held: Held, device: torch.device) -> Held:
    """Move the tensors of a gallery or of queries to a device; what is there already stays the same object.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> move(gallery, torch.device("cpu")) is gallery
    True
    """
    if held.z.device == device:
        return held
    values = {f.name: getattr(held, f.name) for f in fields(held)}
    moved: dict[str, Any] = {n: v.to(device) for n, v in values.items() if isinstance(v, Tensor)}
    return replace(held, **moved)


@dataclass(frozen=True, eq=False)
class Queries:
    """The images that are perturbed: their benign (B, D) embeddings and (B,) classes.

    `own` (B,) is each one's position in the gallery, −1 where it is not in there; `cameras` (B,) took them.

    >>> queries = Queries(torch.eye(3), torch.tensor([0, 0, 1]), torch.arange(3))
    >>> queries[torch.tensor([2])].labels
    tensor([1])
    """

    z: Tensor
    labels: Tensor
    own: Tensor
    cameras: Tensor | None = None

    def __len__(self) -> int:
        return len(self.z)

    def __getitem__(self, rows: Tensor) -> Queries:
        cameras = None if self.cameras is None else self.cameras[rows]
        return Queries(self.z[rows], self.labels[rows], self.own[rows], cameras)

    def to(self, device: torch.device) -> Queries:
        """Move all to a device."""
        return move(self, device)


@dataclass(frozen=True, eq=False)
class Target:
    """What each query's perturbation aims at: (B, W) positions in the gallery.

    `extra` (B, …) is what an objective needs besides, computed once and not in each step.

    >>> Target(torch.tensor([[3], [4]]))[torch.tensor([1])].index
    tensor([[4]])
    """

    index: Tensor
    extra: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Target:
        return Target(self.index[rows], None if self.extra is None else self.extra[rows])

    def to(self, device: torch.device) -> Target:
        """Move all to a device."""
        return Target(self.index.to(device), None if self.extra is None else self.extra.to(device))


class Draws:
    """Random numbers for B queries, from a stream of its own for each.

    A query's numbers depend on the seed, the purpose and the query's number alone: not on the batch it is
    in, the order of the queries or the worker.

    >>> one, all_ = Draws(0, "CA+", [7]), Draws(0, "CA+", [5, 6, 7])
    >>> bool(one.uniform(2)[0].equal(all_.uniform(2)[2]))
    True
    """

    def __init__(self, seed: int, purpose: str, numbers: Sequence[int]) -> None:
        self._streams = [np.random.Generator(np.random.Philox(_key(seed, purpose, n))) for n in numbers]

    def uniform(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        """Draw (B, *shape) numbers in [0, 1), or (R, *shape) for some rows."""
        return torch.from_numpy(np.stack([s.random(shape) for s in self._of(rows)]))

    def normal(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        """Draw (B, *shape) numbers of mean 0 and deviation 1, or (R, *shape) for some rows."""
        return torch.from_numpy(np.stack([s.standard_normal(shape, np.float32) for s in self._of(rows)]))

    def signs(self, *shape: int, rows: Tensor | None = None) -> Tensor:
        """Draw (B, *shape) of −1 and 1, or (R, *shape) for some rows."""
        drawn = np.stack([s.integers(0, 2, shape, np.int8) for s in self._of(rows)])
        return torch.from_numpy(2 * drawn - 1).float()

    def _of(self, rows: Tensor | None) -> list[np.random.Generator]:
        return self._streams if rows is None else [self._streams[i] for i in rows.tolist()]


def _key(seed: int, purpose: str, number: int) -> np.random.SeedSequence:
    digest = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=16).digest()
    return np.random.SeedSequence(int.from_bytes(digest, "big"))


@dataclass(frozen=True, kw_only=True)
class RankingAttack(ABC):
    """An attack on a ranking, without state: what a query aims at, what is minimised, what is reported.

    A new attack is a class with a name, its columns and three methods: `select`, `objective` and `measure`.
    The protocol `strict` follows the definitions; `reference` is what published figures were made with, where
    the two differ. All values are for each query by itself: B queries with embeddings (B, D) are perturbed
    together.

    >>> from robustmetric.attacks.columns import DISTANCE
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
        """Refuse a gallery of so few images that the targets cannot be found in it."""
        return

    @abstractmethod
    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Choose what each query aims at: (B, W) positions in the gallery; W may be 0."""

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Prepare what the objective needs in each step, once."""
        return Target(index)

    @abstractmethod
    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return (B,) values, to be minimised over the perturbed queries' embeddings `z` (B, D)."""

    @abstractmethod
    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the (B,) values of each column by name, for embeddings `z` (B, D); NaN where is none."""

    def start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        """Where the search begins, if not at the images (B, C, H, W) themselves."""
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
        """Find each query's own position (B,) in the gallery: by index, or by distance for the reference."""
        return queries.own if self.strict else nearest(queries.z, gallery, 1)[:, 0]


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
        """Refuse a gallery of so few images that the targets cannot be found in it."""
        check_count(self.letter, self.count, images)

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Choose the targets: (B, W) positions in the gallery."""
        self.check_fits(len(gallery))
        own, uniform = self.myself(queries, gallery), draws.uniform(self.count)
        if self.sign == "+":
            return choose(uniform, gallery, own, strict=self.strict)
        return choose_near(uniform, queries, gallery, own, strict=self.strict)


def away_from(z: Tensor, place: Tensor) -> Tensor:
    """Cut the gradient of those `z` (…, D) that are at their `place` (…, D) but for rounding: (…, D).

    A gradient of the distance is all rounding there, and would depend on the batch and on the processor. It
    is zero instead, as at no distance at all. An image may be aimed at a copy of it and, by the reference,
    at itself.

    >>> z = torch.tensor([[1.0, 1e-7], [1.0, 1e-2]], requires_grad=True)
    >>> pair_distance(away_from(z, torch.tensor([1.0, 0.0])), torch.tensor([1.0, 0.0])).sum().backward()
    >>> z.grad
    tensor([[0., 0.],
            [0., 1.]])
    """
    return torch.where(at(z, place)[..., None], z.detach(), z)


def at(z: Tensor, place: Tensor) -> Tensor:
    """Tell which of `z` (…, D) are at their `place` (…, D) but for rounding: (…,).

    Embeddings of one image differ by less than 1e-5 from batch to batch and from processor to processor, and
    a step of any attack moves them by more.

    >>> at(torch.tensor([[1.0, 1e-7], [1.0, 1e-2]]), torch.tensor([1.0, 0.0]))
    tensor([ True, False])
    """
    return pair_distance(z.detach(), place) < 1e-5


def nearest(
    z: Tensor,
    gallery: Gallery,
    count: int,
    *,
    without: Tensor | None = None,
    other_than: Tensor | None = None,
    queries: Queries | None = None,
) -> Tensor:
    """Find the `count` gallery images nearest to each of `z` (B, D), nearest first: (B, count) positions.

    Ties go to the lower position. `without` (B,) is left out, and so is the class `other_than` (B,), and
    what does not count for the `queries` that the embeddings are of.

    >>> nearest(torch.eye(5)[:1], Gallery(torch.eye(5), torch.arange(5)), 2, without=torch.tensor([0]))
    tensor([[1, 2]])
    """
    best = torch.empty(len(z), 0, dtype=torch.long, device=z.device)
    rows = torch.arange(len(z), device=z.device)
    for block in gallery.blocks():
        square = distances(z, gallery.z[block])
        if other_than is not None:
            square.masked_fill_(gallery.labels[block] == other_than[:, None], torch.inf)
        if without is not None:
            put(square, rows, without, block, torch.inf)
        if queries is not None and (seen := same_camera(queries, gallery, block)) is not None:
            square.masked_fill_(seen, torch.inf)
        # The bits of a positive float are in the order of its value: distance first, then position.
        place = torch.arange(block.start, block.stop, device=z.device)
        keys = square.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(place)
        if count == 1:
            lowest = keys.amin(1, keepdim=True)
        else:
            lowest = keys.topk(min(count, keys.shape[1]), dim=1, largest=False).values
        best = torch.cat([best, lowest], dim=1)
        best = best.topk(min(count, best.shape[1]), dim=1, largest=False).values
    return best.sort(dim=1).values & 0xFFFFFFFF


def same_camera(queries: Queries, gallery: Gallery, block: slice) -> Tensor | None:
    """Tell which of a block's n images do not count for the queries: of their class and camera, (B, n).

    None where no cameras are known.

    >>> z, zero = torch.eye(5), torch.zeros(5, dtype=torch.long)
    >>> gallery = Gallery(z, zero, cameras=torch.tensor([0, 0, 1, 1, 1]))
    >>> same_camera(Queries(z[:1], zero[:1], zero[:1], cameras=zero[:1]), gallery, slice(0, 5))
    tensor([[ True,  True, False, False, False]])
    """
    if queries.cameras is None or gallery.cameras is None:
        return None
    mates = gallery.labels[block] == queries.labels[:, None]
    return mates & (gallery.cameras[block] == queries.cameras[:, None])


def count_nearer(
    z: Tensor,
    level: Tensor,
    gallery: Gallery,
    without: Sequence[Tensor] = (),
    *,
    queries: Queries | None = None,
) -> tuple[Tensor, Tensor]:
    """Count the gallery images whose squared distance to `z` (B, D) is below `level` (B,), and at it.

    Each of `without` is a (B,) tensor of positions to leave out; −1 is none. What does not count for the
    `queries` that the embeddings are of is left out as well.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> count_nearer(torch.eye(5)[:1], torch.tensor([2.0]), gallery)
    (tensor([1]), tensor([4]))
    """
    nearer = torch.zeros(len(z), dtype=torch.long, device=z.device)
    tied = torch.zeros_like(nearer)
    rows = torch.arange(len(z), device=z.device)
    for block in gallery.blocks():
        square = distances(z, gallery.z[block])
        for position in without:
            put(square, rows, position, block, torch.inf)
        if queries is not None and (seen := same_camera(queries, gallery, block)) is not None:
            square.masked_fill_(seen, torch.inf)
        nearer += (square < level[:, None]).sum(1)
        tied += (square == level[:, None]).sum(1)
    return nearer, tied


def normalised_rank(z: Tensor, level: Tensor, gallery: Gallery, without: tuple[Tensor, Tensor]) -> Tensor:
    """Rank, in % from first to last, of something at the squared distance `level` (B,) from `z` (B, D).

    Tied images share the middle rank. The two positions (B,) of `without` are not ranked, −1 is none.
    """
    nearer, tied = count_nearer(z, level, gallery, without)
    own, other = without
    left = len(gallery) - (own >= 0).long() - ((other >= 0) & (other != own)).long()
    return 100 * (nearer + tied / 2) / left


def hit_at_1(z: Tensor, queries: Queries, gallery: Gallery, own: Tensor, *, strict: bool) -> Tensor:
    """Whether the nearest image to `z` (B, D) but for `own` (B,) is of the query's class: 100 or 0, (B,).

    NaN where no other image is of that class and `strict` says to leave such queries out.

    >>> z, labels, own = torch.eye(5), torch.tensor([0, 0, 1, 2, 2]), torch.arange(5)
    >>> hit_at_1(z, Queries(z, labels, own), Gallery(z, labels), own, strict=True)
    tensor([100., 100., nan,   0.,   0.])
    """
    found = nearest(z, gallery, 1, without=own, queries=queries)[:, 0]
    hit = 100.0 * (gallery.labels[found] == queries.labels)
    if not strict:
        return hit
    return hit.where(count_mates(queries, gallery, own) > 0, torch.nan)


def count_mates(queries: Queries, gallery: Gallery, own: Tensor) -> Tensor:
    """Count what each query can find: images of its class that count, but for `own` (B,), −1 for none: (B,).

    >>> z, labels, own = torch.eye(5), torch.tensor([0, 0, 1, 2, 2]), torch.arange(5)
    >>> count_mates(Queries(z, labels, own), Gallery(z, labels), own)
    tensor([1, 1, 0, 1, 1])
    """
    classes, sizes = gallery.labels.unique(return_counts=True)
    place = torch.searchsorted(classes, queries.labels.contiguous()).clamp_max(len(classes) - 1)
    inside = (own >= 0) & (gallery.labels[own] == queries.labels)
    mates = torch.where(classes[place] == queries.labels, sizes[place], 0) - inside.long()
    if queries.cameras is None or gallery.cameras is None:
        return mates
    for block in gallery.blocks():
        seen = same_camera(queries, gallery, block)
        assert seen is not None  # noqa: S101
        put(seen, torch.arange(len(own), device=own.device), own, block, False)
        mates -= seen.sum(1)
    return mates


def distinct(uniform: Tensor, size: int) -> Tensor:
    """Turn (B, W) numbers in [0, 1) into W different positions of `size`, each equally likely.

    >>> distinct(torch.tensor([[0.0, 0.0, 0.99]]), 4)
    tensor([[0, 1, 3]])
    """
    chosen = torch.empty(len(uniform), 0, dtype=torch.long)
    for k in range(uniform.shape[1]):
        # The k-th is one of those not chosen yet: step over the chosen ones in their order.
        position = (uniform[:, k] * (size - k)).long().clamp_max(size - k - 1)
        for taken in chosen.sort(dim=1).values.T:
            position += position >= taken
        chosen = torch.cat([chosen, position[:, None]], dim=1)
    return chosen


def choose(uniform: Tensor, gallery: Gallery, own: Tensor, *, strict: bool) -> Tensor:
    """Choose positions in the gallery by (B, W) numbers in [0, 1); if `strict`, not `own` (B,), none twice.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> choose(torch.tensor([[0.0, 0.99]]), gallery, torch.tensor([0]), strict=True)
    tensor([[1, 4]])
    """
    uniform, size = uniform.to(torch.float64), len(gallery)
    if not strict:
        return (uniform * size).long().clamp_max(size - 1).to(own.device)
    inside = own.cpu()[:, None] >= 0
    if inside.all():
        position = distinct(uniform, size - 1)
    else:
        position = torch.where(inside, distinct(uniform, size - 1), distinct(uniform, size))
    position += inside & (position >= own.cpu()[:, None])
    return position.to(own.device)


def choose_near(uniform: Tensor, queries: Queries, gallery: Gallery, own: Tensor, *, strict: bool) -> Tensor:
    """Choose (B, W) positions at random among the nearest 1 % of the gallery."""
    wanted = uniform.shape[1]
    share = -(-len(gallery) // 100) if strict else max(1, len(gallery) // 100)
    pool = nearest(queries.z, gallery, max(wanted, share), without=own)
    if strict:
        place = distinct(uniform, pool.shape[1])
    else:
        place = (uniform * pool.shape[1]).long().clamp_max(pool.shape[1] - 1)
    return pool.gather(1, place.to(pool.device))


def rank_hinge(
    z: Tensor, index: Tensor, weights: Sequence[float], gallery: Gallery, own: Tensor | None
) -> Tensor:
    """How far the targets `index` (B, W) are from first in `z`'s ranking, or last: (B, D) to (B,).

    Sums over the targets t, each with its weight c: |c| · mean over images x of max(0, ±(d(z, t) − d(z, x))),
    with the sign of c: a positive weight wants the target near, a negative one far. With `own` (B,), the
    mean leaves out the query itself and the target. Value and gradient come from one pass over the gallery.
    """
    value: Tensor = _RankHinge.apply(z, index, tuple(weights), gallery, own)  # type: ignore[no-untyped-call]
    return value


class _RankHinge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, index: Tensor, weights: tuple[float, ...], gallery: Gallery, own: Tensor | None
    ) -> Tensor:
        rows = torch.arange(len(z), device=z.device)
        goal = gallery.z[index]
        to_goal = pair_distance(z[:, None], goal)
        length = z.square().sum(1, keepdim=True)
        value, opened = z.new_zeros(len(z)), torch.zeros_like(to_goal)
        pull, push = z.new_zeros(len(z), 1), torch.zeros_like(z)
        for block in gallery.blocks():
            images = gallery.z[block]
            dist = torch.addmm(gallery.square[block], z, images.T, alpha=-2)
            dist.add_(length).clamp_min_(1e-12).sqrt_()
            total = None
            for k, weight in enumerate(weights):
                gap = to_goal[:, k : k + 1] - dist if weight > 0 else dist - to_goal[:, k : k + 1]
                put(gap, rows, index[:, k], block, 0.0)
                if own is not None:
                    put(gap, rows, own, block, 0.0)
                value += abs(weight) * gap.clamp_min_(0).sum(1)
                # From here on the gap is 1 where the hinge is open and 0 where it is not.
                opened[:, k] += weight * gap.sign_().sum(1)
                gap.div_(dist)
                if len(weights) > 1 or weight != 1:
                    gap.mul_(weight)
                total = gap if total is None else total.add_(gap)
            assert total is not None  # noqa: S101
            pull += total.sum(1, keepdim=True)
            push.addmm_(total, images)
        ranked = torch.full_like(value, len(gallery))
        if own is not None:
            ranked -= 1 + (own >= 0).to(ranked)
        # At the goal itself every way is rounding: see `away_from`.
        away = ((z[:, None] - goal) / to_goal[..., None]).masked_fill(at(z[:, None], goal)[..., None], 0.0)
        slope = (opened[..., None] * away).sum(1) - z * pull + push
        ctx.save_for_backward(slope / ranked[:, None])
        return value / ranked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0][:, None] * slope, None, None, None, None


def sign_of(sign: str) -> float:
    """Return 1 for "+" and −1 for "-".

    >>> sign_of("-")
    -1.0
    """
    return lookup("sign", sign, {"+": 1.0, "-": -1.0})


def with_options(name: str, **options: float | None) -> str:
    """Write an attack's name with the options that are given, as it is read back.

    >>> with_options("CA+", w=None), with_options("SP-QA+", m=2, xi=0.5)
    ('CA+', 'SP-QA+(m=2,xi=0.5)')
    """
    given = ",".join(f"{key}={value!r}" for key, value in options.items() if value is not None)
    return f"{name}({given})" if given else name


def put(values: Tensor, rows: Tensor, position: Tensor, block: slice, value: float) -> None:
    """Set each row's value at its gallery position (B,), where that lies in the block."""
    inside = (position >= block.start) & (position < block.stop)
    values[rows[inside], position[inside] - block.start] = value


def check_count(letter: str, count: int, gallery: int | None = None) -> None:
    """Refuse a number of targets, W or M, that cannot be.

    >>> check_count("W", 0)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: W must be a whole number of at least 1, not 0
    """
    if not (is_number(count, Integral) and count >= 1):
        raise UserError(f"{letter} must be a whole number of at least 1, not {count!r}")
    if gallery is not None and count > gallery - 2:
        raise UserError(
            f"{letter} is {count}, too many for a gallery of {gallery} images; give at most {gallery - 2}"
        )
