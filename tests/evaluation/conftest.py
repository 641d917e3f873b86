"""A small world in which an evaluation takes moments: 40 images in 5 classes and a network of two layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.evaluation import Evaluation, Images, Plan, Record
from robustmetric.evaluation.data import Data, Subject
from robustmetric.evaluation.job import Progress
from robustmetric.evaluation.plan import Settings


@pytest.fixture(scope="session")
def images() -> Tensor:
    """40 images (40, 1, 6, 6) of 8 bits, eight around each of five others."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.rand(5, 1, 6, 6, generator=generator)
    noise = torch.randn(40, 1, 6, 6, generator=generator)
    return ((middle[torch.arange(40) % 5] + 0.2 * noise).clamp(0, 1) * 255).round() / 255


@pytest.fixture(scope="session")
def labels() -> Tensor:
    """The classes (40,) of the images."""
    return torch.arange(40) % 5


def make_network(seed: int = 0) -> nn.Sequential:
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.Tanh(), nn.Linear(32, 16))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    return network.eval()


@pytest.fixture
def network() -> nn.Sequential:
    """A network (36 pixels to 16 numbers) in evaluation mode, the same in each test."""
    return make_network()


def evaluation_of(
    model: nn.Module,
    images: Images,
    labels: Tensor,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
    **given: Any,
) -> Evaluation:
    """Set up an evaluation from what belongs to its subject and to its plan together."""
    settings = {name: given.pop(name) for name in [*given] if name in Settings.model_fields}
    network = {name: given.pop(name) for name in [*given] if name in ("surrogate", "name", "train_classes")}
    data = Data(images, labels, name=given.pop("data", "images"), **given)
    return Evaluation(Subject(model, data, **network), Plan.make(**settings), out, progress, report)


@pytest.fixture(scope="session")
def tiny(images: Tensor, labels: Tensor) -> Callable[..., Evaluation]:
    """Set up an evaluation of the small world; what is given replaces its parts and settings."""

    def make(model: nn.Module | None = None, **changes: Any) -> Evaluation:
        settings: dict[str, Any] = {"eps": 16 / 255, "alpha": 4 / 255, "steps": 8, "checks": "none"}
        settings |= {"images": images, "labels": labels, "batch": 16, "data": "tiny", **changes}
        return evaluation_of(make_network() if model is None else model, **settings)

    return make


@pytest.fixture(scope="session")
def evaluated(tiny: Callable[..., Evaluation]) -> Callable[..., Record]:
    """Evaluate the small world; what is given replaces its parts and settings."""
    return lambda model=None, **changes: tiny(model, **changes).run()
