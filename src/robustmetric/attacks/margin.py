"""Margins: how far a ranking is from being wrong, with a gradient, and who is nearest, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robustmetric.attacks.gallery import Gallery, Queries, put, same_camera

SLACK = 1e-4
"""Cosines that differ by less are worth an exact look: single precision may be off."""

# Up to so many distances are kept for a second look at them; more are computed anew.
_KEPT = 2**25


class Rivals(NamedTuple):
    """Of each query the nearest image of its class and of another one: positions (B,) and cosines (B,).

    `wrong` is the nearest of the classes that are aimed at, `any_wrong` the cosine of the nearest of all
    others. A cosine of −∞ says that there is none.
    """

    right: Tensor
    right_cosine: Tensor
    wrong: Tensor
    wrong_cosine: Tensor
    any_wrong: Tensor

    @property
    def answered(self) -> Tensor:
        """Which queries (B,) have both."""
        return self.right_cosine.isfinite() & self.wrong_cosine.isfinite()

    @property
    def near(self) -> Tensor:
        """Which queries (B,) may have an image of another class in front."""
        return self.answered & (self.any_wrong > self.right_cosine - SLACK)


def may_lead(ahead: Tensor, behind: Tensor) -> Tensor:
    """Return where distances `ahead` (B,) may be at most those `behind` (B,), but for rounding.

    Rounding is of cosines, so that the squares are compared: of points that lie together, distances are off
    by much more than cosines are.

    >>> may_lead(torch.tensor([0.0, 0.001, 1.0]), torch.tensor([0.5, 0.0, 0.9]))
    tensor([ True,  True, False])
    """
    return ahead.detach().square() < behind.detach().square() + 2 * SLACK


@torch.no_grad()
def rivals(z: Tensor, queries: Queries, gallery: Gallery, aimed: Tensor | None = None) -> Rivals:
    """Return who is nearest to `queries` at `z` (B, D), of their class and of others in the `gallery`.

    With `aimed` (B,), the other class is that one.

    >>> z, labels = torch.eye(5), torch.tensor([0, 0, 1, 2, 2])
    >>> found = rivals(z[:1], Queries(z[:1], labels[:1], torch.tensor([0])), Gallery(z, labels))
    >>> found.right, found.wrong
    (tensor([1]), tensor([2]))
    """
    none = z.new_full((len(z),), -torch.inf)
    nobody = torch.zeros(len(z), dtype=torch.long, device=z.device)
    right, wrong, high, low, anyone = nobody, nobody, none, none, none
    for block in gallery.blocks():
        product = z @ gallery.z[block].T
        kinds = gallery.labels[block]
        same = kinds == queries.labels[:, None]
        others = product.masked_fill(same, -torch.inf)
        if aimed is not None:
            anyone = torch.maximum(anyone, others.amax(1))
            others.masked_fill_(kinds != aimed[:, None], -torch.inf)
        value, place = others.max(1)
        wrong, low = _higher(wrong, low, place + block.start, value)
        _leave_out(product.masked_fill_(~same, -torch.inf), queries, gallery, block, -torch.inf)
        value, place = product.max(1)
        right, high = _higher(right, high, place + block.start, value)
    return Rivals(right, high, wrong, low, low if aimed is None else anyone)


def _higher(place: Tensor, value: Tensor, other: Tensor, beyond: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(beyond > value, other, place), torch.maximum(value, beyond)


def _leave_out(values: Tensor, queries: Queries, gallery: Gallery, block: slice, value: float) -> None:
    """Set what does not count for queries (B,) in the values (B, n) of a block: themselves, and by camera."""
    put(values, torch.arange(len(values), device=values.device), queries.own, block, value)
    if (seen := same_camera(queries, gallery, block)) is not None:
        values.masked_fill_(seen, value)


def smooth_margin(z: Tensor, queries: Queries, gallery: Gallery, tau: float) -> tuple[Tensor, Tensor]:
    """Return how much farther other classes are than the query's own, smoothly: (B,), and who is near.

    It is the soft minimum of the distances to images of other classes less that to images of the class:
    softmin d = −τ · log Σ exp(−d / τ), with the temperature `tau`. Value and gradient come from one pass over
    the `gallery`; a query without an answer to find has the value 0. The second, (B,), says which `queries`
    at `z` (B, D) may have an image of another class in front.

    >>> z, labels = torch.eye(5), torch.tensor([0, 0, 1, 2, 2])
    >>> queries = Queries(z[:1], labels[:1], torch.tensor([0]))
    >>> value, near = smooth_margin(z[:1], queries, Gallery(z, labels), 0.1)
    >>> round(float(value), 3), bool(near)  # three others at the same distance as one of the class
    (-0.11, True)
    """
    value, near = _SmoothMargin.apply(z, queries, gallery, tau)  # type: ignore[no-untyped-call]
    return value, near


class _SmoothMargin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, queries: Queries, gallery: Gallery, tau: float) -> tuple[Tensor, Tensor]:
        kept = list(_distances(z, queries, gallery)) if len(z) * len(gallery) <= _KEPT else None
        nearest = z.new_full((2, len(z)), torch.inf)  # of other classes, and of the class
        for dist, same, _ in kept or _distances(z, queries, gallery):
            nearest[0] = torch.minimum(nearest[0], dist.masked_fill(same, torch.inf).amin(1))
            nearest[1] = torch.minimum(nearest[1], dist.masked_fill(~same, torch.inf).amin(1))
        answered = nearest.isfinite().all(0)
        wrong, right = nearest.where(answered, 0.0)[..., None]
        total = z.new_zeros(2, len(z))
        parts = []
        for dist, same, images in kept or _distances(z, queries, gallery):
            share = torch.where(same, right, wrong).sub_(dist).div_(tau).exp_()
            mine = (share * same).sum(1)
            total += torch.stack([share.sum(1) - mine, mine])
            if ctx.needs_input_grad[0]:
                parts.append((share.div_(dist), same, images))
        total.clamp_min_(1e-30)
        slope = torch.zeros_like(z)
        for share, same, images in parts:
            # The weights of each image: positive of other classes, which are to come nearer.
            share.mul_(torch.where(same, -1 / total[1, :, None], 1 / total[0, :, None]))
            slope.addcmul_(z, share.sum(1, keepdim=True)).addmm_(share, images, alpha=-1)
        ctx.save_for_backward(slope * answered[:, None])
        value = (wrong - right)[:, 0] - tau * (total[0].log() - total[1].log())
        near = answered & may_lead(nearest[0], nearest[1])
        ctx.mark_non_differentiable(near)
        return value * answered, near

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0][:, None] * slope, None, None, None


def _distances(z: Tensor, queries: Queries, gallery: Gallery) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield by block the distances (B, n), which of the images are of the class (B, n), and the images."""
    length = z.square().sum(1, keepdim=True)
    for block in gallery.blocks():
        images = gallery.z[block]
        dist = torch.addmm(gallery.square[block], z, images.T, alpha=-2)
        dist.add_(length).clamp_min_(1e-12).sqrt_()
        same = gallery.labels[block] == queries.labels[:, None]
        _leave_out(dist, queries, gallery, block, torch.inf)
        yield dist, same, images


