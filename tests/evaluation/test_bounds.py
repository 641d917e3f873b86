"""Bounds of margins under noise: against plain loops, scipy and known truths."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm
from torch import Tensor

from robustmetric.evaluation import bounds
from robustmetric.evaluation.bounds import (
    Band,
    Moments,
    Samples,
    certified_radius,
    directions,
    largest_radius,
    least_above,
    least_samples,
    lower_bound,
    pair_error,
    sure_radius,
)

# By the mean


def plain_bound(values: list[list[float]], alpha: float) -> list[float]:
    """The lower bounds of K means from their n samples in [−1, 1], as they are written in the papers."""
    found = []
    for samples in values:
        n, k = len(samples), len(values)
        mean = sum(samples) / n
        variance = sum((a - b) ** 2 for a in samples for b in samples) / (2 * n * (n - 1))
        # Maurer and Pontil, theorem 4, of values in [0, 1] and of one mean with δ = α/2K; here twice as wide.
        delta = alpha / 2 / k
        unit = math.sqrt(2 * variance / 4 * math.log(2 / delta) / n) + 7 * math.log(2 / delta) / (3 * (n - 1))
        # McDiarmid, of differences of 2/n each: exp(−2t²/(n (2/n)²)) = α/2.
        vector = 1 / math.sqrt(n) + math.sqrt(math.log(2 / alpha) * n * (2 / n) ** 2 / 2)
        found.append(mean - min(2 * unit, vector))
    return found


@pytest.mark.parametrize(("n", "alpha", "sharp"), [(40, 0.001, 1.0), (60, 0.1, 0.02), (30, 0.4, 0.5)])
def test_the_bounds_are_those_of_the_papers(n: int, alpha: float, sharp: float) -> None:
    generator = torch.Generator().manual_seed(n)
    values = (0.3 + sharp * torch.randn(5, n, generator=generator).double()).clamp(-1, 1)
    found = lower_bound(values.mean(1), values.var(1), n, alpha)
    # Sums of 60 terms in double precision.
    torch.testing.assert_close(found.tolist(), plain_bound(values.tolist(), alpha), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.12, 1.0])
def test_the_radius_is_that_of_neyman_and_pearson(sigma: float) -> None:
    low = torch.linspace(0.001, 0.999, 41).double()
    found = certified_radius(low, sigma)
    # torch's and scipy's quantiles agree to the last digits.
    np.testing.assert_allclose(found, sigma * norm.ppf((1 + low.numpy()) / 2), rtol=1e-10)
    assert certified_radius(torch.tensor([0.0, -0.3]), sigma).tolist() == [0, 0]


def test_the_radius_is_never_smaller_than_that_of_retrieval_guard() -> None:
    """Theirs: 2 (2Φ(r/2σ) − 1) < (d_n − d_p)/2, of the distances of g(x) itself."""
    generator, sigma, larger = torch.Generator().manual_seed(0), 0.25, 0
    for _ in range(500):
        g, p, n = torch.nn.functional.normalize(torch.randn(3, 3, generator=generator).double())
        g = g * torch.rand(1, generator=generator)
        near, far = float((g - p).norm()), float((g - n).norm())
        if near >= far:
            continue
        theirs = 2 * sigma * norm.ppf(0.5 + (far - near) / 8)
        ours = float(certified_radius(g @ (p - n) / (p - n).norm(), sigma))
        assert ours >= theirs - 1e-12
        larger += ours > 1.5 * theirs
    assert larger > 100


def test_the_bounds_of_many_pairs_hold_together() -> None:
    """50 means of independent values of mean zero: the bound of a single pair would fail for some of them."""
    alpha, n, trials, pairs = 0.4, 10**6, 300, 50
    generator = np.random.default_rng(3)
    failed = alone = 0
    for ups in generator.binomial(n, 0.5, (trials, pairs)):
        mean = torch.from_numpy(2 * ups / n - 1) / math.sqrt(pairs)  # of signs over √50, as in a unit vector
        variance = (1 / pairs - mean.square()) * n / (n - 1)
        failed += bool((mean > pair_error(variance, n, alpha)).any())
        single = torch.cat([pair_error(v, n, alpha) for v in variance.split(1)])
        alone += bool((mean > single).any())
    assert failed <= alpha / 2 * trials < alone


def test_lower_bounds_are_below_the_truth() -> None:
    """A half-space, whose mean is known: the bounds fail no more often than they may."""
    alpha, n, trials, p = 0.3, 60, 2000, 0.8
    generator = torch.Generator().manual_seed(5)
    hits = (torch.rand(trials, n, generator=generator) < p).double() * 2 - 1
    low = torch.stack([lower_bound(v.mean()[None], v.var()[None], n, alpha) for v in hits])
    assert int((low > 2 * p - 1).sum()) <= alpha * trials
    assert float(low.mean()) > 0  # and they say something


@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.4])
def test_with_fewer_samples_nothing_can_be_certified(alpha: float) -> None:
    least = least_samples(alpha)
    assert largest_radius(1.0, least, alpha) > 0 == largest_radius(1.0, least - 1, alpha)
    agree = [torch.tensor([[1.0, 0.0]]).expand(n, 2) for n in (least - 1, least)]
    anchor, rivals = torch.tensor([1.0, 0.0]).double(), torch.tensor([[-1.0, 0.0]]).double()
    found = [sure_radius(Samples.of([z], len(z)), anchor, rivals, sigma=1, alpha=alpha) for z in agree]
    assert found == [0, pytest.approx(largest_radius(1.0, least, alpha), abs=1e-6)]


def test_margins_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.nn.functional.normalize(torch.randn(30, 4, generator=generator).double())
    rivals = torch.nn.functional.normalize(torch.randn(7, 4, generator=generator).double())
    anchor = rivals[2].clone()
    seen = Moments.of(z.split(8))
    mean, variance = seen.margins(anchor, rivals)
    assert seen.count == 30
    for k, rival in enumerate(rivals):
        way = anchor - rival
        values = np.array([float(x @ way) / (float(way.norm()) or 1.0) for x in z])
        # Sums of 30 products in double precision.
        assert float(mean[k]) == pytest.approx(values.mean(), abs=1e-13)
        assert float(variance[k]) == pytest.approx(values.var(ddof=1), abs=1e-13)
    assert float(mean[2]) == float(variance[2]) == 0  # a copy has no direction


# By the distribution


def plain_radius(values: list[float], pairs: int, alpha: float) -> float:
    """The radius over σ of samples in [−1, 1], as it is written: one of so many pairs, but for alpha."""
    n = len(values)
    far = -norm.ppf(1 / n)
    ranks = {1, n} | {min(n, max(1, math.ceil(n * norm.cdf(far * (2 * k / 127 - 1))))) for k in range(128)}
    # Ranks at which the quantiles of torch and scipy may round to either side are few.
    ranks &= set(Band.of(n, pairs, alpha).ranks.tolist())
    s = sorted(values)
    above = {i: 1 - beta.isf(alpha / (pairs * len(ranks)), i, n + 1 - i) for i in ranks}

    def low(r: float) -> float:
        total, before = -1.0, -1.0
        for i in sorted(ranks):
            total += (s[i - 1] - before) * norm.cdf(norm.ppf(above[i]) - r)
            before = s[i - 1]
        return total

    if low(0) <= 0:
        return 0.0
    inner, outer = 0.0, 6.0
    while outer - inner > 1e-7:
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if low(middle) > 0 else (inner, middle)
    return inner


def some_values(kind: str, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, generator=generator).double()
    made = {"narrow": 0.2 + 0.05 * z, "wide": 0.5 + 0.4 * z, "two": torch.where(z > -1, 0.7, -0.7).double()}
    return made[kind].clamp(-1, 1)


@pytest.mark.parametrize("kind", ["narrow", "wide", "two"])
@pytest.mark.parametrize(("n", "pairs", "alpha"), [(40, 3, 0.2), (1000, 100, 0.0005)])
def test_the_distribution_s_bound_is_that_of_a_loop(kind: str, n: int, pairs: int, alpha: float) -> None:
    values = some_values(kind, n)
    found = float(Band.of(n, pairs, alpha).radius(values.sort().values[None]))
    plain = plain_radius(values.tolist(), pairs, alpha)
    assert found == pytest.approx(plain, abs=2e-7)
    assert plain > 0 or kind == "narrow"


@pytest.mark.parametrize("n", [1, 2, 15, 100])
@pytest.mark.parametrize("delta", [1e-9, 1e-4, 0.2])
def test_what_is_above_a_rank_is_known_but_for_delta_by_a_sum_of_binomials(n: int, delta: float) -> None:
    """P(Bin(n, q) ≤ i − 1) is delta less a millionth of it, which covers the rounding of the quantile."""
    ranks = torch.arange(1, n + 1)
    for i, above in zip(ranks.tolist(), least_above(ranks, n, delta).tolist(), strict=True):
        p = Fraction(above)
        fails = sum(math.comb(n, k) * (1 - p) ** k * p ** (n - k) for k in range(i))
        assert (1 - 1.01e-6) * delta <= fails <= (1 - 0.99e-6) * delta


def test_the_band_is_left_no_more_often_than_it_may() -> None:
    """Uniform numbers, whose distribution is known: all ranks at once, and with ties."""
    alpha, n, trials = 0.3, 60, 3000
    s = torch.rand(trials, n, generator=torch.Generator().manual_seed(1)).double().sort(1).values
    band = Band.of(n, 1, alpha)
    most = 1 - torch.special.ndtr(band.score)
    left = (s[:, band.ranks - 1] > most).any(1)
    assert 0 < int(left.sum()) <= alpha * trials
    coarse = (s * 4).ceil() / 4  # P(s < t) of the multiples of a quarter
    assert int(((coarse - 0.25)[:, band.ranks - 1] > most).any(1).sum()) <= alpha * trials


def test_no_radius_is_larger_than_the_truth() -> None:
    """s = a + bx of the noise x on a line, clipped: the bound is the truth but for the samples."""
    alpha, n, trials = 0.3, 1000, 200
    a, b = 0.12, 0.1
    truth = a / b  # where the mean is zero, in deviations: s is symmetric there
    noise = torch.randn(trials, n, generator=torch.Generator().manual_seed(2)).double()
    s = (a + b * noise).clamp(-1, 1).sort(1).values
    found = Band.of(n, 1, alpha).radius(s)
    assert int((found > truth).sum()) <= alpha * trials
    assert float(found.mean()) > 0.5 * truth
    mean = certified_radius(lower_bound(s.mean(1), s.var(1), n, alpha), 1.0)
    assert float(found.mean()) > 5 * float(mean.mean())


def test_a_moved_mean_is_no_less_than_the_bound_by_the_distribution() -> None:
    """The mean at the moved point, by many quantiles of the noise; the bound from where it is not moved."""
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.tanh(x + 0.8),
        lambda x: (0.5 * x).cos(),
        lambda x: torch.where(x.abs() < 1.5, 0.6, -1.0).double(),
    ]
    x = torch.from_numpy(norm.ppf((np.arange(20_000) + 0.5) / 20_000))
    for function in functions:
        band = Band.of(20_000, 1, 0.4)
        here = function(x).sort().values[None]
        radius = float(band.radius(here))
        assert radius > 0.1
        for r in np.linspace(0, radius, 5):
            assert min(float(function(x + r).mean()), float(function(x - r).mean())) > 0


def query(seed: int, n: int = 400, rivals: int = 60) -> tuple[Samples, Tensor, Tensor]:
    """Samples about an anchor, and rivals on the sphere, some near."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.nn.functional.normalize
    anchor = normal(torch.randn(8, generator=generator).double(), dim=0)
    others = normal(anchor + 0.8 * torch.randn(rivals, 8, generator=generator).double())
    z = normal(anchor + (0.05 + 0.03 * seed) * torch.randn(n, 8, generator=generator).double()).float()
    return Samples.of(z.split(64), n), anchor, others


