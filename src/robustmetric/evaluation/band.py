"""A band that a distribution lies in, by its samples, and how far a mean is certain once the noise moves.

s in [−1, 1] is a function of an image with noise of deviation σ, and s_(1) ≤ … ≤ s_(n) are sorted samples.

How far. The mean of s is −1 + ∫ P(s > t) dt, with t from −1 to 1. By the lemma of Neyman and Pearson each of
these probabilities P becomes at least Φ(Φ⁻¹(P) − r/σ) if the image is moved by at most r (Kumar et al.,
"Certifying Confidence via Randomized Smoothing", NeurIPS 2020). So the mean, moved by at most r, is at least

    −1 + Σ_j (s_(i_j) − s_(i_{j−1})) Φ(Φ⁻¹(1 − q_j) − r/σ),  with −1 in the place of s_(i_0),

for any ranks i_1 < … < i_m = n of which P(s < s_(i_j)) ≤ q_j is known.

How sure. P(s < s_(i)) is at most the i-th smallest one of n uniform numbers, which exceeds q if at most i − 1
of them are below q. So it is known but for P(Bin(n, q) ≤ i − 1), which is to be α/(mK): then all m ranks of
K functions hold together but for α. With k = i − 1 that probability is at most

    b(k)/(1 − k(1 − q)/((n − k + 1)q)),  with b(k) = C(n, k) qᵏ (1 − q)ⁿ⁻ᵏ and q > k/n,

since the terms b(k), b(k − 1), … fall at least as fast as a geometric series. The ranks depend on n alone.
Where all samples agree, 1 − q_1 is about ln(mK/α)/n; a band that is as wide everywhere (Dvoretzky, Kiefer,
Wolfowitz and Massart) has √(ln(2K/α)/2n) there, and that counts for all of the way from −1 to s_(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_RANKS = 128  # more of them are nearer to the distribution, and have a share of alpha each
_HALVINGS = 60
_ROUNDING = 1e-9  # sums of products of n vectors in double precision are nearer to what they should be


@dataclass(frozen=True, eq=False)
class Band:
    """Ranks (m,) of `count` sorted samples, from 1 to `count`, and `score` (m,), Φ⁻¹(1 − q) of each.

    All in double precision. Radii here are in deviations of the noise, r/σ.

    >>> band = Band.of(1000, pairs=100, alpha=0.0005)
    >>> band.ranks[:3].tolist(), band.ranks[-1].item()
    ([1, 2, 3], 1000)
    >>> band.radius(torch.tensor([[0.1], [1.0]]).double().expand(2, 1000))
    tensor([0.7897, 2.1249], dtype=torch.float64)
    """

    count: int
    ranks: Tensor
    score: Tensor

    @staticmethod
    @lru_cache(maxsize=64)
    def of(count: int, pairs: int, alpha: float) -> Band:
        """Make the band of `count` samples of each of `pairs` functions, all within but for `alpha`."""
        ends = torch.linspace(-1, 1, _RANKS, dtype=torch.float64) * float(
            torch.special.ndtri(torch.tensor(1 / count, dtype=torch.float64)).abs()
        )
        ranks = (count * torch.special.ndtr(ends)).ceil().clamp(1, count)
        ranks = torch.cat([ranks.new_tensor([1, count]), ranks]).unique()
        below = most_below(ranks, count, alpha / (len(ranks) * pairs))
        return Band(count, ranks.long(), torch.special.ndtri(1 - below))

    @property
    def limit(self) -> float:
        """The radius of samples that are all 1: no others have a larger one."""
        return max(0.0, float(self.score[0]))

    def radius(self, values: Tensor) -> Tensor:
        """Return how far (K,) the means stay positive of K functions with sorted `values` (K, n)."""
        chosen = values[:, self.ranks - 1]
        steps = chosen.diff(dim=1, prepend=chosen.new_full((len(chosen), 1), -1))
        return self._largest(lambda r: -1 + (steps * self._left(r)).sum(1), len(values), _ROUNDING)

    def at_least(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return less than `radius` (K,) by `mean` and `variance` (K,) of the samples alone, divisor n.

        A sample of a rank is no less than the mean of those from the rank before it on. So the sum is at
        least the mean of products of the samples with weights, which is at least the product of the means
        less that of the deviations.
        """
        share = self.ranks.double().diff(prepend=torch.zeros(1, dtype=torch.float64)) / self.count
        spread = variance.clamp_min(0).sqrt()

        def least(r: Tensor) -> Tensor:
            left = self._left(r)
            weight = left - torch.cat([left[:, 1:], torch.zeros(len(left), 1)], dim=1)
            deviation = ((weight.square() / share).sum(1) - left[:, 0].square()).clamp_min(0).sqrt()
            return left[:, 0] * mean - spread * deviation - (1 - left[:, 0])

        return (self._largest(least, len(mean), 2 * _ROUNDING) - _ROUNDING).clamp_min(0)

    def _left(self, radius: Tensor) -> Tensor:
        """Return what is left (K, m) of the probabilities of being above, at radii (K,)."""
        left: Tensor = torch.special.ndtr(self.score - radius[:, None])
        return left

    def _largest(self, bound: Callable[[Tensor], Tensor], many: int, least: float) -> Tensor:
        """Return radii (many,) at which a `bound` is more than `least`, by bisection, or 0."""
        low, high = torch.zeros(many).double(), torch.full((many,), self.limit, dtype=torch.float64)
        some = bound(low) > least
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            good = bound(middle) > least
            low, high = torch.where(good, middle, low), torch.where(good, high, middle)
        return torch.where(some, low, 0.0)


def most_below(ranks: Tensor, count: int, delta: float) -> Tensor:
    """Return what is below the samples of `ranks` (m,) at most, (m,), each but for a probability `delta`.

    `count` is the number of samples, and the ranks are from 1, the least one.

    >>> most_below(torch.tensor([1.0, 500.0]).double(), 1000, 1e-8)
    tensor([0.0183, 0.5876], dtype=torch.float64)
    """
    k = ranks.double() - 1
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    low, high = k / count, torch.ones_like(k)
    for _ in range(_HALVINGS):
        q = (low + high) / 2
        log = ways + torch.xlogy(k, q) + (count - k) * torch.log1p(-q)
        falls = k * (1 - q) / ((count - k + 1) * q)
        good = log - torch.log1p(-falls) <= math.log(delta) - _ROUNDING
        low, high = torch.where(good, low, q), torch.where(good, q, high)
    return high
