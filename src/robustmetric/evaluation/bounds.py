"""How far an image's ranking by a smoothed network is certain, from samples of its embedding with noise.

h(x) is the embedding on the unit sphere, and g(x) = E h(x + δ) with δ ~ N(0, σ²I) the smoothed network, which
ranks by the direction of g(x). Of two images of a gallery with vectors v_p and v_n on the unit sphere, p is
the nearer one if ⟨g(x), v_p − v_n⟩ > 0, that is if m(x) = E s > 0 for s = ⟨h(x + δ), w⟩ with w the direction
of v_p − v_n. s is in [−1, 1]. Two bounds say how far m stays positive, each with half of the failure
probability; the radius of a pair is the larger one, that of a query the least of all its pairs.

By the mean. By the lemma of Neyman and Pearson the mean of (1 + s)/2, moved by at most r, is least if s is
that of a half-space (Cohen et al., "Certified Adversarial Robustness via Randomized Smoothing", ICML 2019;
Salman et al., NeurIPS 2019). So within r of x

    m ≥ 2Φ(Φ⁻¹((1 + m(x))/2) − r/σ) − 1,  which is positive as long as  r < σ Φ⁻¹((1 + m(x))/2).

This is the setting of RetrievalGuard (Wu, Zhang and Huang, "RetrievalGuard: Provably Robust 1-Nearest
Neighbor Image Retrieval", ICML 2022, arXiv 2206.11225). There g is bounded as a whole: ‖g(x) − g(x')‖ is at
most 2(2Φ(r/2σ) − 1), which must be less than half of what n is farther than p. That difference is at most 2m,
because it is 2⟨g, v_p − v_n⟩ over the sum of both distances, so the radius there is at most 2σΦ⁻¹(1/2 + m/4).
Φ⁻¹ is convex above 1/2: the radius here is never the smaller one.

m is estimated by n samples h_1 … h_n with mean ĝ. Two bounds hold together but for α, each but for α/2:

- ‖ĝ − g‖ ≤ (1 + √(2 ln(2/α)))/√n, for all pairs at once. Its expectation is at most 1/√n, since vectors of
  length 1 have a variance of at most 1; one sample changes it by at most 2/n, and McDiarmid's inequality says
  P(‖ĝ − g‖ ≥ 1/√n + t) ≤ exp(−nt²/2).
- m ≥ m̂ − √(2V ln(2K/(α/2))/n) − 14 ln(2K/(α/2))/(3(n − 1)) for each of K pairs, with V the sample variance
  of s: the empirical Bernstein bound of Maurer and Pontil (COLT 2009, theorem 4) for values in a range of 2.

By the distribution. The mean of s is −1 + ∫ P(s > t) dt, with t from −1 to 1. Each of these probabilities P
becomes at least Φ(Φ⁻¹(P) − r/σ) if the image is moved by at most r (Kumar et al., "Certifying Confidence via
Randomized Smoothing", NeurIPS 2020). So with sorted samples s_(1) ≤ … ≤ s_(n) the mean, moved by at most r,
is at least

    −1 + Σ_j (s_(i_j) − s_(i_{j−1})) Φ(Φ⁻¹(1 − q_j) − r/σ),  with −1 in the place of s_(i_0),

for any ranks i_1 < … < i_m = n of which P(s < s_(i_j)) ≤ q_j is known. `least_above` knows each but for
α/(mK): then all m ranks of K pairs hold together but for α. The ranks depend on n alone. Where all samples
agree, 1 − q_1 is about ln(mK/α)/n; a band that is as wide everywhere (Dvoretzky, Kiefer, Wolfowitz and
Massart) has √(ln(2K/α)/2n) there, and that counts for all of the way from −1 to s_(1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_RANKS = 128  # more of them are nearer to the distribution, and have a share of alpha each
_HALVINGS = 60
_ROUNDING = 1e-9  # sums of products of n vectors in double precision are nearer to what they should be
_COPY = 1e-12  # vectors of the gallery that are nearer have no direction but that of rounding
_RIVALS = 4096  # images of other classes whose moments are computed together
_PAIRS = 16  # images of other classes whose samples are sorted together
_VALUES = 2**22  # products that are held at once, of a pair all
_ROWS = 2048  # samples that are in double precision at once


def mean_error(samples: int, alpha: float) -> float:
    """Return how far the mean of `samples` unit vectors is from their expectation, but for `alpha`/2.

    >>> round(mean_error(1000, 0.001), 4)
    0.1549
    """
    return (1 + math.sqrt(2 * math.log(2 / alpha))) / math.sqrt(samples)


def pair_error(variance: Tensor, samples: int, alpha: float) -> Tensor:
    """Return how far the means of K values in [−1, 1] are above their expectations, but for `alpha`/2 in all.

    `variance` (K,) is that of the `samples` of each, with samples − 1 as divisor; so is the result.
    """
    log = math.log(2 * max(1, variance.numel()) / (alpha / 2))
    return (2 * log / samples * variance).sqrt() + 7 * 2 * log / (3 * (samples - 1))


def lower_bound(mean: Tensor, variance: Tensor, samples: int, alpha: float) -> Tensor:
    """Return lower bounds (K,) of the expectations of K margins, which hold together but for `alpha`.

    `mean` and `variance` (K,) are those of `samples` values in [−1, 1], the products of one and the same unit
    vector with K others.

    >>> lower_bound(torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.5]), 1001, 0.001)
    tensor([0.9581, 0.3633])
    """
    return mean - pair_error(variance, samples, alpha).clamp_max(mean_error(samples, alpha))


def certified_radius(low: Tensor, sigma: float) -> Tensor:
    """Return within which distances margins of at least `low` (…,) stay positive at noise `sigma`, or 0.

    >>> certified_radius(torch.tensor([0.6827, 0.0, -0.5]), 0.25)
    tensor([0.2500, 0.0000, 0.0000])
    """
    radius: Tensor = sigma * torch.special.ndtri((1 + low.clamp_min(0)) / 2)
    return radius


def largest_radius(sigma: float, samples: int, alpha: float, rivals: int = 1) -> float:
    """Return the radius of an image that all `samples` agree on: no other has a larger one.

    The noise is `sigma`, a bound fails with probability `alpha`, and there are so many `rivals`.

    >>> round(largest_radius(0.25, 1000, 0.001, rivals=100), 4)
    0.5312
    """
    ones = torch.ones(rivals, dtype=torch.float64)
    by_mean = float(certified_radius(lower_bound(ones, 0 * ones, samples, alpha / 2)[:1], sigma))
    return max(by_mean, sigma * Band.of(samples, rivals, alpha / 2).limit)


def least_samples(alpha: float) -> int:
    """Return how many samples it takes to certify anything but for a probability of `alpha`.

    >>> least_samples(0.001), least_samples(0.1)
    (15, 8)
    """
    samples = 2
    while largest_radius(1.0, samples, alpha) <= 0:
        samples += 1
    return samples


def least_above(ranks: Tensor, count: int, delta: float) -> Tensor:
    """Return what probability (m,) is at or above the samples of `ranks` (m,) at least, each but for `delta`.

    Of n = `count` samples, P(s < s_(i)) is at most the i-th smallest of n uniform numbers. That exceeds q if
    at most i − 1 of them are below q, with probability P(Bin(n, q) ≤ i − 1), which falls as q grows: the q
    where it is `delta` is an upper bound of P(s < s_(i)), and no smaller one holds for all distributions. One
    minus the i-th smallest has the law Beta(n − i + 1, i): 1 − q is its `delta`-quantile.

    >>> least_above(torch.tensor([1, 500]), 1000, 1e-8)
    tensor([0.9817, 0.4125], dtype=torch.float64)
    """
    from scipy.special import betaincinv  # slow to import, and not needed to train

    ranks = ranks.double()
    delta *= 1 - 1e-6  # more than the quantile is rounded by
    return torch.from_numpy(betaincinv((count - ranks + 1).numpy(), ranks.numpy(), delta))


@dataclass(frozen=True, eq=False)
class Band:
    """Ranks (m,) of `count` sorted samples, from 1 to `count`, and `score` (m,), Φ⁻¹(1 − q) of each.

    All in double precision. Radii here are in deviations of the noise, r/σ.
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
        ranks = torch.cat([ranks.new_tensor([1, count]), ranks]).unique().long()
        above = least_above(ranks, count, alpha / (len(ranks) * pairs))
        return Band(count, ranks, torch.special.ndtri(above))

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


