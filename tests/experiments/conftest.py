"""What the tests of experiments share: a scale at which a cell takes a second."""

from __future__ import annotations

import pytest

from robustmetric.experiments.cells import Scale


@pytest.fixture
def tiny() -> Scale:
    return Scale(epochs=1, steps=1, queries=8, batches=2, changes={"batch": 250, "dim": 16})
