"""Queries, the gallery that they rank, who counts for a query, and who is nearest.

`exclude` is the one rule of who counts, and `excluded` the same as a mask. Distances, and the order of images
that are equally far, are those of `robustmetric.squares`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from robustmetric.errors import UserError, whole
from robustmetric.labels import check_labels
from robustmetric.sphere import at
from robustmetric.squares import distances, keys_of, positions_of

Held = TypeVar("Held", bound="ByRow")


@dataclass(frozen=True, eq=False)
class ByRow:
    """Tensors with one row for each image.

    >>> queries = Queries(torch.eye(3), torch.tensor([0, 0, 1]), torch.arange(3))
    >>> queries[torch.tensor([2])].labels
    tensor([1])
    """

    def __getitem__(self: Held, rows: Tensor) -> Held:
        return replace(self, **{name: tensor[rows] for name, tensor in self._tensors().items()})

    def to(self: Held, device: torch.device) -> Held:
        """Return the same on a `device`: the same object if it is there."""
        held = self._tensors()
        if all(tensor.device == device for tensor in held.values()):
            return self
        return replace(self, **{name: tensor.to(device) for name, tensor in held.items()})

    def _tensors(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class Gallery(ByRow):
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
        whole("chunk", self.chunk, 1)

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
        return self[torch.arange(0, len(self), self.stride, device=self.z.device)]

    def in_sample(self, position: Tensor) -> Tensor:
        """Return the place in the `sample` of images at a `position` (B,), −1 for those not in it."""
        inside = (position >= 0) & (position % self.stride == 0)
        return torch.where(inside, position // self.stride, -1)

    @cached_property
    def square(self) -> Tensor:
        """Squared lengths (N,) of the embeddings: 1, but for rounding."""
        return self.z.square().sum(1)

    def blocks(self) -> Iterator[slice]:
        """Yield slices of `chunk` images that cover the gallery."""
        for begin in range(0, len(self), self.chunk):
            yield slice(begin, min(begin + self.chunk, len(self)))


@dataclass(frozen=True, eq=False)
class Queries(ByRow):
    """The images that are perturbed: their benign embeddings `z` (B, D) and `labels` (B,).

    `own` (B,) is each one's position in the gallery, −1 where it is not in there; `cameras` (B,) took them.
    """

    z: Tensor
    labels: Tensor
    own: Tensor
    cameras: Tensor | None = None

    def __len__(self) -> int:
        return len(self.z)

    @property
    def any_camera(self) -> Queries:
        """The same, for rankings in which images of every camera count."""
        return self if self.cameras is None else replace(self, cameras=None)


def away_from(z: Tensor, place: Tensor) -> Tensor:
    """Return `z` (…, D), without a gradient where it is at its `place` (…, D) but for rounding.

    A gradient of the distance is all rounding there, and would depend on the batch and on the processor. It
    is zero instead, as at no distance at all. An image may be aimed at a copy of it and, by the reference,
    at itself.

    >>> from robustmetric.sphere import pair_distance
    >>> z = torch.tensor([[1.0, 1e-7], [1.0, 1e-2]], requires_grad=True)
    >>> pair_distance(away_from(z, torch.tensor([1.0, 0.0])), torch.tensor([1.0, 0.0])).sum().backward()
    >>> z.grad
    tensor([[0., 0.],
            [0., 1.]])
    """
    return torch.where(at(z, place)[..., None], z.detach(), z)


def exclude(
    values: Tensor,
    value: float,
    queries: Queries | None,
    gallery: Gallery,
    block: slice,
    *extra: Tensor,
) -> None:
    """Set a `value` in `values` (B, n) for images of a `block` that do not count for B `queries`, in place.

    Of the `gallery` those are the query itself, images of its class from its camera, and the positions (B,)
    of `extra`, −1 for none. Without `queries` it is `extra` alone.

    >>> z, zero = torch.eye(5), torch.zeros(5, dtype=torch.long)
    >>> gallery = Gallery(z, zero, cameras=torch.tensor([0, 0, 1, 1, 1]))
    >>> queries = Queries(z[:1], zero[:1], zero[:1], cameras=zero[:1])
    >>> values = torch.ones(1, 5)
    >>> exclude(values, 7, queries, gallery, slice(0, 5), torch.tensor([4]))
    >>> values
    tensor([[7., 7., 1., 1., 7.]])
    """
    if queries is not None:
        extra = (queries.own, *extra)
        if queries.cameras is not None and gallery.cameras is not None:
            mates = gallery.labels[block] == queries.labels[:, None]
            values.masked_fill_(mates & (gallery.cameras[block] == queries.cameras[:, None]), value)
    rows = torch.arange(len(values), device=values.device)
    for position in extra:
        inside = (position >= block.start) & (position < block.stop)
        values[rows[inside], position[inside] - block.start] = value


def excluded(queries: Queries, gallery: Gallery, block: slice, *extra: Tensor) -> Tensor:
    """Return which n images of a `block` of the `gallery` do not count for B `queries`: (B, n) bools.

    The positions (B,) of `extra` do not either: see `exclude`.
    """
    size = (len(queries), block.stop - block.start)
    found = torch.zeros(size, dtype=torch.bool, device=gallery.labels.device)
    exclude(found, True, queries, gallery, block, *extra)
    return found


def nearest(
    z: Tensor,
    gallery: Gallery,
    count: int,
    queries: Queries | None = None,
    *,
    other_than: Tensor | None = None,
) -> Tensor:
    """Return the `count` images of the `gallery` nearest to each of `z` (B, D), nearest first: (B, count).

    They are positions; ties go to the lower one. What does not count for the `queries`, which the embeddings
    are of, comes last, and so does the class `other_than` (B,).

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> nearest(gallery.z[:1], gallery, 2, Queries(gallery.z[:1], torch.tensor([0]), torch.tensor([0])))
    tensor([[1, 2]])
    """
    best = torch.empty(len(z), 0, dtype=torch.long, device=z.device)
    for block in gallery.blocks():
        square = distances(z, gallery.z[block])
        if other_than is not None:
            square.masked_fill_(gallery.labels[block] == other_than[:, None], torch.inf)
        exclude(square, torch.inf, queries, gallery, block)
        keys = keys_of(square, torch.arange(block.start, block.stop, device=z.device))
        if count == 1:
            lowest = keys.amin(1, keepdim=True)
        else:
            lowest = keys.topk(min(count, keys.shape[1]), dim=1, largest=False).values
        best = torch.cat([best, lowest], dim=1)
        best = best.topk(min(count, best.shape[1]), dim=1, largest=False).values
    return positions_of(best.sort(dim=1).values)


def count_nearer(
    z: Tensor, level: Tensor, gallery: Gallery, queries: Queries | None = None, *extra: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many of the `gallery` are nearer to `z` (B, D) than the square `level` (B,), and as near.

    What does not count for the `queries` is left out, and the positions (B,) of `extra`: see `exclude`.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> count_nearer(torch.eye(5)[:1], torch.tensor([2.0]), gallery)
    (tensor([1]), tensor([4]))
    """
    nearer = torch.zeros(len(z), dtype=torch.long, device=z.device)
    tied = torch.zeros_like(nearer)
    for block in gallery.blocks():
        square = distances(z, gallery.z[block])
        exclude(square, torch.inf, queries, gallery, block, *extra)
        nearer += (square < level[:, None]).sum(1)
        tied += (square == level[:, None]).sum(1)
    return nearer, tied


