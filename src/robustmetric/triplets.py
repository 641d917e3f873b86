"""Triplets of a batch and the samplers that draw them: R, M, S, D and H."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from robustmetric.errors import UserError, describe, instance, number
from robustmetric.labels import check_classes, check_labels
from robustmetric.registry import Part, Registry, registry
from robustmetric.sphere import cross_distance, wide_dtype


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
    """What a sampler sees of a batch of N images; `Batch.of` checks its labels.

    `distances` (N, N) are those of all embeddings to all, `labels` (N,) the classes, `dim` is the length D of
    the embeddings.

    The labels decide which images are anchors. A batch of pairs [a0, p0, a1, p1, …], each of one class, has
    its T anchors at the even positions, and each anchor's *partner* is the next image. In any other layout
    each image that shares its class with another is an anchor, and its partner is drawn among those.

    >>> batch = Batch.of(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    >>> batch.distances.shape, batch.dim, batch.anchors
    (torch.Size([4, 4]), 4, tensor([0, 2]))
    """

    distances: Tensor
    labels: Tensor
    dim: int

    @classmethod
    def of(cls, embeddings: Tensor, labels: Tensor) -> Batch:
        """Return the batch of (N, D) `embeddings` on the unit sphere with (N,) `labels`."""
        check_labels(labels, len(embeddings))
        check_classes(labels)
        if not embeddings.isfinite().all():
            raise UserError("embeddings hold NaN or infinity: look at the network they come from")
        z = embeddings.detach()
        return cls(cross_distance(z), labels.to(z.device), z.shape[1])

    @cached_property
    def anchors(self) -> Tensor:
        """The positions (T,) of the anchors, ascending."""
        return find_anchors(self.labels)

    @cached_property
    def rows(self) -> Tensor:
        """The distances (T, N) of the anchors to all images."""
        return self.distances[self.anchors]

    @cached_property
    def same(self) -> Tensor:
        """Which images are of an anchor's class, the anchor itself excluded: (T, N)."""
        return (~self.other).scatter(1, self.anchors[:, None], False)

    @cached_property
    def other(self) -> Tensor:
        """Which images are of another class than an anchor: (T, N)."""
        return self.labels[self.anchors, None] != self.labels

    def partners(self, generator: torch.Generator) -> Tensor:
        """Return the partner (T,) of each anchor, drawn with the `generator` unless the batch is of pairs."""
        return self.anchors + 1 if _in_pairs(self.labels) else draw_columns(self.same, generator)


def find_anchors(labels: Tensor) -> Tensor:
    """Return the positions (T,) of the anchors of a batch with `labels` (N,), ascending.

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


def draw_columns(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a column (T,) for each row of `weight` (T, N), in proportion to it, with the `generator`.

    >>> draw_columns(torch.tensor([[False, True, False]]), torch.Generator())
    tensor([1])
    """
    wide = wide_dtype(weight.device)
    edges = weight.to(wide).cumsum(1)
    # One number an anchor, made where the generator lives: the same triplets on every device.
    u = torch.rand(len(weight), 1, generator=generator, device=generator.device, dtype=torch.float64)
    # Below 1 after rounding too: a point at the last edge would be an image without weight.
    u = u.to(weight.device, wide).clamp_max(1 - torch.finfo(wide).eps)
    return torch.searchsorted(edges, u * edges[:, -1:], right=True).squeeze(1)


class Sampler(Part):
    """Draws triplets from a batch; a subclass implements `draw`.

    ``robustmetric.register("sampler", name)`` names a sampler of your own. HM[X,X] perturbs nothing if both
    samplers are one object or equal. What `draw` returns is checked: an anchor is not its own positive,
    unless the sampler has `itself` set to True.

    >>> class First(Sampler):
    ...     def draw(self, batch, *, generator):
    ...         return Triplets(*(role[:1] for role in Random().draw(batch, generator=generator)))
    >>> First()(Batch.of(torch.eye(4), torch.tensor([0, 0, 1, 1])), generator=torch.Generator()).anchor
    tensor([0])
    """

    signatures = ("draw(batch, *, generator)",)
    itself: bool = False

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return triplets of positions in the `batch`; all randomness comes from the `generator`."""
        raise UserError(f"the sampler {type(self).__name__} must implement draw(batch, *, generator)")

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return what `draw` draws from the `batch` with the `generator`; reject all but valid triplets."""
        who, last = f"{type(self).__name__}.draw", len(batch.labels) - 1
        wanted = "write Triplets(anchor, positive, negative)"
        drawn = instance(f"what {who} returns", self.draw(batch, generator=generator), Triplets, why=wanted)
        fit = all(isinstance(part, Tensor) and part.dtype == torch.int64 and part.ndim == 1 for part in drawn)
        if not fit or len({len(part) for part in drawn}) > 1 or len(drawn.anchor) == 0:
            found = ", ".join(f"{role}: {describe(part)}" for role, part in drawn._asdict().items())
            raise UserError(f"{who} returned {found}; each must be int64 of one shape (T,), T at least 1")
        low, high = (int(end) for end in drawn.stack().aminmax())
        if low < 0 or high > last:
            raise UserError(f"{who} returned positions from {low} to {high}; they must be from 0 to {last}")
        a, p, n = (batch.labels[positions] for positions in drawn)
        alone = (drawn.anchor == drawn.positive) & (self.itself is not True)
        for wrong, rule in (
            (alone, "an anchor as its own positive; it must be another image"),
            (a != p, "a positive of another class than its anchor; both must be of one class"),
            (a == n, "a negative of its anchor's class; it must be of another class"),
        ):
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise UserError(f"{who} returned {rule}: triplet {row} is {drawn.stack()[row].tolist()}")
        return drawn


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
        triplets = sampler(batch, generator=generator)
        return cls(batch, triplets, triplets.hardness(batch.distances), sampler)


def check_margin(margin: object) -> float:
    """Return `margin` γ; reject all but a number in (0, 2]."""
    return number("margin", margin, 0, 2, open_low=True, why="distances on the unit sphere are at most 2")


SAMPLERS: Registry[Sampler] = registry("sampler", Sampler)
"""The samplers by their letters."""


@SAMPLERS.register("R")
@dataclass(frozen=True)
class Random(Sampler):
    """R: the partner and a uniform negative."""

    name = "R"

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        return Triplets(batch.anchors, batch.partners(generator), draw_columns(batch.other, generator))


@SAMPLERS.register("M")
@dataclass(frozen=True)
class Semihard(Sampler):
    """M: the partner and a uniform negative among those with d(a, p) < d(a, n) < d(a, p) + `margin`."""

    name = "M"
    margin: float = 0.2

    def __post_init__(self) -> None:
        check_margin(self.margin)

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        partner = batch.partners(generator)
        near = batch.rows.gather(1, partner[:, None])
        band = batch.other & (batch.rows > near) & (batch.rows < near + self.margin)
        return Triplets(batch.anchors, partner, draw_columns(_or_else(band, batch.other), generator))


@SAMPLERS.register("S")
@dataclass(frozen=True)
class Softhard(Sampler):
    """S: a positive beyond the nearest negative and a negative within the farthest positive, both uniform.

    Where no positive is beyond the nearest negative, any of the class is drawn: with `itself`, as the
    reference has it, the anchor too.
    """

    name = "S"
    itself: bool = False

    def __post_init__(self) -> None:
        instance("itself", self.itself, bool)

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        batch.partners(generator)  # S needs none, but its recorded draws follow this one
        nearest = batch.rows.masked_fill(~batch.other, torch.inf).amin(1, keepdim=True)
        farthest = batch.rows.masked_fill(~batch.same, -torch.inf).amax(1, keepdim=True)
        kin = ~batch.other if self.itself else batch.same
        positive = _or_else(batch.same & (batch.rows > nearest), kin)
        negative = _or_else(batch.other & (batch.rows < farthest), batch.other)
        return Triplets(batch.anchors, draw_columns(positive, generator), draw_columns(negative, generator))


@SAMPLERS.register("D")
@dataclass(frozen=True)
class Distance(Sampler):
    """D: the partner and a negative drawn against the density of distances on the sphere.

    log w = (2 − D)·log d − (D − 3)/2·log(1 − d²/4), without a cut-off; D is the length of the embeddings.
    """

    name = "D"

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        # The ends, a copy of the anchor and its opposite, would have infinite weight.
        d = batch.rows.to(wide_dtype(batch.rows.device)).clamp(1e-6, 2 - 1e-6)
        log = (2 - batch.dim) * d.log() - (batch.dim - 3) / 2 * (1 - d.square() / 4).log()
        log = log.masked_fill(~batch.other, -torch.inf)
        weight = (log - log.amax(1, keepdim=True)).exp()
        return Triplets(batch.anchors, batch.partners(generator), draw_columns(weight, generator))


@SAMPLERS.register("H")
@dataclass(frozen=True)
class Hardest(Sampler):
    """H: the partner and the nearest negative."""

    name = "H"

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        """Return one triplet for each anchor of the `batch`, drawn with the `generator`."""
        negative = batch.rows.masked_fill(~batch.other, torch.inf).argmin(1)
        return Triplets(batch.anchors, batch.partners(generator), negative)


def _or_else(wanted: Tensor, fallback: Tensor) -> Tensor:
    """Replace each empty row of a (T, N) mask by the fallback's."""
    return torch.where(wanted.any(1, keepdim=True), wanted, fallback)
