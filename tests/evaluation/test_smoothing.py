"""Smoothing: noise and the network that is smoothed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import Draws
from robustmetric.evaluation import smoothing
from robustmetric.evaluation.identity import digest_of
from robustmetric.evaluation.smoothing import Smoothed, noisy_embeddings
from robustmetric.perturb import differentiate, frozen
from robustmetric.sphere import embed


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


def test_its_digest_tells_the_noise(network: nn.Module) -> None:
    different = [Smoothed(network, 0.1), Smoothed(network, 0.2), Smoothed(network, 0.1, 8)]
    different.append(Smoothed(network, 0.1, seed=1))
    assert len({digest_of(each) for each in different}) == 4
    assert digest_of(Smoothed(network, 0.1)) == digest_of(different[0])
    assert list(different[0].state_dict()) == [f"model.{name}" for name in network.state_dict()]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"sigma": v}, r"sigma must be in \(0, 10\]") for v in (0, 10.5, math.nan, "much", None)),
        ({"samples": 0}, "samples must be a whole number of at least 1, not 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"model": embed}, "the network must be a Module, not a"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(rm.UserError, match=told):
        Smoothed(**{"model": nn.Flatten(), "sigma": 0.1, **options})


def test_noise_that_does_not_fit_is_refused_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoothing, "free_memory", lambda: 2**30)
    monkeypatch.setattr(Draws, "normal", lambda *_: pytest.fail("noise was drawn"))
    told = r"samples is 10,000: noise for images of shape \(3, 224, 224\) .* give at most 1,783$"
    with pytest.raises(rm.UserError, match=told):
        Smoothed(Seen(), 0.1, samples=10_000)(torch.rand(1, 3, 224, 224))
    # As many as it says do fit, and one more does not.
    smoothing.check_noise(1783, (3, 224, 224))
    with pytest.raises(rm.UserError):
        smoothing.check_noise(1784, (3, 224, 224))