def hit_at_1(z: Tensor, queries: Queries, gallery: Gallery, *, strict: bool = True) -> Tensor:
    """Return whether the image nearest to `z` (B, D) is of the query's class: 100 or 0, (B,).

    The embeddings are of the `queries`, the image is one of the `gallery` that counts for them. NaN where no
    other image is of that class and `strict` says to leave such queries out.

    >>> z, labels = torch.eye(5), torch.tensor([0, 0, 1, 2, 2])
    >>> hit_at_1(z, Queries(z, labels, torch.arange(5)), Gallery(z, labels))
    tensor([100., 100., nan,   0.,   0.])
    """
    found = nearest(z, gallery, 1, queries)[:, 0]
    hit = 100.0 * (gallery.labels[found] == queries.labels)
    return hit.where(count_mates(queries, gallery) > 0, torch.nan) if strict else hit


def count_mates(queries: Queries, gallery: Gallery) -> Tensor:
    """Return how many images of the `gallery` each of the `queries` can find: its class, if it counts, (B,).

    >>> z, labels = torch.eye(5), torch.tensor([0, 0, 1, 2, 2])
    >>> count_mates(Queries(z, labels, torch.arange(5)), Gallery(z, labels))
    tensor([1, 1, 0, 1, 1])
    """
    return count_relevant(gallery.labels, queries.labels, queries.own, gallery.cameras, queries.cameras)


def count_relevant(
    labels: Tensor,
    query_labels: Tensor,
    own: Tensor,
    cameras: Tensor | None = None,
    query_cameras: Tensor | None = None,
) -> Tensor:
    """Return how many of the images with `labels` (N,) are of each query's class and count for it: (Q,).

    `query_labels` (Q,) are the classes of the queries. The rule is that of `exclude`, without comparing each
    query with each image: neither its `own` position (Q,), −1 for none, nor images of its class from its
    camera count, by the `cameras` (N,) and `query_cameras` (Q,).
    """
    found = _count(labels, query_labels)
    hidden = (own >= 0) & (labels[own] == query_labels)
    if cameras is not None and query_cameras is not None:
        kind, camera = (
            torch.cat(pair).unique(return_inverse=True)[1]
            for pair in ((labels, query_labels), (cameras, query_cameras))
        )
        both = kind * (camera.max() + 1) + camera
        found -= _count(both[: len(labels)], both[len(labels) :])
        hidden &= cameras[own] != query_cameras
    return found - hidden.long()


def _count(values: Tensor, wanted: Tensor) -> Tensor:
    """Return how often each of `wanted` (Q,) stands among `values` (N,): (Q,)."""
    ordered, wanted = values.long().sort().values, wanted.long().contiguous()
    return torch.searchsorted(ordered, wanted, right=True) - torch.searchsorted(ordered, wanted)
