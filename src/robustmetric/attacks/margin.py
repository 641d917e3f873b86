"""Margins and rank hinges: how far a ranking is from wrong, and targets from first or last, in one pass.

Value and gradient of an objective over the whole gallery come from a single pass over its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from robustmetric.gallery import Gallery, Queries, exclude
from robustmetric.sphere import at, pair_distance

SLACK = 1e-4
"""A cosine that is higher by this is surely higher: single precision is off by less for 1,000 dimensions."""

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
    def misranked(self) -> Tensor:
        """Which queries (B,) surely have an image of another class in front."""
        return self.answered & (self.any_wrong > self.right_cosine + SLACK)


@torch.no_grad()
def rivals(
    z: Tensor, queries: Queries, gallery: Gallery, aimed: Tensor | None = None, *, farthest: bool = False
) -> Rivals:
    """Return who is nearest to `queries` at `z` (B, D), of their class and of others in the `gallery`.

    With `aimed` (B,), the other class is that one. With `farthest` it is the farthest image of any other
    class, and its cosine has the other sign.

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
        others = (-product if farthest else product).masked_fill(same, -torch.inf)
        if aimed is not None:
            anyone = torch.maximum(anyone, others.amax(1))
            others.masked_fill_(kinds != aimed[:, None], -torch.inf)
        value, place = others.max(1)
        wrong, low = _higher(wrong, low, place + block.start, value)
        exclude(product.masked_fill_(~same, -torch.inf), -torch.inf, queries, gallery, block)
        value, place = product.max(1)
        right, high = _higher(right, high, place + block.start, value)
    return Rivals(right, high, wrong, low, low if aimed is None else anyone)


def _higher(place: Tensor, value: Tensor, other: Tensor, beyond: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(beyond > value, other, place), torch.maximum(value, beyond)


def smooth_margin(z: Tensor, queries: Queries, gallery: Gallery, tau: float) -> tuple[Tensor, Tensor]:
    """Return how much farther other classes are than the query's own, smoothly: (B,), and who is misranked.

    It is the soft minimum of the distances to images of other classes less that to images of the class:
    softmin d = −τ · log Σ exp(−d / τ), with the temperature `tau`. Value and gradient come from one pass over
    the `gallery`; a query without an answer to find has the value 0. The second, (B,), says which `queries`
    at `z` (B, D) surely have an image of another class in front.

    >>> z, labels = torch.eye(5), torch.tensor([0, 0, 1, 2, 2])
    >>> queries = Queries(z[:1], labels[:1], torch.tensor([0]))
    >>> value, misranked = smooth_margin(z[:1], queries, Gallery(z, labels), 0.1)
    >>> round(float(value), 3), bool(misranked)  # three others at the same distance as one of the class
    (-0.11, False)
    """
    value, misranked = _SmoothMargin.apply(z, queries, gallery, tau)  # type: ignore[no-untyped-call]
    return value, misranked


def _distances(z: Tensor, gallery: Gallery) -> Iterator[tuple[slice, Tensor]]:
    """Yield each block of the gallery with its distances (B, n) to z (B, D)."""
    length = z.square().sum(1, keepdim=True)
    for block in gallery.blocks():
        dist = torch.addmm(gallery.square[block], z, gallery.z[block].T, alpha=-2)
        yield block, dist.add_(length).clamp_min_(1e-12).sqrt_()


class _SmoothMargin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, queries: Queries, gallery: Gallery, tau: float) -> tuple[Tensor, Tensor]:
        kept = list(_with_class(z, queries, gallery)) if len(z) * len(gallery) <= _KEPT else None
        nearest = z.new_full((2, len(z)), torch.inf)  # of other classes, and of the class
        for dist, same, _ in kept or _with_class(z, queries, gallery):
            nearest[0] = torch.minimum(nearest[0], dist.masked_fill(same, torch.inf).amin(1))
            nearest[1] = torch.minimum(nearest[1], dist.masked_fill(~same, torch.inf).amin(1))
        answered = nearest.isfinite().all(0)
        wrong, right = nearest.where(answered, 0.0)[..., None]
        total = z.new_zeros(2, len(z))
        parts = []
        for dist, same, images in kept or _with_class(z, queries, gallery):
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
        # Squares of distances are off as much as cosines are, twice; distances near 0 by more.
        misranked = answered & (nearest[0].square() < nearest[1].square() - 2 * SLACK)
        ctx.mark_non_differentiable(misranked)
        return value * answered, misranked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0][:, None] * slope, None, None, None