@torch.no_grad()
def kth_nearest(
    z: Tensor, gallery: Gallery, k: int, without: tuple[Tensor, ...], queries: Queries | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `k`-th nearest of the `gallery` to each of `z` (B, D): its position (B,) and cosine (B,).

    Positions (B,) of `without` are left out, −1 is none, and what does not count for the `queries`. It is
    found in single precision: of images that are nearly as far, any.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> kth_nearest(torch.tensor([[0.8, 0.6, 0.0, 0.0, 0.0]]), gallery, 1, (torch.tensor([0]),))
    (tensor([1]), tensor([0.6000]))
    """
    rows = torch.arange(len(z), device=z.device)
    best = z.new_empty(len(z), 0)
    place = torch.empty(len(z), 0, dtype=torch.long, device=z.device)
    for block in gallery.blocks():
        product = z @ gallery.z[block].T
        for position in without:
            put(product, rows, position, block, -torch.inf)
        if queries is not None and (seen := same_camera(queries, gallery, block)) is not None:
            product.masked_fill_(seen, -torch.inf)
        value, index = product.topk(min(k, product.shape[1]), dim=1, sorted=False)
        best, place = torch.cat([best, value], 1), torch.cat([place, index + block.start], 1)
        if best.shape[1] > k:
            best, index = best.topk(k, dim=1, sorted=False)
            place = place.gather(1, index)
    value, last = best.min(1)
    return place.gather(1, last[:, None])[:, 0], value
