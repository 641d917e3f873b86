"""The images that are ranked, the queries, and who is nearest: one distance, one tolerance, one tie rule.

Distances to rank by are those of `robustmetric.squares`, and so is the order of images that are equally far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor

from robustmetric.distance import at
from robustmetric.labels import check_labels
from robustmetric.squares import distances, keys_of, positions_of
from robustmetric.validate import UserError, is_number


@dataclass(frozen=True, eq=False)
class Gallery:
    """The images that are ranked: embeddings `z` (N, D) on the unit sphere, `labels` (N,), N at least 5.

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

    @property
    def stride(self) -> int:
        """One of so many images is in the `sample`."""
        return max(1, len(self) // 1024)

    @cached_property
    def sample(self) -> Gallery:
        """Every n-th image, beginning with the first, some 1,024 to 2,047 of them: a quick look at all."""
        if self.stride == 1:
            return self
        every = slice(None, None, self.stride)
        cameras = None if self.cameras is None else self.cameras[every]
        return replace(self, z=self.z[every].contiguous(), labels=self.labels[every], cameras=cameras)

    def in_sample(self, position: Tensor) -> Tensor:
        """Return where images at a `position` (B,) stand in the `sample`, −1 for those that do not."""
        inside = (position >= 0) & (position % self.stride == 0)
        return torch.where(inside, position // self.stride, -1)

    @cached_property
    def square(self) -> Tensor:
        """Squared lengths (N,) of the embeddings: 1, but for rounding."""
        return self.z.square().sum(1)

    def to(self, device: torch.device) -> Gallery:
        """Return the same on a `device`."""
        return move(self, device)

    def blocks(self) -> Iterator[slice]:
        """Yield slices of `chunk` images that cover the gallery."""
        for begin in range(0, len(self), self.chunk):
            yield slice(begin, min(begin + self.chunk, len(self)))


@dataclass(frozen=True, eq=False)
class Queries:
    """The images that are perturbed: their benign embeddings `z` (B, D) and `labels` (B,).

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
        """Return the same on a `device`."""
        return move(self, device)


def nothing(queries: Queries) -> Tensor:
    """Return the targets of B `queries` that aim at no image: (B, 0).

    >>> nothing(Queries(torch.eye(3), torch.arange(3), torch.arange(3))).shape
    torch.Size([3, 0])
    """
    return torch.empty(len(queries), 0, dtype=torch.long, device=queries.own.device)


Held = TypeVar("Held", "Gallery", "Queries")


def move(held: Held, device: torch.device) -> Held:
    """Return a gallery or queries, `held`, on a `device`: the same object if they are there already.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> move(gallery, torch.device("cpu")) is gallery
    True
    """
    if held.z.device == device:
        return held
    values = {f.name: getattr(held, f.name) for f in fields(held)}
    moved: dict[str, Any] = {n: v.to(device) for n, v in values.items() if isinstance(v, Tensor)}
    return replace(held, **moved)


def away_from(z: Tensor, place: Tensor) -> Tensor:
    """Return `z` (…, D), without a gradient where it is at its `place` (…, D) but for rounding.

    A gradient of the distance is all rounding there, and would depend on the batch and on the processor. It
    is zero instead, as at no distance at all. An image may be aimed at a copy of it and, by the reference,
    at itself.

    >>> from robustmetric.distance import pair_distance
    >>> z = torch.tensor([[1.0, 1e-7], [1.0, 1e-2]], requires_grad=True)
    >>> pair_distance(away_from(z, torch.tensor([1.0, 0.0])), torch.tensor([1.0, 0.0])).sum().backward()
    >>> z.grad
    tensor([[0., 0.],
            [0., 1.]])
    """
    return torch.where(at(z, place)[..., None], z.detach(), z)


def nearest(
    z: Tensor,
    gallery: Gallery,
    count: int,
    *,
    without: Tensor | None = None,
    other_than: Tensor | None = None,
    queries: Queries | None = None,
) -> Tensor:
    """Return the `count` images of the `gallery` nearest to each of `z` (B, D), nearest first: (B, count).

    They are positions; ties go to the lower one. `without` (B,) is left out, and so is the class `other_than`
    (B,), and what does not count for the `queries` that the embeddings are of.

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
        keys = keys_of(square, torch.arange(block.start, block.stop, device=z.device))
        if count == 1:
            lowest = keys.amin(1, keepdim=True)
        else:
            lowest = keys.topk(min(count, keys.shape[1]), dim=1, largest=False).values
        best = torch.cat([best, lowest], dim=1)
        best = best.topk(min(count, best.shape[1]), dim=1, largest=False).values
    return positions_of(best.sort(dim=1).values)


def count_nearer(
    z: Tensor,
    level: Tensor,
    gallery: Gallery,
    without: Sequence[Tensor] = (),
    *,
    queries: Queries | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how many of the `gallery` are nearer to `z` (B, D) than the square `level` (B,), and as near.

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
    """Return the rank, in % from first to last, of what is at the square `level` (B,) from `z` (B, D).

    Tied images of the `gallery` share the middle rank. The two positions (B,) of `without` are not ranked, −1
    is none.

    >>> gallery, one = Gallery(torch.eye(5), torch.arange(5)), torch.tensor([0])
    >>> normalised_rank(torch.eye(5)[:1], torch.tensor([2.0]), gallery, (one, one + 1))
    tensor([50.])
    """
    nearer, tied = count_nearer(z, level, gallery, without)
    own, other = without
    left = len(gallery) - (own >= 0).long() - ((other >= 0) & (other != own)).long()
    return 100 * (nearer + tied.float() / 2) / left


def hit_at_1(z: Tensor, queries: Queries, gallery: Gallery, own: Tensor, *, strict: bool) -> Tensor:
    """Return whether the image nearest to `z` (B, D), but for `own` (B,), is of the class: 100 or 0, (B,).

    The embeddings are of the `queries`, the image is one of the `gallery` that counts for them. NaN where no
    other image is of that class and `strict` says to leave such queries out.

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
    """Return how many images each of the `queries` can find: those of its class that count, (B,).

    In the `gallery`, but for `own` (B,), −1 for none.

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


def same_camera(queries: Queries, gallery: Gallery, block: slice) -> Tensor | None:
    """Return which of n images do not count for the `queries`: those of their class and camera, (B, n).

    The images are a `block` of the `gallery`. None where no cameras are known.

    >>> z, zero = torch.eye(5), torch.zeros(5, dtype=torch.long)
    >>> gallery = Gallery(z, zero, cameras=torch.tensor([0, 0, 1, 1, 1]))
    >>> same_camera(Queries(z[:1], zero[:1], zero[:1], cameras=zero[:1]), gallery, slice(0, 5))
    tensor([[ True,  True, False, False, False]])
    """
    if queries.cameras is None or gallery.cameras is None:
        return None
    mates = gallery.labels[block] == queries.labels[:, None]
    return mates & (gallery.cameras[block] == queries.cameras[:, None])


def put(values: Tensor, rows: Tensor, position: Tensor, block: slice, value: float) -> None:
    """Set a `value` in each of `rows` (B,) at its `position` (B,), where that lies in the `block`.

    `values` (B, n) are those of the block's n images, and changed in place.

    >>> values = torch.zeros(2, 3)
    >>> put(values, torch.arange(2), torch.tensor([4, 9]), slice(3, 6), 7.0)
    >>> values
    tensor([[0., 7., 0.],
            [0., 0., 0.]])
    """
    inside = (position >= block.start) & (position < block.stop)
    values[rows[inside], position[inside] - block.start] = value


def check_count(letter: str, count: int, gallery: int | None = None) -> None:
    """Refuse a `count` of targets that cannot be, or that is more than a gallery has images.

    `letter` is the name of the option that it was given as, `gallery` the number of images.

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