@dataclass(frozen=True)
class Moments:
    """What is kept of `count` embeddings on the unit sphere: their sum `total` (D,) and their products.

    `square` (D, D) is the sum of the products of each with itself; both are in double precision.
    """

    count: int
    total: Tensor
    square: Tensor

    @classmethod
    def of(cls, parts: Iterable[Tensor]) -> Moments:
        """Sum embeddings that come in `parts` (B, D), of which there is at least one."""
        count, total, square = 0, torch.zeros(()), torch.zeros(())
        for part in parts:
            z = exact(part)
            count, total, square = count + len(z), total + z.sum(0), square + z.T @ z
        return cls(count, total, square)

    @property
    def mean(self) -> Tensor:
        """The mean (D,)."""
        return self.total / self.count

    def margins(self, anchor: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance (K,) of the products with the directions from K `rivals` to an `anchor`.

        The anchor (D,) and the rivals (K, D) are on the unit sphere; a copy of the anchor has margin 0.
        """
        scatter = self.square - self.count * self.mean.outer(self.mean)
        found = []
        for some in rivals.split(_RIVALS):
            way = directions(anchor, some)
            spread = ((way @ scatter) * way).sum(1).clamp_min(0) / max(1, self.count - 1)
            found.append(torch.stack([way @ self.mean, spread]))
        mean, variance = torch.cat(found, dim=1)
        return mean, variance


@dataclass(frozen=True, eq=False)
class Samples:
    """All embeddings `z` (n, D) of a query with noise, in single precision, and their `moments`."""

    z: Tensor
    moments: Moments

    @classmethod
    def of(cls, parts: Iterable[Tensor], count: int) -> Samples:
        """Keep `count` embeddings that come in `parts` (B, D)."""
        z, begin = torch.zeros(0), 0
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


def mean_of(parts: Iterable[Tensor]) -> Tensor:
    """Return the mean (D,) of embeddings that come in `parts` (B, D), of which there is at least one."""
    count, total = 0, torch.zeros(())
    for part in parts:
        count, total = count + len(part), total + exact(part).sum(0)
    return total / count


def directions(anchor: Tensor, rivals: Tensor) -> Tensor:
    """Return the directions (K, D) from K `rivals` (K, D) to an `anchor` (D,): zero for a copy of it."""
    way = anchor - rivals
    length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
    return torch.where(length > _COPY, way / length.clamp_min(_COPY), 0.0)


def exact(z: Tensor) -> Tensor:
    """Return embeddings (B, D) of length 1 in double precision too."""
    z = z.detach().cpu().double()
    unit: Tensor = z / torch.linalg.vector_norm(z, dim=1, keepdim=True)
    return unit
