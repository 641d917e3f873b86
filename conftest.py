"""For all tests, those in docstrings included."""

import importlib
from collections.abc import Iterator

import pytest

from robustmetric.registry import KINDS, registry

# Parts register when their module is imported; were that first in a test, they would be forgotten with it.
for part in ("attacks", "data", "defenses", "evaluation", "models", "training.loggers"):
    importlib.import_module(f"robustmetric.{part}")


@pytest.fixture(autouse=True)
def _registered_parts() -> Iterator[None]:
    """Forget what a test or an example registers."""
    before = {kind: dict(registry(kind)) for kind in KINDS}
    yield
    for kind, known in before.items():
        registry(kind).clear()
        registry(kind).update(known)
