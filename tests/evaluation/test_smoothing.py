"""Smoothing: its bounds against scipy, plain loops and known means, and the network that is smoothed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import Draws
from robustmetric.distance import embed
from robustmetric.evaluation import smoothing
from robustmetric.evaluation.identity import digest_of
from robustmetric.evaluation.radius import Samples, sure_radius
from robustmetric.evaluation.smoothing import (
    Moments,
    Smoothed,
    certified_radius,
    largest_radius,
    least_samples,
    lower_bound,
    mean_error,
    noisy_embeddings,
    pair_error,
)
from robustmetric.perturb import differentiate, frozen

# The bounds


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


def test_both_bounds_are_in_use() -> None:
    """The one for all pairs is the better one where values differ much, the other where they agree."""
    variance = torch.tensor([0.0, 1.0]).double()
    low = lower_bound(torch.zeros(2).double(), variance, 1000, 0.001).tolist()
    agree, differ = pair_error(variance, 1000, 0.001).tolist()
    assert agree < mean_error(1000, 0.001) < differ
    assert low == [-agree, -mean_error(1000, 0.001)]


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


@pytest.mark.parametrize(
    ("function", "tight"),
    [
        (lambda x: 1.0 if x > -0.3 else -1.0, True),
        (lambda x: math.tanh(3 * x + 1), False),
        (lambda x: math.cos(4 * x), False),
        (lambda x: 1.0 if abs(x) < 0.6 else -1.0, False),
        (lambda x: 0.2, False),
    ],
)
def test_a_mean_that_is_moved_is_no_less_than_the_bound(
    function: Callable[[float], float], tight: bool
) -> None:
    sigma = 0.5

    def mean(x: float) -> float:
        edges = [point - x for point in (-0.6, -0.3, 0.6)]
        return float(quad(lambda t: function(x + t) * norm.pdf(t, scale=sigma), -5, 5, points=edges)[0])

    here = mean(0.0)
    assert here > 0
    for r in (0.05, 0.2, 0.5):
        bound = 2 * norm.cdf(norm.ppf((1 + here) / 2) - r / sigma) - 1
        least = min(mean(r), mean(-r))
        assert least >= bound - 1e-6  # the error that quad allows itself
        assert (abs(least - bound) < 1e-6) == tight


def samples_of(kind: str, trials: int, n: int) -> Tensor:
    """Samples (trials, n, D) of unit vectors whose expectation is zero."""
    generator = torch.Generator().manual_seed(3)
    if kind == "sphere":
        z = torch.randn(trials, n, 50, generator=generator).double()
        return torch.nn.functional.normalize(z, dim=2)
    return torch.randint(0, 2, (trials, n, 1), generator=generator).double() * 2 - 1


@pytest.mark.parametrize("kind", ["sphere", "line"])
def test_the_mean_of_vectors_is_as_near_as_it_is_said(kind: str) -> None:
    """In all directions they are as far as can be in the mean; on a line that varies most."""
    alpha, n, trials = 0.4, 25, 600
    away = samples_of(kind, trials, n).mean(1).norm(dim=1)
    assert int((away > mean_error(n, alpha)).sum()) <= alpha / 2 * trials
    if kind == "sphere":
        assert 0.95 / math.sqrt(n) < float(away.mean()) <= 1 / math.sqrt(n)
    else:  # the expectation alone is no bound
        assert int((away > 1 / math.sqrt(n)).sum()) > alpha / 2 * trials


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


# The samples


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


def test_many_rivals_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Moments.of([torch.eye(3)])
    rivals = torch.nn.functional.normalize(torch.rand(11, 3).double())
    whole = seen.margins(rivals[0], rivals)
    monkeypatch.setattr(smoothing, "_RIVALS", 4)
    for a, b in zip(whole, seen.margins(rivals[0], rivals), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)


class Seen(nn.Module):
    """Keeps the images that it is given, and returns their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.images.append(images.detach().clone())
        return images.flatten(1)


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_the_noise_of_an_image_does_not_depend_on_the_batch(batch: int) -> None:
    image = torch.full((1, 3, 3), 0.5)

    def seen(batch: int) -> Tensor:
        network = Seen()
        draws = Draws(0, "test", [4])
        list(noisy_embeddings(network, image, sigma=0.3, draws=draws, samples=20, batch=batch))
        assert all(len(part) <= batch for part in network.images)
        return torch.cat(network.images)

    assert seen(batch).equal(seen(20))


def test_the_noise_is_normal_and_not_clipped() -> None:
    network, image = Seen(), torch.full((1, 8, 8), 0.9)
    draws = Draws(0, "test", [0])
    list(noisy_embeddings(network, image, sigma=0.25, draws=draws, samples=500, batch=100))
    noise = (torch.cat(network.images) - image).flatten().double() / 0.25
    # 32,000 numbers: five deviations of the mean, of the variance and of the share above 1 are
    # 5/√32000, 5 √(2/32000) and 5 √(0.16 · 0.84/32000).
    assert abs(float(noise.mean())) < 0.028
    assert abs(float(noise.var()) - 1) < 0.04
    assert abs(float((noise > 1).double().mean()) - norm.sf(1)) < 0.011
    assert float(torch.cat(network.images).max()) > 1.2


# The network


@pytest.fixture
def few(images: Tensor) -> Tensor:
    return images[:5]


