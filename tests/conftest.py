"""Shared by all tests: the number of threads, the golden figures, real images."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.helpers.browser import LEFT_OUT

GOLDEN = Path(__file__).parent / "golden"

# The tests run in two processes; more threads than cores would only get in each other's way.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))

# No test looks at a clock: a busy machine takes many times as long. `make test-all` explores new examples.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", patient)
settings.register_profile("same", patient, derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="DIR", help="keep the screenshots of tests in a browser")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were left out for want of a browser, and how to get it."""
    reasons = Counter(
        reason
        for report in terminalreporter.getreports("skipped")
        if LEFT_OUT in (reason := str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else "")
    )
    for reason, count in reasons.items():
        told = reason.partition(LEFT_OUT)
        terminalreporter.write_line(f"{count} tests are left out {''.join(told[1:])}", yellow=True, bold=True)


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Torch says most things once in a process: here it says them each time, and a warning is an error."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.fixture(scope="session")
def golden() -> dict[str, NDArray[Any]]:
    """What the reference implementation computes on a fixed tiny network (see golden/README.md)."""
    with np.load(GOLDEN / "fashion-tiny.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def golden_network(golden: dict[str, NDArray[Any]]) -> nn.Sequential:
    """The tiny network of the golden figures, in training mode."""
    network = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 64),
    )
    network.load_state_dict(
        {name[4:]: torch.tensor(value) for name, value in golden.items() if name[:4] == "net/"}
    )
    return network


@pytest.fixture
def pairs(golden: dict[str, NDArray[Any]]) -> tuple[Tensor, Tensor]:
    """A batch of 32 pairs of Fashion-MNIST images (64, 1, 28, 28) and their labels (64,)."""
    return torch.tensor(golden["HM/images"]) / 255, torch.tensor(golden["HM/labels"])
