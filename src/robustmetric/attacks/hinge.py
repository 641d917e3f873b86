"""Rank hinges: how far targets are from first or last in a ranking, with a gradient, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from robustmetric.attacks.gallery import Gallery, put
from robustmetric.distance import at, pair_distance


def rank_hinge(
    z: Tensor, index: Tensor, weights: Sequence[float], gallery: Gallery, own: Tensor | None
) -> Tensor:
    """Return how far targets `index` (B, W) are from first, or last, in the ranking for `z` (B, D): (B,).

    It sums over the targets t, each with its weight c of the W `weights`: |c| · mean over images x of
    max(0, ±(d(z, t) − d(z, x))), with the sign of c: a positive weight wants the target near, a negative one
    far. With the queries' `own` (B,) positions, −1 for none, the mean leaves out the query itself and the
    target. Value and gradient come from one pass over the `gallery`.

    >>> gallery = Gallery(torch.eye(5), torch.arange(5))
    >>> z = torch.tensor([[0.6, 0.8, 0.0, 0.0, 0.0]])
    >>> rank_hinge(z, torch.tensor([[1]]), [1.0], gallery, None)  # the nearest already
    tensor([0.])
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