def test_a_smoothed_network_is_the_mean_of_embeddings(network: nn.Module, few: Tensor) -> None:
    smoothed = Smoothed(network, 0.2, samples=9, seed=3)
    found = smoothed(few).detach()
    for image, mean in zip(few, found, strict=True):
        total = torch.zeros(16)
        for noise in smoothed.noise(few):
            total += embed(network, (image + 0.2 * noise)[None])[0]
        # Nine numbers of at most 1 in single precision, through layers that round by the batch.
        torch.testing.assert_close(mean, total / 9, rtol=0, atol=2e-6)
    assert float(found.norm(dim=1).max()) < 1
    assert float((smoothed.noise(few).std() - 1).abs()) < 0.2


def test_it_is_a_function_of_the_images(network: nn.Module, few: Tensor) -> None:
    state = torch.get_rng_state()
    smoothed = Smoothed(network, 0.2, samples=9)
    assert smoothed(few).equal(smoothed(few))
    assert Smoothed(network, 0.2, samples=9)(few).equal(smoothed(few))
    # Another batch rounds otherwise.
    torch.testing.assert_close(smoothed(few[2:]), smoothed(few)[2:], rtol=0, atol=2e-6)
    assert not Smoothed(network, 0.2, samples=9, seed=1)(few).equal(smoothed(few))
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_few_noisy_images_are_held_at_once(network: nn.Module, few: Tensor, chunk: int) -> None:
    sizes: list[int] = []
    network.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    rows = torch.arange(5)

    def slope(chunk: int) -> tuple[Tensor, Tensor]:
        smoothed = Smoothed(network, 0.2, samples=6, chunk=chunk)
        sizes.clear()
        with frozen(smoothed):
            return smoothed(few), differentiate(lambda x, _: smoothed(x)[:, 0], few, rows)

    whole = slope(1000)
    assert sizes == [30, 30]
    found = slope(chunk)
    assert max(sizes) <= chunk
    for a, b in zip(found, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    assert float(whole[1].abs().max()) > 0.01


def test_the_gradient_holds_no_more_than_a_chunk(few: Tensor) -> None:
    """What is saved for the gradient is the images and the noise, and not what the network made of them."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 400), nn.Tanh(), nn.Linear(400, 4))

    def saved(chunk: int) -> int:
        smoothed, kept = Smoothed(network, 0.2, samples=32, chunk=chunk), 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with frozen(smoothed), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            smoothed(few.clone().requires_grad_())
        return kept

    assert saved(8) < saved(160) / 4


def test_it_can_be_evaluated_and_attacked(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    smoothed = Smoothed(network, 0.1, samples=4)
    how: dict[str, Any] = {"steps": 2, "queries": 8, "attacks": ["ES"], "checks": "none", "eps": 0.1}
    record = rm.evaluate(smoothed, images, labels, **how)
    assert record.scores["ES:D"].value is not None
    assert record.scores["ES:D"].value > 0


def test_its_digest_tells_the_noise(network: nn.Module) -> None:
    different = [Smoothed(network, 0.1), Smoothed(network, 0.2), Smoothed(network, 0.1, 8)]
    different.append(Smoothed(network, 0.1, seed=1))
    assert len({digest_of(each) for each in different}) == 4
    assert digest_of(Smoothed(network, 0.1)) == digest_of(different[0])
    assert list(different[0].state_dict()) == [f"model.{name}" for name in network.state_dict()]


@pytest.mark.parametrize("sigma", [0, -0.1, 10.5, math.nan, math.inf, "much", True, None])
def test_a_noise_that_cannot_be_is_refused(sigma: Any) -> None:
    with pytest.raises(
        rm.UserError, match=r"sigma must be in \(0, 10\], not .*: it is the deviation"
    ) as told:
        Smoothed(nn.Flatten(), sigma)
    assert told.value.parameter == "sigma"


@pytest.mark.parametrize("name", ["samples", "chunk"])
def test_a_number_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(rm.UserError, match=f"{name} must be a whole number of at least 1, not 0"):
        Smoothed(nn.Flatten(), 0.1, **{name: 0})
    with pytest.raises(rm.UserError, match=r"seed must be a whole number of at least 0, not -1"):
        Smoothed(nn.Flatten(), 0.1, seed=-1)
    with pytest.raises(rm.UserError, match=r"the network must be a torch.nn.Module, not a function"):
        Smoothed(embed, 0.1)  # type: ignore[arg-type]


def test_noise_that_does_not_fit_is_refused_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Seen()
    monkeypatch.setattr(smoothing, "free_memory", lambda: 2**30)
    monkeypatch.setattr(Draws, "normal", lambda *_: pytest.fail("noise was drawn"))
    with pytest.raises(rm.UserError) as told:
        Smoothed(network, 0.1, samples=10_000)(torch.rand(1, 3, 224, 224))
    assert str(told.value) == (
        "samples is 10,000: noise for images of shape (3, 224, 224) would take 5.6 GiB of memory, and "
        "1.0 GiB are free: give at most 1,783"
    )
    assert told.value.parameter == "samples"
    assert not network.images
    # As many as it says do fit, and one more does not.
    smoothing.check_noise(1783, (3, 224, 224))
    with pytest.raises(rm.UserError):
        smoothing.check_noise(1784, (3, 224, 224))


def test_where_the_memory_is_not_known_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert smoothing.free_memory() is None
    smoothing.check_noise(10**9, (3, 224, 224))
