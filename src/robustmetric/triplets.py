"""Triplets of a batch and the samplers that draw them: R, M, S, D and H."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from robustmetric.distance import wide_dtype
from robustmetric.validate import UserError, is_number


class Triplets(NamedTuple):
    """Anchors, positives and negatives as three (T,) tensors of positions in the batch.

    >>> triplets = Triplets(torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    >>> triplets.hardness(torch.tensor([[0.0, 0.5, 0.7], [0.5, 0.0, 0.9], [0.7, 0.9, 0.0]]))
    tensor([-0.2000])
    """

    anchor: Tensor
    positive: Tensor
    negative: Tensor

    def hardness(self, dist: Tensor) -> Tensor:
        """Hardness (T,) of each triplet from the (N, N) distances of the batch."""
        return dist[self.anchor, self.positive] - dist[self.anchor, self.negative]

    def stack(self) -> Tensor:
        """Return the positions as one (T, 3) tensor."""
        return torch.stack(tuple(self), dim=1)


class Sampler(Protocol):
    """Draws one triplet for each anchor of a batch.

    Which images are anchors, the labels decide. A batch of pairs [a0, p0, a1, p1, …], each of one class, has
    its anchors at the even positions, and each anchor's *partner* is the image behind it. In any other
    layout each image that shares its class with another is an anchor, and its partner is drawn among those.

    `dist` holds the (N, N) distances of the batch, `labels` its (N,) classes, `dim` the length of the
    embeddings (only D needs it). An anchor is never its own positive.
    """

    def __call__(
        self, dist: Tensor, labels: Tensor, *, generator: torch.Generator, dim: int | None = None
    ) -> Triplets:
        """Return one triplet for each anchor."""
        ...


def check_labels(labels: Tensor, count: int) -> None:
    """Refuse labels that do not name a class for each of `count` images.

    >>> check_labels(torch.tensor([4, 4, 4]), 2)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: labels have shape (3,) for 2 images; they must have shape (2,): one class for ...
    """
    if not _is_whole(labels):
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise UserError(
            f"labels must be a tensor of integers, not {found}: use torch.as_tensor(labels).long()"
        )
    if labels.shape != (count,):
        raise UserError(
            f"labels have shape {tuple(labels.shape)} for {count} images; they must have shape ({count},): "
            "one class for each image"
        )
    if count == 0:
        raise UserError("the batch is empty; give at least two images of one class and one of another")


def _is_whole(labels: object) -> bool:
    """Tell whether labels are a tensor of integers; truth values are none."""
    if not isinstance(labels, Tensor) or labels.dtype == torch.bool:
        return False
    return not (labels.is_floating_point() or labels.is_complex())


def check_classes(labels: Tensor) -> None:
    """Refuse labels (N,) of which no triplet can be made.

    >>> check_classes(torch.tensor([4, 4, 4]))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: all 3 images are of class 4; a triplet needs a negative: put at least two ...
    """
    count = len(labels)
    classes, sizes = labels.unique(return_counts=True)
    if len(classes) == 1:
        raise UserError(
            f"all {count} images are of class {int(classes)}; a triplet needs a negative: put at least two "
            "classes in a batch"
        )
    if sizes.max() == 1:
        raise UserError(
            f"no two of the {count} images share a class; a triplet needs a positive: draw batches with at "
            "least two images of some class"
        )


def find_anchors(labels: Tensor) -> Tensor:
    """Return the positions (T,) of the anchors of a batch with labels (N,), ascending.

    In a batch of pairs [a0, p0, a1, p1, …] they are the even ones; in any other layout, those of the images
    that share their class with another.

    >>> find_anchors(torch.tensor([4, 4, 0, 0])), find_anchors(torch.tensor([4, 0, 1, 4]))
    (tensor([0, 2]), tensor([0, 3]))
    """
    if _in_pairs(labels):
        return torch.arange(0, len(labels), 2, device=labels.device)
    _, kind, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    has_mate: Tensor = sizes[kind] > 1
    return has_mate.nonzero().squeeze(1)


def _in_pairs(labels: Tensor) -> bool:
    """Tell whether each even position and the one behind it are of one class."""
    return len(labels) % 2 == 0 and torch.equal(labels[0::2], labels[1::2])


def check_margin(margin: float) -> None:
    """Refuse a margin γ that no triplet of the unit sphere could keep.

    >>> check_margin(3)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: margin must be in (0, 2], not 3: distances on the unit sphere are at most 2
    """
    if not (is_number(margin) and 0 < margin <= 2):
        raise UserError(
            f"margin must be in (0, 2], not {margin!r}: distances on the unit sphere are at most 2"
        )


@dataclass(frozen=True)
class Random:
    """R: the partner and a uniform negative.

    >>> z = torch.eye(4)[:, :2]
    >>> sampler, generator = Random(), torch.Generator().manual_seed(0)
    >>> sampler(torch.cdist(z, z), torch.tensor([0, 0, 1, 1]), generator=generator).positive
    tensor([1, 3])
    """

    letter: ClassVar[str] = "R"

    def __call__(
        self, dist: Tensor, labels: Tensor, *, generator: torch.Generator, dim: int | None = None
    ) -> Triplets:
        """Return one triplet for each anchor."""
        rows = _rows(dist, labels, generator)
        return Triplets(rows.anchor, rows.partner, _draw(rows.other, generator))


@dataclass(frozen=True)
class Semihard:
    """M: the partner and a uniform negative among those with d(a, p) < d(a, n) < d(a, p) + margin.

    >>> Semihard(margin=0.2)
    Semihard(margin=0.2)
    """

    letter: ClassVar[str] = "M"
    margin: float = 0.2

    def __post_init__(self) -> None:
        check_margin(self.margin)

    def __call__(
        self, dist: Tensor, labels: Tensor, *, generator: torch.Generator, dim: int | None = None
    ) -> Triplets:
        """Return one triplet for each anchor."""
        rows = _rows(dist, labels, generator)
        near = rows.dist.gather(1, rows.partner[:, None])
        band = rows.other & (rows.dist > near) & (rows.dist < near + self.margin)
        return Triplets(rows.anchor, rows.partner, _draw(_or_else(band, rows.other), generator))


@dataclass(frozen=True)
class Softhard:
    """S: a positive beyond the nearest negative and a negative within the farthest positive, both uniform.

    >>> Softhard()
    Softhard()
    """

    letter: ClassVar[str] = "S"

    def __call__(
        self, dist: Tensor, labels: Tensor, *, generator: torch.Generator, dim: int | None = None
    ) -> Triplets:
        """Return one triplet for each anchor."""
        rows = _rows(dist, labels, generator)
        nearest = rows.dist.masked_fill(~rows.other, torch.inf).amin(1, keepdim=True)
        farthest = rows.dist.masked_fill(~rows.same, -torch.inf).amax(1, keepdim=True)
        positive = _or_else(rows.same & (rows.dist > nearest), rows.same)
        negative = _or_else(rows.other & (rows.dist < farthest), rows.other)
        return Triplets(rows.anchor, _draw(positive, generator), _draw(negative, generator))


@dataclass(frozen=True)
class Distance:
    """D: the partner and a negative drawn against the density of distances on the sphere.

    log w = (2 − D)·log d − (D − 3)/2·log(1 − d²/4), without a cut-off; D is the length of the embeddings.

    >>> Distance()
    Distance()
    """

    letter: ClassVar[str] = "D"

    def __call__(
        self, dist: Tensor, labels: Tensor, *, generator: torch.Generator, dim: int | None = None
    ) -> Triplets:
        """Return one triplet for each anchor."""
        if dim is None or dim < 1:
            raise UserError(
                f"the Distance sampler needs the length of the embeddings, not {dim}: pass dim=z.shape[1]"
            )
        rows = _rows(dist, labels, generator)
        # The ends, a copy of the anchor and its opposite, would have infinite weight.
        d = rows.dist.to(wide_dtype(dist.device)).clamp(1e-6, 2 - 1e-6)
        log = (2 - dim) * d.log() - (dim - 3) / 2 * (1 - d.square() / 4).log()
        log = log.masked_fill(~rows.other, -torch.inf)
        weight = (log - log.amax(1, keepdim=True)).exp()
        return Triplets(rows.anchor, rows.partner, _draw(weight, generator))


@dataclass(frozen=True)
class Hardest:
    """H: the partner and the nearest negative.

    >>> Hardest()
    Hardest()
    """

    letter: ClassVar[str] = "H"

    def __call__(
        self, dist: Tensor, labels: Tensor, *, generator: torch.Generator, dim: int | None = None
    ) -> Triplets:
        """Return one triplet for each anchor."""
        rows = _rows(dist, labels, generator)
        negative = rows.dist.masked_fill(~rows.other, torch.inf).argmin(1)
        return Triplets(rows.anchor, rows.partner, negative)


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    s.letter: s for s in (Random, Semihard, Softhard, Distance, Hardest)
}


class _Rows(NamedTuple):
    """What each anchor sees of the batch: (T,) positions, (T, N) distances and (T, N) masks."""

    anchor: Tensor
    partner: Tensor
    dist: Tensor
    same: Tensor
    other: Tensor


def _rows(dist: Tensor, labels: Tensor, generator: torch.Generator) -> _Rows:
    if dist.ndim != 2 or dist.shape[0] != dist.shape[1]:
        raise UserError(
            f"distances have shape {tuple(dist.shape)}; they must be a square matrix, all images of the "
            "batch against all: use cross_distance(embeddings)"
        )
    check_labels(labels, len(dist))
    check_classes(labels)
    if not torch.isfinite(dist).all():
        raise UserError("distances hold NaN or infinity: look at the embeddings they were computed from")
    labels = labels.to(dist.device)
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
