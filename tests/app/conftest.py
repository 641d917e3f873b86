"""Two networks that see the same images, to be attacked on one query at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.app import Trial
from robustmetric.attacks import ATTACKS
from robustmetric.perturb import frozen


def network(seed: int) -> nn.Module:
    """A small network that is not linear, drawn from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, 8))


@pytest.fixture(scope="session")
def images() -> tuple[Tensor, Tensor]:
    """60 images (1, 6, 6) of 4 classes that look a little alike, and their labels."""
    drawn = torch.Generator().manual_seed(5)
    labels = torch.arange(60) % 4
    centres = torch.rand(4, 1, 6, 6, generator=drawn)
    return (centres[labels] + 0.6 * torch.rand(60, 1, 6, 6, generator=drawn)) / 1.6, labels


@pytest.fixture
def make_trial(images: tuple[Tensor, Tensor]) -> Iterator[Callable[..., Trial]]:
    """Make a trial of some of the networks plain and defended, with all attacks; they stay frozen."""
    with ExitStack() as stack:

        def make(*names: str, **settings: Any) -> Trial:
            networks = {name: network(seed) for seed, name in enumerate(names or ("plain", "defended"))}
            for one in networks.values():
                stack.enter_context(frozen(one))
            return Trial.of(networks, *images, list(ATTACKS), **settings)

        yield make
