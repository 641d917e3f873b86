"""How far the ranking of a query is certain: the least radius over all images of other classes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from robustmetric.evaluation.band import Band
from robustmetric.evaluation.smoothing import (
    Moments,
    certified_radius,
    directions,
    exact,
    lower_bound,
)

_ROWS = 2048  # samples that are in double precision at once
_PAIRS = 16  # images of other classes that are looked at together
_VALUES = 2**22  # products that are held at once, of a pair all


@dataclass(frozen=True, eq=False)
class Samples:
    """All embeddings `z` (n, D) of a query with noise, in single precision, and their `moments`.

    >>> seen = Samples.of([torch.eye(2), torch.eye(2)], 4)
    >>> seen.z.shape, seen.moments.count
    (torch.Size([4, 2]), 4)
    """

    z: Tensor
    moments: Moments

    @classmethod
    def of(cls, parts: Iterable[Tensor], count: int) -> Samples:
        """Keep `count` embeddings that come in `parts` (B, D)."""
        z = torch.zeros(0)
        begin = 0
        for part in parts:
            if begin == 0:
                z = torch.empty(count, part.shape[1], dtype=torch.float32)
            z[begin : begin + len(part)] = part.detach().cpu()
            begin += len(part)
        return cls(z, Moments.of(z.split(_ROWS)))

    def sorted(self, ways: Tensor) -> Tensor:
        """Return the products (K, n) with directions (K, D), ascending."""
        values = torch.cat([ways @ exact(part).T for part in self.z.split(_ROWS)], dim=1)
        values.numpy().sort(axis=1)
        return values.clamp_(-1, 1)


def sure_radius(seen: Samples, anchor: Tensor, rivals: Tensor, *, sigma: float, alpha: float) -> float:
    """Return how far no one of K `rivals` (K, D) comes nearer than the `anchor` (D,), but for `alpha`.

    A pair's radius is the larger one of what its mean and its distribution say, with half of `alpha` each.
    Pairs whose radius is known to be no less than the least so far are left out: that changes nothing.

    >>> seen = Samples.of([torch.tensor([[1.0, 0.0]]).expand(1000, 2)], 1000)
    >>> anchor, rivals = torch.tensor([1.0, 0.0]).double(), torch.tensor([[-1.0, 0.0], [0.0, 1.0]]).double()
    >>> round(sure_radius(seen, anchor, rivals, sigma=0.25, alpha=0.001), 4)
    0.5028
    """
    count = seen.moments.count
    mean, variance = seen.moments.margins(anchor, rivals)
    sure = certified_radius(lower_bound(mean, variance, count, alpha / 2), sigma)
    band = Band.of(count, len(rivals), alpha / 2)
    known = sure.maximum(sigma * band.at_least(mean, variance * (count - 1) / count))
    least = math.inf
    for some in known.argsort().split(max(1, min(_PAIRS, _VALUES // count))):
        if float(known[some[0]]) >= least:
            break
        values = seen.sorted(directions(anchor, rivals[some]))
        least = min(least, float(sure[some].maximum(sigma * band.radius(values)).min()))
    return least