HOW: dict[str, Any] = {"sigma": 0.5, "alpha": 0.01}


def test_a_radius_is_the_least_of_all_pairs_and_each_the_larger_of_two() -> None:
    for seed in range(4):
        seen, anchor, others = query(seed)
        z = bounds.exact(seen.z)
        found = []
        low = lower_bound(*seen.moments.margins(anchor, others), 400, 0.01 / 2)
        for k in range(60):
            s = z @ directions(anchor, others[k : k + 1])[0]
            band = float(Band.of(400, 60, 0.01 / 2).radius(s.sort().values[None]))
            found.append(0.5 * max(float(certified_radius(low[k], 1.0)), band))
        radius = sure_radius(seen, anchor, others, **HOW)
        assert radius == pytest.approx(min(found), abs=1e-9)
        assert radius >= float(certified_radius(low, 0.5).min())


def test_pairs_that_are_left_out_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    original = Samples.sorted

    def watched(self: Samples, ways: Tensor) -> Tensor:
        looked.append(len(ways))
        return original(self, ways)

    monkeypatch.setattr(Samples, "sorted", watched)
    for seed in range(6):
        seen, anchor, others = query(seed)
        expected, few = [], 0
        for at_once in (1, 16, 60):
            looked.clear()
            monkeypatch.setattr(bounds, "_PAIRS", at_once)
            expected.append(sure_radius(seen, anchor, others, **HOW))
            few = few or sum(looked)
        looked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Band, "at_least", lambda self, mean, variance: 0 * mean - 1)
            patch.setattr(bounds, "certified_radius", lambda low, sigma: 0 * low)
            every = sure_radius(seen, anchor, others, **HOW)
        assert sum(looked) == 60
        assert few < 30
        # Sums of 8 products in another order.
        assert expected == pytest.approx([every] * 3, abs=1e-9)
