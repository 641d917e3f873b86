"""Triplets of a batch and the samplers that draw them: R, M, S, D and H."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from robustmetric.distance import cross_distance, wide_dtype
from robustmetric.labels import check_classes, check_labels
from robustmetric.registry import Registry, registry
from robustmetric.validate import UserError, called, check_signature, is_number


class Triplets(NamedTuple):
    """Triplets as positions in the batch: `anchor`, `positive` and `negative`, (T,) each.

    >>> triplets = Triplets(torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    >>> triplets.hardness(torch.tensor([[0.0, 0.5, 0.7], [0.5, 0.0, 0.9], [0.7, 0.9, 0.0]]))
    tensor([-0.2000])
    """

    anchor: Tensor
    positive: Tensor
    negative: Tensor

    def hardness(self, dist: Tensor) -> Tensor:
        """Return the hardness (T,) of each triplet from the (N, N) distances `dist` of the batch."""
        return dist[self.anchor, self.positive] - dist[self.anchor, self.negative]

    def stack(self) -> Tensor:
        """Return the positions as one (T, 3) tensor."""
        return torch.stack(tuple(self), dim=1)


@dataclass(frozen=True, eq=False)
class Batch:
    """What a sampler sees of a batch of N images.

    `distances` (N, N) are those of all embeddings to all, `labels` (N,) the classes, `dim` is their length D.

    >>> batch = Batch.of(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    >>> batch.distances.shape, batch.dim
    (torch.Size([4, 4]), 4)
    """

    distances: Tensor
    labels: Tensor
    dim: int

    def __post_init__(self) -> None:
        shape = tuple(self.distances.shape)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise UserError(
                f"distances have shape {shape}; they must be a square matrix, all images against all: use "
                "cross_distance(embeddings)"
            )
        check_labels(self.labels, len(self.distances))
        check_classes(self.labels)
        if not torch.isfinite(self.distances).all():
            raise UserError("distances hold NaN or infinity: look at the embeddings they were computed from")
        if not (is_number(self.dim, Integral) and self.dim >= 1):
            raise UserError(
                f"dim must be the length of the embeddings, not {self.dim!r}: pass dim=z.shape[1]"
            )

    @classmethod
    def of(cls, embeddings: Tensor, labels: Tensor) -> Batch:
        """Return the batch of (N, D) `embeddings` on the unit sphere with (N,) `labels`."""
        z = embeddings.detach()
        return cls(cross_distance(z), labels.to(z.device), z.shape[1])


class Sampler(Protocol):
    """Draws triplets from a batch, one for each anchor.

    The labels decide which images are anchors. A batch of pairs [a0, p0, a1, p1, …], each of one class, has
    its anchors at the even positions, and each anchor's *partner* is the image after it. In any other
    layout each image that shares its class with another is an anchor, and its partner is drawn among those.
    An anchor is not its own positive, unless the sampler has an attribute `itself` that is True.
    ``robustmetric.register("sampler", name)`` names one of your own.

    >>> check_sampler(lambda batch, *, generator: Triplets(*torch.tensor([[0], [1], [2]])))
    """

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return triplets of positions in the `batch`; all chance comes from the `generator`."""
        ...


@dataclass(frozen=True, eq=False)
class Mined:
    """The source triplets of a batch: the `batch`, T `triplets` of it, their `hardness` (T,) and `sampler`.

    >>> mined = Mined.of(Batch.of(torch.eye(3), torch.tensor([0, 1, 0])), Hardest(), torch.Generator())
    >>> mined.triplets.negative, mined.hardness
    (tensor([1, 1]), tensor([0., 0.]))
    """

    batch: Batch
    triplets: Triplets
    hardness: Tensor
    sampler: Sampler

    @classmethod
    def of(cls, batch: Batch, sampler: Sampler, generator: torch.Generator) -> Mined:
        """Return what a `sampler` draws from a `batch` with a `generator`."""
        triplets = draw_triplets(sampler, batch, generator=generator)
        return cls(batch, triplets, triplets.hardness(batch.distances), sampler)


def draw_triplets(sampler: Sampler, batch: Batch, *, generator: torch.Generator) -> Triplets:
    """Return what a `sampler` draws from a `batch` with a `generator`; refuse anything but triplets.

    >>> batch = Batch.of(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    >>> draw_triplets(lambda batch, generator: [0, 1, 2], batch, generator=torch.Generator())
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the sampler <lambda> returned a list; it must return Triplets(anchor, ...
    """
    drawn = sampler(batch, generator=generator)
    who, count = f"the sampler {called(sampler)}", len(batch.labels)
    if not isinstance(drawn, Triplets):
        raise UserError(
            f"{who} returned a {type(drawn).__name__}; it must return Triplets(anchor, positive, negative)"
        )
    for role, positions in drawn._asdict().items():
        found = f"a {type(positions).__name__}"
        if isinstance(positions, Tensor):
            found = f"{positions.dtype} of shape {tuple(positions.shape)}"
            if positions.dtype == torch.int64 and positions.ndim == 1 and len(positions) > 0:
                continue
        raise UserError(
            f"{who} returned {found} as {role}; it must be a tensor (T,) of torch.int64, T at least 1"
        )
    if len({len(positions) for positions in drawn}) > 1:
        raise UserError(
            f"{who} returned {', '.join(str(len(p)) for p in drawn)} anchors, positives and negatives; there "
            "must be as many of each"
        )
    low, high = (int(end) for end in drawn.stack().aminmax())
    if low < 0 or high >= count:
        raise UserError(
            f"{who} returned positions from {low} to {high}; they must be from 0 to {count - 1}, in a batch "
            f"of {count} images"
        )
    a, p, n = (batch.labels[positions] for positions in drawn)
    alone = (drawn.anchor == drawn.positive) & (getattr(sampler, "itself", False) is not True)
    for wrong, rule in (
        (alone, "an anchor as its own positive; it must be another image"),
        (a != p, "a positive of another class than its anchor; both must be of one class"),
        (a == n, "a negative of its anchor's class; it must be of another class"),
    ):
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise UserError(f"{who} returned {rule}: triplet {row} is {drawn.stack()[row].tolist()}")
    return drawn


def check_sampler(sampler: object) -> None:
    """Refuse a `sampler` that cannot be called as one.

    >>> check_sampler("S")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: a sampler is called with (batch, *, generator), which 'S' cannot be
    """
    if isinstance(sampler, type) or not callable(sampler):
        raise UserError(f"a sampler is called with (batch, *, generator), which {sampler!r:.60} cannot be")
    call = sampler.forward if isinstance(sampler, nn.Module) else sampler
    check_signature(f"the sampler {called(sampler)}", call, "batch, *, generator")


def find_anchors(labels: Tensor) -> Tensor:
    """Return the positions (T,) of the anchors of a batch with `labels` (N,), ascending.

    In a batch of pairs they are the even ones, else those of images that share their class with another.

    >>> find_anchors(torch.tensor([4, 4, 0, 0])), find_anchors(torch.tensor([4, 0, 1, 4]))
    (tensor([0, 2]), tensor([0, 3]))
    """
    if _in_pairs(labels):
        return torch.arange(0, len(labels), 2, device=labels.device)
    _, kind, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    has_mate: Tensor = sizes[kind] > 1
    return has_mate.nonzero().squeeze(1)


def _in_pairs(labels: Tensor) -> bool:
    return len(labels) % 2 == 0 and torch.equal(labels[0::2], labels[1::2])


def check_margin(margin: float) -> None:
    """Refuse a `margin` γ that is not in (0, 2].

    >>> check_margin(3)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: margin must be in (0, 2], not 3: distances on the unit sphere are at most 2
    """
    if not (is_number(margin) and 0 < margin <= 2):
        raise UserError(
            f"margin must be in (0, 2], not {margin!r}: distances on the unit sphere are at most 2"
        )


SAMPLERS: Registry[Sampler] = registry("sampler")
"""The samplers by their letters."""


@SAMPLERS.register("R")
@dataclass(frozen=True)
class Random:
    """R: the partner and a uniform negative.

    >>> batch = Batch.of(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    >>> Random()(batch, generator=torch.Generator().manual_seed(0)).positive
    tensor([1, 3])
    """

    letter: ClassVar[str] = "R"

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        rows = _rows(batch, generator)
        return Triplets(rows.anchor, rows.partner, _draw(rows.other, generator))


@SAMPLERS.register("M")
@dataclass(frozen=True)
class Semihard:
    """M: the partner and a uniform negative among those with d(a, p) < d(a, n) < d(a, p) + `margin`.

    >>> Semihard()
    Semihard(margin=0.2)
    """

    letter: ClassVar[str] = "M"
    margin: float = 0.2

    def __post_init__(self) -> None:
        check_margin(self.margin)

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        rows = _rows(batch, generator)
        near = rows.dist.gather(1, rows.partner[:, None])
        band = rows.other & (rows.dist > near) & (rows.dist < near + self.margin)
        return Triplets(rows.anchor, rows.partner, _draw(_or_else(band, rows.other), generator))


@SAMPLERS.register("S")
@dataclass(frozen=True)
class Softhard:
    """S: a positive beyond the nearest negative and a negative within the farthest positive, both uniform.

    Where no positive is beyond the nearest negative, any of the class is drawn: with `itself`, as the
    reference has it, the anchor too.

    >>> Softhard()
    Softhard(itself=False)
    """

    letter: ClassVar[str] = "S"
    itself: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.itself, bool):
            raise UserError(f"itself is True or False, not {self.itself!r}")

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        rows = _rows(batch, generator)
        nearest = rows.dist.masked_fill(~rows.other, torch.inf).amin(1, keepdim=True)
        farthest = rows.dist.masked_fill(~rows.same, -torch.inf).amax(1, keepdim=True)
        kin = rows.same
        if self.itself:
            kin = kin.scatter(1, rows.anchor[:, None], True)
        positive = _or_else(rows.same & (rows.dist > nearest), kin)
        negative = _or_else(rows.other & (rows.dist < farthest), rows.other)
        return Triplets(rows.anchor, _draw(positive, generator), _draw(negative, generator))


@SAMPLERS.register("D")
@dataclass(frozen=True)
class Distance:
    """D: the partner and a negative drawn against the density of distances on the sphere.

    log w = (2 − D)·log d − (D − 3)/2·log(1 − d²/4), without a cut-off; D is the length of the embeddings.

    >>> Distance()
    Distance()
    """

    letter: ClassVar[str] = "D"

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        rows = _rows(batch, generator)
        # The ends, a copy of the anchor and its opposite, would have infinite weight.
        d = rows.dist.to(wide_dtype(rows.dist.device)).clamp(1e-6, 2 - 1e-6)
        log = (2 - batch.dim) * d.log() - (batch.dim - 3) / 2 * (1 - d.square() / 4).log()
        log = log.masked_fill(~rows.other, -torch.inf)
        weight = (log - log.amax(1, keepdim=True)).exp()
        return Triplets(rows.anchor, rows.partner, _draw(weight, generator))


@SAMPLERS.register("H")
@dataclass(frozen=True)
class Hardest:
    """H: the partner and the nearest negative.

    >>> Hardest()
    Hardest()
    """

    letter: ClassVar[str] = "H"

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        rows = _rows(batch, generator)
        negative = rows.dist.masked_fill(~rows.other, torch.inf).argmin(1)
        return Triplets(rows.anchor, rows.partner, negative)


class _Rows(NamedTuple):
    """What each anchor sees of the batch: (T,) positions, (T, N) distances and (T, N) masks."""

    anchor: Tensor
    partner: Tensor
    dist: Tensor
    same: Tensor
    other: Tensor


def _rows(batch: Batch, generator: torch.Generator) -> _Rows:
    dist, labels = batch.distances, batch.labels.to(batch.distances.device)
    same = labels[:, None] == labels
    other = ~same
    same.fill_diagonal_(False)
    anchor = find_anchors(labels)
    if _in_pairs(labels):
        return _Rows(anchor, anchor + 1, dist[0::2], same[0::2], other[0::2])
    same = same[anchor]
    return _Rows(anchor, _draw(same, generator), dist[anchor], same, other[anchor])


def _or_else(wanted: Tensor, fallback: Tensor) -> Tensor:
    """Replace each empty row of a (T, N) mask by the fallback's."""
    return torch.where(wanted.any(1, keepdim=True), wanted, fallback)


def _draw(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one column for each row of (T, N) weights, in proportion to them."""
    wide = wide_dtype(weight.device)
    edges = weight.to(wide).cumsum(1)
    # One number an anchor, made where the generator lives: the same triplets on every device.
    u = torch.rand(len(weight), 1, generator=generator, device=generator.device, dtype=torch.float64)
    # Below 1 after rounding too: a point at the last edge would be an image without weight.
    u = u.to(weight.device, wide).clamp_max(1 - torch.finfo(wide).eps)
    return torch.searchsorted(edges, u * edges[:, -1:], right=True).squeeze(1)
