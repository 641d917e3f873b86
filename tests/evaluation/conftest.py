"""A small world in which an evaluation takes moments: 40 images in 5 classes and a network of two layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.evaluation import Check, Data, Evaluation, Plan, Record, Settings, Subject

OF_DATA = ("gallery", "own", "cameras", "classes", "files", "skipped")
OF_SUBJECT = ("surrogate", "name", "weights", "train_classes")
Tiny = Callable[..., Evaluation]
Evaluated = Callable[..., Record]


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


@pytest.fixture(scope="session")
def tiny(images: Tensor, labels: Tensor) -> Tiny:
    """Set up an evaluation of the small world; what is given replaces its parts and settings."""

    def make(model: nn.Module | None = None, **changes: Any) -> Evaluation:
        given: dict[str, Any] = {"eps": 16 / 255, "alpha": 4 / 255, "steps": 8, "checks": "none", "batch": 16}
        given |= {"images": images, "labels": labels, "data": "tiny", **changes}

        def some(names: Any) -> dict[str, Any]:
            return {name: given.pop(name) for name in names if name in given}

        plan, how = Plan.make(**some(Settings.model_fields)), some(OF_SUBJECT)
        data = Data(given.pop("images"), given.pop("labels"), name=given.pop("data"), **some(OF_DATA))
        return Evaluation(Subject(model or make_network(), data, **how), plan, **given)

    return make


@pytest.fixture(scope="session")
def evaluated(tiny: Tiny) -> Evaluated:
    """Evaluate the small world; what is given replaces its parts and settings."""
    return lambda model=None, **changes: tiny(model, **changes).run()


def values(evaluation: Evaluation) -> dict[str, Tensor]:
    """All per-query values of an evaluation that was run, by attack and name."""
    return {
        f"{name}/{key}": value for name, found in evaluation.found.items() for key, value in found.items()
    }


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-7, equal_nan=True, msg=name)


def check_of(record: Record, name: str) -> Check:
    return next(check for check in record.checks if check.name == name)
