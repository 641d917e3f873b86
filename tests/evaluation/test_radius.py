"""Radii by the distribution of a margin: against plain loops, scipy and known truths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm
from torch import Tensor

from robustmetric.evaluation import band as bands
from robustmetric.evaluation import radius as radii
from robustmetric.evaluation import smoothing
from robustmetric.evaluation.band import Band, most_below
from robustmetric.evaluation.radius import Samples, sure_radius
from robustmetric.evaluation.smoothing import certified_radius, directions, lower_bound
from robustmetric.validate import UserError


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
    # Its tail of the binomial is a bound, not the exact one: so it is a little less, and never more.
    assert plain - 0.01 <= found <= plain + 2e-7
    assert plain > 0 or kind == "narrow"


@pytest.mark.parametrize("n", [2, 15, 100, 10_000])
@pytest.mark.parametrize("delta", [1e-9, 1e-4, 0.2])
def test_quantiles_of_ranks_are_no_less_than_the_exact_ones(n: int, delta: float) -> None:
    ranks = Band.of(n, 1, 0.1).ranks.double()
    found, exact = most_below(ranks, n, delta).numpy(), beta.isf(delta, ranks, n + 1 - ranks)
    assert (found >= exact - 1e-14).all()
    slack = 0.2 * math.sqrt(1 / n) if delta > 0.1 else 0.01 / math.sqrt(n)
    assert (found - exact).max() <= slack
    assert found[0] == pytest.approx(1 - delta ** (1 / n), rel=1e-6)


def test_ranks_are_ascending_from_the_first_to_the_last() -> None:
    for n in (2, 3, 15, 100, 5000):
        ranks = Band.of(n, 10, 0.01).ranks
        assert ranks[0] == 1
        assert ranks[-1] == n
        assert (ranks.diff() > 0).all()
        assert len(ranks) <= bands._RANKS + 2
        assert (Band.of(n, 10, 0.01).score.diff() < 0).all()


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


def test_a_mean_that_is_moved_is_no_less_than_the_bound() -> None:
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


def test_more_samples_certify_more() -> None:
    means = []
    for n in (50, 200, 1000, 5000):
        rows = torch.stack([some_values("narrow", n, seed) for seed in range(10)]).sort(1).values
        means.append(float(Band.of(n, 100, 0.0005).radius(rows).mean()))
    assert means == sorted(means)
    assert means[-1] > 2 * means[1] > 0


def test_less_alpha_or_more_pairs_certify_less() -> None:
    row = some_values("narrow", 500).sort().values[None]
    found = [float(Band.of(500, k, a).radius(row)) for k, a in ((1, 0.1), (1, 0.001), (99, 0.001))]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3


def test_moments_say_no_more_than_the_samples() -> None:
    generator = torch.Generator().manual_seed(4)
    for n in (15, 1000, 5000):
        centre = 0.9 * torch.rand(40, 1, generator=generator).double()
        width = 0.3 * torch.rand(40, 1, generator=generator).double()
        noise = torch.randn(40, n, generator=generator).double()
        s = (centre + width * noise * noise.abs() ** 0.5).clamp(-1, 1).sort(1).values
        band = Band.of(n, 7, 0.1)
        rough, found = band.at_least(s.mean(1), s.var(1, correction=0)), band.radius(s)
        assert (rough <= found).all()
        assert n == 15 or (rough > 0.5 * found).float().mean() > 0.3


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
        z = smoothing.exact(seen.z)
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
            monkeypatch.setattr(radii, "_PAIRS", at_once)
            expected.append(sure_radius(seen, anchor, others, **HOW))
            few = few or sum(looked)
        looked.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Band, "at_least", lambda self, mean, variance: 0 * mean - 1)
            patch.setattr(radii, "certified_radius", lambda low, sigma: 0 * low)
            every = sure_radius(seen, anchor, others, **HOW)
        assert sum(looked) == 60
        assert few < 30
        # Sums of 8 products in another order.
        assert expected == pytest.approx([every] * 3, abs=1e-9)


def test_halves_of_alpha_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each bound is told may fail adds up to alpha, of all pairs, ranks and both bounds of the mean."""
    given: dict[str, float] = {}
    seen, anchor, others = query(0)
    real, below = lower_bound, bands.most_below

    def mean(*args: Any) -> Tensor:
        given["mean"] = args[3]
        return real(*args)

    def rank(ranks: Tensor, count: int, delta: float) -> Tensor:
        given["band"] = delta * len(ranks) * len(others)
        return below(ranks, count, delta)

    monkeypatch.setattr(radii, "lower_bound", mean)
    monkeypatch.setattr(bands, "most_below", rank)
    Band.of.cache_clear()
    sure_radius(seen, anchor, others, **HOW)
    assert given["mean"] + given["band"] == pytest.approx(0.01, rel=1e-12)


def test_a_copy_of_the_anchor_is_certified_nowhere() -> None:
    seen, anchor, others = query(0)
    assert sure_radius(seen, anchor, others, **HOW) > 0
    assert sure_radius(seen, anchor, torch.cat([others, anchor[None]]), **HOW) == 0


def test_samples_are_kept_in_single_precision_whatever_the_parts() -> None:
    z = torch.nn.functional.normalize(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))
    for size in (1, 7, 50):
        seen = Samples.of(iter(z.split(size)), 50)
        assert seen.z.equal(z)
        assert seen.moments.total.equal(Samples.of([z], 50).moments.total)
    ways = directions(z[0].double(), z[1:4].double())
    assert seen.sorted(ways).numpy() == pytest.approx(
        np.sort(ways.numpy() @ z.numpy().T.astype(float)), abs=1e-6
    )


def test_more_samples_than_the_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoothing, "free_memory", lambda: 2**30)
    with pytest.raises(UserError) as told:
        smoothing.check_samples(10**6, 512)
    assert str(told.value) == (
        "samples is 1,000,000: the embeddings of length 512 of one query would take 1.9 GiB of memory, and "
        "1.0 GiB are free: give at most 520,223"
    )
    smoothing.check_samples(520_223, 512)
    monkeypatch.setattr(smoothing, "free_memory", lambda: None)
    smoothing.check_samples(10**12, 512)


def test_pairs_are_left_out_by_what_is_known_of_them_and_not_by_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A skewed margin comes first, by its deviation, and has the larger radius: the second one decides."""
    generator = torch.Generator().manual_seed(0)
    rare = torch.where(torch.rand(3000, generator=generator) < 0.1, 0.9, 0.0)
    usual = 0.08 * torch.randn(3000, generator=generator)
    z = torch.stack([(1 - rare**2 - usual**2).clamp_min(0).sqrt(), rare, usual], dim=1)
    anchor = torch.tensor([1.0, 0.0, 0.0]).double()
    ways = torch.nn.functional.normalize(torch.tensor([[0.15, 1.0, 0.0], [0.2, 0.0, 1.0]]).double())
    rivals = anchor - 2 * (ways @ anchor)[:, None] * ways
    seen, band = Samples.of([z], 3000), Band.of(3000, 2, 0.005)
    mean, variance = seen.moments.margins(anchor, rivals)
    known, found = band.at_least(mean, variance), band.radius(seen.sorted(ways))
    assert known[0] < known[1] < found[1] < 0.9 * found[0]
    monkeypatch.setattr(radii, "_PAIRS", 1)
    assert sure_radius(seen, anchor, rivals, **HOW) == pytest.approx(0.5 * float(found[1]), abs=1e-9)