def _with_class(z: Tensor, queries: Queries, gallery: Gallery) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield by block the distances (B, n), which of the images are of the class (B, n), and the images."""
    for block, dist in _distances(z, gallery):
        same = gallery.labels[block] == queries.labels[:, None]
        exclude(dist, torch.inf, queries, gallery, block)
        yield dist, same, gallery.z[block]


@torch.no_grad()
def kth_nearest(z: Tensor, gallery: Gallery, k: int, queries: Queries, *extra: Tensor) -> Tensor:
    """Return the position (B,) of the `k`-th nearest of the `gallery` to each of `z` (B, D).

    What does not count for the `queries` is left out, and the positions (B,) of `extra`. It is found in
    single precision: of images that are nearly as far, any.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> z = torch.tensor([[0.8, 0.6, 0.0, 0.0, 0.0]])
    >>> kth_nearest(z, gallery, 1, Queries(z, torch.tensor([0]), torch.tensor([0])))
    tensor([1])
    """
    best = z.new_empty(len(z), 0)
    place = torch.empty(len(z), 0, dtype=torch.long, device=z.device)
    for block in gallery.blocks():
        product = z @ gallery.z[block].T
        exclude(product, -torch.inf, queries, gallery, block, *extra)
        value, index = product.topk(min(k, product.shape[1]), dim=1, sorted=False)
        best, place = torch.cat([best, value], 1), torch.cat([place, index + block.start], 1)
        if best.shape[1] > k:
            best, index = best.topk(k, dim=1, sorted=False)
            place = place.gather(1, index)
    return place.gather(1, best.min(1).indices[:, None])[:, 0]


def rank_hinge(
    z: Tensor, index: Tensor, weights: Sequence[float], gallery: Gallery, queries: Queries | None
) -> Tensor:
    """Return how far targets `index` (B, W) are from first, or last, in the ranking for `z` (B, D): (B,).

    It sums over the targets t, each with its weight c of the W `weights`: |c| · mean over images x of
    max(0, ±(d(z, t) − d(z, x))), with the sign of c: a positive weight wants the target near, a negative one
    far. The mean leaves out the target and, of `queries`, each one itself, whatever the cameras.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> z = torch.tensor([[0.6, 0.8, 0.0, 0.0, 0.0]])
    >>> rank_hinge(z, torch.tensor([[1]]), [1.0], gallery, None)  # the nearest already
    tensor([0.])
    """
    asked = None if queries is None else queries.any_camera
    value: Tensor = _RankHinge.apply(z, index, tuple(weights), gallery, asked)  # type: ignore[no-untyped-call]
    return value


class _RankHinge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        index: Tensor,
        weights: tuple[float, ...],
        gallery: Gallery,
        queries: Queries | None,
    ) -> Tensor:
        goal = gallery.z[index]
        to_goal = pair_distance(z[:, None], goal)
        value, opened = z.new_zeros(len(z)), torch.zeros_like(to_goal)
        pull, push = z.new_zeros(len(z), 1), torch.zeros_like(z)
        for block, dist in _distances(z, gallery):
            total = None
            for k, weight in enumerate(weights):
                gap = to_goal[:, k : k + 1] - dist if weight > 0 else dist - to_goal[:, k : k + 1]
                exclude(gap, 0.0, queries, gallery, block, index[:, k])
                value += abs(weight) * gap.clamp_min_(0).sum(1)
                # From here on the gap is 1 where the hinge is open and 0 where it is not.
                opened[:, k] += weight * gap.sign_().sum(1)
                gap.div_(dist)
                if len(weights) > 1 or weight != 1:
                    gap.mul_(weight)
                total = gap if total is None else total.add_(gap)
            assert total is not None  # noqa: S101
            pull += total.sum(1, keepdim=True)
            push.addmm_(total, gallery.z[block])
        ranked = torch.full_like(value, len(gallery))
        if queries is not None:
            ranked -= 1 + (queries.own >= 0).to(ranked)
        # At the goal itself every way is rounding: see `away_from`.
        away = ((z[:, None] - goal) / to_goal[..., None]).masked_fill(at(z[:, None], goal)[..., None], 0.0)
        slope = (opened[..., None] * away).sum(1) - z * pull + push
        ctx.save_for_backward(slope / ranked[:, None])
        return value / ranked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grads[0][:, None] * slope, None, None, None, None
